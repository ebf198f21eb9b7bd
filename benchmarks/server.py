"""What a round costs the server beside Flower's FedAvg: 4 000 clients, no client work.

    python benchmarks/server.py [--tree CHECKOUT]

The model has 9 524 parameters: two convolutions and two linear layers for 28x28 images.
Twenty clients' replies are made once (generated images, 20 steps of training, K-FAC or
what else the strategy asks for), and the grid answers each of 4 000 messages with one
of them, serialised and read back as a SuperLink's would be. So a round is the server's
work alone: sampling, messages, decoding, checks, the step. What happens within the grid
is not counted, for no strategy. Flower's FedAvg gets the same clients' parameters as
plain arrays.

A strategy runs five rounds in a process of its own, on one thread; its milliseconds a
client are the median round's. In the first round, which is not among them, our
strategies also ask each client for its partition and what it trains. Memory is the
process's largest during a round, over what it held before the first. With ``--tree``
the same is measured of another checkout, in turns.
"""

import argparse
import ctypes
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from harness.canned import CannedGrid
from harness.page import blocks, opening, write_page
from harness.size import sized
from harness.tables import head, row
from harness.timing import where
from torch import nn

from flwr_fisher.curvature import fisher
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FAGH, FedFish, FedFisherOneShot
from flwr_fisher.wire import Additive, Codec, FisherUpload, resolve

ROOT = Path(__file__).parents[1]
CLIENTS, ROUNDS, CANNED = sized((4000, 5, 20), (50, 2, 3))
OURS = {
    "FedFisherOneShot": lambda: FedFisherOneShot(fraction_evaluate=0.0),
    "FedFish": lambda: FedFish(fraction_evaluate=0.0),
    "FAGH": lambda: FAGH(fraction_evaluate=0.0),
}
PEER = "FedAvg"  # Flower's
READING = """\
FedAvg adds up eight arrays a client. FedFisher's reply is as large, but made of codes
of a few bits: 2.4 ms of a client's time go to unpacking and checking them and to
measuring how far the client is from the others, 3.1 ms to the merge (both with the
garbage collector's half a millisecond). Of these, 1.1 ms make eight symmetric matrices
of codes, 0.5 ms are the products that say how a client weighs and 0.8 ms those of four
iterations for each of four layers; none of it can be done once for all clients, since a
sum of Kronecker products is not one. FedFish unpacks and checks as much and sums entry
by entry; FAGH's replies are plain arrays, twice as large as FedAvg's. What a round
needs once (budgets, bounds, the layout of a curvature) is computed once, and its memory
is that of the uploads, whatever the round."""


