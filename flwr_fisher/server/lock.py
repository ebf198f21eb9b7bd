"""One server at a time on a folder, and who it is."""

import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from flwr_fisher.errors import CheckpointError

_LOCK, _HOLDER = "lock", "holder.txt"


class FolderLock:
    """Held until it is released, or its process ends, however that ends.

    Parameters
    ----------
    folder : Path
        Which is there.

    Raises
    ------
    CheckpointError
        With the holder's name, if another server has it.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = FileLock(folder / _LOCK)
        self._holder = folder / _HOLDER
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise CheckpointError(
                f"{folder} is in use by another server ({self._name()}): wait until it "
                "has ended, or pass another checkpoint_dir"
            ) from error
        since = datetime.now(UTC).isoformat(" ", "seconds")
        self._holder.write_text(
            f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
        )

    def release(self) -> None:
        """Let others have the folder."""
        self._holder.unlink(missing_ok=True)
        self._lock.release()

    def _name(self) -> str:
        try:
            return self._holder.read_text().strip()
        except OSError:
            return "it has not told its name yet"
