"""The natural partition of a text: every document at one client."""

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner
from numpy.typing import NDArray

from flwr_fisher.errors import ConfigurationError

__all__ = ["ByDocumentPartitioner", "share_out_documents"]


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


class ByDocumentPartitioner(Partitioner):  # type: ignore[misc,unused-ignore]
    """Partition so that all of a document is at one client.

    It differs from :class:`flwr_datasets.partitioner.GroupedNaturalIdPartitioner`,
    which gives every client as many documents, in giving every client about as many
    examples.

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

    def __init__(
        self, num_partitions: int, partition_by: str, seed: int | None = 42
    ) -> None:
        super().__init__()
        if num_partitions < 1:
            raise ConfigurationError(
                f"num_partitions must be ≥ 1, not {num_partitions}"
            )
        self._num_partitions, self._partition_by = num_partitions, partition_by
        self._seed = seed
        self._indices: list[NDArray[np.int64]] | None = None

    @property
    def num_partitions(self) -> int:
        """The number of clients."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Dataset:
        """Load one client's examples, in their order in the data set.

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
        documents = np.asarray(self.dataset[:][self._partition_by])
        names, sizes = np.unique(documents, return_counts=True)
        if len(names) < self._num_partitions:
            raise ConfigurationError(
                f"{len(names)} documents are not enough for {self._num_partitions}"
                " clients, each document being at one: use fewer clients"
            )
        rng = np.random.default_rng(self._seed)
        parts = share_out_documents(sizes, self._num_partitions, rng)
        return [np.flatnonzero(np.isin(documents, names[part])) for part in parts]
