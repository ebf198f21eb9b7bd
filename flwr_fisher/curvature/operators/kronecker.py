"""The Kronecker-factored curvature of one layer: K-FAC."""

from collections.abc import Callable

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Solver
from flwr_fisher.curvature.operators.eigenvalues import eigen
from flwr_fisher.curvature.operators.factors import SymmetricFactor
from flwr_fisher.curvature.operators.layer import LayerCurvature, ScaledFactor


class Kronecker(LayerCurvature):
    r"""One layer's Fisher as :math:`G \otimes A` (Martens & Grosse 2015).

    With the layer's weight as a matrix :math:`W`, outputs by inputs, the bias as its
    last column where there is one, :math:`F \operatorname{vec} W` is
    :math:`\operatorname{vec}(G W A)`. For a convolution the inputs are the unfolded
    patches (KFC, Grosse & Martens 2016); `A` is summed over output positions and `G`
    averaged. A grouped convolution has one pair a group and no curvature between
    groups.

    Parameters
    ----------
    weight : str
        The weight's name.
    weight_shape : torch.Size
        ``[out, in / groups, *kernel]``.
    A : Tensor | SymmetricFactor
        ``[groups, n, n]``, :math:`E[a a^\top]` of the inputs, with
        ``n = in / groups * kernel (+ 1 with a bias)``.
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
        super().__init__(weight, weight_shape, bias, A.shape, G.shape)
        self.of_inputs, self.of_outputs = SymmetricFactor.of(A), SymmetricFactor.of(G)

    @property
    def A(self) -> Tensor:  # noqa: N802
        """The inputs' factor as a tensor ``[groups, n, n]``, made if it is not one."""
        return self.of_inputs.to_dense()

    @property
    def G(self) -> Tensor:  # noqa: N802
        """The output gradients' factor as a tensor."""
        return self.of_outputs.to_dense()

    def product(self, matrices: Tensor) -> Tensor:
        r"""Return :math:`G W A`."""
        # For `@` a tensor first tries to take the factor as a tensor, which takes long.
        return self.of_inputs.__rmatmul__(self.of_outputs @ matrices)

    def diagonal(self) -> dict[str, Tensor]:
        """Return the outer products of the factors' diagonals."""
        a, g = self.of_inputs.diagonal(), self.of_outputs.diagonal()
        return self.as_params(g.unsqueeze(-1) * a.unsqueeze(-2))

    def trace(self) -> float:
        """Return the sum over groups of the product of both factors' traces."""
        traces = self.of_inputs.trace().double() * self.of_outputs.trace()
        return float(traces.sum())

    def scaled(self, factor: float) -> "Kronecker":
        """Return the curvature with `G` scaled."""
        return self._with(self.of_inputs, self.of_outputs.scaled(factor))

    def regularised(self, *, shrink: float = 0.0, damping: float = 0.0) -> "Kronecker":
        r"""Return the layer with its factors drawn towards simpler ones.

        :math:`A \leftarrow (1 - s) A + s \operatorname{diag} A`, as in RegMean (Jin et
        al. 2023), and :math:`G \leftarrow (1 - t) G + t\,(\operatorname{tr} G/m)\,I`
        (Ledoit & Wolf 2004), group by group. Traces stay as they are.
        """
        return self._with(
            self.of_inputs.towards_diagonal(shrink),
            self.of_outputs.towards_identity(damping),
        )

    def partial_traces(self) -> tuple[ScaledFactor, ScaledFactor]:
        """Return each factor with the other's trace."""
        A, G = self.of_inputs, self.of_outputs
        return (A, G.trace()), (G, A.trace())

    def with_rows(self, outputs: Tensor, inputs: Tensor) -> "Kronecker":
        """Return the layer with both factors' rows and columns moved."""
        return self._with(
            self.of_inputs.with_rows(inputs), self.of_outputs.with_rows(outputs)
        )

    def _with(self, A: SymmetricFactor, G: SymmetricFactor) -> "Kronecker":
        return Kronecker(self.weight, self.weight_shape, A, G, self.bias)

    def dense_blocks(self) -> Tensor:
        """Return each group's Kronecker product."""
        pairs = zip(self.A, self.G, strict=True)
        return torch.stack([torch.kron(g, a) for a, g in pairs])

    def tensors(self) -> list[Tensor]:
        """Return both factors' tensors."""
        return [*self.of_inputs.tensors(), *self.of_outputs.tensors()]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Kronecker":
        """Return a function of both factors' tensors."""
        return self._with(
            self.of_inputs.mapped(function), self.of_outputs.mapped(function)
        )

    def solver(self, damping: float) -> Solver:
        """Solve by the eigenvalues of both factors."""
        (a, U_A), (g, U_G) = (eigen(factor, damping) for factor in (self.A, self.G))
        return self.solver_in(U_A, U_G, g.unsqueeze(-1) * a.unsqueeze(-2), damping)

    def non_negative(self) -> list[Tensor]:
        """Return both factors' diagonals, whose products may hide their signs."""
        return [self.of_inputs.diagonal(), self.of_outputs.diagonal()]
