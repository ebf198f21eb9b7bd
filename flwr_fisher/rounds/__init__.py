"""The formulas of methods with many rounds, one file a method, without Flower."""

from flwr_fisher.rounds.fagh import FaghMoments, FaghStep, fagh_step
from flwr_fisher.rounds.fedfish import (
    FishOptions,
    fedfish_average,
    fedfish_quotient,
)
from flwr_fisher.rounds.scaffold import scaffold_control, scaffold_step
from flwr_fisher.rounds.server_optimizer import make_optimizer, server_step
from flwr_fisher.rounds.updates import stepped_names

__all__ = [
    "FaghMoments",
    "FaghStep",
    "FishOptions",
    "fagh_step",
    "fedfish_average",
    "fedfish_quotient",
    "make_optimizer",
    "scaffold_control",
    "scaffold_step",
    "server_step",
    "stepped_names",
]
