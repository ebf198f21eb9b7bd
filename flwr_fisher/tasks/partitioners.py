"""Partitioners by name: flwr-datasets' own, and FedFisher's."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from flwr_fisher.errors import ConfigurationError, UnknownNameError, check_positive
from flwr_fisher.extras import extra

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


def make_partitioner(
    name: str,
    *,
    num_partitions: int,
    alpha: float = 0.1,
    classes_per_client: int = 2,
    shards_per_client: int = 2,
    seed: int = 0,
) -> "Partitioner":
    """Make one of flwr-datasets' partitioners, or ours, for a column ``label``.

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
    classes_per_client : int
        How many classes a client has, in ``classes-per-client``.
    shards_per_client : int
        How many shards a client has, in ``shards``.
    seed : int
        Seed of the draws, from 0 up.

    Returns
    -------
    Partitioner
        To be given a ``datasets.Dataset`` with a column ``label``.

    Raises
    ------
    UnknownNameError
        If the name is not known.
    ConfigurationError
        If a number is out of range.
    """
    if name not in PARTITIONS:
        raise UnknownNameError("partition", name, PARTITIONS)
    counts = {
        "num_partitions": num_partitions,
        "classes_per_client": classes_per_client,
        "shards_per_client": shards_per_client,
    }
    for argument, value in counts.items():
        if value < 1:
            raise ConfigurationError(f"{argument} must be ≥ 1, not {value}")
    check_positive("alpha", alpha)
    if seed < 0:
        raise ConfigurationError(f"seed must be ≥ 0, not {seed}")
    maker = _makers(alpha, classes_per_client, shards_per_client)[name]
    if name == "iid":
        return maker(num_partitions=num_partitions)
    return maker(num_partitions=num_partitions, partition_by="label", seed=seed)


def _makers(alpha: float, classes: int, shards: int) -> dict[str, Callable[..., Any]]:
    with extra("tasks"):
        from flwr_datasets import partitioner as flower

    from flwr_fisher.tasks import own_partitioners as own

    # float: their partitioner refuses other number types. Size 0: it would else
    # redraw, which changes the distribution; small clients are our own error.
    alpha = float(alpha)
    return {
        "iid": flower.IidPartitioner,
        "dirichlet-client": partial(own.DirichletClientPartitioner, alpha=alpha),
        "dirichlet-class": partial(
            flower.DirichletPartitioner, alpha=alpha, min_partition_size=0
        ),
        # With at least as many clients as classes, this mode uses every class.
        "classes-per-client": partial(
            flower.PathologicalPartitioner,
            num_classes_per_partition=classes,
            class_assignment_mode="first-deterministic",
        ),
        "shards": partial(flower.ShardPartitioner, num_shards_per_partition=shards),
        "by-document": own.ByDocumentPartitioner,
    }
