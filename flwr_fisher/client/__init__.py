"""From a user's model, loaders and loss to a Flower ``ClientApp``."""

from flwr_fisher.client.fisher_client import ClientFn, FisherClient, make_client_app
from flwr_fisher.client.training import LocalSGD, TrainFn, cross_entropy, score

__all__ = [
    "ClientFn",
    "FisherClient",
    "LocalSGD",
    "TrainFn",
    "cross_entropy",
    "make_client_app",
    "score",
]
