"""FedFish beside FedAvg, both with Adam on the server, as local epochs grow.

    python benchmarks/fedfish.py --data-dir DIR   # DIR/MNIST/raw has the files

MNIST, `mlp`, 100 clients of at most 200 images; 80 of them train, 10 a round, by plain
SGD in batches of 20, and 20 are held out. A run has 80 local epochs whatever E is: 80
rounds of E = 1, 20 of E = 4, 5 of E = 16. Two kinds of heterogeneity:

- *label skew*: `dirichlet-client` with α = 0.1; the server's model is scored on the
  test set;
- *shift*: labels alike (`iid`), but each client sees its images turned by an angle of
  its own, uniform in ±60°, and faded by a factor of its own, uniform in 0.3…1; of the
  test set the i-th image is seen as client i mod 100 would see it, so that the score is
  a mean over all 100 clients' ways, each with 100 images that no other has.

**Methods.** FedAvg is FedFish's strategy with every Fisher one, which is FedAvg bit for
bit; so both have the same Adam (torch's defaults), cohorts, batches and initial weights
of a seed, and no upload is compressed. *last-epoch* and *product* are FedFish's two
savings (*product*'s Adam has FedFish's smaller ε). *unit trace* is not the paper's:
every client's Fisher is first scaled to the same sum, to see what the sizes do.

**Learning rates** of client and server are chosen for every row from the same 3×3 grid
(client 0.01, 0.04, 0.16; server 0.001, 0.004, 0.016) by the accuracy on 5000 training
images of a split with a seed of its own (100), where no test image is looked at; such
runs are of full length. The table's seeds are 0-4; three were planned, and two added
when their spread was seen; that changed none of the verdicts under *Reading*.

**Scores** are means over a run's last two rounds. *Personalised*: held-out clients
fine-tune the server's model for 4 epochs at the row's client learning rate on 25 % or
50 % of their data and are scored on the other half; *zero-shot* is before. *Barrier*:
what the round's clients lose on their own training data from their models to the
server's, in loss and in points of accuracy.

Spreads are standard deviations over the seeds, and in differences, which are paired by
seed, standard errors: of five seeds, so that the 95 % interval reaches 2.8 of them to
each side.
"""

import argparse
import json
import logging
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, MetricRecord
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from uploads import CACHE, SHARED

from flwr_fisher.client import FisherClient, make_client_app
from flwr_fisher.client.training import LocalSGD, cross_entropy, score
from flwr_fisher.curvature import Diagonal
from flwr_fisher.errors import RoundError
from flwr_fisher.measures import (
    ClientServerBarrier,
    EvaluateFn,
    MeasuredGrid,
    Personalisation,
    combine,
)
from flwr_fisher.merge import fedavg, fedfish_average
from flwr_fisher.params import Params, flatten, scale, shared_state
from flwr_fisher.report.style import BEST, GRID, INK, RUNS
from flwr_fisher.strategies import Exchange, FedFish, Upload
from flwr_fisher.tasks import Task, load_task, make_model
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import FisherUpload, arrays_to_tensors

RESULTS, RUNS_DIR = Path(__file__).parent / "results", CACHE / "fedfish"
CLIENTS, HELD_OUT, SAMPLED, CAP, BATCH = 100, 20, 10, 200, 20
TOTAL = 80  # local epochs of a run, at every E
EPOCHS = (1, 4, 16)
LAST = 2  # rounds that a score is the mean of
SEEDS, CHOICE = (0, 1, 2, 3, 4), 100
CLIENT_LRS, SERVER_LRS = (0.01, 0.04, 0.16), (0.001, 0.004, 0.016)
TUNED, COMMON = 4, 0.04  # epochs of fine-tuning, and a rate that is alike for all
STEP = 4  # from one learning rate of the grid to the next
SKEW, SHIFT = "label skew", "shift"
ANGLE, FAINTEST = 60.0, 0.3
AVG, FISH = "FedAvg", "FedFish"
LATE, PRODUCT = "FedFish, last-epoch", "FedFish, product"
UNIT = "FedFish, unit trace"
DEVICE = torch.device("cpu")


class FedAvgAdam(FedFish):
    """FedAvg in FedFish's code: no client computes a Fisher, and each counts as ones.

    Equal Fishers give the plain weighted mean, bit for bit.
    """

    def exchanges(self, server_round: int) -> Sequence[Exchange]:
        """Ask for training alone."""

        def read(record: ArrayRecord, like: Params) -> FisherUpload:
            params = arrays_to_tensors(record)
            ones = {key: torch.ones_like(value) for key, value in params.items()}
            return FisherUpload(params, Diagonal(ones))

        return [Exchange({}, read)]


