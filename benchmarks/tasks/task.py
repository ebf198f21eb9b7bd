"""A task: a data set, partitioned over clients, and a model to train on it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from flwr_fisher.errors import ConfigurationError, check_whole
from tasks.datasets import load_dataset
from tasks.examples import Examples, Splits
from tasks.models import make_model
from tasks.partitions import (
    PARTITIONS,
    balanced_subset,
    label_histogram,
    partition_indices,
)

Loader = DataLoader[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """A data set with its clients' shares and a model, as :func:`load_task` returns it.

    Parameters
    ----------
    data : Splits
        All examples.
    parts : Sequence[Sequence[int]]
        For each client, the positions of its examples in ``data.train``.
    model : str
        The model's name.
    seed : int
        Seed of the model's initial weights.
    validation : Examples | None
        Training examples that a server may use to choose hyperparameters.
    """

    data: Splits
    parts: Sequence[Sequence[int]]
    model: str
    seed: int
    validation: Examples | None = None

    @property
    def num_partitions(self) -> int:
        """The number of clients."""
        return len(self.parts)

    def make_model(self) -> nn.Module:
        """Return a new model with the task's initial weights.

        Returns
        -------
        nn.Module
            The model, on the CPU. It is the same in every process.
        """
        shape, num_outputs = self.data.shape, self.data.num_outputs
        return make_model(
            self.model, shape=shape, num_classes=num_outputs, seed=self.seed
        )

    def num_examples(self, partition_id: int) -> int:
        """Return how many training examples a client has.

        Parameters
        ----------
        partition_id : int
            Which client.

        Returns
        -------
        int
            The number of its examples.
        """
        return len(self._part(partition_id))

    def train_images(self, partition_id: int) -> Examples:
        """Return a copy of a client's training examples, images or sequences.

        Parameters
        ----------
        partition_id : int
            Which client.

        Returns
        -------
        examples : Examples
            The client's share of the training set.
        """
        return self.data.train.subset(list(self._part(partition_id)))

    def train_loader(self, partition_id: int, batch_size: int) -> Loader:
        """Return batches of a client's training examples, in a new order each epoch.

        The order comes from torch's global generator, so that seeding it repeats it.

        Parameters
        ----------
        partition_id : int
            Which client.
        batch_size : int
            Examples a batch; the last batch may be smaller.

        Returns
        -------
        DataLoader
            Batches of images ``[b, C, H, W]`` and labels ``[b]``, or of tokens and next
            tokens ``[b, T]``.
        """
        images = self.train_images(partition_id)
        return batches(images, RandomSampler(images), batch_size)

    def eval_loader(self, images: Examples, batch_size: int = 512) -> Loader:
        """Return batches of examples, in order.

        Parameters
        ----------
        images : Examples
            What to read.
        batch_size : int
            Examples a batch; the last batch may be smaller.

        Returns
        -------
        DataLoader
            Batches of images ``[b, C, H, W]`` and labels ``[b]``, or of tokens and next
            tokens ``[b, T]``.
        """
        return batches(images, range(len(images)), batch_size)

    def test_loader(self, batch_size: int = 512) -> Loader:
        """Return batches of the test set, in order.

        Parameters
        ----------
        batch_size : int
            Examples a batch; the last batch may be smaller.

        Returns
        -------
        DataLoader
            Batches of images ``[b, C, H, W]`` and labels ``[b]``, or of tokens and next
            tokens ``[b, T]``.
        """
        return self.eval_loader(self.data.test, batch_size)

    def label_histogram(self) -> Tensor:
        """Count every client's training examples of every class, or document.

        Returns
        -------
        Tensor
            Counts, int64 ``[clients, classes]``; for a text, ``[clients, documents]``.
        """
        return label_histogram(
            self.data.train.targets, self.parts, self.data.num_classes
        )

    def _part(self, partition_id: int) -> Sequence[int]:
        if not 0 <= partition_id < self.num_partitions:
            raise ConfigurationError(
                f"partition-id must be in 0…{self.num_partitions - 1}, not "
                f"{partition_id}: use as many partitions as there are nodes"
            )
        return self.parts[partition_id]

    def __repr__(self) -> str:
        # the generated one would print every index
        held = 0 if self.validation is None else len(self.validation)
        return (
            f"Task({self.data!r}, {self.num_partitions} clients,"
            f" model {self.model!r}, seed {self.seed}, {held} for validation)"
        )


def batches(examples: Examples, order: Iterable[int], batch_size: int) -> Loader:
    """Return batches of examples in memory, each read by one operation.

    Parameters
    ----------
    examples : Examples
        Images or sequences.
    order : Iterable[int]
        The positions of the examples. Each iteration over it may give another order.
    batch_size : int
        Examples a batch; the last batch may be smaller.

    Raises
    ------
    ConfigurationError
        If `batch_size` is less than one.
    """
    check_whole("batch_size", batch_size, 1)
    # The sampler yields lists, so that a batch is one indexing operation. Collating
    # single examples costs more than a small model's step.
    sampler = BatchSampler(order, batch_size, drop_last=False)
    return DataLoader(examples, sampler=sampler, batch_size=None)


def load_task(
    *,
    dataset: str,
    data_dir: str | Path | None = None,
    model: str,
    partition: str,
    num_partitions: int,
    seed: int = 0,
    validation: int = 0,
    max_examples: int = 0,
    **options: Any,
) -> Task:
    """Load a data set, partition it, and check that the model fits it.

    The result is a function of the arguments: server and clients that call this with
    the same ones agree, in any process.

    Parameters
    ----------
    dataset, data_dir
        As for :func:`~tasks.load_dataset`.
    model : str
        A name for :func:`~tasks.make_model`.
    partition : str
        A name for :func:`~tasks.make_partitioner`.
    num_partitions : int
        The number of clients.
    seed : int
        Seed of the partition, the validation examples and the initial weights.
    validation : int
        How many training examples, drawn uniformly, to keep from the clients.
    max_examples : int
        How many training examples the clients share, with classes as balanced as
        possible, drawn by the seed; 0 for all.
    **options
        Options of the partition: ``alpha``, ``classes_per_client``,
        ``shards_per_client``.

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
            f"partition 'by-document' is for a text, but dataset {dataset!r} has no "
            f"documents: use dataset 'language', or one of {others}"
        )
    held = validation, max_examples
    options |= {"name": partition, "num_partitions": num_partitions, "seed": seed}
    kept, parts = _share_out(dataset, data_dir, *held, **options)
    some = data.train.subset(list(kept)) if kept else None
    task = Task(data=data, parts=parts, model=model, seed=seed, validation=some)
    task.make_model()  # a wrong name or shape must fail here, not on a client
    return task


# A client app calls `load_task` for every message, and partitioning takes a second.
@lru_cache(maxsize=4)
def _share_out(
    dataset: str,
    data_dir: str | Path | None,
    validation: int,
    max_examples: int,
    seed: int,
    **partition: Any,
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Choose the validation examples, then partition the rest over the clients."""
    targets = load_dataset(dataset, data_dir).train.targets
    if not 0 <= validation < len(targets):
        raise ConfigurationError(
            f"validation must be in 0…{len(targets) - 1}, not {validation}"
        )
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    kept = order[:validation]
    rest = order[validation:].sort().values
    if max_examples:
        rest = rest[balanced_subset(targets[rest], max_examples, seed)]
    shares = partition_indices(targets[rest], seed=seed, **partition)
    parts = tuple(tuple(rest[torch.tensor(share)].tolist()) for share in shares)
    return tuple(kept.tolist()), parts
