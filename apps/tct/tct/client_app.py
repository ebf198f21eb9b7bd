"""A client that trains, and then solves its part of a regression on features."""

from flwr.app import Context

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from tct.task import Net, load_data


def client_fn(context: Context) -> FisherClient:
    """Build the client of the node's data."""
    config = context.run_config
    train = LocalSGD(
        epochs=int(config["local-epochs"]),
        lr=float(config["lr"]),
        momentum=float(config["momentum"]),
    )
    state_dir = str(config["state-dir"]) or None
    return FisherClient(Net(), load_data(context), train_fn=train, state_dir=state_dir)


app = make_client_app(client_fn)
