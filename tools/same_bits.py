"""Compare all results with another commit, bit for bit, after a change that moves code.

    python tools/same_bits.py --against REV

Every strategy, option, structure, codec and app runs with virtual clients on tiny data,
here and in a copy of REV, in separate processes. The tool compares the digests of all
messages in both directions, of the model after each run, and of the metrics. It prints
the names of cases that differ, and its exit status is then 1. It uses only what the
README promises, so that it runs on both sides of a reorganisation.

`--messages uploads` leaves out the server's messages, if these are meant to change.
"""

import argparse
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from apps import globals_of, load

# Options of TCT that are in an object of their own since 0.3.
_REGRESSION = ("solver", "feature_dtype", "control_variates", "standardise")
ROOT = Path(__file__).resolve().parents[1]
APPS = ("fedfisher", "fedfish", "fagh", "tct")


# What is run


def cases(apps: Path) -> Iterator[tuple[str, Callable[[], dict[str, str]]]]:
    """Yield every case's name and what runs it; imports are the tree's in use."""

    from kinds import KINDS

    from flwr_fisher import strategies as s

    for structure in ("kfac", "diagonal"):
        for codec in ("lossless", "fedavg", "auto"):
            make = partial(s.FedFisherOneShot, structure=structure, codec=codec)
            yield f"fedfisher {structure} {codec}", partial(federation, make)
    for name, options in {
        "sampled": {"expectation": "sampled"},
        "empirical": {"expectation": "empirical"},
        "exact": {"tolerance": 0.0},
        "adam": {"solver": "adam", "iterations": 30},
        "gd": {"solver": "gd", "iterations": 30},
        "closed form": {"solver": "closed-form", "structure": "diagonal"},
        "sums": {"aggregate": "sums", "structure": "diagonal"},
        "half of them": {"fraction_train": 0.5, "fraction_evaluate": 0.5},
        "knobs": {"anchor": 0.2, "shrink": 0.4, "damping": 0.0, "balance": 0.5},
    }.items():
        make = partial(s.FedFisherOneShot, **in_objects(options))
        yield f"fedfisher {name}", partial(federation, make)
    for name, options in {
        "plain": {},
        "lossless": {"codec": "lossless"},
        "last epoch": {"fisher_source": "last-epoch", "reduction": "mean"},
        "adam": {"server_optimizer": "adam", "server_lr": 0.01},
    }.items():
        yield f"fedfish {name}", partial(federation, s.FedFish, **options)
    for probe in ("first", "random", "momentum", "none"):
        make = partial(s.FAGH, probe=probe, lr=0.05)
        yield f"fagh {probe}", partial(federation, make)
    for name, kind in KINDS.items():
        if name not in ("FedFisherOneShot", "FedFish", "FAGH", "TCT"):
            yield name.lower(), partial(federation, kind, momentum=0.0)
    half = partial(s.Scaffold, fraction_train=0.5)
    yield "scaffold half", partial(federation, half, momentum=0.0)
    for name, options in {
        "plain": {},
        "steps": {"solver": "steps", "feature_dtype": "float16"},
        "ablated": {"control_variates": False, "standardise": False, "lr": 1e-4},
        "half of them": {"fraction_train": 0.5, "min_train_nodes": 2},
    }.items():
        own = {k: v for k, v in options.items() if k in _REGRESSION}
        if own and hasattr(s, "Regression"):  # 0.2 takes them as keywords
            options = {k: v for k, v in options.items() if k not in own}
            options["regression"] = s.Regression(**own)
        make = partial(s.TCT, stage1_rounds=2, num_features=200, **options)
        yield f"tct {name}", partial(federation, make, rounds=5, momentum=0.0)
    for app in APPS:
        for method in app_methods(apps) if app == "fagh" else ("",):
            name = f"app {app} {method}".rstrip()
            yield name, partial(ready_app, apps / app, method)


def app_methods(apps: Path) -> tuple[str, ...]:
    """Return the methods that a tree's apps/fagh has."""
    methods: tuple[str, ...] = globals_of(apps / "fagh", "server")["METHODS"]
    return methods


