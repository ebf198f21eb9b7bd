"""The partition of a training set over clients."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flwr_fisher.errors import (
    ConfigurationError,
    DataError,
    check_known,
    check_positive,
    check_whole,
    extra,
)

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

PARTITIONS = (
    "iid",
    "dirichlet-client",
    "dirichlet-class",
    "classes-per-client",
    "shards",
    "by-document",
)
"""The names that :func:`make_partitioner` knows."""

_MIN_EXAMPLES = 2


def make_partitioner(
    name: str,
    *,
    num_partitions: int,
    alpha: float = 0.1,
    classes_per_client: int = 2,
    shards_per_client: int = 2,
    seed: int = 0,
) -> "Partitioner":
    """Return a partitioner of flwr-datasets or of this package, for a column ``label``.

    - ``iid``: equal parts; the caller shuffles the rows first.
    - ``dirichlet-client``: each client draws class proportions (FedFisher).
    - ``dirichlet-class``: each class draws client proportions (FAGH, TCT).
    - ``classes-per-client``: each client has a fixed number of classes (TCT).
    - ``shards``: rows sorted by label are cut into shards, dealt to clients (FAGH).
    - ``by-document``: for a text, whose labels are its documents. Each is at one
      client, and clients have about as many examples.

    Parameters
    ----------
    name : str
        One of :data:`PARTITIONS`.
    num_partitions : int
        The number of clients.
    alpha : float
        Concentration of the two Dirichlet partitions, above zero.
    classes_per_client, shards_per_client : int
        How many classes or shards a client has, in the partitions of these names.
    seed : int
        Seed of the draws, from 0 up.

    Raises
    ------
    UnknownNameError
        If the name is not known.
    ConfigurationError
        If a number is out of range.
    """
    check_known("partition", name, PARTITIONS)
    check_whole("num_partitions", num_partitions, 1)
    check_whole("classes_per_client", classes_per_client, 1)
    check_whole("shards_per_client", shards_per_client, 1)
    check_whole("seed", seed, 0)
    check_positive("alpha", alpha)
    with extra("tasks"):
        from flwr_datasets import partitioner as flower

    from tasks import partitioners as own

    # float: their partitioner refuses other number types. Size 0: otherwise it would
    # redraw, which changes the distribution; this file checks for small clients.
    alpha, ours = float(alpha), own.ColumnPartitioner
    makers: dict[str, Callable[..., Partitioner]] = {
        "dirichlet-client": partial(ours, partial(own.dirichlet_client, alpha=alpha)),
        "dirichlet-class": partial(
            flower.DirichletPartitioner, alpha=alpha, min_partition_size=0
        ),
        # With at least as many clients as classes, this mode uses every class.
        "classes-per-client": partial(
            flower.PathologicalPartitioner,
            num_classes_per_partition=classes_per_client,
            class_assignment_mode="first-deterministic",
        ),
        "shards": partial(
            flower.ShardPartitioner, num_shards_per_partition=shards_per_client
        ),
        "by-document": partial(ours, own.by_document),
    }
    if name == "iid":
        return flower.IidPartitioner(num_partitions)
    by = {"num_partitions": num_partitions, "partition_by": "label", "seed": seed}
    return makers[name](**by)


def partition_indices(
    targets: Tensor, name: str, *, num_partitions: int, seed: int = 0, **options: Any
) -> list[list[int]]:
    """Distribute examples over clients, as a function of the arguments alone.

    Every example goes to one client, with two exceptions: ``shards`` leaves out
    examples that do not fill its equal shards, and ``classes-per-client`` leaves out
    classes that no client has.

    Parameters
    ----------
    targets : Tensor
        The examples' labels, int64 ``[n]``; for a text, their documents.
    name, num_partitions, seed, **options
        As for :func:`make_partitioner`.

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
        name, num_partitions=num_partitions, seed=seed, **options
    )
    num_classes = len(set(targets.tolist()))
    if (wanted := options.get("classes_per_client", 2)) > num_classes and (
        name == "classes-per-client"
    ):
        raise ConfigurationError(
            f"classes_per_client must be ≤ {num_classes}, the number of classes,"
            f" not {wanted}"
        )
    mixes = name.startswith("dirichlet")
    alpha = f"alpha {options.get('alpha', 0.1)}, " if mixes else ""
    setting = f"partition {name!r} ({alpha}seed {seed})"
    # First, because each partitioner fails on this in its own way.
    if len(targets) < _MIN_EXAMPLES * num_partitions:
        few = f"{len(targets)} examples for {num_partitions} clients"
        raise _too_few(setting, few, "fewer clients, or more examples")
    parts = _read_partitions(partitioner, targets, name, num_partitions, seed)
    out = f"{'a larger alpha, ' if mixes else ''}fewer clients or another seed"
    _check(parts, targets, setting, out)
    return parts


def _read_partitions(
    partitioner: "Partitioner", targets: Tensor, name: str, count: int, seed: int
) -> list[list[int]]:
    with extra("tasks"):
        from datasets import Dataset

    columns = {"label": targets.tolist(), "index": list(range(len(targets)))}
    rows = Dataset.from_dict(columns)
    # Flower's IID partitioner cuts the rows in their order.
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


def _check(
    parts: Sequence[Sequence[int]], targets: Tensor, setting: str, out: str
) -> None:
    for client, part in enumerate(parts):
        if len(part) < _MIN_EXAMPLES:
            few = f"client {client} has {len(part)} example(s)"
            raise _too_few(setting, few, out)
    used = [index for part in parts for index in part]
    missing = sorted(set(targets.tolist()) - set(targets[used].tolist()))
    if missing:
        warnings.warn(
            f"{setting}: no client holds the classes {', '.join(map(str, missing))};"
            " raise the number of clients or of classes (shards) a client",
            stacklevel=3,
        )


def _too_few(setting: str, what: str, out: str) -> DataError:
    return DataError(
        f"{setting}: {what}, but each client needs at least {_MIN_EXAMPLES}: use {out}"
    )


def label_histogram(
    targets: Tensor, parts: Sequence[Sequence[int]], num_classes: int
) -> Tensor:
    """Count every client's examples of every class, int64 ``[clients, classes]``.

    Examples
    --------
    >>> label_histogram(torch.tensor([0, 1, 1]), [[0, 2], [1]], 2).tolist()
    [[1, 1], [0, 1]]
    """
    indices = [torch.tensor(part, dtype=torch.int64) for part in parts]
    return torch.stack([targets[i].bincount(minlength=num_classes) for i in indices])


def balanced_subset(targets: Tensor, count: int, seed: int) -> Tensor:
    """Return positions of some examples, with classes as balanced as possible.

    Parameters
    ----------
    targets : Tensor
        The examples' classes, int64 ``[n]``.
    count : int
        At most this many. If a class has too few examples, others have more.
    seed : int
        The seed of the choice.

    Returns
    -------
    Tensor
        The positions, int64, in order.

    Examples
    --------
    >>> targets = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2, 2])
    >>> targets[balanced_subset(targets, 5, seed=0)].tolist()
    [0, 0, 1, 2, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(targets), generator=generator)
    # An example's turn is its rank within its class; the first turns are chosen.
    by_class = order[targets[order].sort(stable=True).indices]
    sizes = targets.bincount()
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    turns = torch.arange(len(targets)) - starts
    return by_class[turns.sort(stable=True).indices[:count]].sort().values
