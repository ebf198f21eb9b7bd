"""A federation of processes that runs beside the tests; they wait at their end."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from bare import write_sitecustomize

DEMO = Path(__file__).parents[1] / "federation" / "demo.py"
_LONGEST = 3600.0  # seconds; the federation itself gives up before
_CHILDREN = []  # Python warns of one that runs and nobody knows


class Beside:
    """``federation/demo.py``, its nodes without extras; several processes may wait."""

    def __init__(self, folder):
        self.folder = folder / "federation"
        self._log, self._code = folder / "demo.log", folder / "code"
        self._group = folder / "group"

    def start(self):
        """Start it, unless another process has."""
        folder = self._log.parent
        try:
            (folder / "started").touch(exist_ok=False)
        except FileExistsError:
            return
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
        demo = [sys.executable, str(DEMO), str(self.folder), "--nodes-bin", str(nodes)]
        tell = 'trap : TERM; code="$1"; shift; "$@"; echo $? > "$code.new"'
        tell += '; mv "$code.new" "$code"'
        command = ["sh", "-c", tell, "sh", str(self._code), *demo]
        env = {**os.environ, "HOME": str(folder)}
        with self._log.open("wb") as log:
            own = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, start_new_session=True
            )
        self._group.write_text(str(own.pid))
        _CHILDREN.append(own)

    def said(self):
        """What it printed, once it has ended well."""
        assert self._ended(_LONGEST), self._log.read_text()[-4000:]
        text = self._log.read_text()
        assert self._code.read_text().strip() == "0", text[-4000:]
        return text

    def end(self):
        """Have it end what it has started, if it has not ended, and clean up."""
        if self._group.exists() and not self._code.exists():
            os.killpg(int(self._group.read_text()), signal.SIGTERM)
            self._ended(60)
        shutil.rmtree(self._log.parent, ignore_errors=True)

    def _ended(self, seconds):
        deadline = time.monotonic() + seconds
        while not self._code.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        return self._code.exists()
