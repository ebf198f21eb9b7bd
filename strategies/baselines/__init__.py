"""The methods with which the four algorithms are compared."""

from flwr_fisher.strategies.baselines.afl import AFL
from flwr_fisher.strategies.baselines.fedavg import FedAvg
from flwr_fisher.strategies.baselines.fedexp import FedExP
from flwr_fisher.strategies.baselines.fedga import FedGA
from flwr_fisher.strategies.baselines.fedpm import FedPM
from flwr_fisher.strategies.baselines.newton import DONE, GIANT
from flwr_fisher.strategies.baselines.scaffold import Scaffold

__all__ = [
    "AFL",
    "DONE",
    "GIANT",
    "FedAvg",
    "FedExP",
    "FedGA",
    "FedPM",
    "Scaffold",
]
