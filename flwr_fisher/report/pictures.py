"""Pictures of a run, drawn without a display and without global state."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_fisher.errors import extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Mapping[int, Mapping[str, Any]]

_QUIET = "#8f959c"
# Any two of them differ for colour-blind readers, too; the lines also without colours.
COLORS = ("#d1495b", "#1d4196", "#edae49", "#3a9fe0", "#663c0f", _QUIET)
LINES = ("-", "--", "-.", ":")


def plot_accuracies(
    path: str | Path, accuracy: Mapping[str, float], best: str, *, title: str = ""
) -> None:
    """Draw the models' accuracies in per cent, one bar for each.

    Parameters
    ----------
    path : str | Path
        The picture to write.
    accuracy : Mapping[str, float]
        Accuracies by name, from 0 to 1, as :func:`accuracies` returns them.
    best : str
        The name whose bar stands out.
    title : str, optional
        The data, their split and the number of test examples, for example.
    """
    figure, (axes,) = _panels(1, height=0.9 + 0.5 * len(accuracy))
    values = [100 * value for value in accuracy.values()]
    colors = [COLORS[0] if name == best else _QUIET for name in accuracy]
    bars = axes.barh(list(accuracy), values, color=colors, height=0.65)
    axes.bar_label(bars, fmt="%.1f", padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, 105)
    axes.set_xlabel("test accuracy, %")
    _save(figure, path, title)


def plot_rounds(
    path: str | Path,
    runs: Mapping[str, History],
    metrics: Sequence[str],
    *,
    marks: Mapping[int, str] | None = None,
    title: str = "",
) -> None:
    """Draw metrics over rounds, one panel for each, for one run or several.

    Parameters
    ----------
    path : str | Path
        The picture to write.
    runs : Mapping[str, Mapping[int, Mapping[str, Any]]]
        For each label, a run's metrics by round, for example
        ``result.evaluate_metrics_serverapp``. Every run has a color and a line style.
    metrics : Sequence[str]
        The metrics to draw. Accuracies are drawn in per cent.
    marks : Mapping[int, str], optional
        Rounds at which a vertical line is drawn, each with a text.
    title : str, optional
        As for :func:`plot_accuracies`.

    Examples
    --------
    ::

        plot_rounds("rounds.png", {"FedFish": fedfish, "FedAvg": fedavg}, ["loss"])
    """
    figure, panels = _panels(len(metrics), height=3.2)
    for axes, name in zip(panels, metrics, strict=True):
        percent = name.endswith("accuracy")
        looks = zip(cycle(COLORS), cycle(LINES), strict=False)
        for (label, history), (color, line) in zip(runs.items(), looks, strict=False):
            points = points_of(history, name)
            rounds = [number for number, _ in points]
            values = [100 * value if percent else value for _, value in points]
            # Few points get markers; many are a curve.
            marker = "o" if len(points) <= 15 else ""
            axes.plot(rounds, values, line, color=color, marker=marker, label=label)
        for number, text in (marks or {}).items():
            axes.axvline(number, color=_QUIET, linestyle="--", linewidth=1)
            axes.text(number, 0.02, f" {text}", transform=axes.get_xaxis_transform())
        axes.set_xlabel("round")
        axes.locator_params(axis="x", integer=True)
        axes.set_ylabel(name.replace("-", " ") + (", %" if percent else ""))
        axes.grid(axis="y", color="#e5e5e5")
        axes.legend(frameon=False, fontsize="small", handlelength=3)
    _save(figure, path, title)


def points_of(history: History, name: str) -> list[tuple[int, float]]:
    """Return the rounds that have a metric, with its values; NaN is left out."""
    return [
        (number, value)
        for number, record in sorted(history.items())
        if isinstance(value := record.get(name), int | float) and not isnan(value)
    ]


def _panels(count: int, height: float) -> "tuple[Figure, list[Axes]]":
    """Return a figure of panels over the same x, two in a row, each `height` inches."""
    with extra("report"):
        from matplotlib.figure import Figure

    columns = min(count, 2)
    rows = -(-count // columns)
    size = (6.4, 10.0)[columns - 1], height * rows
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = [figure.add_subplot(rows, columns, i) for i in range(1, count + 1)]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: "Figure", path: str | Path, title: str) -> None:
    """Write the figure, cropped to its content; make its folder if necessary."""
    figure.suptitle(title, fontsize="medium")
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", facecolor="white")
