"""The algorithms, as Flower ``Strategy`` classes."""

from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.done import DONE
from flwr_fisher.strategies.fagh import FAGH
from flwr_fisher.strategies.fedexp import FedExP
from flwr_fisher.strategies.fedfish import FedFish
from flwr_fisher.strategies.fedfisher import FedFisherOneShot
from flwr_fisher.strategies.fedga import FedGA
from flwr_fisher.strategies.giant import GIANT
from flwr_fisher.strategies.repeatable import Repeatable
from flwr_fisher.strategies.scaffold import Scaffold
from flwr_fisher.strategies.state import (
    CurvatureResult,
    Exchange,
    ServerState,
    Step,
    Upload,
)
from flwr_fisher.strategies.tct import TCT

__all__ = [
    "DONE",
    "FAGH",
    "GIANT",
    "TCT",
    "CurvatureResult",
    "CurvatureStrategy",
    "Exchange",
    "FedExP",
    "FedFish",
    "FedFisherOneShot",
    "FedGA",
    "Repeatable",
    "Scaffold",
    "ServerState",
    "Step",
    "Upload",
]
