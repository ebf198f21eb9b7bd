"""The symmetric factors of a layer's curvature."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

_AT_ONCE = 64  # directions that are copied at once


class SymmetricFactor(ABC):
    """Symmetric positive semi-definite matrices, one for each group of a layer.

    It multiplies tensors ``[groups, ...]`` from either side, with ``@``. It is a
    :class:`DenseFactor`, or, as a large one is uploaded, a :class:`LowRankFactor`.
    """

    @staticmethod
    def of(value: "Tensor | SymmetricFactor") -> "SymmetricFactor":
        """Return a factor unchanged, and a tensor ``[groups, n, n]`` as a factor."""
        return value if isinstance(value, SymmetricFactor) else DenseFactor(value)

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape as one tensor, ``[groups, n, n]``."""

    @abstractmethod
    def mapped(self, function: Callable[[Tensor], Tensor]) -> "SymmetricFactor":
        """Return the same kind of factor with a function of each of its tensors."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return the matrices as one tensor ``[groups, n, n]``."""

    @abstractmethod
    def add_to(self, total: Tensor) -> None:
        """Add the matrices to a tensor ``[groups, n, n]`` in place, up to rounding.

        If they are several factors' with these groups, one after another, all are
        added.
        """

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonals, ``[groups, n]``."""

    @abstractmethod
    def scaled(self, factor: float | Tensor) -> "SymmetricFactor":
        """Return the matrices times a factor of at least 0, or one a group."""

    @abstractmethod
    def plus_diagonal(self, entries: Tensor, factor: float = 1) -> "SymmetricFactor":
        """Return the matrices times a factor, plus diagonals ``[groups, n]``."""

    @abstractmethod
    def __matmul__(self, right: Tensor) -> Tensor: ...

    @abstractmethod
    def __rmatmul__(self, left: Tensor) -> Tensor: ...

    def trace(self) -> Tensor:
        """Return the traces, ``[groups]``; they are computed once."""
        return self._traces

    @cached_property
    def _traces(self) -> Tensor:
        return self.diagonal().sum(-1)

    def towards_diagonal(self, share: float) -> "SymmetricFactor":
        """Return the matrices with off-diagonal entries scaled by ``1 - share``."""
        if not share:
            return self
        return self.plus_diagonal(share * self.diagonal(), 1 - share)

    def towards_identity(self, share: float) -> "SymmetricFactor":
        """Return the matrices shrunk towards the identity, with the same traces."""
        if not share:
            return self
        mean = self.diagonal().mean(-1, keepdim=True).expand(self.shape[:2])
        return self.plus_diagonal(share * mean, 1 - share)


@dataclass(frozen=True, eq=False)
class DenseFactor(SymmetricFactor):
    r"""A factor with all of its entries: :math:`s M + \operatorname{diag}(d)`.

    The scale and the diagonal are stored separately, so that a merge can regularise the
    factors of every client without a copy.

    Parameters
    ----------
    matrix : Tensor
        :math:`M`, ``[groups, n, n]``.
    scale : Tensor or float, default 1
        :math:`s`, not negative, or one a group, ``[groups]``.
    rest : Tensor, optional
        :math:`d`, ``[groups, n]``; None means 0.

    Examples
    --------
    >>> factor = DenseFactor(torch.tensor([[[2.0, 1.0], [1.0, 3.0]]]))
    >>> factor.trace()
    tensor([5.])
    >>> torch.ones(1, 1, 2) @ factor.towards_diagonal(0.5)
    tensor([[[2.5000, 3.5000]]])
    """

    # What a merge does to a factor (weights, shrinking, damping) changes the scale and
    # the diagonal alone, so that all clients' regularised factors share the matrices
    # that arrived.
    matrix: Tensor
    scale: Tensor | float = 1.0
    rest: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape, ``[groups, n, n]``."""
        return self.matrix.shape

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "DenseFactor":
        """Return the factor with a function applied to each tensor."""
        scale = function(self.scale) if isinstance(self.scale, Tensor) else self.scale
        rest = None if self.rest is None else function(self.rest)
        return DenseFactor(function(self.matrix), scale, rest)

    def to_dense(self) -> Tensor:
        """Return the matrices; they are copied only if they were changed."""
        if self.rest is None and isinstance(self.scale, float) and self.scale == 1:
            return self.matrix
        matrices = self.matrix * _by_group(self.scale, 3)
        if self.rest is not None:
            matrices.diagonal(dim1=-2, dim2=-1).add_(self.rest)
        return matrices

    def add_to(self, total: Tensor) -> None:
        """Add the matrices in place."""
        groups, n, _ = total.shape
        scales = (self.scale * total.new_ones(len(self.matrix))).view(-1, groups, 1)
        rows = self.matrix.view(-1, groups, n * n).transpose(0, 1)
        total.view(groups, 1, -1).baddbmm_(scales.permute(1, 2, 0), rows)
        if self.rest is not None:
            total.diagonal(dim1=-2, dim2=-1).add_(self.rest.view(-1, groups, n).sum(0))

    def diagonal(self) -> Tensor:
        """Return the diagonals."""
        scaled = self.matrix.diagonal(dim1=-2, dim2=-1) * _by_group(self.scale, 2)
        return scaled if self.rest is None else scaled + self.rest

    def scaled(self, factor: float | Tensor) -> "DenseFactor":
        """Return the matrices times a factor, or one a group."""
        rest = None if self.rest is None else self.rest * _by_group(factor, 2)
        return DenseFactor(self.matrix, self.scale * factor, rest)

    def plus_diagonal(self, entries: Tensor, factor: float = 1) -> "DenseFactor":
        """Return them times a factor, with entries added to the diagonals."""
        scaled = self.scaled(float(factor))
        rest = entries if scaled.rest is None else scaled.rest + entries
        return DenseFactor(self.matrix, scaled.scale, rest)

    def __matmul__(self, right: Tensor) -> Tensor:
        return self._completed(self.matrix @ right, right, -1)

    def __rmatmul__(self, left: Tensor) -> Tensor:
        return self._completed(left @ self.matrix, left, -2)

    def _completed(self, product: Tensor, vector: Tensor, dim: int) -> Tensor:
        if isinstance(self.scale, Tensor) or self.scale != 1:
            product.mul_(_by_group(self.scale, 3))
        if self.rest is not None:
            product.addcmul_(vector, self.rest.unsqueeze(dim))
        return product


