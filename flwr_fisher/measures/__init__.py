"""Measures of a federation, for any strategy of Flower or of this library.

A measure is an ``evaluate_fn``, so its metrics are in
``Result.evaluate_metrics_serverapp``::

    measured = MeasuredGrid(grid, held_out=20)
    barrier = ClientServerBarrier(measured)
    personal = Personalisation(measured, fraction=0.5, epochs=5, every=10)
    evaluate_fn = combine(barrier, personal, my_evaluate_fn)
    result = strategy.start(measured, arrays, evaluate_fn=evaluate_fn)

The clients must be :class:`flwr_fisher.client.FisherClient`, or handle the same config:
``fisher.report-local`` in a train message, ``fisher.evaluate-on`` and
``fisher.personalise-fraction`` in an evaluate message.
"""

from flwr_fisher.measures.barrier import ClientServerBarrier
from flwr_fisher.measures.combine import combine
from flwr_fisher.measures.costs import costs
from flwr_fisher.measures.grid import MeasuredGrid
from flwr_fisher.measures.personalisation import Personalisation
from flwr_fisher.server.driver import EvaluateFn
from flwr_fisher.wire import serialized_bytes

__all__ = [
    "ClientServerBarrier",
    "EvaluateFn",
    "MeasuredGrid",
    "Personalisation",
    "combine",
    "costs",
    "serialized_bytes",
]
