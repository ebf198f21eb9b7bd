"""Federations of six with a hostile client, and what harm it does.

Six clients learn to tell three clouds of points apart. Each run has one client that
sends something else than what it computed, in every reply; its victim is a strategy. A
run is harmed if it ended, if an honest upload was lost, if a parameter is not finite,
or if its accuracy fell below 0.9 of the honest run's. ``benchmarks/hostile_runs.py``
takes all of them, and tests take some.
"""

import logging
import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import Remembering

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import (
    AFL,
    FAGH,
    TCT,
    CurvatureStrategy,
    FedAvg,
    FedFish,
    FedFisherOneShot,
    Policy,
    Scaffold,
)
from flwr_fisher.tangent import TCTModel
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import PREFIX, Codec, FisherUpload, resolve

PACKED = "FedFisher, packed"
CLIENTS, HOSTILE = 6, 2  # and which of them is hostile
ENOUGH = 0.9  # of the honest run's accuracy
STRICT = Policy.strict()

SENT = {}  # the arrays that the reply under attack answers


# What they learn


def points(seed, n, shares):
    """``n`` points of three clouds in four dimensions, in these shares."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3.0 * torch.eye(4)[:3]
    y = torch.multinomial(torch.tensor(shares), n, True, generator=generator)
    return centres[y] + torch.randn(n, 4, generator=generator), y


def make_model(normalised=False):
    """A small network, with a batch norm if wanted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        middle = [nn.BatchNorm1d(16)] if normalised else []
        return nn.Sequential(nn.Linear(4, 16), *middle, nn.ReLU(), nn.Linear(16, 3))


@cache
def test_points():
    return points(99, 900, (1.0, 1.0, 1.0))


def accuracy(arrays, normalised):
    """How many of the test points a result's arrays tell right."""
    tensors = arrays.to_torch_state_dict()
    model = make_model(normalised)
    if any(key.startswith("tct/") for key in tensors):
        model = TCTModel.from_tensors(model, tensors)
    else:
        model.load_state_dict(tensors)
    model.eval()
    x, y = test_points()
    with torch.no_grad():
        return float((model(x).argmax(-1) == y).float().mean())


# The strategies


@dataclass(frozen=True)
class Victim:
    """A strategy, how many rounds it takes, and how its clients train."""

    make: Callable[..., CurvatureStrategy]
    rounds: int = 1
    train: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=10, lr=0.05))
    normalised: bool = False