@dataclass(frozen=True, eq=False)
class LowRankFactor(SymmetricFactor):
    r"""A factor of low rank plus a diagonal: :math:`V V^\top + \operatorname{diag}(d)`.

    Only :meth:`to_dense` makes a matrix of the size ``n x n``. The directions are
    stored separately from their lengths. So they remain the small integers that were
    uploaded, and a factor is scaled without a copy of them. This matters because a
    merge holds the factors of every client.

    Parameters
    ----------
    directions : Tensor
        ``[groups, n, rank]``, of any dtype and length.
    lengths : Tensor
        ``[groups, rank]``, not negative; :math:`V` is the directions times the lengths.
    rest : Tensor
        :math:`d`, ``[groups, n]``, not negative; in an upload, one value for each
        group.
    rows : Tensor, optional
        ``[groups, n]``; the rows of :math:`V` are multiplied by it, too.

    Examples
    --------
    >>> directions = torch.tensor([[[1], [2]]], dtype=torch.int8)
    >>> factor = LowRankFactor(directions, torch.ones(1, 1), torch.full((1, 2), 0.5))
    >>> factor.to_dense()
    tensor([[[1.5000, 2.0000],
             [2.0000, 4.5000]]])
    >>> torch.ones(1, 1, 2) @ factor
    tensor([[[3.5000, 6.5000]]])
    """

    directions: Tensor
    lengths: Tensor
    rest: Tensor
    rows: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape as one tensor, ``[groups, n, n]``."""
        groups, n, _ = self.directions.shape
        return torch.Size((groups, n, n))

    @property
    def rank(self) -> int:
        """The number of directions."""
        return self.directions.shape[-1]

    def vectors(self) -> Tensor:
        """Return :math:`V`, as a copy of the directions."""
        vectors = self.directions * self.lengths.unsqueeze(-2)
        return vectors if self.rows is None else vectors.mul_(self.rows.unsqueeze(-1))

    def joined(self, groups: int) -> tuple[Tensor, Tensor]:
        """Return the vectors of stacked factors as columns, and the sum of their rests.

        All vectors of a group are columns of one matrix ``[groups, n, vectors]``.
        """
        parts, n = len(self.rest) // groups, self.shape[-1]
        columns = self.vectors().view(parts, groups, n, self.rank).permute(1, 2, 0, 3)
        rest = self.rest.reshape(parts, groups, n).sum(0)
        return columns.reshape(groups, n, parts * self.rank), rest

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "LowRankFactor":
        """Return the factor with a function applied to each tensor."""
        every = (self.directions, self.lengths, self.rest, self.rows)
        return LowRankFactor(*(function(each) for each in every if each is not None))

    def to_dense(self) -> Tensor:
        """Return the matrices, exactly symmetric."""
        vectors = self.vectors()
        half = (vectors @ vectors.mT).div_(2)  # first: the sum may overflow
        matrices = half + half.mT
        matrices.diagonal(dim1=-2, dim2=-1).add_(self.rest)
        return matrices

    def add_to(self, total: Tensor) -> None:
        """Add the matrices in place."""
        vectors, rest = self.joined(len(total))
        total.baddbmm_(vectors, vectors.mT)
        total.diagonal(dim1=-2, dim2=-1).add_(rest)

    def diagonal(self) -> Tensor:
        """Return the diagonals, without making a matrix."""
        # Directions may be small integers: only a few at a time become floats.
        total = torch.zeros_like(self.rest)
        directions = torch.split(self.directions, _AT_ONCE, -1)
        lengths = torch.split(self.lengths, _AT_ONCE, -1)
        for some, long in zip(directions, lengths, strict=True):
            total += (some * long.unsqueeze(-2)).square_().sum(-1)
        if self.rows is not None:
            total *= self.rows.square()
        return total + self.rest

    def scaled(self, factor: float | Tensor) -> "LowRankFactor":
        """Return the matrices times a factor, or one a group."""
        # The vectors count twice, so each takes the root.
        lengths = self.lengths * _by_group(factor**0.5, 2)
        rest = self.rest * _by_group(factor, 2)
        return LowRankFactor(self.directions, lengths, rest, self.rows)

    def plus_diagonal(self, entries: Tensor, factor: float = 1) -> "LowRankFactor":
        """Return it times a factor, with entries added to the diagonals."""
        scaled = self.scaled(factor)
        return replace(scaled, rest=scaled.rest + entries)

    def __matmul__(self, right: Tensor) -> Tensor:
        # From the right to the left: two products with a thin matrix, none of n x n.
        vectors = self.vectors()
        return vectors @ (vectors.mT @ right) + self.rest.unsqueeze(-1) * right

    def __rmatmul__(self, left: Tensor) -> Tensor:
        vectors = self.vectors()
        return left @ vectors @ vectors.mT + left * self.rest.unsqueeze(-2)


def _by_group(factor: float | Tensor, dim: int) -> float | Tensor:
    """Return a number unchanged, and numbers ``[groups]`` with trailing dimensions."""
    if not isinstance(factor, Tensor):
        return factor
    return factor.reshape(-1, *[1] * (dim - 1))
