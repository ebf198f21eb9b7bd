"""Which federations are run, and which learning rates are chosen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from harness.clients import CHOICE
from harness.jobs import Numbers, Run
from harness.size import sized

from studies.fedfish.runs import SHIFT, SKEW, Job
from studies.fedfish.strategies import AVG, BALANCED, FISH, LATE, MENDED, PRODUCT, ROOT

TOTAL = sized(80, 8)  # local epochs of a run, at every E
EPOCHS = sized((1, 4, 16), (1, 4))
LOW, HIGH = min(EPOCHS), max(EPOCHS)
KINDS = (SKEW, SHIFT)
SEEDS = sized((0, 1, 2, 3, 4), (0, 1))
ABLATIONS = (LATE, PRODUCT, BALANCED, ROOT)  # at the most local epochs alone
CLIENT_LRS = sized((0.01, 0.04, 0.16), (0.04,))
SERVER_LRS = sized((0.001, 0.004, 0.016), (0.004,))
STEP = 4  # from one learning rate of the grid to the next
Cell = tuple[str, int, str]
Runs = Mapping[Cell, Sequence[Numbers]]


def cells() -> Iterator[Cell]:
    """Return every kind of heterogeneity, number of local epochs and method."""
    for kind, epochs in product(KINDS, EPOCHS):
        for method in (AVG, FISH, MENDED):
            yield kind, epochs, method
        if epochs == HIGH:
            for method in ABLATIONS:
                yield kind, epochs, method


def grid_of(cell: Cell, rounds: int) -> list[Job]:
    """Return the jobs that choose a cell's learning rates."""
    return [
        Job(*cell, CHOICE, client_lr, server_lr, rounds)
        for client_lr, server_lr in product(CLIENT_LRS, SERVER_LRS)
    ]


def full_grids() -> dict[Cell, list[Job]]:
    """Return every cell's grid, in runs of full length."""
    return {cell: grid_of(cell, TOTAL // cell[1]) for cell in cells()}


def short_grids() -> dict[Cell, list[Job]]:
    """Return the grids of the cells with fewer local epochs, in runs of few rounds."""
    return {
        cell: grid_of(cell, TOTAL // HIGH)
        for cell in cells()
        if cell[1] < HIGH and cell[2] != MENDED
    }


def outside(job: Job) -> list[Job]:
    """Return a job a step outside the grid for each of its rates at an edge."""
    found = []
    for name, rates in (("client_lr", CLIENT_LRS), ("server_lr", SERVER_LRS)):
        rate = getattr(job, name)
        if rate == rates[0]:
            found.append(replace(job, **{name: rate / STEP}))
        if rate == rates[-1]:
            found.append(replace(job, **{name: rate * STEP}))
    return found


def best_of(
    grids: Mapping[Cell, Sequence[Job]], tried: Mapping[Job, Numbers]
) -> dict[Cell, Job]:
    """Return each cell's job with the highest accuracy on validation images."""
    return {
        cell: max(jobs, key=lambda job: tried[job]["accuracy"])
        for cell, jobs in grids.items()
    }


def borrowed(best: Mapping[Cell, Job]) -> dict[Cell, Job]:
    """Return FedAvg at FedFish's learning rates, at the most local epochs."""
    return {
        (kind, HIGH, AVG): replace(best[kind, HIGH, FISH], method=AVG) for kind in KINDS
    }


def finals_of(job: Job) -> list[Job]:
    """Return a chosen job in all seeds."""
    return [replace(job, seed=seed) for seed in SEEDS]


def run_everything(run: Run) -> dict[str, list[Numbers]]:
    """Choose learning rates, look a step outside the grid, make the final runs."""
    full, short = full_grids(), short_grids()
    tried = run(job for grid in (*full.values(), *short.values()) for job in grid)
    chosen = best_of(full, tried)
    tried |= run(job for winner in chosen.values() for job in outside(winner))
    winners = chosen, best_of(short, tried), borrowed(chosen)
    found = run(job for some in winners for w in some.values() for job in finals_of(w))
    return {"choice": list(tried.values()), "runs": list(found.values())}


@dataclass(frozen=True)
class Found:
    """What was found."""

    best: Mapping[Cell, Job]  # has the chosen learning rates
    tried: Mapping[Job, Numbers]  # what they were chosen from, and a step outside
    runs: Runs  # the final ones
    short: Runs  # those with as many rounds at every number of local epochs
    alike: Runs  # FedAvg's at FedFish's learning rates


def found_in(numbers: Mapping[str, Sequence[Numbers]]) -> Found:
    """Return what the numbers of all runs say: `run_everything` the other way."""
    tried, found = (known_in({key: numbers[key]}) for key in ("choice", "runs"))

    def scores(jobs: Mapping[Cell, Job]) -> dict[Cell, list[Numbers]]:
        return {cell: [found[j] for j in finals_of(job)] for cell, job in jobs.items()}

    best = best_of(full_grids(), tried)
    runs = scores(best)
    short = {cell: runs[cell] for cell in runs if cell[1] == HIGH}
    short |= scores(best_of(short_grids(), tried))
    return Found(best, tried, runs, short, scores(borrowed(best)))


def known_in(numbers: Mapping[str, Sequence[Numbers]]) -> dict[Job, Numbers]:
    """Return each job's numbers."""
    return {_job(row): row for rows in numbers.values() for row in rows}


def _job(row: Mapping[str, Any]) -> Job:
    return Job(**{field.name: row[field.name] for field in fields(Job)})
