"""Examples in memory, images or text: what every data set is for a task."""

from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flwr_fisher.errors import DataError

VOCABULARY = "\N{REPLACEMENT CHARACTER}\n" + "".join(map(chr, range(32, 127)))
"""The tokens, one character each: printable ASCII, newline, and one for all others."""

_TOKENS = {character: token for token, character in enumerate(VOCABULARY)}


@dataclass(frozen=True, eq=False, repr=False)
class Examples(Dataset[tuple[Tensor, Tensor]]):
    """Examples in memory, in a frozen dataclass whose tensors hold a row for each."""

    @property
    def classes(self) -> Tensor:
        """What a partition tells examples apart by, int64 ``[n]``."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.classes)

    def subset(self, indices: list[int]) -> Self:
        """Return a copy of some of the examples, in the order given."""
        # An empty list alone would make a float index, which tensors refuse.
        index = torch.tensor(indices, dtype=torch.int64)
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **{k: v[index] for k, v in tensors.items()})

    def _check(self, what: str, data: Tensor, fits: bool) -> None:
        """Raise unless the data are of the form, with an int64 class each."""
        classes = self.classes
        if not fits or classes.shape != data.shape[:1] or classes.dtype != torch.int64:
            raise DataError(
                f"there must be {what}, and an int64 class of each, not {data.dtype} "
                f"{list(data.shape)} and {classes.dtype} {list(classes.shape)}"
            )


@dataclass(frozen=True, eq=False)
class Images(Examples):
    """Images and their labels, normalised when they are read.

    The pixels stay as they were stored (bytes take a quarter of the memory of floats)
    and become ``(x - mean) / std`` in float32 on access, a whole batch at a time.

    Parameters
    ----------
    data : Tensor
        Pixels, ``[n, C, H, W]``: uint8 in 0…255, or float32 in 0…1.
    targets : Tensor
        Class indices, int64, ``[n]``.
    mean, std : tuple[float, ...]
        Mean and standard deviation of each channel, on the scale 0…1.

    Raises
    ------
    DataError
        If a tensor has another shape or dtype, or a channel lacks its constants.

    Examples
    --------
    >>> data = torch.tensor([0, 255, 51], dtype=torch.uint8).reshape(3, 1, 1, 1)
    >>> images = Images(data, torch.tensor([0, 1, 0]), mean=(0.5,), std=(0.5,))
    >>> x, y = images[[0, 1]]
    >>> x.flatten().tolist(), y.tolist()
    ([-1.0, 1.0], [0, 1])
    >>> len(images.subset([2]))
    1
    """

    data: Tensor
    targets: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        data, constants = self.data, {len(self.mean), len(self.std)}
        fits = data.ndim == 4 and data.dtype in (torch.uint8, torch.float32)
        self._check("uint8 or float32 images [n, C, H, W]", data, fits)
        if constants != {data.shape[1]}:
            raise DataError(
                f"{data.shape[1]} channels need as many means and standard deviations,"
                f" not {len(self.mean)} and {len(self.std)}"
            )

    @property
    def classes(self) -> Tensor:
        """Their labels, ``[n]``."""
        return self.targets

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        return tuple(self.data.shape[1:])

    def __getitem__(self, index: int | slice | list[int]) -> tuple[Tensor, Tensor]:
        """Return a normalised example, or a batch where `index` names several."""
        x = self.data[index]
        if x.dtype == torch.uint8:
            x = x.to(torch.float32) / 255
        mean = x.new_tensor(self.mean).reshape(-1, 1, 1)
        std = x.new_tensor(self.std).reshape(-1, 1, 1)
        return (x - mean) / std, self.targets[index]


@dataclass(frozen=True, eq=False)
class Sequences(Examples):
    """Pieces of documents, read as tokens and the tokens that follow them.

    Parameters
    ----------
    tokens : Tensor
        Int64 ``[n, T + 1]``: one token more than an example has positions.
    documents : Tensor
        Which document each piece is from, int64 ``[n]``.

    Raises
    ------
    DataError
        If a tensor has another shape or dtype.

    Examples
    --------
    >>> pieces = Sequences(torch.tensor([[5, 6, 7], [8, 9, 5]]), torch.tensor([0, 1]))
    >>> x, y = pieces[[0, 1]]
    >>> x.tolist(), y.tolist()
    ([[5, 6], [8, 9]], [[6, 7], [9, 5]])
    """

    tokens: Tensor
    documents: Tensor

    def __post_init__(self) -> None:
        tokens = self.tokens
        fits = tokens.ndim == 2 and tokens.shape[1] > 1 and tokens.dtype == torch.int64
        self._check("int64 tokens [n, T + 1] with T ≥ 1", tokens, fits)

    @property
    def classes(self) -> Tensor:
        """Their documents, ``[n]``."""
        return self.documents

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of positions."""
        return (self.tokens.shape[1] - 1,)

    def __getitem__(self, index: int | slice | list[int]) -> tuple[Tensor, Tensor]:
        """Return tokens and next tokens, int64 ``[T]``, or ``[b, T]`` of several."""
        tokens = self.tokens[index]
        return tokens[..., :-1], tokens[..., 1:]


def encode(text: str) -> Tensor:
    """Return a text's tokens, positions in :data:`VOCABULARY`, int64 ``[len(text)]``.

    Examples
    --------
    >>> "".join(VOCABULARY[token] for token in encode("a := “b”"))
    'a := �b�'
    """
    return torch.tensor([_TOKENS.get(c, 0) for c in text], dtype=torch.int64)


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
        One name a class; the position is the label. A text's classes are documents.

    Raises
    ------
    DataError
        If a split is empty, the splits differ in shape, or an example has no class.
    """

    train: E
    test: E
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for split, examples in (("training", self.train), ("test", self.test)):
            if len(examples) == 0:
                raise DataError(f"the {split} split is empty")
            low, high = int(examples.classes.min()), int(examples.classes.max())
            if low < 0 or high >= self.num_classes:
                raise DataError(
                    f"the {split} split's classes run from {low} to {high}, outside "
                    f"the {self.num_classes} known ones"
                )
        if self.test.shape != self.train.shape:
            raise DataError(
                f"test examples have the shape {list(self.test.shape)}, training "
                f"examples {list(self.train.shape)}"
            )

    @property
    def num_classes(self) -> int:
        """The number of classes; of a text, that of documents."""
        return len(self.class_names)

    @property
    def num_outputs(self) -> int:
        """The number of a model's outputs: classes, or tokens to choose from."""
        return self.num_classes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return self.train.shape

    def __repr__(self) -> str:
        # Generated, it would print every example.
        return (
            f"{type(self).__name__}({len(self.train)} + {len(self.test)} of shape "
            f"{'x'.join(map(str, self.shape))}, {self.num_classes} classes)"
        )


class ImageData(Splits[Images]):
    """A data set for image classification."""


class TextData(Splits[Sequences]):
    """A data set for next-token prediction, whose classes are documents."""

    @property
    def num_outputs(self) -> int:
        """The number of tokens to choose from."""
        return len(VOCABULARY)
