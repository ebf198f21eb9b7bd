"""The algorithms, as Flower ``Strategy`` classes."""

from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.fedfish import FedFish
from flwr_fisher.strategies.fedfisher import FedFisherOneShot
from flwr_fisher.strategies.state import (
    CurvatureResult,
    Exchange,
    ServerState,
    Step,
    Upload,
)

__all__ = [
    "CurvatureResult",
    "CurvatureStrategy",
    "Exchange",
    "FedFish",
    "FedFisherOneShot",
    "ServerState",
    "Step",
    "Upload",
]
