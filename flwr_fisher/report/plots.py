"""Pictures, drawn without a display and without global state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from flwr_fisher.errors import extra
from flwr_fisher.strategies import Upload
from flwr_fisher.tasks import Task

with extra("report"):
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, BEST, GRID = "#222222", "#9aa5b1", "#d1495b", "#e5e5e5"
RUNS = (BEST, "#30638e", "#edae49", "#00798c", "#8d6a9f", QUIET)


def figure(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure, drawn without a display and without global state."""
    drawn, (axes,) = panels(1, height)
    return drawn, axes


def panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels over the same x, two in a row, each `height` inches."""
    columns = min(count, 2)
    rows = -(-count // columns)
    drawn = Figure(figsize=((6.4, 10.0)[columns - 1], height * rows), dpi=150)
    axes: list[Axes] = []
    for index in range(1, count + 1):
        first = axes[0] if axes else None
        axes.append(drawn.add_subplot(rows, columns, index, sharex=first))
        axes[-1].spines[["top", "right"]].set_visible(False)
    return drawn, axes


def save(drawn: Figure, path: Path) -> None:
    """Write the figure, cropped to its content; make its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, bbox_inches="tight", facecolor="white")


def plot_accuracies(path: Path, accuracy: Mapping[str, float], best: str) -> None:
    """Draw the models' accuracies in per cent, one bar for each.

    Parameters
    ----------
    path : Path
        The picture to write.
    accuracy : Mapping[str, float]
        Accuracies by name, from 0 to 1, as :func:`flwr_fisher.report.accuracies`
        returns them.
    best : str
        The name whose bar stands out.
    """
    drawn, axes = figure(height=0.9 + 0.5 * len(accuracy))
    names = list(accuracy)
    values = [100 * accuracy[name] for name in names]
    colors = [BEST if name == best else QUIET for name in names]
    bars = axes.barh(names, values, color=colors, height=0.65)
    axes.bar_label(bars, fmt="%.1f", padding=4, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 105)
    axes.set_xlabel("test accuracy, %")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    save(drawn, path)


def plot_labels(path: Path, histogram: Tensor, class_names: Sequence[str]) -> None:
    """Draw each client's examples by class, one stacked bar for each client.

    Parameters
    ----------
    path : Path
        The picture to write.
    histogram : Tensor
        Counts, ``[clients, classes]``, as :func:`flwr_fisher.tasks.label_histogram`
        returns them.
    class_names : Sequence[str]
        A name for each class.
    """
    clients, classes = histogram.shape
    drawn, axes = figure(height=1.4 + 0.32 * min(clients, 30))
    colors = colormaps["tab20"](np.linspace(0, 1, max(classes, 2)))
    left = np.zeros(clients)
    for index in range(classes):
        counts = histogram[:, index].numpy()
        label = class_names[index] if classes <= 20 else None
        axes.barh(range(clients), counts, left=left, color=colors[index], label=label)
        left += counts
    axes.set_xlabel("training examples")
    axes.set_ylabel("client")
    axes.set_yticks(range(clients) if clients <= 30 else [0, clients - 1])
    axes.invert_yaxis()
    if classes <= 20:
        axes.legend(
            title="class",
            frameon=False,
            fontsize="small",
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
        )
    save(drawn, path)


def plot_shares(path: Path, task: Task, uploads: Sequence[Upload[Any]]) -> None:
    """Draw each client's labels, if clients hold the task's shares.

    For nodes with data of their own, the labels are not known.
    """
    shares = {f"partition-{i}" for i in range(task.num_partitions)}
    if shares and shares.issuperset(upload.client for upload in uploads):
        plot_labels(path, task.label_histogram(), task.data.class_names)
    else:
        path.unlink(missing_ok=True)  # from another run in this folder


def plot_residuals(path: Path, residuals: Sequence[float]) -> None:
    """Draw the solver's relative residual over iterations, on a logarithmic scale."""
    drawn, axes = figure(height=3.2)
    axes.semilogy(range(len(residuals)), residuals, color=BEST, linewidth=2)
    axes.set_xlabel("solver iteration")
    axes.set_ylabel("relative residual")
    axes.grid(axis="y", color=GRID)
    save(drawn, path)
