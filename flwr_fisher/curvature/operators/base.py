"""What every curvature can do."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params


class Curvature(ABC):
    r"""A symmetric positive semi-definite matrix :math:`F` over named parameters.

    It acts on ``dict[str, Tensor]`` with the keys and shapes in :attr:`shapes`. The
    dense matrix orders its rows as :func:`flwr_fisher.params.flatten` orders the
    parameters, in the order of :attr:`shapes`.
    """

    shapes: dict[str, torch.Size]
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

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return every tensor that this curvature holds; no copies."""

    @property
    def nbytes(self) -> int:
        """Bytes held by the tensors of this curvature."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def non_negative(self) -> list[Tensor]:
        """Return numbers that are negative only if :math:`F` is no curvature."""
        return list(self.diagonal().values())

    def regularised(self, *, shrink: float = 0.0, damping: float = 0.0) -> "Curvature":
        """Return a copy that trusts its sample's correlations less.

        :class:`Kronecker`, :class:`EigenKronecker` and :class:`Dense` say what they
        do; a diagonal has no correlations and returns itself.

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
