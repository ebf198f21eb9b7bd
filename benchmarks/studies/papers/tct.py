"""TCT's tables and figures (NeurIPS 2022)."""

from collections.abc import Callable
from statistics import mean
from typing import Any

from studies.papers.found import Found, Reader, listed

Numbers = Callable[[str], Any]
SPLITS = ("c1", "c2", "dirichlet")


def accuracy(numbers: Numbers) -> Found:
    """Table 2."""
    found = numbers("tct")["accuracy"]
    ends = {
        method: [
            100 * mean(run["accuracy"][-1] for run in found[split]["runs"][method])
            for split in SPLITS
        ]
        for method in ("TCT", "FedAvg", "SCAFFOLD")
    }
    others = [max(pair) for pair in zip(ends["FedAvg"], ends["SCAFFOLD"], strict=True)]
    leads = [a - b for a, b in zip(ends["TCT"], others, strict=True)]
    return Found(
        "#C = 1, 2, α = 0.1: " + "; ".join(f"{m} {listed(v)}" for m, v in ends.items()),
        [*(lead > 0 for lead in leads), leads[0] == max(leads)],
        "MNIST, LeNet5, 10 clients of 500 images, 20 + 30 rounds, three seeds.",
        "python benchmarks/tct.py --only accuracy",
        "tct.md",
    )


READERS: dict[str, Reader] = {"Table 2, FMNIST": accuracy}
