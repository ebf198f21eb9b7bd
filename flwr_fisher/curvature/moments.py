"""Second moments of one layer's inputs and gradients, summed over examples."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from flwr_fisher.curvature.base import Curvature
from flwr_fisher.curvature.dense import Dense
from flwr_fisher.curvature.diagonal import Diagonal
from flwr_fisher.curvature.kronecker import EigenKronecker, Kronecker
from flwr_fisher.curvature.taps import TappableLayer
from flwr_fisher.params import flatten

__all__ = [
    "BlockMoments",
    "DiagonalMoments",
    "EigenMoments",
    "KroneckerMoments",
    "LayerMoments",
]


class LayerMoments(ABC):
    """Takes a layer's input columns and, pass by pass, its output gradients."""

    observes = False  # whether `observe` wants every example's input columns
    pairs = True  # whether `add_gradients` wants input columns beside the gradients

    def __init__(self, layer: TappableLayer) -> None:
        self.layer = layer

    def observe(self, columns: Tensor) -> None:
        """Take every example's input columns ``[n, groups, in, T]``, once."""
        raise AssertionError("only moments that observe are shown inputs")

    @abstractmethod
    def add_gradients(self, inputs: Tensor, gradients: Tensor) -> None:
        """Take one pass: some examples' gradient columns; paired, also their inputs."""

    @abstractmethod
    def mean(self, num_examples: int) -> Curvature:
        """Return the mean over examples."""


class KroneckerMoments(LayerMoments):
    """K-FAC's factors: `A` is summed over positions, `G` averaged."""

    observes, pairs = True, False
    A: Tensor | float = 0.0
    G: Tensor | float = 0.0

    def observe(self, columns: Tensor) -> None:
        """Add the inputs' second moment."""
        self.A = self.A + _second_moment(columns)

    def add_gradients(self, inputs: Tensor, gradients: Tensor) -> None:
        """Add the gradients' second moment."""
        self.G = self.G + _second_moment(gradients) / gradients.shape[3]

    def mean(self, num_examples: int) -> Kronecker:
        """Return the layer's Kronecker product."""
        assert isinstance(self.A, Tensor)
        weight = self.layer.layer.weight
        if isinstance(self.G, Tensor):
            G = self.G
        else:  # no example had any curvature
            size = len(weight) // len(self.A)
            G = self.A.new_zeros(len(self.A), size, size)
        A, G = self.A / num_examples, G / num_examples
        return Kronecker(self.layer.weight, weight.shape, A, G, self.layer.bias)


class DiagonalMoments(LayerMoments):
    """The exact diagonal: squared per-example gradients."""

    total: Tensor | float = 0.0

    def add_gradients(self, inputs: Tensor, gradients: Tensor) -> None:
        """Add the squares of the gradients ``sum_t g_t a_t^T``, example by example."""
        if inputs.shape[3] > 1:
            self.total = self.total + (gradients @ inputs.mT).square_().sum(0)
            return
        # One position: the square of an outer product is one of squares.
        g = gradients.square()[..., 0].permute(1, 2, 0)
        self.total = self.total + g @ inputs.square()[..., 0].permute(1, 0, 2)

    def matrices(self, num_examples: int) -> Tensor:
        """Return the mean as ``[groups, out / groups, in (+ 1)]``."""
        if isinstance(self.total, Tensor):
            return self.total / num_examples
        return torch.zeros_like(self.layer.matrices())

    def mean(self, num_examples: int) -> Diagonal:
        """Return the layer's diagonal."""
        return Diagonal(self.layer.as_params(self.matrices(num_examples)))


class EigenMoments(DiagonalMoments):
    """The diagonal in K-FAC's eigenbasis, for E-KFAC."""

    def __init__(self, layer: TappableLayer, kfac: Kronecker) -> None:
        super().__init__(layer)
        self.basis_A = _eigenvectors(kfac.A)
        self.basis_G = _eigenvectors(kfac.G)

    def add_gradients(self, inputs: Tensor, gradients: Tensor) -> None:
        """Add the squares of the gradients as the basis sees them."""
        super().add_gradients(self.basis_A.mT @ inputs, self.basis_G.mT @ gradients)

    def mean(self, num_examples: int) -> EigenKronecker:  # type: ignore[override]
        """Return the layer's curvature in the basis."""
        return EigenKronecker(
            self.layer.weight,
            self.layer.layer.weight.shape,
            self.basis_A,
            self.basis_G,
            self.matrices(num_examples),
            self.layer.bias,
        )


class BlockMoments(LayerMoments):
    """The dense block of a layer: outer products of per-example gradients."""

    total: Tensor | float = 0.0

    def add_gradients(self, inputs: Tensor, gradients: Tensor) -> None:
        """Add the outer products of the gradients as vectors."""
        rows = (gradients @ inputs.mT).flatten(1)
        self.total = self.total + rows.mT @ rows

    def mean(self, num_examples: int) -> Dense:
        """Return the block, its rows in the order of the weight and then the bias."""
        places = self.layer.matrices()
        size = places.numel()
        index = torch.arange(size, device=places.device).reshape(places.shape)
        order = flatten(self.layer.as_params(index))
        total = self.total
        if not isinstance(total, Tensor):
            total = places.new_zeros(size, size)
        shapes = {k: v.shape for k, v in self.layer.as_params(places).items()}
        return Dense(shapes, total[order][:, order] / num_examples)


def _second_moment(columns: Tensor) -> Tensor:
    flat = columns.permute(1, 2, 0, 3).flatten(2)
    return flat @ flat.mT


def _eigenvectors(factor: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.eigh(factor.double()).eigenvectors
    return basis.to(factor.dtype)
