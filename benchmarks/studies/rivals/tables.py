"""The tables and the plot of `merges.py`."""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from statistics import mean

from harness.page import RESULTS
from harness.plots import bars, save
from harness.stats import paired, spread, with_error
from harness.tables import head, row

from studies.rivals.exchanges import AFL, CGS, FENS, LDA, PLUS, ROUNDS
from studies.rivals.methods import ITERATIONS, MATCHED, OURS, SUMS
from studies.rivals.split import Found

MODELS, FACTORS, DIAGONAL = "models", "models, K-FAC", "models, diagonal"
DATA = ", 500 examples"
THREE = "models and K-FACs from three starts" + DATA
CALLED = "models that can be called, an image's shape"
HEAD = "the classes' counts, moments of features; no training"
# What each is given, and the numbers that a client uploads, in those of the model.
GIVEN = {
    "FedAvg": (MODELS, ""),
    "OTFusion": (MODELS, ""),
    "Git Re-Basin, then FedAvg": (MODELS, ""),
    "PFNM, FedMA's for convolutions *": (MODELS + DATA, ""),
    "FisherMerge": (DIAGONAL, "D"),
    "RegMean *": ("models, input factors" + DATA, "A"),
    PLUS: ("models, input factors, an exchange for each layer" + DATA, "A"),
    "FedLPA, as released *": ("models, empirical K-FAC" + DATA, "AG"),
    "FedLPA, with FedFisher's factors *": (FACTORS + DATA, "AG"),
    "MaTS *": ("models, empirical K-FAC, their start" + DATA, "AG"),
    "FedBEns, the best model *": (THREE, "DDAGAGAG"),
    "FedBEns, a vote of three models *": (THREE, "DDAGAGAG"),
    "FedFisher diagonal *": (DIAGONAL + DATA, "D"),
    "FedFisher K-FAC, paper's Adam *": (FACTORS + DATA, "AG"),
    OURS: (FACTORS, "AG"),
    MATCHED: (FACTORS, "AG"),
    SUMS: (f"sums over clients, in {2 + ITERATIONS} exchanges", "S"),
    "DENSE *": (CALLED + DATA, ""),
    "Co-Boosting *": (CALLED + DATA, ""),
    AFL: (HEAD, "H"),
    CGS: (HEAD, "H"),
    LDA: (HEAD, "H"),
    "best single client (chosen on the test set)": (MODELS, ""),
    "ensemble of clients (not one model)": (MODELS, ""),
    FENS: (f"models, which all clients get, and {ROUNDS} rounds of small ones", "R"),
}
NONE = "–"  # where a method was not run

Results = Mapping[float, Sequence[Found]]  # each α's splits


def accuracy_of(splits: Sequence[Found], name: str) -> list[float]:
    """Return a method's accuracies, one a split that it was run on."""
    return [split[name]["accuracy"] for split in splits if name in split]


def table(results: Results) -> list[str]:
    """Return the table's lines: means and standard deviations over seeds."""
    every = list(chain.from_iterable(results.values()))
    sizes = dict(ChainMap(*(split["sizes"] for split in every))) | {"D": 1.0}
    sizes["S"] = 1 + sizes["A"] + sizes["G"] + ITERATIONS
    columns = [f"α = {alpha}" for alpha in results]
    lines = head(
        "test accuracy, %", *columns, "default minus it", "given", "numbers", "passes"
    )
    for name in methods_of(results, any):
        what, sent = GIVEN[name]
        own = [split for split in every if name in split]
        gain = paired(accuracy_of(own, OURS), accuracy_of(own, name))
        part = f" ({len(own)} of {len(every)} splits)"
        fewer = part if len(own) < len(every) else ""
        lines.append(
            row(
                (f"**{name}**" if name == OURS else name) + fewer,
                *(shown(accuracy_of(splits, name)) for splits in results.values()),
                "" if name == OURS else gained(gain),
                what,
                f"{1 + sum(sizes[each] for each in sent):.1f}",
                f"{mean(split[name]['passes'] for split in own):.0f}",
            )
        )
    return lines


def shown(accuracies: Sequence[float]) -> str:
    """Return mean and standard deviation, or a single number as it is."""
    if not accuracies:
        return NONE
    return spread(accuracies) if len(accuracies) > 1 else f"{accuracies[0]:.1f}"


def gained(differences: Sequence[float]) -> str:
    """Return mean and standard error, or a single difference as it is."""
    if len(differences) == 1:
        return f"{differences[0]:+.2f}"
    return with_error(differences, 2)


def methods_of(
    results: Results, needed: Callable[[Iterable[object]], bool] = all
) -> list[str]:
    """Return the methods that were run for every α, or by `any` for one of them."""
    return [n for n in GIVEN if needed(accuracy_of(s, n) for s in results.values())]


def missing(results: Results) -> list[str]:
    """Return the methods that some split lacks, each with how many have it."""
    every = list(chain.from_iterable(results.values()))
    counts = {name: sum(name in split for split in every) for name in GIVEN}
    return [
        f"{name.removesuffix(' *')} ({count} of {len(every)} splits)"
        for name, count in counts.items()
        if count < len(every)
    ]


def plot(results: Results, stem: str, title: str) -> None:
    """Draw each split as a point, and the mean over splits as a bar."""
    columns = {
        f"α = {alpha}": {n: accuracy_of(splits, n) for n in methods_of(results)}
        for alpha, splits in results.items()
    }
    save(bars(columns, [OURS]), RESULTS / f"{stem}.png", title)


def ahead(results: Results) -> str:
    """Return who is ahead of the default on a mean, and who sees what it does not."""
    every = list(chain.from_iterable(results.values()))
    found = []
    for name in methods_of(results, any):
        leads = []
        for alpha, splits in results.items():
            own = [split for split in splits if name in split]
            gains = paired(accuracy_of(own, name), accuracy_of(own, OURS))
            if gains and mean(gains) >= 0.05:  # which a figure shows
                leads.append(f"{mean(gains):.1f} at α = {alpha}")
        if leads:
            found.append(f"{name} ({', '.join(leads)})")
    if not found:
        return f"Over {len(every)} splits, no method is ahead of the default on a mean."
    return f"Ahead of the default on a mean, in points: {'; '.join(found)}."


def constants_table(splits: Sequence[Found]) -> list[str]:
    """Return what other constants do on the server's examples, of all splits."""
    lines = head("accuracy on the 500 examples, %", "mean", "minus the default ± s.e.")
    ours = [split["default"]["held"] for split in splits]
    for name in splits[0]:
        held = [split[name]["held"] for split in splits]
        gain = "" if name == "default" else with_error(paired(held, ours), 2)
        lines.append(row(name, f"{mean(held):.1f}", gain))
    return lines