class UnitTrace(FedFish):
    """FedFish with every client's Fisher scaled to the same sum, before all else."""

    def exchanges(self, server_round: int) -> Sequence[Exchange]:
        """Ask as FedFish does; scale what arrives."""
        (exchange,) = super().exchanges(server_round)

        def read(record: ArrayRecord, like: Params) -> FisherUpload:
            upload = FisherUpload.from_arrays(record, like)
            return FisherUpload(upload.params, unit_trace(upload.curvature.diagonal()))

        return [replace(exchange, read=read)]


def unit_trace(fisher: Params) -> Diagonal:
    """Return a Fisher whose entries have the mean one."""
    flat = flatten(fisher).double()
    return Diagonal(scale(fisher, float(1 / flat.mean()) if flat.any() else 0.0))


def make_strategy(job: "Job") -> FedFish:
    """Return the method's strategy; all have the same server optimiser."""
    common = {
        "server_optimizer": "adam",
        "server_lr": job.server_lr,
        "fraction_train": SAMPLED / (CLIENTS - HELD_OUT),
        "fraction_evaluate": 0.0,
        "seed": job.seed,
    }
    match job.method:
        case "FedAvg":
            return FedAvgAdam(codec="lossless", **common)
        case "FedFish, unit trace":
            return UnitTrace(codec="lossless", **common)
        case "FedFish, product":
            return FedFish(upload="product", **common)
        case "FedFish, last-epoch":
            return FedFish(codec="lossless", fisher_source="last-epoch", **common)
        case _:
            return FedFish(codec="lossless", **common)


@dataclass(frozen=True)
class Job:
    """One federation, from its first round to its scores."""

    kind: str
    epochs: int
    method: str
    seed: int
    client_lr: float
    server_lr: float
    rounds: int

    @property
    def path(self) -> Path:
        """Where its numbers are kept."""
        name = "-".join(str(value) for value in asdict(self).values())
        return RUNS_DIR / f"{name.replace(', ', '_').replace(' ', '_')}.json"

    @property
    def choosing(self) -> bool:
        """Whether it is there to choose learning rates: it sees no test image."""
        return self.seed == CHOICE


@dataclass(frozen=True)
class World:
    """The clients' examples, and those that the server's model is scored on."""

    clients: list[TensorDataset]
    held: TensorDataset


@lru_cache(maxsize=6)
def world(kind: str, seed: int, data_dir: Path) -> World:
    """Share MNIST out; in the shift, turn and fade every client's images its own way.

    The images that score the server's model are those of no client. In the shift the
    i-th is seen as client i mod 100 would see it: each client's way counts as much.
    """
    task: Task = load_task(
        dataset="mnist",
        data_dir=data_dir,
        model="mlp",
        partition="dirichlet-client" if kind == SKEW else "iid",
        alpha=0.1,
        num_partitions=CLIENTS,
        seed=seed,
        validation=5000,
    )
    generator = torch.Generator().manual_seed(seed)
    angles = ANGLE * (2 * torch.rand(CLIENTS, generator=generator) - 1)
    contrasts = FAINTEST + (1 - FAINTEST) * torch.rand(CLIENTS, generator=generator)
    held = task.validation if seed == CHOICE else task.data.test
    assert held is not None

    def seen(pixels: Tensor, owners: Tensor) -> Tensor:
        x = pixels.float() / 255
        if kind == SHIFT:
            x = contrasts[owners].reshape(-1, 1, 1, 1) * rotated(x, angles[owners])
        return (x - task.data.train.mean[0]) / task.data.train.std[0]

    clients = []
    for client, part in enumerate(task.parts):
        order = torch.randperm(len(part), generator=generator)[:CAP]
        chosen = torch.tensor(part)[order]
        owners = torch.full((len(chosen),), client)
        x = seen(task.data.train.data[chosen], owners)
        clients.append(TensorDataset(x, task.data.train.targets[chosen]))
    owners = torch.arange(len(held)) % CLIENTS
    return World(clients, TensorDataset(seen(held.data, owners), held.targets))


def rotated(images: Tensor, degrees: Tensor) -> Tensor:
    """Return each image turned about its centre, by bilinear interpolation."""
    cos, sin = torch.deg2rad(degrees).cos(), torch.deg2rad(degrees).sin()
    zero = torch.zeros_like(cos)
    turns = torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).reshape(-1, 2, 3)
    places = F.affine_grid(turns, list(images.shape), align_corners=False)
    return F.grid_sample(images, places, align_corners=False)


