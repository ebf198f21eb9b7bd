"""A client's files: which were used last, and which go first when there are too many.

Other clients, in other processes, write and delete beside: a file may be gone at any
time, which is no error here.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from flwr_fisher.files import ASIDE

SUFFIX = ".safetensors"
_STALE = 3600  # seconds after which nobody is still writing a file
_BLOCK = 4096  # bytes of a disk that the smallest file takes
_MOST = 1000  # entries, all of which are looked at whenever one is written

Entry = TypeVar("Entry")


def use(path: Path) -> None:
    """Note when a file was last used: in its time of access, which outlives us."""
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def delete(path: Path) -> None:
    """Delete a file; one that is gone, or may not be deleted, is no error."""
    with suppress(OSError):
        path.unlink()


def files_in(folder: Path) -> list[Path]:
    """Return what is in a folder, sorted; nothing if it is not there."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def sweep(folder: Path) -> None:
    """Delete what a crash left half written; others may be writing just now."""
    for path in files_in(folder):
        old = time.time_ns() - _stat(path, "st_mtime_ns") > _STALE * 10**9
        if path.name.endswith(ASIDE) and old:
            delete(path)


def to_drop(
    entries: Mapping[Entry, Sequence[Path]], newest: Entry, max_bytes: int
) -> list[Entry]:
    """Return the entries to delete so that the others are within a bound, and few.

    Parameters
    ----------
    entries : Mapping[Entry, Sequence[Path]]
        Each entry's files, which go together.
    newest : Entry
        The one that stays in any case.
    max_bytes : int
        What all may take; a file takes 4 KiB at least. There may be 1000 of them.

    Returns
    -------
    list[Entry]
        The least recently used first.
    """
    sizes = {
        entry: sum(max(_BLOCK, _stat(path, "st_size")) for path in paths)
        for entry, paths in entries.items()
    }
    used = {
        entry: max(_stat(path, "st_atime_ns") for path in paths)
        for entry, paths in entries.items()
    }
    total, dropped = sum(sizes.values()), list[Entry]()
    for entry in sorted(sizes.keys() - {newest}, key=used.__getitem__):
        if total <= max_bytes and len(sizes) - len(dropped) <= _MOST:
            break
        dropped.append(entry)
        total -= sizes[entry]
    return dropped


def _stat(path: Path, what: str) -> int:
    """Return 0 for a file that another process has just deleted."""
    try:
        return int(getattr(path.stat(), what))
    except OSError:
        return 0
