"""What a model's loss looks like around its parameters. Works without Flower."""

from flwr_fisher.curvature.estimate.accumulation import STRUCTURES, WEIGHT_SHARINGS
from flwr_fisher.curvature.estimate.arguments import (
    ENGINES,
    EXPECTATIONS,
    check_options,
)
from flwr_fisher.curvature.estimate.fisher import (
    TOLERANCE,
    fisher,
)
from flwr_fisher.curvature.estimate.input_covariances import (
    InputCovariance,
    input_covariances,
)
from flwr_fisher.curvature.estimate.likelihood import LIKELIHOODS, Likelihood
from flwr_fisher.curvature.estimate.plan import FisherPlan, LayerPlan, fisher_plan
from flwr_fisher.curvature.gradients import gradient
from flwr_fisher.curvature.operators.base import Curvature, Inverse
from flwr_fisher.curvature.operators.block_diagonal import BlockDiagonal
from flwr_fisher.curvature.operators.deferred import Deferred
from flwr_fisher.curvature.operators.dense import Dense
from flwr_fisher.curvature.operators.diagonal import Diagonal
from flwr_fisher.curvature.operators.eigen_kronecker import EigenKronecker
from flwr_fisher.curvature.operators.kronecker import Kronecker
from flwr_fisher.curvature.operators.weighted_sum import WeightedSum
from flwr_fisher.curvature.pairs import Pairs
from flwr_fisher.curvature.second_order import gradient_and_hvp, hvp
from flwr_fisher.deprecation import moved_names

__all__ = [
    "ENGINES",
    "EXPECTATIONS",
    "LIKELIHOODS",
    "STRUCTURES",
    "TOLERANCE",
    "WEIGHT_SHARINGS",
    "BlockDiagonal",
    "Curvature",
    "Deferred",
    "Dense",
    "Diagonal",
    "EigenKronecker",
    "FisherPlan",
    "InputCovariance",
    "Inverse",
    "Kronecker",
    "LayerPlan",
    "Likelihood",
    "Pairs",
    "WeightedSum",
    "check_options",
    "fisher",
    "fisher_plan",
    "gradient",
    "gradient_and_hvp",
    "hvp",
    "input_covariances",
]

__getattr__ = moved_names(
    __name__,
    {
        "TCTModel": "flwr_fisher.tangent.TCTModel",
        "TangentFeatures": "flwr_fisher.tangent.TangentFeatures",
    },
)
