"""How long it takes to pack and unpack an upload, in local epochs."""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.clients import CPU
from harness.page import blocks
from harness.size import sized
from harness.tables import head, row
from harness.timing import Batches, generated, seconds
from harness.uploads import Setting, posteriors
from tasks import make_model
from torch import nn

from flwr_fisher.client.training import Loader, LocalSGD
from flwr_fisher.curvature import fisher
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import shared_state
from studies.codec.accuracy import FULL, KFAC, PAPER, Find, pack, unpack

TIMED = {name: KFAC[name] for name in (FULL, "packed, 0.55", PAPER)}
EXAMPLES = 12_000
GENERATED, RUNS = sized((3_000, 5), (200, 1))


@dataclass
class Client:
    """What the times are measured on."""

    model: nn.Module
    loader: Loader
    posterior: LocalPosterior


def clients(data_dir: Path) -> Iterator[tuple[str, Client]]:
    """Yield a client of each model."""
    setting = Setting("mnist", "lenet", 0.1, 0)
    task = setting.task(data_dir)
    all_clients = posteriors(setting, task)
    index = min(
        range(setting.clients), key=lambda i: abs(task.num_examples(i) - EXAMPLES)
    )
    model, chosen = task.make_model(), all_clients[index]
    model.load_state_dict(chosen.params)
    yield "LeNet, MNIST", Client(model, task.train_loader(index, 64), chosen)

    x, y = generated(GENERATED)
    model = make_model("cnn", shape=(3, 32, 32), num_classes=10)
    torch.manual_seed(0)
    LocalSGD()(model, Batches(x, y, 64), CPU, {})
    curvature = fisher(model, Batches(x[:2048], y[:2048], 256), structure="kfac")
    chosen = LocalPosterior(shared_state(model), curvature, GENERATED)
    yield "CNN, CIFAR-10's shape", Client(model, Batches(x, y, 64), chosen)


@contextmanager
def decompositions() -> Iterator[list[float]]:
    """Collect the seconds spent in torch's eigh and svd."""
    took: list[float] = []
    own = {name: getattr(torch.linalg, name) for name in ("eigh", "svd")}

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = work(*args, **kwargs)
            took.append(time.perf_counter() - began)
            return result

        return call

    for name, work in own.items():
        setattr(torch.linalg, name, timed(work))
    try:
        yield took
    finally:
        for name, work in own.items():
            setattr(torch.linalg, name, work)


def made(arrived: LocalPosterior) -> None:
    """Make all that an upload stands for, as a merge does."""
    dict(arrived.params)
    arrived.curvature.made()


def measure(client: Client) -> Find:
    """Return the median seconds of an epoch, and of every codec's two ways."""
    sent = client.posterior
    state = {k: v.clone() for k, v in client.model.state_dict().items()}
    times: dict[tuple[str, str], list[float]] = {}
    for run in range(RUNS + 1):
        took = {
            ("epoch", "epoch"): seconds(
                lambda: LocalSGD()(client.model, client.loader, CPU, {})
            )
        }
        client.model.load_state_dict(state)
        for name, codec in TIMED.items():
            with decompositions() as inside:
                took[name, "encode"] = seconds(lambda c=codec: pack(sent, c))
                took[name, "decompositions"] = sum(inside)
            record = pack(sent, codec)
            took[name, "decode"] = seconds(
                lambda r=record, c=codec: made(unpack(r, sent, c))
            )
        if run:  # the first one warms up
            for key, value in took.items():
                times.setdefault(key, []).append(value)
    found: Find = {}
    for (name, what), values in times.items():
        found.setdefault(name, {})[what] = statistics.median(values)
    return found


def measure_all(data_dir: Path) -> dict[str, Find]:
    """Return the times of both models, on one thread."""
    found = {}
    for title, client in clients(data_dir):
        found[title] = took = measure(client)
        took["epoch"]["examples"] = client.posterior.num_examples
        print(title, json.dumps(took), flush=True)
    return found


def times_section(found: Mapping[str, Find]) -> list[str]:
    """Return a table for each model and number of threads."""
    shown: list[str | list[str]] = []
    for title, took in found.items():
        epoch, examples = took["epoch"]["epoch"], took["epoch"]["examples"]
        about = f"an epoch of {examples} examples takes {epoch:.2f} s."
        shown += [f"{title}: {about}", time_table(took)]
    return blocks(*shown)


def time_table(found: Find) -> list[str]:
    """Return the lines of one model's table."""
    times = "packing, ms", "unpacking, ms", "both, % of an epoch"
    lines = head("codec", *times, "eigh and svd, % of packing")
    for name in TIMED:
        took = found[name]
        both = 100 * (took["encode"] + took["decode"]) / found["epoch"]["epoch"]
        share = 100 * took["decompositions"] / took["encode"]
        ways = (f"{1e3 * took[way]:.1f}" for way in ("encode", "decode"))
        shown = f"{both:.1f}" if both < 10 else f"**{both:.1f}: above 10**"
        lines.append(row(name, *ways, shown, f"{share:.0f}"))
    return lines
