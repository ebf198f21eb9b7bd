"""A client that trains to the end and uploads its model with its Fisher."""

import logging

from flwr.app import Context

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.tasks import task_from_run_config

logger = logging.getLogger("flwr")


def client_fn(context: Context) -> FisherClient:
    """Build the client that holds the node's partition."""
    config, node = context.run_config, context.node_config
    partition, clients = int(node["partition-id"]), int(node["num-partitions"])
    task = task_from_run_config(config, clients)
    epochs = int(config["local-epochs"])

    def on_epoch(epoch: int, loss: float) -> None:
        if epoch % max(1, epochs // 3) == 0:
            logger.info(
                "Client %s: epoch %s/%s, loss %.3f", partition, epoch, epochs, loss
            )

    train = LocalSGD(
        epochs=epochs,
        lr=float(config["lr"]),
        momentum=float(config["momentum"]),
        label_smoothing=float(config["label-smoothing"]),
        swa_epochs=int(config["swa-epochs"]),
        on_epoch=on_epoch,
    )
    loader = task.train_loader(partition, int(config["batch-size"]))
    return FisherClient(task.make_model(), loader, train_fn=train)


app = make_client_app(client_fn)
