"""The tables and curves of a part."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.page import blocks
from harness.plots import dress, legend
from harness.stats import spread
from harness.tables import head, row
from matplotlib.figure import Figure

from flwr_fisher.report.style import BEST, RUNS, save
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
        plot(part, methods, folder / f"rounds_{part.name}_{split}.png")


def plot(part: Part, methods: Methods, path: Path) -> None:
    """Draw loss and accuracy by round, and accuracy by gradient evaluations."""
    figure = Figure(figsize=(10.0, 7.2), dpi=150)
    axes = [figure.add_subplot(2, 2, index) for index in (1, 2, 3)]
    styles = _styles(methods)
    for name, found in methods.items():
        color, dashes = styles[name]
        each = METHODS[name].evaluations
        accuracy = _mean_curve([run["accuracy"] for run in found["runs"]], 100)
        loss = _mean_curve([run["loss"] for run in found["runs"]])
        look = {"color": color, "ls": dashes, "lw": 1.5, "label": name}
        axes[0].plot(range(len(loss)), loss, **look)
        axes[1].plot(range(len(accuracy)), accuracy, **look)
        axes[2].plot([each * i for i in range(len(accuracy))], accuracy, **look)
    dress(axes[0], "round", "test loss")
    dress(axes[1], "round", "test accuracy, %")
    dress(axes[2], "gradient evaluations of a client", "test accuracy, %")
    top = max(a for found in methods.values() for a in found["runs"][0]["accuracy"])
    axes[0].set_yscale("log")
    axes[0].set_ylim(top=3)  # a model that knows nothing has 2.3
    axes[1].set_ylim(100 * part.targets[0] - 5, 100 * top + 1)
    axes[2].sharey(axes[1])
    for one, end in zip(axes, (part.rounds,) * 2 + (max(part.budgets),), strict=True):
        one.set_xlim(0, end)
    legend(figure, loc="center", bbox_to_anchor=(0.76, 0.26), ncols=2)
    figure.tight_layout()
    save(figure, path)


def _styles(methods: Methods) -> dict[str, tuple[str, str]]:
    """Return colour and dashes: FAGH's in one colour, the others' taking turns."""
    dashes, colors = ("-", "--", ":"), RUNS[1:]
    styles = {name: (BEST, d) for name, d in zip(OURS, dashes, strict=True)}
    others = [name for name in methods if name not in OURS]
    for index, name in enumerate(others):
        styles[name] = colors[index % len(colors)], dashes[index // len(colors)]
    return styles


def _mean_curve(curves: Sequence[Sequence[float]], factor: float = 1) -> list[float]:
    return [factor * statistics.mean(values) for values in zip(*curves, strict=False)]
