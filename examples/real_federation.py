"""
A real federation on one machine
================================

A SuperLink and two SuperNodes, each a process, as they would be on three machines. Each
node has data of its own, which nobody else reads: one has the digits 0 to 4, the other
has 5 to 9. An app of four small files is sent to them by ``flwr run``, and comes back
with one model that knows all ten digits.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from sklearn.datasets import load_digits

from flwr_fisher.report import plot_accuracies

everything = TemporaryDirectory(ignore_cleanup_errors=True)  # it goes with this page
folder = Path(everything.name)

# %%
# The data of each node
# ---------------------
#
# Every fifth image is for the server's test. The nodes get the others, one half of the
# digits each, as a file on their own disks.

digits = load_digits()
is_test = np.arange(len(digits.target)) % 5 == 0
holds = {
    "hospital-a": ~is_test & (digits.target < 5),
    "hospital-b": ~is_test & (digits.target >= 5),
    "test": is_test,
}
for name, mine in holds.items():
    x = digits.images[mine].astype("float32") / 16
    np.savez(folder / f"{name}.npz", x=x, y=digits.target[mine])
    kinds = digits.target[mine]
    print(f"{name:12}{len(kinds)} images, digits {kinds.min()} to {kinds.max()}")

# %%
# The app
# -------
#
# Four files in a folder. ``task.py`` is yours: a model, and how data are read.

app = folder / "app"
app.mkdir()
(app / "task.py").write_text("""\
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_model():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def load(path, shuffle=False):
    with np.load(path) as data:
        images, labels = torch.tensor(data["x"]), torch.tensor(data["y"])
    return DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=shuffle)
""")

# %%
# ``client_app.py`` finds its node's data in ``context.node_config``, which the node's
# owner sets.

(app / "client_app.py").write_text("""\
from task import load, make_model

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app


def client_fn(context):
    loader = load(context.node_config["data"], shuffle=True)
    return FisherClient(make_model(), loader, train_fn=LocalSGD(epochs=20))


app = make_client_app(client_fn)
""")

# %%
# ``server_app.py`` merges, scores every model on the server's test images, and writes
# the scores to a file. Flower runs a copy of the app, so files have full paths, from
# ``context.run_config``.

(app / "server_app.py").write_text("""\
import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from task import load, make_model

from flwr_fisher.report import accuracies
from flwr_fisher.merge import fedavg
from flwr_fisher.strategies import FedFisherOneShot, shared_state

app = ServerApp()


@app.main()
def main(grid, context):
    torch.manual_seed(0)
    strategy = FedFisherOneShot(min_available_nodes=2, fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(shared_state(make_model())))
    reports = [u.payload.posterior(u.num_examples) for u in result.uploads]
    models = {u.client: u.payload.params for u in result.uploads}
    models["FedAvg"] = fedavg(reports)
    models["FedFisher"] = result.arrays.to_torch_state_dict()
    scores = accuracies(make_model(), models, load(context.run_config["test"]))
    Path(context.run_config["report"]).write_text(json.dumps(scores))
""")

# %%
# ``pyproject.toml`` tells Flower where the two apps are, and what can be set in a run.

(app / "pyproject.toml").write_text("""\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "two-hospitals"
version = "1.0.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
test = ""
report = ""
""")

# %%
# Starting processes, and ending them
# -----------------------------------
#
# The next lines are about this page, not about Flower. On a machine of its own, each
# process is a service. Here all of them must end when the page does, whatever happens
# on the way.


def free_port() -> int:
    """Return a port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def ended() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Give a list for processes; kill those that are in it in the end."""
    running: list[subprocess.Popen[bytes]] = []
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield running
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def start(name: str, *command: object) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own, with a log of its own."""
    home = folder / name
    home.mkdir(exist_ok=True)
    own = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [str(word) for word in command],
            cwd=home,
            env={**os.environ, **own},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_for(port: int) -> None:
    """Wait until somebody listens at a port of this machine, two minutes at most."""
    for _ in range(600):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)
    raise TimeoutError(f"nobody listens at port {port}")


# %%
# The federation, and a run
# -------------------------
#
# ``flower-superlink`` waits for nodes and for runs. Each ``flower-supernode`` connects
# to it, and is told in ``--node-config`` where its data are. Whoever submits a run
# names the SuperLink in ``config.toml``, and calls ``flwr run APP NAME``.

port = free_port()
address = f"127.0.0.1:{port}"
report = folder / "report.json"

(folder / "submit").mkdir()
(folder / "submit" / "config.toml").write_text(
    f'[superlink.hospitals]\naddress = "{address}"\ninsecure = true\n'
)
settings = f"test='{folder}/test.npz' report='{report}'"

with ended() as running:
    link = ("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", port)
    running.append(start("link", *link))
    wait_for(port)
    for number, name in enumerate(("hospital-a", "hospital-b")):
        node = ("flower-supernode", "--insecure", "--superlink", address)
        config = f"partition-id={number} data='{folder}/{name}.npz'"
        own = ("--port", free_port(), "--node-config", config)
        running.append(start(name, *node, *own))
    run = ("flwr", "run", app, "hospitals", "--stream")
    running.append(start("submit", *run, "--run-config", settings))
    running[-1].wait(timeout=300)

if not report.exists():
    raise RuntimeError((folder / "submit.log").read_text())

# %%
# Each process has written a log. The first node's says what it computed:

for line in (folder / "hospital-a.log").read_text().splitlines():
    if "curvature: " in line or "trained on" in line:
        print(line.partition(":")[2].strip())

# %%
# What came of it
# ---------------
#
# Each hospital's model knows its own five digits. FedAvg's mean and FedFisher's merge
# are of the same two uploads, and know all ten. The server has seen the models and
# their Fisher information, and no image but those of its own test.

accuracy = json.loads(report.read_text())
names = {"partition-0": "hospital-a alone", "partition-1": "hospital-b alone"}
bars = {names.get(name, name): value for name, value in accuracy.items()}
plot_accuracies(Path("real_federation.png"), bars, best="FedFisher")

# %%
# On machines of their own
# ------------------------
#
# The commands are the same, with the SuperLink's address in the place of ``127.0.0.1``.
# Three things are added:
#
# - **TLS.** ``--insecure`` sends everything in the clear, and anybody can pretend to be
#   the SuperLink. With certificates (``--ssl-certfile`` and its like at the SuperLink,
#   ``--root-certificates`` at the nodes) nobody reads along, and nodes know whom they
#   talk to.
# - **Keys.** Here any node may join. With ``--enable-supernode-auth`` the SuperLink
#   lets in the nodes whose public keys ``flwr supernode register`` gave it. They
#   then go by their registered names, so that ``partition-id`` is not needed.
# - **Time.** Nodes come and go, and machines crash. :doc:`/crashes` says what a run
#   survives, and how long it waits for whom.
#
# :doc:`/more/federation` has scripts for all of this, short enough to copy, and runs
# them with nodes that are killed on the way. A SuperNode needs the library without
# extras.
