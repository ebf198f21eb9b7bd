"""The strategies FedFisher, FedFish, FAGH and TCT, and baselines."""

from flwr_fisher.curvature import FisherOptions as FisherOptions
from flwr_fisher.merge import MergeOptions as MergeOptions
from flwr_fisher.params import shared_state as shared_state
from flwr_fisher.server.cohort import wait_for_nodes as wait_for_nodes
from flwr_fisher.server.exchange import Exchange as Exchange
from flwr_fisher.server.exchange import ServerState as ServerState
from flwr_fisher.server.exchange import Step as Step
from flwr_fisher.server.exchange import Summation as Summation
from flwr_fisher.server.exchange import Upload as Upload
from flwr_fisher.server.mailbox import Waiting as Waiting
from flwr_fisher.server.membership import Membership as Membership
from flwr_fisher.server.membership import lost_states as lost_states
from flwr_fisher.server.policy import Policy as Policy
from flwr_fisher.server.privacy import Privacy as Privacy
from flwr_fisher.server.run import CurvatureResult as CurvatureResult
from flwr_fisher.strategies.base import CurvatureStrategy as CurvatureStrategy
from flwr_fisher.strategies.base import Refinement as Refinement
from flwr_fisher.strategies.baselines import AFL as AFL
from flwr_fisher.strategies.baselines import FedAvg as FedAvg
from flwr_fisher.strategies.baselines import Scaffold as Scaffold
from flwr_fisher.strategies.exchanges.norm_statistics import (
    norm_exchanges as norm_exchanges,
)
from flwr_fisher.strategies.exchanges.refinement import head_exchange as head_exchange
from flwr_fisher.strategies.exchanges.refinement import refinements as refinements
from flwr_fisher.strategies.exchanges.tct_regression import Regression as Regression
from flwr_fisher.strategies.fagh import FAGH as FAGH
from flwr_fisher.strategies.fedfish import FedFish as FedFish
from flwr_fisher.strategies.fedfisher import FedFisherOneShot as FedFisherOneShot
from flwr_fisher.strategies.tct import TCT as TCT
from flwr_fisher.wire.codec import Codec as Codec
