"""The accuracy after each exchange that follows a merge."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from harness.plots import BEST, LINES, RUNS, dress, save
from matplotlib.figure import Figure

from studies.refinement.runs import FEDAVG, FEDFISHER, STEPS, Scores, titled

LOOKS = {FEDFISHER: (BEST, "o", LINES[0]), FEDAVG: (RUNS[1], "s", LINES[1])}
# The requests after the training, and the model that they lead to.
PLACES = {0: "merge", 2: "head", **{3 + n: f"{n}" for n in STEPS if n}}
COLUMNS = 3


def plot(results: Mapping[str, Sequence[Scores]], path: Path, title: str) -> None:
    """Draw a panel a column: each split's accuracies, and their means as lines."""
    rows = -(-len(results) // COLUMNS)
    figure = Figure(figsize=(10, 0.8 + 2.8 * rows), dpi=150, layout="constrained")
    panels = [*figure.subplots(rows, COLUMNS, squeeze=False).flat]
    ticks = [f"{place}\n{model}" for place, model in PLACES.items()]
    for axes, (column, splits) in zip(panels, results.items(), strict=False):
        for start, (color, marker, line) in LOOKS.items():
            names = [start, *(f"{start}, {titled(steps)}" for steps in STEPS)]
            values = [[split[name]["accuracy"] for split in splits] for name in names]
            means = [mean(own) for own in values]
            axes.plot([*PLACES], means, line, marker=marker, color=color, label=start)
            for place, own in zip(PLACES, values, strict=True):
                dots = [place] * len(own)
                axes.plot(dots, own, ".", color=color, ms=4, alpha=0.5)
        axes.set_title(column, fontsize="medium")
        axes.set_xticks([*PLACES], ticks, fontsize="small")
        dress(axes, "", "test accuracy, %" if axes in panels[::COLUMNS] else "")
    for axes in panels[len(results) :]:
        axes.set_axis_off()
    panels[0].legend(loc="lower right")
    text = "requests after the training, and the model then: the merge (or the mean), "
    figure.supxlabel(text + "the head, so many steps", fontsize="medium")
    save(figure, path, title)
