"""The report of a one-shot run: all methods on the same uploads."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from flwr_fisher.devices import default_device
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.merge import MergeResult, fedavg
from flwr_fisher.params import Params
from flwr_fisher.report.accuracy import Loader, ensemble_accuracy
from flwr_fisher.report.folder import (
    log_summary,
    reply_sizes,
    save_model,
    save_report,
)
from flwr_fisher.report.influence import influences, log_influences
from flwr_fisher.report.plots import plot_accuracies, plot_residuals, plot_shares
from flwr_fisher.strategies import CurvatureResult, Upload
from flwr_fisher.tasks import Task
from flwr_fisher.wire import arrays_to_tensors

_TITLES = {
    "fedavg": "FedAvg",
    "best_client": "best client",
    "fedfisher": "FedFisher",
    "fedfisher_averaged": "FedFisher, averaged norms",
    "ensemble": "ensemble (reference)",
}


class Problem(Protocol):
    """The problem of a merge: a model and a test set."""

    def make_model(self) -> nn.Module:
        """Return the model, with any weights."""

    def test_loader(self) -> Loader:
        """Return the test set's batches, ``(inputs, labels)``."""


def report_one_shot(
    path: str | Path,
    *,
    task: Problem,
    result: CurvatureResult,
    seconds: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Compare the merge with simple alternatives on the same uploads; write a report.

    The alternatives are FedAvg's mean, the best single client (on the test set, so a
    generous reference), and the ensemble of all clients, which is not one model. With
    ``aggregate="sums"`` only FedAvg's mean can be computed. If the clients have
    measured the merged model's batch norms, there is also the merge before that, whose
    norms are averaged as FedAvg's are. For at most twenty clients, and a model whose
    merge takes seconds, a table shows each client's influence: how far it moves the
    model, and the accuracy without it, if clients have not measured batch norms.

    Parameters
    ----------
    path : str | Path
        The directory for ``metrics.json``, ``model.safetensors``, ``accuracy.png``,
        ``residual.png`` and, if clients have shares of a ``Task``, ``labels.png``.
    task : Task, or any object with its ``make_model()`` and ``test_loader()``
        Model and test set.
    result : CurvatureResult
        The result of ``FedFisherOneShot``, with the last round's uploads.
    seconds, config : Mapping, optional
        Written to ``metrics.json`` as they are.

    Returns
    -------
    dict[str, float]
        Accuracy by method, as in ``metrics.json``.

    Raises
    ------
    ConfigurationError
        If the result has no merge: it is of another strategy, or of a resumed run that
        had nothing left to do.
    """
    path, merged = Path(path).expanduser(), result.details
    if not isinstance(merged, MergeResult):
        raise ConfigurationError(
            "report_one_shot needs the last merge of FedFisherOneShot, and this result "
            "has none. If a resumed run had nothing left to do, start it with "
            "reopen=True, too; for other strategies, call report_rounds"
        )
    # The clients may have measured its norms after the merge.
    final = {**merged.params, **arrays_to_tensors(result.arrays)}
    save_model(path, final)  # it is safe, whatever a score raises
    device = default_device()
    score = partial(_accuracy, task.make_model().to(device), task.test_loader())
    measured_norms = any(not torch.equal(final[k], v) for k, v in merged.params.items())
    accuracy = _accuracies(score, result.uploads, merged, final, measured_norms)
    scored = None if measured_norms else score
    influence = influences(result.uploads, merged, scored)
    sizes = reply_sizes(result, merged.params)
    measured: dict[str, Any] = {"accuracy": accuracy, "bytes": sizes}
    if influence:
        measured["influence"] = influence
    own = {"config": config or {}, "seconds": seconds or {}}
    save_report(path, final, **own, **measured)
    titled = {_TITLES[name]: value for name, value in accuracy.items()}
    plot_accuracies(path / "accuracy.png", titled, best=_TITLES["fedfisher"])
    labels = path / "labels.png"
    if isinstance(task, Task):
        plot_shares(labels, task, result.uploads)
    else:
        labels.unlink(missing_ok=True)  # from another run in this folder
    plot_residuals(path / "residual.png", merged.residuals)
    log_influences(influence)
    rows = [(title, f"{100 * value:.1f} %") for title, value in titled.items()]
    columns = "method", "test accuracy"
    log_summary("Every method on the same uploads", columns, rows, sizes, path)
    return accuracy


def _accuracy(
    model: nn.Module, loader: Loader, *members: Params, weights: Sequence[float] = (1,)
) -> float:
    return ensemble_accuracy(model, members, weights, loader)


def _accuracies(
    score: Callable[..., float],
    uploads: Sequence[Upload[Any]],
    merged: MergeResult,
    final: Params,
    measured_norms: bool,
) -> dict[str, float]:
    own = {"fedfisher": score(final)}
    if measured_norms:
        own["fedfisher_averaged"] = score(merged.params)
    if merged.mean is not None:  # a merge from sums: no client's part is known
        return {"fedavg": score(merged.mean), **own}
    posteriors = [u.payload.posterior(u.num_examples) for u in uploads]
    members = [posterior.params for posterior in posteriors]
    weights = [posterior.num_examples for posterior in posteriors]
    return {
        "fedavg": score(fedavg(posteriors)),
        "best_client": max(score(params) for params in members),
        **own,
        "ensemble": score(*members, weights=weights),
    }
