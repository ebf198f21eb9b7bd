"""The report of a one-shot run: every method on the same uploads."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from rich.console import Console
from rich.table import Table

from flwr_fisher.measures import accuracies, ensemble_accuracy
from flwr_fisher.merge import LocalPosterior, MergeResult, fedavg
from flwr_fisher.report.folder import ReportDir
from flwr_fisher.report.plots import plot_accuracies, plot_labels, plot_residuals
from flwr_fisher.strategies import CurvatureResult, Upload
from flwr_fisher.tasks import Task
from flwr_fisher.wire import serialized_bytes, tensors_to_arrays

__all__ = ["report_one_shot"]

logger = logging.getLogger("flwr")

_TITLES = {
    "fedavg": "FedAvg",
    "best_client": "best client",
    "fedfisher": "FedFisher",
    "ensemble": "ensemble (reference)",
}


def report_one_shot(
    path: Path,
    *,
    task: Task,
    result: CurvatureResult,
    seconds: Mapping[str, float],
    config: Mapping[str, Any],
) -> dict[str, float]:
    """Score the merge beside the simple alternatives, on the same uploads; write all.

    The alternatives are FedAvg's mean, the best single client (on the test set, so a
    generous reference), and the ensemble of all clients, which is not one model.

    Parameters
    ----------
    path : Path
        The directory for ``metrics.json``, ``model.safetensors``, ``accuracy.png``,
        ``labels.png`` and ``residual.png``.
    task : Task
        Test set, model and label distribution.
    result : CurvatureResult
        Of ``FedFisherOneShot``, with the last round's uploads.
    seconds, config : Mapping
        Go to ``metrics.json`` as they are.

    Returns
    -------
    dict[str, float]
        Accuracy by method, as in ``metrics.json``.
    """
    posteriors = [upload.posterior for upload in result.uploads]
    merged: MergeResult = result.details
    accuracy = _accuracies(task, posteriors, merged)
    sizes = _bytes(result.uploads)
    folder = ReportDir(path)
    folder.metrics(accuracy=accuracy, bytes=sizes, seconds=seconds, config=config)
    folder.model(merged.params)
    titled = {_TITLES[name]: value for name, value in accuracy.items()}
    plot_accuracies(path / "accuracy.png", titled, best=_TITLES["fedfisher"])
    plot_labels(path / "labels.png", task.label_histogram(), task.data.class_names)
    plot_residuals(path / "residual.png", merged.residuals)
    _print(titled, sizes, path)
    return accuracy


def _accuracies(
    task: Task, posteriors: Sequence[LocalPosterior], merged: MergeResult
) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, loader = task.make_model().to(device), task.test_loader()
    members = [posterior.params for posterior in posteriors]
    weights = [posterior.num_examples for posterior in posteriors]
    single = accuracies(model, {str(i): p for i, p in enumerate(members)}, loader)
    both = {"fedavg": fedavg(posteriors), "fedfisher": merged.params}
    found = accuracies(model, both, loader)
    found["best_client"] = max(single.values())
    found["ensemble"] = ensemble_accuracy(model, members, weights, loader)
    return {name: found[name] for name in _TITLES}


def _bytes(uploads: Sequence[Upload]) -> dict[str, float]:
    """Return the mean size of a reply, and of FedAvg's: the same one without extras."""
    plain = [
        serialized_bytes(
            RecordDict(
                {"arrays": tensors_to_arrays(u.payload.params), "metrics": u.metrics}
            )
        )
        for u in uploads
    ]
    return {
        "upload_per_client": sum(u.num_bytes for u in uploads) / len(uploads),
        "fedavg_per_client": sum(plain) / len(plain),
    }


def _print(
    accuracy: Mapping[str, float], sizes: Mapping[str, float], path: Path
) -> None:
    table = Table("method", "test accuracy", title="Every method on the same uploads")
    for title, value in accuracy.items():
        table.add_row(title, f"{100 * value:.1f} %")
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        logger.info(line)
    upload, plain = sizes["upload_per_client"], sizes["fedavg_per_client"]
    logger.info("Upload: %.0f kB a client (FedAvg: %.0f kB)", upload / 1e3, plain / 1e3)
    logger.info("Results are in %s", path)
