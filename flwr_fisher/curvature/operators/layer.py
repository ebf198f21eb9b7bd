"""The base of curvatures of one layer, seen as a matrix with the bias last."""

from abc import abstractmethod

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Curvature, Solver
from flwr_fisher.curvature.operators.factors import SymmetricFactor
from flwr_fisher.curvature.operators.solvers import divided
from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params, unflatten


def to_matrices(weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Return ``[groups, out / groups, n]`` of a weight ``[out, in / groups, *kernel]``.

    With a bias ``[out]``, it is the last of the n columns.
    """
    matrices = weight.reshape(groups, len(weight) // groups, -1)
    if bias is None:
        return matrices
    return torch.cat([matrices, bias.reshape(*matrices.shape[:2], 1)], dim=-1)


def from_matrices(
    matrices: Tensor, weight: str, shape: torch.Size, bias: str | None
) -> dict[str, Tensor]:
    """Return the weight and bias of such matrices: the inverse of `to_matrices`."""
    if bias is None:
        return {weight: matrices.reshape(shape)}
    return {
        weight: matrices[..., :-1].reshape(shape),
        bias: matrices[..., -1].reshape(-1),
    }


ScaledFactor = tuple[SymmetricFactor, Tensor]


class LayerCurvature(Curvature):
    """A curvature over one layer: its weight as a matrix, with the bias as last column.

    `a` and `g` are the shapes of the matrices that act on its inputs and on its
    outputs.
    """

    def __init__(
        self,
        weight: str,
        weight_shape: torch.Size,
        bias: str | None,
        a: torch.Size,
        g: torch.Size,
    ) -> None:
        self.weight, self.bias = weight, bias
        self.weight_shape = torch.Size(weight_shape)
        self.shapes = {weight: self.weight_shape}
        if bias is not None:
            self.shapes[bias] = self.weight_shape[:1]
        self.groups = a[0] if len(a) == 3 else 0
        inputs = self.weight_shape[1:].numel() + (bias is not None)
        outputs = self.weight_shape[0] // max(self.groups, 1)
        self.matrix_shape = torch.Size((self.groups, outputs, inputs))
        fitting = (self.groups, inputs, inputs), (self.groups, outputs, outputs)
        if not self.groups or (a, g) != fitting:
            raise StructureError(
                f"'{weight}' of shape {tuple(self.weight_shape)} does not fit factors "
                f"of shapes {tuple(a)} and {tuple(g)}"
            )

    @abstractmethod
    def product(self, matrices: Tensor) -> Tensor:
        """Return the product with a vector laid out by :meth:`as_matrices`."""

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the product in the parameters' shapes."""
        self.check(vector)
        return self.as_params(self.product(self.as_matrices(vector)))

    @abstractmethod
    def dense_blocks(self) -> Tensor:
        """Return each group's matrix, ``[groups, out in, out in]``."""

    @abstractmethod
    def partial_traces(self) -> tuple[ScaledFactor, ScaledFactor]:
        r"""Return the partial traces: over the outputs, and over the inputs.

        For :math:`G \otimes A` they are :math:`\operatorname{tr}(G) A` and
        :math:`\operatorname{tr}(A) G`; both have the trace of the whole. Each is a
        factor and its multiplier ``[groups]``, so that no factor is copied.
        """

    def as_matrices(self, vector: Params) -> Tensor:
        """Return the layer as ``[groups, out / groups, n]``, the bias last."""
        bias = None if self.bias is None else vector[self.bias]
        return to_matrices(vector[self.weight], bias, self.groups)

    def as_params(self, matrices: Tensor) -> dict[str, Tensor]:
        """Return ``[groups, out / groups, n]`` as the weight and the bias."""
        return from_matrices(matrices, self.weight, self.weight_shape, self.bias)

    def solver_in(self, A: Tensor, G: Tensor, values: Tensor, damping: float) -> Solver:
        """Return a solver by eigenvalues, in bases of the outputs and inputs."""

        def solve(rhs: Params) -> dict[str, Tensor]:
            rotated = G.mT @ self.as_matrices(rhs) @ A
            return self.as_params(G @ divided(rotated, values, damping) @ A.mT)

        return solve

    def summary(self) -> str:
        """Return the weight's name and its numbers of outputs and inputs."""
        groups, outputs, inputs = self.matrix_shape
        of_groups = f"{groups} groups of " if groups > 1 else ""
        return f"'{self.weight}', {of_groups}{outputs} x {inputs}"

    def to_dense(self) -> Tensor:
        """Return the matrix over the flattened weight followed by the bias."""
        blocks = self.dense_blocks()
        matrix = blocks.new_zeros(self.numel(), self.numel())
        rows = unflatten(torch.arange(self.numel()).to(blocks.device), self.shapes)
        for at, block in zip(self.as_matrices(rows).flatten(1), blocks, strict=True):
            matrix[at.unsqueeze(1), at] = block
        return matrix
