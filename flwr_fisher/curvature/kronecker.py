"""The Kronecker-factored curvature (K-FAC) of one layer."""

import torch
from torch import Tensor

from flwr_fisher.curvature.base import Curvature
from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params, unflatten

__all__ = ["Kronecker"]


class Kronecker(Curvature):
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
        self.weight, self.bias = weight, bias
        self.weight_shape = torch.Size(weight_shape)
        self.A, self.G = A, G
        groups = A.shape[0] if A.dim() == 3 else 0
        outputs, inputs = self.weight_shape[0], self.weight_shape[1:].numel()
        n, m = inputs + (bias is not None), outputs // max(groups, 1)
        if not groups or A.shape != (groups, n, n) or G.shape != (groups, m, m):
            raise StructureError(
                f"'{weight}' of shape {tuple(self.weight_shape)} does not fit factors "
                f"of shapes {tuple(A.shape)} and {tuple(G.shape)}"
            )

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The weight's shape, and the bias's."""
        shapes = {self.weight: self.weight_shape}
        if self.bias is not None:
            shapes[self.bias] = self.weight_shape[:1]
        return shapes

    def as_matrices(self, vector: Params) -> Tensor:
        """Return the layer as ``[groups, out / groups, n]``, the bias last."""
        matrix = vector[self.weight].reshape(*self.G.shape[:2], -1)
        if self.bias is None:
            return matrix
        column = vector[self.bias].reshape(*self.G.shape[:2], 1)
        return torch.cat([matrix, column], dim=-1)

    def as_params(self, matrices: Tensor) -> dict[str, Tensor]:
        """Cut ``[groups, out / groups, n]`` back into the weight and the bias."""
        if self.bias is None:
            return {self.weight: matrices.reshape(self.weight_shape)}
        return {
            self.weight: matrices[..., :-1].reshape(self.weight_shape),
            self.bias: matrices[..., -1].reshape(-1),
        }

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

    def to_dense(self) -> Tensor:
        """Return the matrix over the flattened weight followed by the bias."""
        size, device = self.numel(), self.A.device
        matrix = torch.zeros(size, size, dtype=self.A.dtype, device=device)
        rows = unflatten(torch.arange(size, device=device), self.shapes)
        places = self.as_matrices(rows).flatten(1)
        for at, a, g in zip(places, self.A, self.G, strict=True):
            matrix[at.unsqueeze(1), at] = torch.kron(g, a)
        return matrix

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.A.nbytes + self.G.nbytes
