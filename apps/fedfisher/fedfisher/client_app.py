"""A client that trains to the end and uploads its model with its Fisher."""

import logging

from flwr.app import Context

from fedfisher.my_data import on_node
from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.secure import SecureSumsMod

logger = logging.getLogger("flwr")


def client_fn(context: Context) -> FisherClient:
    """Build the client of the node's data."""
    config, data = context.run_config, on_node(context)
    epochs = int(config["local-epochs"])

    def on_epoch(epoch: int, loss: float) -> None:
        if epoch % max(1, epochs // 3) == 0:
            logger.info("epoch %s of %s, loss %.3f", epoch, epochs, loss)

    train = LocalSGD(
        epochs=epochs,
        lr=float(config["lr"]),
        momentum=float(config["momentum"]),
        label_smoothing=float(config["label-smoothing"]),
        swa_epochs=int(config["swa-epochs"]),
        on_epoch=on_epoch,
    )
    loader = data.train_loader(int(config["batch-size"]))
    return FisherClient(data.model, loader, train_fn=train)


app = make_client_app(client_fn, mods=[SecureSumsMod()])
