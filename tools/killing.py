"""Kill servers and clients with ``kill -9``, and start them again until they finish.

``python tools/killing.py FOLDER --random 100`` prints a line of JSON for each trial.
Modules are imported once: each start of a server is a fork of this process, and where a
client may die, each training is a fork of the server's process.
"""

import argparse
import gc
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Error, Message
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

sys.path += [str(Path(__file__).parents[1] / name) for name in ("tests", "benchmarks")]

from kinds import KINDS
from rivals import FedGA
from virtual import tiny_arrays, tiny_data, tiny_model

from flwr_fisher import files
from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.client.jobs import train
from flwr_fisher.client.outbox import Outbox, TrainingCheckpoint
from flwr_fisher.curvature import losses
from flwr_fisher.errors import RoundError
from flwr_fisher.flower_internals import ErrorCode
from flwr_fisher.server.journal import ExchangeJournal, Journal
from flwr_fisher.server.mailbox import Mailbox
from flwr_fisher.server.round import ExchangeRun
from flwr_fisher.strategies import TCT, CurvatureStrategy, FedFish, FedFisherOneShot
from flwr_fisher.testing import LocalGrid

CLIENTS, ROUNDS, EPOCHS = 2, 2, 2
FAILED = 3  # exit status: a round failed
LIVES = 20  # of a trial, at most

# Where a process dies: whose, what is patched, and whether before or after the call.
POINTS: dict[str, tuple[str, object, str, str]] = {
    "before an exchange is recorded": ("server", ExchangeJournal, "note", "before"),
    "when the requests are sent": ("server", Mailbox, "send", "after"),
    "before an upload is kept": ("server", ExchangeJournal, "save", "before"),
    "while a file is written": ("server", files.os, "fsync", "before"),
    "when a file is written": ("server", Journal, "write", "after"),
    "when an upload is kept": ("server", ExchangeJournal, "save", "after"),
    "before the step": ("server", ExchangeRun, "step", "before"),
    "after the step": ("server", ExchangeRun, "close", "before"),
    "when an exchange is closed": ("server", ExchangeRun, "close", "after"),
    "before a round is written": ("server", Journal, "finish", "before"),
    "when a round is written": ("server", Journal, "finish", "after"),
    "before a training": ("client", Outbox, "reply", "after"),
    "within an epoch": ("client", losses.F, "cross_entropy", "before"),
    "before an epoch is kept": ("client", TrainingCheckpoint, "save", "before"),
    "when an epoch is kept": ("client", TrainingCheckpoint, "save", "after"),
    "before the Fisher": ("client", train, "fisher", "before"),
    "before a client keeps its upload": ("client", Outbox, "keep", "before"),
    "when a client has kept its upload": ("client", Outbox, "keep", "after"),
}


class ForkedGrid(LocalGrid):
    """Each training is a process, which may outlive the server's.

    Where no client is to die (`in_client` is None), the server's process trains: a fork
    costs as much as the training.
    """

    def __init__(
        self, *args: Any, where: Path, in_client: Callable[[], None] | None
    ) -> None:
        super().__init__(*args)
        self.where, self.in_client = where, in_client

    def _handle(self, message: Message) -> Message:
        if message.metadata.message_type != "train" or self.in_client is None:
            return super()._handle(message)
        receiver, sender = os.pipe()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                os.close(receiver)
                self.in_client()
                reply = super()._handle(message)
                content = recorddict_to_proto(reply.content).SerializeToString()
                with os.fdopen(sender, "wb") as pipe:
                    pipe.write(content)
                status = 0
            finally:
                os._exit(status)
        (self.where / "client.pid").write_text(str(pid))
        os.close(sender)
        with os.fdopen(receiver, "rb") as pipe:
            content = pipe.read()
        os.waitpid(pid, 0)
        (self.where / "client.pid").unlink(missing_ok=True)
        if not content:
            error = Error(ErrorCode.CLIENT_APP_CRASHED, "ClientApp crashed")
            return Message(error, reply_to=message)
        proto = RecordDictProto.FromString(content)
        return Message(recorddict_from_proto(proto), reply_to=message)


class Noted(LocalSGD):
    """Notes each epoch that it finishes, in one file for all lives."""

    where: Path | None = None
    partition: int = 0

    def __call__(
        self,
        model: Any,
        loader: Any,
        device: Any,
        config: Any,
        *,
        checkpoint: Any = None,
        **options: Any,
    ) -> dict[str, float]:
        def note(epoch: int, loss: float) -> None:
            assert self.where is not None
            with (self.where / "epochs.log").open("a") as file:
                file.write(f"{config['server-round']} {self.partition} {epoch}\n")

        loop = LocalSGD(epochs=self.epochs, lr=self.lr, momentum=0, on_epoch=note)
        options["checkpoint"] = checkpoint
        return loop(model, loader, device, config, **options)


def app_of(where: Path) -> Any:
    """Clients on whose disks a folder stands in."""

    def client_fn(context: Context) -> FisherClient:
        partition = int(context.node_config["partition-id"])
        train_fn = Noted(
            epochs=EPOCHS, lr=0.1, momentum=0, where=where, partition=partition
        )
        loader = DataLoader(tiny_data(partition), batch_size=4, shuffle=True)
        state_dir = where / "clients"
        return FisherClient(
            tiny_model(), loader, train_fn=train_fn, device="cpu", state_dir=state_dir
        )

    return make_client_app(client_fn)


