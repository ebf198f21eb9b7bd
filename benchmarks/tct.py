"""TCT's second stage: what it costs, and the accuracy it ends with.

    python benchmarks/tct.py --data-dir DIR   # DIR/MNIST/raw has the files

`--only features`, `closed-form`, `accuracy` or `ablations` runs a part; the page has
all that were ever run. Finished runs are kept in `benchmarks/cache/tct`: a programme
that was stopped goes on. All on one thread.

**Setting of the accuracies.** MNIST, 10 clients of at most 500 training images, each
in every round, the full test set. Three splits: one class a client (#C = 1), two
(#C = 2), and each class shared out by Dirichlet(0.1). *LeNet5 with biases*, 5 local
epochs, batch 64, plain SGD, weight decay 1e-5. **TCT**: 20 rounds of FedAvg, one round
that fixes the features, 30 rounds of stage 2 with 20 000 features and 500 local steps,
all else at its defaults. **FedAvg** and **SCAFFOLD** have 50 rounds. *Stage 1* is
TCT's own model after 20 rounds. In a seed, all have the same split and initial model,
and TCT's first 20 rounds are FedAvg's.

**Learning rates** of FedAvg, thereby of stage 1, and of SCAFFOLD are chosen for each
split from 0.003, 0.01, 0.03, 0.1 and 0.3 by the mean validation accuracy of the last
five of 30 rounds, in a seed that is not among the final runs'; a run that diverges
counts as 0. The 5000 validation images are no client's, and no test image is looked at.
Nothing of TCT's stage 2 is chosen.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp.strategy import FedAvg, Strategy
from jobs import run_all as run_in_order
from torch import Tensor, nn
from uploads import CACHE, SHARED

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.client.training import cross_entropy, score
from flwr_fisher.curvature import TangentFeatures, TCTModel
from flwr_fisher.errors import RoundError
from flwr_fisher.measures import MeasuredGrid, costs
from flwr_fisher.merge import gram_spectrum, tct_steps, tct_update
from flwr_fisher.params import shared_state
from flwr_fisher.report.style import BEST, GRID, INK, QUIET, RUNS, panels, save
from flwr_fisher.strategies import Repeatable, Scaffold
from flwr_fisher.tasks import Task, load_task, make_model
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors

RESULTS, CACHED = Path(__file__).parent / "results", CACHE / "tct"
CLIENTS, EXAMPLES, BATCH, HELD, EPOCHS = 10, 500, 64, 5000, 5
STAGE1, STAGE2, FEATURES, STEPS = 20, 30, 20_000, 500
SEEDS = (0, 1, 2)
CHOICE = 100  # the seed that learning rates are chosen with
LAST = 5  # rounds whose mean accuracy decides
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Split:
    """How the images are shared out."""

    name: str
    title: str
    partition: str
    classes: int = 2


SPLITS = {
    split.name: split
    for split in (
        Split("c1", "#C = 1", "classes-per-client", 1),
        Split("c2", "#C = 2", "classes-per-client", 2),
        Split("dirichlet", "Dirichlet(0.1)", "dirichlet-class"),
    )
}
AVG, SCAFFOLD, TCT_ = "FedAvg", "SCAFFOLD", "TCT"
STAGE_1 = "stage 1"
# What stage 2 goes without, as the keywords that say so.
ABLATIONS: dict[str, dict[str, Any]] = {
    "TCT, features not standardised": {"standardise": False},
    "TCT, stage 2 by FedAvg (no control variates)": {"control_variates": False},
    "TCT, stage 2 by gradient descent (one step a round)": {
        "control_variates": False,
        "local_steps": 1,
    },
}


@dataclass(frozen=True)
class Job:
    """One federation."""

    split: str
    method: str
    lr: float
    seed: int
    stage1: int = STAGE1
    stage2: int = STAGE2

    @property
    def path(self) -> Path:
        """Where its numbers are kept."""
        method = "".join(c for c in self.method if c.isalnum())
        rounds = f"t{self.stage1}+{self.stage2}"
        return (
            CACHED / f"{self.split}-{method}-lr{self.lr:g}-s{self.seed}-{rounds}.json"
        )

    @property
    def rounds(self) -> int:
        """How many rounds it has; TCT one more, which fixes its features."""
        return self.stage1 + self.stage2 + self.method.startswith(TCT_)


class Batches:
    """A client's images in memory, shuffled."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.dataset, self.x, self.y = range(len(y)), x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.y)).split(BATCH):
            yield self.x[chosen], self.y[chosen]


