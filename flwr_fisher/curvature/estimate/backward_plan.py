"""Which rank-one pieces of a batch's Fisher are worth a backward pass."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.curvature.estimate.columns import Columns


def worth_keeping(weights: Tensor, tolerance: float) -> Tensor:
    r"""Return which pieces to keep so that at most `tolerance` of the trace is lost.

    The trace of the batch's Fisher with respect to its outputs is
    :math:`\sum_{n,c} p_c (1 - p_c)` for a softmax, known after the forward pass; the
    smallest pieces are dropped first.

    Parameters
    ----------
    weights : Tensor
        The pieces' squared norms ``[K, n]``.
    tolerance : float
        The share that may be left out; 0 keeps every piece that is not zero.

    Returns
    -------
    Tensor
        Booleans ``[K, n]``.

    Examples
    --------
    >>> worth_keeping(torch.tensor([[0.9, 0.01], [0.09, 0.0]]), 0.02)
    tensor([[ True, False],
            [ True, False]])
    """
    flat = weights.flatten().double()
    order = flat.argsort(stable=True)
    lost = flat[order].cumsum(0)
    dropped = lost <= tolerance * lost[-1]
    kept = torch.ones_like(flat, dtype=torch.bool)
    kept[order[dropped]] = False
    return kept.reshape(weights.shape) & (weights > 0)


@dataclass(frozen=True)
class Group:
    """Examples that need about equally many backward passes.

    Parameters
    ----------
    size : int
        The power of two that their numbers of pieces begin with.
    rows : Tensor
        Which examples of the batch.
    columns : Columns
        Their pieces.
    order : Tensor
        ``[passes, len(rows)]``: which piece of an example each pass takes.
    counts : Tensor
        ``[len(rows)]``: how many passes an example needs.
    """

    size: int
    rows: Tensor
    columns: Columns
    order: Tensor
    counts: Tensor

    def piece(self, index: int) -> Tensor:
        """Return a pass's ``[len(rows), *outputs]``; zero for who needs no more."""
        chosen = self.order[min(index, len(self.order) - 1)]
        picked = self.columns.pick(chosen)
        needed = index < self.counts
        return picked * needed.reshape(-1, *[1] * (picked.dim() - 1))

    def all(self) -> Iterator[Tensor]:
        """Yield every pass's pieces."""
        return map(self.piece, range(len(self.order)))


def backward_plan(columns: Columns, tolerance: float) -> list[Group]:
    """Group a batch's examples by how many pieces they keep; drop those without any.

    They are one group if that takes no more passes: apart, each group has a forward
    pass of its own; one of the whole batch needs none beyond what `columns` took.

    Parameters
    ----------
    columns : Columns
        The batch's pieces.
    tolerance : float
        As for :func:`worth_keeping`.
    """
    kept = worth_keeping(columns.weights(), tolerance)
    # Each example's kept pieces first, in their order.
    order = (~kept).int().argsort(dim=0, stable=True)
    counts = kept.sum(0).cpu()  # a device is waited for here, and nowhere else
    largest = int(counts.max()) if counts.numel() else 0
    sizes = [2**k for k in range(largest.bit_length())]

    def group(size: int, rows: Tensor) -> Group:
        own, there = counts[rows], rows.to(order.device)
        chosen = order[: int(own.max()), there]
        return Group(size, there, columns.of(there), chosen, own.to(order.device))

    apart = [
        group(size, rows)
        for size in sizes
        if len(rows := ((counts >= size) & (counts < 2 * size)).nonzero().squeeze(1))
    ]
    if largest * len(counts) > sum((1 + len(x.order)) * len(x.rows) for x in apart):
        return apart
    return [group(sizes[-1], torch.arange(len(counts)))] if apart else []
