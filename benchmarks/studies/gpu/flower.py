"""Where the time of `flwr run` goes, with clients on CPUs and on one GPU."""

import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from harness.size import sized
from harness.tables import head, row
from harness.timing import medians, seconds

from studies.gpu.clients import epoch

ROOT = Path(__file__).parents[3]
APP, CLIENTS, TIMEOUT = ROOT / "apps" / "fedfisher", 5, 180
CORES = max(1, (os.cpu_count() or 1) // CLIENTS)  # of a client
EPOCHS = sized(30, 1)
# Each part, and what is in the line of the log that ends it.
PARTS = {
    "the SuperLink and the app start": "[ROUND 1/1]",
    "Ray starts": "configure_train: Sampled",
    "clients' processes start, train, and take Fishers": (
        f"aggregate_train: {CLIENTS} of {CLIENTS} replies"
    ),
    "the merge, and the last layer with the clients": "Strategy execution finished",
    "the report": "Results are in",
    "the end": "",
}
Numbers = dict[str, Any]


def missing() -> list[str]:
    """Return which packages and programs a run needs, and are not there."""
    names = ("flwr", "ray", "flwr_datasets", "sklearn")
    return [name for name in names if find_spec(name) is None]


def measure(device: torch.device, runs: int) -> Numbers:
    """Return the seconds of a run's parts, and of what its clients do."""
    share = 0.0 if device.type == "cpu" else 1 / CLIENTS
    lines = run(share)
    found: Numbers = {"parts": {}, "total": lines[-1][0]}
    before = 0.0
    for part, ends in PARTS.items():
        at = next((at for at, line in reversed(lines) if ends in line), None)
        if at is None:
            tail = "\n".join(line for _, line in lines[-20:])
            raise RuntimeError(f"flwr run: no line has {ends!r}; the last are\n{tail}")
        found["parts"][part], before = at - before, at
    trained = re.findall(r"trained on (\d+) examples", "\n".join(x for _, x in lines))
    config = tomllib.loads((APP / "pyproject.toml").read_text())
    size = int(config["tool"]["flwr"]["app"]["config"]["batch-size"])
    found["steps"] = EPOCHS * math.ceil(max(map(int, trained)) / size)
    return found | {"start": start(device), "step": step(device, size, runs)}


def run(share: float) -> list[tuple[float, str]]:
    """Run the app; return its log's lines, each with the seconds when it came."""
    folder, ports = Path(tempfile.mkdtemp()), [_free_port() for _ in range(2)]
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "FLWR_HOME": str(folder / "home"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0],
        "FLWR_LOCAL_CONTROL_API_PORT": ports[1],
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    if not share:
        env["CUDA_VISIBLE_DEVICES"] = ""  # the server's merge, too, is on the CPU
    resources = f"client-resources-num-cpus={CORES} client-resources-num-gpus={share:g}"
    command = ["flwr", "run", str(APP), "--stream", "--federation-config"]
    command += [f"num-supernodes={CLIENTS} {resources}", "--run-config"]
    command += [f"output-dir='{folder / 'report'}' local-epochs={EPOCHS}"]
    began, lines = time.monotonic(), list[tuple[float, str]]()
    stop = [*("timeout", "--signal=INT", str(TIMEOUT)), *command]
    try:
        with subprocess.Popen(
            stop, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout or ():
                lines.append((time.monotonic() - began, line.rstrip()))
    finally:
        _end_superlink(ports[1])
        shutil.rmtree(folder, ignore_errors=True)
    return [*lines, (time.monotonic() - began, "")]


def _free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def _end_superlink(port: str) -> None:
    """End the SuperLink that `flwr run` has started and leaves alive."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if f"127.0.0.1:{port}".encode() in process.read_bytes():
                os.kill(int(process.parent.name), signal.SIGTERM)


def start(device: torch.device) -> float:
    """Return the seconds until a fresh process has the app and a tensor there."""
    code = f"import fedfisher.client_app, torch; torch.ones(1, device='{device}')"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{APP}"}
    command = [sys.executable, "-c", code]
    return seconds(partial(subprocess.run, command, env=env, check=True))


def step(device: torch.device, size: int, runs: int) -> float:
    """Return the seconds of a training step of the app's model."""
    sys.path.insert(0, str(APP))
    from fedfisher.task import Net

    model, x = Net().to(device), torch.rand(size, 1, 8, 8, device=device)
    batch, count = (x, torch.randint(10, (size,), device=device)), sized(100, 2)
    work, threads = partial(epoch, model, [batch] * count), torch.get_num_threads()
    torch.set_num_threads(CORES)
    took = medians({"steps": work}, runs, 1, device)["steps"]
    torch.set_num_threads(threads)
    return took / count


def sections(found: Mapping[str, Numbers]) -> list[str | list[str]]:
    """Return the tables of a run's parts and of a client's."""
    lines = head("seconds", *found)
    for part in PARTS:
        lines.append(row(part, *(f"{e['parts'][part]:.1f}" for e in found.values())))
    lines.append(row("together", *(f"{e['total']:.1f}" for e in found.values())))
    client = head("of a client", *found)
    starts = (f"{each['start']:.1f}" for each in found.values())
    client.append(row("a process starts, seconds", *starts))
    steps = (f"{1e3 * each['step']:.2f}" for each in found.values())
    client.append(row("a step of training, ms", *steps))
    trained = (f"{each['steps'] * each['step']:.1f}" for each in found.values())
    title = "the most steps of a client, {}, seconds"
    counts = " or ".join({str(each["steps"]): None for each in found.values()})
    client.append(row(title.format(counts), *trained))
    return [lines, client]
