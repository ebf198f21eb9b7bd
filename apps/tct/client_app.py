"""A client that trains, and then solves its share of a regression on features."""

from flwr.app import Context

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.tasks import task_from_run_config


def client_fn(context: Context) -> FisherClient:
    """Build the client that holds the node's partition."""
    config, node = context.run_config, context.node_config
    task = task_from_run_config(config, int(node["num-partitions"]))
    train = LocalSGD(
        epochs=int(config["local-epochs"]),
        lr=float(config["lr"]),
        momentum=float(config["momentum"]),
    )
    loader = task.train_loader(int(node["partition-id"]), int(config["batch-size"]))
    return FisherClient(
        task.make_model(),
        loader,
        train_fn=train,
        state_dir=str(config["state-dir"]) or None,
    )


app = make_client_app(client_fn)
