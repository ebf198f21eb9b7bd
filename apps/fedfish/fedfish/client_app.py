"""A client that trains and uploads its model with its Fisher."""

from flwr.app import Context

from fedfish.task import Net, load_data
from flwr_fisher.client import FisherClient, LocalSGD, make_client_app


def client_fn(context: Context) -> FisherClient:
    """Build the client of the node's data."""
    config = context.run_config
    train = LocalSGD(
        epochs=int(config["local-epochs"]),
        lr=float(config["lr"]),
        momentum=float(config["momentum"]),
    )
    return FisherClient(Net(), load_data(context), train_fn=train)


app = make_client_app(client_fn)
