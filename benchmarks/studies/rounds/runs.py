"""The federations, and the choice of each method's hyperparameters."""

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from harness.clients import CHOICE, Batch, Shuffled, World, grid_of, scores, share_out
from harness.in_memory import folder_in_memory
from harness.jobs import Numbers, Run, run_cells
from harness.page import CACHE
from harness.size import sized
from measures import MeasuredGrid, costs

from flwr_fisher.client import LocalSGD
from flwr_fisher.errors import FlwrFisherError
from flwr_fisher.params import shared_state
from flwr_fisher.wire import arrays_to_tensors
from studies.rounds.methods import METHODS, Options, make_strategy

CLIENTS, BATCH = sized(200, 10), 512


@dataclass(frozen=True)
class Part:
    """A model on its splits, and how much of it is run."""

    name: str
    title: str
    model: str
    splits: tuple[str, ...]
    rounds: int
    seeds: tuple[int, ...]
    targets: tuple[float, ...]
    budgets: tuple[int, ...]
    choosing: int = 30
    configurations: int = 6  # the same number for every method
    without: tuple[str, ...] = ()
    cap: int = 10**9  # images of a client
    dataset: str = "mnist"
    grid: str = "lenet"  # whose configurations are tried

    @property
    def methods(self) -> list[str]:
        """The methods' names."""
        return [name for name in METHODS if name not in self.without]


_OF_NORMS = "FAGH, train mode"  # the same as eval mode without norms and dropout
MLR = Part(
    name="mlr",
    title="Multinomial logistic regression",
    model="logistic",
    splits=("dirichlet-class", "shards"),
    rounds=100,
    seeds=(0, 2, 3),
    targets=(0.80, 0.85, 0.88, 0.90),
    budgets=(50, 100, 200),
    without=(_OF_NORMS,),
    grid="mlr",
)
LENET = Part(
    name="lenet",
    title="LeNet5",
    model="lenet-bias",
    splits=("dirichlet-class",),
    rounds=50,
    seeds=(0, 2),
    targets=(0.70, 0.80, 0.90, 0.95),
    budgets=(25, 50, 100),
    configurations=3,
    without=(_OF_NORMS, "GIANT", "DONE"),
    cap=100,
)
# Of methods that are alike, one, and none that takes a convex loss.
_LIKE_OTHERS = ("FAGH, random", "FAGH, momentum", "FedProx", "FedPM", "GIANT", "DONE")
CIFAR = Part(
    name="cifar10",
    title="LeNet5 on CIFAR-10",
    model="lenet-bias",
    splits=("dirichlet-class",),
    rounds=100,
    seeds=(0, 4),
    targets=(0.20, 0.25, 0.30, 0.35),
    budgets=(50, 100, 200),
    choosing=40,
    configurations=3,
    without=(_OF_NORMS, *_LIKE_OTHERS),
    cap=100,
    dataset="imagefolder:CIFAR10",
    grid="cifar",
)
CNN = Part(
    name="cnn",
    title="CNN with batch norm and dropout",
    model="FAGH's CNN",
    splits=("dirichlet-class",),
    rounds=30,
    seeds=(0, 2),
    targets=(0.60, 0.70, 0.80, 0.90),
    budgets=(25, 50, 75),
    choosing=12,
    configurations=3,
    without=_LIKE_OTHERS,
    cap=30,
    grid="cnn",
)
PARTS = {part.name: part for part in (MLR, LENET, CIFAR, CNN)}
_SHORT = {"rounds": 3, "choosing": 2, "configurations": 1}
PARTS = sized(
    PARTS,
    {n: replace(part, seeds=part.seeds[:2], **_SHORT) for n, part in PARTS.items()},
)


@dataclass(frozen=True)
class Job:
    """One federation."""

    part: str
    split: str
    method: str
    options: Options
    seed: int
    rounds: int

    @property
    def path(self) -> Path:
        """Where its numbers are kept."""
        chosen = "-".join(f"{k}{v:g}" for k, v in self.options)
        method = self.method.replace(", ", "_").replace(" ", "")
        name = f"{self.part}-{self.split}-{method}-{chosen}-s{self.seed}-t{self.rounds}"
        return CACHE / "rounds" / f"{name}.json"

    @property
    def turn(self) -> tuple[int, int, str]:
        """Seed by seed, and the longest first."""
        slow = 1 if self.part == "mlr" else 30
        work = slow * self.rounds * (1 + METHODS[self.method].evaluations)
        return self.seed, -work, str(self.path)


