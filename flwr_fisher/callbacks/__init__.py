"""What is told of a run while it goes on: tables, trackers, best model, early end.

``strategy.start(..., callbacks=[...])`` calls each after every round.
"""

from flwr_fisher.callbacks.base import Callback, History, call, history_of
from flwr_fisher.callbacks.best_model import BestModel
from flwr_fisher.callbacks.csv_file import CSVFile
from flwr_fisher.callbacks.early_stopping import EarlyStopping
from flwr_fisher.callbacks.trackers import MLflow, TensorBoard, WandB

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
