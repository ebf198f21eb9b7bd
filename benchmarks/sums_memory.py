"""How much memory a server needs to merge many clients from sums.

    python benchmarks/sums_memory.py [--clients 10 100 1000]

One round of ``FedFisherOneShot(aggregate="sums")``, K-FAC with four iterations, over
LeNet clients that all have replied before the server asks: it takes four replies at
once, and adds each up as it comes, since its policy limits nobody (a limit is a
multiple of a median, for which all uploads are held). Peaks are the process's (of pages
in memory, looked at each millisecond) above what it has before the round, after one
over three clients; each in a process of its own. A client's uploads are those of all
six exchanges, its largest the second one's: the layers' partial traces and the pull.
"""

import gc
import threading
import time
from argparse import ArgumentParser
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from harness.alone import Numbers, alone
from harness.canned import CannedGrid
from harness.page import blocks, opening, write_page
from harness.size import sized
from harness.tables import head, row
from tasks import make_model
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import FisherClient, LocalSGD
from flwr_fisher.flower_internals import round_trip
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FedFisherOneShot, Policy
from flwr_fisher.wire import serialized_bytes, split_config

_PAGE = 4096  # bytes
UNLIMITED = Policy(max_weight=inf, max_distance=inf)


class _SameReplies(CannedGrid):
    """Answers as one real client did, which is asked once for each exchange."""

    def __init__(self, client: FisherClient, count: int) -> None:
        super().__init__(
            count, [], [name for name, _ in client.problem.model.named_parameters()]
        )
        self._app, self._kept = client.as_client_app(), dict[str, RecordDict]()
        self.sizes = dict[str, int]()

    def _answer(self, message: Message) -> Message:
        if message.metadata.message_type == "query":
            self.replies = [RecordDict()]
            return super()._answer(message)
        options = split_config(next(iter(message.content.config_records.values())))[0]
        kind = f"{options['job']} {options.get('iteration', '')}"
        if kind not in self._kept:
            config: dict[str, Any] = {"partition-id": 0, "num-partitions": 1}
            context = Context(1, 1, config, RecordDict(), {})
            sent, message.content = message.content, round_trip(message.content)
            self._kept[kind] = self._app(message, context).content
            message.content = sent
            self.sizes[kind] = serialized_bytes(self._kept[kind])
        return Message(round_trip(self._kept[kind]), reply_to=message)


class _Peak:
    """Watches this process's memory."""

    def __init__(self) -> None:
        gc.collect()
        self._start = self._most = _resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.is_set():
            self._most = max(self._most, _resident())
            time.sleep(1e-3)

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._most - self._start


def _resident() -> int:
    return _PAGE * int(Path("/proc/self/statm").read_text().split()[1])


def peak_of(count: int) -> Numbers:
    """Return a round's peak, its seconds, and the sizes of a client's uploads."""
    model = make_model("lenet", shape=(1, 28, 28), num_classes=10)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 1, 28, 28, generator=generator)
    loader = DataLoader(TensorDataset(images, torch.arange(64) % 10), batch_size=16)
    with TemporaryDirectory() as folder:
        client = FisherClient(
            model, loader, train_fn=LocalSGD(lr=0.01, epochs=1), state_dir=folder
        )
        for clients in (3, count):
            grid = _SameReplies(client, clients)
            strategy = FedFisherOneShot(
                aggregate="sums", policy=UNLIMITED, fraction_evaluate=0.0
            )
            arrays = ArrayRecord(shared_state(model))
            began, peak = time.perf_counter(), _Peak()
            strategy.start(grid, arrays)
            most, seconds = peak.end(), time.perf_counter() - began
    return {"peak": most, "seconds": seconds, "sizes": list(grid.sizes.values())}


def main() -> None:
    """Write the page."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--clients", type=int, nargs="+", default=sized([10, 100, 1000], [10])
    )
    found = {count: alone(peak_of, count) for count in parser.parse_args().clients}
    lines = head(
        "clients", "peak, MB", "clients' uploads", "largest uploads", "seconds"
    )
    for count, numbers in found.items():
        peak, sizes = numbers["peak"], numbers["sizes"]
        every = (f"{peak / sum(sizes):.1f}", f"{peak / max(sizes):.1f}")
        lines.append(
            row(str(count), f"{peak / 1e6:.1f}", *every, f"{numbers['seconds']:.1f}")
        )
    write_page("sums_memory", blocks(opening("Memory of sums", __doc__), lines), found)


if __name__ == "__main__":
    main()
