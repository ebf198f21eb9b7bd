"""Plain curvatures: a diagonal, a dense matrix, and blocks of other curvatures."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Curvature, Solver
from flwr_fisher.curvature.operators.layer import to_matrices
from flwr_fisher.curvature.operators.solvers import divided, eigen
from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params, Shapes, bias_of, flatten, select, unflatten


class Diagonal(Curvature):
    """A diagonal matrix, kept as tensors of the parameters' shapes.

    Parameters
    ----------
    entries : Mapping[str, Tensor]
        The diagonal, non-negative, one tensor a parameter.

    Examples
    --------
    >>> fisher = Diagonal({"w": torch.tensor([1.0, 2.0])})
    >>> fisher.matvec({"w": torch.tensor([3.0, 4.0])})
    {'w': tensor([3., 8.])}
    """

    def __init__(self, entries: Params) -> None:
        for name, tensor in entries.items():
            if not tensor.is_floating_point():
                raise StructureError(
                    f"'{name}' has dtype {tensor.dtype}, but a diagonal needs floats"
                )
        self.entries = dict(entries)
        self.shapes = {name: entry.shape for name, entry in entries.items()}

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the elementwise product."""
        self.check(vector)
        return {name: entry * vector[name] for name, entry in self.entries.items()}

    def diagonal(self) -> dict[str, Tensor]:
        """Return the entries (copies)."""
        return {name: entry.clone() for name, entry in self.entries.items()}

    def scaled(self, factor: float) -> "Diagonal":
        """Return the diagonal times a factor."""
        return Diagonal({name: entry * factor for name, entry in self.entries.items()})

    def blocks(self) -> list["Diagonal"]:
        """Return one block for each parameter."""
        return [Diagonal({name: entry}) for name, entry in self.entries.items()]

    def to_dense(self) -> Tensor:
        """Return the matrix with the entries on its diagonal."""
        return torch.diag(torch.cat([e.reshape(-1) for e in self.entries.values()]))

    def tensors(self) -> list[Tensor]:
        """Return the entries."""
        return list(self.entries.values())

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Diagonal":
        """Return the diagonal with a function applied to its entries."""
        return Diagonal({name: function(entry) for name, entry in self.entries.items()})

    def solver(self, damping: float) -> Solver:
        """Return a solver, which divides."""
        entries = {name: entry.double() for name, entry in self.entries.items()}
        return lambda rhs: {k: divided(rhs[k], e, damping) for k, e in entries.items()}


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
        r"""Return the matrix shrunk towards simpler ones; its trace does not change.

        Off-diagonal entries are scaled by ``1 - shrink``. Then `damping` mixes in a
        matrix without correlations between outputs. In that matrix each layer (a
        ``…weight`` of two or more dimensions and its ``…bias``) has, for every output,
        the mean of the outputs' blocks, and any other parameter has its diagonal. If
        the matrix is one layer's :math:`G \otimes A` without groups, the result is that
        of :meth:`Kronecker.regularised`.
        """
        matrix = self.matrix.lerp(torch.diag(self.matrix.diagonal()), shrink)
        return Dense(self.shapes, matrix.lerp(self._outputs_apart(matrix), damping))

    def _outputs_apart(self, matrix: Tensor) -> Tensor:
        apart = torch.diag(matrix.diagonal())
        every = torch.arange(self.numel(), device=apart.device)
        rows = unflatten(every, self.shapes)
        for name, weight in rows.items():
            if name.endswith("weight") and weight.dim() > 1:
                bias = bias_of(name, rows)
                own = None if bias is None else rows[bias]
                (at,) = to_matrices(weight, own, 1)  # out by in
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
        """Return the curvature with a function applied to the matrix."""
        return Dense(self.shapes, function(self.matrix))

    def solver(self, damping: float) -> Solver:
        """Return a solver by the matrix's eigenvalues."""
        values, vectors = eigen(self.matrix, damping)

        def solve(rhs: Params) -> dict[str, Tensor]:
            rotated = vectors.mT @ flatten(select(rhs, self.shapes))
            return unflatten(vectors @ divided(rotated, values, damping), self.shapes)

        return solve


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
        """Return one matrix with the children's dense matrices on its diagonal."""
        dense = [c.to_dense() for c in self.children]
        matrix: Tensor = torch.block_diag(*dense)  # type: ignore[no-untyped-call]
        return matrix

    def tensors(self) -> list[Tensor]:
        """Return the children's tensors."""
        return [tensor for c in self.children for tensor in c.tensors()]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "BlockDiagonal":
        """Return the curvature with a function applied to the children's tensors."""
        return BlockDiagonal([child.mapped(function) for child in self.children])

    def made(self) -> "BlockDiagonal":
        """Return the curvature with its deferred children computed."""
        return BlockDiagonal([child.made() for child in self.children])

    def summary(self) -> str:
        """Return the number of blocks, and of parameters."""
        return f"{len(self.blocks())} blocks, {super().summary()}"

    def blocks(self) -> list[Curvature]:
        """Return the children's blocks."""
        return [block for child in self.children for block in child.blocks()]
