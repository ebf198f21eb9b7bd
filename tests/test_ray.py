"""End to end through the real ``flwr run`` and Ray."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from apps import run

pytestmark = pytest.mark.ray
APP = Path(__file__).parents[1] / "apps" / "fedfisher"
CLIENTS, EPOCHS = 4, 3
# One process imports all, not two.
RESOURCES = f"client-resources-num-cpus={min(2, os.cpu_count() or 1)}"


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


@pytest.fixture(scope="module")
def flower(tmp_path_factory) -> Iterator[dict[str, str]]:
    """An environment with a home and a SuperLink of its own, which goes with it."""
    port = free_port()
    yield {
        **os.environ,
        "HOME": (home := str(tmp_path_factory.mktemp("home"))),
        "FLWR_HOME": f"{home}/.flwr",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": free_port(),
        "FLWR_LOCAL_CONTROL_API_PORT": port,
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        if f"127.0.0.1:{port}".encode() in process.read_bytes():
            os.kill(int(process.parent.name), signal.SIGTERM)


def flwr_run(flower: dict[str, str], **config: object) -> str:
    text = " ".join(f"{key.replace('_', '-')}={value}" for key, value in config.items())
    federation = f"num-supernodes={CLIENTS} {RESOURCES}"
    done = subprocess.run(
        [
            *("flwr", "run", str(APP), "--stream"),
            *("--federation-config", federation),
            *("--run-config", text),
        ],
        env=flower, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def outcome(flower, tmp_path_factory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("output")
    log = flwr_run(
        flower, output_dir=f"'{path}'", local_epochs=EPOCHS, alpha=0.5, num_rounds=2
    )
    return path, log


def test_app_reports_every_method(outcome):
    path, log = outcome
    files = {p.name for p in path.iterdir()}
    assert files == {"metrics.json", "model.safetensors", "accuracy.png"}, log
    metrics = json.loads((path / "metrics.json").read_text())
    assert set(metrics["accuracy"]) == {
        "fedfisher",
        "fedfisher_merge",
        "fedavg",
        "best_client",
        "ensemble",
    }
    assert metrics["accuracy"]["fedfisher"] > metrics["accuracy"]["fedavg"] > 0.1
    sizes = metrics["bytes"]
    assert 0 < sizes["upload_per_client"] < 2 * sizes["fedavg_per_client"]
    assert metrics["config"]["local-epochs"] == EPOCHS
    assert f"Results are in {path}" in log
    assert "epoch 3 of 3" in log
    assert "merged by pcg: 4 iterations" in log


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread", "empty_pictures")
def test_ray_and_local_grid_give_the_same_bits(outcome, tmp_path):
    path, log = outcome
    run("fedfisher", tmp_path, CLIENTS, local_epochs=EPOCHS, alpha=0.5, num_rounds=2)
    ray, local = (load_file(p / "model.safetensors") for p in (path, tmp_path))
    assert ray.keys() == local.keys(), log
    for name, tensor in local.items():
        assert torch.equal(ray[name], tensor), name