def batches(data: TensorDataset, size: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return shuffled batches, each one indexing operation."""
    order = BatchSampler(RandomSampler(data), size, drop_last=False)
    return DataLoader(data, sampler=order, batch_size=None)


def federate(job: Job, data_dir: Path) -> dict[str, float | list[float]]:
    """Run a job; return the means of its last rounds' scores."""
    here = world(job.kind, job.seed, data_dir)
    model = make_model("mlp", shape=(1, 28, 28), num_classes=10, seed=job.seed)
    arrays = ArrayRecord(shared_state(model))
    train = LocalSGD(epochs=job.epochs, lr=job.client_lr, momentum=0.0)

    def client_fn(context: Context) -> FisherClient:
        data = here.clients[int(context.node_config["partition-id"])]
        return FisherClient(model, batches(data, BATCH), train_fn=train, device=DEVICE)

    grid = LocalGrid(make_client_app(client_fn), CLIENTS, seed=job.seed)
    measured = MeasuredGrid(grid, held_out=HELD_OUT, seed=job.seed)
    held = [here.held[i : i + 1000] for i in range(0, len(here.held), 1000)]

    def accuracy(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays_to_tensors(arrays))
        loss, right, _ = score(model, held, DEVICE, cross_entropy)
        return MetricRecord({"accuracy": right, "loss": loss})

    def late(measure: EvaluateFn) -> EvaluateFn:
        def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            if server_round > job.rounds - LAST:
                return measure(server_round, arrays)
            measured.take_cohort()  # or the next barrier would be over it as well
            return None

        return evaluate_fn

    measures = [late(accuracy)]
    if not job.choosing:
        measures += [late(measure) for measure in client_measures(measured)]
    before = time.perf_counter()
    result = make_strategy(job).start(
        measured, arrays, job.rounds, evaluate_fn=combine(*measures)
    )
    rows = list(result.evaluate_metrics_serverapp.values())
    found = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
    if job.method == FISH and not job.choosing:
        found |= same_uploads(result.uploads, here)
    return found | {"seconds": time.perf_counter() - before}


def client_measures(measured: MeasuredGrid) -> list[EvaluateFn]:
    """Return the barrier and personalisation on a quarter and on half of the data."""
    options = {"epochs": TUNED}
    return [
        ClientServerBarrier(measured),
        Personalisation(measured, fraction=0.25, name="personal-25", **options),
        Personalisation(measured, fraction=0.5, name="personal-50", **options),
        Personalisation(
            measured, fraction=0.5, name="personal-50-common", lr=COMMON, **options
        ),
    ]


def same_uploads(uploads: Sequence[Upload], here: World) -> dict[str, float]:
    """Return what averages of one round's uploads are worth, and who decides them.

    Without a server optimiser and without a history: the parameters' mean, FedFish's
    average, and FedFish's of Fishers scaled to the same sum.
    """
    posteriors = [upload.posterior for upload in uploads]
    params = [p.params for p in posteriors]
    weights = [p.num_examples for p in posteriors]
    fishers = [p.curvature.diagonal() for p in posteriors]
    units = [unit_trace(fisher).diagonal() for fisher in fishers]
    merged = {
        "mean": fedavg(posteriors),
        "fisher": fedfish_average(params, fishers, weights),
        "unit": fedfish_average(params, units, weights),
    }
    model = make_model("mlp", shape=(1, 28, 28), num_classes=10)
    own = [here.clients[int(u.client.removeprefix("partition-"))][:] for u in uploads]

    def losses(candidates: Sequence[Params]) -> tuple[list[float], list[float]]:
        found = []
        for candidate, data in zip(candidates, own, strict=True):
            model.load_state_dict(candidate)
            found.append(score(model, [data], DEVICE, cross_entropy)[:2])
        return [loss for loss, _ in found], [right for _, right in found]

    local, local_right = losses(params)
    found = {}
    for name, candidate in merged.items():
        loss, right = losses([candidate] * len(own))
        model.load_state_dict(candidate)
        accuracy = score(model, [here.held[:]], DEVICE, cross_entropy)[1]
        found[f"merged-{name}-accuracy"] = accuracy
        found[f"merged-{name}-barrier-loss"] = _mean(loss) - _mean(local)
        found[f"merged-{name}-barrier-error"] = _mean(local_right) - _mean(right)
    return found | dominance(fishers, weights, local)


def dominance(
    fishers: Sequence[Params], weights: Sequence[float], local: Sequence[float]
) -> dict[str, float]:
    """Return how unevenly a cohort's clients share FedFish's average."""
    weighted = torch.stack(
        [w * flatten(f).double() for f, w in zip(fishers, weights, strict=True)]
    )
    total = weighted.sum(dim=0)
    heard = total > 0
    shares = weighted[:, heard] / total[heard]
    counts = torch.tensor(weights, dtype=torch.float64)
    traces = weighted.sum(dim=1) / counts
    logs = torch.stack([traces.clamp_min(1e-30).log(), torch.tensor(local).log()])
    return {
        "no-fisher": float((~heard).double().mean()),
        "over-half": float((shares.max(dim=0).values > 0.5).double().mean()),
        "over-nine-tenths": float((shares.max(dim=0).values > 0.9).double().mean()),
        "effective-clients": float((1 / shares.square().sum(dim=0)).mean()),
        "effective-clients-fedavg": float(counts.sum() ** 2 / counts.square().sum()),
        "largest-trace": float(traces.max() / traces.sum()),
        "trace-ratio": float(traces.max() / traces.median()),
        "trace-loss-correlation": float(torch.corrcoef(logs)[0, 1]),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


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


Tried = Mapping[Job, Mapping[str, float]]


def measured_run(job: Job, data_dir: Path) -> Mapping[str, float]:
    """Return a job's numbers, from disk if they are there."""
    if not job.path.exists():
        try:
            found = federate(job, data_dir)
        except RoundError:  # these learning rates end in NaN
            found = {"accuracy": 0.0}
        partial = job.path.with_suffix(".partial")
        partial.write_text(json.dumps({**asdict(job), **found}))
        partial.rename(job.path)
    numbers: Mapping[str, float] = json.loads(job.path.read_text())
    return numbers


def _start(arguments: tuple[Job, Path]) -> Mapping[str, float]:
    job, data_dir = arguments
    began = time.perf_counter()
    found = measured_run(job, data_dir)
    print(
        f"{job} {found['accuracy']:.4f} {time.perf_counter() - began:.0f} s", flush=True
    )
    return found


def run_all(
    jobs: Sequence[Job], data_dir: Path, workers: int
) -> dict[Job, Mapping[str, float]]:
    """Run jobs in as many processes, the longest first."""
    order = sorted(jobs, key=lambda job: -job.rounds)
    with multiprocessing.get_context("fork").Pool(workers, _quiet) as pool:
        found = pool.map(_start, [(job, data_dir) for job in order], chunksize=1)
    return dict(zip(order, found, strict=True))


def _quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)


Cell = tuple[str, int, str]


def cells() -> Iterator[Cell]:
    """Return every kind of heterogeneity, number of local epochs and method."""
    for kind, epochs in product((SKEW, SHIFT), EPOCHS):
        for method in (AVG, FISH):
            yield kind, epochs, method
        if epochs == max(EPOCHS):
            for method in (LATE, PRODUCT, UNIT):
                yield kind, epochs, method


def grid_of(cell: Cell, rounds: int) -> list[Job]:
    """Return the jobs that choose a cell's learning rates."""
    return [
        Job(*cell, CHOICE, client_lr, server_lr, rounds)
        for client_lr, server_lr in product(CLIENT_LRS, SERVER_LRS)
    ]


Runs = Mapping[Cell, list[Mapping[str, float]]]


@dataclass(frozen=True)
class Measure:
    """A column: where its number is found, and how it is shown."""

    title: str
    key: str
    factor: float = 100.0
    digits: int = 1

    def of(self, runs: Sequence[Mapping[str, float]]) -> list[float]:
        """Return a cell's values, one a seed."""
        return [self.factor * run[self.key] for run in runs]

    def spread(self, runs: Sequence[Mapping[str, float]]) -> str:
        """Return mean ± standard deviation."""
        values, digits = self.of(runs), self.digits
        return f"{_mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"

    def gap(
        self, ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]
    ) -> list[float]:
        """Return paired differences."""
        pairs = zip(self.of(ours), self.of(theirs), strict=True)
        return [a - b for a, b in pairs]

    def shown(self, differences: Sequence[float]) -> str:
        """Return mean ± standard error of paired differences."""
        digits = self.digits + 1
        error = standard_error(differences)
        return f"{_mean(differences):+.{digits}f} ± {error:.{digits}f}"


