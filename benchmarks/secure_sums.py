"""What a secure sum costs, beside Flower's own on the same work.

    python benchmarks/secure_sums.py [--clients 10 1000] [--parameters 44000 1000000]

One round of FedAvg over clients that have nothing to train, in one process, each with
its own arrays: ``FedAvg`` on the Message API, and Flower's legacy
``SecAggPlusWorkflow`` with ``secaggplus_mod``, with as many neighbours and the same
threshold. A client's seconds are those in its ``ClientApp``; the server's are all
others, with the serialisation of every message both ways. Bytes are what a client
sends, all stages together. Medians of three runs; where a run takes minutes, one. What
was measured before is taken from the cache; 1000 clients were measured beside other
work, which slowed both.

Flower's quantises to 22 bits in words of 32, within a range that is set beforehand
(here -8 to 8), and weights by examples; ours to 32 bits, with an exponent for each
tensor that clients agree on in two exchanges of their own, so that it has six exchanges
where Flower's has four.
"""

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as FlowersFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from harness.page import CACHE, blocks, opening, write_page
from harness.size import sized
from harness.tables import head, row

from flwr_fisher.client import identify
from flwr_fisher.secure import SecureSums, SecureSumsMod
from flwr_fisher.secure.aggregator import degree_for
from flwr_fisher.strategies import FedAvg
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import serialized_bytes

THRESHOLD, LONG = 0.55, 60.0  # seconds of a run that is not repeated


@dataclass
class Timed(ClientApp):
    """An app that counts its seconds, and its replies' bytes, by client."""

    app: ClientApp
    seconds: dict[int, float] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer, and count."""
        began = time.perf_counter()
        reply = self.app(message, context)
        took = time.perf_counter() - began
        node = context.node_id
        self.seconds[node] = self.seconds.get(node, 0.0) + took
        if message.metadata.message_type == "train":
            size = serialized_bytes(reply.content)
            self.sent[node] = self.sent.get(node, 0) + size
        return reply


def arrays_of(context: Context, parameters: int) -> np.ndarray:
    """Return a client's own numbers."""
    seed = int(context.node_config["partition-id"])
    return np.random.default_rng(seed).normal(size=parameters).astype(np.float32)


def neighbours_of(clients: int) -> int:
    """Return with how many others a client shares: Flower's ring wants even numbers."""
    return degree_for(clients, THRESHOLD) // 2 * 2


def ours(clients: int, parameters: int) -> tuple[Timed, float]:
    """Return our app after a round, and the round's seconds."""
    with TemporaryDirectory() as folder:
        app = ClientApp()

        @app.train(mods=[SecureSumsMod(state_dir=folder)])
        def train(message: Message, context: Context) -> Message:
            tensors = {"w": torch.from_numpy(arrays_of(context, parameters))}
            content = RecordDict({"arrays": ArrayRecord(tensors)})
            content["metrics"] = MetricRecord({"num-examples": 10})
            return Message(content, reply_to=message)

        app.query()(identify)
        timed = Timed(app)
        strategy = FedAvg(
            secure=SecureSums(threshold=THRESHOLD),
            fraction_evaluate=0.0,
            min_train_nodes=clients,
        )
        start = ArrayRecord({"w": torch.zeros(parameters)})
        began = time.perf_counter()
        strategy.start(LocalGrid(timed, clients), start, num_rounds=1)
        return timed, time.perf_counter() - began


def flowers(clients: int, parameters: int) -> tuple[Timed, float]:
    """Return Flower's app after a round, and the round's seconds."""

    class Client(NumPyClient):
        def __init__(self, context: Context) -> None:
            self.own = arrays_of(context, parameters)

        def fit(self, given: Any, config: Any) -> tuple[list[np.ndarray], int, dict]:
            return [self.own], 10, {}

    app = ClientApp(lambda c: Client(c).to_client(), mods=[secaggplus_mod])
    timed = Timed(app)
    strategy = FlowersFedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        initial_parameters=ndarrays_to_parameters([np.zeros(parameters, np.float32)]),
    )
    context = LegacyContext(
        Context(1, 0, {}, RecordDict(), {}), ServerConfig(num_rounds=1), strategy
    )
    shares = neighbours_of(clients) + 1
    workflow = SecAggPlusWorkflow(
        num_shares=shares,
        reconstruction_threshold=max(int(THRESHOLD * shares) + 1, 2),
        quantization_range=2**22,
    )
    began = time.perf_counter()
    DefaultWorkflow(fit_workflow=workflow)(LocalGrid(timed, clients), context)
    return timed, time.perf_counter() - began


def measured(
    run: Callable[[int, int], tuple[Timed, float]], *size: int
) -> dict[str, float]:
    """Return the medians of a client's and the server's seconds, and the bytes."""
    found: list[tuple[float, float, float]] = []
    while len(found) < 3:
        timed, seconds = run(*size)
        own = sum(timed.seconds.values())
        client = median(timed.seconds.values())
        found.append((client, seconds - own, median(timed.sent.values())))
        if seconds > LONG:
            break
    columns = zip(*found, strict=True)
    names = ("client", "server", "bytes")
    return {name: median(c) for name, c in zip(names, columns, strict=True)}


def kept(size: tuple[int, int]) -> list[dict[str, float]]:
    """Return both libraries' numbers, one after the other, or those in the cache."""
    path = CACHE / "secure_sums" / f"{'-'.join(map(str, size))}.json"
    if not path.exists():
        pair = [measured(run, *size) for run in (ours, flowers)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(pair))
    found: list[dict[str, float]] = json.loads(path.read_text())
    return found


def main() -> None:
    """Write the page."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "--clients", type=int, nargs="+", default=sized([10, 100, 1000], [10])
    )
    parser.add_argument(
        "--parameters", type=int, nargs="+", default=sized([44_000, 10**6], [1000])
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = head(
        "clients",
        "neighbours",
        "parameters",
        "a client, s: ours / Flower's",
        "the server, s: ours / Flower's",
        "a client's bytes / FedAvg's: ours / Flower's",
    )
    numbers = []
    for clients in options.clients:
        for parameters in options.parameters:
            neighbours = neighbours_of(clients)
            pair = kept((clients, parameters))
            fedavg = 4 * parameters
            lines.append(
                row(
                    str(clients),
                    str(neighbours),
                    f"{parameters:_}".replace("_", " "),
                    " / ".join(f"{own['client']:.3g}" for own in pair),
                    " / ".join(f"{own['server']:.3g}" for own in pair),
                    " / ".join(f"{own['bytes'] / fedavg:.2f}" for own in pair),
                )
            )
            print(lines[-1], flush=True)
            size = clients, parameters, neighbours
            numbers.append({"size": size, "ours": pair[0], "flowers": pair[1]})
            page = blocks(opening("What a secure sum costs", __doc__), lines)
            write_page("secure_sums", page, {"runs": numbers})


if __name__ == "__main__":
    main()
