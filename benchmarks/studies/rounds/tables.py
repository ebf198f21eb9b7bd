"""The tables and curves of a part."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from harness.page import blocks
from harness.plots import BEST, CIFAR10, INK, LINES, MNIST, RUNS, dress, save
from harness.stats import spread
from harness.tables import head, row
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.rounds.methods import METHODS, OURS
from studies.rounds.runs import Part

Methods = Mapping[str, Any]
Cost = Callable[[str, Mapping[str, Any], int], float]
# What a method's run has cost up to a round.
COSTS: dict[str, Cost] = {
    "Rounds": lambda name, run, n: n,
    "Uploaded megabytes": lambda name, run, n: run["uploaded-bytes"][n] / 1e6,
    "Gradient evaluations": lambda name, run, n: n * METHODS[name].evaluations,
}

PANELS = (
    ("round", "test loss"),
    ("round", "test accuracy, %"),
    ("gradient evaluations of a client", "test accuracy, %"),
)
OTHERS = (*RUNS[1:], INK)


def section(part: Part, found: Mapping[str, Methods]) -> list[str]:
    """Return a part's tables."""
    shown: list[str | list[str]] = []
    for split, methods in found.items():
        shown += [f"## {part.title}, `{split}`"]
        shown += [f"![curves](rounds_{part.name}_{split}.png)"]
        for title, cost in COSTS.items():
            shown += [f"**{title}** to reach a test accuracy:"]
            shown += [cost_table(part, methods, cost)]
        shown += ["**Test accuracy at equal gradient evaluations**, %:"]
        shown += [accuracy_table(part, methods)]
    return blocks(*shown)


def cost_table(part: Part, methods: Methods, cost: Cost) -> list[str]:
    """Return what it costs to reach each target."""
    lines = head("", *(f"{target:.0%}" for target in part.targets))
    for name, found in methods.items():
        spent = partial(cost, name)
        cells = [reached(found["runs"], target, spent) for target in part.targets]
        lines.append(row(bold(name), *cells))
    return lines


def accuracy_table(part: Part, methods: Methods) -> list[str]:
    """Return accuracies at equal gradient evaluations, and what was chosen."""
    budgets = [str(budget) for budget in part.budgets]
    lines = head("", "a round", *budgets, "chosen", "fallbacks")
    for name, found in methods.items():
        each = METHODS[name].evaluations
        cells = [at_budget(found["runs"], b // each) for b in part.budgets]
        cells.append(", ".join(f"{k} {v:g}" for k, v in found["chosen"].items()))
        fell = max(run["fallbacks"] for run in found["runs"])
        cells.append(str(fell) if name in OURS else "")
        lines.append(row(bold(name), str(each), *cells))
    return lines


def bold(name: str) -> str:
    """Return FAGH's names in bold."""
    return f"**{name}**" if name in OURS else name


def first_round(run: Mapping[str, Any], target: float) -> int | None:
    """Return the first round whose model reaches the target."""
    return next((i for i, a in enumerate(run["accuracy"]) if a >= target), None)


def reached(
    runs: Sequence[Mapping[str, Any]],
    target: float,
    cost: Callable[[Mapping[str, Any], int], float],
) -> str:
    """Return the mean cost over seeds; of those that got there, where not all did."""
    rounds = [(run, first_round(run, target)) for run in runs]
    spent = [cost(run, n) for run, n in rounds if n is not None]
    if not spent:
        return "–"
    some = f" ({len(spent)} of {len(runs)})" if len(spent) < len(runs) else ""
    return f"{statistics.mean(spent):.0f}{some}"


def at_budget(runs: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """Return mean ± standard deviation of the accuracy after so many rounds."""
    if rounds < 1 or any(rounds >= len(run["loss"]) for run in runs):
        return "–"
    return spread([100 * run["accuracy"][rounds] for run in runs])


def plots(part: Part, found: Mapping[str, Methods], folder: Path) -> None:
    """Draw a picture of every split."""
    for split, methods in found.items():
        seeds = len(next(iter(methods.values()))["runs"])
        tested = MNIST if part.dataset == "mnist" else CIFAR10
        title = f"{part.title}, 200 clients, {split}; means of {seeds} seeds, {tested}"
        plot(part, methods, folder / f"rounds_{part.name}_{split}.png", title)


def plot(part: Part, methods: Methods, path: Path, title: str) -> None:
    """Draw loss and accuracy by round, and accuracy by gradient evaluations.

    Methods with several local epochs have a column of their own, beside FAGH's first.
    """
    figure = Figure(figsize=(10.0, 10.0), dpi=150, layout="constrained")
    panels = figure.subplots(3, 2, sharex="row", sharey="row")
    for column, several in zip(panels.T, (False, True), strict=True):
        _draw(column, {n: f for n, f in methods.items() if _belongs(n, several)})
        column[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.02), ncols=3)
    for (first, second), (x, y) in zip(panels, PANELS, strict=True):
        dress(first, x, y)
        dress(second, x, "")
    losses, *accuracies = panels[:, 0]
    losses.set_yscale("log")
    losses.set_ylim(top=3)  # a model that knows nothing has 2.3
    top = max(a for found in methods.values() for a in found["runs"][0]["accuracy"])
    for axes in accuracies:
        axes.set_ylim(100 * part.targets[0] - 5, 100 * top + 1)
    ends = (part.rounds, part.rounds, max(part.budgets))
    for axes, end in zip(panels[:, 0], ends, strict=True):
        axes.set_xlim(0, end)
    save(figure, path, title)


def _belongs(name: str, several: bool) -> bool:
    return name == OURS[0] or (METHODS[name].epochs > 1) == several


def _draw(column: Sequence[Axes], methods: Methods) -> None:
    """Draw the three curves of each method: ours have one colour, and other dashes."""
    dashes, others = (
        iter(LINES),
        zip(OTHERS, cycle((*LINES[1:], LINES[0])), strict=False),
    )
    for name, found in methods.items():
        color, dash = (BEST, next(dashes)) if name in OURS else next(others)
        look = {"color": color, "ls": dash}
        accuracy = _mean_curve([run["accuracy"] for run in found["runs"]], 100)
        loss = _mean_curve([run["loss"] for run in found["runs"]])
        spent = [METHODS[name].evaluations * i for i in range(len(accuracy))]
        column[0].plot(loss, lw=1.5, label=name, **look)
        column[1].plot(accuracy, lw=1.5, **look)
        column[2].plot(spent, accuracy, lw=1.5, **look)


def _mean_curve(curves: Sequence[Sequence[float]], factor: float = 1) -> list[float]:
    return [factor * statistics.mean(values) for values in zip(*curves, strict=False)]
