"""FAGH's tables and figures (2024)."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from studies.papers.found import Found, Reader
from studies.rounds.runs import PARTS
from studies.rounds.tables import first_round

Numbers = Callable[[str], Any]
OURS = "FAGH, first"
RIVALS = ("FedGA", "SCAFFOLD", "FedExP", "DONE", "GIANT")
NEVER = 10**6


def part(name: str, reading: str) -> Reader:
    """Return the reader of a part of the page: rounds to its targets."""
    targets = PARTS[name].targets

    def read(numbers: Numbers) -> Found | None:
        if name not in numbers("rounds"):
            return None
        checks, shown = [], []
        for split, methods in numbers("rounds")[name].items():
            rivals = [rival for rival in RIVALS if rival in methods]
            rounds = {m: rounds_to(methods[m], targets) for m in (OURS, *rivals)}
            best = min(rivals, key=lambda rival: rounds[rival])
            told = (f"{m} {', '.join(map(_shown, rounds[m]))}" for m in (OURS, best))
            shown.append(f"{split}: {'; '.join(told)}")
            checks += [
                ours < NEVER and all(ours <= rounds[rival][i] for rival in rivals)
                for i, ours in enumerate(rounds[OURS])
            ]
        percents = ", ".join(f"{100 * target:.0f}" for target in targets)
        return Found(
            f"to {percents} %, " + "; ".join(shown),
            checks,
            reading,
            f"python benchmarks/rounds.py --only {name}",
            "rounds.md",
        )

    return read


def _shown(rounds: int) -> str:
    return "–" if rounds == NEVER else str(rounds)


def rounds_to(method: Mapping[str, Any], targets: Sequence[float]) -> list[int]:
    """Return the mean rounds to each target that every seed reaches."""
    found = []
    for target in targets:
        rounds = [first_round(run, target) for run in method["runs"]]
        known = [n for n in rounds if n is not None]
        found.append(round(mean(known)) if len(known) == len(rounds) else NEVER)
    return found


READERS: dict[str, Reader] = {
    "Figures 1 and 4, Table 1": part(
        "cifar10",
        "15 000 images, 200 clients, two seeds; the rivals take five local epochs. By "
        "gradients FAGH is ahead of them at every target; its momentum alone needs "
        "fewer still.",
    ),
    "Figures 2 and 5, Table 2": part(
        "cnn",
        "200 clients of at most 30 images, two seeds. FAGH's gradients are in eval "
        "mode, so that batch norm does nothing for it; the rivals train five local "
        "epochs with batch statistics.",
    ),
    "Figures 3 and 6, Table 3": part(
        "mlr",
        "MNIST. With five local epochs FedGA, SCAFFOLD and FedExP need fewer rounds "
        "here; FAGH is ahead of FedAvg with one local step, and so is its momentum "
        "without any Hessian.",
    ),
}
