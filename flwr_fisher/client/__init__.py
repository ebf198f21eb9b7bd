"""The client's half: from a model, data and a loss to a Flower ``ClientApp``."""

from flwr_fisher.client.checkpoint import TrainingCheckpoint
from flwr_fisher.client.fisher_client import ClientFn, FisherClient, make_client_app
from flwr_fisher.client.jobs import Job, register_job
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.client.training import LocalSGD, TrainFn, cross_entropy, score

__all__ = [
    "ClientFn",
    "FisherClient",
    "Job",
    "LocalProblem",
    "LocalSGD",
    "Reply",
    "Request",
    "TrainFn",
    "TrainingCheckpoint",
    "cross_entropy",
    "make_client_app",
    "register_job",
    "score",
]
