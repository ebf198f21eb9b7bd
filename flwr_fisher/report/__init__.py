"""The report of a run: its accuracies, ``metrics.json``, the model, and pictures."""

from flwr_fisher.report.accuracy import accuracies as accuracies
from flwr_fisher.report.accuracy import ensemble_accuracy as ensemble_accuracy
from flwr_fisher.report.accuracy import evaluate_on_test as evaluate_on_test
from flwr_fisher.report.pictures import plot_accuracies as plot_accuracies
from flwr_fisher.report.pictures import plot_rounds as plot_rounds
from flwr_fisher.report.runs import report_one_shot as report_one_shot
from flwr_fisher.report.runs import report_rounds as report_rounds
from flwr_fisher.report.runs import resolve_output_dir as resolve_output_dir