def standard_error(values: Sequence[float]) -> float:
    """Return that of the mean."""
    return statistics.stdev(values) / len(values) ** 0.5


GLOBAL = Measure("global", "accuracy")
HALF = Measure("personalised, 50 %", "personal-50-accuracy")
BARRIER = Measure("barrier, loss", "barrier-loss", factor=1.0, digits=3)
MEASURES = (
    GLOBAL,
    Measure("zero-shot", "zero-shot-accuracy"),
    Measure("personalised, 25 %", "personal-25-accuracy"),
    HALF,
    BARRIER,
    Measure("barrier, points", "barrier-error"),
)
AT_COMMON = Measure("personalised, 50 %, lr 0.04", "personal-50-common-accuracy")
TITLES = " | ".join(m.title for m in MEASURES)


def rates_table(best: Mapping[Cell, Job], tried: Tried) -> list[str]:
    """Return what was chosen, and what it had on the validation images."""
    lines = ["| | E | method | client | server | validation accuracy | outside |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (kind, epochs, method), job in best.items():
        client = f"{job.client_lr}{'*' * (job.client_lr in edges(CLIENT_LRS))}"
        server = f"{job.server_lr}{'*' * (job.server_lr in edges(SERVER_LRS))}"
        accuracy = 100 * tried[job]["accuracy"]
        further = ", ".join(
            f"{100 * tried[j]['accuracy']:.1f} ({j.client_lr}, {j.server_lr})"
            for j in outside(job)
        )
        cell = f"| {kind} | {epochs} | {method} | {client} | {server}"
        lines.append(f"{cell} | {accuracy:.1f} | {further} |")
    return lines


def borrowed(best: Mapping[Cell, Job]) -> dict[Cell, Job]:
    """Return FedAvg at FedFish's learning rates, at the most local epochs."""
    high = max(EPOCHS)
    return {
        (kind, high, AVG): replace(best[kind, high, FISH], method=AVG)
        for kind in (SKEW, SHIFT)
    }


def choice_notes(
    best: Mapping[Cell, Job], tried: Tried, runs: Runs, alike: Runs
) -> list[str]:
    """Return how much hangs on learning rates that one split chose."""
    high, seen, same = max(EPOCHS), [], []
    for kind in (SKEW, SHIFT):
        fish, plain = (best[kind, high, method] for method in (FISH, AVG))
        lead = 100 * (tried[fish]["accuracy"] - tried[plain]["accuracy"])
        seen.append(f"{lead:+.1f} points under {kind}")
        gaps = GLOBAL.gap(runs[kind, high, FISH], alike[kind, high, AVG])
        same.append(f"{GLOBAL.shown(gaps)} under {kind}")
    return [
        f"One split chose, and at E = {high} its own lead of FedFish was "
        f"{' and '.join(seen)}, to compare with the seeds' above. FedAvg at FedFish's "
        f"rates makes FedFish's lead in global accuracy there {' and '.join(same)}.",
    ]


def edges(rates: Sequence[float]) -> tuple[float, float]:
    """Return the grid's ends."""
    return rates[0], rates[-1]


def scores_table(runs: Runs) -> list[str]:
    """Return every cell's scores."""
    lines = [f"| | E | method | {TITLES} |", "|---|---|---|" + "---|" * len(MEASURES)]
    for (kind, epochs, method), cell in runs.items():
        shown = " | ".join(measure.spread(cell) for measure in MEASURES)
        lines.append(f"| {kind} | {epochs} | {method} | {shown} |")
    return lines


def gaps_table(runs: Runs) -> list[str]:
    """Return differences of methods, and how FedFish's grows from E = 1 to 16."""
    lines = [f"| | E | | {TITLES} |", "|---|---|---|" + "---|" * len(MEASURES)]
    low, high = min(EPOCHS), max(EPOCHS)
    for kind in (SKEW, SHIFT):
        lines += [_gap_row(runs, kind, epochs, FISH, AVG) for epochs in EPOCHS]
        growth = " | ".join(m.shown(grown(runs, kind, m)) for m in MEASURES)
        lines.append(f"| {kind} | {low} → {high} | **the gap's growth** | {growth} |")
        lines += [
            _gap_row(runs, kind, high, method, theirs)
            for theirs in (AVG, FISH)
            for method in (LATE, PRODUCT, UNIT)
        ]
    return lines


def _gap_row(runs: Runs, kind: str, epochs: int, ours: str, theirs: str) -> str:
    pair = runs[kind, epochs, ours], runs[kind, epochs, theirs]
    shown = " | ".join(measure.shown(measure.gap(*pair)) for measure in MEASURES)
    return f"| {kind} | {epochs} | {ours} − {theirs} | {shown} |"


def gap(runs: Runs, kind: str, epochs: int, measure: Measure) -> list[float]:
    """Return FedFish − FedAvg of every seed."""
    return measure.gap(runs[kind, epochs, FISH], runs[kind, epochs, AVG])


def grown(runs: Runs, kind: str, measure: Measure) -> list[float]:
    """Return by how much the gap at the most local epochs is above that at one."""
    low, high = (gap(runs, kind, e, measure) for e in (min(EPOCHS), max(EPOCHS)))
    return [b - a for a, b in zip(low, high, strict=True)]


MERGED = {"mean": "mean", "fisher": "FedFish's average", "unit": "unit trace"}


def merged_table(runs: Runs) -> list[str]:
    """Return what averages of the same uploads are worth."""
    lines = ["| | E | average | accuracy | barrier, loss | barrier, points |"]
    lines.append("|---|---|---|---|---|---|")
    for kind, epochs in product((SKEW, SHIFT), EPOCHS):
        cell = runs[kind, epochs, FISH]
        for name, title in MERGED.items():
            shown = " | ".join(m.spread(cell) for m in merged(name))
            lines.append(f"| {kind} | {epochs} | {title} | {shown} |")
    return lines


def merged(name: str) -> tuple[Measure, Measure, Measure]:
    """Return the measures of an average of the last uploads."""
    return (
        Measure("accuracy", f"merged-{name}-accuracy"),
        Measure("barrier", f"merged-{name}-barrier-loss", factor=1.0, digits=3),
        Measure("barrier", f"merged-{name}-barrier-error"),
    )


SHARES = (
    Measure("entries with over half from one client, %", "over-half", digits=0),
    Measure("over nine tenths, %", "over-nine-tenths", digits=0),
    Measure("clients an entry is made of", "effective-clients", 1.0),
    Measure("largest Fisher's share, %", "largest-trace", digits=0),
    Measure("correlation, log trace and log loss", "trace-loss-correlation", 1.0, 2),
)


def shares_table(runs: Runs) -> list[str]:
    """Return who decides FedFish's average."""
    lines = ["| | E | " + " | ".join(m.title for m in SHARES) + " |"]
    lines.append("|---|---|" + "---|" * len(SHARES))
    for kind, epochs in product((SKEW, SHIFT), EPOCHS):
        shown = " | ".join(m.spread(runs[kind, epochs, FISH]) for m in SHARES)
        lines.append(f"| {kind} | {epochs} | {shown} |")
    return lines


def reading(runs: Runs, short: Runs) -> list[str]:
    """Return in words what the numbers say, whichever way they fall."""
    lines = []
    for kind in (SKEW, SHIFT):
        lines.append(f"**{kind.capitalize()}.** FedFish − FedAvg, at E = 1, 4, 16:")
        lines.append("")
        for measure in (GLOBAL, HALF, BARRIER):
            gaps = [gap(runs, kind, epochs, measure) for epochs in EPOCHS]
            shown = ", ".join(measure.shown(g) for g in gaps)
            growth = grown(runs, kind, measure)
            sign = -1 if measure is BARRIER else 1
            said = verdict([sign * g for g in gaps[-1]], [sign * g for g in growth])
            lines.append(
                f"- {measure.title}: {shown}. From E = 1 to 16 it changes by "
                f"{measure.shown(growth)}: {said}."
            )
        lines.append("")
    return lines + explanation(runs, short)


def verdict(last: Sequence[float], growth: Sequence[float]) -> str:
    """Return what becomes of the claim that FedFish's lead grows with E.

    Both are FedFish's advantage: at the most local epochs, and over that at one.
    """
    if _mean(growth) < -2 * standard_error(growth):
        return "**FedFish falls back** as E grows, against the claim"
    if _mean(growth) <= 2 * standard_error(growth):
        lead = _mean(last) / standard_error(last)
        leader = AVG if lead < -2 else FISH if lead > 2 else "neither"
        return (
            "**not reproduced**, no change beyond two standard errors; at E = 16 "
            f"{leader} has a clear lead"
        )
    if _mean(last) > 2 * standard_error(last):
        return "**reproduced**, a lead that grows with E"
    return "**in part**: FedFish gains as E grows, but has no clear lead at E = 16"


def explanation(runs: Runs, short: Runs) -> list[str]:
    """Return what the last round's uploads have to say about it."""
    places = list(product((SKEW, SHIFT), EPOCHS))
    cells = [runs[kind, epochs, FISH] for kind, epochs in places]

    def over(key: str, factor: float = 1.0) -> str:
        values = [factor * _mean([run[key] for run in cell]) for cell in cells]
        digits = 0 if factor == 100 else 2
        return f"{min(values):.{digits}f} to {max(values):.{digits}f}"

    lines = [
        "**Who decides.** Over the six cells the logarithm of a client's Fisher trace "
        "and that of its own loss have a correlation of "
        f"{over('trace-loss-correlation')}, the largest of ten Fishers has "
        f"{over('largest-trace', 100)} % of their sum, and "
        f"{over('over-half', 100)} % of the average's entries are for more than half "
        f"one client's: its entries are made of {over('effective-clients')} clients, "
        "and a mean of ten.",
    ]
    if all(_mean([r["trace-loss-correlation"] for r in c]) > 0.5 for c in cells):
        lines[0] += (
            " So a client's say goes with how badly it fits its data: who fits them "
            "has small gradients, thus a small Fisher, whatever its parameters matter "
            "to its predictions. It is the empirical Fisher (with labels, of batch "
            "gradients) that vanishes so."
        )
    accuracy, barrier, _ = merged("fisher")
    plain, plain_barrier, _ = merged("mean")
    higher = sum(_mean(accuracy.of(c)) > _mean(plain.of(c)) for c in cells)
    lower = sum(_mean(barrier.of(c)) < _mean(plain_barrier.of(c)) for c in cells)
    few, many = TOTAL // max(EPOCHS), TOTAL // min(EPOCHS)
    changes = [GLOBAL.shown(grown(short, kind, GLOBAL)) for kind in (SKEW, SHIFT)]
    lines += [
        "",
        "**The same uploads.** Without Adam and without a history, FedFish's average "
        "of the last round's uploads has a higher accuracy than their mean in "
        f"{higher} of the six cells, and a lower barrier in {lower} (table below).",
        "",
        f"**Rounds.** With {few} rounds at every E (table below), the gap in global "
        f"accuracy changes from E = 1 to 16 by {changes[0]} under label skew and by "
        f"{changes[1]} in the shift. At E = 1 it is "
        + " and ".join(
            f"{GLOBAL.shown(gap(short, kind, 1, GLOBAL))} after {few} rounds, "
            f"{GLOBAL.shown(gap(runs, kind, 1, GLOBAL))} after {many} ({kind})"
            for kind in (SKEW, SHIFT)
        )
        + ".",
    ]
    parts = []
    for kind in (SKEW, SHIFT):
        ours = runs[kind, max(EPOCHS), UNIT]
        by_fish, by_avg = (
            GLOBAL.gap(ours, runs[kind, max(EPOCHS), m]) for m in (FISH, AVG)
        )
        sizes = _mean(by_fish) > 2 * standard_error(by_fish)
        parts.append(
            f"{GLOBAL.shown(by_fish)} points of global accuracy beside FedFish and "
            f"{GLOBAL.shown(by_avg)} beside FedAvg under {kind}, so that there the "
            f"sizes {'cost FedFish accuracy' if sizes else 'do no clear harm'}"
        )
    return [
        *lines,
        "",
        f"**Taking the Fishers' sizes out** (unit trace, E = 16) gives "
        f"{'; '.join(parts)}.",
    ]


def same_rounds(short: Runs) -> list[str]:
    """Return FedFish − FedAvg where all E have as many rounds."""
    shown = (GLOBAL, HALF, BARRIER)
    titles = " | ".join(measure.title for measure in shown)
    lines = [f"| | E | FedAvg, global | {titles} |", "|---|---|---|---|---|---|"]
    for kind in (SKEW, SHIFT):
        for epochs in EPOCHS:
            gaps = " | ".join(m.shown(gap(short, kind, epochs, m)) for m in shown)
            plain = GLOBAL.spread(short[kind, epochs, AVG])
            lines.append(f"| {kind} | {epochs} | {plain} | {gaps} |")
        growth = " | ".join(m.shown(grown(short, kind, m)) for m in shown)
        lines.append(f"| {kind} | 1 → 16 | | {growth} |")
    return lines


def plot(runs: Runs, path: Path) -> None:
    """Draw scores against local epochs: means as lines, seeds as points."""
    figure = Figure(figsize=(11, 6.4), dpi=150)
    lines = {AVG: RUNS[1], FISH: BEST}
    extra = {LATE: ("^", RUNS[2]), PRODUCT: ("s", RUNS[3]), UNIT: ("D", RUNS[4])}
    shown = (GLOBAL, HALF, BARRIER)
    labels = ("global accuracy, %", "personalised accuracy, %", "barrier, loss")
    for row, kind in enumerate((SKEW, SHIFT)):
        for column, (measure, label) in enumerate(zip(shown, labels, strict=True)):
            axes = figure.add_subplot(2, 3, 3 * row + column + 1)
            for index, (method, color) in enumerate(lines.items()):
                values = [measure.of(runs[kind, epochs, method]) for epochs in EPOCHS]
                means = [_mean(v) for v in values]
                axes.plot(EPOCHS, means, color=color, lw=1.8, label=method)
                for epochs, seeds in zip(EPOCHS, values, strict=True):
                    x = [epochs * 1.06 ** (2 * index - 1)] * len(seeds)
                    axes.plot(x, seeds, ".", color=color, ms=6, alpha=0.7)
            high = max(EPOCHS)
            for index, (method, (marker, color)) in enumerate(extra.items()):
                values = measure.of(runs[kind, high, method])
                x = high * 1.22 * 1.14**index
                axes.plot([x] * len(values), values, ".", color=color, ms=4, alpha=0.6)
                axes.plot(
                    [x], [_mean(values)], marker, color=color, ms=7, mfc="none",
                    ls="none", label=f"{method} (E = {high})",
                )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_xticks(EPOCHS, [str(e) for e in EPOCHS])
            axes.minorticks_off()
            axes.grid(axis="y", color=GRID)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_ylabel(label)
            if column == 1:
                axes.set_title(kind, color=INK)
            if row == 1:
                axes.set_xlabel("local epochs E")
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, bbox_inches="tight", facecolor="white")


