"""The federations, and the choice of learning rates."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg, FedProx, Strategy
from harness.clients import CHOICE, Batch, grid_of, scores
from harness.jobs import Numbers, Run, run_cells
from harness.page import CACHE
from harness.repeatable import Repeatable
from harness.size import sized
from measures import MeasuredGrid, costs
from torch import Tensor, nn

from flwr_fisher.client import LocalSGD
from flwr_fisher.errors import RoundError
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import TCT, Regression, Scaffold
from flwr_fisher.tangent import TangentFeatures, TCTModel
from flwr_fisher.wire import arrays_to_tensors
from studies.tct.splits import CIFAR, CONVEX, EVERY, SPLITS, world

FEATURES, STEPS = sized((20_000, 500), (500, 5))
LAST = 5  # rounds whose mean accuracy decides


AVG, SCAFFOLD, TCT_, PROX = "FedAvg", "SCAFFOLD", "TCT", "FedProx"
MUS = sized((0.01, 0.1, 1.0), (0.1,))  # FedProx's
# What stage 2 goes without, as the keywords that say so.
_UNCORRECTED = Regression(control_variates=False)
ABLATIONS: dict[str, dict[str, Any]] = {
    "TCT, features not standardised": {"regression": Regression(standardise=False)},
    "TCT, stage 2 by FedAvg (no control variates)": {"regression": _UNCORRECTED},
    "TCT, stage 2 by FedAvg, 10 steps": {"regression": _UNCORRECTED, "local_steps": 10},
    "TCT, stage 2 by gradient descent (one step a round)": {
        "regression": _UNCORRECTED,
        "local_steps": 1,
    },
}
STAGE1 = {f"TCT, {rounds} rounds of stage 1": rounds for rounds in (0, 5, 10, 40)}


@dataclass(frozen=True)
class Job:
    """One federation."""

    split: str
    method: str
    lr: float
    seed: int
    stage1: int
    stage2: int
    mu: float = 0.0  # FedProx's

    @property
    def path(self) -> Path:
        """Where its numbers are kept."""
        method = "".join(c for c in self.method if c.isalnum())
        method += f"-mu{self.mu:g}" if self.mu else ""
        rounds = f"t{self.stage1}+{self.stage2}"
        name = f"{self.split}-{method}-lr{self.lr:g}-s{self.seed}-{rounds}"
        return CACHE / "tct" / f"{name}.json"

    @property
    def turn(self) -> int:
        """Seed by seed."""
        return self.seed

    @property
    def rounds(self) -> int:
        """How many rounds it has; TCT one more, which fixes its features."""
        return self.stage1 + self.stage2 + self.method.startswith(TCT_)


def make_strategy(job: Job) -> Strategy:
    """Return the method's strategy, with every client in every round."""
    ours: dict[str, Any] = {"fraction_evaluate": 0.0, "seed": job.seed}
    if job.method == SCAFFOLD:
        return Scaffold(**ours)
    if job.method.startswith(TCT_):
        given = {"local_steps": STEPS, **ABLATIONS.get(job.method, {})}
        return TCT(stage1_rounds=job.stage1, num_features=FEATURES, **given, **ours)
    if job.method == PROX:
        own = FedProx(proximal_mu=job.mu, fraction_evaluate=0.0)
        return Repeatable(own, seed=job.seed)
    return Repeatable(FedAvg(fraction_evaluate=0.0), seed=job.seed)


