"""A client that computes gradients and Hessian products for FAGH, or trains."""

from flwr.app import Context

from fagh.my_data import on_node
from flwr_fisher.client import FisherClient, LocalSGD, make_client_app


def client_fn(context: Context) -> FisherClient:
    """Build the client of the node's data."""
    config, data = context.run_config, on_node(context)
    train = LocalSGD(
        epochs=int(config["local-epochs"]),
        lr=float(config["lr"]),
        momentum=float(config["momentum"]),
    )
    loader = data.train_loader(int(config["batch-size"]))
    return FisherClient(
        data.model,
        loader,
        train_fn=train,
        state_dir=str(config["state-dir"]) or None,
    )


app = make_client_app(client_fn)
