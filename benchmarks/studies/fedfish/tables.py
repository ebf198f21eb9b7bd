"""The tables and the plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from harness.jobs import Numbers
from harness.plots import BEST, INK, MNIST, RUNS, dress, legend, powers_of_two, save
from harness.plots import LINES as DASHES
from harness.stats import paired, with_error
from harness.tables import head, row
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.fedfish.choice import (
    ABLATIONS,
    CLIENT_LRS,
    EPOCHS,
    HIGH,
    KINDS,
    LOW,
    SERVER_LRS,
    Found,
    Runs,
    outside,
)
from studies.fedfish.strategies import AVG, BALANCED, FISH, LATE, MENDED, PRODUCT, ROOT


@dataclass(frozen=True)
class Measure:
    """A column: where its number is found, and how it is shown."""

    title: str
    key: str
    factor: float = 100.0
    digits: int = 1

    def of(self, runs: Sequence[Numbers]) -> list[float]:
        """Return a cell's values, one a seed."""
        return [self.factor * run[self.key] for run in runs]

    def spread(self, runs: Sequence[Numbers]) -> str:
        """Return mean ± standard deviation."""
        # Not harness.stats.spread: some means are ties in the last digit shown, which
        # that mean, exact for the binary numbers, would round the other way.
        values, digits = self.of(runs), self.digits
        return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}"

    def gap(self, ours: Sequence[Numbers], theirs: Sequence[Numbers]) -> list[float]:
        """Return paired differences."""
        return paired(self.of(ours), self.of(theirs))

    def shown(self, differences: Sequence[float]) -> str:
        """Return mean ± standard error of paired differences."""
        return with_error(differences, self.digits + 1)


GLOBAL = Measure("global", "accuracy")
HALF = Measure("personalised, 50 %", "personal-50-accuracy")
BARRIER = Measure("barrier, loss", "barrier-loss", factor=1.0, digits=3)
POINTS = Measure("barrier, points", "barrier-error")
MEASURES = (
    GLOBAL,
    Measure("zero-shot", "zero-shot-accuracy"),
    Measure("personalised, 25 %", "personal-25-accuracy"),
    HALF,
    BARRIER,
    POINTS,
)
TITLES = [measure.title for measure in MEASURES]
AT_COMMON = Measure("personalised, 50 %, lr 0.04", "personal-50-common-accuracy")
SHARES = (
    Measure("entries with over half from one client, %", "over-half", digits=0),
    Measure("over nine tenths, %", "over-nine-tenths", digits=0),
    Measure("clients an entry is made of", "effective-clients", 1.0),
    Measure("largest Fisher's share, %", "largest-trace", digits=0),
    Measure("correlation, log trace and log loss", "trace-loss-correlation", 1.0, 2),
)
MERGED = {
    "mean": "mean",
    "fisher": "FedFish's average",
    "unit": "of Fishers of trace 1",
}
LINES = {AVG: RUNS[1], FISH: RUNS[2], MENDED: BEST}
MARKERS = {
    LATE: ("^", INK),
    PRODUCT: ("s", RUNS[3]),
    BALANCED: ("D", RUNS[4]),
    ROOT: ("v", RUNS[5]),
}
SHOWN = {
    "global accuracy, %": GLOBAL,
    "personalised accuracy, %": HALF,
    "barrier, loss": BARRIER,
}


def merged(name: str) -> tuple[Measure, Measure, Measure]:
    """Return the measures of an average of the last uploads."""
    return (
        Measure("accuracy", f"merged-{name}-accuracy"),
        Measure("barrier", f"merged-{name}-barrier-loss", factor=1.0, digits=3),
        Measure("barrier", f"merged-{name}-barrier-error"),
    )


def gap(
    runs: Runs, kind: str, epochs: int, measure: Measure, method: str = FISH
) -> list[float]:
    """Return FedFish − FedAvg of every seed."""
    return measure.gap(runs[kind, epochs, method], runs[kind, epochs, AVG])


def grown(runs: Runs, kind: str, measure: Measure, method: str = FISH) -> list[float]:
    """Return by how much the gap at the most local epochs is above that at one."""
    most, least = (gap(runs, kind, e, measure, method) for e in (HIGH, LOW))
    return paired(most, least)


def scores_table(runs: Runs) -> list[str]:
    """Return every cell's scores."""
    lines = head("", "E", "method", *TITLES)
    for (kind, epochs, method), cell in runs.items():
        spreads = (measure.spread(cell) for measure in MEASURES)
        lines.append(row(kind, str(epochs), method, *spreads))
    return lines


def gaps_table(runs: Runs) -> list[str]:
    """Return differences of methods, and how FedFish's grows from E = 1 to 16."""
    lines = head("", "E", "", *TITLES)
    for kind in KINDS:
        for method in (FISH, MENDED):
            lines += [_gap_row(runs, kind, epochs, method, AVG) for epochs in EPOCHS]
            growth = (m.shown(grown(runs, kind, m, method)) for m in MEASURES)
            title = f"**growth of {method} − {AVG}**"
            lines.append(row(kind, f"{LOW} → {HIGH}", title, *growth))
        lines += [_gap_row(runs, kind, epochs, MENDED, FISH) for epochs in EPOCHS]
        lines += [
            _gap_row(runs, kind, HIGH, method, theirs)
            for theirs in (AVG, FISH)
            for method in ABLATIONS
        ]
    return lines


