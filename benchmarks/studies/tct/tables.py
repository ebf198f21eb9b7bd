"""The tables and the plot of the accuracies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from harness.page import blocks
from harness.plots import (
    BEST,
    INK,
    LINES,
    MNIST,
    QUIET,
    RUNS,
    dress,
    legend,
    panels,
    save,
)
from harness.stats import paired, spread
from harness.tables import head, row
from matplotlib.axes import Axes

from studies.tct.runs import AVG, SCAFFOLD, TCT_
from studies.tct.splits import CLIENTS, EVERY

STAGE_1 = "stage 1"
STAGE2 = (5, 15, 30)  # rounds at which ablations are shown
COLORS = {AVG: RUNS[1], SCAFFOLD: RUNS[2], TCT_: BEST}
Runs = Sequence[Mapping[str, Any]]
Rows = Mapping[str, Mapping[str, Runs]]


def final(runs: Runs) -> list[float]:
    """Return the last accuracies in per cent, one a seed."""
    return [100 * run["accuracy"][-1] for run in runs]


def first_stage(runs: Runs) -> list[dict[str, Any]]:
    """Return TCT's runs cut off after stage 1."""
    return [{**r, "accuracy": r["accuracy"][: r["stage1"] + 1]} for r in runs]


def accuracy_section(found: Mapping[str, Any]) -> list[str]:
    """Return the accuracies, the targets and the choice of learning rates."""
    rows = with_stage_1(found)
    seeds = ", ".join(str(run["seed"]) for run in rows["c1"][TCT_])
    about = f"Test accuracy in per cent, mean ± standard deviation over seeds {seeds}."
    return blocks(
        "## Accuracy",
        "![accuracy by round](tct.png)",
        about,
        accuracy_table(rows),
        "**TCT's lead**, in points of the means, and in how many seeds it leads:",
        targets(rows),
        "**Learning rates**: validation accuracy in per cent, the chosen in bold.",
        rates_table(found),
        "**Uploads** of a client in a round, in kB on the wire:",
        bytes_table(rows),
    )


def with_stage_1(found: Mapping[str, Any]) -> Rows:
    """Return every split's runs by method, and TCT's first stage as one of them."""
    return {
        split: {STAGE_1: first_stage(cell["runs"][TCT_]), **cell["runs"]}
        for split, cell in found.items()
    }


def cifar_section(found: Mapping[str, Any]) -> list[str]:
    """Return the accuracies of a small ResNet on CIFAR-10."""
    rows = with_stage_1(found)
    return blocks(
        "## A small ResNet on CIFAR-10",
        "Test accuracy in per cent, and what learning rates were chosen by.",
        accuracy_table(rows),
        rates_table(found),
    )


def fedprox_section(data: str, found: Mapping[str, Any]) -> list[str]:
    """Return FedProx's accuracies, in the other methods' setting."""
    tried_mus = next(iter(found.values()))["chosen"]["validation"]
    lines = head("", "FedProx", *(f"μ = {mu}" for mu in tried_mus))
    for split, cell in found.items():
        lines.append(
            row(
                EVERY[split].title,
                spread(final(cell["runs"])),
                *tried(cell["chosen"], "mu"),
            )
        )
    return blocks(
        f"## FedProx on {data}",
        "Test accuracy in per cent after all rounds, at FedAvg's rate, and what its μ "
        "was chosen by.",
        lines,
    )


def tried(choice: Mapping[str, Any], what: str) -> list[str]:
    """Return the validation accuracies that a number was chosen by, it in bold."""
    return [
        f"**{100 * a:.1f}**" if float(value) == choice[what] else f"{100 * a:.1f}"
        for value, a in choice["validation"].items()
    ]


def accuracy_table(rows: Rows) -> list[str]:
    """Return the accuracies of all methods and splits."""
    one = next(iter(rows.values()))[TCT_][0]
    both = one["stage1"] + one["stage2"]
    named = {
        STAGE_1: f"FedAvg, {one['stage1']} rounds (stage 1)",
        AVG: f"FedAvg, {both} rounds",
        SCAFFOLD: f"SCAFFOLD, {both} rounds",
        TCT_: f"**TCT**, {one['stage1']} + {one['stage2']} rounds",
    }
    lines = head("", *(EVERY[split].title for split in rows))
    for method, name in named.items():
        lines.append(
            row(name, *(spread(final(cell[method])) for cell in rows.values()))
        )
    return lines


