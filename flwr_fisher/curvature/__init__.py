"""Curvatures of a model's loss: Fishers, Hessians and gradients, without Flower."""

from flwr_fisher.curvature.data import Batch as Batch
from flwr_fisher.curvature.data import Inputs as Inputs
from flwr_fisher.curvature.data import MappedLoader as MappedLoader
from flwr_fisher.curvature.estimate.fisher import fisher as fisher
from flwr_fisher.curvature.estimate.likelihood import LIKELIHOODS as LIKELIHOODS
from flwr_fisher.curvature.estimate.likelihood import Likelihood as Likelihood
from flwr_fisher.curvature.estimate.options import FisherOptions as FisherOptions
from flwr_fisher.curvature.gradients import gradient as gradient
from flwr_fisher.curvature.operators.base import BlockDiagonal as BlockDiagonal
from flwr_fisher.curvature.operators.base import Curvature as Curvature
from flwr_fisher.curvature.operators.base import Diagonal as Diagonal
from flwr_fisher.curvature.operators.kronecker import Kronecker as Kronecker
from flwr_fisher.curvature.operators.lazy import Deferred as Deferred
from flwr_fisher.curvature.operators.lazy import WeightedSum as WeightedSum
from flwr_fisher.curvature.second_order import gradient_and_hvp as gradient_and_hvp
from flwr_fisher.curvature.second_order import hvp as hvp
from flwr_fisher.curvature.structures import STRUCTURES as STRUCTURES
