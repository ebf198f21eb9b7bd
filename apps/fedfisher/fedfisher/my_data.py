"""The data of this app and the model for them: change this file for your own."""

from flwr.app import Context

from flwr_fisher.tasks import NodeTask, Task, node_task, server_task


def on_node(context: Context) -> NodeTask:
    """Return what a node trains on, and the model.

    In a simulation that is a share of `dataset`; on a SuperNode with data of its own,
    what lies at its data-path. Any Dataset of PyTorch's and any module will do, too:
    ``NodeTask(MyDataset(context.node_config["data-path"]), MyNet())``.
    """
    return node_task(context.run_config, context.node_config)


def on_server(context: Context, num_nodes: int) -> Task:
    """Return the model, and the test examples on which the server scores it."""
    return server_task(context.run_config, num_nodes)
