"""FAGH's tables and figures (2024)."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import mean
from typing import Any

from studies.papers.found import Found, Reader
from studies.rounds.methods import METHODS
from studies.rounds.runs import PARTS
from studies.rounds.tables import first_round

Numbers = Callable[[str], Any]
RIVALS = ("FedGA", "SCAFFOLD", "FedExP", "DONE", "GIANT")
NEVER = inf


def part(name: str, reading: str, ours: str = "FAGH, first") -> Reader:
    """Return the reader of a part of the page: rounds and gradients to its targets."""
    targets = PARTS[name].targets

    def read(numbers: Numbers) -> Found | None:
        if name not in numbers("rounds"):
            return None
        checks, shown = [], []
        for split, methods in numbers("rounds")[name].items():
            rivals = [rival for rival in RIVALS if rival in methods]
            rounds = {m: rounds_to(methods[m], targets) for m in (ours, *rivals)}
            work = {
                m: [n * METHODS[m].evaluations for n in found]
                for m, found in rounds.items()
            }
            for what, found in (("rounds", rounds), ("gradients", work)):
                best = min(rivals, key=lambda rival: found[rival])
                told = (f"{m} {', '.join(map(_shown, found[m]))}" for m in (ours, best))
                shown.append(f"{split}, {what}: {'; '.join(told)}")
                checks += [
                    own < NEVER and all(own <= found[rival][i] for rival in rivals)
                    for i, own in enumerate(found[ours])
                ]
        percents = ", ".join(f"{100 * target:.0f}" for target in targets)
        return Found(
            f"to {percents} %, " + "; ".join(shown),
            checks,
            f"{reading} Time is counted in gradients of a client's whole loss.",
            f"python benchmarks/rounds.py --only {name}",
            "rounds.md",
        )

    return read


def _shown(count: float) -> str:
    return "–" if count == NEVER else f"{count:.0f}"


def rounds_to(method: Mapping[str, Any], targets: Sequence[float]) -> list[float]:
    """Return the mean rounds to each target that every seed reaches."""
    found = []
    for target in targets:
        rounds = [first_round(run, target) for run in method["runs"]]
        known = [n for n in rounds if n is not None]
        found.append(mean(known) if len(known) == len(rounds) else NEVER)
    return found


READERS: dict[str, Reader] = {
    "Figures 1 and 4, Table 1": part(
        "cifar10",
        "15 000 images, 200 clients, two seeds; the rivals take five local epochs. "
        "FAGH's momentum alone needs fewer gradients still.",
    ),
    "Figures 2 and 5, Table 2": part(
        "cnn",
        "200 clients of at most 30 images, two seeds; the rivals train five local "
        "epochs.",
        ours="FAGH, train mode",
    ),
    "Figures 3 and 6, Table 3": part(
        "mlr",
        "MNIST, three seeds. With five local epochs FedGA, SCAFFOLD and FedExP need "
        "fewer rounds to the first targets; FAGH is ahead of FedAvg with one local "
        "step, and so is its momentum without any Hessian.",
    ),
}
