"""Files that are written whole or not at all, and digests that show a change."""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Check = Callable[[Mapping[str, str], Mapping[str, Tensor]], str]  # makes a digest
# The names of files that are not yet whole: this module's, and those of safetensors.
_ASIDE = re.compile(r".+\.\d+\.partial|\.tmp\w{6}")


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    durable: bool = True,
) -> None:
    """Write a safetensors file under another name, then rename it.

    A crash leaves the old file or the new one, never a part of one.

    Parameters
    ----------
    path : Path
        The file, in a folder that exists.
    tensors : Mapping[str, Tensor]
        Tensors by name, on any device.
    metadata : Mapping[str, str], optional
        Texts by name.
    durable : bool, default True
        Wait until the file is on the disk, where it survives a loss of power.

    Raises
    ------
    SafetensorError, OSError
        If the disk cannot be written.
    """
    whole = _on_cpu(tensors)
    texts = dict(metadata) if metadata else None
    _save(path, lambda aside: save_file(whole, aside, texts), durable)


def save_record(
    path: Path,
    tensors: Mapping[str, Tensor],
    texts: Mapping[str, str],
    *,
    durable: bool = True,
    check: Check | None = None,
) -> str:
    """Write tensors in their order, texts, and a digest of both; return the digest.

    `check` computes the digest in place of :func:`digest_of`.

    Raises
    ------
    SafetensorError, OSError
        If the disk cannot be written.
    """
    # safetensors sorts keys by dtype and name; the order matters to a dense curvature.
    metadata = {**texts, "keys": json.dumps(list(tensors))}
    whole = _on_cpu(tensors)
    metadata["digest"] = (check or digest_of)(metadata, whole)
    save_tensors(path, whole, metadata, durable=durable)
    return metadata["digest"]


def load_record(
    path: Path, digest: str | None = None, *, check: Check | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file of :func:`save_record`, and check its digest.

    Parameters
    ----------
    path : Path
        The file.
    digest : str, optional
        The digest that :func:`save_record` returned, if another file may have replaced
        this one.
    check : Callable, optional
        The function that computed the digest.

    Raises
    ------
    SafetensorError, OSError, KeyError, ValueError
        If the file is damaged, or is another one.
    """
    with safe_open(path, "pt") as file:
        texts = file.metadata() or {}
        own = texts.pop("digest")
        tensors = {k: file.get_tensor(k) for k in json.loads(texts["keys"])}
    if own != (check or digest_of)(texts, tensors):
        raise ValueError("its content has changed since it was written")
    if digest not in (None, own):
        raise ValueError("another file has replaced the one that was written")
    del texts["keys"]
    return tensors, texts


def save_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all, as :func:`save_tensors` does.

    Raises
    ------
    OSError
        If the disk cannot be written.
    """
    _save(path, lambda aside: aside.write_text(text), durable=True)


def sweep(folders: Iterable[Path]) -> None:
    """Delete the partial files of killed processes; no other process may write here."""
    for folder in folders:
        for path in folder.glob("*"):
            if is_aside(path):
                path.unlink(missing_ok=True)


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


def aside_of(path: Path) -> Path:
    """Return where this thread, and no other one, writes a file that is not whole."""
    return path.with_name(f"{path.stem}.{threading.get_native_id()}.partial")


def is_aside(path: Path) -> bool:
    """Return whether a file is one that somebody writes, or was writing, aside."""
    return bool(_ASIDE.fullmatch(path.name))


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}


def _save(path: Path, write: Callable[[Path], object], durable: bool) -> None:
    aside = aside_of(path)
    try:
        write(aside)
        if durable:
            with aside.open("rb") as file:
                os.fsync(file.fileno())
        aside.replace(path)
        if durable:
            sync_folder(path.parent)
    except Exception:
        aside.unlink(missing_ok=True)
        raise
