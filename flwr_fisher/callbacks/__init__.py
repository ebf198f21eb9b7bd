"""Callbacks after each round: tables, trackers, the best model, early stopping.

``strategy.start(..., callbacks=[...])`` calls each after every round.
"""

from flwr_fisher.callbacks.base import Callback, History, call, history_of
from flwr_fisher.callbacks.trackers import CSVFile, MLflow, TensorBoard, WandB
from flwr_fisher.callbacks.watching import BestModel, EarlyStopping

__all__ = [
    "BestModel",
    "CSVFile",
    "Callback",
    "EarlyStopping",
    "History",
    "MLflow",
    "TensorBoard",
    "WandB",
    "call",
    "history_of",
]
