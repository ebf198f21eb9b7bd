"""Curvatures of one layer, stacked: a product with many takes as few calls as with one.

A stack of n curvatures is one curvature of the same kind over n times the parameters:
each tensor has n times as many rows, those of the first curvature first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from flwr_fisher.curvature.operators.base import Curvature, Diagonal
from flwr_fisher.curvature.operators.factors import (
    DenseFactor,
    LowRankFactor,
    SymmetricFactor,
)
from flwr_fisher.curvature.operators.kronecker import Kronecker
from flwr_fisher.params import Params, Shapes, by_part, repeated, side_by_side

_AT_ONCE = 1 << 19  # entries of a stack: larger ones take memory, and no less time


def stacks(curvatures: Iterable[Curvature]) -> Iterator[tuple[list[int], Curvature]]:
    """Yield stacks of a layer's curvatures, with the positions of those in each.

    Diagonals and Kronecker products of one layout are stacked, up to a size. All others
    are yielded alone.
    """
    waiting: dict[object, dict[int, Curvature]] = {}
    for index, lazy in enumerate(curvatures):
        term = lazy.made()
        layout = _layout(term)
        alike = waiting.setdefault(layout, {})
        alike[index] = term
        size = term.numel() + sum(tensor.numel() for tensor in term.tensors())
        if layout is None or (len(alike) + 1) * size > _AT_ONCE:
            yield [*alike], _stack([*waiting.pop(layout).values()])
    for alike in waiting.values():
        yield [*alike], _stack([*alike.values()])


def _layout(term: Curvature) -> object:
    """Return what terms that can be stacked have in common; None for any other."""
    if type(term) is not Kronecker:  # a subclass may hold more
        return Diagonal if type(term) is Diagonal else None
    factors = term.A_factor, term.G_factor
    if any(isinstance(f, LowRankFactor) and f.rows is not None for f in factors):
        return None
    return term.weight, term.bias, term.matrix_shape, *map(type, factors)


def _stack(terms: Sequence[Curvature]) -> Curvature:
    """Return terms of one layout as one."""
    first = terms[0]
    if len(terms) == 1:
        return first
    if isinstance(first, Diagonal):
        entries = [term.diagonal() for term in terms]
        return Diagonal(
            {k: side_by_side([e[k] for e in entries]) for k in first.shapes}
        )
    layers = [term for term in terms if isinstance(term, Kronecker)]
    outputs, *others = layers[0].weight_shape
    A = _joined([layer.A_factor for layer in layers])
    G = _joined([layer.G_factor for layer in layers])
    shape = torch.Size((len(layers) * outputs, *others))
    return Kronecker(layers[0].weight, shape, A, G, layers[0].bias)


def _joined(factors: Sequence[SymmetricFactor]) -> SymmetricFactor:
    """Return factors of one kind as one with the groups of all."""
    low = [factor for factor in factors if isinstance(factor, LowRankFactor)]
    if not low:
        return DenseFactor(torch.cat([factor.to_dense() for factor in factors]))
    # Zeros take the place of missing columns.
    most = max(factor.rank for factor in low)
    padded = [
        (pad(f.directions, missing), pad(f.lengths, missing), f.rest)
        for f in low
        for missing in [(0, most - f.rank)]
    ]
    return LowRankFactor(*map(torch.cat, zip(*padded, strict=True)))


class StackedSum(Curvature):
    r"""The lazy sum :math:`\sum_i w_i F_i` of curvatures that are stacked.

    Parameters
    ----------
    stack : Curvature
        The curvatures, side by side.
    weights : Tensor
        Their weights, in float64, on the same device.
    shapes : Mapping[str, torch.Size]
        The parameters that each of them covers.
    """

    def __init__(self, stack: Curvature, weights: Tensor, shapes: Shapes) -> None:
        self.stack, self.weights, self.shapes = stack, weights, dict(shapes)

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the weighted sum of the products."""
        return self.sum_of(self.stack.matvec(repeated(vector, len(self.weights))))

    def diagonal(self) -> dict[str, Tensor]:
        """Return the weighted sum of the diagonals."""
        return self.sum_of(self.stack.diagonal())

    def sum_of(self, values: Params) -> dict[str, Tensor]:
        """Return the weighted sum of values that are side by side."""
        rows = by_part(values, len(self.weights))
        return {
            name: (self.weights.to(row.dtype) @ row).view(self.shapes[name])
            for name, row in zip(values, rows, strict=True)
        }

    def traces(self, parts: int = 1) -> Tensor:
        """Return the trace of the sum, which has one part."""
        return (self.weights @ self.stack.traces(len(self.weights))).view(parts)

    def scaled(self, factor: float) -> "StackedSum":
        """Return the sum with every weight scaled."""
        return StackedSum(self.stack, self.weights * factor, self.shapes)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "StackedSum":
        """Return the sum with a function applied to the stack's tensors."""
        return StackedSum(self.stack.mapped(function), self.weights, self.shapes)
