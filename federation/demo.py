"""A real federation on one machine, with a node and the SuperLink killed on the way.

    python federation/demo.py FOLDER [--app apps/fedfisher] [--nodes-bin .venv-node/bin]
        [--run-config "…"]

It starts a SuperLink with TLS, three SuperNodes with registered keys, and a fourth
SuperNode with an unknown key. In a run, it kills a node during its training, and the
SuperLink when the first upload is on the server's disk. It starts both again, submits
the run again, and checks that no client trains twice.
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from data import NAMES
from data import main as make_data

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
LONGEST = 3000.0  # seconds, of all: a machine may be slow, or busy
LAST_EPOCH = {"fedfisher": "epoch 30 of 30"}
CONFIG = {
    "fedfisher": "local-epochs=30",
    "fedfish": "num-rounds=3",
    "fagh": "num-rounds=3",
    "tct": "num-rounds=5 stage1-rounds=2 num-features=500",
}


class Federation:
    """The federation's processes, each with its own process group and log."""

    def __init__(self, folder: Path, nodes_bin: Path) -> None:
        self.folder, self.nodes_bin = folder, nodes_bin
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.until = time.monotonic() + LONGEST
        home = folder / "home"
        home.mkdir(parents=True)
        (home / "config.toml").write_text(
            f'[superlink.federation]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder}/ca.pem"\n'
        )

    def environment(self, name: str) -> dict[str, str]:
        """Return a process's environment; each node has its own home folder."""
        node = name in (*NAMES, "stranger")
        path = self.nodes_bin if node else BIN
        home = self.folder / name if node else self.folder / "home"
        return {
            **os.environ,
            "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, name: str, *command: object) -> None:
        """Start a process."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in command],
                cwd=self.folder,
                env=self.environment(name),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def call(self, name: str, *command: object) -> None:
        """Run a process to its end."""
        self.start(name, *command)
        if self.processes.pop(name).wait():
            raise RuntimeError(f"{command[0]} failed:\n{self.log(name)}")

    def kill(self, name: str) -> None:
        """Kill a process and all of its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes.pop(name).wait()

    def log(self, name: str) -> str:
        """Return a process's log, without colours."""
        path = self.folder / f"{name}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        return re.sub(r"\x1b\[[\d;]*m", "", text)

    def link(self) -> None:
        """Start the SuperLink, and wait until it answers."""
        self.start("link", HERE / "link.sh", self.port)
        self.wait("the SuperLink", self.answers)

    def answers(self) -> bool:
        """Return whether the SuperLink's port is open."""
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def node(self, name: str) -> None:
        """Start a SuperNode."""
        data = self.folder / name / "data.npz"
        self.start(name, HERE / "node.sh", name + ".key", data, self.port, free_port())

    def run(self, app: Path, config: str) -> None:
        """Submit a run."""
        command = ("flwr", "run", app, "federation", "--stream", "--run-config", config)
        self.start("run", *command)

    def wait(self, what: str, there: Callable[[], object]) -> None:
        """Wait until something is there, as long as all processes live."""
        while not there():
            ended = [n for n, own in self.processes.items() if own.poll() is not None]
            if ended and not there():
                logs = "".join(f"\n{name}:\n{self.log(name)[-2000:]}" for name in ended)
                raise RuntimeError(f"{what}: {ended} ended before it was there{logs}")
            if time.monotonic() > self.until:
                raise TimeoutError(f"{what}: not there after {LONGEST:.0f} s in all")
            time.sleep(0.2)

    def close(self) -> None:
        """Kill all processes."""
        for name in list(self.processes):
            self.kill(name)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def say(text: str) -> None:
    """Print what happens now."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def prepare(federation: Federation) -> None:
    """Make keys, certificates and data; start all processes; register the nodes."""
    folder = federation.folder
    say("Certificates, keys and data")
    federation.call("certificates", HERE / "certificates.sh", folder)
    make_data(folder)
    (folder / "stranger").mkdir()
    federation.link()
    for name in (*NAMES, "stranger"):
        federation.call("keys", HERE / "node.sh", f"{name}.key", "", 0, 0)
    for name in NAMES:
        register = ("flwr", "supernode", "register", f"{name}.key.pub", "federation")
        federation.call("register", *register, "--name", name)
    say("The SuperLink knows the keys of three SuperNodes, and not that of a fourth")
    for name in (*NAMES, "stranger"):
        federation.node(name)
    refused = "Failed to activate SuperNode"
    federation.wait("a refusal", lambda: refused in federation.log("stranger"))
    federation.kill("stranger")  # it would try again, every ten seconds
    say("the SuperNode whose key is not registered was refused")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--app", type=Path, default=HERE.parent / "apps" / "fedfisher")
    parser.add_argument("--nodes-bin", type=Path, default=BIN)
    parser.add_argument("--run-config", default="")
    args = parser.parse_args()
    folder, app = args.folder.resolve(), args.app.resolve()
    output, kept = folder / "output", folder / "checkpoint"
    config = f"test-path='{folder}/test.npz' min-nodes=3 {CONFIG[app.name]}"
    config = f"{config} {args.run_config}".strip()
    federation = Federation(folder, args.nodes_bin.resolve())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end all processes
    try:
        prepare(federation)
        paths = f"checkpoint-dir='{kept}' output-dir='{output}'"
        go_through(federation, app, f"{config} {paths}", output, kept)
        verdict(federation, app, output)
    finally:
        federation.close()


def go_through(
    federation: Federation, app: Path, config: str, output: Path, kept: Path
) -> None:
    """Submit the run, kill a node and the SuperLink, and submit it again."""
    first = NAMES[0]
    federation.run(app, config)
    say(f"The run is submitted; {first} will be killed while it trains")
    federation.wait(
        "training", lambda: "epoch 10" in federation.log(first) or output_of(kept)
    )
    federation.kill(first)
    say(f"{first} is killed, and the SuperLink will be when an upload has come")
    federation.wait("an upload", lambda: output_of(kept))
    federation.kill("link")
    federation.kill("run")
    say("The SuperLink is killed, and the run with it; all start again")
    federation.link()
    federation.node(first)
    federation.run(app, config)
    federation.wait("the report", (output / "metrics.json").exists)
    federation.wait("the end", lambda: federation.processes["run"].poll() is not None)


def output_of(kept: Path) -> list[Path]:
    """Return the uploads on the server's disk."""
    return list(kept.glob("uploads-*/exchange-*/*.safetensors"))


def verdict(federation: Federation, app: Path, output: Path) -> None:
    """Check the results, and print them."""
    metrics = json.loads((output / "metrics.json").read_text())
    accuracy = metrics["accuracy"]
    for name, value in accuracy.items():
        say(f"{name}: {100 * value:.1f} %")
    if last := LAST_EPOCH.get(app.name):
        times = {name: federation.log(name).count(last) for name in NAMES}
        say(f"finished trainings: {times}")
        assert set(times.values()) == {1}, times
        others = (accuracy["fedavg"], accuracy["best_client"])
        assert accuracy["fedfisher"] > max(others), accuracy
        # Nobody said which partition it holds: they have their registered names.
        assert {row["client"] for row in metrics["clients"]} == set(NAMES)
    for name in NAMES:
        assert "Traceback" not in federation.log(name), federation.log(name)
    say(f"the model and its report are in {output}")


if __name__ == "__main__":
    main()
