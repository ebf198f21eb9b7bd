"""A curvature without correlations between groups of parameters."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params, select


class BlockDiagonal(Curvature):
    """A block-diagonal curvature: one child for each group of parameters.

    This is what ``fisher(structure="kfac")`` returns: a :class:`Kronecker` for each
    layer that has one, and a :class:`Diagonal` for the remaining parameters.

    Parameters
    ----------
    children : Sequence[Curvature]
        Curvatures over disjoint parameters.
    """

    def __init__(self, children: Sequence[Curvature]) -> None:
        self.children = tuple(children)
        names = [name for child in self.children for name in child.shapes]
        if shared := sorted({name for name in names if names.count(name) > 1}):
            raise StructureError(f"parameters {shared} are in more than one block")
        self.shapes = {k: s for c in self.children for k, s in c.shapes.items()}

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return :math:`Fv`, child by child."""
        self.check(vector)
        parts = (c.matvec(select(vector, c.shapes)) for c in self.children)
        return {k: v for part in parts for k, v in part.items()}

    def diagonal(self) -> dict[str, Tensor]:
        """Return the children's diagonals."""
        return {k: v for c in self.children for k, v in c.diagonal().items()}

    def scaled(self, factor: float) -> "BlockDiagonal":
        """Return the curvature with each child scaled."""
        return BlockDiagonal([c.scaled(factor) for c in self.children])

    def regularised(
        self, *, shrink: float = 0.0, damping: float = 0.0
    ) -> "BlockDiagonal":
        """Return the curvature with each child regularised."""
        return BlockDiagonal(
            [c.regularised(shrink=shrink, damping=damping) for c in self.children]
        )

    def to_dense(self) -> Tensor:
        """Return the children's dense matrices along the diagonal of one."""
        dense = [c.to_dense() for c in self.children]
        matrix: Tensor = torch.block_diag(*dense)  # type: ignore[no-untyped-call]
        return matrix

    def tensors(self) -> list[Tensor]:
        """Return the children's tensors."""
        return [tensor for c in self.children for tensor in c.tensors()]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "BlockDiagonal":
        """Return the children with a function of their tensors."""
        return BlockDiagonal([child.mapped(function) for child in self.children])

    def made(self) -> "BlockDiagonal":
        """Return the curvature with each child made that is deferred."""
        return BlockDiagonal([child.made() for child in self.children])

    def summary(self) -> str:
        """Return the number of blocks, and of parameters."""
        return f"{len(self.blocks())} blocks, {super().summary()}"

    def blocks(self) -> list[Curvature]:
        """Return the children's blocks."""
        return [block for child in self.children for block in child.blocks()]
