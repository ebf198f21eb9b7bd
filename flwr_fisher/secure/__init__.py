"""Sums of clients' tensors that nobody can look into: SecAgg+'s mathematics.

Bonawitz et al. (CCS 2017), with the sparse graph of Bell et al. (CCS 2020). Nothing
here knows a message: :class:`Participant` is one client, :class:`Aggregator` the
server.
"""

from flwr_fisher.secure.aggregator import Aggregator
from flwr_fisher.secure.fixed_point import FixedPoint, exponents_of, highest, unary
from flwr_fisher.secure.graph import neighbourhoods, threshold_of
from flwr_fisher.secure.participant import Participant

__all__ = [
    "Aggregator",
    "FixedPoint",
    "Participant",
    "exponents_of",
    "highest",
    "neighbourhoods",
    "threshold_of",
    "unary",
]