def report(
    best: Mapping[Cell, Job], tried: Tried, runs: Runs, short: Runs, alike: Runs
) -> list[str]:
    """Return the page's lines."""
    both = [*runs.values(), *(short[cell] for cell in short if cell[1] < max(EPOCHS))]
    every = [*tried.values(), *(run for cell in both for run in cell)]
    minutes = sum(run.get("seconds", 0.0) for run in every) / 60
    low, high = min(EPOCHS), max(EPOCHS)
    return [
        "# FedFish beside FedAvg as local epochs grow",
        *(__doc__ or "").split("\n")[1:],
        f"The runs' times add up to about {minutes:.0f} minutes, two at a time.",
        "",
        "![scores against local epochs](fedfish.png)",
        "",
        "## Scores",
        "",
        "Accuracy in per cent, mean ± standard deviation over the seeds.",
        "",
        *scores_table(runs),
        "",
        "## Differences",
        "",
        "Mean of the seeds' paired differences ± its standard error. Of accuracies "
        "more is better, of barriers less. The growth is that of FedFish − FedAvg from "
        f"E = {low} to {high}.",
        "",
        *gaps_table(runs),
        "",
        "## Reading",
        "",
        *reading(runs, short),
        "",
        "## The same number of rounds",
        "",
        "At the same local epochs, a larger E has fewer steps of the server. Here "
        f"E = 1 and 4 have as few as E = 16, {TOTAL // high}, with learning rates "
        "chosen from the same grid in runs of that length. FedFish − FedAvg:",
        "",
        *same_rounds(short),
        "",
        "## The same uploads, averaged three ways",
        "",
        "Those of the last round of the FedFish runs: parameters averaged once, with "
        "no server optimiser, and scored as above.",
        "",
        *merged_table(runs),
        "",
        "Who decides FedFish's average: the weights that its entries give to the ten "
        "clients. A mean is made of ten.",
        "",
        *shares_table(runs),
        "",
        "## Learning rates",
        "",
        "Accuracies in per cent, on the validation images. \\* marks the grid's edge; "
        "the last column has what a step outside it (client, server) gives, which was "
        "not chosen from.",
        "",
        *rates_table(best, tried),
        "",
        *choice_notes(best, tried, runs, alike),
        "",
        "At one rate of fine-tuning for all (0.04), personalised on 50 %, with the "
        "difference to FedAvg:",
        "",
        *common_table(runs),
    ]


