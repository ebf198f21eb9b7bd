"""Files that are written whole or not at all, and digests that show a change."""

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

# The names of files that are not yet whole: this module's, and those of safetensors.
_ASIDE = re.compile(r".+\.\d+\.partial|\.tmp\w{6}")
# The version of each file that this process wrote, or found to have its digest.
_checked: dict[Path, tuple[int, ...]] = {}


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file under another name, then rename it.

    A crash, or a loss of power, leaves the old file or the new one, never a part of
    one. The file is as readable as its folder.

    Parameters
    ----------
    path : Path
        The file, in a folder that exists.
    tensors : Mapping[str, Tensor]
        Tensors by name, on any device.
    metadata : Mapping[str, str], optional
        Texts by name.

    Raises
    ------
    SafetensorError, OSError
        If the disk cannot be written.
    """
    whole = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    # This thread, and no other one, writes a file of this name.
    aside = path.with_name(f"{path.stem}.{threading.get_native_id()}.partial")
    try:
        save_file(whole, aside, dict(metadata) if metadata else None)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        # safetensors makes files that only their owner may read.
        aside.chmod(path.parent.stat().st_mode & 0o666)
        version = _version(aside)
        aside.replace(path)
        _checked[path] = version
        sync_folder(path.parent)
    except Exception:
        aside.unlink(missing_ok=True)
        raise


def save_record(
    path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]
) -> None:
    """Write tensors in their order, texts, and a digest of both.

    Raises
    ------
    SafetensorError, OSError
        If the disk cannot be written.
    """
    # safetensors sorts keys by dtype and name; the order matters to a dense curvature.
    metadata = {**texts, "keys": json.dumps(list(tensors))}
    metadata["digest"] = digest_of(metadata, tensors)
    save_tensors(path, tensors, metadata)


def load_record(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file of :func:`save_record`, and check its digest.

    A process checks only files that it did not write, each once until it changes: TCT
    reads its features in each step, and to check them takes longer than the step.

    Raises
    ------
    SafetensorError, OSError, KeyError, ValueError
        If the file is damaged, or is another one.
    """
    version = _version(path)
    with safe_open(path, "pt") as file:
        texts = file.metadata() or {}
        digest = texts.pop("digest")
        tensors = {k: file.get_tensor(k) for k in json.loads(texts["keys"])}
    if _checked.get(path) != version and digest != digest_of(texts, tensors):
        raise ValueError("its content has changed since it was written")
    _checked[path] = version
    del texts["keys"]
    return tensors, texts


def _version(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def sweep(folder: Path, older_than: float = 0.0) -> None:
    """Delete the partial files of killed processes.

    Parameters
    ----------
    folder : Path
        The folder.
    older_than : float
        Seconds after which no process still writes a partial file; 0 if no other
        process may write here.
    """
    asides = (path for path in folder.glob("*") if _ASIDE.fullmatch(path.name))
    for path in asides:
        with suppress(OSError):  # another process may sweep, too
            if time.time() - path.stat().st_mtime >= older_than:
                path.unlink()


def digest_of(record: object, tensors: Mapping[str, Tensor] | None = None) -> str:
    """Return a digest of a JSON value, and of tensors in their order.

    Examples
    --------
    >>> digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1}) != digest_of({})
    True
    """
    digest = hashlib.blake2b(json.dumps(record, sort_keys=True).encode())
    for tensor in (tensors or {}).values():
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(to_bytes(tensor.cpu()).numpy().data)
    return digest.hexdigest()


def to_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, as uint8 in one dimension, on its device.

    Examples
    --------
    >>> to_bytes(torch.ones(1))
    tensor([  0,   0, 128,  63], dtype=torch.uint8)
    """
    flat = tensor.detach().contiguous().view(-1)
    # NumPy's empty arrays have a stride of 0, and torch makes no bytes of that.
    return flat.view(torch.uint8) if len(flat) else flat.new_empty(0).byte()


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk, so that a renamed file stays renamed."""
    if os.name != "posix":  # other systems cannot open a folder
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
