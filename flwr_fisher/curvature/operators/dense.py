"""The dense curvature, for small models and for oracles."""

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params, Shapes, flatten, select, unflatten


class Dense(Curvature):
    """A full matrix over all covered parameters.

    Parameters
    ----------
    shapes : Mapping[str, torch.Size]
        The parameters in the order of the matrix's rows.
    matrix : Tensor
        ``[d, d]``, symmetric positive semi-definite.
    """

    def __init__(self, shapes: Shapes, matrix: Tensor) -> None:
        self.shapes, self.matrix = dict(shapes), matrix
        if matrix.shape != (self.numel(), self.numel()):
            raise StructureError(
                f"a matrix of shape {tuple(matrix.shape)} does not fit "
                f"{self.numel()} parameters"
            )

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the matrix-vector product."""
        self.check(vector)
        return unflatten(
            self.matrix @ flatten(select(vector, self.shapes)), self.shapes
        )

    def diagonal(self) -> dict[str, Tensor]:
        """Return the matrix's diagonal in the parameters' shapes."""
        return unflatten(self.matrix.diagonal().clone(), self.shapes)

    def scaled(self, factor: float) -> "Dense":
        """Return the matrix times a factor."""
        return Dense(self.shapes, self.matrix * factor)

    def regularised(self, *, shrink: float = 0.0, damping: float = 0.0) -> "Dense":
        """Return the matrix with its off-diagonal entries scaled by ``1 - shrink``.

        Inputs and outputs are not distinguished, so `damping` does nothing.
        """
        kept = torch.diag(self.matrix.diagonal())
        return Dense(self.shapes, torch.lerp(self.matrix, kept, shrink))

    def to_dense(self) -> Tensor:
        """Return the matrix itself."""
        return self.matrix

    def tensors(self) -> list[Tensor]:
        """Return the matrix."""
        return [self.matrix]