ONE = LocalSGD(epochs=1, lr=0.05)
FAST = LocalSGD(epochs=1, lr=0.3, momentum=0.0)
lossless = partial(FedFisherOneShot, codec="lossless")
VICTIMS = {
    "FedFisher": Victim(lossless),
    "FedFisher, batch norm": Victim(lossless, normalised=True),
    PACKED: Victim(partial(FedFisherOneShot, codec=Codec(budget=4.0))),
    "FedFisher, diagonal": Victim(partial(lossless, structure="diagonal")),
    "FedFisher, sums": Victim(
        partial(lossless, structure="diagonal", aggregate="sums")
    ),
    "FedFisher, K-FAC sums": Victim(partial(lossless, aggregate="sums")),
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


# The clients


def make_app(victim, state_dir, attack=None, kinds=("train",)):
    """Six clients; the hostile one's replies go through an attack.

    What an honest client has answered is not computed again for another attack.
    """

    def client_fn(context):
        partition = int(context.node_config["partition-id"])
        shares = [1.0, 1.0, 1.0]
        shares[partition % 3] = 2.0
        data = TensorDataset(*points(partition, 60 + 6 * partition, tuple(shares)))
        loader = DataLoader(data, batch_size=16)
        return FisherClient(
            make_model(victim.normalised),
            loader,
            loader,
            train_fn=victim.train,
            device="cpu",
            state_dir=state_dir,
        )

    made_of = repr(victim.train), victim.normalised
    app = Remembering(make_client_app(client_fn), lambda partition: made_of)

    class Hostile(ClientApp):
        def __call__(self, message, context):
            reply = app(message, context)
            mine = context.node_config["partition-id"] == HOSTILE
            if attack and mine and message.metadata.message_type in kinds:
                SENT.clear()
                for record in message.content.array_records.values():
                    SENT.update(record)
                attack(reply.content)
            return reply

    return Hostile()


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    harm: str  # empty: none
    accuracy: float
    log: str


class _Log(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def run(
    name, attack=None, kinds=("train",), policy=STRICT, rounds=None, fraction_evaluate=1
):
    """Run a strategy with a hostile client."""
    victim = VICTIMS[name]
    log, logger = _Log(), logging.getLogger("flwr")
    logger.addHandler(log)
    try:
        with tempfile.TemporaryDirectory() as folder:
            grid = LocalGrid(make_app(victim, folder, attack, kinds), CLIENTS, seed=1)
            start = ArrayRecord(shared_state(make_model(victim.normalised)))
            options = {"policy": policy, "fraction_evaluate": fraction_evaluate}
            strategy = victim.make(min_train_nodes=CLIENTS - 1, **options)
            result = strategy.start(grid, start, num_rounds=rounds or victim.rounds)
    except Exception as error:
        return Outcome(f"ended: {type(error).__name__}: {error}", 0.0, _text(log))
    finally:
        logger.removeHandler(log)
    correct = accuracy(result.arrays, victim.normalised)
    tensors = result.arrays.to_torch_state_dict()
    if not all(v.isfinite().all() for v in tensors.values() if v.is_floating_point()):
        return Outcome("a parameter is not finite", correct, _text(log))
    honest = [f"partition-{i}" for i in range(CLIENTS) if i != HOSTILE]
    lost = [h for h in honest if re.search(rf"left out .*\b{h}\b", _text(log))]
    if lost:
        return Outcome(f"lost {lost}", correct, _text(log))
    honest = partial(honest_accuracy, name, policy, rounds, fraction_evaluate)
    if attack and correct < ENOUGH * honest():
        return Outcome(f"accuracy {correct:.3f}", correct, _text(log))
    return Outcome("", correct, _text(log))


def _text(log):
    return "\n".join(log.lines)


@cache
def honest_accuracy(name, policy=STRICT, rounds=None, fraction_evaluate=1):
    """What the strategy makes of six honest clients."""
    options = {"rounds": rounds, "fraction_evaluate": fraction_evaluate}
    outcome = run(name, policy=policy, **options)
    assert not outcome.harm, outcome
    return outcome.accuracy


# The attacks, on records of plain arrays


def edit(pattern, change):
    """Change every float array whose key matches."""

    def attack(content):
        (record,) = content.array_records.values()
        for key in list(record):
            values = record[key].numpy()
            if re.search(pattern, key) and values.dtype.kind == "f":
                with np.errstate(all="ignore"):
                    changed = np.asarray(change(values)).astype(values.dtype)
                record[key] = Array(changed.reshape(values.shape))

    return attack


def says(**metrics):
    """Report other metrics."""

    def attack(content):
        (record,) = content.metric_records.values()
        record.update({key.replace("_", "-"): v for key, v in metrics.items()})

    return attack


def both(*attacks):
    """Do one after another."""

    def attack(content):
        for each in attacks:
            each(content)

    return attack


def noise(values, scale=1.0):
    """Random numbers of the array's shape, the same for the same shape."""
    generator = np.random.default_rng(values.size)
    return scale * generator.standard_normal(values.shape)


def identity(values):
    """The identity where there are square matrices, else ones."""
    square = values.ndim > 1 and values.shape[-1] == values.shape[-2]
    return values * 0 + (np.eye(values.shape[-1]) if square else 1)


def extra_keys(content, count=10**5):
    """A hundred thousand arrays more, or so many."""
    (record,) = content.array_records.values()
    tiny = Array(np.zeros(1, np.float32))
    content["arrays"] = ArrayRecord({**record, **{f"k{i}": tiny for i in range(count)}})


def extra_metrics(content):
    """A hundred thousand metrics more."""
    (record,) = content.metric_records.values()
    record.update({f"m{i}": 1.0 for i in range(10**5)})


def long_key(content):
    """An array whose name is a megabyte of line breaks and control characters."""
    (record,) = content.array_records.values()
    record["\n\x1b[2J\x07 INFO: merged" * 50_000] = Array(np.zeros(1, np.float32))


def raising(content):
    """An error whose text is a megabyte of line breaks and control characters."""
    raise ValueError("\n\x1b[2J\x07 INFO : aggregate_train: all is well" * 25_000)


def two_records(content):
    content["more"] = ArrayRecord({"w": Array(np.zeros(1, np.float32))})


def no_records(content):
    content.clear()


def repacked(attack):
    """Unpack an upload, change it, and pack it again."""
    like = shared_state(make_model())
    codec = resolve(Codec("fedavg", budget=4.0), like)

    def changed(content):
        (key,) = content.array_records
        record = content.array_records[key]
        upload = FisherUpload.from_arrays(record, like, codec)
        content[key] = FisherUpload(upload.params, upload.curvature.made()).to_arrays()
        attack(content)
        if len(content.array_records) == 1:
            plain = FisherUpload.from_arrays(content.array_records[key], like)
            content[key] = plain.to_arrays(codec)

    return changed


def counting(batches):
    """Say that there were that many batches."""

    def attack(content):
        (record,) = content.array_records.values()
        record["1.num_batches_tracked"] = Array(np.asarray(batches, np.int64))

    return attack


NETWORK = r"^(\d+\.(weight|bias|running_.*))$|^params/|^fisher-params/"
CURVATURE = rf"^{PREFIX}(diagonal|kfac)|^fisher"
SPECTRUM = CURVATURE
VECTORS = r"^(gradient|hvp|direction|control.*|product|displaced|change)/|^tct/"
ANY = rf"{NETWORK}|{VECTORS}"


def within_the_limits(content):
    """Say as much as the policy lets anyone say, and the opposite of what is true."""
    (record,) = content.array_records.values()
    for key in list(record):
        values, sent = record[key].numpy(), SENT.get(key)
        if not re.search(ANY, key) or values.dtype.kind != "f":
            continue
        start = sent.numpy() if sent is not None and sent.shape == values.shape else 0.0
        record[key] = Array((start - (values - start)).astype(values.dtype))
    (metrics,) = content.metric_records.values()
    metrics["num-examples"] = 75  # as the median client has


GENERAL = {
    "NaN": edit(ANY, lambda a: a * np.nan),
    "infinite": edit(ANY, lambda a: a + np.inf),
    "1e30": edit(ANY, lambda a: a * 0 + 1e30),
    "scaled by 1e4": edit(ANY, lambda a: 1e4 * a),
    "scaled by -1e4": edit(ANY, lambda a: -1e4 * a),
    "scaled by 20": edit(ANY, lambda a: 20 * a),
    "sign flipped": edit(ANY, lambda a: -a),
    "random": edit(ANY, noise),
    "zeros": edit(ANY, lambda a: 0 * a),
    "2^62 examples": says(num_examples=2**62),
    "2^62 examples, random": both(edit(ANY, noise), says(num_examples=2**62)),
    "2^62 examples, sign flipped": both(
        edit(ANY, lambda a: -a), says(num_examples=2**62)
    ),
    "1e9 examples": says(num_examples=10**9),
    "1e9 examples, random": both(edit(ANY, noise), says(num_examples=10**9)),
    "1e9 examples, sign flipped": both(
        edit(ANY, lambda a: -a), says(num_examples=10**9)
    ),
    "1e-30 examples": says(num_examples=1e-30),
    "-192 examples": says(num_examples=-192),
    "a list of examples": says(num_examples=[1, 2]),
    "100 000 keys": extra_keys,
    "100 000 metrics": extra_metrics,
    "a key of a megabyte": long_key,
    "an error of a megabyte": raising,
    "two ArrayRecords": two_records,
    "no record": no_records,
    "another metric": says(more=1.0),
    "a NaN metric": says(train_loss=math.nan),
}
OF_CURVATURE = {
    "F x 1e30": edit(SPECTRUM, lambda a: a * 1e15 * 1e15),
    "F = 1e30 I": edit(SPECTRUM, lambda a: 1e30 * identity(a)),
    "F x 1e6": edit(SPECTRUM, lambda a: a * 1e6),
    "F x 1e6, random": both(edit(NETWORK, noise), edit(SPECTRUM, lambda a: a * 1e6)),
    "F x 1e6, sign flipped": both(
        edit(NETWORK, lambda a: -a), edit(SPECTRUM, lambda a: a * 1e6)
    ),
    "F x 1e16, random": both(edit(NETWORK, noise), edit(SPECTRUM, lambda a: a * 1e8)),
    "F x 1e-20": edit(SPECTRUM, lambda a: a * 1e-20),
    "F = 0": edit(SPECTRUM, lambda a: a * 0),
    "F negative": edit(SPECTRUM, lambda a: -a),
    "F x 1e-6, random": both(edit(NETWORK, noise), edit(SPECTRUM, lambda a: a * 1e-6)),
}
OF_TCT = {
    "means of 1e300": edit(r"^tct/sum$", lambda a: a * 0 + 1e300),
    "means of 1e15": edit(r"^tct/sum$", lambda a: a * 0 + 1e15),
    "no deviation": edit(r"^tct/squares$", lambda a: a * 0),
    "deviation x 1e12": edit(r"^tct/squares$", lambda a: a * 1e12),
    "eigenvalue 1e300": edit(r"^tct/largest", lambda a: a * 0 + 1e300),
    "eigenvalue 1e9": edit(r"^tct/largest", lambda a: a * 0 + 1e9),
    "eigenvalue 0": edit(r"^tct/largest", lambda a: a * 0),
    "30 000 examples": says(num_examples=30_000),
}
OF_SUMS = {
    f"{which} {what}": edit(f"^head/{key}$", change)
    for which, key in {"moments": "gram", "labels": "cross", "both": ".*"}.items()
    for what, change in {
        "x -1": lambda a: -a,
        "x 20": lambda a: 20 * a,
        "x 1e4": lambda a: 1e4 * a,
        "x -1e4": lambda a: -1e4 * a,
        "of 1e30": lambda a: a * 0 + 1e30,
        "of 1e300": lambda a: a * 0 + 1e300,
        "random": noise,
        "of zero": lambda a: 0 * a,
    }.items()
}
OF_STATISTICS = {
    "negative variance": edit("running_var", lambda a: -100 * a),
    "one variance below zero": edit(
        "running_var", lambda a: np.where(a == a.min(), a - 10, a)
    ),
    "-37 batches": counting(-37),
    "2^62 batches": counting(2**62),
    "variance of 1e30": edit("running_var", lambda a: a * 0 + 1e30),
    "variance of 1e6": edit("running_var", lambda a: a * 0 + 1e6),
    "means of 1e6": edit("running_mean", lambda a: a * 0 + 1e6),
}


OF_EVALUATION = {
    "-192 examples": says(num_examples=-192),
    "2^62 examples": says(num_examples=2**62),
    "1e9 examples": says(num_examples=10**9),
    "a list as loss": says(loss=[1.0, 2.0]),
    "a NaN loss": says(loss=math.nan),
    "a loss of 1e300": says(loss=1e300),
    "another metric": says(more=1.0),
    "100 000 metrics": extra_metrics,
    "an error of a megabyte": raising,
    "no record": no_records,
}
OF_QUERIES = {
    "partition -5": says(partition_id=-5),
    "partition 2^62": says(partition_id=2**62),
    "a list of partitions": says(partition_id=[1, 2]),
    "100 000 metrics": extra_metrics,
    "an error of a megabyte": raising,
    "no record": no_records,
}


def cases():
    """Every strategy and kind of reply with every attack that means something to it."""
    found = []
    for name in VICTIMS:
        attacks = dict(GENERAL)
        if name.startswith("FedFisher") or name == "FedFish":
            attacks |= OF_CURVATURE
        if name == "TCT":
            attacks |= OF_TCT
        if name == "AFL":
            attacks |= OF_SUMS
        if "batch norm" in name:
            attacks |= OF_STATISTICS
        if name == PACKED:
            attacks = {k: repacked(v) for k, v in attacks.items()}
        every = {"train": attacks, "evaluate": OF_EVALUATION, "query": OF_QUERIES}
        found += [
            (name, kind, attack, act)
            for kind, own in every.items()
            for attack, act in own.items()
        ]
    return found
