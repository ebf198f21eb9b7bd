"""Curvatures of a model's loss: Fishers, Hessians and gradients, without Flower."""

from flwr_fisher.curvature.batch import Batch, Inputs
from flwr_fisher.curvature.batches import Pairs
from flwr_fisher.curvature.estimate.fisher import fisher
from flwr_fisher.curvature.estimate.likelihood import LIKELIHOODS, Likelihood
from flwr_fisher.curvature.estimate.options import (
    ENGINES,
    EXPECTATIONS,
    STRUCTURES,
    TOLERANCE,
    WEIGHT_SHARINGS,
    FisherOptions,
)
from flwr_fisher.curvature.estimate.plan import FisherPlan, LayerPlan, fisher_plan
from flwr_fisher.curvature.gradients import gradient
from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.curvature.operators.kronecker import EigenKronecker, Kronecker
from flwr_fisher.curvature.operators.lazy import Deferred, WeightedSum
from flwr_fisher.curvature.operators.plain import BlockDiagonal, Dense, Diagonal
from flwr_fisher.curvature.second_order import gradient_and_hvp, hvp

__all__ = [
    "ENGINES",
    "EXPECTATIONS",
    "LIKELIHOODS",
    "STRUCTURES",
    "TOLERANCE",
    "WEIGHT_SHARINGS",
    "Batch",
    "BlockDiagonal",
    "Curvature",
    "Deferred",
    "Dense",
    "Diagonal",
    "EigenKronecker",
    "FisherOptions",
    "FisherPlan",
    "Inputs",
    "Kronecker",
    "LayerPlan",
    "Likelihood",
    "Pairs",
    "WeightedSum",
    "fisher",
    "fisher_plan",
    "gradient",
    "gradient_and_hvp",
    "hvp",
]
