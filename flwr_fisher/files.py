"""Tensors on disk, whole or not at all."""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

ASIDE = ".partial"  # how a file ends that is not yet whole


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file aside and rename it, so that a crash leaves whole files.

    Parameters
    ----------
    path : Path
        The file; its folder is there.
    tensors : Mapping[str, Tensor]
        Tensors by name, on any device.
    metadata : Mapping[str, str], optional
        Texts by name.

    Raises
    ------
    SafetensorError, OSError
        If the disk refuses.
    """
    aside = path.with_suffix(f".{os.getpid()}{ASIDE}")
    whole = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    try:
        save_file(whole, aside, dict(metadata) if metadata else None)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    except Exception:
        aside.unlink(missing_ok=True)
        raise
