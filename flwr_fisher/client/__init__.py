"""The client's side: a Flower ``ClientApp`` from a model, data and a loss."""

from flwr_fisher.client.disk import ClientDisk, Kept
from flwr_fisher.client.fisher_client import ClientFn, FisherClient, make_client_app
from flwr_fisher.client.jobs import Job, register_job
from flwr_fisher.client.limits import ClientLimits
from flwr_fisher.client.messages import ClientApp, identify
from flwr_fisher.client.plain_client_app import check_fisher, fisher_arrays
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.client.state import ClientState
from flwr_fisher.client.training import EvaluateFn, LocalSGD, TrainFn, score
from flwr_fisher.client.training_checkpoint import TrainingCheckpoint
from flwr_fisher.curvature.losses import cross_entropy

__all__ = [
    "ClientApp",
    "ClientDisk",
    "ClientFn",
    "ClientLimits",
    "ClientState",
    "EvaluateFn",
    "FisherClient",
    "Job",
    "Kept",
    "LocalProblem",
    "LocalSGD",
    "Reply",
    "Request",
    "TrainFn",
    "TrainingCheckpoint",
    "check_fisher",
    "cross_entropy",
    "fisher_arrays",
    "identify",
    "make_client_app",
    "register_job",
    "score",
]
