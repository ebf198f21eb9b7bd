"""Loading a task: a data set by name, shared out, with a model by name."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from flwr_fisher.errors import ConfigurationError, check_whole
from flwr_fisher.tasks.datasets import load_dataset
from flwr_fisher.tasks.partitioners import PARTITIONS
from flwr_fisher.tasks.partitions import balanced_subset, partition_indices
from flwr_fisher.tasks.task import Task
from flwr_fisher.tasks.texts import TextData


def load_task(
    *,
    dataset: str,
    data_dir: str | Path | None = None,
    model: str,
    partition: str,
    alpha: float = 0.1,
    num_partitions: int,
    seed: int = 0,
    classes_per_client: int = 2,
    shards_per_client: int = 2,
    validation: int = 0,
    hold_out: bool = True,
    max_examples: int = 0,
) -> Task:
    """Load a data set, share it out, and check that the model fits it.

    The result is a function of the arguments: server and clients that call this with
    the same ones agree, in any process.

    Parameters
    ----------
    dataset : str
        A name for :func:`~flwr_fisher.tasks.load_dataset`.
    data_dir : str | Path | None
        Where the data set's files are; an absolute path.
    model : str
        A name for :func:`~flwr_fisher.tasks.make_model`.
    partition : str
        A name for :func:`~flwr_fisher.tasks.partition_indices`.
    alpha : float
        Concentration of a Dirichlet partition.
    num_partitions : int
        The number of clients.
    seed : int
        Seed of the partition, the validation examples and the initial weights.
    classes_per_client : int
        How many classes a client has, in ``classes-per-client``.
    shards_per_client : int
        How many shards a client has, in ``shards``.
    validation : int
        How many training examples, drawn uniformly, to keep for validation.
    hold_out : bool
        Whether the clients go without the validation examples. FedFisher's own
        experiments leave them with the clients.
    max_examples : int
        How many training examples to share out, as many of each class as may be, drawn
        by the seed; 0 for all.

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
    if partition == "by-document" and not isinstance(data, TextData):
        others = ", ".join(name for name in PARTITIONS if name != partition)
        raise ConfigurationError(
            f"partition 'by-document' is for a text, and dataset {dataset!r} has no"
            f" documents: use dataset 'language', or one of {others}"
        )
    kept, parts = _share_out(
        dataset,
        data_dir,
        validation,
        hold_out,
        seed,
        max_examples,
        name=partition,
        num_partitions=num_partitions,
        alpha=alpha,
        classes_per_client=classes_per_client,
        shards_per_client=shards_per_client,
    )
    held = data.train.subset(list(kept)) if kept else None
    task = Task(data=data, parts=parts, model=model, seed=seed, validation=held)
    task.make_model()  # a wrong name or shape should fail here, not on a client
    return task


# A client app calls `load_task` for every message, and sharing out takes a second.
@lru_cache(maxsize=4)
def _share_out(
    dataset: str,
    data_dir: str | Path | None,
    validation: int,
    hold_out: bool,
    seed: int,
    max_examples: int,
    **partition: Any,
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Choose the validation examples, then the clients' from what remains."""
    targets = load_dataset(dataset, data_dir).train.classes
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
