"""What a model's loss looks like around its parameters. Works without Flower."""

from flwr_fisher.curvature.base import (
    Blocks,
    Curvature,
    WeightedSum,
    aligned_blocks,
)
from flwr_fisher.curvature.dense import Dense
from flwr_fisher.curvature.diagonal import Diagonal
from flwr_fisher.curvature.fisher import ENGINES, EXPECTATIONS, TOLERANCE, fisher
from flwr_fisher.curvature.kronecker import EigenKronecker, Kronecker
from flwr_fisher.curvature.likelihood import LIKELIHOODS
from flwr_fisher.curvature.probes import gradient, gradient_and_hvp, hvp
from flwr_fisher.curvature.structures import STRUCTURES
from flwr_fisher.curvature.tangent import TangentFeatures
from flwr_fisher.curvature.tct_model import TCTModel

__all__ = [
    "ENGINES",
    "EXPECTATIONS",
    "LIKELIHOODS",
    "STRUCTURES",
    "TOLERANCE",
    "Blocks",
    "Curvature",
    "Dense",
    "Diagonal",
    "EigenKronecker",
    "Kronecker",
    "TCTModel",
    "TangentFeatures",
    "WeightedSum",
    "aligned_blocks",
    "fisher",
    "gradient",
    "gradient_and_hvp",
    "hvp",
]
