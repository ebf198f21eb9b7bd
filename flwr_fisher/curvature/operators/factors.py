"""The symmetric matrices that a layer's curvature is a product of."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SymmetricFactor:
    """Symmetric positive semi-definite matrices, one for each group of a layer.

    It multiplies matrices ``[groups, ...]`` from either side, with ``@``.

    Parameters
    ----------
    matrix : Tensor
        ``[groups, n, n]``.

    Examples
    --------
    >>> factor = SymmetricFactor(torch.tensor([[[2.0, 1.0], [1.0, 3.0]]]))
    >>> factor.trace()
    tensor([5.])
    >>> torch.ones(1, 1, 2) @ factor
    tensor([[[3., 4.]]])
    """

    matrix: Tensor

    @classmethod
    def of(cls, value: "Tensor | SymmetricFactor") -> "SymmetricFactor":
        """Return a factor as it is, and a tensor as a factor."""
        return value if isinstance(value, SymmetricFactor) else cls(value)

    @property
    def shape(self) -> torch.Size:
        """The shape as one tensor, ``[groups, n, n]``."""
        return self.matrix.shape

    def to_dense(self) -> Tensor:
        """Return the matrices as one tensor ``[groups, n, n]``; it is not copied."""
        return self.matrix

    def diagonal(self) -> Tensor:
        """Return the diagonals, ``[groups, n]``."""
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def trace(self) -> Tensor:
        """Return the traces, ``[groups]``."""
        return self.diagonal().sum(-1)

    def scaled(self, factor: float) -> "SymmetricFactor":
        """Return the matrices times a factor."""
        return SymmetricFactor(self.matrix * factor)

    def towards_diagonal(self, share: float) -> "SymmetricFactor":
        """Return the matrices with off-diagonal entries scaled by ``1 - share``."""
        kept = torch.diag_embed(self.diagonal())
        return SymmetricFactor(torch.lerp(self.matrix, kept, share))

    def towards_identity(self, share: float) -> "SymmetricFactor":
        """Return the matrices drawn to the multiple of the identity of equal trace."""
        mean = self.diagonal().mean(-1).reshape(-1, 1, 1)
        eye = torch.eye(self.shape[-1], dtype=mean.dtype, device=mean.device)
        return SymmetricFactor(torch.lerp(self.matrix, mean * eye, share))

    def __matmul__(self, right: Tensor) -> Tensor:
        return self.matrix @ right

    def __rmatmul__(self, left: Tensor) -> Tensor:
        return left @ self.matrix
