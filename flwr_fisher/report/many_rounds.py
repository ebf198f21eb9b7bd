"""The report of a run with several rounds, for any strategy."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from torch import Tensor

from flwr_fisher.client import cross_entropy, score
from flwr_fisher.devices import default_device
from flwr_fisher.errors import check_whole
from flwr_fisher.measures import EvaluateFn
from flwr_fisher.params import shared_state
from flwr_fisher.report.folder import (
    log_summary,
    reply_sizes,
    save_model,
    save_report,
)
from flwr_fisher.report.plots import plot_shares
from flwr_fisher.report.rounds import TITLES, plot_rounds, points_of, rounds_of
from flwr_fisher.tangent import TCTModel
from flwr_fisher.tasks import Task
from flwr_fisher.wire import arrays_to_tensors

_PANELS: tuple[tuple[str, ...], ...] = (
    ("accuracy",),
    ("loss",),
    ("barrier-loss",),
    ("personalised-accuracy", "zero-shot-accuracy"),
)


def evaluate_on_test(
    task: Task, *, every: int = 1, also: Collection[int] = ()
) -> EvaluateFn:
    """Return an ``evaluate_fn`` that evaluates the server's model on the test set.

    Its metrics are ``accuracy`` and ``loss``. A TCT model in its second stage has no
    ``loss``, because it was not fitted by a cross-entropy. Before the first round of
    that stage it predicts nothing yet, and is not scored.

    Parameters
    ----------
    task : Task
        Model and test set.
    every : int, default 1
        Score the initial model and each `every`-th round.
    also : Collection[int], default ()
        Further rounds to score: the last of a stage, for example.

    Raises
    ------
    ConfigurationError
        If `every` is out of range.
    """
    check_whole("every", every, 1)

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % every and server_round not in also:
            return None
        params = arrays_to_tensors(arrays)
        if TCTModel.is_in(params) and not params["tct/weight"].any():
            return None
        return MetricRecord(dict(_scores(task, params)))

    return evaluate_fn


def report_rounds(
    path: str | Path,
    *,
    method: str,
    task: Task,
    result: Result,
    seconds: Mapping[str, float],
    config: Mapping[str, Any],
    also: Mapping[str, int] | None = None,
    marks: Mapping[int, str] | None = None,
) -> dict[str, float]:
    """Write the metrics of a run with several rounds; log a summary.

    Parameters
    ----------
    path : str | Path
        The directory for ``metrics.json``, ``model.safetensors``, ``rounds.png`` and,
        if clients share a data set of images, ``labels.png``.
    method : str
        The strategy's name for titles. In ``metrics.json`` it is in small letters.
    task : Task
        Test set, model and label distribution.
    result : Result
        The result of any strategy, also of Flower's. Bytes are reported if it has
        `uploads`. The metrics of ``evaluate_fn``, such as those of
        :func:`evaluate_on_test` and :mod:`flwr_fisher.measures`, are drawn by round. If
        the last round was not scored on the test set, it is scored now.
    seconds, config : Mapping
        Written to ``metrics.json`` as they are.
    also : Mapping[str, int], optional
        Further rounds whose accuracy is reported, by their names in ``metrics.json``:
        for example ``{"stage1": 20}``. They must have been scored.
    marks : Mapping[int, str], optional
        As for :func:`plot_rounds`.

    Returns
    -------
    dict[str, float]
        The accuracies of ``metrics.json``: the method's own after the last round, those
        of `also`, and ``zero_shot`` and ``personalised`` of held-out clients, as they
        were last measured.
    """
    path, params = Path(path).expanduser(), arrays_to_tensors(result.arrays)
    save_model(path, params)  # it is safe, whatever a score raises
    rounds = rounds_of(result)
    last = rounds.setdefault(max(rounds, default=0), {}).setdefault("server", {})
    if "accuracy" not in last:
        last |= _scores(task, params)
    history = {number: kinds.get("server", {}) for number, kinds in rounds.items()}
    curves = {key: points for key in TITLES if (points := points_of(history, key))}
    accuracy = {method.lower(): last["accuracy"]}
    accuracy |= {k: history[n]["accuracy"] for k, n in (also or {}).items()}
    for key in ("zero-shot-accuracy", "personalised-accuracy"):
        if key in curves:
            name = key.removesuffix("-accuracy").replace("-", "_")
            accuracy[name] = curves[key][-1][1]
    plain = shared_state(task.make_model())
    sizes = reply_sizes(result, plain)
    measured = {"accuracy": accuracy, "bytes": sizes, "rounds": rounds}
    save_report(path, params, config=config, seconds=seconds, **measured)
    drawn = [keys for keys in _PANELS if curves.keys() & set(keys)]
    plot_rounds(path / "rounds.png", {method: history}, drawn, marks=marks)
    if len(task.data.shape) == 3:  # a text has too many documents to show
        plot_shares(path / "labels.png", task, getattr(result, "uploads", []))
    title = f"{method}, {max(rounds)} rounds"
    log_summary(title, ("measure", "first", "last"), _rows(curves), sizes, path)
    return accuracy


def _scores(task: Task, params: Mapping[str, Tensor]) -> dict[str, float]:
    device = default_device()
    model = task.make_model()
    if TCTModel.is_in(params):
        model = TCTModel.from_tensors(model, params)
    else:
        model.load_state_dict(dict(params), strict=False)
    model = model.to(device)
    loss, accuracy, _ = score(model, task.test_loader(), device, cross_entropy)
    if isinstance(model, TCTModel):
        return {"accuracy": accuracy}
    return {"accuracy": accuracy, "loss": loss}


def _rows(curves: Mapping[str, list[tuple[int, float]]]) -> Iterator[tuple[str, ...]]:
    for key, points in curves.items():
        per_cent = key.endswith(("accuracy", "error"))
        form = "{1:.1%} (round {0})" if per_cent else "{1:.3f} (round {0})"
        yield TITLES[key], form.format(*points[0]), form.format(*points[-1])
