"""The rank-one pieces that a likelihood makes of a batch's outputs."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from flwr_fisher.errors import StructureError


class Columns(ABC):
    """The rank-one pieces of a batch of examples, each made when it is asked for.

    There are k at every position, each zero elsewhere, so k T an example. Piece
    ``t k + i`` is the i-th at position t.

    Parameters
    ----------
    count : int
        k.
    positions : int
        T.
    shape : torch.Size
        The outputs' shape, ``[n, ...]``.
    """

    def __init__(self, count: int, positions: int, shape: torch.Size) -> None:
        self.count, self.positions, self.shape = count, positions, shape

    @abstractmethod
    def squares(self) -> Tensor:
        """Return every piece's squared norm, ``[k, n, T]``."""

    @abstractmethod
    def every(self, index: int) -> Tensor:
        """Return one of the k pieces of every example and position, ``[n, T, C]``."""

    @abstractmethod
    def some(self, index: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Return single pieces, ``[m, C]``; all arguments are ``[m]``."""

    def weights(self) -> Tensor:
        """Return every piece's share of the trace: squared norms ``[k T, n]``."""
        return self.squares().permute(2, 0, 1).flatten(0, 1)

    def pick(self, rows: Tensor, pieces: Tensor) -> Tensor:
        """Return one piece for each of some examples, shaped like their outputs."""
        position = torch.div(pieces, self.count, rounding_mode="floor")
        values = self.some(pieces % self.count, rows, position)
        picked = values.new_zeros(len(rows), self.positions, values.shape[-1])
        picked[torch.arange(len(rows), device=rows.device), position] = values
        return picked.reshape(len(rows), *self.shape[1:])

    def all(self) -> Iterator[Tensor]:
        """Yield every piece of every example, k T times of the outputs' shape."""
        for piece in range(self.count * self.positions):
            position, index = divmod(piece, self.count)
            values = self.every(index)
            if self.positions > 1:
                alone = torch.zeros_like(values)
                alone[:, position] = values[:, position]
                values = alone
            yield values.reshape(self.shape)


class GivenColumns(Columns):
    """Pieces that are all there, ``[k, n, T, C]``.

    Parameters
    ----------
    values : Tensor
        The pieces.
    shape : torch.Size
        The outputs' shape.
    """

    def __init__(self, values: Tensor, shape: torch.Size) -> None:
        super().__init__(values.shape[0], values.shape[2], shape)
        self.values = values

    def squares(self) -> Tensor:
        """Return the squared norms."""
        return self.values.square().sum(-1)

    def every(self, index: int) -> Tensor:
        """Return one of the pieces everywhere."""
        return self.values[index]

    def some(self, index: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Return single pieces."""
        return self.values[index, rows, positions]


class SoftmaxColumns(Columns):
    r"""The Fisher of a softmax with respect to its logits, factored.

    For probabilities :math:`p` it is :math:`\operatorname{diag}(p) - pp^\top`, of rank
    :math:`C - 1`, and so equals :math:`\sum_k v_k v_k^\top` with :math:`C - 1` columns
    of its Cholesky factor, known in closed form (Tanabe & Sagae 1992): with classes
    sorted by falling probability and tails :math:`q_k = \sum_{j > k} p_j`,

    .. math:: L_{kk} = \sqrt{p_k q_k / q_{k-1}}, \quad L_{jk} = -L_{kk} p_j / q_k .

    One backward pass for each column thus gives the *true* Fisher, one pass fewer than
    the sum over all classes, and the likeliest classes come first. A column is made
    when it is asked for: memory is that of a few tensors like the logits.

    Parameters
    ----------
    logits : Tensor
        ``[n, ..., C]`` with at least two classes.

    Raises
    ------
    StructureError
        If logits have another shape.

    Examples
    --------
    >>> columns = SoftmaxColumns(torch.zeros(1, 2))
    >>> v = torch.stack(list(columns.all()))
    >>> torch.einsum("knc,knd->ncd", v, v)
    tensor([[[ 0.2500, -0.2500],
             [-0.2500,  0.2500]]])
    """

    def __init__(self, logits: Tensor) -> None:
        if logits.dim() < 2 or logits.shape[-1] < 2:
            raise StructureError(
                "the model's output must be logits of shape [batch, classes], or "
                "[batch, time, classes], with at least 2 classes, got "
                f"{tuple(logits.shape)}"
            )
        classes, positions = logits.shape[-1], logits.shape[1:-1].numel()
        super().__init__(classes - 1, positions, logits.shape)
        flat = logits.detach().reshape(len(logits), positions, classes)
        self.p = flat.softmax(-1)
        sorted_p, order = self.p.sort(-1, descending=True)
        tiny = torch.finfo(self.p.dtype).tiny
        # Tails summed from the small end, so that a confident example loses no digits.
        before = _tails(sorted_p)
        after = torch.cat([before[..., 1:], torch.zeros_like(before[..., :1])], -1)
        self.pivots = (sorted_p * (after / before.clamp_min(tiny))).sqrt()[..., :-1]
        self.after = after.clamp_min(tiny)[..., :-1]
        self.spread = _tails(sorted_p.square())[..., 1:]
        self.rank = order.argsort(-1)

    def squares(self) -> Tensor:
        """Return the squared norms."""
        others = self.spread / self.after / self.after
        return (self.pivots.square() * (1 + others)).permute(2, 0, 1)

    def every(self, index: int) -> Tensor:
        """Return one of the columns everywhere."""
        chosen = slice(index, index + 1)
        pivots, after = self.pivots[..., chosen], self.after[..., chosen]
        return _column(self.p, self.rank, pivots, after, index)

    def some(self, index: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Return single columns."""
        at, index = (rows, positions), index.unsqueeze(-1)
        pivots = self.pivots[at].gather(-1, index)
        after = self.after[at].gather(-1, index)
        return _column(self.p[at], self.rank[at], pivots, after, index)


def _column(
    p: Tensor, rank: Tensor, pivot: Tensor, after: Tensor, index: int | Tensor
) -> Tensor:
    """Return a column of the factor, the classes in the logits' order."""
    entries = torch.where(rank > index, -p / after, (rank == index).to(p))
    return entries * pivot


def _tails(values: Tensor) -> Tensor:
    """Return the sums from each entry to the last, summed from the small end."""
    return values.flip(-1).cumsum(-1).flip(-1)
