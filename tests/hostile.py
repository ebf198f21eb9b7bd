"""Federations of six with a hostile client, and what harm it does.

Six clients learn to tell three clouds of points apart. Each run has one client that
sends something else than what it computed, in every reply; its victim is a strategy. A
run is harmed if it ended, if an honest upload was lost, if a parameter is not finite,
or if its accuracy fell below 0.9 of the honest run's. Tests take the cases that once
did harm; ``benchmarks/hostile_runs.py`` takes every attack on every strategy.
"""

import logging
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import Remembering, app_by_partition

from flwr_fisher.client import FisherClient, LocalSGD
from flwr_fisher.merge.options import SOLVERS
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import (
    AFL,
    FAGH,
    TCT,
    CurvatureStrategy,
    FedAvg,
    FedFish,
    FedFisherOneShot,
    MergeOptions,
    Policy,
    Refinement,
    Scaffold,
)
from flwr_fisher.tangent import TCTModel
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import PREFIX, Codec, FisherUpload, resolve
from flwr_fisher.wire.options import split_not_sent, with_not_sent

PACKED, PRODUCTS = "FedFisher, packed", "FedFisher, K-FAC sums"
CLIENTS, HOSTILE = 6, 2  # and which of them is hostile
ENOUGH = 0.9  # of the honest run's accuracy
STRICT = Policy.strict()


# What they learn


def points(seed, n, shares):
    """``n`` points of three clouds in four dimensions, in these shares."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3.0 * torch.eye(4)[:3]
    y = torch.multinomial(torch.tensor(shares), n, True, generator=generator)
    return centres[y] + torch.randn(n, 4, generator=generator), y


def make_model(kind=""):
    """A small network; ``normalised`` by a batch norm, or ``deep``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, head = nn.Linear(4, 16), 16
        middle = {"normalised": [nn.BatchNorm1d(16)]}.get(kind, [])
        if kind == "deep":  # whose head is small beside it
            middle, head = [nn.ReLU(), nn.Linear(16, 8)], 8
        return nn.Sequential(first, *middle, nn.ReLU(), nn.Linear(head, 3))


def accuracy(arrays, kind):
    """How many of the test points a result's arrays tell right."""
    tensors = arrays.to_torch_state_dict()
    model = make_model(kind)
    if any(key.startswith("tct/") for key in tensors):
        model = TCTModel.from_tensors(model, tensors)
    else:
        model.load_state_dict(tensors)
    model.eval()
    x, y = points(99, 900, (1.0, 1.0, 1.0))
    with torch.no_grad():
        return float((model(x).argmax(-1) == y).float().mean())


# The strategies


@dataclass(frozen=True)
class Victim:
    """A strategy, how many rounds it takes, and how its clients train."""

    make: Callable[..., CurvatureStrategy]
    rounds: int = 1
    train: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10, lr=0.05))
    model: str = ""


ONE = LocalSGD(epochs=1, lr=0.05)
FAST = LocalSGD(epochs=1, lr=0.3, momentum=0.0)
lossless = partial(FedFisherOneShot, codec="lossless")
VICTIMS = {
    "FedFisher": Victim(lossless),
    "FedFisher, batch norm": Victim(lossless, model="normalised"),
    PACKED: Victim(partial(FedFisherOneShot, codec=Codec(budget=4.0))),
    "FedFisher, diagonal": Victim(partial(lossless, structure="diagonal")),
    "FedFisher, sums": Victim(
        partial(lossless, structure="diagonal", aggregate="sums")
    ),
    PRODUCTS: Victim(partial(lossless, aggregate="sums")),
    "FedFisher, refined": Victim(
        partial(lossless, refine=Refinement(steps=3)), model="deep"
    ),
    "FedFisher, pretrained": Victim(partial(lossless, pretrained=True), model="deep"),
    "FedFisher, three rounds": Victim(lossless, 3, LocalSGD(epochs=4, lr=0.05)),
    "FedFish": Victim(partial(FedFish, codec="lossless"), 6, ONE),
    "FedFish, Adam": Victim(
        partial(FedFish, server_optimizer="adam", server_lr=0.05), 8, ONE
    ),
    "FAGH": Victim(partial(FAGH, lr=0.3, rho=0.5), 12, ONE),
    "FAGH, momentum probe": Victim(
        partial(FAGH, lr=0.3, rho=0.5, probe="momentum"), 12, ONE
    ),
    "SCAFFOLD": Victim(Scaffold, 8, FAST),
    "FedAvg": Victim(FedAvg, 6, ONE),
    "AFL": Victim(AFL),
    "TCT": Victim(
        partial(TCT, stage1_rounds=2, num_features=40, local_steps=50), 5, ONE
    ),
}
# All other merges: each solver for each structure and aggregate. K-FAC needs an anchor
# with the strict policy.
for solver in ("cg", "adam", "gd"):
    VICTIMS[f"FedFisher, {solver}"] = Victim(
        partial(lossless, merge=MergeOptions(solver=solver, anchor=0.03))
    )
for solver, aggregate in product(SOLVERS[1:], ("parts", "sums")):
    VICTIMS[f"FedFisher, diagonal, {aggregate}, {solver}"] = Victim(
        partial(lossless, structure="diagonal", aggregate=aggregate, solver=solver)
    )


# The clients


