"""What a model's loss looks like around its parameters. Works without Flower."""

from flwr_fisher.curvature.base import (
    Blocks,
    Curvature,
    WeightedSum,
    aligned_blocks,
)
from flwr_fisher.curvature.dense import Dense
from flwr_fisher.curvature.diagonal import Diagonal
from flwr_fisher.curvature.fisher import ENGINES, EXPECTATIONS, STRUCTURES, fisher
from flwr_fisher.curvature.kronecker import Kronecker

__all__ = [
    "ENGINES",
    "EXPECTATIONS",
    "STRUCTURES",
    "Blocks",
    "Curvature",
    "Dense",
    "Diagonal",
    "Kronecker",
    "WeightedSum",
    "aligned_blocks",
    "fisher",
]
