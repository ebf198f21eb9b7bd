"""Rounds, bytes and gradients to an accuracy: FAGH beside what it is compared with.

    python benchmarks/rounds.py --data-dir DIR   # DIR/MNIST/raw has the files

`--only cost`, `mlr`, `lenet` or `spectrum` runs a part; the page has all that were ever
run. Finished runs are kept in `benchmarks/cache/rounds`: a programme that was stopped
goes on.

**Setting.** MNIST, 200 clients, 40 % of them a round, batches of at most 512: most
clients' whole data. *MLR* is multinomial logistic regression, 100 rounds, on two
splits: each class shared out by Dirichlet(0.2) over the clients (`dirichlet-class`),
and label shards, two a client (`shards`). *LeNet* is LeNet5 with biases, 50 rounds, on
the Dirichlet split, without GIANT and DONE, which are for convex losses; to save time a
client has at most 100 images of its part. In a seed all methods have the same split,
initial model and cohorts. Clients go without 5000 validation images.

**Hyperparameters** are chosen for each method and split by the mean validation accuracy
over 30 rounds of one seed that is not among the final runs', from six configurations a
method (LeNet: three); no test image is looked at. Then the final runs: seeds 0, 2 and 3
(LeNet: 0 and 2), since the split of seed 1 leaves a client with a single image.

**Costs.** A *gradient evaluation* is one of a client's whole loss, so a local epoch is
one, too; a pass for a gradient and a Hessian-vector product counts as two (see the
client's cost). In a round, with E local epochs, FedAvg, FedProx, SCAFFOLD and FedExP
take E, FedGA 2 + E, FAGH 2, its momentum alone 1, GIANT 21, DONE 19. *Uploads* are all
replies as they are on the wire, of both exchanges where a method has two.

**Reading, logistic regression.** FAGH needs fewer rounds than FedAvg with one local
step, the other method that looks at each example once a round: to 90 %, 27 to 30
against 45 on the Dirichlet split, and with the better probes 21 against 50 on the
shards. But its momentum alone, H = 0, which costs half, is level with it, and but for
the 90 % on the shards (27) nowhere later: what leads over FedAvg is the server's
momentum. The reason is in the last table: nine eigenvalues of the Hessian, as many as
there are classes less one, are large and alike, and a Hessian of rank one takes out
one of them; the others still bound the step. Methods with five local epochs need fewer
rounds to the first targets, and at equal gradient evaluations they are behind. GIANT is
the first at 90 % on the Dirichlet split, with 21 gradient evaluations a round.

**Reading, LeNet.** Methods with local epochs lead, FedExP most of all. FAGH's better
probes and its momentum alone are again close to each other, ahead of one-step FedAvg.
Along its last step the loss is often not convex, so that the momentum probe falls back
in most rounds and ends low. SCAFFOLD fails at 0.05, and did at 0.1, 0.2 and 0.4, which
were tried before the grid below, and at 0.02 in one of two seeds; a loop written apart
from the library diverges in the same round (at 0.05), as the control variate of a
client with few classes grows without bound.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp.strategy import FedAvg, FedProx, Strategy
from jobs import quiet
from jobs import run_all as run_in_order
from matplotlib.figure import Figure
from torch import Tensor
from uploads import CACHE, SHARED

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.client.training import cross_entropy, score
from flwr_fisher.curvature import gradient, gradient_and_hvp, hvp
from flwr_fisher.errors import FlwrFisherError
from flwr_fisher.measures import MeasuredGrid, costs
from flwr_fisher.params import flatten, shared_state, unflatten
from flwr_fisher.report.style import BEST, GRID, RUNS, save
from flwr_fisher.strategies import (
    DONE,
    FAGH,
    GIANT,
    FedExP,
    FedGA,
    Repeatable,
    Scaffold,
)
from flwr_fisher.tasks import Task, load_task
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors

RESULTS, CACHED = Path(__file__).parent / "results", CACHE / "rounds"
CLIENTS, FRACTION, BATCH, HELD = 200, 0.4, 512, 5000
EPOCHS, ITERATIONS = 5, 10
CHOICE = 100  # the seed that hyperparameters are chosen with
DEVICE = torch.device("cpu")
Options = tuple[tuple[str, Any], ...]


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

    @property
    def methods(self) -> list[str]:
        """The methods' names."""
        return [name for name in METHODS if name not in self.without]


