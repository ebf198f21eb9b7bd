"""Text in memory: sequences of tokens, each from one document."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flwr_fisher.errors import DataError

__all__ = ["VOCABULARY", "Sequences", "TextData", "encode"]

_OTHER = "\N{REPLACEMENT CHARACTER}"
VOCABULARY = _OTHER + "\n" + "".join(map(chr, range(32, 127)))
"""The tokens, one character each: printable ASCII, newline, and one for all others."""

_TOKENS = {character: token for token, character in enumerate(VOCABULARY)}


def encode(text: str) -> Tensor:
    """Return a text's tokens, positions in :data:`VOCABULARY`.

    Parameters
    ----------
    text : str
        Any text.

    Returns
    -------
    Tensor
        Int64 ``[len(text)]``.

    Examples
    --------
    >>> "".join(VOCABULARY[token] for token in encode("a := “b”"))
    'a := �b�'
    """
    return torch.tensor([_TOKENS.get(c, 0) for c in text], dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Sequences(Dataset[tuple[Tensor, Tensor]]):
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
        tokens, documents = self.tokens, self.documents
        if tokens.ndim != 2 or tokens.shape[1] < 2 or tokens.dtype != torch.int64:
            raise DataError(
                "sequences must be an int64 tensor [n, T + 1] with T ≥ 1, not"
                f" {tokens.dtype} {list(tokens.shape)}"
            )
        if documents.shape != tokens.shape[:1] or documents.dtype != torch.int64:
            raise DataError(
                f"{len(tokens)} sequences need as many int64 documents, not"
                f" {documents.dtype} {list(documents.shape)}"
            )

    @property
    def classes(self) -> Tensor:
        """What a partition tells examples apart by: their documents, ``[n]``."""
        return self.documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int | slice | list[int]) -> tuple[Tensor, Tensor]:
        """Return one example, or a batch where `index` names several.

        Parameters
        ----------
        index : int | slice | list[int]
            Which examples.

        Returns
        -------
        tuple[Tensor, Tensor]
            Tokens and next tokens, int64 ``[T]`` for an int, else ``[b, T]``.
        """
        tokens = self.tokens[index]
        return tokens[..., :-1], tokens[..., 1:]

    def subset(self, indices: list[int]) -> "Sequences":
        """Return a copy of some of the examples, in the order given.

        Parameters
        ----------
        indices : list[int]
            Which examples.

        Returns
        -------
        Sequences
            The chosen ones.
        """
        # An empty list alone would make a float index, which tensors refuse.
        index = torch.tensor(indices, dtype=torch.int64)
        return Sequences(self.tokens[index], self.documents[index])


@dataclass(frozen=True, eq=False)
class TextData:
    """A data set for next-token prediction, split into training and test examples.

    Parameters
    ----------
    train : Sequences
        The examples that are shared out among the clients.
    test : Sequences
        The examples on which a model is scored.
    class_names : tuple[str, ...]
        The documents' names. A partition treats a document as a class; a model
        predicts tokens of :data:`VOCABULARY`.

    Raises
    ------
    DataError
        If a split is empty, the splits differ in length, or a document or a token is
        out of range.
    """

    train: Sequences
    test: Sequences
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for split, pieces in (("training", self.train), ("test", self.test)):
            if len(pieces) == 0:
                raise DataError(f"the {split} split is empty")
            for what, values, count in (
                ("documents", pieces.documents, self.num_classes),
                ("tokens", pieces.tokens, self.num_outputs),
            ):
                low, high = int(values.min()), int(values.max())
                if low < 0 or high >= count:
                    raise DataError(
                        f"the {split} split's {what} run from {low} to {high},"
                        f" outside the {count} known ones"
                    )
        if self.test.tokens.shape[1] != self.train.tokens.shape[1]:
            raise DataError(
                f"test sequences have {self.test.tokens.shape[1]} tokens, training"
                f" sequences {self.train.tokens.shape[1]}"
            )

    @property
    def num_classes(self) -> int:
        """The number of documents."""
        return len(self.class_names)

    @property
    def num_outputs(self) -> int:
        """The number of tokens to choose from."""
        return len(VOCABULARY)

    @property
    def shape(self) -> tuple[int]:
        """The shape of one example: its number of positions."""
        return (self.train.tokens.shape[1] - 1,)

    def __repr__(self) -> str:
        # Generated, it would print every token.
        return (
            f"TextData({len(self.train)} + {len(self.test)} sequences of"
            f" {self.shape[0]} tokens, {self.num_classes} documents)"
        )
