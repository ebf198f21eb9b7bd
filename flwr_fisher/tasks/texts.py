"""Text in memory: sequences of tokens, each from one document."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.errors import DataError
from flwr_fisher.tasks.examples import Examples, Splits, check_classes

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
        if tokens.ndim != 2 or tokens.shape[1] < 2 or tokens.dtype != torch.int64:
            raise DataError(
                "sequences must be an int64 tensor [n, T + 1] with T ≥ 1, not"
                f" {tokens.dtype} {list(tokens.shape)}"
            )
        check_classes(tokens, "sequences", self.documents, "documents")

    @property
    def classes(self) -> Tensor:
        """What a partition tells examples apart by: their documents, ``[n]``."""
        return self.documents

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


@dataclass(frozen=True, eq=False, repr=False)
class TextData(Splits[Sequences]):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test.tokens.shape[1] != self.train.tokens.shape[1]:
            raise DataError(
                f"test sequences have {self.test.tokens.shape[1]} tokens, training"
                f" sequences {self.train.tokens.shape[1]}"
            )

    @property
    def num_outputs(self) -> int:
        """The number of tokens to choose from."""
        return len(VOCABULARY)

    @property
    def shape(self) -> tuple[int]:
        """The shape of one example: its number of positions."""
        return (self.train.tokens.shape[1] - 1,)

    def _numbered(self, examples: Sequences) -> list[tuple[str, Tensor, int, str]]:
        return [
            ("documents", examples.documents, self.num_classes, "ones"),
            ("tokens", examples.tokens, self.num_outputs, "ones"),
        ]

    def __repr__(self) -> str:
        # Generated, it would print every token.
        return (
            f"TextData({len(self.train)} + {len(self.test)} sequences of"
            f" {self.shape[0]} tokens, {self.num_classes} documents)"
        )