def _gap_row(runs: Runs, kind: str, epochs: int, ours: str, theirs: str) -> str:
    pair = runs[kind, epochs, ours], runs[kind, epochs, theirs]
    shown = (measure.shown(measure.gap(*pair)) for measure in MEASURES)
    return row(kind, str(epochs), f"{ours} − {theirs}", *shown)


def same_rounds(short: Runs) -> list[str]:
    """Return FedFish − FedAvg where all E have as many rounds."""
    measures = (GLOBAL, HALF, BARRIER)
    lines = head("", "E", "FedAvg, global", *(m.title for m in measures))
    for kind in KINDS:
        for epochs in EPOCHS:
            gaps = (m.shown(gap(short, kind, epochs, m)) for m in measures)
            plain = GLOBAL.spread(short[kind, epochs, AVG])
            lines.append(row(kind, str(epochs), plain, *gaps))
        growth = row(*(m.shown(grown(short, kind, m)) for m in measures))
        lines.append(f"| {kind} | {LOW} → {HIGH} | {growth}")
    return lines


def merged_table(runs: Runs) -> list[str]:
    """Return what averages of the same uploads are worth."""
    lines = head("", "E", "average", "accuracy", "barrier, loss", "barrier, points")
    for kind, epochs in product(KINDS, EPOCHS):
        for name, title in MERGED.items():
            cells = (m.spread(runs[kind, epochs, FISH]) for m in merged(name))
            lines.append(row(kind, str(epochs), title, *cells))
    return lines


def shares_table(runs: Runs) -> list[str]:
    """Return who decides FedFish's average, the paper's and the default's."""
    lines = head("", "E", "method", *(measure.title for measure in SHARES))
    for kind, epochs, method in product(KINDS, EPOCHS, (FISH, MENDED)):
        cell = runs[kind, epochs, method]
        cells = (m.spread(cell) if m.key in cell[0] else "" for m in SHARES)
        lines.append(row(kind, str(epochs), method, *cells))
    return lines


def rates_table(found: Found) -> list[str]:
    """Return what was chosen, and what it had on the validation images."""
    titles = "method", "client", "server", "validation accuracy", "outside"
    lines = head("", "E", *titles)
    for (kind, epochs, method), job in found.best.items():
        client = _starred(job.client_lr, CLIENT_LRS)
        server = _starred(job.server_lr, SERVER_LRS)
        accuracy = f"{100 * found.tried[job]['accuracy']:.1f}"
        further = ", ".join(
            f"{100 * found.tried[j]['accuracy']:.1f} ({j.client_lr}, {j.server_lr})"
            for j in outside(job)
        )
        lines.append(row(kind, str(epochs), method, client, server, accuracy, further))
    return lines


def _starred(rate: float, rates: Sequence[float]) -> str:
    """Return a learning rate, marked where it is at the grid's edge."""
    return f"{rate}*" if rate in (rates[0], rates[-1]) else f"{rate}"


def common_table(runs: Runs) -> list[str]:
    """Return personalised accuracy where no method's learning rate plays a part."""
    lines = head("", "E", "method", "accuracy", "minus FedAvg")
    for (kind, epochs, method), cell in runs.items():
        difference = AT_COMMON.gap(cell, runs[kind, epochs, AVG])
        shown = "" if method == AVG else AT_COMMON.shown(difference)
        lines.append(row(kind, str(epochs), method, AT_COMMON.spread(cell), shown))
    return lines


def plot(runs: Runs, path: Path) -> None:
    """Draw scores against local epochs: means as lines, seeds as points."""
    figure = Figure(figsize=(11, 6.8), dpi=150, layout="constrained")
    for down, kind in enumerate(KINDS):
        for column, (label, measure) in enumerate(SHOWN.items()):
            axes = figure.add_subplot(2, 3, 3 * down + column + 1)
            _lines(axes, runs, kind, measure)
            _markers(axes, runs, kind, measure)
            powers_of_two(axes, EPOCHS)
            dress(axes, "local epochs E" if down == 1 else "", label)
            axes.set_axisbelow(True)
            if column == 1:
                axes.set_title(kind, color=INK)
    legend(figure, loc="outside lower center", ncols=4, frameon=False)
    seeds = len(next(iter(runs.values())))
    title = f"100 clients; {seeds} seeds, their means as lines, {MNIST}"
    save(figure, path, title)


def _lines(axes: Axes, runs: Runs, kind: str, measure: Measure) -> None:
    """Draw FedAvg and FedFish, whose points are a little apart."""
    looks = zip(LINES.items(), DASHES[2::-1], strict=True)
    for index, ((method, color), dash) in enumerate(looks):
        values = [measure.of(runs[kind, epochs, method]) for epochs in EPOCHS]
        means = [fmean(seeds) for seeds in values]
        axes.plot(EPOCHS, means, dash, color=color, lw=1.8, label=method)
        for epochs, seeds in zip(EPOCHS, values, strict=True):
            x = [epochs * 1.06 ** (2 * index - 1)] * len(seeds)
            axes.plot(x, seeds, ".", color=color, ms=6, alpha=0.7)


def _markers(axes: Axes, runs: Runs, kind: str, measure: Measure) -> None:
    """Draw the methods that are run at the most local epochs alone."""
    for index, (method, (marker, color)) in enumerate(MARKERS.items()):
        seeds = measure.of(runs[kind, HIGH, method])
        x = HIGH * 1.22 * 1.14**index
        axes.plot([x] * len(seeds), seeds, ".", color=color, ms=4, alpha=0.6)
        axes.plot(
            [x], [fmean(seeds)], marker, color=color, ms=7, mfc="none", ls="none",
            label=f"{method} (E = {HIGH})",
        )  # fmt: skip
