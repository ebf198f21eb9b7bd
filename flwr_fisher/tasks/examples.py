"""What images and sequences in memory share, each with a class for partitions."""

from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flwr_fisher.errors import DataError


@dataclass(frozen=True, eq=False, repr=False)
class Examples(Dataset[tuple[Tensor, Tensor]]):
    """Examples in memory, in a frozen dataclass whose tensors hold a row for each."""

    @property
    def classes(self) -> Tensor:
        """What a partition tells examples apart by, ``[n]``."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.classes)

    def subset(self, indices: list[int]) -> Self:
        """Return a copy of some of the examples, in the order given.

        Parameters
        ----------
        indices : list[int]
            Which examples.

        Returns
        -------
        Self
            The chosen ones; all else, such as a normalisation, is the same.
        """
        # An empty list alone would make a float index, which tensors refuse.
        index = torch.tensor(indices, dtype=torch.int64)
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **{k: v[index] for k, v in tensors.items()})


def check_classes(examples: Tensor, what: str, classes: Tensor, noun: str) -> None:
    """Raise unless there is one int64 class an example.

    Parameters
    ----------
    examples : Tensor
        ``[n, …]``.
    what : str
        What the examples are, for the message.
    classes : Tensor
        To be ``[n]``.
    noun : str
        What the classes are, for the message.

    Raises
    ------
    DataError
        Saying what is there instead.
    """
    if classes.shape != examples.shape[:1] or classes.dtype != torch.int64:
        raise DataError(
            f"{len(examples)} {what} need as many int64 {noun},"
            f" not {classes.dtype} {list(classes.shape)}"
        )


E = TypeVar("E", bound=Examples)


@dataclass(frozen=True, eq=False, repr=False)
class Splits(Generic[E]):
    """A data set, split into training and test examples.

    Parameters
    ----------
    train : Examples
        The examples that are shared out among the clients.
    test : Examples
        The examples on which a model is scored.
    class_names : tuple[str, ...]
        One name a class.

    Raises
    ------
    DataError
        If a split is empty, or a number in it is out of range.
    """

    train: E
    test: E
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for split, examples in (("training", self.train), ("test", self.test)):
            if len(examples) == 0:
                raise DataError(f"the {split} split is empty")
            for what, values, count, known in self._numbered(examples):
                low, high = int(values.min()), int(values.max())
                if low < 0 or high >= count:
                    raise DataError(
                        f"the {split} split's {what} run from {low} to {high},"
                        f" outside the {count} known {known}"
                    )

    @property
    def num_classes(self) -> int:
        """The number of classes; of a text, that of documents."""
        return len(self.class_names)

    def _numbered(self, examples: E) -> list[tuple[str, Tensor, int, str]]:
        """Return what is numbered: its name, the numbers, their count, and of what."""
        raise NotImplementedError
