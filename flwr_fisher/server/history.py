"""A run's metrics on disk: a line a round, so that no round repeats the others'."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr_fisher.errors import CheckpointError
from flwr_fisher.files import digest_of
from flwr_fisher.log_lines import logger
from flwr_fisher.server.named_files import writing

Record = dict[str, Any]


class History:
    """A file of JSON lines, each with its round, a record and a digest.

    A round that is made again has another line: the last one counts. A line that was
    not finished when the server was killed is of a round that was not finished, either,
    and is taken away.

    Parameters
    ----------
    path : Path
        The file; made with the first line.
    run : str
        The run that it is of.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run

    def append(self, server_round: int, record: Mapping[str, Any]) -> None:
        """Write a round's record; it is on the disk when this returns."""
        line = {"run": self.run, "round": server_round, "record": record}
        text = json.dumps({**line, "digest": digest_of(line)})
        with writing(self.path), self.path.open("a") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())

    def load(self, last_round: int) -> dict[int, Record]:
        """Return the records of the rounds up to the last one that was finished.

        Raises
        ------
        CheckpointError
            Naming the line that is damaged or of another run, and the way out.
        """
        if not self.path.exists():
            logger.warning(
                "%s is gone: the metrics of the rounds before are lost", self.path
            )
            return {}
        lines = self.path.read_bytes().split(b"\n")
        records: dict[int, Record] = {}
        whole = 0
        for number, text in enumerate(lines[:-1], start=1):
            try:
                line = json.loads(text)
                digest = line.pop("digest")
                if digest != digest_of(line):
                    raise ValueError("its content has changed since it was written")
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                if number == len(lines) - 1 and last_round in records:
                    break  # cut off by a crash
                raise self._damaged(number, str(error)) from error
            if line["run"] != self.run:
                raise self._damaged(number, "it is of another run")
            if line["round"] <= last_round:
                records[line["round"]] = line["record"]
            whole += len(text) + 1
        gaps = set(range(min(records, default=0), last_round + 1)) - records.keys()
        if gaps:
            raise self._damaged(len(lines), f"no line of round {min(gaps)}")
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)
        return records

    def _damaged(self, number: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}, line {number}, is damaged: {reason}; move the file away to "
            "go on: only the metrics of the rounds before are lost"
        )
