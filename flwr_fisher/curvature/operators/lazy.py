"""Lazy curvatures: a weighted sum of several, and one that is computed at each use."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import (
    BlockDiagonal,
    Curvature,
    Diagonal,
    Solver,
)
from flwr_fisher.curvature.operators.stacked import StackedSum
from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params


class Deferred(Curvature):
    """A curvature that is computed each time it is used, and not kept.

    With it, the uploads of many clients stay packed, or on disk, until a merge needs a
    layer. Every use computes the curvature again; :meth:`made` and :meth:`regularised`
    return it as it is.

    Parameters
    ----------
    like : Curvature
        A curvature of the same kind and parameters; it is not kept.
    make : Callable[[], Curvature]
        Makes the curvature.
    trace : float, optional
        The curvature's trace, if it is known in advance.

    Examples
    --------
    >>> import torch
    >>> from flwr_fisher.curvature import Diagonal
    >>> F = Diagonal({"w": torch.tensor([1.0, 2.0])})
    >>> later = Deferred(F, lambda: F)
    >>> later, later @ {"w": torch.ones(2)}
    (Diagonal(2 parameters, 0 bytes), {'w': tensor([1., 2.])})
    """

    def __init__(
        self, like: Curvature, make: Callable[[], Curvature], trace: float | None = None
    ) -> None:
        self.shapes, self._kind, self._make = dict(like.shapes), like.kind, make
        self._trace, self.groups = trace, like.groups

    def __reduce__(self) -> tuple[Callable[[Curvature], Curvature], tuple[Curvature]]:
        """Pickle and copy what it computes, since its function may be a local one."""
        return Curvature.made, (self.made(),)

    @property
    def kind(self) -> str:
        """The name of the kind of curvature that is computed."""
        return self._kind

    def made(self) -> Curvature:
        """Compute it."""
        return self._make()

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Compute it, and return its product."""
        return self.made().matvec(vector)

    def diagonal(self) -> dict[str, Tensor]:
        """Compute it, and return its diagonal."""
        return self.made().diagonal()

    def trace(self) -> float:
        """Return the trace; compute the curvature only if the trace is not known."""
        return self.made().trace() if self._trace is None else self._trace

    def scaled(self, factor: float) -> "Deferred":
        """Return a deferred curvature that is scaled when it is computed."""
        return Deferred(self, lambda: self.made().scaled(factor))

    def regularised(self, *, shrink: float = 0.0, damping: float = 0.0) -> Curvature:
        """Compute it, and return it regularised."""
        return self.made().regularised(shrink=shrink, damping=damping)

    def non_negative(self) -> list[Tensor]:
        """Return nothing: it holds no tensors."""
        return []

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Deferred":
        """Return a deferred curvature that is mapped when it is computed."""
        return Deferred(self, lambda: self.made().mapped(function))

    def solver(self, damping: float) -> Solver:
        """Compute it, and return its solver."""
        return self.made().solver(damping)


