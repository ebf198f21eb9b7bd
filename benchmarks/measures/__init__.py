"""Measures of a federation of virtual clients, each an ``evaluate_fn``."""

from measures.barrier import ClientServerBarrier
from measures.combine import combine
from measures.costs import costs
from measures.grid import MeasuredGrid
from measures.personalisation import Personalisation

__all__ = ["ClientServerBarrier", "MeasuredGrid", "Personalisation", "combine", "costs"]