STRATEGIES: dict[str, Callable[..., CurvatureStrategy]] = {
    "fedfisher": partial(FedFisherOneShot, refine=None),
    "fedfish": partial(FedFish, fisher_source="last-epoch"),
    "fedga": partial(FedGA, beta=0.1),
    **{  # whose clients remember
        name.lower(): kind
        for name, kind in KINDS.items()
        if kind().initial_groups() and kind is not TCT  # of more rounds
    },
}


def life(
    where: Path, in_server: Callable[[], None], in_client: Callable[[], None] | None
) -> int:
    """Be a server, from start or resumed; return the exit status."""
    in_server()
    grid = ForkedGrid(app_of(where), CLIENTS, where=where, in_client=in_client)
    strategy = STRATEGIES[(where / "strategy.txt").read_text()](
        min_train_nodes=CLIENTS, fraction_evaluate=0.0
    )
    try:
        result = strategy.start(
            grid,
            tiny_arrays(),
            num_rounds=ROUNDS,
            checkpoint_dir=where / "run",
            resume=True,
        )
    except RoundError:
        return FAILED
    save_file(result.arrays.to_torch_state_dict(), where / "result.safetensors")
    history = {r: dict(m) for r, m in result.train_metrics_clientapp.items()}
    (where / "history.json").write_text(json.dumps(history, sort_keys=True))
    return 0


def die_at(point: str, count: int) -> Callable[[], None]:
    """Patch a function so that its `count`-th call is the process's last."""
    _, owner, name, when = POINTS[point]
    original, calls = getattr(owner, name), 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return lambda: setattr(owner, name, patched)


def nothing() -> None:
    """Do not die."""


def begin(
    where: Path, in_server: Callable[[], None], in_client: Callable[[], None] | None
) -> int:
    """Fork a life; return its process."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            status = life(where, in_server, in_client)
        finally:
            os._exit(status)
    return pid


def finish(where: Path, lives: int, in_client: Callable[[], None] | None = None) -> int:
    """Start lives until one ends well; return how many there were."""
    for number in range(lives, LIVES):
        _, status = os.waitpid(begin(where, nothing, in_client), 0)
        if status == 0:
            return number + 1
        if not os.WIFEXITED(status) or os.WEXITSTATUS(status) != FAILED:
            raise RuntimeError(f"a life ended with status {status}")
    raise RuntimeError("it does not end")


def named(where: Path, point: str, count: int) -> dict[str, Any]:
    """Die at a point, and go on."""
    plan, whose = die_at(point, count), POINTS[point][0]
    hooks = (plan, None) if whose == "server" else (nothing, plan)
    _, status = os.waitpid(begin(where, *hooks), 0)
    died = os.WIFSIGNALED(status) or (
        os.WIFEXITED(status) and os.WEXITSTATUS(status) == FAILED
    )
    return {"point": point, "died": died, "lives": finish(where, 1)}


def at_random(where: Path, rng: random.Random, seconds: float) -> dict[str, Any]:
    """Be killed at random moments, the server or the client that trains, and go on."""
    kills = 0
    for lives in range(rng.randint(1, 3)):
        pid = begin(where, nothing, nothing)
        time.sleep(rng.uniform(0, seconds))
        victim, client = pid, where / "client.pid"
        if rng.random() < 0.5 and client.exists():
            try:
                victim = int(client.read_text())
            except (ValueError, OSError):
                victim = pid
        try:
            os.kill(victim, signal.SIGKILL)
            kills += 1
        except ProcessLookupError:
            pass
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) not in (0, FAILED):
            raise RuntimeError(f"life {lives} ended with status {status}")
    return {"point": "random", "kills": kills, "lives": finish(where, lives + 1)}


def outcome(where: Path) -> dict[str, Any]:
    """What a finished trial left."""
    epochs = (where / "epochs.log").read_text().split("\n")[:-1]
    return {
        "model": {
            k: v.tolist() for k, v in load_file(where / "result.safetensors").items()
        },
        "history": json.loads((where / "history.json").read_text()),
        "twice": sorted({line for line in epochs if epochs.count(line) > 1}),
        "epochs": len(epochs),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trials; print how each one ended beside the uninterrupted run.

    A test calls it twice in one process, which imports all once.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--named", type=int, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=sorted(STRATEGIES), default="fedfisher")
    options = parser.parse_args(arguments)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    def trial(name: str, run: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        where = options.folder / name
        where.mkdir(parents=True)
        (where / "strategy.txt").write_text(options.strategy)
        return {**run(where), **outcome(where)}

    # What a run imports as it goes is imported once, too.
    (options.folder / "warm-up").mkdir(parents=True)
    grid = LocalGrid(app_of(options.folder / "warm-up"), CLIENTS)
    STRATEGIES[options.strategy](fraction_evaluate=0.0).start(grid, tiny_arrays())
    gc.collect()
    gc.freeze()  # a fork's collections would write to all pages that it shares
    began = time.monotonic()
    whole = trial("whole", lambda where: {"lives": finish(where, 0, nothing)})
    seconds = time.monotonic() - began
    rng = random.Random(options.seed)
    runs: list[Callable[[Path], dict[str, Any]]] = [
        lambda where, p=point, n=count: named(where, p, n)  # type: ignore[misc]
        for count in options.named
        for point in POINTS
    ]
    runs += [lambda where: at_random(where, rng, seconds)] * options.random
    print(json.dumps({"point": "none", "seconds": seconds, **_verdict(whole, whole)}))
    for number, run in enumerate(runs):
        print(json.dumps(_verdict(trial(str(number), run), whole)))
        sys.stdout.flush()


def _verdict(found: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    same = {f"same-{k}": found[k] == whole[k] for k in ("model", "history")}
    rest = {k: v for k, v in found.items() if k not in ("model", "history")}
    return {**rest, **same}


if __name__ == "__main__":
    main()
