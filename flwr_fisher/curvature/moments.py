"""Second moments of one layer's inputs and gradients, summed over examples."""

from abc import ABC, abstractmethod

from torch import Tensor

from flwr_fisher.curvature.base import Curvature
from flwr_fisher.curvature.diagonal import Diagonal
from flwr_fisher.curvature.kronecker import Kronecker
from flwr_fisher.curvature.taps import TappableLayer

__all__ = ["DiagonalMoments", "KroneckerMoments", "LayerMoments"]


class LayerMoments(ABC):
    """Takes a layer's input columns once a batch, and its gradients once a pass."""

    def __init__(self, layer: TappableLayer) -> None:
        self.layer = layer

    @abstractmethod
    def add_inputs(self, columns: Tensor) -> None:
        """Take a batch's input columns ``[n, groups, in, T]``."""

    @abstractmethod
    def add_gradients(self, columns: Tensor) -> None:
        """Take one backward pass's output gradients ``[n, groups, out, T]``."""

    @abstractmethod
    def mean(self, num_examples: int) -> Curvature:
        """Return the mean over examples."""


class KroneckerMoments(LayerMoments):
    """K-FAC's factors: `A` is summed over positions, `G` averaged."""

    A: Tensor | float = 0.0
    G: Tensor | float = 0.0

    def add_inputs(self, columns: Tensor) -> None:
        """Add the inputs' second moment."""
        self.A = self.A + _second_moment(columns)

    def add_gradients(self, columns: Tensor) -> None:
        """Add the gradients' second moment."""
        self.G = self.G + _second_moment(columns) / columns.shape[3]

    def mean(self, num_examples: int) -> Kronecker:
        """Return the layer's Kronecker product."""
        assert isinstance(self.A, Tensor)
        assert isinstance(self.G, Tensor)
        return Kronecker(
            self.layer.weight,
            self.layer.layer.weight.shape,
            self.A / num_examples,
            self.G / num_examples,
            self.layer.bias,
        )


class DiagonalMoments(LayerMoments):
    """The exact diagonal: squared per-example gradients."""

    total: Tensor | float = 0.0

    def add_inputs(self, columns: Tensor) -> None:
        """Keep the columns for the batch's backward passes."""
        self.columns = columns
        self.squares = columns.square() if columns.shape[3] == 1 else None

    def add_gradients(self, columns: Tensor) -> None:
        """Add the squares of the gradients ``sum_t g_t a_t^T``, example by example."""
        if self.squares is None:
            self.total = self.total + (columns @ self.columns.mT).square_().sum(0)
            return
        # One position: the square of an outer product is one of squares.
        g = columns.square()[..., 0].permute(1, 2, 0)
        self.total = self.total + g @ self.squares[..., 0].permute(1, 0, 2)

    def mean(self, num_examples: int) -> Diagonal:
        """Return the layer's diagonal."""
        assert isinstance(self.total, Tensor)
        mean, shape = self.total / num_examples, self.layer.layer.weight.shape
        if self.layer.bias is None:
            return Diagonal({self.layer.weight: mean.reshape(shape)})
        weight, bias = mean[..., :-1].reshape(shape), mean[..., -1].reshape(-1)
        return Diagonal({self.layer.weight: weight, self.layer.bias: bias})


def _second_moment(columns: Tensor) -> Tensor:
    flat = columns.permute(1, 2, 0, 3).flatten(2)
    return flat @ flat.mT