@dataclass(frozen=True)
class World:
    """The task, the clients' images, and those that score the server's model."""

    task: Task
    clients: list[Batches]
    held: list[tuple[Tensor, Tensor]]


@lru_cache(maxsize=2)
def world(split: str, seed: int, data_dir: Path) -> World:
    """Share MNIST out; the choosing seed scores on validation images."""
    task = load_task(
        dataset="mnist",
        data_dir=data_dir,
        model="lenet-bias",
        partition=SPLITS[split].partition,
        classes_per_client=SPLITS[split].classes,
        alpha=0.1,
        num_partitions=CLIENTS,
        seed=seed,
        validation=HELD,
    )
    clients, order = [], torch.Generator().manual_seed(seed)
    for client in range(CLIENTS):
        images = task.train_images(client)
        some = torch.randperm(len(images), generator=order)[:EXAMPLES]
        clients.append(Batches(*images[some.sort().values.tolist()]))
    scored = task.validation if seed == CHOICE else task.data.test
    assert scored is not None
    held = [
        scored[list(range(i, min(i + EXAMPLES, len(scored))))]
        for i in range(0, len(scored), EXAMPLES)
    ]
    return World(task, clients, held)


def make_strategy(job: Job) -> Strategy:
    """Return the method's strategy, with every client in every round."""
    ours: dict[str, Any] = {"fraction_evaluate": 0.0, "seed": job.seed}
    if job.method == SCAFFOLD:
        return Scaffold(**ours)
    if job.method.startswith(TCT_):
        from flwr_fisher.strategies import TCT

        given = {"local_steps": STEPS, **ABLATIONS.get(job.method, {})}
        return TCT(stage1_rounds=job.stage1, num_features=FEATURES, **given, **ours)
    return Repeatable(FedAvg(fraction_evaluate=0.0), seed=job.seed)


def federate(job: Job, data_dir: Path) -> dict[str, Any]:
    """Run a job; return its curves, from before the first round on."""
    here = world(job.split, job.seed, data_dir)
    model = here.task.make_model()
    arrays = ArrayRecord(shared_state(model))
    curves: dict[str, list[float]] = {"accuracy": [], "uploaded-bytes": []}
    second: list[dict[str, Tensor]] = []
    with tempfile.TemporaryDirectory() as state_dir:
        grid = MeasuredGrid(_grid_of(here, model, job, state_dir))
        spent, scorer = costs(grid, EPOCHS), here.task.make_model()

        def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            tensors = arrays_to_tensors(arrays)
            told = {**spent(server_round, arrays)}
            curves["uploaded-bytes"].append(float(told["uploaded-bytes"]))
            if "tct/weight" in tensors:  # scored together, with features made once
                second.append(tensors)
                return MetricRecord(told)
            scorer.load_state_dict(tensors)
            _, accuracy, _ = score(scorer, here.held, DEVICE, cross_entropy)
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
    model: nn.Module,
    rounds: Sequence[Mapping[str, Tensor]],
    held: Sequence[tuple[Tensor, Tensor]],
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


