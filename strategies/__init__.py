"""The strategies FedFisher, FedFish, FAGH and TCT, and baselines."""

from flwr_fisher.curvature import FisherOptions
from flwr_fisher.merge import MergeOptions
from flwr_fisher.params import shared_state
from flwr_fisher.server.cohort import wait_for_nodes
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Summation, Upload
from flwr_fisher.server.mailbox import Waiting
from flwr_fisher.server.membership import Membership, lost_states
from flwr_fisher.server.policy import Policy
from flwr_fisher.server.privacy import Privacy
from flwr_fisher.server.run import CurvatureResult
from flwr_fisher.strategies.base import CurvatureStrategy, Refinement
from flwr_fisher.strategies.baselines import AFL, FedAvg, Scaffold
from flwr_fisher.strategies.exchanges.norm_statistics import norm_exchanges
from flwr_fisher.strategies.exchanges.refinement import head_exchange, refinements
from flwr_fisher.strategies.exchanges.tct_regression import Regression
from flwr_fisher.strategies.fagh import FAGH
from flwr_fisher.strategies.fedfish import FedFish
from flwr_fisher.strategies.fedfisher import FedFisherOneShot
from flwr_fisher.strategies.tct import TCT
from flwr_fisher.wire.codec import Codec

__all__ = [
    "AFL",
    "FAGH",
    "TCT",
    "Codec",
    "CurvatureResult",
    "CurvatureStrategy",
    "Exchange",
    "FedAvg",
    "FedFish",
    "FedFisherOneShot",
    "FisherOptions",
    "Membership",
    "MergeOptions",
    "Policy",
    "Privacy",
    "Refinement",
    "Regression",
    "Scaffold",
    "ServerState",
    "Step",
    "Summation",
    "Upload",
    "Waiting",
    "head_exchange",
    "lost_states",
    "norm_exchanges",
    "refinements",
    "shared_state",
    "wait_for_nodes",
]
