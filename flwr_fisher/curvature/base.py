"""What every curvature can do, and the lazy weighted sum of several."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params, flatten, select, unflatten

__all__ = ["Blocks", "Curvature", "WeightedSum", "aligned_blocks"]


class Curvature(ABC):
    r"""A symmetric positive semi-definite matrix :math:`F` over named parameters.

    It acts on ``dict[str, Tensor]`` with the keys and shapes in :attr:`shapes`. The
    dense matrix orders its rows as :func:`flwr_fisher.params.flatten` orders the
    parameters, in the order of :attr:`shapes`.
    """

    @property
    @abstractmethod
    def shapes(self) -> dict[str, torch.Size]:
        """The parameters that this curvature covers, with their shapes."""

    @abstractmethod
    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return :math:`Fv`; `vector` has exactly the keys of :attr:`shapes`."""

    @abstractmethod
    def diagonal(self) -> dict[str, Tensor]:
        """Return the diagonal of :math:`F`, shaped like the parameters."""

    @abstractmethod
    def scaled(self, factor: float) -> "Curvature":
        """Return :math:`cF` for a factor c of at least 0."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return :math:`F` as one matrix ``[d, d]``; for small models and tests."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held by the tensors of this curvature."""

    def regularised(self, *, shrink: float = 0.0, damping: float = 0.0) -> "Curvature":
        """Return a copy that trusts its sample's correlations less.

        :class:`Kronecker` and :class:`Dense` say what they do; a diagonal has no
        correlations and returns itself.

        Parameters
        ----------
        shrink : float
            In [0, 1], for correlations between inputs.
        damping : float
            In [0, 1], for those between outputs.
        """
        return self

    def blocks(self) -> Sequence["Curvature"]:
        """Return the independent diagonal blocks, each a curvature of its own."""
        return [self]

    def trace(self) -> float:
        """Return the sum of the eigenvalues."""
        return float(sum(d.double().sum() for d in self.diagonal().values()))

    def numel(self) -> int:
        """Return :math:`d`, the number of rows."""
        return sum(shape.numel() for shape in self.shapes.values())

    def check(self, vector: Params) -> None:
        """Raise :class:`StructureError` unless `vector` has this curvature's layout."""
        shapes = {name: tensor.shape for name, tensor in vector.items()}
        if shapes != self.shapes:
            wrong = sorted(set(shapes.items()) ^ set(self.shapes.items()))
            raise StructureError(f"the vector does not fit the curvature: {wrong}")


class Blocks(Curvature):
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
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise StructureError(f"parameters {twice} are in more than one block")

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The children's parameters, one child after the other."""
        return {k: s for child in self.children for k, s in child.shapes.items()}

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return :math:`Fv`, child by child."""
        self.check(vector)
        parts = (c.matvec(select(vector, c.shapes)) for c in self.children)
        return {k: v for part in parts for k, v in part.items()}

    def diagonal(self) -> dict[str, Tensor]:
        """Return the children's diagonals."""
        return {k: v for c in self.children for k, v in c.diagonal().items()}

    def scaled(self, factor: float) -> "Blocks":
        """Return the curvature with each child scaled."""
        return Blocks([c.scaled(factor) for c in self.children])

    def regularised(self, *, shrink: float = 0.0, damping: float = 0.0) -> "Blocks":
        """Return the curvature with each child regularised."""
        return Blocks(
            [c.regularised(shrink=shrink, damping=damping) for c in self.children]
        )

    def to_dense(self) -> Tensor:
        """Return the children's dense matrices along the diagonal of one."""
        dense = [c.to_dense() for c in self.children]
        matrix: Tensor = torch.block_diag(*dense)  # type: ignore[no-untyped-call]
        return matrix

    @property
    def nbytes(self) -> int:
        """Bytes held by all children."""
        return sum(c.nbytes for c in self.children)

    def blocks(self) -> list[Curvature]:
        """Return the children's blocks."""
        return [block for child in self.children for block in child.blocks()]


class WeightedSum(Curvature):
    r"""The lazy sum :math:`\sum_i w_i F_i`: a sum of Kronecker products is not one.

    Parameters
    ----------
    terms : Sequence[Curvature]
        Curvatures over the same parameters.
    weights : Sequence[float]
        One non-negative weight a term.

    Raises
    ------
    StructureError
        If there is no term, or if terms cover different parameters.
    """

    def __init__(self, terms: Sequence[Curvature], weights: Sequence[float]) -> None:
        if not terms or len(terms) != len(weights):
            raise StructureError(f"{len(terms)} curvatures for {len(weights)} weights")
        self.terms, self.weights = tuple(terms), tuple(float(w) for w in weights)
        for index, term in enumerate(self.terms):
            if term.shapes != self.terms[0].shapes:
                odd = set(term.shapes.items()) ^ set(self.terms[0].shapes.items())
                raise StructureError(
                    f"curvature {index} covers other parameters than the first: "
                    f"{sorted(name for name, _ in odd)}"
                )

    def __iter__(self) -> Iterator[tuple[float, Curvature]]:
        """Iterate over the pairs (weight, term)."""
        return iter(zip(self.weights, self.terms, strict=True))

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The parameters that every term covers."""
        return self.terms[0].shapes

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the weighted sum of the terms' products."""
        return self._sum([term.matvec(vector) for term in self.terms])

    def diagonal(self) -> dict[str, Tensor]:
        """Return the weighted sum of the terms' diagonals."""
        return self._sum([term.diagonal() for term in self.terms])

    def _sum(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        total = {k: v * self.weights[0] for k, v in parts[0].items()}
        for weight, part in zip(self.weights[1:], parts[1:], strict=True):
            for key, value in part.items():
                total[key].add_(value, alpha=weight)
        return total

    def scaled(self, factor: float) -> "WeightedSum":
        """Return the sum with every weight scaled; no tensor is touched."""
        return WeightedSum(self.terms, [w * factor for w in self.weights])

    def regularised(
        self, *, shrink: float = 0.0, damping: float = 0.0
    ) -> "WeightedSum":
        """Return the sum of the regularised terms."""
        terms = [t.regularised(shrink=shrink, damping=damping) for t in self.terms]
        return WeightedSum(terms, self.weights)

    def to_dense(self) -> Tensor:
        """Return the weighted sum of the terms' dense matrices."""
        parts = [weight * _dense_as(term, self.shapes) for weight, term in self]
        return torch.stack(parts).sum(0)

    @property
    def nbytes(self) -> int:
        """Bytes held by all terms."""
        return sum(term.nbytes for term in self.terms)

    def blocks(self) -> list["WeightedSum"]:
        """Return one weighted sum for each block that all terms share."""
        return [WeightedSum(b, self.weights) for b in aligned_blocks(self.terms)]


def aligned_blocks(curvatures: Sequence[Curvature]) -> list[tuple[Curvature, ...]]:
    """Return, for each block that all curvatures share, every curvature's part.

    Where they are not made of the same blocks, all of each is one block.
    """
    per_curvature = [curvature.blocks() for curvature in curvatures]
    layouts = [[list(block.shapes) for block in blocks] for blocks in per_curvature]
    if any(layout != layouts[0] for layout in layouts[1:]):
        return [tuple(curvatures)]
    return list(zip(*per_curvature, strict=True))


def _dense_as(curvature: Curvature, names: Iterable[str]) -> Tensor:
    """Return the dense matrix with its rows in another order of the parameters."""
    rows = unflatten(torch.arange(curvature.numel()), curvature.shapes)
    order = flatten(select(rows, names))
    return curvature.to_dense()[order][:, order]
