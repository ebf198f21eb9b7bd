"""K-FAC's curvature of one layer, seen as a matrix with the bias last."""

from collections.abc import Callable

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Curvature, Solver, divided, eigen
from flwr_fisher.curvature.operators.factors import SymmetricFactor
from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params


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
    columns, last = matrices[..., :-1], matrices[..., -1]
    return {weight: columns.reshape(shape), bias: last.reshape(-1)}


ScaledFactor = tuple[SymmetricFactor, Tensor]


class Kronecker(Curvature):
    r"""One layer's Fisher as :math:`G \otimes A` (Martens & Grosse 2015).

    Let :math:`W` be the layer's weight as a matrix, outputs by inputs, with the bias,
    if there is one, as its last column. Then :math:`F \operatorname{vec} W` is
    :math:`\operatorname{vec}(G W A)`, where vec stacks rows (K-FAC's papers stack
    columns, and have :math:`A \otimes G`). :meth:`to_dense` has another order: the
    weight's entries first, then the bias. For a convolution the inputs are the unfolded
    patches (KFC, Grosse & Martens 2016); `A` is summed over output positions and `G`
    averaged. A grouped convolution has one pair of factors for each group, and no
    curvature between groups.

    Parameters
    ----------
    weight : str
        The weight's name.
    weight_shape : torch.Size
        ``[out, in / groups, *kernel]``.
    A : Tensor | SymmetricFactor
        ``[groups, n, n]``, :math:`E[a a^\top]` of the inputs, with
        ``n = in / groups * kernel (+ 1 with a bias)``. A ``SymmetricFactor`` is such a
        matrix as an upload has it, of low rank.
    G : Tensor | SymmetricFactor
        ``[groups, out / groups, out / groups]``, :math:`E[g g^\top]` of the gradients
        with respect to the outputs before the non-linearity.
    bias : str | None
        The bias's name, if the layer has one and it is trained.

    Raises
    ------
    StructureError
        If the factors' shapes do not fit the weight.
    """

    def __init__(
        self,
        weight: str,
        weight_shape: torch.Size,
        A: Tensor | SymmetricFactor,
        G: Tensor | SymmetricFactor,
        bias: str | None = None,
    ) -> None:
        self.weight, self.bias = weight, bias
        self.weight_shape = torch.Size(weight_shape)
        self.shapes = {weight: self.weight_shape}
        if bias is not None:
            self.shapes[bias] = self.weight_shape[:1]
        self.groups = A.shape[0] if len(A.shape) == 3 else 0
        inputs = self.weight_shape[1:].numel() + (bias is not None)
        outputs = self.weight_shape[0] // max(self.groups, 1)
        self.matrix_shape = torch.Size((self.groups, outputs, inputs))
        fitting = (self.groups, inputs, inputs), (self.groups, outputs, outputs)
        if not self.groups or (A.shape, G.shape) != fitting:
            raise StructureError(
                f"'{weight}' of shape {tuple(self.weight_shape)} does not fit factors "
                f"of shapes {tuple(A.shape)} and {tuple(G.shape)}"
            )
        self.A_factor, self.G_factor = SymmetricFactor.of(A), SymmetricFactor.of(G)

    @property
    def A(self) -> Tensor:  # noqa: N802
        """The inputs' factor as a dense tensor ``[groups, n, n]``."""
        return self.A_factor.to_dense()

    @property
    def G(self) -> Tensor:  # noqa: N802
        """The factor of the output gradients as a dense tensor."""
        return self.G_factor.to_dense()

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the product in the parameters' shapes."""
        self.check(vector)
        return self.as_params(self.product(self.as_matrices(vector)))

    def product(self, matrices: Tensor) -> Tensor:
        r"""Return :math:`G W A`, of a vector laid out by :meth:`as_matrices`."""
        # `tensor @ factor` would first try to convert the factor, which is slow.
        return self.A_factor.__rmatmul__(self.G_factor @ matrices)

    def as_matrices(self, vector: Params) -> Tensor:
        """Return the layer as ``[groups, out / groups, n]``, the bias last."""
        bias = None if self.bias is None else vector[self.bias]
        return to_matrices(vector[self.weight], bias, self.groups)

    def as_params(self, matrices: Tensor) -> dict[str, Tensor]:
        """Return ``[groups, out / groups, n]`` as the weight and the bias."""
        return from_matrices(matrices, self.weight, self.weight_shape, self.bias)

    def diagonal(self) -> dict[str, Tensor]:
        """Return the outer products of the factors' diagonals."""
        a, g = self.A_factor.diagonal(), self.G_factor.diagonal()
        return self.as_params(g.unsqueeze(-1) * a.unsqueeze(-2))

    def traces(self, parts: int = 1) -> Tensor:
        """Return the sums over groups of the product of both factors' traces."""
        by_group = self.A_factor.trace().double() * self.G_factor.trace()
        return by_group.view(parts, -1).sum(-1)

    def scaled(self, factor: float) -> "Kronecker":
        """Return the curvature with `G` scaled."""
        return self.with_factors(self.A_factor, self.G_factor.scaled(factor))

    def regularised(self, *, shrink: float = 0.0, damping: float = 0.0) -> "Kronecker":
        r"""Return the layer with its factors shrunk towards simpler ones.

        :math:`A \leftarrow (1 - s) A + s \operatorname{diag} A`, as in RegMean (Jin et
        al. 2023), and :math:`G \leftarrow (1 - t) G + t\,(\operatorname{tr} G/m)\,I`
        (Ledoit & Wolf 2004), group by group. Traces stay as they are.
        """
        A = self.A_factor.towards_diagonal(shrink)
        return self.with_factors(A, self.G_factor.towards_identity(damping))

    def partial_traces(self) -> tuple[ScaledFactor, ScaledFactor]:
        r"""Return the partial traces: over the outputs, and over the inputs.

        They are :math:`\operatorname{tr}(G) A` and :math:`\operatorname{tr}(A) G`; both
        have the trace of the whole. Each is a factor and its multiplier ``[groups]``,
        so that no factor is copied.
        """
        A, G = self.A_factor, self.G_factor
        return (A, G.trace()), (G, A.trace())

    def with_factors(
        self, A: Tensor | SymmetricFactor, G: Tensor | SymmetricFactor
    ) -> "Kronecker":
        """Return the layer with other factors."""
        return Kronecker(self.weight, self.weight_shape, A, G, self.bias)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Kronecker":
        """Return the curvature with a function applied to both factors' tensors."""
        A = self.A_factor.mapped(function)
        return self.with_factors(A, self.G_factor.mapped(function))

    def solver(self, damping: float) -> Solver:
        """Return a solver by the eigenvalues of both factors."""
        (a, U_A), (g, U_G) = (eigen(factor, damping) for factor in (self.A, self.G))
        values = g.unsqueeze(-1) * a.unsqueeze(-2)

        def solve(rhs: Params) -> dict[str, Tensor]:
            rotated = U_G.mT @ self.as_matrices(rhs) @ U_A
            return self.as_params(U_G @ divided(rotated, values, damping) @ U_A.mT)

        return solve

    def non_negative(self) -> list[Tensor]:
        """Return both factors' diagonals: in their products, two signs can cancel."""
        return [self.A_factor.diagonal(), self.G_factor.diagonal()]
