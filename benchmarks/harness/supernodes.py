"""A SuperLink and SuperNodes on this machine, each a process."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class Federation:
    """A SuperLink and SuperNodes, which end with it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.processes: dict[Any, subprocess.Popen[bytes]] = {}
        home = folder / "home"
        (home / ".flwr").mkdir(parents=True)
        (home / ".flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        bin_ = str(Path(sys.executable).parent)
        self.env = {
            **os.environ,
            "HOME": str(home),
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }

    def start(self, name: Any, *command: str) -> None:
        """Start a process of a group of its own, with a log of its own."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self.env,
                cwd=self.folder,
                start_new_session=True,
            )

    def link(self) -> None:
        """Start the SuperLink."""
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        self.start("link", "flower-superlink", "--insecure", *address)

    def node(self, number: int) -> None:
        """Start a SuperNode."""
        self.start(
            number,
            "flower-supernode",
            "--insecure",
            "--superlink",
            f"127.0.0.1:{self.port}",
            "--port",
            str(self.port + 1 + number),
            "--node-config",
            f"partition-id={number} num-partitions=6",
        )

    def kill(self, name: Any) -> None:
        """Kill a process and all of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes.pop(name).wait()

    def close(self) -> None:
        """Kill all."""
        for name in list(self.processes):
            self.kill(name)


def wait_for(path: Path, seconds: float) -> None:
    """Wait until a file is there."""
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no {path.name} after {seconds:.0f} s")
        time.sleep(0.2)
