"""Methods that the four algorithms are compared with."""

from flwr_fisher.strategies.baselines.afl import AFL
from flwr_fisher.strategies.baselines.done import DONE
from flwr_fisher.strategies.baselines.fedexp import FedExP
from flwr_fisher.strategies.baselines.fedga import FedGA
from flwr_fisher.strategies.baselines.fedpm import FedPM
from flwr_fisher.strategies.baselines.giant import GIANT
from flwr_fisher.strategies.baselines.repeatable import Repeatable
from flwr_fisher.strategies.baselines.scaffold import Scaffold
from flwr_fisher.strategies.baselines.secure_fedavg import SecureFedAvg

__all__ = [
    "AFL",
    "DONE",
    "GIANT",
    "FedExP",
    "FedGA",
    "FedPM",
    "Repeatable",
    "Scaffold",
    "SecureFedAvg",
]
