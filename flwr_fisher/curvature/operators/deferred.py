"""A curvature that takes no memory until it is used."""

from collections.abc import Callable

from torch import Tensor

from flwr_fisher.curvature.operators.base import Curvature, Solver
from flwr_fisher.params import Params


class Deferred(Curvature):
    """A curvature that is made each time it is used, and not kept.

    Many clients' uploads stay packed by it, or on disk, until a merge comes to a layer.
    Every use makes it again; :meth:`made` and :meth:`regularised` return it as it is.

    Parameters
    ----------
    like : Curvature
        Gives the kind and the parameters; it is not kept.
    make : Callable[[], Curvature]
        Makes the curvature.
    trace : float, optional
        Its trace, where that is known without it.

    Examples
    --------
    >>> import torch
    >>> from flwr_fisher.curvature import Diagonal
    >>> F = Diagonal({"w": torch.tensor([1.0, 2.0])})
    >>> later = Deferred(F, lambda: F)
    >>> later, later @ {"w": torch.ones(2)}
    (Deferred(Diagonal, 2 parameters, 0 B), {'w': tensor([1., 2.])})
    """

    def __init__(
        self,
        like: Curvature,
        make: Callable[[], Curvature],
        trace: float | None = None,
    ) -> None:
        self.shapes, self._kind, self._make = dict(like.shapes), like.kind, make
        self._trace = trace

    @property
    def kind(self) -> str:
        """The name of the kind of curvature that is made."""
        return self._kind

    def made(self) -> Curvature:
        """Make it."""
        return self._make()

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Make it, and return the product."""
        return self.made().matvec(vector)

    def diagonal(self) -> dict[str, Tensor]:
        """Make it, and return the diagonal."""
        return self.made().diagonal()

    def trace(self) -> float:
        """Return the trace; make it for that if need be."""
        return self.made().trace() if self._trace is None else self._trace

    def scaled(self, factor: float) -> "Deferred":
        """Return what is made and scaled when it is used."""
        return Deferred(self, lambda: self.made().scaled(factor))

    def regularised(self, *, shrink: float = 0.0, damping: float = 0.0) -> Curvature:
        """Make it, and return it regularised."""
        return self.made().regularised(shrink=shrink, damping=damping)

    def to_dense(self) -> Tensor:
        """Make it, and return its dense matrix."""
        return self.made().to_dense()

    def tensors(self) -> list[Tensor]:
        """Return none, as nothing is held."""
        return []

    def non_negative(self) -> list[Tensor]:
        """Return none, as nothing is held."""
        return []

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Deferred":
        """Return what is made and mapped when it is used."""
        return Deferred(self, lambda: self.made().mapped(function))

    def solver(self, damping: float) -> Solver:
        """Make it, and return its solver."""
        return self.made().solver(damping)

    def summary(self) -> str:
        """Return what it will be, in words."""
        return f"{self.kind}, {super().summary()}"
