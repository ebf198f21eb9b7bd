"""A federation of processes that runs beside the tests; they wait at their end."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bare import write_sitecustomize

DEMO = Path(__file__).parents[1] / "federation" / "demo.py"


class Beside:
    """``federation/demo.py``, its nodes without extras."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "federation"
        # Nodes run from a `bin` of their own, whose python knows no extras.
        nodes = folder / "bin"
        nodes.mkdir()
        hidden = write_sitecustomize(folder / "bare")
        for name in ("flower-supernode", "flower-superexec", "flwr-clientapp"):
            script = nodes / name
            real = Path(sys.executable).parent / name
            script.write_text(
                f'#!/bin/sh\nPYTHONPATH={hidden}:$PYTHONPATH exec {real} "$@"\n'
            )
            script.chmod(0o755)
        self._log = folder / "demo.log"
        command = [sys.executable, str(DEMO), str(self.folder), "--nodes-bin", nodes]
        command += ["--secure"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "HOME": str(folder)}
            )

    def said(self) -> str:
        """What it printed, once it has ended well."""
        code = self.process.wait(900)
        text = self._log.read_text()
        assert code == 0, text[-4000:]
        return text

    def end(self) -> None:
        """Have it end what it has started, if it has not ended, and clean up."""
        self.process.terminate()
        self.process.wait(60)
        shutil.rmtree(self.folder.parent, ignore_errors=True)
