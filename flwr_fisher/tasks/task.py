"""A task: a data set, shared out among clients, and a model to train on it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.tasks.examples import Examples, Splits
from flwr_fisher.tasks.models import make_model
from flwr_fisher.tasks.partitions import label_histogram

Loader = DataLoader[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """A data set with its clients' shares and a model; made by :func:`load_task`.

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
            On the CPU, the same in every process.
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
            Its share of the training set.
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
            Of images ``[b, C, H, W]`` and labels ``[b]``, or of tokens and next tokens
            ``[b, T]``.
        """
        images = self.train_images(partition_id)
        return batches(images, RandomSampler(images), batch_size)

    def eval_loader(self, images: Examples, batch_size: int = 512) -> Loader:
        """Return batches of any examples, in order.

        Parameters
        ----------
        images : Examples
            What to read.
        batch_size : int
            Examples a batch; the last batch may be smaller.

        Returns
        -------
        DataLoader
            Of images ``[b, C, H, W]`` and labels ``[b]``, or of tokens and next tokens
            ``[b, T]``.
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
            Of images ``[b, C, H, W]`` and labels ``[b]``, or of tokens and next tokens
            ``[b, T]``.
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
                f"partition-id must be in 0…{self.num_partitions - 1}, not"
                f" {partition_id}: as many partitions as there are nodes are needed"
            )
        return self.parts[partition_id]

    def __repr__(self) -> str:
        # Generated, it would print every index.
        held = 0 if self.validation is None else len(self.validation)
        return (
            f"Task({self.data!r}, {self.num_partitions} clients,"
            f" model {self.model!r}, seed {self.seed}, {held} for validation)"
        )


def batches(examples: Examples, order: Iterable[int], batch_size: int) -> Loader:
    """Return batches of examples in memory, each read at once.

    Parameters
    ----------
    examples : Examples
        Images or sequences.
    order : Iterable[int]
        Of their positions, anew each time it is iterated over.
    batch_size : int
        Examples a batch; the last batch may be smaller.

    Raises
    ------
    ConfigurationError
        If `batch_size` is less than one.
    """
    if batch_size < 1:
        raise ConfigurationError(f"batch_size must be ≥ 1, not {batch_size}")
    # The sampler yields lists, so that a batch is one indexing operation; collating
    # single examples costs more than a small model's step.
    sampler = BatchSampler(order, batch_size, drop_last=False)
    return DataLoader(examples, sampler=sampler, batch_size=None)
