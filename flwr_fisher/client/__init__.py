"""The client's side: a Flower ``ClientApp`` from a model, data and a loss."""

from flwr_fisher.client.fisher_client import FisherClient, make_client_app
from flwr_fisher.client.jobs import register_job
from flwr_fisher.client.messages import ClientApp, identify
from flwr_fisher.client.outbox import TrainingCheckpoint
from flwr_fisher.client.plain_client_app import (
    check_client,
    check_fisher,
    fisher_arrays,
)
from flwr_fisher.client.problem import CountedLoader, LocalProblem
from flwr_fisher.client.request import ClientLimits, Reply, Request
from flwr_fisher.client.state import ClientState
from flwr_fisher.client.training import LocalSGD, score
from flwr_fisher.curvature.losses import cross_entropy

__all__ = [
    "ClientApp",
    "ClientLimits",
    "ClientState",
    "CountedLoader",
    "FisherClient",
    "LocalProblem",
    "LocalSGD",
    "Reply",
    "Request",
    "TrainingCheckpoint",
    "check_client",
    "check_fisher",
    "cross_entropy",
    "fisher_arrays",
    "identify",
    "make_client_app",
    "register_job",
    "score",
]
