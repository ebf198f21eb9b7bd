"""The federations."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, MetricRecord
from harness.clients import (
    CHOICE,
    World,
    grid_of,
    in_batches,
    scored_images,
    scores,
    shared_out,
)
from harness.jobs import Numbers
from harness.page import CACHE
from harness.size import sized
from measures import ClientServerBarrier, MeasuredGrid, Personalisation, combine
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from flwr_fisher.client import LocalSGD
from flwr_fisher.errors import RoundError
from flwr_fisher.params import shared_state
from flwr_fisher.server.driver import EvaluateFn
from flwr_fisher.wire import arrays_to_tensors
from studies.fedfish.averages import same_uploads
from studies.fedfish.strategies import FISH, MENDED, make_strategy

CLIENTS, HELD_OUT, SAMPLED, CAP = sized((100, 20, 10, 200), (12, 4, 3, 40))
BATCH = 20
LAST = 2  # rounds that a score is the mean of
TUNED, COMMON = 4, 0.04  # epochs of fine-tuning, and a rate that is alike for all
SKEW, SHIFT = "label skew", "shift"
ANGLE, FAINTEST = 60.0, 0.3


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
        name = name.replace(", ", "_").replace(" ", "_").replace("/", "_")
        return CACHE / "fedfish" / f"{name}.json"

    @property
    def turn(self) -> int:
        """The longest first."""
        return -self.rounds

    @property
    def choosing(self) -> bool:
        """Whether it is there to choose learning rates: it sees no test image."""
        return self.seed == CHOICE


@lru_cache(maxsize=6)
def world(kind: str, seed: int, data_dir: Path) -> World:
    """Share MNIST out; in the shift, turn and fade every client's images its own way.

    The images that score the server's model are those of no client. In the shift the
    i-th is seen as client i mod 100 would see it: each client's way counts as much.
    """
    partition = "dirichlet-client" if kind == SKEW else "iid"
    options = {"model": "mlp", "alpha": 0.1, "num_partitions": CLIENTS}
    task = shared_out(seed, data_dir, partition=partition, **options)
    generator = torch.Generator().manual_seed(seed)
    angles = ANGLE * (2 * torch.rand(CLIENTS, generator=generator) - 1)
    contrasts = FAINTEST + (1 - FAINTEST) * torch.rand(CLIENTS, generator=generator)
    train, held = task.data.train, scored_images(task, seed)

    def seen(pixels: Tensor, owners: Tensor) -> Tensor:
        x = pixels.float() / 255
        if kind == SHIFT:
            x = contrasts[owners].reshape(-1, 1, 1, 1) * rotated(x, angles[owners])
        return (x - train.mean[0]) / train.std[0]

    clients = []
    for client, part in enumerate(task.parts):
        order = torch.randperm(len(part), generator=generator)[:CAP]
        chosen = torch.tensor(part)[order]
        x = seen(train.data[chosen], torch.full((len(chosen),), client))
        clients.append(batches(TensorDataset(x, train.targets[chosen])))
    x = seen(held.data, torch.arange(len(held)) % CLIENTS)
    return World(task, clients, in_batches(x, held.targets, 1000))


def rotated(images: Tensor, degrees: Tensor) -> Tensor:
    """Return each image turned about its centre, by bilinear interpolation."""
    cos, sin = torch.deg2rad(degrees).cos(), torch.deg2rad(degrees).sin()
    zero = torch.zeros_like(cos)
    turns = torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).reshape(-1, 2, 3)
    places = F.affine_grid(turns, list(images.shape), align_corners=False)
    return F.grid_sample(images, places, align_corners=False)


def batches(data: TensorDataset) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return shuffled batches, each one indexing operation."""
    order = BatchSampler(RandomSampler(data), BATCH, drop_last=False)
    return DataLoader(data, sampler=order, batch_size=None)


def federate(job: Job, data_dir: Path) -> Numbers:
    """Run a job; return the means of its last rounds' scores."""
    try:
        return _federate(job, world(job.kind, job.seed, data_dir))
    except RoundError:  # these learning rates end in NaN
        return {"accuracy": 0.0}


def _federate(job: Job, here: World) -> Numbers:
    model = here.task.make_model()
    arrays = ArrayRecord(shared_state(model))
    train = LocalSGD(epochs=job.epochs, lr=job.client_lr, momentum=0.0)
    grid = grid_of(here.clients, model, train, job.seed)
    measured = MeasuredGrid(grid, held_out=HELD_OUT, seed=job.seed)

    def accuracy(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord(scores(model, arrays_to_tensors(arrays), here.held))

    measures = [accuracy]
    if not job.choosing:
        measures += client_measures(measured, here, train)
    late = [_late(measure, job.rounds, measured) for measure in measures]
    before = time.perf_counter()
    fraction = SAMPLED / (CLIENTS - HELD_OUT)
    strategy = make_strategy(job.method, job.server_lr, fraction, job.seed)
    result = strategy.start(measured, arrays, job.rounds, evaluate_fn=combine(*late))
    found = means(result.evaluate_metrics_serverapp)
    if job.method in (FISH, MENDED) and not job.choosing:
        found |= same_uploads(result.uploads, here)
    return found | {"seconds": time.perf_counter() - before}


def _late(measure: EvaluateFn, rounds: int, measured: MeasuredGrid) -> EvaluateFn:
    """Return a measure of a run's last rounds alone."""

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round > rounds - LAST:
            return measure(server_round, arrays)
        measured.take_cohort()  # or the next barrier would be over it as well
        return None

    return evaluate_fn


def means(by_round: Mapping[int, MetricRecord]) -> dict[str, float]:
    """Return every metric's mean over rounds."""
    rows = list(by_round.values())
    return {key: mean(row[key] for row in rows) for key in rows[0]}


def client_measures(
    measured: MeasuredGrid, here: World, train: LocalSGD
) -> list[EvaluateFn]:
    """Return the barrier and personalisation on a quarter and on half of the data."""
    clients = measured, here.clients, here.make_model(), train
    personal = partial(Personalisation, *clients, epochs=TUNED)
    return [
        ClientServerBarrier(measured),
        personal(fraction=0.25, name="personal-25"),
        personal(fraction=0.5, name="personal-50"),
        personal(fraction=0.5, name="personal-50-common", lr=COMMON),
    ]
