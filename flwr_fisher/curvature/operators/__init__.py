"""Curvatures as an algebra of symmetric positive semi-definite operators."""

from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.curvature.operators.block_diagonal import BlockDiagonal
from flwr_fisher.curvature.operators.conjugate_gradient import conjugate_gradient
from flwr_fisher.curvature.operators.dense import Dense
from flwr_fisher.curvature.operators.diagonal import Diagonal
from flwr_fisher.curvature.operators.eigen_kronecker import EigenKronecker
from flwr_fisher.curvature.operators.kronecker import Kronecker
from flwr_fisher.curvature.operators.weighted_sum import WeightedSum

__all__ = [
    "BlockDiagonal",
    "Curvature",
    "Dense",
    "Diagonal",
    "EigenKronecker",
    "Kronecker",
    "WeightedSum",
    "conjugate_gradient",
]
