"""The tasks of nodes and server, from an app's run-config and node-config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from flwr_fisher.errors import ConfigurationError, check_range
from tasks.examples import Examples, Splits
from tasks.kinds import kind_of
from tasks.own_data import load_own
from tasks.partitions import balanced_subset
from tasks.task import Task, batches, load_task


@dataclass(frozen=True, eq=False)
class NodeTask:
    """A node's task: its training examples and the model.

    Parameters
    ----------
    examples : Dataset
        Any data set of PyTorch with inputs and targets.
    model : nn.Module
        The model, with initial weights, which the server's weights will replace.
    """

    examples: Dataset[Any]
    model: nn.Module

    def train_loader(self, batch_size: int) -> DataLoader[Any]:
        """Return batches of the examples, in a new order each epoch.

        The order comes from torch's global generator, so that seeding it repeats it.

        Parameters
        ----------
        batch_size : int
            Examples a batch; the last one may be smaller.
        """
        if isinstance(self.examples, Examples):
            return batches(self.examples, RandomSampler(self.examples), batch_size)
        return DataLoader(self.examples, batch_size, shuffle=True)


def node_task(config: Mapping[str, Any], node_config: Mapping[str, Any]) -> NodeTask:
    """Return a node's task: a share of a data set in a simulation, or its own data.

    Parameters
    ----------
    config : Mapping[str, Any]
        ``context.run_config``, as for :func:`~tasks.task_from_run_config`.
        For nodes with data of their own, ``dataset`` describes these data
        (:func:`~tasks.kind_of`), and ``max-examples`` applies to each node.
    node_config : Mapping[str, Any]
        ``context.node_config``: ``partition-id`` and ``num-partitions``, which a
        simulation gives, or ``data-path``
        (:func:`~tasks.load_own`).

    Raises
    ------
    ConfigurationError
        If it has both, or neither; also as raised by the functions that it calls.
    """
    path = node_config.get("data-path")
    if path is not None and "partition-id" in node_config:
        raise ConfigurationError(
            "this node has both a data-path (its own data) and a partition-id (a share "
            "of the data set): leave one of them out of --node-config"
        )
    if path is not None:
        own = _own_task(config, str(path))
        examples = own.data.train
        if count := int(config.get("max-examples", 0)):
            some = balanced_subset(examples.targets, count, own.seed)
            examples = examples.subset(some.tolist())
        return NodeTask(examples, own.make_model())
    if "partition-id" not in node_config:
        raise ConfigurationError(
            "this node has no data: start it with --node-config "
            "\"data-path='/where/they/are'\""
        )
    task = task_from_run_config(config, int(node_config["num-partitions"]))
    partition = int(node_config["partition-id"])
    return NodeTask(task.train_images(partition), task.make_model())


def server_task(config: Mapping[str, Any], num_nodes: int) -> Task:
    """Return the server's task: the model and test examples.

    Parameters
    ----------
    config : Mapping[str, Any]
        ``context.run_config``. Its ``test-path`` is a path to test examples on the
        server's disk, in a form of :func:`~tasks.load_own`. If it is empty,
        the test examples are the test split of ``dataset``.
    num_nodes : int
        How many nodes share the data set in a simulation.

    Returns
    -------
    Task
        The server's task. With a ``test-path``, the clients' shares are not known:
        ``parts`` is empty, and the training examples are the test examples.
    """
    if path := config.get("test-path"):
        return _own_task(config, str(path))
    return task_from_run_config(config, num_nodes)


def _own_task(config: Mapping[str, Any], path: str) -> Task:
    """Return a task with examples on this disk."""
    kind = kind_of(str(config["dataset"]))
    own = load_own(path, kind)
    data = Splits(own, own, kind.class_names)
    return Task(data, parts=(), model=str(config["model"]), seed=int(config["seed"]))


def task_from_run_config(config: Mapping[str, Any], num_partitions: int) -> Task:
    """Load the task that the apps' common keys name.

    Parameters
    ----------
    config : Mapping[str, Any]
        ``context.run_config``, with the keys ``dataset``, ``data-dir`` (empty for the
        default), ``model``, ``partition``, ``alpha`` and ``seed``; for a quick try,
        ``max-examples``: how many training examples all clients share, 0 for all.
    num_partitions : int
        The number of SuperNodes.

    Returns
    -------
    Task
        See :func:`~tasks.load_task`, also for what is raised.
    """
    return load_task(
        dataset=str(config["dataset"]),
        data_dir=config["data-dir"] or None,
        model=str(config["model"]),
        partition=str(config["partition"]),
        alpha=float(config["alpha"]),
        num_partitions=num_partitions,
        seed=int(config["seed"]),
        max_examples=int(config.get("max-examples", 0)),
    )


def cohort_from_run_config(config: Mapping[str, Any], clients: int) -> dict[str, Any]:
    """Return FedAvg's sampling keywords for a number of clients in a round.

    Parameters
    ----------
    config : Mapping[str, Any]
        ``context.run_config``, with the key ``clients-per-round``.
    clients : int
        How many clients there are to sample from. If they are fewer than
        ``clients-per-round``, all take part.

    Returns
    -------
    dict[str, Any]
        ``fraction_train``, and ``min_train_nodes``: half of the round's clients.

    Raises
    ------
    ConfigurationError
        If there is no client, or ``clients-per-round`` is below 1.

    Examples
    --------
    >>> cohort_from_run_config({"clients-per-round": 64}, clients=20)
    {'fraction_train': 1.0, 'min_train_nodes': 10}
    """
    wanted = int(config["clients-per-round"])
    check_range("clients-per-round", wanted, 1)
    if clients < 1:
        raise ConfigurationError(
            "no client is left for training: start more SuperNodes, "
            '--federation-config "num-supernodes=20", or hold out fewer'
        )
    size = min(wanted, clients)
    # Strategies round down; a half more keeps rounding errors from losing a client.
    fraction = min(1.0, (size + 0.5) / clients)
    return {"fraction_train": fraction, "min_train_nodes": max(1, size // 2)}
