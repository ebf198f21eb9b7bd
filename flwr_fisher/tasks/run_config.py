"""What a Flower app's run-config describes: the task, and who trains in a round."""

from collections.abc import Mapping
from typing import Any

from flwr_fisher.errors import ConfigurationError, check_range
from flwr_fisher.tasks.load import load_task
from flwr_fisher.tasks.task import Task


def task_from_run_config(config: Mapping[str, Any], num_partitions: int) -> Task:
    """Load the task named by the keys that all apps share.

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
        See :func:`~flwr_fisher.tasks.load_task`, also for what is raised.
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
    """Return FedAvg's keywords that sample as many clients as a round is to have.

    Parameters
    ----------
    config : Mapping[str, Any]
        ``context.run_config``, with the key ``clients-per-round``.
    clients : int
        How many there are to sample from. If they are fewer, all take part.

    Returns
    -------
    dict[str, Any]
        ``fraction_train``, and ``min_train_nodes``: half of the round's clients.

    Raises
    ------
    ConfigurationError
        If there is no client, or none is wanted.

    Examples
    --------
    >>> cohort_from_run_config({"clients-per-round": 64}, clients=20)
    {'fraction_train': 1.0, 'min_train_nodes': 10}
    """
    wanted = int(config["clients-per-round"])
    check_range("clients-per-round", wanted, 1)
    if clients < 1:
        raise ConfigurationError(
            "no client is left to train: start more SuperNodes, --federation-config "
            '"num-supernodes=20", or hold out fewer'
        )
    size = min(wanted, clients)
    # Strategies round down, so a half more keeps rounding errors from costing a client.
    fraction = min(1.0, (size + 0.5) / clients)
    return {"fraction_train": fraction, "min_train_nodes": max(1, size // 2)}
