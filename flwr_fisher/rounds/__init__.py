"""The formulas of methods with many rounds, one file a method, without Flower."""

from flwr_fisher.rounds.fagh import FaghMoments, FaghStep, fagh_step
from flwr_fisher.rounds.fedexp import FedExpStep, fedexp_step, last_two_mean
from flwr_fisher.rounds.fedfish import fedfish_average, fedfish_quotient
from flwr_fisher.rounds.fedga import fedga_start
from flwr_fisher.rounds.fedpm import FedPMMixture, Preconditioner, fedpm_mix
from flwr_fisher.rounds.newton import done_direction, giant_direction, newton_step
from flwr_fisher.rounds.scaffold import scaffold_control, scaffold_step
from flwr_fisher.rounds.server_optimizer import (
    OPTIMIZERS,
    OptimizerFactory,
    make_optimizer,
    server_step,
)
from flwr_fisher.rounds.updates import stepped_names

__all__ = [
    "OPTIMIZERS",
    "FaghMoments",
    "FaghStep",
    "FedExpStep",
    "FedPMMixture",
    "OptimizerFactory",
    "Preconditioner",
    "done_direction",
    "fagh_step",
    "fedexp_step",
    "fedfish_average",
    "fedfish_quotient",
    "fedga_start",
    "fedpm_mix",
    "giant_direction",
    "last_two_mean",
    "make_optimizer",
    "newton_step",
    "scaffold_control",
    "scaffold_step",
    "server_step",
    "stepped_names",
]
