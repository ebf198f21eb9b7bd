"""What a model's loss looks like around its parameters. Works without Flower."""

from flwr_fisher.curvature.estimate import (
    ENGINES,
    EXPECTATIONS,
    LIKELIHOODS,
    STRUCTURES,
    TOLERANCE,
    fisher,
)
from flwr_fisher.curvature.gradients import gradient
from flwr_fisher.curvature.operators import (
    BlockDiagonal,
    Curvature,
    Dense,
    Diagonal,
    EigenKronecker,
    Kronecker,
    WeightedSum,
)
from flwr_fisher.curvature.second_order import gradient_and_hvp, hvp
from flwr_fisher.deprecation import moved_names

__all__ = [
    "ENGINES",
    "EXPECTATIONS",
    "LIKELIHOODS",
    "STRUCTURES",
    "TOLERANCE",
    "BlockDiagonal",
    "Curvature",
    "Dense",
    "Diagonal",
    "EigenKronecker",
    "Kronecker",
    "WeightedSum",
    "fisher",
    "gradient",
    "gradient_and_hvp",
    "hvp",
]

__getattr__ = moved_names(
    __name__,
    {
        "TCTModel": "flwr_fisher.tangent.TCTModel",
        "TangentFeatures": "flwr_fisher.tangent.TangentFeatures",
    },
)
