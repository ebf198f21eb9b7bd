"""FedFisher's partition: every client draws its own mixture of classes."""

from typing import Any

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner
from numpy.typing import NDArray

from flwr_fisher.errors import ConfigurationError

__all__ = ["DirichletClientPartitioner", "client_shares"]


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


class DirichletClientPartitioner(Partitioner):  # type: ignore[misc,unused-ignore]
    """Partition by class mixtures that the clients draw from a Dirichlet distribution.

    This is how FedFisher (Jhunjhunwala et al., 2024) makes its clients, in its
    released code. It differs from
    :class:`flwr_datasets.partitioner.DirichletPartitioner`, in which each class draws
    its distribution over clients. Every example goes to exactly one client; clients
    differ in size, and at a small `alpha` some may be nearly empty.

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
        super().__init__()
        if num_partitions < 1:
            raise ConfigurationError(
                f"num_partitions must be ≥ 1, not {num_partitions}"
            )
        if not 0 < alpha < float("inf"):
            raise ConfigurationError(f"alpha must be positive and finite, not {alpha}")
        self._num_partitions, self._partition_by = num_partitions, partition_by
        self._alpha, self._seed = alpha, seed
        self._indices: list[NDArray[np.int64]] | None = None

    @property
    def num_partitions(self) -> int:
        """The number of clients."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Dataset:
        """Load one client's examples, in random order.

        Parameters
        ----------
        partition_id : int
            Which client.

        Returns
        -------
        Dataset
            Its rows of the data set.
        """
        if self._indices is None:
            self._indices = self._split()
        return self.dataset.select(self._indices[partition_id])

    def _split(self) -> list[NDArray[np.int64]]:
        rng = np.random.default_rng(self._seed)
        labels: NDArray[Any] = np.asarray(self.dataset[:][self._partition_by])
        classes = np.unique(labels)
        shares = client_shares(self._num_partitions, len(classes), self._alpha, rng)
        pieces: list[list[NDArray[np.int64]]] = [[] for _ in shares]
        for label, column in zip(classes, shares.T, strict=True):
            members = rng.permutation(np.flatnonzero(labels == label))
            ends = (np.cumsum(column)[:-1] * len(members)).astype(np.int64)
            for piece, part in zip(pieces, np.split(members, ends), strict=True):
                piece.append(part)
        return [rng.permutation(np.concatenate(piece)) for piece in pieces]
