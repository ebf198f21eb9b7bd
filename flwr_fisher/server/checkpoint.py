"""A run on disk: finished rounds, and the uploads of the round under way.

In the directory there is ``round-0003.safetensors`` for each finished round (0 is the
start), the server's state as tensors and everything else as JSON in its metadata, and
``uploads-0004/exchange-1/<client>.safetensors`` for each reply that the running round
has accepted. Files are written aside and renamed, so that a crash leaves whole ones.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flwr_fisher.errors import CheckpointError
from flwr_fisher.files import save_tensors
from flwr_fisher.wire import arrays_to_tensors, tensors_to_arrays

_FORMAT = "3"


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
        """Write a reply that was accepted; `folder` is the round and the exchange."""
        path = self.path / folder / f"{client}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, arrays_to_tensors(arrays), {"metrics": dict(metrics)})

    def load_uploads(
        self, folder: str
    ) -> Iterator[tuple[str, ArrayRecord, MetricRecord]]:
        """Read the replies of a round's exchange that were accepted so far."""
        for path in sorted((self.path / folder).glob("*.safetensors")):
            tensors, record = _read(path)
            yield path.stem, tensors_to_arrays(tensors), MetricRecord(record["metrics"])

    def _round(self, server_round: int) -> Path:
        return self.path / f"round-{server_round:04d}.safetensors"


def _write(path: Path, tensors: Mapping[str, Tensor], record: object) -> None:
    # safetensors sorts keys by dtype and name; the order matters to a dense curvature.
    metadata = {
        "format": _FORMAT,
        "record": json.dumps(record),
        "keys": json.dumps(list(tensors)),
    }
    save_tensors(path, tensors, metadata)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise CheckpointError(
                    f"{path} has format {metadata.get('format')!r}, and this version "
                    f"reads {_FORMAT!r}: go on with the version of flwr-fisher that "
                    "began the run, or begin anew in another checkpoint_dir"
                )
            tensors = {k: file.get_tensor(k) for k in json.loads(metadata["keys"])}
            return tensors, json.loads(metadata["record"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
