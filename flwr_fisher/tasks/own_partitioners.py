"""Partitioners of this library's own, as flwr-datasets': FedFisher's, and documents."""

from abc import abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner
from numpy.typing import NDArray

from flwr_fisher.errors import ConfigurationError, check_positive

Parts = list[NDArray[np.int64]]  # for each client, its rows


class _ColumnPartitioner(Partitioner):  # type: ignore[misc,unused-ignore]
    """Partition by the values of a column, once, when a part is first needed.

    Parameters
    ----------
    num_partitions : int
        The number of clients.
    partition_by : str
        The column that decides.
    seed : int | None
        Seed of all draws.

    Raises
    ------
    ConfigurationError
        If `num_partitions` is not positive.
    """

    def __init__(
        self, num_partitions: int, partition_by: str, seed: int | None = 42
    ) -> None:
        super().__init__()
        if num_partitions < 1:
            raise ConfigurationError(
                f"num_partitions must be ≥ 1, not {num_partitions}"
            )
        self._num_partitions = num_partitions
        self._partition_by, self._seed = partition_by, seed

    @property
    def num_partitions(self) -> int:
        """The number of clients."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Dataset:
        """Load one client's examples.

        Parameters
        ----------
        partition_id : int
            Which client.

        Returns
        -------
        Dataset
            Its rows of the data set.
        """
        return self.dataset.select(self._parts[partition_id])

    @cached_property
    def _parts(self) -> Parts:
        # Alone: rows would have their images decoded, too.
        name = self._partition_by
        values = np.asarray(self.dataset.select_columns(name)[:][name])
        return self._split(values, np.random.default_rng(self._seed))

    @abstractmethod
    def _split(self, values: NDArray[Any], rng: np.random.Generator) -> Parts:
        """Return every client's rows, given all rows' values in the column."""


def client_shares(
    num_partitions: int, num_classes: int, alpha: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    r"""Draw what share of every class each client gets.

    Client :math:`i` draws class proportions :math:`q_i \sim \mathrm{Dir}(\alpha
    \mathbf{1}_C)`; of class :math:`c` it gets :math:`q_{ic} / \sum_j q_{jc}`.

    Parameters
    ----------
    num_partitions : int
        The number of clients, M.
    num_classes : int
        The number of classes, C.
    alpha : float
        The concentration; small means that a client has few classes.
    rng : numpy.random.Generator
        Where the randomness comes from.

    Returns
    -------
    NDArray[np.float64]
        Shares, ``[M, C]``; every column sums to one.

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


class DirichletClientPartitioner(_ColumnPartitioner):
    """Partition by class mixtures that the clients draw from a Dirichlet distribution.

    This is how FedFisher (Jhunjhunwala et al., 2024) makes its clients, in its
    released code. It differs from
    :class:`flwr_datasets.partitioner.DirichletPartitioner`, in which each class draws
    its distribution over clients. Every example goes to exactly one client; clients
    differ in size, and at a small `alpha` some may be nearly empty. A client's examples
    are in random order.

    Parameters
    ----------
    num_partitions : int
        The number of clients.
    partition_by : str
        The column of the labels.
    alpha : float
        Concentration of the Dirichlet distribution, above zero.
    seed : int | None
        Seed of the draws and of the order of examples.

    Raises
    ------
    ConfigurationError
        If `num_partitions` or `alpha` is not positive.
    """

    def __init__(
        self,
        num_partitions: int,
        partition_by: str,
        alpha: float,
        seed: int | None = 42,
    ) -> None:
        super().__init__(num_partitions, partition_by, seed)
        check_positive("alpha", alpha)
        self._alpha = alpha

    def _split(self, values: NDArray[Any], rng: np.random.Generator) -> Parts:
        classes = np.unique(values)
        shares = client_shares(self._num_partitions, len(classes), self._alpha, rng)
        pieces: list[list[NDArray[np.int64]]] = [[] for _ in shares]
        for label, column in zip(classes, shares.T, strict=True):
            members = rng.permutation(np.flatnonzero(values == label))
            ends = (np.cumsum(column)[:-1] * len(members)).astype(np.int64)
            for piece, part in zip(pieces, np.split(members, ends), strict=True):
                piece.append(part)
        return [rng.permutation(np.concatenate(piece)) for piece in pieces]


def share_out_documents(
    sizes: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
) -> list[list[int]]:
    """Give every document to one client, so that clients have about as much text.

    Documents are dealt out from the largest to the smallest, each to the client that
    has least so far; among those of about the same size (within a factor of two)
    chance decides which comes first.

    Parameters
    ----------
    sizes : NDArray[np.int64]
        Every document's size, ``[D]``.
    num_partitions : int
        The number of clients, at most D.
    rng : numpy.random.Generator
        Where the randomness comes from.

    Returns
    -------
    list[list[int]]
        For each client, its documents' positions in `sizes`.

    Examples
    --------
    >>> sizes = np.array([90, 30, 31, 29])
    >>> share_out_documents(sizes, 2, np.random.default_rng(0))[0]
    [0]
    """
    order = rng.permutation(len(sizes))
    parts: list[list[int]] = [[] for _ in range(num_partitions)]
    held = [0] * num_partitions
    for document in sorted(order, key=lambda d: -int(sizes[d]).bit_length()):
        least = held.index(min(held))
        parts[least].append(int(document))
        held[least] += int(sizes[document])
    return parts


class ByDocumentPartitioner(_ColumnPartitioner):
    """Partition so that all of a document is at one client.

    It differs from :class:`flwr_datasets.partitioner.GroupedNaturalIdPartitioner`,
    which gives every client as many documents, in giving every client about as many
    examples. A client's examples keep their order.

    Parameters
    ----------
    num_partitions : int
        The number of clients.
    partition_by : str
        The column that says which document an example is from.
    seed : int | None
        Seed of who gets which document.

    Raises
    ------
    ConfigurationError
        If `num_partitions` is not positive or, once the data is there, above the
        number of documents.
    """

    def _split(self, values: NDArray[Any], rng: np.random.Generator) -> Parts:
        names, sizes = np.unique(values, return_counts=True)
        if len(names) < self._num_partitions:
            raise ConfigurationError(
                f"{len(names)} documents are not enough for {self._num_partitions}"
                " clients, each document being at one: use fewer clients"
            )
        parts = share_out_documents(sizes, self._num_partitions, rng)
        return [np.flatnonzero(np.isin(values, names[part])) for part in parts]
