"""The report of a run: its accuracies, ``metrics.json``, the model, and pictures."""

from flwr_fisher.report.accuracy import accuracies, ensemble_accuracy, evaluate_on_test
from flwr_fisher.report.pictures import plot_accuracies, plot_rounds
from flwr_fisher.report.runs import (
    report_one_shot,
    report_rounds,
    resolve_output_dir,
)

__all__ = [
    "accuracies",
    "ensemble_accuracy",
    "evaluate_on_test",
    "plot_accuracies",
    "plot_rounds",
    "report_one_shot",
    "report_rounds",
    "resolve_output_dir",
]
