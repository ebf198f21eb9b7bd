"""The symmetric matrices that a layer's curvature is a product of."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class SymmetricFactor(ABC):
    """Symmetric positive semi-definite matrices, one for each group of a layer.

    It multiplies tensors ``[groups, ...]`` from either side, with ``@``. It is a
    :class:`DenseFactor`, or a :class:`LowRankFactor` as it comes off the wire.
    """

    @staticmethod
    def of(value: "Tensor | SymmetricFactor") -> "SymmetricFactor":
        """Return a factor as it is, and a tensor ``[groups, n, n]`` as a factor."""
        return value if isinstance(value, SymmetricFactor) else DenseFactor(value)

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape as one tensor, ``[groups, n, n]``."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return every tensor that this factor holds; no copies."""

    @abstractmethod
    def mapped(self, function: Callable[[Tensor], Tensor]) -> "SymmetricFactor":
        """Return the same kind of factor with a function of each of its tensors."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return the matrices as one tensor ``[groups, n, n]``."""

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
        """Return the traces, ``[groups]``."""
        return self.diagonal().sum(-1)

    def towards_diagonal(self, share: float) -> "SymmetricFactor":
        """Return the matrices with off-diagonal entries scaled by ``1 - share``."""
        if not share:
            return self
        return self.plus_diagonal(share * self.diagonal(), 1 - share)

    def towards_identity(self, share: float) -> "SymmetricFactor":
        """Return the matrices drawn to the multiple of the identity of equal trace."""
        if not share:
            return self
        mean = self.diagonal().mean(-1, keepdim=True).expand(self.shape[:2])
        return self.plus_diagonal(share * mean, 1 - share)


@dataclass(frozen=True, eq=False)
class DenseFactor(SymmetricFactor):
    """A factor with all of its entries.

    Parameters
    ----------
    matrix : Tensor
        ``[groups, n, n]``.

    Examples
    --------
    >>> factor = DenseFactor(torch.tensor([[[2.0, 1.0], [1.0, 3.0]]]))
    >>> factor.trace()
    tensor([5.])
    >>> torch.ones(1, 1, 2) @ factor
    tensor([[[3., 4.]]])
    """

    matrix: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape, ``[groups, n, n]``."""
        return self.matrix.shape

    def tensors(self) -> list[Tensor]:
        """Return the matrices."""
        return [self.matrix]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "DenseFactor":
        """Return a function of the matrices."""
        return DenseFactor(function(self.matrix))

    def to_dense(self) -> Tensor:
        """Return the matrices; they are not copied."""
        return self.matrix

    def diagonal(self) -> Tensor:
        """Return the diagonals."""
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def scaled(self, factor: float | Tensor) -> "DenseFactor":
        """Return the matrices times a factor, or one a group."""
        return DenseFactor(self.matrix * _by_group(factor, 3))

    def plus_diagonal(self, entries: Tensor, factor: float = 1) -> "DenseFactor":
        """Return a copy times a factor, with entries added to the diagonals."""
        matrix = self.matrix * factor
        matrix.diagonal(dim1=-2, dim2=-1).add_(entries)
        return DenseFactor(matrix)

    def __matmul__(self, right: Tensor) -> Tensor:
        return self.matrix @ right

    def __rmatmul__(self, left: Tensor) -> Tensor:
        return left @ self.matrix


@dataclass(frozen=True, eq=False)
class LowRankFactor(SymmetricFactor):
    r"""A factor of few directions: :math:`V V^\top + \operatorname{diag}(d)`.

    Nothing of the size ``n x n`` is formed but by :meth:`to_dense`.

    Parameters
    ----------
    vectors : Tensor
        :math:`V`, ``[groups, n, rank]``.
    rest : Tensor
        :math:`d`, ``[groups, n]``, not negative; of one value a group as it comes off
        the wire.

    Examples
    --------
    >>> factor = LowRankFactor(torch.tensor([[[1.0], [2.0]]]), torch.full((1, 2), 0.5))
    >>> factor.to_dense()
    tensor([[[1.5000, 2.0000],
             [2.0000, 4.5000]]])
    >>> torch.ones(1, 1, 2) @ factor
    tensor([[[3.5000, 6.5000]]])
    """

    vectors: Tensor
    rest: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape as one tensor, ``[groups, n, n]``."""
        groups, n, _ = self.vectors.shape
        return torch.Size((groups, n, n))

    def tensors(self) -> list[Tensor]:
        """Return the vectors and the rest."""
        return [self.vectors, self.rest]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "LowRankFactor":
        """Return a function of the vectors and the rest."""
        return LowRankFactor(function(self.vectors), function(self.rest))

    def to_dense(self) -> Tensor:
        """Return the matrices, exactly symmetric."""
        matrices = self.vectors @ self.vectors.mT
        matrices = matrices / 2 + matrices.mT / 2  # halved first: the sum may overflow
        matrices.diagonal(dim1=-2, dim2=-1).add_(self.rest)
        return matrices

    def diagonal(self) -> Tensor:
        """Return the diagonals."""
        return self.vectors.square().sum(-1) + self.rest

    def scaled(self, factor: float | Tensor) -> "LowRankFactor":
        """Return the matrices times a factor, or one a group."""
        vectors = self.vectors * _by_group(factor**0.5, 3)
        return LowRankFactor(vectors, self.rest * _by_group(factor, 2))

    def plus_diagonal(self, entries: Tensor, factor: float = 1) -> "LowRankFactor":
        """Return it times a factor, with entries added to the rest."""
        vectors = self.vectors if factor == 1 else self.vectors * factor**0.5
        return LowRankFactor(vectors, self.rest * factor + entries)

    def __matmul__(self, right: Tensor) -> Tensor:
        along = self.vectors @ (self.vectors.mT @ right)
        return along + self.rest.unsqueeze(-1) * right

    def __rmatmul__(self, left: Tensor) -> Tensor:
        along = (left @ self.vectors) @ self.vectors.mT
        return along + left * self.rest.unsqueeze(-2)


def _by_group(factor: float | Tensor, dim: int) -> float | Tensor:
    """Return a number as it is, and numbers ``[groups]`` with trailing dimensions."""
    if not isinstance(factor, Tensor):
        return factor
    return factor.reshape(-1, *[1] * (dim - 1))
