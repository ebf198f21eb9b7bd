"""The Kronecker-factored curvature of one layer: K-FAC."""

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.layer import LayerCurvature
from flwr_fisher.params import Params

__all__ = ["Kronecker"]


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
