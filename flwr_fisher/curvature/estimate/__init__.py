"""From a model and its data to a curvature."""

from flwr_fisher.curvature.estimate.accumulation import STRUCTURES
from flwr_fisher.curvature.estimate.fisher import (
    ENGINES,
    EXPECTATIONS,
    TOLERANCE,
    fisher,
)
from flwr_fisher.curvature.estimate.likelihood import LIKELIHOODS

__all__ = [
    "ENGINES",
    "EXPECTATIONS",
    "LIKELIHOODS",
    "STRUCTURES",
    "TOLERANCE",
    "fisher",
]
