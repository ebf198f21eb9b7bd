"""Partitioners that flwr-datasets lacks: FedFisher's, and by documents."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner
from numpy.typing import NDArray

from flwr_fisher.errors import ConfigurationError

Parts = list[NDArray[np.int64]]  # for each client, its rows
Split = Callable[[NDArray[Any], int, np.random.Generator], Parts]


class ColumnPartitioner(Partitioner):  # type: ignore[misc,unused-ignore]
    """Partition by the values of a column, once, when a partition is first needed.

    Parameters
    ----------
    split : Callable
        Called with all rows' values, the number of clients and a generator. It returns
        every client's rows.
    num_partitions : int
        The number of clients.
    partition_by : str
        The column that decides.
    seed : int
        Seed of all draws.
    """

    def __init__(
        self, split: Split, num_partitions: int, partition_by: str, seed: int = 42
    ) -> None:
        super().__init__()
        self._split, self._num_partitions = split, num_partitions
        self._partition_by, self._seed = partition_by, seed

    @property
    def num_partitions(self) -> int:
        """The number of clients."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Dataset:
        """Load one client's examples."""
        return self.dataset.select(self._parts[partition_id])

    @cached_property
    def _parts(self) -> Parts:
        # Only this column: rows would decode their images, too.
        name = self._partition_by
        values = np.asarray(self.dataset.select_columns(name)[:][name])
        rng = np.random.default_rng(self._seed)
        return self._split(values, self._num_partitions, rng)


def client_shares(
    num_partitions: int, num_classes: int, alpha: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    r"""Draw each client's share of every class, ``[M, C]``.

    Client :math:`i` draws class proportions
    :math:`q_i \sim \mathrm{Dir}(\alpha \mathbf{1}_C)`; its share of class :math:`c` is
    :math:`q_{ic} / \sum_j q_{jc}`.

    Examples
    --------
    >>> shares = client_shares(3, 2, 0.1, np.random.default_rng(0))
    >>> shares.sum(axis=0).round(6).tolist()
    [1.0, 1.0]
    """
    # A Dirichlet draw is a normalised row of gamma draws. In logarithms, because a
    # small alpha makes whole columns underflow: if g ~ Gamma(a + 1) and u ~ U(0, 1),
    # then g·u^(1/a) ~ Gamma(a), and -log u is exponential.
    size = (num_partitions, num_classes)
    log_q = np.log(rng.gamma(alpha + 1, size=size)) - rng.exponential(size=size) / alpha
    log_q -= np.logaddexp.reduce(log_q, axis=1, keepdims=True)
    shares: NDArray[np.float64] = np.exp(log_q - np.logaddexp.reduce(log_q, axis=0))
    return shares


def dirichlet_client(
    values: NDArray[Any], clients: int, rng: np.random.Generator, *, alpha: float
) -> Parts:
    """Split by class mixtures, drawn for each client from a Dirichlet distribution.

    This is how FedFisher (Jhunjhunwala et al., 2024) makes its clients, in its released
    code. In :class:`flwr_datasets.partitioner.DirichletPartitioner` each class draws
    its distribution over clients. Every example goes to exactly one client; clients
    differ in size, and at a small `alpha` some may be nearly empty. A client's examples
    are in random order.
    """
    classes = np.unique(values)
    shares = client_shares(clients, len(classes), alpha, rng)
    pieces: list[list[NDArray[np.int64]]] = [[] for _ in shares]
    for label, column in zip(classes, shares.T, strict=True):
        members = rng.permutation(np.flatnonzero(values == label))
        ends = (np.cumsum(column)[:-1] * len(members)).astype(np.int64)
        for piece, part in zip(pieces, np.split(members, ends), strict=True):
            piece.append(part)
    return [rng.permutation(np.concatenate(piece)) for piece in pieces]


def by_document(values: NDArray[Any], clients: int, rng: np.random.Generator) -> Parts:
    """Give every document to one client, so that clients have about equally much text.

    :class:`flwr_datasets.partitioner.GroupedNaturalIdPartitioner` gives all clients the
    same number of documents. Here, documents are assigned from the largest to the
    smallest, each to the client that has least text so far. Documents of about the same
    size (within a factor of two) are in random order. A client's examples keep their
    order.

    Raises
    ------
    ConfigurationError
        If there are more clients than documents.
    """
    names, sizes = np.unique(values, return_counts=True)
    if len(names) < clients:
        raise ConfigurationError(
            f"{len(names)} documents are not enough for {clients} clients: use fewer "
            "clients"
        )
    parts: list[list[int]] = [[] for _ in range(clients)]
    held = [0] * clients
    order = rng.permutation(len(sizes))
    for document in sorted(order, key=lambda d: -int(sizes[d]).bit_length()):
        least = held.index(min(held))
        parts[least].append(int(document))
        held[least] += int(sizes[document])
    return [np.flatnonzero(np.isin(values, names[part])) for part in parts]