class WholeIfItFits(Shuffled):
    """A client's images: as they are where they fit a batch, else shuffled."""

    def __iter__(self) -> Iterator[Batch]:
        if len(self.y) <= self.size:
            return iter([(self.x, self.y)])
        return super().__iter__()


@lru_cache(maxsize=2)
def world(part: str, split: str, seed: int, data_dir: Path) -> World:
    """Share images out; a client keeps at most as many as the part allows."""
    cap = PARTS[part].cap

    def pick(client: int, count: int) -> list[int]:
        every = list(range(count))
        return every if count <= cap else random.Random(client).sample(every, cap)

    return share_out(
        seed,
        data_dir,
        pick,
        partial(WholeIfItFits, size=BATCH),
        scored_at_once=100,
        dataset=PARTS[part].dataset,
        model=PARTS[part].model,
        partition=split,
        alpha=0.2,
        num_partitions=CLIENTS,
    )


def federate(job: Job, data_dir: Path) -> Numbers:
    """Run a job; return its curves. A run that diverges ends early."""
    with folder_in_memory() as state_dir:  # SCAFFOLD's clients keep theirs in files
        return _federate(job, data_dir, str(state_dir))


def _federate(job: Job, data_dir: Path, state_dir: str) -> Numbers:
    here = world(job.part, job.split, job.seed, data_dir)
    options, method = dict(job.options), METHODS[job.method]
    model = here.make_model()
    arrays = ArrayRecord(shared_state(model))
    lr = float(options.get("client_lr", 0.0))
    train = LocalSGD(epochs=method.epochs, lr=lr, momentum=0.0)
    grid = MeasuredGrid(grid_of(here.clients, model, train, job.seed, state_dir))
    spent = costs(grid, method.evaluations)
    curves: dict[str, list[float]] = {"accuracy": [], "loss": []}

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        found = scores(model, arrays_to_tensors(arrays), here.held)
        found |= spent(server_round, arrays)
        for key, value in found.items():
            curves.setdefault(key, []).append(value)
        return MetricRecord(found)

    before, fallbacks = time.perf_counter(), 0
    strategy = make_strategy(job.method, options, job.seed)
    try:
        result = strategy.start(grid, arrays, job.rounds, evaluate_fn=evaluate_fn)
        last = result.train_metrics_clientapp.get(job.rounds, {})
        fallbacks = last.get("fallbacks", 0)
    except FlwrFisherError as error:
        curves["stopped"] = [len(curves["accuracy"])]
        print(f"{job.path.stem}: {str(error).splitlines()[0]}", flush=True)
    return {**curves, "fallbacks": fallbacks, "seconds": time.perf_counter() - before}


def run_part(part: Part, methods: Sequence[str], run: Run) -> dict[str, Any]:
    """Choose these methods' hyperparameters, and make their final runs."""
    grids = {
        (split, method): [
            Job(part.name, split, method, options, CHOICE, part.choosing)
            for options in METHODS[method].grids[part.grid][: part.configurations]
        ]
        for split in part.splits
        for method in methods
    }
    speeds = {
        cell: [_speed(numbers, part) for numbers in tried]
        for cell, tried in run_cells(grids, run).items()
    }
    best = {
        cell: jobs[speeds[cell].index(max(speeds[cell]))]
        for cell, jobs in grids.items()
    }
    finals = {
        cell: [replace(job, seed=seed, rounds=part.rounds) for seed in part.seeds]
        for cell, job in best.items()
    }
    found: dict[str, Any] = {split: {} for split in part.splits}
    for (split, method), runs in run_cells(finals, run).items():
        cell = split, method
        found[split][method] = {
            "chosen": dict(best[cell].options),
            "validation": max(speeds[cell]),
            "tried": [
                {**dict(job.options), "validation": speed}
                for job, speed in zip(grids[cell], speeds[cell], strict=True)
            ],
            "runs": [_rounded(numbers) for numbers in runs],
        }
    return found


def _speed(run: Numbers, part: Part) -> float:
    """Return the mean accuracy over rounds, where rounds that it lacks are zero."""
    reached = [a for a in run["accuracy"][1:] if math.isfinite(a)]
    return math.fsum(reached) / part.choosing


def _rounded(run: Numbers) -> dict[str, Any]:
    kept = ("seed", "accuracy", "loss", "uploaded-bytes", "fallbacks", "seconds")
    return {
        key: [round(v, 4) for v in run[key]] if isinstance(run[key], list) else run[key]
        for key in kept
    }


def joined(before: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part's numbers with those just found, methods in the table's order."""
    every = {split: before.get(split, {}) | rows for split, rows in found.items()}
    return {
        split: {name: rows[name] for name in METHODS if name in rows}
        for split, rows in every.items()
    }