def in_objects(options: dict[str, Any]) -> dict[str, Any]:
    """Return FedFisher's options as the tree in use has them, flat before 0.3."""
    from flwr_fisher import strategies as s

    if not hasattr(s, "MergeOptions"):
        return options
    kinds = {"fisher": s.FisherOptions, "merge": s.MergeOptions}
    own = dict(options)
    for name, kind in kinds.items():
        mine = {f.name: own.pop(f.name) for f in fields(kind) if f.name in own}
        own |= {name: kind(**mine)} if mine else {}
    return own


SMALL = {
    "fedfisher": {"local-epochs": 2},
    "fedfish": {"num-rounds": 3, "evaluate-every": 1},
    "fagh": {"num-rounds": 3, "local-epochs": 2, "iterations": 3},
    "tct": {"num-rounds": 5, "stage1-rounds": 2, "num-features": 300},
}


def ready_app(path: Path, method: str) -> dict[str, str]:
    """Run an app as it is, for a few rounds."""
    from flwr.app import Context, RecordDict

    settings = tomllib.loads((path / "pyproject.toml").read_text())
    config = settings["tool"]["flwr"]["app"]["config"] | SMALL[path.name]
    if "local-epochs" in config:
        config |= {"local-epochs": min(2, config["local-epochs"])}
    with tempfile.TemporaryDirectory() as folder:
        config |= {"output-dir": folder}
        config |= {"state-dir": f"{folder}/state"} if "state-dir" in config else {}
        config |= {"method": method} if method else {}
        sides = [load(path, side) for side in ("client", "server")]
        app, found = recorded(sides[0])
        grid = local_grid(app, 6, config)
        sides[1](grid, Context(1, 1, {}, RecordDict(), config))
        found["model"] = digest((Path(folder) / "model.safetensors").read_bytes())
    return found


def federation(
    make: Callable[..., Any], *, rounds: int = 2, momentum: float = 0.9, **options: Any
) -> dict[str, str]:
    """Run a strategy with four tiny clients."""
    from flwr.app import ArrayRecord

    from flwr_fisher.params import shared_state

    options = {"fraction_evaluate": 1.0} | options
    with tempfile.TemporaryDirectory() as folder:
        app, found = recorded(tiny_app(folder, momentum))
        grid = local_grid(app, 4, {})
        start = ArrayRecord(shared_state(tiny_model()))
        result = make(**options).start(grid, start, num_rounds=rounds)
    return found | outcome(result)


# The virtual clients


def tiny_model() -> Any:
    """A net of convolution, batch norm and linear layers."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 4),
        )


def tiny_app(folder: str, momentum: float) -> Any:
    """Clients of a few random images, partition i with 16 + 4 i of them."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from flwr_fisher.client import FisherClient, LocalSGD, make_client_app

    def client_fn(context: Any) -> Any:
        partition = int(context.node_config["partition-id"])
        draw = torch.Generator().manual_seed(partition)
        n = 16 + 4 * partition
        x = torch.randn(n, 1, 6, 6, generator=draw)
        y = torch.randint(4, (n,), generator=draw)
        data = TensorDataset(x, y)
        return FisherClient(
            tiny_model(),
            DataLoader(data, batch_size=8, shuffle=True),
            DataLoader(data, batch_size=16),
            train_fn=LocalSGD(epochs=2, lr=0.05, momentum=momentum),
            device="cpu",
            state_dir=folder,
        )

    return make_client_app(client_fn)


def local_grid(app: Any, clients: int, config: dict[str, Any]) -> Any:
    """Return virtual clients; node ids are the same in every run."""
    from flwr_fisher.testing import LocalGrid

    return LocalGrid(app, clients, run_config=config, seed=0)


def recorded(app: Any) -> tuple[Any, dict[str, str]]:
    """Return an app that notes digests of every message, and where it notes them."""
    from flwr.clientapp import ClientApp

    found: dict[str, str] = {}
    counts: dict[str, int] = defaultdict(int)

    class Recorded(ClientApp):
        def __call__(self, message: Any, context: Any) -> Any:
            kind, group = message.metadata.message_type, message.metadata.group_id
            place = f"{kind} {group} partition {context.node_config['partition-id']}"
            counts[place] += 1
            name = f"{place} no. {counts[place]}"
            found[f"request {name}"] = content_digest(message.content)
            reply = app(message, context)
            found[f"upload {name}"] = content_digest(reply.content)
            return reply

    return Recorded(), found


