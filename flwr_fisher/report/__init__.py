"""The report of a run: ``metrics.json``, the model, and pictures."""

from flwr_fisher.report.accuracy import accuracies, ensemble_accuracy
from flwr_fisher.report.folder import resolve_output_dir, save_report
from flwr_fisher.report.many_rounds import evaluate_on_test, report_rounds
from flwr_fisher.report.one_shot import report_one_shot
from flwr_fisher.report.plots import plot_accuracies, plot_labels
from flwr_fisher.report.rounds import plot_rounds, rounds_of

__all__ = [
    "accuracies",
    "ensemble_accuracy",
    "evaluate_on_test",
    "plot_accuracies",
    "plot_labels",
    "plot_rounds",
    "report_one_shot",
    "report_rounds",
    "resolve_output_dir",
    "rounds_of",
    "save_report",
]