def federate(job: Job, data_dir: Path) -> Numbers:
    """Run a job; return its curves, from before the first round on."""
    here = world(job.split, job.seed, data_dir)
    model, epochs = here.make_model(), EVERY[job.split].epochs
    arrays = ArrayRecord(shared_state(model))
    curves: dict[str, list[float]] = {"accuracy": [], "uploaded-bytes": []}
    second: list[dict[str, Tensor]] = []
    with tempfile.TemporaryDirectory() as state_dir:
        train = LocalSGD(epochs=epochs, lr=job.lr, momentum=0.0, weight_decay=1e-5)
        grid = MeasuredGrid(grid_of(here.clients, model, train, job.seed, state_dir))
        spent = costs(grid, epochs)
        scorer = here.make_model()

        def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            tensors = arrays_to_tensors(arrays)
            told = {**spent(server_round, arrays)}
            curves["uploaded-bytes"].append(float(told["uploaded-bytes"]))
            if "tct/weight" in tensors:  # scored together, with features made once
                second.append(tensors)
                return MetricRecord(told)
            accuracy = scores(scorer, tensors, here.held)["accuracy"]
            curves["accuracy"].append(accuracy)
            return MetricRecord({"accuracy": accuracy, **told})

        began = time.perf_counter()
        stopped = _until_it_diverges(make_strategy(job), grid, arrays, job, evaluate_fn)
    took = time.perf_counter() - began
    if second:
        curves["accuracy"] += second_stage(scorer, second, here.held)
    for curve in curves.values():  # what diverged stays where it was
        curve += curve[-1:] * (job.rounds + 1 - len(curve))
    return {**curves, "stopped": stopped, "seconds": took}


def _until_it_diverges(
    strategy: Strategy,
    grid: MeasuredGrid,
    arrays: ArrayRecord,
    job: Job,
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord],
) -> bool:
    """Run a strategy; return whether it had to stop early."""
    try:
        strategy.start(grid, arrays, job.rounds, evaluate_fn=evaluate_fn)
    except RoundError as error:
        if "NaN or infinity" not in str(error):
            raise
        print(f"{job.path.stem} diverged", flush=True)
        return True
    return False


def second_stage(
    model: nn.Module, rounds: Sequence[Mapping[str, Tensor]], held: Sequence[Batch]
) -> list[float]:
    """Return every round's accuracy, with the features computed once for all."""
    last, shape = rounds[-1], (len(rounds), -1)
    found = TCTModel.from_tensors(model, last)
    features = TangentFeatures(
        found.model, found.num_features, seed=found.seed, head=found.head
    )
    weights = torch.cat([tensors["tct/weight"] for tensors in rounds], dim=1)
    correct, count = torch.zeros(len(rounds)), 0
    for x, y in held:
        scores = (features(x) - found.mean).div_(found.std) @ weights
        correct += (scores.unflatten(1, shape).argmax(2) == y.unsqueeze(1)).sum(0)
        count += len(y)
    return [float(value) for value in correct / count]


@dataclass(frozen=True)
class Extent:
    """How much is run: everything, or enough to see that it works."""

    stage1: int = 20
    stage2: int = 30
    choosing: int = 30
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3)
    repeats: int = 15
    sizes: tuple[tuple[int, int, int], ...] = ((500, 20_000, 3), (2000, 50_000, 1))

    def finals(self, split: str, method: str, lr: float) -> list[Job]:
        """Return a method's final runs, one a seed."""
        return [
            Job(split, method, lr, seed, self.stage1, self.stage2)
            for seed in self.seeds
        ]


SMALL = Extent(2, 2, 2, (0, 1), (0.03,), repeats=2, sizes=((100, 500, 1),))


def shorter(extent: Extent) -> Extent:
    """Return how much is run on CIFAR-10: fewer rounds and rates."""
    fewer = {"stage1": 15, "stage2": 15, "choosing": 10, "rates": (0.03, 0.1)}
    return extent if extent == SMALL else replace(extent, **fewer)


def choose(
    extent: Extent, run: Run, splits: Iterable[str] = SPLITS
) -> dict[str, dict[str, Any]]:
    """Choose FedAvg's and SCAFFOLD's learning rates for every split."""
    splits = list(splits)
    grids = {
        (split, method): [
            Job(split, method, lr, CHOICE, 0, extent.choosing) for lr in extent.rates
        ]
        for split in splits
        for method in (AVG, SCAFFOLD)
    }
    chosen: dict[str, dict[str, Any]] = {split: {} for split in splits}
    for (split, method), tried in run_cells(grids, run).items():
        chosen[split][method] = _best(tried, "lr")
    return chosen