def common_table(runs: Runs) -> list[str]:
    """Return personalised accuracy where no method's learning rate plays a part."""
    lines = ["| | E | method | accuracy | minus FedAvg |", "|---|---|---|---|---|"]
    for (kind, epochs, method), cell in runs.items():
        difference = AT_COMMON.gap(cell, runs[kind, epochs, AVG])
        shown = "" if method == AVG else AT_COMMON.shown(difference)
        spread = AT_COMMON.spread(cell)
        lines.append(f"| {kind} | {epochs} | {method} | {spread} | {shown} |")
    return lines


def main() -> None:
    """Write the table, the plot and the numbers behind them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=SHARED)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    data_dir, workers = options.data_dir.resolve(), options.workers
    if not (data_dir / "MNIST").exists():
        raise SystemExit(f"MNIST is not in {data_dir}: name its folder by --data-dir")
    RUNS_DIR.mkdir(parents=True, exist_ok=True)
    high = max(EPOCHS)
    full = {cell: grid_of(cell, TOTAL // cell[1]) for cell in cells()}
    few = {
        (kind, epochs, method): grid_of((kind, epochs, method), TOTAL // high)
        for kind, epochs, method in full
        if epochs < high
    }
    grids = [*full.values(), *few.values()]
    tried = run_all([job for jobs in grids for job in jobs], data_dir, workers)

    def best(jobs: Sequence[Job]) -> Job:
        return max(jobs, key=lambda job: tried[job]["accuracy"])

    chosen = {cell: best(jobs) for cell, jobs in full.items()}
    chosen_few = {cell: best(jobs) for cell, jobs in few.items()}
    further = [job for winner in chosen.values() for job in outside(winner)]
    tried |= run_all(further, data_dir, workers)
    others = borrowed(chosen)
    winners = [*chosen.values(), *chosen_few.values(), *others.values()]
    finals = [
        replace(job, seed=seed) for job in dict.fromkeys(winners) for seed in SEEDS
    ]
    found = run_all(finals, data_dir, workers)

    def scores(jobs: Mapping[Cell, Job]) -> Runs:
        return {
            cell: [found[replace(job, seed=seed)] for seed in SEEDS]
            for cell, job in jobs.items()
        }

    runs = scores(chosen)
    short = {
        **{cell: runs[cell] for cell in runs if cell[1] == high},
        **scores(chosen_few),
    }
    text = "\n".join(report(chosen, tried, runs, short, scores(others)))
    (RESULTS / "fedfish.md").write_text(text + "\n")
    numbers = {"choice": list(tried.values()), "runs": list(found.values())}
    (RESULTS / "fedfish.json").write_text(json.dumps(numbers, indent=1) + "\n")
    plot(runs, RESULTS / "fedfish.png")
    print(text)


if __name__ == "__main__":
    main()
