"""What pages quote beside cells and tables of the pages of results."""

from functools import partial

from harness.page import RESULTS, numbers_of
from harness.quotes import QuoteError, Table, first
from harness.tables import head, row
from merges import ALPHAS, PROBLEMS, results_in, splits_of

from studies.rivals.tables import accuracy_of, shown

DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10"}


def one_shot(*names: str) -> list[str]:
    """Return methods' accuracies on both data sets' splits.

    Of the page of rivals, or of what follows a merge.
    """
    found = {data: results_in(numbers_of(f"rivals_{data}"), data) for data in DATA}
    titles = (f"{DATA[data]}: α = {alpha}" for data in found for alpha in ALPHAS)
    lines = head("test accuracy, %", *titles)
    for name in names:
        columns = [
            accuracy_of(found[data][alpha], name.strip("*") if "**" in name else name)
            or refined(data, alpha, name.strip("*"))
            for data in found
            for alpha in ALPHAS
        ]
        if not any(columns):
            raise QuoteError(f"no method {name!r} among the one-shot ones")
        lines.append(row(name, *(shown(own) if own else "–" for own in columns)))
    return lines


def refined(data: str, alpha: float, name: str) -> list[float]:
    """Return the accuracies of a row of the page of what follows a merge."""
    numbers = numbers_of(f"refinement_{data}")
    splits = [split.folder.name for split in splits_of(PROBLEMS[data])[alpha]]
    known = [numbers[split] for split in splits if split in numbers]
    return [scores[name]["accuracy"] for scores in known if name in scores]


def figures(*places: str) -> list[str]:
    """Return rows of the page of the papers' figures, each `Paper, figure`."""
    lines = head("", "claim", "ours", "")
    for place in places:
        paper, _, figure = place.partition(", ")
        cells = first("README", f"{paper} (", partial(Table.row, name=figure))
        _, claim, _, ours, word, *_ = cells
        lines.append(row(place, claim, ours, word))
    return lines


def count() -> list[str]:
    """Return how many of the papers' figures have which word."""
    page = (RESULTS / "README.md").read_text()
    return [line for line in page.splitlines() if line.startswith("Of ")]


KINDS = {"one-shot": one_shot, "figures": figures, "count": count}