def _best(tried: Iterable[Numbers], what: str) -> dict[str, Any]:
    """Return the value of a setting that validates best, and what each scored."""
    each = {numbers[what]: _validation(numbers) for numbers in tried}
    named = {f"{value:g}": accuracy for value, accuracy in each.items()}
    return {what: max(each, key=lambda value: each[value]), "validation": named}


def _validation(run: Numbers) -> float:
    return 0.0 if run["stopped"] else statistics.mean(run["accuracy"][-LAST:])


def accuracies(extent: Extent, run: Run) -> dict[str, Any]:
    """Choose learning rates, then run every method on every split."""
    return _finals(extent, run, SPLITS, second=True)


def convex(extent: Extent, run: Run) -> dict[str, Any]:
    """Do the same with logistic regression, whose loss is convex; without TCT."""
    return _finals(extent, run, CONVEX, second=False)


def cifar(extent: Extent, run: Run) -> dict[str, Any]:
    """Do it all with a small ResNet on CIFAR-10, in fewer rounds and rates."""
    return _finals(shorter(extent), run, CIFAR, second=True)


def fedprox(
    extent: Extent, run: Run, accuracy: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Run FedProx beside :func:`accuracies`, whose numbers are given if there are."""
    return _fedprox(extent, run, SPLITS, accuracy)


def cifar_fedprox(
    extent: Extent, run: Run, found: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Run FedProx beside :func:`cifar`, whose numbers are given if there are."""
    return _fedprox(shorter(extent), run, CIFAR, found)


def _fedprox(
    extent: Extent, run: Run, splits: Iterable[str], beside: Mapping[str, Any] | None
) -> dict[str, Any]:
    r"""Run FedProx at FedAvg's rates, with a :math:`\mu` chosen for every split."""
    rates = rates_of_fedavg(extent, run, splits, beside)
    tries = {
        split: [Job(split, PROX, lr, CHOICE, 0, extent.choosing, mu) for mu in MUS]
        for split, lr in rates.items()
    }
    found: dict[str, dict[str, Any]] = {}
    finals = {}
    for split, tried in run_cells(tries, run).items():
        best = _best(tried, "mu")
        found[split] = {"chosen": best}
        jobs = extent.finals(split, PROX, rates[split])
        finals[split] = [replace(job, mu=best["mu"]) for job in jobs]
    for split, runs in run_cells(finals, run).items():
        found[split]["runs"] = runs
    return found


def _finals(
    extent: Extent, run: Run, splits: Iterable[str], *, second: bool
) -> dict[str, Any]:
    chosen = choose(extent, run, splits)
    jobs = {}
    for split, methods in chosen.items():
        rates = {method: row["lr"] for method, row in methods.items()}
        if second:
            rates[TCT_] = rates[AVG]
        for method, lr in rates.items():
            jobs[split, method] = extent.finals(split, method, lr)
    found = {split: {"chosen": own, "runs": {}} for split, own in chosen.items()}
    for (split, method), runs in run_cells(jobs, run).items():
        found[split]["runs"][method] = runs
    return found


def rates_of_fedavg(
    extent: Extent, run: Run, splits: Iterable[str], known: Mapping[str, Any] | None
) -> dict[str, float]:
    """Return FedAvg's learning rates; chosen here if no numbers are known."""
    if known:
        return {split: known[split]["chosen"][AVG]["lr"] for split in splits}
    chosen = choose(extent, run, splits)
    return {split: own[AVG]["lr"] for split, own in chosen.items()}


def ablations(
    extent: Extent, run: Run, accuracy: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Run TCT without this and that where clients have one class each.

    `accuracy` are that part's numbers, which have TCT's own runs, if there are any.
    """
    lr = rates_of_fedavg(extent, run, ["c1"], accuracy)["c1"]
    own = {TCT_: accuracy["c1"]["runs"][TCT_]} if accuracy else {}
    names = [*ABLATIONS] if own else [TCT_, *ABLATIONS]
    jobs = {name: extent.finals("c1", name, lr) for name in names}
    for name, rounds in STAGE1.items():
        whole = extent.finals("c1", name, lr)
        jobs[name] = [replace(job, stage1=rounds) for job in whole]
    return own | run_cells(jobs, run)
