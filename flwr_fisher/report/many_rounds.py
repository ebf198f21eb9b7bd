"""The report of a run of several rounds, of any strategy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from rich.table import Table
from torch import Tensor

from flwr_fisher.client import cross_entropy, score
from flwr_fisher.errors import check_range
from flwr_fisher.measures import EvaluateFn
from flwr_fisher.report.folder import ReportDir
from flwr_fisher.report.plots import plot_labels
from flwr_fisher.report.rounds import plot_rounds, rounds_of
from flwr_fisher.report.summary import log_summary, reply_sizes
from flwr_fisher.tasks import Task
from flwr_fisher.wire import arrays_to_tensors

__all__ = ["evaluate_on_test", "report_rounds"]

_TITLES = {
    "accuracy": "test accuracy",
    "loss": "test loss",
    "barrier-loss": "client-server barrier, loss",
    "barrier-error": "client-server barrier, error",
    "zero-shot-accuracy": "held-out clients, accuracy as it is",
    "personalised-accuracy": "held-out clients, accuracy fine-tuned",
}
_PANELS: tuple[tuple[str, ...], ...] = (
    ("accuracy",),
    ("loss",),
    ("barrier-loss",),
    ("personalised-accuracy", "zero-shot-accuracy"),
)


def evaluate_on_test(task: Task, *, every: int = 1) -> EvaluateFn:
    """Return an ``evaluate_fn`` that scores the server's model on the test set.

    Its metrics are ``accuracy`` and ``loss``.

    Parameters
    ----------
    task : Task
        Model and test set.
    every : int, default 1
        Score the start and each `every`-th round.

    Raises
    ------
    ConfigurationError
        If `every` is out of range.
    """
    check_range("every", every, 1)

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % every:
            return None
        return MetricRecord({**_scores(task, arrays_to_tensors(arrays))})

    return evaluate_fn


def report_rounds(
    path: Path,
    *,
    method: str,
    task: Task,
    result: Result,
    seconds: Mapping[str, float],
    config: Mapping[str, Any],
) -> dict[str, float]:
    """Write what a run of several rounds gave, round by round; tell the log the rest.

    Parameters
    ----------
    path : Path
        The directory for ``metrics.json``, ``model.safetensors``, ``rounds.png`` and,
        of images, ``labels.png``.
    method : str
        The strategy's name, for titles; in small letters, for ``metrics.json``.
    task : Task
        Test set, model and label distribution.
    result : Result
        Of any strategy, Flower's too; bytes are those of a result that has `uploads`.
        What ``evaluate_fn`` measured, :func:`evaluate_on_test` and
        :mod:`flwr_fisher.measures` for example, is drawn by round. The last round is
        scored on the test set if it is not yet.
    seconds, config : Mapping
        Go to ``metrics.json`` as they are.

    Returns
    -------
    dict[str, float]
        The accuracies of ``metrics.json``: the method's own after the last round, and
        ``zero_shot`` and ``personalised`` of held-out clients where last measured.
    """
    params = arrays_to_tensors(result.arrays)
    rounds = rounds_of(result)
    last = rounds.setdefault(max(rounds, default=0), {}).setdefault("server", {})
    if "accuracy" not in last:
        last |= _scores(task, params)
    history = {number: found.get("server", {}) for number, found in rounds.items()}
    curves = {key: points for key in _TITLES if (points := _points(history, key))}
    accuracy = {method.lower(): last["accuracy"]}
    for key in ("zero-shot-accuracy", "personalised-accuracy"):
        if key in curves:
            name = key.removesuffix("-accuracy").replace("-", "_")
            accuracy[name] = curves[key][-1][1]
    sizes = reply_sizes(getattr(result, "uploads", []), params)
    folder = ReportDir(path)
    folder.metrics(
        accuracy=accuracy, bytes=sizes, seconds=seconds, config=config, rounds=rounds
    )
    folder.model(params)
    drawn = [keys for keys in _PANELS if curves.keys() & set(keys)]
    plot_rounds(path / "rounds.png", {method: history}, drawn)
    if len(task.data.shape) == 3:  # a text has documents, too many to tell apart
        labels = task.label_histogram(), task.data.class_names
        plot_labels(path / "labels.png", *labels)
    log_summary(_table(f"{method}, {max(rounds)} rounds", curves), sizes, path)
    return accuracy


def _scores(task: Task, params: Mapping[str, Tensor]) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = task.make_model().to(device)
    model.load_state_dict(dict(params), strict=False)
    loss, accuracy, _ = score(model, task.test_loader(), device, cross_entropy)
    return {"accuracy": accuracy, "loss": loss}


def _points(
    history: Mapping[int, Mapping[str, Any]], key: str
) -> list[tuple[int, float]]:
    """Return a metric's values with their rounds."""
    return [
        (number, metrics[key])
        for number, metrics in sorted(history.items())
        if key in metrics
    ]


def _table(title: str, curves: Mapping[str, list[tuple[int, float]]]) -> Table:
    table = Table("measure", "first", "last", title=title)
    for key, points in curves.items():
        per_cent = key.endswith(("accuracy", "error"))
        form = "{1:.1%} (round {0})" if per_cent else "{1:.3f} (round {0})"
        ends = form.format(*points[0]), form.format(*points[-1])
        table.add_row(_TITLES[key], *ends)
    return table
