"""Shares of a training set: which client holds which examples."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, DataError
from flwr_fisher.extras import extra
from flwr_fisher.tasks.partitioners import make_partitioner

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner


_MIN_EXAMPLES = 2


def partition_indices(
    targets: Tensor,
    name: str,
    *,
    num_partitions: int,
    alpha: float = 0.1,
    classes_per_client: int = 2,
    shards_per_client: int = 2,
    seed: int = 0,
) -> list[list[int]]:
    """Share out examples among clients, as a function of the arguments alone.

    Every example goes to one client, except that ``shards`` leaves out what does not
    fill its equal shards, and ``classes-per-client`` the classes that no client has.

    Parameters
    ----------
    targets : Tensor
        The examples' labels, int64 ``[n]``; for a text, their documents.
    name : str
        One of ``flwr_fisher.tasks.PARTITIONS``, explained in
        :func:`~flwr_fisher.tasks.make_partitioner`.
    num_partitions : int
        The number of clients.
    alpha : float
        Concentration of the two Dirichlet partitions.
    classes_per_client : int
        How many classes a client has, in ``classes-per-client``.
    shards_per_client : int
        How many shards a client has, in ``shards``.
    seed : int
        Seed of all draws.

    Returns
    -------
    list[list[int]]
        For each client, the positions of its examples in `targets`.

    Raises
    ------
    UnknownNameError
        If the name is not known.
    ConfigurationError
        If a number is out of range.
    DataError
        If a client would have fewer than two examples.

    Warns
    -----
    UserWarning
        If no client holds a class that `targets` has.

    Examples
    --------
    >>> parts = partition_indices(torch.arange(8) % 2, "iid", num_partitions=2)
    >>> [len(part) for part in parts], sorted(parts[0] + parts[1])
    ([4, 4], [0, 1, 2, 3, 4, 5, 6, 7])
    """
    partitioner = make_partitioner(
        name,
        num_partitions=num_partitions,
        alpha=alpha,
        classes_per_client=classes_per_client,
        shards_per_client=shards_per_client,
        seed=seed,
    )
    num_classes = len(set(targets.tolist()))
    if name == "classes-per-client" and classes_per_client > num_classes:
        raise ConfigurationError(
            f"classes_per_client must be ≤ {num_classes}, the number of classes,"
            f" not {classes_per_client}"
        )
    setting = f"partition {name!r} (alpha {alpha}, seed {seed})"
    # First, because the partitioners fail on this in as many ways as there are.
    if len(targets) < _MIN_EXAMPLES * num_partitions:
        raise _too_few(setting, f"{len(targets)} examples for {num_partitions} clients")
    parts = _read_partitions(partitioner, targets, name, num_partitions, seed)
    _check(parts, targets, setting)
    return parts


def _read_partitions(
    partitioner: "Partitioner", targets: Tensor, name: str, count: int, seed: int
) -> list[list[int]]:
    with extra("tasks"):
        from datasets import Dataset

    columns = {"label": targets.tolist(), "index": list(range(len(targets)))}
    rows = Dataset.from_dict(columns)
    # Flower's IID partitioner cuts the rows as they come.
    partitioner.dataset = rows.shuffle(seed=seed) if name == "iid" else rows
    with warnings.catch_warnings():
        # Their advice on unused classes names an option that does not exist.
        warnings.filterwarnings("ignore", message=".*will NOT be used")
        # datasets' sort calls pyarrow in a way that pyarrow 25 deprecates.
        warnings.filterwarnings("ignore", message=".*null_placement")
        try:
            return [partitioner.load_partition(i)[:]["index"] for i in range(count)]
        except ValueError as error:
            raise DataError(f"partition {name!r}: {error}") from error


def _check(parts: Sequence[Sequence[int]], targets: Tensor, setting: str) -> None:
    for client, part in enumerate(parts):
        if len(part) < _MIN_EXAMPLES:
            raise _too_few(setting, f"client {client} has {len(part)} example(s)")
    used = [index for part in parts for index in part]
    if len(set(used)) != len(used):
        raise DataError(f"{setting}: an example has gone to two clients")
    missing = sorted(set(targets.tolist()) - set(targets[used].tolist()))
    if missing:
        warnings.warn(
            f"{setting}: no client holds the classes {', '.join(map(str, missing))};"
            " raise the number of clients or of classes (shards) a client",
            stacklevel=3,
        )


def _too_few(setting: str, what: str) -> DataError:
    return DataError(
        f"{setting}: {what}, and each needs at least {_MIN_EXAMPLES}; try a larger"
        " alpha, fewer clients or another seed"
    )


def label_histogram(
    targets: Tensor, parts: Sequence[Sequence[int]], num_classes: int
) -> Tensor:
    """Count every client's examples of every class.

    Parameters
    ----------
    targets : Tensor
        All labels, int64 ``[n]``.
    parts : Sequence[Sequence[int]]
        For each client, the positions of its examples.
    num_classes : int
        The number of classes, C.

    Returns
    -------
    Tensor
        Counts, int64 ``[clients, C]``.

    Examples
    --------
    >>> label_histogram(torch.tensor([0, 1, 1]), [[0, 2], [1]], 2).tolist()
    [[1, 1], [0, 1]]
    """
    indices = [torch.tensor(part, dtype=torch.int64) for part in parts]
    return torch.stack([targets[i].bincount(minlength=num_classes) for i in indices])


def balanced_subset(targets: Tensor, count: int, seed: int) -> Tensor:
    """Return positions of so many examples, of each class as nearly alike as may be.

    Parameters
    ----------
    targets : Tensor
        The examples' classes, int64 ``[n]``.
    count : int
        At most so many; where a class has too few, others have more.
    seed : int
        Of the choice.

    Returns
    -------
    Tensor
        Int64, in order.

    Examples
    --------
    >>> targets = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2, 2])
    >>> targets[balanced_subset(targets, 5, seed=0)].tolist()
    [0, 0, 1, 2, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(targets), generator=generator)
    # An example's turn is its rank within its class; those of the first turns are in.
    by_class = order[targets[order].sort(stable=True).indices]
    sizes = targets.bincount()
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    turns = torch.arange(len(targets)) - starts
    return by_class[turns.sort(stable=True).indices[:count]].sort().values
