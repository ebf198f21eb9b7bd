"""How the benchmarks' plots look."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flwr_fisher.report import pictures

INK, GRID = "#222222", "#e5e5e5"
RUNS, LINES = pictures.COLORS, pictures.LINES
BEST, *_, QUIET = RUNS
# Whole test sets; that of CIFAR-10 is the smaller one of the README's images.
MNIST, CIFAR10 = "10000 test images of MNIST", "5000 test images of CIFAR-10"


def panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels over the same x, two in a row, each `height` inches."""
    columns = min(count, 2)
    rows = -(-count // columns)
    size = (6.4, 10.0)[columns - 1], height * rows
    drawn = Figure(figsize=size, dpi=150, layout="constrained")
    axes: list[Axes] = []
    for index in range(1, count + 1):
        first = axes[0] if axes else None
        axes.append(drawn.add_subplot(rows, columns, index, sharex=first))
        without_frame(axes[-1])
    return drawn, axes


def save(drawn: Figure, path: Path, title: str = "") -> None:
    """Write the figure, cropped to its content; make its folder if necessary.

    The title has the data, how they are shared out, and how many test.
    """
    drawn.suptitle(title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, bbox_inches="tight", facecolor="white")


def without_frame(axes: Axes) -> None:
    """Leave the lines of the two axes alone."""
    axes.spines[["top", "right"]].set_visible(False)


def bars(
    columns: Mapping[str, Mapping[str, Sequence[float]]], ours: Collection[str]
) -> Figure:
    """Return a panel a column: a bar for each name's mean, a dot for each value.

    Our methods' stand out; all columns have the same names.
    """
    names = list(next(iter(columns.values())))
    size = 9, 1.2 + 0.3 * len(names)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    for index, (title, values) in enumerate(columns.items()):
        axes = figure.add_subplot(1, len(columns), index + 1)
        for place, name in enumerate(names):
            color = BEST if name in ours else QUIET
            axes.barh(place, mean(values[name]), color=color, height=0.65)
            dots = [place] * len(values[name])
            axes.plot(values[name], dots, ".", color=INK, markersize=4)
        axes.set_title(title, fontsize="medium")
        axes.set_xlim(0, 100)
        axes.margins(y=0.01)
        axes.set_yticks(range(len(names)), names if index == 0 else [""] * len(names))
        axes.invert_yaxis()
        without_frame(axes)
    figure.supxlabel("test accuracy, % (bars: means; dots: splits)", fontsize="medium")
    return figure


def dress(axes: Axes, x: str, y: str) -> None:
    """Name the axes; draw horizontal lines behind the curves, and no frame."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", color=GRID)
    without_frame(axes)


def powers_of_two(axes: Axes, ticks: Sequence[float]) -> None:
    """Draw x on a logarithmic scale, with these ticks and no others."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def legend(figure: Figure, **place: Any) -> None:
    """Draw one legend for all panels, with the first panel's names."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, **place)
