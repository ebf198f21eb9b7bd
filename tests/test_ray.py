"""End to end through the real ``flwr run`` and Ray."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from safetensors.torch import load_file

from apps import run
from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.client.messages import Mod
from flwr_fisher.params import shared_state
from flwr_fisher.secure import SecureSums, SecureSumsMod
from flwr_fisher.strategies import FedFisherOneShot, Policy
from flwr_fisher.testing import LocalGrid

pytestmark = pytest.mark.ray
APP = Path(__file__).parents[1] / "apps" / "fedfisher"
CLIENTS, EPOCHS = 4, 3
RESOURCES = "client-resources-num-cpus=1"


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
        "HOME": str(tmp_path_factory.mktemp("home")),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": free_port(),
        "FLWR_LOCAL_CONTROL_API_PORT": port,
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        if f"127.0.0.1:{port}".encode() in process.read_bytes():
            os.kill(int(process.parent.name), signal.SIGTERM)


@pytest.fixture(scope="module")
def app(flower, tmp_path_factory) -> Path:
    """The app as it is installed from its bundle."""
    folder = tmp_path_factory.mktemp("bundle")
    run = partial(subprocess.run, env=flower, cwd=folder, check=True)
    run(["flwr", "build", "--app", str(APP)], capture_output=True)
    (fab,) = folder.glob("*.fab")
    run(["flwr", "install", str(fab)], capture_output=True)
    (installed,) = Path(flower["HOME"], ".flwr", "apps").glob("*fedfisher*")
    return installed


def flwr_run(flower: dict[str, str], app: Path, **config: object) -> str:
    text = " ".join(f"{key.replace('_', '-')}={value}" for key, value in config.items())
    federation = f"num-supernodes={CLIENTS} {RESOURCES}"
    done = subprocess.run(
        [
            *("flwr", "run", str(app), "--stream"),
            *("--federation-config", federation),
            *("--run-config", text),
        ],
        env=flower, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def outcome(flower, app, tmp_path_factory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("output")
    log = flwr_run(
        flower,
        app,
        output_dir=f"'{path}'",
        local_epochs=EPOCHS,
        alpha=0.5,
        num_rounds=2,
    )
    return path, log


def test_app_reports_every_method(outcome):
    path, log = outcome
    files = {p.name for p in path.iterdir()}
    assert files == {"metrics.json", "model.safetensors", "accuracy.png"}, log
    metrics = json.loads((path / "metrics.json").read_text())
    assert set(metrics["accuracy"]) == {
        "fedfisher",
        "fedavg",
        "best_client",
        "ensemble",
    }
    assert metrics["accuracy"]["fedfisher"] > metrics["accuracy"]["fedavg"] > 0.1
    sizes = metrics["bytes"]
    assert sizes["upload_per_client"] <= sizes["fedavg_per_client"] > 0
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


def clients_of(folder: Path, mods: Sequence[Mod] = ()) -> ClientApp:
    """Clients that share the digits, and keep their states in a folder."""

    def client_fn(context) -> FisherClient:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        mine = slice(context.node_config["partition-id"], None, CLIENTS)
        images = torch.tensor(x[mine] / 16, dtype=torch.float32)
        data = torch.utils.data.TensorDataset(images, torch.tensor(y[mine]))
        return FisherClient(
            torch.nn.Linear(64, 10),
            torch.utils.data.DataLoader(data, 16, shuffle=True),
            train_fn=LocalSGD(epochs=EPOCHS),
            device="cpu",
            state_dir=folder,
        )

    return make_client_app(client_fn, mods=[*mods])


def model_of(grid: LocalGrid, **options) -> dict[str, torch.Tensor]:
    """Return FedFisher's model of one round."""
    torch.manual_seed(0)
    start = ArrayRecord(shared_state(torch.nn.Linear(64, 10)))
    result = FedFisherOneShot(fraction_evaluate=0.0, **options).start(grid, start)
    return result.arrays.to_torch_state_dict()


class RayGrid(LocalGrid):
    """Its clients are in a process of Ray's, as Flower's simulation has them."""

    backend: Any

    def _handle(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        reply, context = self.backend.process_message(message, self._contexts[node])
        self._contexts[node] = context
        return reply


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")
def test_a_secure_sum_gives_the_model_of_the_plain_one(tmp_path):
    from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def app() -> ClientApp:
        mod = SecureSumsMod(state_dir=tmp_path / "ray")
        return clients_of(tmp_path / "ray", [mod])

    grid = RayGrid(app(), CLIENTS)
    init = {"num_cpus": 1, "log_to_driver": False}
    grid.backend = RayBackend({"client_resources": {"num_cpus": 1}, "init_args": init})
    try:
        grid.backend.build(app)
        secure = model_of(grid, aggregate="sums", secure=SecureSums())
    finally:
        grid.backend.terminate()
    lifted = Policy(max_weight=inf, max_distance=inf)
    own = LocalGrid(clients_of(tmp_path / "own"), CLIENTS)
    plain = model_of(own, aggregate="sums", policy=lifted)
    for name, tensor in plain.items():
        assert (secure[name] - tensor).abs().max() < 1e-4, name
