"""How the benchmarks' plots look."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flwr_fisher.report.style import GRID


def without_frame(axes: Axes) -> None:
    """Leave the lines of the two axes alone."""
    axes.spines[["top", "right"]].set_visible(False)


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
