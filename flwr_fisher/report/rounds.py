"""The metrics of a run by round, and their picture."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Result

from flwr_fisher.errors import extra
from flwr_fisher.log_lines import logger
from flwr_fisher.report.plots import GRID, INK, QUIET, RUNS, panels, save

with extra("report"):
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

History = Mapping[int, Mapping[str, Any]]

_DASHES = ("-", "--", ":", "-.")
_PER_CENT = ("accuracy", "error")
TITLES = {
    "accuracy": "test accuracy",
    "loss": "test loss",
    "barrier-loss": "client-server barrier, loss",
    "barrier-error": "client-server barrier, error",
    "zero-shot-accuracy": "held-out clients, accuracy as it is",
    "personalised-accuracy": "held-out clients, accuracy fine-tuned",
}


def rounds_of(result: Result) -> dict[int, dict[str, dict[str, Any]]]:
    """Return a result's metrics by round, and within a round by their source.

    ``{1: {"train": {…}, "evaluate": {…}, "server": {…}}, …}``: ``server`` has the
    metrics of ``evaluate_fn``, ``train`` and ``evaluate`` the aggregated metrics of the
    clients. A source without metrics in a round is left out.
    """
    histories = {
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
    rounds: dict[int, dict[str, dict[str, Any]]] = {}
    for source, history in histories.items():
        for number, record in history.items():
            rounds.setdefault(number, {})[source] = dict(record)
    return dict(sorted(rounds.items()))


def plot_rounds(
    path: str | Path,
    runs: Mapping[str, History],
    metrics: Sequence[str | Sequence[str]],
    *,
    marks: Mapping[int, str] | None = None,
) -> None:
    """Draw metrics over rounds, one panel for each, for one run or several.

    Parameters
    ----------
    path : str | Path
        The picture's file.
    runs : Mapping[str, Mapping[int, Mapping[str, Any]]]
        For each label, a run's metrics by round, for example
        ``result.evaluate_metrics_serverapp``. Every run has a colour; the first run's
        stands out.
    metrics : Sequence[str | Sequence[str]]
        The metrics to draw. Several metrics in one panel have different line styles.
        Accuracies and errors are drawn in per cent. If no run has a panel's metrics,
        the panel is left out, with a warning.
    marks : Mapping[int, str], optional
        Rounds at which a vertical line is drawn, each with a text.

    Examples
    --------
    ::

        plot_rounds(
            path / "rounds.png",
            {"FedFish": fedfish.evaluate_metrics_serverapp, "FedAvg": …},
            ["barrier-loss", ("personalised-accuracy", "zero-shot-accuracy")],
        )
    """
    path = Path(path).expanduser()
    wanted = [(m,) if isinstance(m, str) else tuple(m) for m in metrics]
    drawn = []
    for keys in wanted:
        if any(points_of(h, key) for h in runs.values() for key in keys):
            drawn.append(keys)
        else:
            logger.warning("%s: no run has %s", path.name, " or ".join(keys))
    if not drawn:
        return
    figure, axes = panels(len(drawn), height=3.2)
    for one, keys in zip(axes, drawn, strict=True):
        _panel(one, runs, keys)
        _mark(one, marks or {})
    if len(runs) > 1:
        figure.legend(
            [Line2D([], [], color=RUNS[i % len(RUNS)], lw=2) for i in range(len(runs))],
            list(runs),
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=min(len(runs), 4),
            frameon=False,
        )
    figure.tight_layout()
    save(figure, path)


def _panel(axes: Axes, runs: Mapping[str, History], keys: tuple[str, ...]) -> None:
    for index, history in enumerate(runs.values()):
        for key, dashes in zip(keys, cycle(_DASHES), strict=False):
            points = points_of(history, key)
            scale = 100 if key.endswith(_PER_CENT) else 1
            axes.plot(
                [number for number, _ in points],
                [value * scale for _, value in points],
                color=RUNS[index % len(RUNS)],
                linestyle=dashes,
                linewidth=2,
                # Few points get markers; many are a curve.
                marker="o" if len(points) <= 15 else None,
                markersize=4,
            )
    axes.set_xlabel("round")
    axes.set_ylabel(_label(keys))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    if any(key in ("barrier-loss", "barrier-error") for key in keys):
        axes.axhline(0, color=QUIET, linewidth=1, zorder=1)
    if len(keys) > 1:
        axes.legend(
            [Line2D([], [], color=INK, lw=2, ls=d) for d in _DASHES[: len(keys)]],
            [_short(key) for key in keys],
            frameon=False,
            fontsize="small",
        )


def _mark(axes: Axes, marks: Mapping[int, str]) -> None:
    for number, label in marks.items():
        axes.axvline(number, color=QUIET, linestyle="--", linewidth=1, zorder=1)
        axes.annotate(
            label,
            (number, 0.02),
            xycoords=axes.get_xaxis_transform(),
            xytext=(4, 0),
            textcoords="offset points",
            color=INK,
            fontsize="small",
        )


def points_of(history: History, key: str) -> list[tuple[int, float]]:
    """Return a metric's values with their rounds, if they are numbers."""
    return [
        (number, record[key])
        for number, record in sorted(history.items())
        if isinstance(record.get(key), int | float)
    ]


def _label(keys: tuple[str, ...]) -> str:
    unit = ", %" if keys[0].endswith(_PER_CENT) else ""
    if len(keys) == 1:
        return TITLES.get(keys[0], keys[0].replace("-", " ")) + unit
    kinds = {key.split("-")[-1] for key in keys}
    return ", ".join(keys) if len(kinds) > 1 else kinds.pop() + unit


def _short(key: str) -> str:
    """Return a key without the words that are on the axis."""
    return key.rpartition("-")[0] or key
