"""How this library's pictures look."""

from pathlib import Path

from flwr_fisher.errors import extra

with extra("report"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK, QUIET, BEST, GRID = "#222222", "#9aa5b1", "#d1495b", "#e5e5e5"
RUNS = (BEST, "#30638e", "#edae49", "#00798c", "#8d6a9f", QUIET)


def figure(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure, drawn without a display and without global state."""
    drawn, (axes,) = panels(1, height)
    return drawn, axes


def panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels over the same x, two a row, `height` inches each."""
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
    """Write the figure, cut to what is on it."""
    drawn.savefig(path, bbox_inches="tight", facecolor="white")
