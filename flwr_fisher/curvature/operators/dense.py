"""The dense curvature, for small models and for oracles."""

from collections.abc import Callable

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Curvature, Solver
from flwr_fisher.curvature.operators.eigenvalues import divided, eigen
from flwr_fisher.curvature.operators.matrices import to_matrices
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
        r"""Return the matrix drawn towards simpler ones; its trace stays as it is.

        Off-diagonal entries are scaled by ``1 - shrink``. Then `damping` mixes in a
        matrix without correlations between outputs, in which each layer (a
        ``…weight`` of two or more dimensions and its ``…bias``) has for all outputs
        the mean of their blocks, and any other parameter its diagonal. This is what
        it is to :meth:`Kronecker.regularised` where the matrix is one layer's
        :math:`G \otimes A`; of groups it knows nothing.
        """
        matrix = self.matrix.lerp(torch.diag(self.matrix.diagonal()), shrink)
        return Dense(self.shapes, matrix.lerp(self._outputs_apart(matrix), damping))

    def _outputs_apart(self, matrix: Tensor) -> Tensor:
        apart = torch.diag(matrix.diagonal())
        rows = unflatten(torch.arange(self.numel()).to(apart.device), self.shapes)
        for name, weight in rows.items():
            if name.endswith("weight") and weight.dim() > 1:
                bias = rows.get(name.removesuffix("weight") + "bias")
                fits = bias is not None and bias.shape == weight.shape[:1]
                (at,) = to_matrices(weight, bias if fits else None, 1)  # out by in
                blocks = at.unsqueeze(2), at.unsqueeze(1)
                apart[blocks] = matrix[blocks].mean(0)
        return apart

    def to_dense(self) -> Tensor:
        """Return the matrix itself."""
        return self.matrix

    def tensors(self) -> list[Tensor]:
        """Return the matrix."""
        return [self.matrix]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Dense":
        """Return a function of the matrix."""
        return Dense(self.shapes, function(self.matrix))

    def solver(self, damping: float) -> Solver:
        """Solve by the matrix's eigenvalues."""
        values, vectors = eigen(self.matrix, damping)

        def solve(rhs: Params) -> dict[str, Tensor]:
            rotated = vectors.mT @ flatten(select(rhs, self.shapes))
            return unflatten(vectors @ divided(rotated, values, damping), self.shapes)

        return solve
