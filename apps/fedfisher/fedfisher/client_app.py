"""A client that trains to the end and uploads its model with its Fisher."""

import logging

from flwr.app import Context

from fedfisher.task import Net, load_data
from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.secure import SecureSumsMod

logger = logging.getLogger("flwr")


def client_fn(context: Context) -> FisherClient:
    """Build the client of the node's data."""
    config = context.run_config
    epochs = int(config["local-epochs"])
    partition = context.node_config.get("partition-id")
    name = "this node" if partition is None else f"partition-{partition}"

    def on_epoch(epoch: int, loss: float) -> None:
        if epoch % max(1, epochs // 3) == 0:
            logger.info("%s: epoch %s of %s, loss %.3f", name, epoch, epochs, loss)

    train = LocalSGD(
        epochs=epochs,
        lr=float(config["lr"]),
        momentum=float(config["momentum"]),
        on_epoch=on_epoch,
    )
    return FisherClient(Net(), load_data(context), train_fn=train)


app = make_client_app(client_fn, mods=[SecureSumsMod()])
