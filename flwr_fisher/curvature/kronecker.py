"""The Kronecker-factored curvature of one layer: K-FAC, and K-FAC's eigenbasis."""

from abc import abstractmethod

import torch
from torch import Tensor

from flwr_fisher.curvature.base import Curvature
from flwr_fisher.curvature.matrices import from_matrices, to_matrices
from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params, unflatten

__all__ = ["EigenKronecker", "Kronecker"]


class _MatrixLayer(Curvature):
    """A curvature over a layer's weight, as a matrix with the bias as last column."""

    def __init__(
        self,
        weight: str,
        weight_shape: torch.Size,
        bias: str | None,
        factors: tuple[Tensor, Tensor],
    ) -> None:
        self.weight, self.bias = weight, bias
        self.weight_shape = torch.Size(weight_shape)
        A, G = factors
        self.groups = A.shape[0] if A.dim() == 3 else 0
        inputs = self.weight_shape[1:].numel() + (bias is not None)
        outputs = self.weight_shape[0] // max(self.groups, 1)
        self.matrix_shape = torch.Size((self.groups, outputs, inputs))
        a, g = (self.groups, inputs, inputs), (self.groups, outputs, outputs)
        if not self.groups or A.shape != a or G.shape != g:
            raise StructureError(
                f"'{weight}' of shape {tuple(self.weight_shape)} does not fit factors "
                f"of shapes {tuple(A.shape)} and {tuple(G.shape)}"
            )

    @abstractmethod
    def dense_blocks(self) -> Tensor:
        """Return each group's matrix, ``[groups, out in, out in]``."""

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The weight's shape, and the bias's."""
        shapes = {self.weight: self.weight_shape}
        if self.bias is not None:
            shapes[self.bias] = self.weight_shape[:1]
        return shapes

    def as_matrices(self, vector: Params) -> Tensor:
        """Return the layer as ``[groups, out / groups, n]``, the bias last."""
        bias = None if self.bias is None else vector[self.bias]
        return to_matrices(vector[self.weight], bias, self.groups)

    def as_params(self, matrices: Tensor) -> dict[str, Tensor]:
        """Cut ``[groups, out / groups, n]`` back into the weight and the bias."""
        return from_matrices(matrices, self.weight, self.weight_shape, self.bias)

    def to_dense(self) -> Tensor:
        """Return the matrix over the flattened weight followed by the bias."""
        blocks = self.dense_blocks()
        matrix = blocks.new_zeros(self.numel(), self.numel())
        rows = unflatten(torch.arange(self.numel()).to(blocks.device), self.shapes)
        for at, block in zip(self.as_matrices(rows).flatten(1), blocks, strict=True):
            matrix[at.unsqueeze(1), at] = block
        return matrix


class Kronecker(_MatrixLayer):
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
    A : Tensor
        ``[groups, n, n]``, :math:`E[a a^\top]` of the inputs, with
        ``n = in / groups * kernel (+ 1 with a bias)``.
    G : Tensor
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
        A: Tensor,
        G: Tensor,
        bias: str | None = None,
    ) -> None:
        super().__init__(weight, weight_shape, bias, (A, G))
        self.A, self.G = A, G

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        r"""Return :math:`G W A` in the parameters' shapes."""
        self.check(vector)
        return self.as_params(self.G @ self.as_matrices(vector) @ self.A)

    def diagonal(self) -> dict[str, Tensor]:
        """Return the outer products of the factors' diagonals."""
        a, g = self.A.diagonal(dim1=-2, dim2=-1), self.G.diagonal(dim1=-2, dim2=-1)
        return self.as_params(g.unsqueeze(-1) * a.unsqueeze(-2))

    def scaled(self, factor: float) -> "Kronecker":
        """Return the curvature with `G` scaled."""
        return self._with(self.A, self.G * factor)

    def regularised(self, *, shrink: float = 0.0, damping: float = 0.0) -> "Kronecker":
        r"""Return the layer with its factors drawn towards simpler ones.

        :math:`A \leftarrow (1 - s) A + s \operatorname{diag} A`, as in RegMean (Jin et
        al. 2023), and :math:`G \leftarrow (1 - t) G + t\,(\operatorname{tr} G/m)\,I`
        (Ledoit & Wolf 2004), group by group. Traces stay as they are.
        """
        kept = torch.diag_embed(self.A.diagonal(dim1=-2, dim2=-1))
        eye = torch.eye(self.G.shape[-1], dtype=self.G.dtype, device=self.G.device)
        mean = self.G.diagonal(dim1=-2, dim2=-1).mean(-1)
        return self._with(
            torch.lerp(self.A, kept, shrink),
            torch.lerp(self.G, mean.reshape(-1, 1, 1) * eye, damping),
        )

    def _with(self, A: Tensor, G: Tensor) -> "Kronecker":
        return Kronecker(self.weight, self.weight_shape, A, G, self.bias)

    def dense_blocks(self) -> Tensor:
        """Return each group's Kronecker product."""
        pairs = zip(self.A, self.G, strict=True)
        return torch.stack([torch.kron(g, a) for a, g in pairs])

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.A.nbytes + self.G.nbytes


class EigenKronecker(_MatrixLayer):
    r"""One layer's Fisher in K-FAC's eigenbasis: E-KFAC (George et al. 2018).

    :math:`F \operatorname{vec} W = \operatorname{vec}\big(U_G\,(S \circ
    (U_G^\top W U_A))\,U_A^\top\big)`, where :math:`S` has the gradients' exact second
    moments in that basis: of all curvatures diagonal in it, the nearest to the Fisher.

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
        super().__init__(weight, weight_shape, bias, (basis_A, basis_G))
        if moments.shape != self.matrix_shape:
            raise StructureError(
                f"'{weight}' needs moments of shape {tuple(self.matrix_shape)}, got "
                f"{tuple(moments.shape)}"
            )
        self.basis_A, self.basis_G, self.moments = basis_A, basis_G, moments

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the product, through the eigenbasis and back."""
        self.check(vector)
        inside = self.basis_G.mT @ self.as_matrices(vector) @ self.basis_A
        return self.as_params(self.basis_G @ (self.moments * inside) @ self.basis_A.mT)

    def diagonal(self) -> dict[str, Tensor]:
        """Return the diagonal: the moments seen through the squared bases."""
        squares = self.basis_G.square() @ self.moments @ self.basis_A.square().mT
        return self.as_params(squares)

    def scaled(self, factor: float) -> "EigenKronecker":
        """Return the curvature with its moments scaled."""
        return EigenKronecker(
            self.weight,
            self.weight_shape,
            self.basis_A,
            self.basis_G,
            self.moments * factor,
            self.bias,
        )

    def dense_blocks(self) -> Tensor:
        """Return each group's matrix."""
        parts = zip(self.basis_A, self.basis_G, self.moments, strict=True)
        bases = [(torch.kron(g, a), s.flatten()) for a, g, s in parts]
        return torch.stack([u * s @ u.mT for u, s in bases])

    @property
    def nbytes(self) -> int:
        """Bytes of the bases and moments."""
        return self.basis_A.nbytes + self.basis_G.nbytes + self.moments.nbytes
