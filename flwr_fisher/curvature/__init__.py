"""Curvatures of a model's loss: Fishers, Hessians and gradients, without Flower."""

from flwr_fisher.curvature.data import Batch, Inputs, MappedLoader
from flwr_fisher.curvature.estimate.fisher import fisher
from flwr_fisher.curvature.estimate.likelihood import LIKELIHOODS, Likelihood
from flwr_fisher.curvature.estimate.options import FisherOptions
from flwr_fisher.curvature.gradients import gradient
from flwr_fisher.curvature.operators.base import BlockDiagonal, Curvature, Diagonal
from flwr_fisher.curvature.operators.kronecker import Kronecker
from flwr_fisher.curvature.operators.lazy import Deferred, WeightedSum
from flwr_fisher.curvature.second_order import gradient_and_hvp, hvp
from flwr_fisher.curvature.structures import STRUCTURES

__all__ = [
    "LIKELIHOODS",
    "STRUCTURES",
    "Batch",
    "BlockDiagonal",
    "Curvature",
    "Deferred",
    "Diagonal",
    "FisherOptions",
    "Inputs",
    "Kronecker",
    "Likelihood",
    "MappedLoader",
    "WeightedSum",
    "fisher",
    "gradient",
    "gradient_and_hvp",
    "hvp",
]
