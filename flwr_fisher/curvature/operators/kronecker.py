"""Kronecker-factored curvatures of one layer: K-FAC and E-KFAC."""

from collections.abc import Callable

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Curvature, Solver
from flwr_fisher.curvature.operators.factors import LowRankFactor, SymmetricFactor
from flwr_fisher.curvature.operators.layer import LayerCurvature, ScaledFactor
from flwr_fisher.curvature.operators.lazy import WeightedSum
from flwr_fisher.curvature.operators.solvers import eigen, known_moments
from flwr_fisher.errors import StructureError


class Kronecker(LayerCurvature):
    r"""One layer's Fisher as :math:`G \otimes A` (Martens & Grosse 2015).

    Let :math:`W` be the layer's weight as a matrix, outputs by inputs, with the bias,
    if there is one, as its last column. Then :math:`F \operatorname{vec} W` is
    :math:`\operatorname{vec}(G W A)`, where vec stacks rows (K-FAC's papers stack
    columns, and have :math:`A \otimes G`). :meth:`dense_blocks` has this order;
    :meth:`to_dense` has the weight's entries first, then the bias. For a convolution
    the inputs are the unfolded patches (KFC, Grosse & Martens 2016); `A` is summed over
    output positions and `G` averaged. A grouped convolution has one pair of factors for
    each group, and no curvature between groups.

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
        super().__init__(weight, weight_shape, bias, A.shape, G.shape)
        self.A_factor, self.G_factor = SymmetricFactor.of(A), SymmetricFactor.of(G)

    @property
    def A(self) -> Tensor:  # noqa: N802
        """The inputs' factor as a dense tensor ``[groups, n, n]``."""
        return self.A_factor.to_dense()

    @property
    def G(self) -> Tensor:  # noqa: N802
        """The factor of the output gradients as a dense tensor."""
        return self.G_factor.to_dense()

    def product(self, matrices: Tensor) -> Tensor:
        r"""Return :math:`G W A`."""
        # `tensor @ factor` would first try to convert the factor, which is slow.
        return self.A_factor.__rmatmul__(self.G_factor @ matrices)

    def diagonal(self) -> dict[str, Tensor]:
        """Return the outer products of the factors' diagonals."""
        a, g = self.A_factor.diagonal(), self.G_factor.diagonal()
        return self.as_params(g.unsqueeze(-1) * a.unsqueeze(-2))

    def queued_trace(self) -> Tensor:
        """Return the sum over groups of the product of both factors' traces."""
        return (self.A_factor.trace().double() * self.G_factor.trace()).sum()

    def scaled(self, factor: float) -> "Kronecker":
        """Return the curvature with `G` scaled."""
        return self.with_factors(self.A_factor, self.G_factor.scaled(factor))

    def regularised(self, *, shrink: float = 0.0, damping: float = 0.0) -> "Kronecker":
        r"""Return the layer with its factors shrunk towards simpler ones.

        :math:`A \leftarrow (1 - s) A + s \operatorname{diag} A`, as in RegMean (Jin et
        al. 2023), and :math:`G \leftarrow (1 - t) G + t\,(\operatorname{tr} G/m)\,I`
        (Ledoit & Wolf 2004), group by group. Traces stay as they are.
        """
        return self.with_factors(
            self.A_factor.towards_diagonal(shrink),
            self.G_factor.towards_identity(damping),
        )

    def partial_traces(self) -> tuple[ScaledFactor, ScaledFactor]:
        """Return each factor times the other's trace."""
        A, G = self.A_factor, self.G_factor
        return (A, G.trace()), (G, A.trace())

    def with_factors(
        self, A: Tensor | SymmetricFactor, G: Tensor | SymmetricFactor
    ) -> "Kronecker":
        """Return the layer with other factors."""
        return Kronecker(self.weight, self.weight_shape, A, G, self.bias)

    def dense_blocks(self) -> Tensor:
        """Return each group's Kronecker product."""
        pairs = zip(self.A, self.G, strict=True)
        return torch.stack([torch.kron(g, a) for a, g in pairs])

    def tensors(self) -> list[Tensor]:
        """Return both factors' tensors."""
        return [*self.A_factor.tensors(), *self.G_factor.tensors()]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Kronecker":
        """Return the curvature with a function applied to both factors' tensors."""
        return self.with_factors(
            self.A_factor.mapped(function), self.G_factor.mapped(function)
        )

    def solver(self, damping: float) -> Solver:
        """Return a solver by the eigenvalues of both factors."""
        (a, U_A), (g, U_G) = (eigen(factor, damping) for factor in (self.A, self.G))
        return self.solver_in(U_A, U_G, g.unsqueeze(-1) * a.unsqueeze(-2), damping)

    def non_negative(self) -> list[Tensor]:
        """Return both factors' diagonals: in their products, two signs can cancel."""
        return [self.A_factor.diagonal(), self.G_factor.diagonal()]


_BENT = 1e-4  # how far a basis may be from orthonormal; rounding is far less


