"""A folder in memory for a run's clients, which no killed run leaves for long."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

from filelock import FileLock, Timeout

_PREFIX = "flwr-fisher-run-"


@contextmanager
def folder_in_memory(memory: Path = Path("/dev/shm")) -> Iterator[Path]:
    """Make a folder that is deleted at the end, or by the next run after a crash.

    A lock beside it tells that its process lives.

    Parameters
    ----------
    memory : Path, default "/dev/shm"
        Where; another temporary folder if it is not there.
    """
    where = memory if memory.is_dir() else Path(gettempdir())
    for left in where.glob(f"{_PREFIX}*.lock"):
        _delete(left)
    folder = where / f"{_PREFIX}{uuid.uuid4().hex}"
    lock = folder.with_suffix(".lock")
    with FileLock(lock):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _delete(lock: Path) -> None:
    """Delete a folder and its lock, unless its process lives."""
    try:
        with FileLock(lock, timeout=0):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
    except (Timeout, OSError):  # another user's
        pass