MLR = Part(
    name="mlr",
    title="Multinomial logistic regression",
    model="logistic",
    splits=("dirichlet-class", "shards"),
    rounds=100,
    seeds=(0, 2, 3),
    targets=(0.80, 0.85, 0.88, 0.90),
    budgets=(50, 100, 200),
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
    without=("GIANT", "DONE"),
    cap=100,
)
PARTS = {part.name: part for part in (MLR, LENET)}


@dataclass(frozen=True)
class Method:
    """How a method is made of options, what a round costs, and what is tried."""

    epochs: int
    evaluations: int
    grids: Mapping[str, tuple[Options, ...]] = field(hash=False)


def _grid(**values: Sequence[Any]) -> tuple[Options, ...]:
    pairs = [[(key, value) for value in tried] for key, tried in values.items()]
    return tuple(product(*pairs))


RATES = {"mlr": (0.01, 0.02, 0.05, 0.1, 0.2, 0.5), "lenet": (0.05, 0.1, 0.2)}
FEWER = {"mlr": (0.02, 0.05, 0.2), "lenet": (0.1, 0.3)}
# On LeNet one step a round wants a larger rate, and SCAFFOLD diverges with such.
LARGER = RATES | {"lenet": (0.1, 0.2, 0.4)}
SMALLER = RATES | {"lenet": (0.01, 0.02, 0.05)}
# FAGH's are lr / rho, its step against no curvature; rho itself hardly matters.
STEPS = {"mlr": (0.1, 0.2, 0.5), "lenet": (0.2, 0.5)}
RHO = 0.1


def _methods() -> dict[str, Method]:
    def each(**values: Any) -> dict[str, tuple[Options, ...]]:
        return {
            part: _grid(
                **{k: v[part] if isinstance(v, dict) else v for k, v in values.items()}
            )
            for part in RATES
        }

    fagh, e = each(step=STEPS, beta1=(0.5, 0.9)), EPOCHS
    return {
        "FAGH, first": Method(1, 2, fagh),
        "FAGH, random": Method(1, 2, fagh),
        "FAGH, momentum": Method(1, 2, fagh),
        "momentum alone": Method(1, 1, fagh),
        "FedAvg, E = 1": Method(1, 1, each(client_lr=LARGER)),
        f"FedAvg, E = {e}": Method(e, e, each(client_lr=RATES)),
        "FedProx": Method(e, e, each(client_lr=FEWER, mu=(0.01, 0.1))),
        "SCAFFOLD": Method(e, e, each(client_lr=SMALLER)),
        "FedExP": Method(e, e, each(client_lr=FEWER, epsilon=(0.001, 0.1))),
        "FedGA": Method(e, 2 + e, each(client_lr=FEWER, beta=(0.02, 0.2))),
        "GIANT": Method(
            1, 1 + 2 * ITERATIONS, each(lr=(0.003, 0.01, 0.02, 0.03, 0.05, 0.1))
        ),
        "DONE": Method(
            1, 1 + 2 * (ITERATIONS - 1), each(lr=(0.3, 1.0, 3.0), alpha=(0.01, 0.05))
        ),
    }


METHODS = _methods()
OURS = [name for name in METHODS if name.startswith("FAGH")]


def make_strategy(method: str, options: Mapping[str, Any], seed: int) -> Strategy:
    """Return the method's strategy; all sample the same cohorts."""
    sampled = {"fraction_train": FRACTION, "fraction_evaluate": 0.0}
    ours = {**sampled, "seed": seed}
    given = {k: v for k, v in options.items() if k not in ("client_lr", "mu")}
    match method.split(", "):
        case ["FAGH", probe]:
            return _fagh(probe, **given, **ours)
        case ["momentum alone"]:
            return _fagh("none", **given, **ours)
        case ["FedProx"]:
            return Repeatable(FedProx(proximal_mu=options["mu"], **sampled), seed=seed)
        case ["SCAFFOLD"]:
            return Scaffold(**ours)
        case ["FedExP"]:
            return FedExP(average_last_two=True, **given, **ours)
        case ["FedGA"]:
            return FedGA(**given, **ours)
        case ["GIANT"]:
            return GIANT(iterations=ITERATIONS, **given, **ours)
        case ["DONE"]:
            return DONE(iterations=ITERATIONS, **given, **ours)
    return Repeatable(FedAvg(**sampled), seed=seed)