def make_app(victim, state_dir, attack=None, kinds=("train",)):
    """Six clients; the hostile one's replies go through an attack.

    What an honest client has answered is not computed again for another attack.
    """

    def make(partition):
        shares = [1.0, 1.0, 1.0]
        shares[partition % 3] = 2.0
        data = TensorDataset(*points(partition, 60 + 6 * partition, tuple(shares)))
        loader = DataLoader(data, batch_size=16)
        return FisherClient(
            make_model(victim.model),
            loader,
            loader,
            train_fn=victim.train,
            device="cpu",
            state_dir=state_dir,
        )

    made_of = repr(victim.train), victim.model
    app = Remembering(app_by_partition(make), lambda partition: made_of)

    class Hostile(ClientApp):
        def __call__(self, message, context):
            reply = app(message, context)
            mine = context.node_config["partition-id"] == HOSTILE
            if attack and mine and message.metadata.message_type in kinds:
                attack(reply.content, message.content)
            return reply

    return Hostile()


def start(name, app, **options):
    """Run a victim's strategy on the clients of :func:`make_app`."""
    victim = VICTIMS[name]
    rounds = options.pop("rounds", None) or victim.rounds
    strategy = victim.make(min_train_nodes=CLIENTS - 1, **options)
    model = ArrayRecord(shared_state(make_model(victim.model)))
    return strategy.start(LocalGrid(app, CLIENTS, seed=1), model, num_rounds=rounds)


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    harm: str  # empty: none
    log: str
    accuracy: float = 0.0
    metrics: Mapping[int, Any] = field(default_factory=dict)  # of each round


def run(name, attack=None, kinds=("train",), **options):
    """Run a strategy with a hostile client, by default under the strict policy."""
    victim, lines = VICTIMS[name], []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("flwr")
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        with tempfile.TemporaryDirectory() as folder:
            app = make_app(victim, folder, attack, kinds)
            result = start(name, app, **{"policy": STRICT, **options})
    except Exception as error:
        return Outcome(f"ended: {type(error).__name__}: {error}", "\n".join(lines))
    finally:
        logger.removeHandler(handler)
    log, correct = "\n".join(lines), accuracy(result.arrays, victim.model)
    tensors = result.arrays.to_torch_state_dict()
    honest = [f"partition-{i}" for i in range(CLIENTS) if i != HOSTILE]
    harm = ""
    if not all(v.isfinite().all() for v in tensors.values() if v.is_floating_point()):
        harm = "a parameter is not finite"
    elif lost := [h for h in honest if re.search(rf"left out .*\b{h}\b", log)]:
        harm = f"lost {lost}"
    elif attack and correct < ENOUGH * honest_accuracy(name, **options):
        harm = f"accuracy {correct:.3f}"
    return Outcome(harm, log, correct, result.train_metrics_clientapp)


@cache
def honest_accuracy(name, **options):
    """What the strategy makes of six honest clients."""
    outcome = run(name, **options)
    assert not outcome.harm, outcome
    return outcome.accuracy


# The attacks, on what the client answers; they know what it was sent

NETWORK = r"^(\d+\.(weight|bias|running_.*))$|^params/|^fisher-params/"
CURVATURE = rf"^{PREFIX}(diagonal|kfac)|^fisher"
VECTORS = r"^(gradient|hvp|direction|control.*|product|displaced|change)/|^tct/"
ANY = rf"{NETWORK}|{VECTORS}"


def edit(pattern, change, kind="f"):
    """Change every array of floats, or of another kind, whose key matches."""

    def attack(content, sent=None):
        (record,) = content.array_records.values()
        for key in list(record):
            values = record[key].numpy()
            if re.search(pattern, key) and values.dtype.kind == kind:
                with np.errstate(all="ignore"):
                    changed = np.array(change(values), values.dtype, order="C")
                record[key] = Array(changed)

    return attack


def repacked(attack):
    """Unpack an upload, change it, and pack it again."""
    like = shared_state(make_model())
    codec = resolve(Codec(budget=4.0), like)

    def changed(content, sent=None):
        (key,) = content.array_records
        packed, told = split_not_sent(content.array_records[key])
        upload = FisherUpload.from_arrays(packed, like, codec)
        content[key] = FisherUpload(upload.params, upload.curvature.made()).to_arrays()
        attack(content, sent)
        if len(content.array_records) == 1:
            plain = FisherUpload.from_arrays(content.array_records[key], like)
            content[key] = with_not_sent(plain.to_arrays(codec), told)

    return changed


def adds(count, key="k{}"):
    """Send so many small arrays more."""

    def attack(content, sent=None):
        ((name, record),) = content.array_records.items()
        tiny = Array(np.zeros(1, np.float32))
        more = {key.format(i): tiny for i in range(count)}
        content[name] = ArrayRecord({**record, **more})

    return attack


def says(**metrics):
    """Report other metrics."""

    def attack(content, sent=None):
        (record,) = content.metric_records.values()
        record.update({key.replace("_", "-"): v for key, v in metrics.items()})

    return attack


def both(*attacks):
    """Do one after another."""

    def attack(content, sent=None):
        for each in attacks:
            each(content, sent)

    return attack


def noise(values):
    """Random numbers of the array's shape, the same for the same shape."""
    return np.random.default_rng(values.size).standard_normal(values.shape)


def identity(values):
    """The identity where there are square matrices, else ones."""
    square = values.ndim > 1 and values.shape[-1] == values.shape[-2]
    return values * 0 + (np.eye(values.shape[-1]) if square else 1)


LONG_KEY = "\n\x1b[2J\x07 INFO: merged" * 50_000  # a megabyte of control characters


def raising(content, sent=None):
    """An error whose text is a megabyte of line breaks and control characters."""
    raise ValueError(LONG_KEY)


def counting(batches):
    """Say that there were that many batches."""
    return edit("batches", lambda a: a * 0 + batches, kind="i")


RANDOM = edit(ANY, noise)
MANY_RANDOM = both(RANDOM, says(num_examples=10**9))