class WeightedSum(Curvature):
    r"""The lazy sum :math:`\sum_i w_i F_i` of curvatures.

    It is lazy because a sum of Kronecker products is no Kronecker product.

    Parameters
    ----------
    terms : Sequence[Curvature]
        Curvatures over the same parameters.
    weights : Sequence[float]
        One non-negative weight a term.
    traces : Sequence[float], optional
        The terms' traces, if they are known.

    Raises
    ------
    StructureError
        If there is no term, or if terms cover different parameters.
    """

    def __init__(
        self,
        terms: Sequence[Curvature],
        weights: Sequence[float],
        traces: Sequence[float] | None = None,
    ) -> None:
        if not terms or len(terms) != len(weights):
            raise StructureError(
                f"{len(terms)} curvatures and {len(weights)} weights: pass one each"
            )
        self.terms, self.weights = tuple(terms), tuple(float(w) for w in weights)
        self._traces = traces
        self.shapes = self.terms[0].shapes
        for index, term in enumerate(self.terms):
            if term.shapes != self.shapes:
                different = set(term.shapes.items()) ^ set(self.shapes.items())
                raise StructureError(
                    f"curvature {index} covers other parameters than the first: "
                    f"{sorted(name for name, _ in different)}"
                )

    def __iter__(self) -> Iterator[tuple[float, Curvature]]:
        """Iterate over the pairs (weight, term)."""
        return iter(zip(self.weights, self.terms, strict=True))

    def flat(self) -> Iterator[tuple[float, Curvature]]:
        """Iterate over the pairs (weight, term), inside of terms that are sums, too."""
        for weight, term in self:
            if isinstance(term, WeightedSum):
                yield from ((weight * share, part) for share, part in term.flat())
            else:
                yield weight, term

    def stacks(self) -> list[tuple[float | Tensor, Curvature]]:
        """Return the flat pairs; a stack is one term, and its weights are a tensor."""
        return [
            (weight * term.weights, term.stack)
            if isinstance(term, StackedSum)
            else (weight, term)
            for weight, term in self.flat()
        ]

    def is_diagonal(self) -> bool:
        """Return whether every term is diagonal."""
        return all(isinstance(term, Diagonal) for _, term in self.stacks())

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the weighted sum of the terms' products."""
        return self._sum(term.matvec(vector) for term in self.terms)

    def diagonal(self) -> dict[str, Tensor]:
        """Return the weighted sum of the terms' diagonals."""
        return self._sum(term.diagonal() for term in self.terms)

    def _sum(self, parts: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
        total = {k: v * self.weights[0] for k, v in next(parts).items()}
        for weight, part in zip(self.weights[1:], parts, strict=True):
            for key, value in part.items():
                total[key].add_(value, alpha=weight)
        return total

    def trace(self) -> float:
        """Return the weighted sum of the terms' traces, which are computed once."""
        if self._traces is None:
            self._traces = [term.trace() for term in self.terms]
        return sum(w * t for w, t in zip(self.weights, self._traces, strict=True))

    def traces(self, parts: int = 1) -> Tensor:
        """Return the trace of each part of a stack."""
        first, *others = (weight * term.traces(parts) for weight, term in self)
        return sum(others, first)

    def scaled(self, factor: float) -> "WeightedSum":
        """Return the sum with every weight scaled; no tensor is touched."""
        weights = [weight * factor for weight in self.weights]
        return WeightedSum(self.terms, weights, self._traces)

    def regularised(
        self, *, shrink: float = 0.0, damping: float = 0.0
    ) -> "WeightedSum":
        """Return the sum of the regularised terms."""
        terms = [t.regularised(shrink=shrink, damping=damping) for t in self.terms]
        return WeightedSum(terms, self.weights)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "WeightedSum":
        """Return the sum with a function applied to the terms' tensors."""
        return WeightedSum([term.mapped(function) for term in self.terms], self.weights)

    def solver(self, damping: float) -> Solver:
        """Return a solver: conjugate gradients, except for diagonals or one term."""
        if self.is_diagonal():
            return Diagonal(self.to(dtype=torch.float64).diagonal()).solver(damping)
        if len(self.terms) == 1:
            return self.terms[0].scaled(self.weights[0]).solver(damping)
        return super().solver(damping)

    def blocks(self) -> list["WeightedSum"]:
        """Return one weighted sum for each block that all terms share."""
        return [WeightedSum(b, self.weights) for b in shared_blocks(self.terms)]


def _summed(left: Curvature, right: Curvature) -> WeightedSum:
    """Return the lazy sum, with sums of sums flattened into one."""
    pairs = [*WeightedSum([left, right], [1.0, 1.0]).flat()]
    return WeightedSum([term for _, term in pairs], [weight for weight, _ in pairs])


Curvature.summed = _summed


def shared_blocks(curvatures: Sequence[Curvature]) -> list[tuple[Curvature, ...]]:
    """Return, for each block that all curvatures share, every curvature's part.

    The blocks are the smallest groups of parameters such that no block of any curvature
    crosses the border of a group. They are in the first curvature's order. A part is
    one of the curvature's blocks, or a :class:`BlockDiagonal` of several.
    """
    per_curvature = [curvature.blocks() for curvature in curvatures]
    group: dict[str, tuple[str, ...]] = {}
    for block in chain.from_iterable(per_curvature):
        met = [name for own in block.shapes for name in group.get(own, (own,))]
        group |= dict.fromkeys(met, tuple(dict.fromkeys(met)))
    return [
        tuple(_within(names, blocks) for blocks in per_curvature)
        for names in dict.fromkeys(group.values())
    ]


def _within(names: Iterable[str], blocks: Sequence[Curvature]) -> Curvature:
    own = [block for block in blocks if not block.shapes.keys().isdisjoint(names)]
    return own[0] if len(own) == 1 else BlockDiagonal(own)