def _fagh(probe: str, step: float, beta1: float, **kwargs: Any) -> FAGH:
    beta2 = 0.0 if probe == "momentum" else 0.99  # FAGH's defaults
    return FAGH(lr=step * RHO, rho=RHO, betas=(beta1, beta2), probe=probe, **kwargs)


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
        return CACHED / f"{name}.json"

    @property
    def work(self) -> float:
        """How long it takes, about: for the order alone."""
        slow = 30 if self.part == "lenet" else 1
        return slow * self.rounds * (1 + METHODS[self.method].evaluations)


class Batches:
    """A client's images in memory; where there are more than fit a batch, shuffled."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.dataset, self.x, self.y = range(len(y)), x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if len(self.y) <= BATCH:
            yield self.x, self.y
            return
        for chosen in torch.randperm(len(self.y)).split(BATCH):
            yield self.x[chosen], self.y[chosen]


@dataclass(frozen=True)
class World:
    """The task, the clients' images, and those that score the server's model."""

    task: Task
    clients: list[Batches]
    held: list[tuple[Tensor, Tensor]]


@lru_cache(maxsize=2)
def world(part: str, split: str, seed: int, data_dir: Path) -> World:
    """Share MNIST out; the choosing seed scores on validation images."""
    task = load_task(
        dataset="mnist",
        data_dir=data_dir,
        model=PARTS[part].model,
        partition=split,
        alpha=0.2,
        num_partitions=CLIENTS,
        seed=seed,
        validation=HELD,
    )
    clients = []
    for client in range(CLIENTS):
        images = task.train_images(client)
        chosen = list(range(len(images)))
        if len(chosen) > PARTS[part].cap:
            chosen = random.Random(client).sample(chosen, PARTS[part].cap)
        clients.append(Batches(*images[chosen]))
    scored = task.validation if seed == CHOICE else task.data.test
    assert scored is not None
    held = [
        scored[list(range(i, min(i + 2500, len(scored))))]
        for i in range(0, len(scored), 2500)
    ]
    return World(task, clients, held)


def federate(job: Job, data_dir: Path) -> dict[str, Any]:
    """Run a job; return its curves. A run that diverges ends early."""
    memory = Path("/dev/shm")  # SCAFFOLD's clients keep their state in files
    where = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=where) as state_dir:
        return _federate(job, data_dir, state_dir)


def _federate(job: Job, data_dir: Path, state_dir: str) -> dict[str, Any]:
    here = world(job.part, job.split, job.seed, data_dir)
    options, method = dict(job.options), METHODS[job.method]
    model = here.task.make_model()
    arrays = ArrayRecord(shared_state(model))
    lr = float(options.get("client_lr", 0.0))
    train = LocalSGD(epochs=method.epochs, lr=lr, momentum=0.0)
    grid = MeasuredGrid(_grid_of(here, model, train, job.seed, state_dir))
    spent = costs(grid, method.evaluations)
    curves: dict[str, list[float]] = {"accuracy": [], "loss": []}

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays_to_tensors(arrays))
        loss, accuracy, _ = score(model, here.held, DEVICE, cross_entropy)
        found = {"accuracy": accuracy, "loss": loss, **spent(server_round, arrays)}
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


def _grid_of(
    here: World, model: torch.nn.Module, train: LocalSGD, seed: int, state_dir: str
) -> LocalGrid:
    def client_fn(context: Context) -> FisherClient:
        return FisherClient(
            model,
            here.clients[int(context.node_config["partition-id"])],
            train_fn=train,
            device=DEVICE,
            state_dir=state_dir,
        )

    return LocalGrid(make_client_app(client_fn), CLIENTS, seed=seed)


Found = Mapping[Job, Mapping[str, Any]]


def run_all(jobs: Sequence[Job], data_dir: Path, workers: int) -> Found:
    """Run jobs in as many processes, seed by seed, the longest first."""
    order = sorted(set(jobs), key=lambda job: (job.seed, -job.work, str(job.path)))
    return run_in_order(order, federate, data_dir, workers)


def run_part(part: Part, data_dir: Path, workers: int) -> dict[str, Any]:
    """Choose every method's hyperparameters, and make its final runs."""
    grids = {
        (split, method): [
            Job(part.name, split, method, options, CHOICE, part.choosing)
            for options in METHODS[method].grids[part.name][: part.configurations]
        ]
        for split in part.splits
        for method in part.methods
    }
    tried = run_all([job for jobs in grids.values() for job in jobs], data_dir, workers)

    def speed(job: Job) -> float:
        reached = [a for a in tried[job]["accuracy"][1:] if math.isfinite(a)]
        return math.fsum(reached) / part.choosing  # rounds that it lacks count as zero

    best = {cell: max(jobs, key=speed) for cell, jobs in grids.items()}
    finals = {
        cell: [replace(job, seed=seed, rounds=part.rounds) for seed in part.seeds]
        for cell, job in best.items()
    }
    found = run_all(
        [job for jobs in finals.values() for job in jobs], data_dir, workers
    )
    return {
        split: {
            method: {
                "chosen": dict(best[split, method].options),
                "validation": speed(best[split, method]),
                "tried": [
                    {**dict(job.options), "validation": speed(job)}
                    for job in grids[split, method]
                ],
                "runs": [_rounded(found[job]) for job in finals[split, method]],
            }
            for method in part.methods
        }
        for split in part.splits
    }


