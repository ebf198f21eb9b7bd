"""The formulas of methods with many rounds, one file a method, without Flower."""

from flwr_fisher.rounds.fagh import FaghMoments as FaghMoments
from flwr_fisher.rounds.fagh import FaghStep as FaghStep
from flwr_fisher.rounds.fagh import fagh_step as fagh_step
from flwr_fisher.rounds.fedfish import FishOptions as FishOptions
from flwr_fisher.rounds.fedfish import fedfish_average as fedfish_average
from flwr_fisher.rounds.fedfish import fedfish_quotient as fedfish_quotient
from flwr_fisher.rounds.scaffold import scaffold_control as scaffold_control
from flwr_fisher.rounds.scaffold import scaffold_step as scaffold_step
from flwr_fisher.rounds.server_optimizer import make_optimizer as make_optimizer
from flwr_fisher.rounds.server_optimizer import server_step as server_step
from flwr_fisher.rounds.updates import stepped_names as stepped_names