def _grid_of(here: World, model: nn.Module, job: Job, state_dir: str) -> LocalGrid:
    train = LocalSGD(epochs=EPOCHS, lr=job.lr, momentum=0.0, weight_decay=1e-5)

    def client_fn(context: Context) -> FisherClient:
        return FisherClient(
            model,
            here.clients[int(context.node_config["partition-id"])],
            train_fn=train,
            device=DEVICE,
            state_dir=state_dir,
        )

    return LocalGrid(make_client_app(client_fn), CLIENTS, seed=job.seed)


Found = dict[Job, dict[str, Any]]


def run_all(jobs: Sequence[Job], data_dir: Path, workers: int) -> Found:
    """Run jobs in as many processes, seed by seed."""
    order = sorted(dict.fromkeys(jobs), key=lambda job: job.seed)
    return run_in_order(order, federate, data_dir, workers)


@dataclass(frozen=True)
class Extent:
    """How much is run: everything, or enough to see that it works."""

    stage1: int = STAGE1
    stage2: int = STAGE2
    choosing: int = 30
    seeds: tuple[int, ...] = SEEDS
    rates: tuple[float, ...] = RATES
    repeats: int = 15
    sizes: tuple[tuple[int, int, int], ...] = ((500, 20_000, 3), (2000, 50_000, 1))

    def job(self, split: str, method: str, lr: float, seed: int) -> Job:
        """Return a federation of this extent."""
        return Job(split, method, lr, seed, self.stage1, self.stage2)


SMOKE = Extent(2, 2, 2, (0, 1), (0.03,), repeats=2, sizes=((100, 2000, 1),))


def choose(extent: Extent, data_dir: Path, workers: int) -> dict[str, dict[str, Any]]:
    """Choose FedAvg's and SCAFFOLD's learning rates for every split."""
    cells = [(split, method) for split in SPLITS for method in (AVG, SCAFFOLD)]
    grids = {
        (split, method): [
            Job(split, method, lr, CHOICE, 0, extent.choosing) for lr in extent.rates
        ]
        for split, method in cells
    }
    tried = run_all([job for jobs in grids.values() for job in jobs], data_dir, workers)

    def validation(job: Job) -> float:
        if tried[job]["stopped"]:
            return 0.0
        return statistics.mean(tried[job]["accuracy"][-LAST:])

    chosen: dict[str, dict[str, Any]] = {split: {} for split in SPLITS}
    for (split, method), jobs in grids.items():
        best = max(jobs, key=validation)
        each = {f"{job.lr:g}": validation(job) for job in jobs}
        chosen[split][method] = {"lr": best.lr, "validation": each}
    return chosen


def accuracies(extent: Extent, data_dir: Path, workers: int) -> dict[str, Any]:
    """Choose learning rates, then run every method on every split."""
    chosen = choose(extent, data_dir, workers)
    rates = {
        split: {
            **{method: row["lr"] for method, row in methods.items()},
            TCT_: methods[AVG]["lr"],
        }
        for split, methods in chosen.items()
    }
    jobs = {
        (split, method): [extent.job(split, method, lr, seed) for seed in extent.seeds]
        for split, methods in rates.items()
        for method, lr in methods.items()
    }
    found = run_all([job for each in jobs.values() for job in each], data_dir, workers)
    return {
        split: {
            "chosen": chosen[split],
            "runs": {
                method: [found[job] for job in jobs[split, method]]
                for method in rates[split]
            },
        }
        for split in SPLITS
    }


def ablations(extent: Extent, data_dir: Path, workers: int) -> dict[str, Any]:
    """Run TCT without this and that where clients have one class each."""
    lr = choose(extent, data_dir, workers)["c1"][AVG]["lr"]
    jobs = {
        name: [extent.job("c1", name, lr, seed) for seed in extent.seeds]
        for name in (TCT_, *ABLATIONS)
    }
    found = run_all([job for each in jobs.values() for job in each], data_dir, workers)
    return {name: [found[job] for job in each] for name, each in jobs.items()}


# Features


Work = Callable[[], object]


