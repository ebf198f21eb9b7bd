"""A run on disk: finished rounds, and the uploads of the round under way.

In the directory there is ``round-0003.safetensors`` for each finished round (0 is the
start), the server's state as tensors and everything else as JSON in its metadata, and
``uploads-0004/exchange-1/<client>.safetensors`` for each reply that the running round
has admitted. What turned out to be bad later is in ``set-aside`` there, with the reason
in a text beside it. Files are written aside and renamed, so that a crash leaves whole
ones, and hold a digest of their content.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from flwr.app import ArrayRecord, MetricRecord
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flwr_fisher.errors import CheckpointError
from flwr_fisher.files import save_tensors
from flwr_fisher.wire import arrays_to_tensors, tensors_to_arrays

logger = logging.getLogger("flwr")

_FORMAT = "4"
_ENDING, _SET_ASIDE = ".safetensors", "set-aside"


@dataclass(frozen=True)
class RoundCheckpoint:
    """The state after a round.

    Parameters
    ----------
    server_round : int
        The round; 0 is the start.
    tensors : dict[str, Tensor]
        The server's state.
    record : dict[str, Any]
        What else belongs to it, as JSON.
    """

    server_round: int
    tensors: dict[str, Tensor]
    record: dict[str, Any]


class CheckpointDir:
    """Reads and writes one run's directory.

    Parameters
    ----------
    path : str | Path
        Made if it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def rounds(self) -> list[int]:
        """Return the numbers of the rounds on disk, in order."""
        names = (
            re.fullmatch(r"round-(\d+)\.safetensors", p.name)
            for p in self.path.iterdir()
        )
        return sorted(int(match[1]) for match in names if match)

    def save_round(self, checkpoint: RoundCheckpoint) -> None:
        """Write a round; earlier rounds' uploads are no longer needed and go."""
        path = self._round(checkpoint.server_round)
        _write(path, checkpoint.tensors, checkpoint.record)
        for folder in self.path.glob("uploads-*"):
            if int(folder.name.removeprefix("uploads-")) < checkpoint.server_round:
                shutil.rmtree(folder)

    def load_round(self, server_round: int) -> RoundCheckpoint:
        """Read a round.

        Raises
        ------
        CheckpointError
            Naming the file, if it is damaged or of another format.
        """
        tensors, record = _read(self._round(server_round))
        return RoundCheckpoint(server_round, tensors, record)

    def save_upload(
        self, folder: str, client: str, arrays: ArrayRecord, metrics: MetricRecord
    ) -> None:
        """Write a reply that was admitted; `folder` is the round and the exchange."""
        path = self._upload(folder, client)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, arrays_to_tensors(arrays), {"metrics": dict(metrics)})

    def load_uploads(
        self, folder: str
    ) -> Iterator[tuple[str, ArrayRecord, MetricRecord]]:
        """Read the replies of a round's exchange that were admitted so far.

        A damaged file is named in the log and set aside, as if its client had not been
        asked yet.
        """
        for path in sorted((self.path / folder).glob(f"*{_ENDING}")):
            client = unquote(path.name.removesuffix(_ENDING))
            try:
                tensors, record = _read(path)
                metrics = MetricRecord(record["metrics"])
            except _OtherFormatError:
                raise
            except (CheckpointError, KeyError, TypeError, ValueError) as error:
                aside = path.parent / _SET_ASIDE / f"{path.name}.damaged"
                aside.parent.mkdir(exist_ok=True)
                path.replace(aside)
                logger.warning(
                    "%s; it is set aside as %s, and %s is asked again",
                    error,
                    aside,
                    client,
                )
                continue
            yield client, tensors_to_arrays(tensors), metrics

    def set_aside(self, folder: str, client: str, reason: str) -> None:
        """Put away an upload that turned out to be bad; its client is not asked again.

        Parameters
        ----------
        folder : str
            The round and the exchange.
        client : str
            Whose it is.
        reason : str
            What is wrong with it.
        """
        path = self._upload(folder, client)
        aside = path.parent / _SET_ASIDE
        aside.mkdir(parents=True, exist_ok=True)
        (aside / f"{path.name.removesuffix(_ENDING)}.txt").write_text(f"{reason}\n")
        if path.exists():
            path.replace(aside / path.name)

    def load_set_aside(self, folder: str) -> dict[str, str]:
        """Return whose uploads were set aside, and why."""
        paths = sorted((self.path / folder / _SET_ASIDE).glob("*.txt"))
        return {
            unquote(path.name.removesuffix(".txt")): path.read_text().rstrip("\n")
            for path in paths
        }

    def _upload(self, folder: str, client: str) -> Path:
        # A registered name may hold what a file's name cannot.
        return self.path / folder / f"{quote(client, safe='')}{_ENDING}"

    def _round(self, server_round: int) -> Path:
        return self.path / f"round-{server_round:04d}.safetensors"


class _OtherFormatError(CheckpointError):
    """The file is of another version of this library."""


def _write(path: Path, tensors: Mapping[str, Tensor], record: object) -> None:
    # safetensors sorts keys by dtype and name; the order matters to a dense curvature.
    metadata = {
        "format": _FORMAT,
        "record": json.dumps(record),
        "keys": json.dumps(list(tensors)),
    }
    save_tensors(path, tensors, metadata | {"digest": _digest(metadata, tensors)})


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise _OtherFormatError(
                    f"{path} has format {metadata.get('format')!r}, and this version "
                    f"reads {_FORMAT!r}: go on with the version of flwr-fisher that "
                    "began the run, or begin anew in another checkpoint_dir"
                )
            tensors = {k: file.get_tensor(k) for k in json.loads(metadata["keys"])}
            digest = metadata.pop("digest")
            if digest != _digest(metadata, tensors):
                raise ValueError("its content has changed since it was written")
            return tensors, json.loads(metadata["record"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of a file's texts and of its tensors, in their order."""
    found = hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode())
    for tensor in tensors.values():
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()
