"""The diagonal curvature: one number a parameter."""

from collections.abc import Callable

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Curvature, Solver
from flwr_fisher.curvature.operators.eigenvalues import divided
from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params


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
                raise StructureError(f"'{name}' has dtype {tensor.dtype}, not a float")
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
        """Return one block a parameter."""
        return [Diagonal({name: entry}) for name, entry in self.entries.items()]

    def to_dense(self) -> Tensor:
        """Return the matrix with the entries on its diagonal."""
        return torch.diag(torch.cat([e.reshape(-1) for e in self.entries.values()]))

    def tensors(self) -> list[Tensor]:
        """Return the entries."""
        return list(self.entries.values())

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Diagonal":
        """Return a function of the entries."""
        return Diagonal({name: function(entry) for name, entry in self.entries.items()})

    def solver(self, damping: float) -> Solver:
        """Divide."""
        entries = {name: entry.double() for name, entry in self.entries.items()}
        return lambda rhs: {k: divided(rhs[k], e, damping) for k, e in entries.items()}
