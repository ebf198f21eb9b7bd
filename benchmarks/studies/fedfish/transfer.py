"""A transformer pre-trained by federation on one text, and moved to another."""

import importlib
import inspect
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord
from harness.clients import CHOICE, grid_of
from harness.jobs import Numbers
from harness.size import sized
from measures import MeasuredGrid, Personalisation
from tasks import make_model
from tasks.examples import VOCABULARY
from tasks.language import cut, load_language
from torch import nn
from torch.utils.data import TensorDataset

from flwr_fisher.client import LocalSGD
from flwr_fisher.client.training import Loader
from flwr_fisher.errors import RoundError
from flwr_fisher.params import shared_state
from studies.fedfish.runs import Job, batches
from studies.fedfish.strategies import make_strategy

LENGTH = 64
CLIENTS, HELD_OUT, SAMPLED, PIECES = sized((40, 10, 10, 48), (6, 2, 2, 8))
TUNED = 4  # epochs of fine-tuning
MODULES = (
    "argparse", "ast", "calendar", "configparser", "difflib", "enum", "fractions",
    "gettext", "inspect", "pickle", "statistics", "tarfile",
)  # fmt: skip
KIND, OWN, OTHER = "text", "its own text", "another text"
SHARES = {"as it is": 0.25, "tuned on 25 %": 0.25, "tuned on 50 %": 0.5}


@lru_cache(maxsize=2)
def texts(seed: int) -> dict[str, list[Loader]]:
    """Return the clients' pieces: topics of a language reference, and modules' sources.

    A topic has at least a quarter of the most that a client keeps; which topics, and
    which of their pieces, is drawn by the seed.
    """
    drawn = torch.Generator().manual_seed(seed)
    data = load_language().train
    topics = [data.data[data.targets == d] for d in data.targets.unique()]
    long = [topic for topic in topics if len(topic) >= PIECES // 4]
    order = torch.randperm(len(long), generator=drawn)[:CLIENTS].tolist()
    sources = [
        (name, inspect.getsource(importlib.import_module(name))) for name in MODULES
    ]
    other = cut(sources, length=LENGTH, held=10).train
    modules = [other.data[other.targets == d] for d in other.targets.unique()]
    kinds = {OWN: [long[i] for i in order], OTHER: modules}
    found = {}
    for kind, documents in kinds.items():
        found[kind] = []
        for pieces in documents:
            chosen = torch.randperm(len(pieces), generator=drawn)[:PIECES]
            x, y = pieces[chosen][:, :-1], pieces[chosen][:, 1:]
            found[kind].append(batches(TensorDataset(x, y)))
    return found


def federate(job: Job, data_dir: Path) -> Numbers:
    """Run a job; return the accuracies of next tokens on both texts' new clients."""
    own, other = texts(job.seed).values()
    model = make_model(
        "transformer", shape=(LENGTH,), num_classes=len(VOCABULARY), seed=job.seed
    )
    train = LocalSGD(epochs=job.epochs, lr=job.client_lr, momentum=0.0)
    grid = MeasuredGrid(
        grid_of(own, model, train, job.seed), held_out=HELD_OUT, seed=job.seed
    )
    before = time.perf_counter()
    fraction = SAMPLED / (len(own) - HELD_OUT)
    strategy = make_strategy(job.method, job.server_lr, fraction, job.seed)
    start = ArrayRecord(shared_state(model))
    try:
        result = strategy.start(grid, start, job.rounds)
    except RoundError:  # these learning rates end in NaN
        return {"accuracy": 0.0}
    found = {OWN: on_new_clients(grid, own, model, train, result.arrays)}
    if job.seed != CHOICE:
        there = grid_of(other, model, train, job.seed)
        moved = MeasuredGrid(there, held_out=len(other) - 1, seed=job.seed)
        found[OTHER] = on_new_clients(moved, other, model, train, result.arrays)
    took = time.perf_counter() - before
    return {"accuracy": found[OWN]["as it is"], **found, "seconds": took}


def on_new_clients(
    grid: MeasuredGrid,
    clients: Sequence[Loader],
    model: nn.Module,
    train: LocalSGD,
    arrays: ArrayRecord,
) -> dict[str, float]:
    """Return accuracies of next tokens, before and after fine-tuning, over clients."""
    found = {}
    for name, share in SHARES.items():
        options = {"fraction": share, "epochs": TUNED}
        measure = Personalisation(grid, clients, model, train, **options)
        told = measure(0, arrays)
        kind = "zero-shot" if name == "as it is" else "personalised"
        found[name] = float(told[f"{kind}-accuracy"])
    return found
