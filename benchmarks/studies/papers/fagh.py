"""FAGH's tables and figures (2024)."""

from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from studies.papers.found import Found, Reader
from studies.rounds.tables import first_round

Numbers = Callable[[str], Any]
TARGETS = (0.8, 0.85, 0.88, 0.9)
OURS = "FAGH, first"
RIVALS = ("FedGA", "SCAFFOLD", "FedExP", "DONE", "GIANT")
NEVER = 10**6


def logistic_regression(numbers: Numbers) -> Found:
    """Figures 3 and 6, table 3: rounds."""
    checks, shown = [], []
    for split, methods in numbers("rounds")["mlr"].items():
        rounds = {name: rounds_to(methods[name]) for name in (OURS, *RIVALS)}
        own = ["–" if r == NEVER else str(r) for r in rounds[OURS]]
        best = min(RIVALS, key=lambda name: rounds[name])
        theirs = ["–" if r == NEVER else str(r) for r in rounds[best]]
        shown.append(f"{split}: FAGH {', '.join(own)}; {best} {', '.join(theirs)}")
        checks += [
            all(ours <= rounds[name][i] for name in RIVALS)
            for i, ours in enumerate(rounds[OURS])
        ]
    return Found(
        "to 80, 85, 88, 90 %, " + "; ".join(shown),
        checks,
        "MNIST. With five local epochs FedGA, SCAFFOLD and FedExP need fewer rounds "
        "here; FAGH is ahead of FedAvg with one local step, and so is its momentum "
        "without any Hessian.",
        "python benchmarks/rounds.py --only mlr",
        "rounds.md",
    )


def rounds_to(method: Mapping[str, Any]) -> list[int]:
    """Return the mean rounds to each target that every seed reaches."""
    found = []
    for target in TARGETS:
        rounds = [first_round(run, target) for run in method["runs"]]
        known = [n for n in rounds if n is not None]
        found.append(round(mean(known)) if len(known) == len(rounds) else NEVER)
    return found


READERS: dict[str, Reader] = {"Figures 3 and 6, Table 3": logistic_regression}