def targets(rows: Rows) -> list[str]:
    """Return whether TCT leads, and by how much."""
    others = (STAGE_1, AVG, SCAFFOLD)
    lines = head("", *others, "")
    for split, cell in rows.items():
        ours, cells = final(cell[TCT_]), []
        leads = {m: mean(ours) - mean(final(cell[m])) for m in others}
        for method, lead in leads.items():
            won = sum(gain > 0 for gain in paired(ours, final(cell[method])))
            cells.append(f"{lead:+.1f} ({won} of {len(ours)})")
        least = min(leads.values())
        enough = split != "c1" or least >= 5 or mean(ours) >= 97
        target = "≥ 5 or to ≥ 97 %" if split == "c1" else "above"
        told = f"{target}: {'met' if least > 0 and enough else '**missed**'}"
        lines.append(row(EVERY[split].title, *cells, told))
    return lines


def rates_table(found: Mapping[str, Any]) -> list[str]:
    """Return the validation accuracies that learning rates were chosen by."""
    first = next(iter(found.values()))
    lines = head("", "", *first["chosen"][AVG]["validation"])
    for split, cell in found.items():
        for method, choice in cell["chosen"].items():
            lines.append(row(EVERY[split].title, method, *tried(choice, "lr")))
    return lines


def bytes_table(rows: Rows) -> list[str]:
    """Return what a client uploads in a round of each kind."""
    run = rows["c1"][TCT_][0]
    sent, n = run["uploaded-bytes"], run["stage1"]
    both = n + run["stage2"]
    rounds = {
        "stage 1": sent[n] / n,
        "the round between": sent[n + 1] - sent[n],
        "stage 2": (sent[-1] - sent[n + 1]) / run["stage2"],
    }
    for method in (AVG, SCAFFOLD):
        rounds[method] = rows["c1"][method][0]["uploaded-bytes"][-1] / both
    shown = (f"{sent / CLIENTS / 1e3:.0f}" for sent in rounds.values())
    return [*head(*rounds), row(*shown)]


def convex_section(found: Mapping[str, Any]) -> list[str]:
    """Return FedAvg's and SCAFFOLD's accuracies with a convex loss."""
    lines = head("", *(EVERY[split].title for split in found))
    for method in (AVG, SCAFFOLD):
        cells = (spread(final(cell["runs"][method])) for cell in found.values())
        lines.append(row(method, *cells))
    return blocks(
        "## With a convex loss",
        "Logistic regression in place of LeNet5, all else alike; test accuracy in per "
        "cent after all rounds, and what its learning rates were chosen by.",
        lines,
        rates_table(found),
    )


def ablations_section(found: Mapping[str, Any]) -> list[str]:
    """Return TCT's ablations as a table."""
    lines = head("", *(f"{rounds} rounds" for rounds in STAGE2))
    for name, runs in found.items():
        lines.append(row(name, *(spread(after(runs, rounds)) for rounds in STAGE2)))
    about = "#C = 1; test accuracy in per cent after so many rounds of stage 2."
    return blocks("## Without this and that", about, lines)


def after(runs: Runs, rounds: int) -> list[float]:
    """Return the accuracies in per cent after so many rounds of stage 2."""
    # One round more, which fixes the features.
    places = (min(run["stage1"] + 1 + rounds, len(run["accuracy"]) - 1) for run in runs)
    pairs = zip(runs, places, strict=True)
    return [100 * run["accuracy"][place] for run, place in pairs]


def plot(found: Mapping[str, Any], folder: Path) -> None:
    """Draw accuracy by round, a panel a split: means, and the seeds' ranges."""
    figure, axes = panels(len(found), height=3.4)
    for one, (split, cell) in zip(axes, found.items(), strict=True):
        first = cell["runs"][TCT_][0]["stage1"]
        _curves(one, cell["runs"], first)
        one.axvline(first + 1, color=QUIET, lw=1, ls="--")
        one.annotate(
            "stage 2", (first + 1, 2), xytext=(4, 0), textcoords="offset points",
            color=INK, fontsize="small",
        )  # fmt: skip
        one.set_title(EVERY[split].title, color=INK, fontsize="medium")
        one.set_ylim(0, 100)
        dress(one, "round", "test accuracy, %")
    legend(figure, loc="center", bbox_to_anchor=(0.75, 0.26))
    seeds = len(next(iter(found.values()))["runs"][TCT_])
    title = f"{CLIENTS} clients; means and ranges of {seeds} seeds, {MNIST}"
    save(figure, folder / "tct.png", title)


def _curves(axes: Axes, runs: Mapping[str, Runs], first: int) -> None:
    """Draw the methods' curves; `first` is the number of rounds of stage 1."""
    for (method, color), line in zip(COLORS.items(), LINES[2::-1], strict=True):
        seeds = [run["accuracy"] for run in runs[method]]
        # TCT is FedAvg before, and has no predictions in the round between.
        ours = [first, *range(first + 2, len(seeds[0]))]
        x = ours if method == TCT_ else range(len(seeds[0]))
        values = [[100 * seed[n] for seed in seeds] for n in x]
        low, high = ([f(each) for each in values] for f in (min, max))
        means = [mean(each) for each in values]
        axes.plot(x, means, line, color=color, lw=2, label=method)
        axes.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
