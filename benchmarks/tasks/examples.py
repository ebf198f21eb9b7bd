"""Examples in memory, images or text: the form of every data set in a task."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flwr_fisher.errors import DataError

VOCABULARY = "\N{REPLACEMENT CHARACTER}\n" + "".join(map(chr, range(32, 127)))
"""The tokens, one character each: printable ASCII, newline, and one for all others."""

_TOKENS = {character: token for token, character in enumerate(VOCABULARY)}


@dataclass(frozen=True, eq=False, repr=False)
class Examples(Dataset[tuple[Tensor, Tensor]]):
    """Images with their labels, or pieces of documents, in memory.

    An image is read as ``(x - mean) / std`` in float32 with its label; its pixels stay
    as they were stored (bytes take a quarter of the memory of floats). A piece of a
    document is read as tokens and the tokens that follow them.

    Parameters
    ----------
    data : Tensor
        Pixels, ``[n, C, H, W]``: uint8 in 0…255, or float32 in 0…1. Or tokens, int64
        ``[n, T + 1]``: one more than an example has positions.
    targets : Tensor
        The class of each, or the document that it is from, int64 ``[n]``.
    mean, std : tuple[float, ...]
        For images: mean and standard deviation of each channel, on the scale 0…1.

    Raises
    ------
    DataError
        If a tensor has another shape or dtype, or a channel lacks its constants.

    Examples
    --------
    >>> data = torch.tensor([0, 255, 51], dtype=torch.uint8).reshape(3, 1, 1, 1)
    >>> images = Examples(data, torch.tensor([0, 1, 0]), mean=(0.5,), std=(0.5,))
    >>> x, y = images[[0, 1]]
    >>> x.flatten().tolist(), y.tolist()
    ([-1.0, 1.0], [0, 1])
    >>> len(images.subset([2]))
    1
    >>> pieces = Examples(torch.tensor([[5, 6, 7], [8, 9, 5]]), torch.tensor([0, 1]))
    >>> x, y = pieces[[0, 1]]
    >>> x.tolist(), y.tolist()
    ([[5, 6], [8, 9]], [[6, 7], [9, 5]])
    """

    data: Tensor
    targets: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        data, targets = self.data, self.targets
        images = data.ndim == 4 and data.dtype in (torch.uint8, torch.float32)
        text = self.is_text and data.ndim == 2 and data.shape[1] > 1
        fits = targets.shape == data.shape[:1] and targets.dtype == torch.int64
        if not fits or not (images or text):
            raise DataError(
                "data must be uint8 or float32 images [n, C, H, W], or int64 tokens "
                f"[n, T + 1] with T ≥ 1, with int64 classes [n], not {data.dtype} "
                f"{list(data.shape)} and {targets.dtype} {list(targets.shape)}"
            )
        channels = data.shape[1] if images else 0
        if {len(self.mean), len(self.std)} != {channels}:
            raise DataError(
                f"{channels} channels need as many means and standard deviations,"
                f" not {len(self.mean)} and {len(self.std)}"
            )

    @property
    def is_text(self) -> bool:
        """Whether the examples are pieces of documents."""
        return self.data.dtype == torch.int64

    @property
    def shape(self) -> tuple[int, ...]:
        """An image's channels, height and width, or a piece's number of positions."""
        sizes = tuple(self.data.shape[1:])
        return (sizes[0] - 1,) if self.is_text else sizes

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int | slice | list[int]) -> tuple[Tensor, Tensor]:
        """Return an example in a model's form, or a batch of several."""
        x = self.data[index]
        if self.is_text:
            return x[..., :-1], x[..., 1:]
        if x.dtype == torch.uint8:
            x = x.to(torch.float32) / 255
        mean = x.new_tensor(self.mean).reshape(-1, 1, 1)
        std = x.new_tensor(self.std).reshape(-1, 1, 1)
        return (x - mean) / std, self.targets[index]

    def subset(self, indices: list[int]) -> "Examples":
        """Return a copy of some of the examples, in the order given."""
        # An empty list would make a float index, which tensors refuse.
        index = torch.tensor(indices, dtype=torch.int64)
        return replace(self, data=self.data[index], targets=self.targets[index])


def encode(text: str) -> Tensor:
    """Return a text's tokens, positions in :data:`VOCABULARY`, int64 ``[len(text)]``.

    Examples
    --------
    >>> "".join(VOCABULARY[token] for token in encode("a := “b”"))
    'a := �b�'
    """
    return torch.tensor([_TOKENS.get(c, 0) for c in text], dtype=torch.int64)


@dataclass(frozen=True, eq=False, repr=False)
class Splits:
    """A data set, split into training and test examples.

    Parameters
    ----------
    train : Examples
        The examples that are shared out among the clients.
    test : Examples
        The examples on which a model is scored.
    class_names : tuple[str, ...]
        A name for each class; its position is the label. The classes of a text are
        documents.

    Raises
    ------
    DataError
        If a split is empty, the splits differ in shape, or an example has no class.
    """

    train: Examples
    test: Examples
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for split, examples in (("training", self.train), ("test", self.test)):
            if len(examples) == 0:
                raise DataError(f"the {split} split is empty")
            low, high = int(examples.targets.min()), int(examples.targets.max())
            if low < 0 or high >= self.num_classes:
                raise DataError(
                    f"the {split} split's classes run from {low} to {high}, but there "
                    f"are {self.num_classes} classes"
                )
        if self.test.shape != self.train.shape:
            raise DataError(
                f"test examples have the shape {list(self.test.shape)}, but training "
                f"examples have {list(self.train.shape)}"
            )

    @property
    def num_classes(self) -> int:
        """The number of classes, or of a text's documents."""
        return len(self.class_names)

    @property
    def num_outputs(self) -> int:
        """The number of a model's outputs: classes, or tokens."""
        return len(VOCABULARY) if self.train.is_text else self.num_classes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return self.train.shape

    def __repr__(self) -> str:
        # the generated one would print every example
        return (
            f"Splits({len(self.train)} + {len(self.test)} of shape "
            f"{'x'.join(map(str, self.shape))}, {self.num_classes} classes)"
        )
