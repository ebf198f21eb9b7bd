"""What a server's round costs for each client, beside Flower's FedAvg.

    python benchmarks/server.py

A convolutional network of 9 524 parameters, and uploads as `FisherClient` makes them by
default, of 20 clients that others repeat. Each client's reply takes Flower's way from
bytes to a message. *CPU time* is that of the server's process for a round, without what
the clients and the grid take, divided by the number of clients, in one thread: the
median of the rounds after the first of three runs, the strategies in turns. *In
FedAvg's* is its ratio to FedAvg's. FedFisher is the merge alone: what follows it
(`refine=`) is a sum and a few numbers for each client.
"""

import logging
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from harness.page import blocks, opening, write_page
from harness.size import sized
from harness.tables import head, row
from harness.timing import where
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.flower_internals import round_trip
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FAGH, FedFish, FedFisherOneShot
from flwr_fisher.testing import LocalGrid

CLIENTS, ROUNDS, KINDS = sized(4000, 6), sized(3, 3), sized(20, 3)
TURNS = 3
STRATEGIES: dict[str, Any] = {
    "FedAvg (Flower's)": lambda: FedAvg(fraction_evaluate=0.0),
    "FedFisher": lambda: FedFisherOneShot(fraction_evaluate=0.0, refine=None),
    "FedFish": lambda: FedFish(fraction_evaluate=0.0),
    "FAGH": lambda: FAGH(fraction_evaluate=0.0),
}


def network() -> nn.Module:
    """Return the network, with the same values each time."""
    torch.manual_seed(0)
    pool = nn.ReLU(), nn.MaxPool2d(2)
    convolutions = nn.Conv2d(1, 6, 5), *pool, nn.Conv2d(6, 16, 5), *pool
    return nn.Sequential(
        *convolutions, nn.Flatten(), nn.Linear(256, 26), nn.ReLU(), nn.Linear(26, 10)
    )


def client_fn(context: Context) -> FisherClient:
    """Return one of a few clients, with random data."""
    seed = int(context.node_config["partition-id"]) % KINDS
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(640, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (640,), generator=generator)
    loader = DataLoader(TensorDataset(images, labels), 32)
    return FisherClient(network(), loader, train_fn=LocalSGD(epochs=1, lr=0.05))


class RepeatingGrid(LocalGrid):
    """A grid on which few clients train, and whose own time is counted."""

    spent, replies = 0.0, dict[tuple[int, str], RecordDict]()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Accept messages."""
        begun = time.process_time()
        ids = [*super().push_messages([*messages])]
        self.spent += time.process_time() - begun
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return up to a hundred replies."""
        begun, wanted = time.process_time(), set(message_ids)
        due = [each for each in self._waiting if each in wanted][:100]
        replies = [self._handle(self._waiting.pop(each)) for each in due]
        self.spent += time.process_time() - begun
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return all replies."""
        ids, replies = self.push_messages(messages), list[Message]()
        while found := self.pull_messages(ids):
            replies += found
        return replies

    def _handle(self, message: Message) -> Message:
        if message.metadata.message_type != "train":
            return super()._handle(message)
        job = [
            dict(each).get("job") for each in message.content.config_records.values()
        ]
        key = self.nodes[message.metadata.dst_node_id] % KINDS, str(job)
        if key not in self.replies:
            self.replies[key] = super()._handle(message).content
        return Message(round_trip(self.replies[key]), reply_to=message)


def milliseconds(make: Any) -> list[float]:
    """Return the CPU time of a client, of each round after the first."""
    RepeatingGrid.replies = {}
    grid = RepeatingGrid(make_client_app(client_fn), CLIENTS, seed=0)
    ends: list[float] = []

    def ended(server_round: int, arrays: ArrayRecord) -> None:
        ends.append(time.process_time() - grid.spent)

    start = ArrayRecord(shared_state(network()))
    make().start(grid, start, num_rounds=ROUNDS, evaluate_fn=ended)
    return [1e3 * (b - a) / CLIENTS for a, b in pairwise(ends)][1:]


def main() -> None:
    """Write the page."""
    ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rounds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for _ in range(TURNS):
        for name, make in STRATEGIES.items():
            rounds[name] += milliseconds(make)
    found = {name: statistics.median(every) for name, every in rounds.items()}
    unit = next(iter(found.values()))
    table = head("", "CPU time, ms", "in FedAvg's")
    table += [row(k, f"{ms:.2f}", f"{ms / unit:.1f}") for k, ms in found.items()]
    measured = f"Measured with {CLIENTS} clients, {where()}."
    parts = measured, "## A round, for each client", table
    lines = blocks(opening("A server's round", __doc__), *parts)
    write_page("server", lines, found)


if __name__ == "__main__":
    main()