def feature_peers(model: nn.Module, x: Tensor) -> dict[str, Work]:
    """Return three ways to a batch's features, each ready to be called."""
    p = FEATURES
    network = _one_output(model)
    params = dict(network.named_parameters())
    total = sum(v.numel() for v in params.values())
    chosen = torch.randperm(total)[: min(p, total)].sort().values

    def rows() -> Tensor:
        found = x.new_empty(len(x), len(chosen))
        for i, one in enumerate(x.split(1)):
            each = torch.autograd.grad(network(one).sum(), list(params.values()))
            torch.index_select(
                torch.cat([g.flatten() for g in each]), 0, chosen, out=found[i]
            )
        return found

    def output(params: dict[str, Tensor], one: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(network, params, (one.unsqueeze(0),))
        return made.sum()

    per_example = torch.func.vmap(torch.func.grad(output), in_dims=(None, 0))

    def vmapped() -> Tensor:
        found, start = x.new_empty(len(x), len(chosen)), 0
        for part in x.split(64):
            each = per_example({k: v.detach() for k, v in params.items()}, part)
            every = torch.cat([g.flatten(1) for g in each.values()], dim=1)
            found[start : start + len(part)] = every[:, chosen]
            start += len(part)
        return found

    features = TangentFeatures(model, p)
    return {ONE: rows, FUNC: vmapped, OURS: lambda: features(x)}


ONE, FUNC, OURS = "one backward an example", "torch.func", "TangentFeatures"


def _one_output(model: nn.Module) -> nn.Module:
    (*_, last) = (name for name, m in model.named_modules() if name)
    old = model.get_submodule(last)
    assert isinstance(old, nn.Linear)
    model.set_submodule(last, nn.Linear(old.in_features, 1, bias=old.bias is not None))
    return model


def features_part(extent: Extent) -> dict[str, Any]:
    """Time features of batches, the three ways in random order."""
    shuffled, found = random.Random(0), {}
    for title, (name, shape, count) in NETWORKS.items():
        torch.manual_seed(0)
        model = make_model(name, shape=shape, num_classes=10)
        peers = feature_peers(model, torch.randn(count, *shape))
        times: dict[str, list[float]] = {peer: [] for peer in peers}
        for repeat in range(extent.repeats + 1):
            for peer in shuffled.sample(list(peers), len(peers)):
                took = seconds(peers[peer])
                if repeat:  # the first one warms up
                    times[peer].append(took / count)
        medians = {peer: statistics.median(each) for peer, each in times.items()}
        parameters = sum(p.numel() for p in model.parameters())
        found[title] = {"images": count, "parameters": parameters, **medians}
        print(title, medians, flush=True)
    return found


# Model, shape and images of a batch.
NETWORKS: dict[str, tuple[str, tuple[int, int, int], int]] = {
    "LeNet5 (`lenet`), 28×28": ("lenet", (1, 28, 28), 500),
    "LeNet5 with biases (`lenet-bias`), 28×28": ("lenet-bias", (1, 28, 28), 500),
    "CNN (`cnn-bias`), 28×28": ("cnn-bias", (1, 28, 28), 200),
    "CNN (`cnn-bias`), 3×32×32": ("cnn-bias", (3, 32, 32), 200),
}


def seconds(work: Work) -> float:
    """Return how long something took."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def features_section(found: Mapping[str, Any]) -> list[str]:
    """Return the features' times as a table."""
    lines = ["## Features", "", f"{FEATURES} coordinates of every example's gradient."]
    lines += ["Medians over batches, the three ways in random order.", ""]
    lines += [f"| | parameters | images | {ONE} | {FUNC} | {OURS} | target |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for title, row in found.items():
        ratios = [
            f"{1e3 * row[peer]:.3f} ms, {row[ONE] / row[peer]:.1f} ×"
            for peer in (FUNC, OURS)
        ]
        target = 4 if title.startswith("LeNet") else 1
        met = "met" if row[ONE] / row[OURS] >= target else "**missed**"
        lines.append(
            f"| {title} | {row['parameters']} | {row['images']} | "
            f"{1e3 * row[ONE]:.3f} ms | {' | '.join(ratios)} | ≥ {target} ×: {met} |"
        )
    return [*lines, "", "Times are an image's; × is how much faster than the first."]


# The closed form


def closed_form_part(extent: Extent) -> list[dict[str, Any]]:
    """Time a client's round in closed form and step by step."""
    return [closed_form(n, p, repeats) for n, p, repeats in extent.sizes]


def closed_form(n: int, p: int, repeats: int) -> dict[str, Any]:
    """Compare both on random features with a decaying spectrum."""
    draw = torch.Generator().manual_seed(0)
    Z = torch.randn(n, 50, generator=draw) @ torch.randn(50, p, generator=draw) / 7
    Z = Z.add_(torch.randn(n, p, generator=draw))
    Z = Z.sub_(Z.mean(0)).div_(Z.std(0, correction=0))
    labels = torch.randint(10, (n,), generator=draw)
    Y = torch.nn.functional.one_hot(labels, 10).float() - 0.1
    weight = 1e-4 * torch.randn(p, 10, generator=draw)
    h = 1e-2 * torch.randn(p, 10, generator=draw)
    began = time.perf_counter()
    spectrum = gram_spectrum(Z)
    once = time.perf_counter() - began
    lr = min(5 / p, 1 / spectrum.largest)  # TCT's default
    given: dict[str, Any] = {"lr": lr, "local_steps": STEPS}
    ours, theirs, repeated = [], [], 5 * repeats
    update = tct_update(Z, Y, weight, h, spectrum, **given)
    for _ in range(repeats):
        for _ in range(repeated):
            work = seconds(lambda: tct_update(Z, Y, weight, h, spectrum, **given))
            ours.append(work)
        began = time.perf_counter()
        stepped = tct_steps(Z, Y, weight, h, **given)
        theirs.append(time.perf_counter() - began)
    change = (stepped - weight).double().norm()
    found = {
        "n": n,
        "p": p,
        "closed form": statistics.median(ours),
        "steps": statistics.median(theirs),
        "repeats": repeats,
        "spectrum": once,
        "lr times largest": lr * spectrum.largest,
        "difference": float((update - stepped).double().norm() / change),
    }
    print(found, flush=True)
    return found


def closed_form_section(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the closed form's times as a table."""
    lines = ["## A client's round of stage 2", ""]
    lines += [f"{STEPS} full-batch steps, 10 classes, all of them really taken, beside"]
    lines += ["the closed form of the same. The spectrum is computed once a run. The"]
    lines += ["difference is that of the new weights, relative to their change.", ""]
    lines += [
        "| n | p | steps | closed form | ratio (target ≥ 100) | difference (target "
        "≤ 1e-4) | spectrum, once |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        ratio = row["steps"] / row["closed form"]
        lines.append(
            f"| {row['n']} | {row['p']} | {row['steps']:.1f} s | "
            f"{row['closed form']:.3f} s | {ratio:.0f} × | {row['difference']:.1e} | "
            f"{row['spectrum']:.2f} s |"
        )
    return lines


# The accuracies


def spread(runs: Sequence[Mapping[str, Any]], index: int = -1) -> str:
    """Return mean ± standard deviation of an accuracy over seeds, in per cent."""
    values = [100 * run["accuracy"][index] for run in runs]
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def final(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean of the last accuracies, in per cent."""
    return 100 * statistics.mean(run["accuracy"][-1] for run in runs)


def first_stage(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return TCT's runs cut off after stage 1."""
    return [{**r, "accuracy": r["accuracy"][: r["stage1"] + 1]} for r in runs]


def accuracy_section(found: Mapping[str, Any]) -> list[str]:
    """Return the accuracies, the targets and the choice of learning rates."""
    rows = {
        split: {STAGE_1: first_stage(cell["runs"][TCT_]), **cell["runs"]}
        for split, cell in found.items()
    }
    one = next(iter(rows.values()))[TCT_][0]
    both = one["stage1"] + one["stage2"]
    named = {
        STAGE_1: f"FedAvg, {one['stage1']} rounds (stage 1)",
        AVG: f"FedAvg, {both} rounds",
        SCAFFOLD: f"SCAFFOLD, {both} rounds",
        TCT_: f"**TCT**, {one['stage1']} + {one['stage2']} rounds",
    }
    titles = [SPLITS[split].title for split in rows]
    lines = ["## Accuracy", "", "![accuracy by round](tct.png)", ""]
    seeds = ", ".join(str(run["seed"]) for run in rows["c1"][TCT_])
    lines += [
        f"Test accuracy in per cent, mean ± standard deviation over seeds {seeds}."
    ]
    lines += ["", f"| | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    for method, name in named.items():
        cells = " | ".join(spread(cell[method]) for cell in rows.values())
        lines.append(f"| {name} | {cells} |")
    return [*lines, "", *targets(rows), "", *rates_table(found), "", *bytes_table(rows)]


Rows = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]


def targets(rows: Rows) -> list[str]:
    """Return whether TCT leads, and by how much."""
    lines = ["**TCT's lead**, in points of the means, and in how many seeds it leads:"]
    lines += ["", "| | stage 1 | FedAvg | SCAFFOLD | |", "|---|---|---|---|---|"]
    for split, cell in rows.items():
        cells, ours = [], cell[TCT_]
        leads = {m: final(ours) - final(cell[m]) for m in (STAGE_1, AVG, SCAFFOLD)}
        for method, lead in leads.items():
            pairs = zip(ours, cell[method], strict=True)
            won = sum(a["accuracy"][-1] > b["accuracy"][-1] for a, b in pairs)
            cells.append(f"{lead:+.1f} ({won} of {len(ours)})")
        enough = min(leads.values()) >= 5 or final(ours) >= 97
        met = min(leads.values()) > 0 and (split != "c1" or enough)
        target = "≥ 5 or to ≥ 97 %" if split == "c1" else "above"
        told = f"{target}: {'met' if met else '**missed**'}"
        lines.append(f"| {SPLITS[split].title} | {' | '.join(cells)} | {told} |")
    return lines


def rates_table(found: Mapping[str, Any]) -> list[str]:
    """Return the validation accuracies that learning rates were chosen by."""
    lines = [
        "**Learning rates**: validation accuracy in per cent, the chosen in bold.",
        "",
    ]
    first = next(iter(found.values()))["chosen"][AVG]["validation"]
    lines += [f"| | | {' | '.join(first)} |", "|---|---|" + "---|" * len(first)]
    for split, cell in found.items():
        for method, row in cell["chosen"].items():
            cells = [
                f"**{100 * a:.1f}**" if float(lr) == row["lr"] else f"{100 * a:.1f}"
                for lr, a in row["validation"].items()
            ]
            lines.append(f"| {SPLITS[split].title} | {method} | {' | '.join(cells)} |")
    return lines


def bytes_table(rows: Rows) -> list[str]:
    """Return what a client uploads in a round of each kind."""
    run = rows["c1"][TCT_][0]
    sent, n = run["uploaded-bytes"], run["stage1"]
    rounds = {
        "stage 1": sent[n] / n,
        "the round between": sent[n + 1] - sent[n],
        "stage 2": (sent[-1] - sent[n + 1]) / run["stage2"],
        "FedAvg": rows["c1"][AVG][0]["uploaded-bytes"][-1] / (n + run["stage2"]),
        "SCAFFOLD": rows["c1"][SCAFFOLD][0]["uploaded-bytes"][-1] / (n + run["stage2"]),
    }
    lines = ["**Uploads** of a client in a round, in kB on the wire:", ""]
    lines += [f"| {' | '.join(rounds)} |", "|" + "---|" * len(rounds)]
    shown = " | ".join(f"{b / CLIENTS / 1e3:.0f}" for b in rounds.values())
    return [*lines, f"| {shown} |"]


def ablations_section(found: Mapping[str, Any]) -> list[str]:
    """Return TCT's ablations as a table."""
    lines = ["## Without this and that", "", "#C = 1; test accuracy in per cent."]
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {name} | {spread(runs)} |" for name, runs in found.items()]
    return lines


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy by round, a panel a split: means, and the seeds' ranges."""
    figure, axes = panels(len(found), height=3.4)
    colors = {TCT_: BEST, AVG: RUNS[1], SCAFFOLD: RUNS[2]}
    for one, (split, cell) in zip(axes, found.items(), strict=True):
        first = cell["runs"][TCT_][0]["stage1"]
        for method in (AVG, SCAFFOLD, TCT_):
            seeds = [run["accuracy"] for run in cell["runs"][method]]
            # TCT is FedAvg before, and has no predictions in the round between.
            ours = [first, *range(first + 2, len(seeds[0]))]
            x = ours if method == TCT_ else range(len(seeds[0]))
            values = [[100 * seed[n] for seed in seeds] for n in x]
            low, high = ([f(each) for each in values] for f in (min, max))
            color = colors[method]
            mean = [statistics.mean(each) for each in values]
            one.plot(x, mean, color=color, lw=2, label=method)
            one.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
        one.axvline(first + 1, color=QUIET, lw=1, ls="--")
        one.annotate(
            "stage 2", (first + 1, 2), xytext=(4, 0), textcoords="offset points",
            color=INK, fontsize="small",
        )  # fmt: skip
        one.set_title(SPLITS[split].title, color=INK, fontsize="medium")
        one.set_ylabel("test accuracy, %")
        one.set_xlabel("round")
        one.set_ylim(0, 100)
        one.grid(axis="y", color=GRID)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="center", bbox_to_anchor=(0.75, 0.26))
    figure.tight_layout()
    save(figure, path)


SECTIONS: dict[str, Callable[[Any], list[str]]] = {
    "features": features_section,
    "closed-form": closed_form_section,
    "accuracy": accuracy_section,
    "ablations": ablations_section,
}


def run_part(name: str, extent: Extent, data_dir: Path, workers: int) -> Any:
    """Return a part's numbers; None, saying so, where its data are not there."""
    if name == "features":
        return features_part(extent)
    if name == "closed-form":
        return closed_form_part(extent)
    if not (data_dir / "MNIST").exists():
        print(f"MNIST is not in {data_dir}: {name} is skipped; name it by --data-dir")
        return None
    part = accuracies if name == "accuracy" else ablations
    return part(extent, data_dir, workers)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    """Run what is asked for, and write the page of all that was ever run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=SHARED)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument(
        "--smoke", action="store_true", help="a few rounds, to the cache"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    extent = SMOKE if options.smoke else Extent()
    results = CACHED / "smoke" if options.smoke else RESULTS
    results.mkdir(parents=True, exist_ok=True)
    numbers_at = results / "tct.json"
    numbers = _read(numbers_at)
    for name in (options.only,) if options.only else SECTIONS:
        found = run_part(name, extent, options.data_dir.resolve(), options.workers)
        if found is not None:
            numbers = _read(numbers_at) | {name: found}
            numbers_at.write_text(json.dumps(numbers) + "\n")
    lines = [
        "# TCT",
        "",
        *(__doc__ or "").split("\n"),
    ]
    lines += [f"Measured on {platform.machine()}, torch {torch.__version__}.", ""]
    for name, section in SECTIONS.items():
        if name in numbers:
            lines += [*section(numbers[name]), ""]
    if "accuracy" in numbers:
        plot(numbers["accuracy"], results / "tct.png")
    (results / "tct.md").write_text("\n".join(lines).rstrip() + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
