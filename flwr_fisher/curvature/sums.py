"""Sums over many batches, in at least float32."""

from collections.abc import Iterable

import torch
from torch import Tensor

from flwr_fisher.params import Params


def widened(tensor: Tensor) -> Tensor:
    """Return a detached tensor in at least float32, for squares and sums."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def within(tolerance: float, computed: Tensor, expected: Tensor) -> Tensor:
    """Return, as a tensor, whether two differ by this share of the expected norm."""
    a, b = widened(computed), widened(expected)
    return torch.dist(a, b).le(tolerance * torch.linalg.vector_norm(b))


class Sums:
    """Sums of tensors that have the shapes of parameters.

    In half precision a sum would stop growing when it is some hundred times as large as
    its terms.

    Parameters
    ----------
    parameters : Mapping[str, Tensor]
        The sums have their shapes, and the means their dtypes.
    """

    def __init__(self, parameters: Params) -> None:
        self.parameters = parameters
        self.totals = {n: widened(torch.zeros_like(p)) for n, p in parameters.items()}

    def add(self, terms: Iterable[Tensor | None], weight: int = 1) -> None:
        """Add a term to each parameter's sum; None is zero."""
        for total, term in zip(self.totals.values(), terms, strict=True):
            if term is not None:
                total.add_(term.detach(), alpha=weight)

    def add_squares(self, terms: Iterable[Tensor | None]) -> None:
        """Add the terms' squares, elementwise."""
        self.add(None if term is None else widened(term).square() for term in terms)

    def mean(self, count: int) -> dict[str, Tensor]:
        """Return the sums divided by a count, in the parameters' dtypes."""
        return {
            name: (total / count).to(self.parameters[name].dtype)
            for name, total in self.totals.items()
        }
