"""Loading a task, by arguments or by what a Flower app's run-config says."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from flwr_fisher.errors import ConfigurationError, check_range, check_whole
from flwr_fisher.tasks.datasets import load_dataset
from flwr_fisher.tasks.partitions import PARTITIONS, balanced_subset, partition_indices
from flwr_fisher.tasks.task import Task


def load_task(
    *,
    dataset: str,
    data_dir: str | Path | None = None,
    model: str,
    partition: str,
    num_partitions: int,
    seed: int = 0,
    validation: int = 0,
    hold_out: bool = True,
    max_examples: int = 0,
    **options: Any,
) -> Task:
    """Load a data set, share it out, and check that the model fits it.

    The result is a function of the arguments: server and clients that call this with
    the same ones agree, in any process.

    Parameters
    ----------
    dataset, data_dir
        As for :func:`~flwr_fisher.tasks.load_dataset`.
    model : str
        A name for :func:`~flwr_fisher.tasks.make_model`.
    partition : str
        A name for :func:`~flwr_fisher.tasks.make_partitioner`.
    num_partitions : int
        The number of clients.
    seed : int
        Seed of the partition, the validation examples and the initial weights.
    validation : int
        How many training examples, drawn uniformly, to keep for validation.
    hold_out : bool
        Whether the clients go without the validation examples. FedFisher's own
        experiments leave them with the clients.
    max_examples : int
        How many training examples to share out, as many of each class as may be, drawn
        by the seed; 0 for all.
    **options
        The partition's: ``alpha``, ``classes_per_client``, ``shards_per_client``.

    Returns
    -------
    Task
        Ready to make models and loaders.

    Raises
    ------
    ConfigurationError
        If a name is unknown (:class:`~flwr_fisher.errors.UnknownNameError`), a number
        is out of range, or the model or the partition does not fit the data.
    DataError
        If data is missing or damaged, or a client would have too few examples.

    Examples
    --------
    >>> task = load_task(
    ...     dataset="digits", model="logistic", partition="iid", num_partitions=3
    ... )
    >>> task.num_examples(0), task.label_histogram().shape
    (479, torch.Size([3, 10]))
    """
    check_whole("max_examples", max_examples, 0)
    data = load_dataset(dataset, data_dir)
    if partition == "by-document" and not data.train.is_text:
        others = ", ".join(name for name in PARTITIONS if name != partition)
        raise ConfigurationError(
            f"partition 'by-document' is for a text, and dataset {dataset!r} has no"
            f" documents: use dataset 'language', or one of {others}"
        )
    held = validation, hold_out, max_examples
    options |= {"name": partition, "num_partitions": num_partitions, "seed": seed}
    kept, parts = _share_out(dataset, data_dir, *held, **options)
    some = data.train.subset(list(kept)) if kept else None
    task = Task(data=data, parts=parts, model=model, seed=seed, validation=some)
    task.make_model()  # a wrong name or shape should fail here, not on a client
    return task


# A client app calls `load_task` for every message, and sharing out takes a second.
@lru_cache(maxsize=4)
def _share_out(
    dataset: str,
    data_dir: str | Path | None,
    validation: int,
    hold_out: bool,
    max_examples: int,
    seed: int,
    **partition: Any,
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Choose the validation examples, then the clients' from what remains."""
    targets = load_dataset(dataset, data_dir).train.targets
    if not 0 <= validation < len(targets):
        raise ConfigurationError(
            f"validation must be in 0…{len(targets) - 1}, not {validation}"
        )
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    kept = order[:validation]
    rest = order[validation:].sort().values if hold_out else torch.arange(len(order))
    if max_examples:
        rest = rest[balanced_subset(targets[rest], max_examples, seed)]
    shares = partition_indices(targets[rest], seed=seed, **partition)
    parts = tuple(tuple(rest[torch.tensor(share)].tolist()) for share in shares)
    return tuple(kept.tolist()), parts


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