# Digests


def outcome(result: Any) -> dict[str, str]:
    """Return the digests of a run's model and metrics."""
    histories = {
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
    found = {"model": arrays_digest(result.arrays)}
    for source, history in histories.items():
        for server_round, metrics in history.items():
            text = json.dumps(dict(metrics), sort_keys=True)
            found[f"metrics {source} {server_round}"] = digest(text.encode())
    return found


def content_digest(content: Any) -> str:
    """Return a digest of a message's records, names and order of arrays included."""
    parts = [f"{k}: {arrays_digest(v)}" for k, v in content.array_records.items()]
    for kind in (content.metric_records, content.config_records):
        for name, record in kind.items():
            parts.append(f"{name}: {json.dumps(dict(record), sort_keys=True)}")
    return digest("\n".join(parts).encode())


def arrays_digest(record: Any) -> str:
    """Return a digest of an ``ArrayRecord``."""
    whole = hashlib.sha256()
    for key, array in record.items():
        whole.update(f"{key}/{array.dtype}/{array.shape}/".encode() + array.data)
    return whole.hexdigest()[:16]


def digest(data: bytes) -> str:
    """Return a short digest of bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


# Both sides


def run_here(tree: Path, only: str) -> dict[str, dict[str, str]]:
    """Run every case with the library of a tree, in a process of its own."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "HOME": str(tree),
    }
    script = [sys.executable, str(Path(__file__).resolve()), "--run", str(tree)]
    done = subprocess.run(
        [*script, "--only", only], env=environment, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def copy_tree(folder: Path, revision: str | None) -> Path:
    """Lay a revision, or the working tree, out as it is when installed."""
    if revision is None:
        names = ("flwr_fisher", "strategies", "apps")
        for name in names:
            ignore = shutil.ignore_patterns("__pycache__", "strategies")
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    else:
        command = ["git", "archive", revision, "flwr_fisher", "strategies", "apps"]
        packed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
    (folder / "strategies").rename(folder / "flwr_fisher" / "strategies")
    return folder


def run_all(tree: Path, only: str) -> None:
    """Print the digests of all cases as JSON; what is random in names is fixed."""
    import logging

    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    secrets.randbits = lambda bits: 12345 % 2**bits
    found = {}
    for name, case in cases(tree / "apps"):
        if only in name:
            found[name] = case()
            print(f"{name}: {len(found[name])} digests", file=sys.stderr, flush=True)
    print(json.dumps(found))


def main() -> None:
    """Compare two trees, and tell which cases differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--against", metavar="REV", default="HEAD")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--messages", choices=("all", "uploads"), default="all")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_all(options.run, options.only)
        return
    sides = []
    for revision in (options.against, None):
        with tempfile.TemporaryDirectory() as folder:
            tree = copy_tree(Path(folder), revision)
            sides.append(run_here(tree, options.only))
    before, now = sides
    different = [name for name in before if before[name] != now.get(name)]
    if options.messages == "uploads":
        different = [
            name
            for name in different
            if _without_requests(before[name]) != _without_requests(now.get(name, {}))
        ]
    for name in different:
        old, new = before[name], now.get(name, {})
        odd = sorted(k for k in old | new if old.get(k) != new.get(k))
        print(f"DIFFERENT {name}: {len(odd)} of {len(old | new)}: {odd[:4]}")
    for name in now.keys() - before.keys():
        print(f"NEW {name}")
    count = sum(len(case) for case in before.values())
    same = len(before) - len(different)
    print(
        f"{same} of {len(before)} cases agree with {options.against}: {count} digests"
    )
    raise SystemExit(bool(different))


def _without_requests(found: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in found.items() if not k.startswith("request")}


if __name__ == "__main__":
    main()