def _rounded(run: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("seed", "accuracy", "loss", "uploaded-bytes", "fallbacks", "seconds")
    return {
        key: [round(v, 4) for v in run[key]] if isinstance(run[key], list) else run[key]
        for key in kept
    }


# The client's cost


def client_cost(data_dir: Path, repeats: int) -> dict[str, Any]:
    """Time a client's gradient, alone and with a probe, in random order."""
    quiet()
    shuffled, found = random.Random(0), {}
    for part in PARTS.values():
        here = world(part.name, "shards", 0, data_dir)
        model, loader = here.task.make_model(), here.clients[0]
        parameters = dict(model.named_parameters())
        probe = {k: torch.randn_like(p) for k, p in parameters.items()}
        todo = {
            "gradient": lambda m=model, b=loader: gradient(m, b),
            "first": lambda m=model, b=loader: gradient_and_hvp(m, b, "first"),
            "random": lambda m=model, b=loader, u=probe: gradient_and_hvp(m, b, u),
        }
        times: dict[str, list[float]] = {name: [] for name in todo}
        for repeat in range(repeats + 5):
            for name in shuffled.sample(list(todo), len(todo)):
                before = time.perf_counter()
                todo[name]()
                if repeat >= 5:  # the first ones warm up
                    times[name].append(time.perf_counter() - before)
        medians = {name: statistics.median(values) for name, values in times.items()}
        found[part.title] = {"images": len(loader.dataset), **medians}
    return found


def cost_section(found: Mapping[str, Any]) -> list[str]:
    """Return the client's cost as a table."""
    lines = ["## The client's cost", ""]
    lines += ["Medians on one thread, in random order; a client's whole data.", ""]
    lines += ["| | images | gradient | and `first` | and `random` or `momentum` |"]
    lines += ["|---|---|---|---|---|"]
    for title, row in found.items():
        cells = [f"{1e3 * row['gradient']:.2f} ms"]
        cells += [f"{row[k] / row['gradient']:.2f} ×" for k in ("first", "random")]
        lines.append(f"| {title} | {row['images']} | {' | '.join(cells)} |")
    return lines


# What limits a Hessian of rank one

ROUNDS_SEEN, EIGENVALUES, PROBED = (0, 5, 10, 30), 12, 8000


def spectra(data_dir: Path) -> dict[str, list[float]]:
    """Return the largest eigenvalues of MLR's Hessian on the way of gradient descent.

    By subspace iteration, on some of all clients' images.
    """
    torch.manual_seed(0)
    here = world("mlr", "dirichlet-class", CHOICE, data_dir)
    x, y = (torch.cat([getattr(c, name) for c in here.clients]) for name in "xy")
    chosen = torch.randperm(len(y))[:PROBED]
    model, loader = here.task.make_model(), [(x[chosen], y[chosen])]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    found = {}
    for server_round in range(max(ROUNDS_SEEN) + 1):
        if server_round in ROUNDS_SEEN:
            found[str(server_round)] = _eigenvalues(model, loader, shapes)
        slope, _ = gradient(model, loader)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * slope[name]
    return found


def _eigenvalues(model: torch.nn.Module, loader: Any, shapes: Any) -> list[float]:
    size = sum(shape.numel() for shape in shapes.values())
    basis = torch.linalg.qr(torch.randn(size, EIGENVALUES)).Q
    for _ in range(15):
        columns = [unflatten(column, shapes) for column in basis.T]
        moved = torch.stack([flatten(hvp(model, loader, c)) for c in columns], dim=1)
        small = basis.T @ moved
        basis = torch.linalg.qr(moved).Q
    values: list[float] = torch.linalg.eigvalsh((small + small.T) / 2).tolist()
    return values[::-1]


def spectrum_section(found: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the eigenvalues as a table."""
    lines = ["## The Hessian of multinomial logistic regression", ""]
    lines += [f"Its {EIGENVALUES} largest eigenvalues, on {PROBED} images of all"]
    lines += ["clients, along gradient descent with the rate 0.1.", ""]
    lines += ["| step | |", "|---|---|"]
    return lines + [
        f"| {step} | {', '.join(f'{v:.1f}' for v in values)} |"
        for step, values in found.items()
    ]


# The tables


def section(part: Part, found: Mapping[str, Any]) -> list[str]:
    """Return a part's tables."""
    lines = []
    for split, methods in found.items():
        lines += [f"## {part.title}, `{split}`", ""]
        lines += [f"![curves](rounds_{part.name}_{split}.png)", ""]
        for title, costs_of in COSTS.items():
            lines += [f"**{title}** to reach a test accuracy:", ""]
            shown = " | ".join(f"{t:.0%}" for t in part.targets)
            lines += [f"| | {shown} |", "|---|" + "---|" * len(part.targets)]
            lines += [
                f"| {bold(name)} | "
                + " | ".join(
                    reached(row["runs"], t, costs_of(name)) for t in part.targets
                )
                + " |"
                for name, row in methods.items()
            ]
            lines.append("")
        lines += ["**Test accuracy at equal gradient evaluations**, %:", ""]
        shown = " | ".join(str(b) for b in part.budgets)
        lines += [f"| | a round | {shown} | chosen | fallbacks |"]
        lines += ["|---|---|" + "---|" * (len(part.budgets) + 2)]
        for name, row in methods.items():
            each = METHODS[name].evaluations
            cells = [at_budget(row["runs"], b // each) for b in part.budgets]
            chosen = ", ".join(f"{k} {v:g}" for k, v in row["chosen"].items())
            fell = max(run["fallbacks"] for run in row["runs"])
            cells += [chosen, str(fell) if name in OURS else ""]
            lines.append(f"| {bold(name)} | {each} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def bold(name: str) -> str:
    """Return FAGH's names in bold."""
    return f"**{name}**" if name in OURS else name


def first_round(run: Mapping[str, Any], target: float) -> int | None:
    """Return the first round whose model reaches the target."""
    return next((i for i, a in enumerate(run["accuracy"]) if a >= target), None)


COSTS = {
    "Rounds": lambda name: lambda run, n: n,
    "Uploaded megabytes": lambda name: lambda run, n: run["uploaded-bytes"][n] / 1e6,
    "Gradient evaluations": lambda name: lambda run, n: n * METHODS[name].evaluations,
}


def reached(runs: Sequence[Mapping[str, Any]], target: float, cost: Any) -> str:
    """Return the mean cost over seeds; of those that got there, where not all did."""
    rounds = [(run, first_round(run, target)) for run in runs]
    spent = [cost(run, n) for run, n in rounds if n is not None]
    if not spent:
        return "–"
    some = f" ({len(spent)} of {len(runs)})" if len(spent) < len(runs) else ""
    return f"{statistics.mean(spent):.0f}{some}"


def at_budget(runs: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """Return mean ± standard deviation of the accuracy after so many rounds."""
    values = [
        100 * run["accuracy"][rounds] for run in runs if rounds < len(run["loss"])
    ]
    if rounds < 1 or len(values) < len(runs):
        return "–"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def plot(part: Part, methods: Mapping[str, Any], path: Path) -> None:
    """Draw loss and accuracy by round, and accuracy by gradient evaluations."""
    figure = Figure(figsize=(10.0, 7.2), dpi=150)
    axes = [figure.add_subplot(2, 2, index) for index in (1, 2, 3)]
    others = [name for name in methods if name not in OURS]
    styles = {name: (BEST, d) for name, d in zip(OURS, ("-", "--", ":"), strict=True)}
    for index, name in enumerate(others):
        colors = RUNS[1:]
        styles[name] = colors[index % len(colors)], ("-", "--")[index // len(colors)]
    for name, row in methods.items():
        color, dashes = styles[name]
        each = METHODS[name].evaluations
        accuracy = _mean_curve([run["accuracy"] for run in row["runs"]], 100)
        loss = _mean_curve([run["loss"] for run in row["runs"]])
        look = {"color": color, "ls": dashes, "lw": 1.5, "label": name}
        axes[0].plot(range(len(loss)), loss, **look)
        axes[1].plot(range(len(accuracy)), accuracy, **look)
        axes[2].plot([each * i for i in range(len(accuracy))], accuracy, **look)
    top = max(a for row in methods.values() for a in row["runs"][0]["accuracy"])
    for one, label in zip(axes, ("test loss", *["test accuracy, %"] * 2), strict=True):
        one.set_xlabel("round")
        one.set_ylabel(label)
        one.grid(axis="y", color=GRID)
        one.spines[["top", "right"]].set_visible(False)
    axes[0].set_yscale("log")
    axes[0].set_ylim(top=3)  # a model that knows nothing has 2.3
    axes[1].set_ylim(100 * part.targets[0] - 5, 100 * top + 1)
    axes[2].sharey(axes[1])
    axes[2].set_xlabel("gradient evaluations of a client")
    for one, end in zip(axes, (part.rounds,) * 2 + (max(part.budgets),), strict=True):
        one.set_xlim(0, end)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="center", bbox_to_anchor=(0.76, 0.26), ncols=2)
    figure.tight_layout()
    save(figure, path)


def _mean_curve(curves: Sequence[Sequence[float]], factor: float = 1) -> list[float]:
    return [factor * statistics.mean(values) for values in zip(*curves, strict=False)]


def main() -> None:
    """Run what is asked for, and write the page of all that was ever run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=SHARED)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=("cost", "spectrum", *PARTS))
    parser.add_argument(
        "--smoke", action="store_true", help="a few rounds, to the cache"
    )
    options = parser.parse_args()
    data_dir, workers = options.data_dir.resolve(), options.workers
    if not (data_dir / "MNIST").exists():
        raise SystemExit(f"MNIST is not in {data_dir}: name its folder by --data-dir")
    results = CACHED / "smoke" if options.smoke else RESULTS
    results.mkdir(parents=True, exist_ok=True)
    numbers_at = results / "rounds.json"
    numbers = json.loads(numbers_at.read_text()) if numbers_at.exists() else {}
    for name in (options.only,) if options.only else ("cost", *PARTS, "spectrum"):
        if name == "cost":
            numbers[name] = client_cost(data_dir, 20 if options.smoke else 200)
        elif name == "spectrum":
            numbers[name] = spectra(data_dir)
        else:
            part = PARTS[name]
            if options.smoke:
                tiny = {"rounds": 3, "choosing": 2, "configurations": 1}
                part = replace(part, seeds=part.seeds[:2], budgets=(2, 6), **tiny)
            numbers[name] = run_part(part, data_dir, workers)
        numbers_at.write_text(json.dumps(numbers) + "\n")
    lines = ["# Rounds to an accuracy", "", *(__doc__ or "").split("\n")[2:]]
    if "cost" in numbers:
        lines += [*cost_section(numbers["cost"]), ""]
    for part in (part for part in PARTS.values() if part.name in numbers):
        lines += section(part, numbers[part.name])
    if "spectrum" in numbers:
        lines += spectrum_section(numbers["spectrum"])
    for part in (part for part in PARTS.values() if part.name in numbers):
        for split, methods in numbers[part.name].items():
            plot(part, methods, results / f"rounds_{part.name}_{split}.png")
    (results / "rounds.md").write_text("\n".join(lines).rstrip() + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