class EigenKronecker(LayerCurvature):
    r"""One layer's Fisher in K-FAC's eigenbasis: E-KFAC (George et al. 2018).

    :math:`F \operatorname{vec} W = \operatorname{vec}\big(U_G\,(S \circ (U_G^\top W
    U_A))\,U_A^\top\big)`, where :math:`S` has the gradients' exact second moments in
    that basis. Of all curvatures that are diagonal in this basis, it is the nearest to
    the Fisher.

    Parameters
    ----------
    weight, weight_shape, bias
        As for :class:`Kronecker`.
    basis_A, basis_G : Tensor
        ``[groups, n, n]`` and ``[groups, m, m]``: orthonormal columns.
    moments : Tensor
        :math:`S`, ``[groups, m, n]``, non-negative.
    """

    def __init__(
        self,
        weight: str,
        weight_shape: torch.Size,
        basis_A: Tensor,
        basis_G: Tensor,
        moments: Tensor,
        bias: str | None = None,
    ) -> None:
        super().__init__(weight, weight_shape, bias, basis_A.shape, basis_G.shape)
        if moments.shape != self.matrix_shape:
            raise StructureError(
                f"'{weight}' needs moments of shape {tuple(self.matrix_shape)}, got "
                f"{tuple(moments.shape)}"
            )
        self.basis_A, self.basis_G, self.moments = basis_A, basis_G, moments

    def product(self, matrices: Tensor) -> Tensor:
        """Return the product, computed in the eigenbasis."""
        rotated = self.basis_G.mT @ matrices @ self.basis_A
        return self.basis_G @ (self.moments * rotated) @ self.basis_A.mT

    def diagonal(self) -> dict[str, Tensor]:
        """Return the diagonal: the moments times the squared bases."""
        squares = self.basis_G.square() @ self.moments @ self.basis_A.square().mT
        return self.as_params(squares)

    def scaled(self, factor: float) -> "EigenKronecker":
        """Return the curvature with its moments scaled."""
        return self.with_factors(self.basis_A, self.basis_G, self.moments * factor)

    def regularised(self, *, shrink: float = 0.0, damping: float = 0.0) -> Curvature:
        r"""Return the layer with its moments shrunk, as :meth:`Kronecker.regularised`.

        `damping` draws the moments to their mean over outputs. `shrink` mixes in the
        curvature without correlations between inputs, which has the moments
        :math:`S\,(U_A \circ U_A)^\top` in the inputs' own basis. Traces stay as they
        are. If a codec left out columns of a basis, damping also affects their
        directions.
        """
        damped = self._damped(damping) if damping else self
        if not shrink:
            return damped
        A = self.basis_A
        eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
        moments = damped.moments @ self.basis_A.square().mT
        apart = damped.with_factors(eye, damped.basis_G, moments)
        return WeightedSum([damped, apart], [1 - shrink, shrink])

    def partial_traces(self) -> tuple[ScaledFactor, ScaledFactor]:
        """Return each basis with the moments summed over the other's columns."""
        of_A, of_G = (b.square().sum(-2) for b in (self.basis_A, self.basis_G))
        inputs = (self.moments * of_G.unsqueeze(-1)).sum(-2)
        outputs = (self.moments * of_A.unsqueeze(-2)).sum(-1)
        one = torch.ones_like(inputs[..., 0])
        of_inputs = _in_basis(self.basis_A, inputs)
        return (of_inputs, one), (_in_basis(self.basis_G, outputs), one)

    def _damped(self, share: float) -> "EigenKronecker":
        wide = torch.promote_types(self.basis_G.dtype, torch.float32)  # for QR
        basis = torch.linalg.qr(self.basis_G.to(wide))[0].to(self.basis_G)
        moments = self.moments * self.basis_G.square().sum(-2).unsqueeze(-1)
        drawn = moments.lerp(moments.mean(1, keepdim=True), share)
        return self.with_factors(self.basis_A, basis, drawn)

    def with_factors(
        self, basis_A: Tensor, basis_G: Tensor, moments: Tensor
    ) -> "EigenKronecker":
        """Return the layer with other bases and moments."""
        A, G = basis_A, basis_G
        return EigenKronecker(self.weight, self.weight_shape, A, G, moments, self.bias)

    def dense_blocks(self) -> Tensor:
        """Return each group's matrix."""
        parts = zip(self.basis_A, self.basis_G, self.moments, strict=True)
        # torch.kron fails on factors of different memory formats.
        bases = [
            (torch.kron(g.contiguous(), a.contiguous()), s.flatten())
            for a, g, s in parts
        ]
        return torch.stack([u * s @ u.mT for u, s in bases])

    def tensors(self) -> list[Tensor]:
        """Return the bases and the moments."""
        return [self.basis_A, self.basis_G, self.moments]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "EigenKronecker":
        """Return the curvature with a function applied to the bases and moments."""
        return self.with_factors(*(function(tensor) for tensor in self.tensors()))

    def solver(self, damping: float) -> Solver:
        """Return a solver: by the moments, or by conjugate gradients.

        Without damping, moments that may be only rounding count as 0. Conjugate
        gradients are needed if a codec has rounded the bases, so that they are no
        longer orthonormal.
        """
        (U_A, R_A), (U_G, R_G) = map(_orthonormal, (self.basis_A, self.basis_G))
        if R_A is None or R_G is None:
            return super().solver(damping)
        moments = known_moments(self.moments, damping)
        values = R_G.unsqueeze(-1) * moments * R_A.unsqueeze(-2)
        return self.solver_in(U_A, U_G, values, damping)

    def non_negative(self) -> list[Tensor]:
        """Return the moments, in any basis."""
        return [self.moments]


def _in_basis(basis: Tensor, values: Tensor) -> LowRankFactor:
    return LowRankFactor(basis, values.sqrt(), torch.zeros_like(basis[..., 0]))


def _orthonormal(basis: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a basis with its zero columns filled in, and a 1 for each other column.

    None in their place if columns are not orthonormal.
    """
    Q, R = torch.linalg.qr(basis.double())
    there = R.diagonal(dim1=-2, dim2=-1).abs().round()
    bent = (R.abs() - torch.diag_embed(there)).abs().max() > _BENT
    return Q, None if bent else there
