"""One server at a time on a folder, and who it is."""

import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from flwr_fisher.errors import CheckpointError
from flwr_fisher.log_lines import logger

_LOCK, _HOLDER = "lock", "holder.txt"
# The ServerApp of a SuperLink that was killed says goodbye to it for 15 seconds, more
# on a busy machine, while the next one has started.
PATIENCE = 60.0  # seconds


class FolderLock:
    """Held until it is released, or its process ends, however that ends.

    Another process that has it is given a minute to end.

    Parameters
    ----------
    folder : Path
        Which is there.

    Raises
    ------
    CheckpointError
        With the holder's name, if another server keeps it.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = FileLock(folder / _LOCK)
        self._holder = folder / _HOLDER
        own = f"process {os.getpid()} on {socket.gethostname()}"
        if not self._acquired(0):
            holder = self._name()
            taken = f"{folder} is in use by another run ({holder})"
            ours = holder.startswith(f"{own},")  # and cannot end while we wait
            if not ours:
                logger.warning("%s: waiting %.0f s for it to end", taken, PATIENCE)
            if ours or not self._acquired(PATIENCE):
                raise CheckpointError(
                    f"{taken}. Where that is this run, begun before, wait until it has "
                    "ended or end it (`flwr list`, `flwr stop`: Ctrl-C of `flwr run` "
                    "ends the log alone); for another run pass another checkpoint_dir"
                )
        since = datetime.now(UTC).isoformat(" ", "seconds")
        self._holder.write_text(f"{own}, since {since}\n")

    def release(self) -> None:
        """Let others have the folder."""
        self._holder.unlink(missing_ok=True)
        self._lock.release()

    def _acquired(self, seconds: float) -> bool:
        try:
            self._lock.acquire(timeout=seconds)
        except Timeout:
            return False
        return True

    def _name(self) -> str:
        try:
            return self._holder.read_text().strip()
        except OSError:
            return "it has not told its name yet"