def network() -> nn.Module:
    """Return the model."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 26),
        nn.ReLU(),
        nn.Linear(26, 10),
    )


def reply(strategy: str, seed: int) -> ArrayRecord:
    """Return the arrays of a client that trained for a moment."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 32, 1, 28, 28, generator=generator)
    y = torch.randint(10, (20, 32), generator=generator)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in zip(x, y, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    params = shared_state(model)
    if strategy == PEER:
        return ArrayRecord(params)
    if strategy == "FAGH":  # what the numbers are changes nothing
        return Additive({"gradient": params, "hvp": params}).to_arrays()
    structure = "kfac" if strategy == "FedFisherOneShot" else "diagonal"
    curvature = fisher(model, list(x[:8]), structure=structure)
    codec = resolve(Codec("auto"), params)
    return FisherUpload(params, curvature).to_arrays(codec)


class Clock:
    """An ``evaluate_fn``: notes when a round ended, and the memory that it took."""

    def __init__(self, grid: CannedGrid) -> None:
        self.grid = grid
        self.ends: list[float] = []
        self.peaks: list[int] = []
        self.held: list[int] = []

    def __call__(self, server_round: int, arrays: ArrayRecord) -> None:
        """Note the seconds so far without the grid's, and start the next peak."""
        self.ends.append(time.process_time() - self.grid.spent)
        self.peaks.append(resident("VmHWM"))
        ctypes.CDLL(None).malloc_trim(0)
        self.held.append(resident("VmRSS"))
        Path("/proc/self/clear_refs").write_text("5")

    def numbers(self, count: int) -> dict[str, Any]:
        """Return milliseconds a client and MB, by round."""
        took = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        start = self.held[0]
        return {
            "ms": [1e3 * each / count for each in took],
            "peak-mb": [(peak - start) / 1e6 for peak in self.peaks[1:]],
            "after-mb": [(held - start) / 1e6 for held in self.held[1:]],
        }


def resident(field: str) -> int:
    """Return a figure of this process's memory in bytes; Linux alone tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def measure(strategy: str, count: int, rounds: int) -> dict[str, Any]:
    """Return what a strategy's rounds take, in this process."""
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    metrics = ({"num-examples": 100 + seed, "loss": 1.0} for seed in range(CANNED))
    grid = CannedGrid(
        count,
        [
            RecordDict({"arrays": reply(strategy, seed), "metrics": MetricRecord(own)})
            for seed, own in enumerate(metrics)
        ],
        trained=shared_state(network()),
    )
    made: Callable[[], FedAvg] = OURS.get(
        strategy, lambda: FedAvg(fraction_evaluate=0.0)
    )
    clock = Clock(grid)
    initial = ArrayRecord(shared_state(network()))
    made().start(grid, initial, num_rounds=rounds, evaluate_fn=clock)
    sent = sum(len(array.data) for array in grid.replies[0]["arrays"].values())
    return clock.numbers(count) | {"kb": sent / 1e3}


def elsewhere(tree: Path, strategy: str, count: int, rounds: int) -> dict[str, Any]:
    """Return what :func:`measure` does in a fresh process, of a checkout's package."""
    path = os.pathsep.join([str(tree), str(Path(__file__).parent)])
    sizes = ["--clients", str(count), "--rounds", str(rounds)]
    command = [sys.executable, __file__, "--measure", strategy, *sizes]
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def median_ms(found: dict[str, Any]) -> float:
    """Return the median round's milliseconds a client; not the first round's."""
    return statistics.median(found["ms"][1:] or found["ms"])


def table(found: dict[str, dict[str, Any]], peer: dict[str, Any]) -> Iterator[str]:
    """Yield a row for each strategy, beside Flower's FedAvg."""
    names = ("strategy", "kB a reply", "ms a client", "times FedAvg's")
    yield from head(*names, "first round, ms", "peak MB a round", "MB after it")
    for name, each in found.items():
        took = median_ms(each)
        yield row(
            name,
            f"{each['kb']:.0f}",
            f"{took:.2f}",
            f"{took / median_ms(peer):.1f}",
            f"{each['ms'][0]:.2f}",
            ", ".join(f"{mb:.0f}" for mb in each["peak-mb"]),
            ", ".join(f"{mb:.0f}" for mb in each["after-mb"]),
        )


def main() -> None:
    """Write the table and the numbers; or, within, measure one strategy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tree", type=lambda given: Path(given).resolve())
    parser.add_argument("--measure", choices=[*OURS, PEER], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.clients, options.rounds)))
        return
    trees = {"": ROOT} | ({", before": options.tree} if options.tree else {})
    found = {}
    for name in (PEER, *OURS):
        for label, tree in trees.items():
            if name == PEER and label:
                continue
            key = f"{name}{label}" if name in OURS else "Flower's FedAvg"
            found[key] = elsewhere(tree, name, options.clients, options.rounds)
            print(key, found[key], flush=True)
    measured = (
        f"Measured on {where()}; {options.clients} clients, {options.rounds} rounds."
    )
    peer = found["Flower's FedAvg"]
    lines = blocks(
        opening("What a round costs the server", __doc__),
        measured,
        list(table(found, peer)),
        READING,
    )
    write_page("server", lines, found)


if __name__ == "__main__":
    main()
