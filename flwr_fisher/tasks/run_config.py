"""The task that a Flower app's run-config describes."""

from collections.abc import Mapping
from typing import Any

from flwr_fisher.tasks.task import Task, load_task

__all__ = ["task_from_run_config"]


def task_from_run_config(config: Mapping[str, Any], num_partitions: int) -> Task:
    """Load the task named by the keys that all apps share.

    Parameters
    ----------
    config : Mapping[str, Any]
        ``context.run_config``, with the keys ``dataset``, ``data-dir`` (empty for the
        default), ``model``, ``partition``, ``alpha`` and ``seed``.
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
    )
