"""A run on disk: finished rounds, and the uploads of the round under way.

In the directory there are (format 5):

``run.json``
    The run's id, which all other files hold, and its options.
``round-0003.safetensors``
    The server's state after a round; 0 is the start. Of the last two rounds.
``history.jsonl``
    The metrics of all finished rounds, a line each.
``uploads-0004/exchange-1/<client>.safetensors``
    A reply that the running round has admitted, and whose it is. They stay until the
    next round is finished. What turned out to be bad later is in ``set-aside`` there,
    with a note of the reason beside it.
``uploads-0004/exchange-1/exchange.json``
    Who was asked, since when, and of whose replies the step was made.
``lock``, ``holder.txt``
    Which server has the directory.

All but the last two have a digest of their content, and say what they are and of which
run, so that none passes for another. Files are written aside and renamed, with their
folder synced: a crash leaves whole ones. A later version reads this format, or refuses
it by its number.

Long: one class knows the whole format.
"""

import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from safetensors import SafetensorError
from torch import Tensor

from flwr_fisher.errors import CheckpointError
from flwr_fisher.files import digest_of, load_texts, sweep, sync_folder
from flwr_fisher.log_lines import logger
from flwr_fisher.server.history import History
from flwr_fisher.server.identity import Identity
from flwr_fisher.server.lock import FolderLock
from flwr_fisher.server.named_files import (
    FORMAT,
    OtherFormatError,
    check_name,
    read,
    read_json,
    write,
    write_json,
)
from flwr_fisher.wire import arrays_to_tensors, tensors_to_arrays

_ENDING, _SET_ASIDE = ".safetensors", "set-aside"
_RUN, _EXCHANGE, _HISTORY = "run.json", "exchange.json", "history.jsonl"
_ROUND = re.compile(r"round-(\d{4,})\.safetensors")
_UPLOADS = re.compile(r"uploads-(\d{4,})")
_NUMBERED = re.compile(r"exchange-(\d+)")
_LONGEST = 160  # characters of a file's name that are a client's
_KEPT = 2  # rounds: the last one, and the one before, from which it can be made again


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
        What else is known of it, for the history.
    absences : dict[str, Any]
        Which clients sit out then.
    """

    server_round: int
    tensors: dict[str, Tensor]
    record: dict[str, Any] = field(default_factory=dict)
    absences: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExchangeRecord:
    """What is to be remembered of an exchange under way.

    Parameters
    ----------
    clients : list[str] | None
        The names of those who were sampled; None in a collection window, where whoever
        comes is asked.
    wanted : int
        How many replies were wanted.
    connected : int
        How many clients there were.
    opened : float
        When it began, in seconds since 1970.
    closed : list[str] | None
        Of whose replies the step was made; None while none was.
    missing, rejected : dict[str, str]
        From whom nothing came, or nothing of use, once it is closed; with the reasons.
    absences : dict[str, Any]
        Who sits out then.
    """

    clients: list[str] | None
    wanted: int
    connected: int
    opened: float
    closed: list[str] | None = None
    missing: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    absences: dict[str, Any] = field(default_factory=dict)

    def reopened(self) -> "ExchangeRecord":
        """Return it as of an exchange that begins now, and with the same clients."""
        return replace(self, opened=time.time(), closed=None)


class CheckpointDir:
    """Reads and writes one run's directory, and keeps other servers out of it.

    Parameters
    ----------
    path : str | Path
        Made if it does not exist.

    Raises
    ------
    CheckpointError
        If another server has it, or it is an empty string.
    """

    def __init__(self, path: str | Path) -> None:
        if path == "":
            raise CheckpointError('checkpoint_dir is "": give a folder, or None')
        self.path = Path(path).expanduser()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.path)
        sweep([self.path, *self.path.glob("uploads-*/**/")])
        self.run = ""

    def release(self) -> None:
        """Let other servers have it."""
        self._lock.release()

    # The run

    def begin(self, options: Mapping[str, Any]) -> None:
        """Write down that a run with these options begins."""
        self.run = secrets.token_hex(8)
        (self.path / _HISTORY).unlink(missing_ok=True)  # of a run without a round
        plain = {  # of NumPy's numbers, those that JSON holds
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in options.items()
        }
        write_json(self.path / _RUN, self._named(_RUN), {"options": plain})

    def load_options(self) -> dict[str, Any]:
        """Return the run's options, and learn which run it is.

        Raises
        ------
        CheckpointError
            If they are damaged or gone.
        """
        path = self.path / _RUN
        way_out = f"begin anew in another checkpoint_dir; the last model is in {self}"
        if not path.exists() and (rounds := self.rounds()):
            read(self._round(rounds[-1]), {}, way_out)  # of another format perhaps
        name, record = read_json(path, way_out)
        self.run = name["run"]
        runs = {self._run_of(self._round(n)) for n in self.rounds()}
        if runs and self.run not in runs:
            raise CheckpointError(
                f"{path} is of another run than the rounds beside it: put theirs back, "
                f"or {way_out}"
            )
        return dict(record["options"])

    def _run_of(self, path: Path) -> str | None:
        """Return which run a file says it is of; one that is damaged says any."""
        try:
            return load_texts(path).get("run")
        except (SafetensorError, OSError):
            return self.run

    def __str__(self) -> str:
        return str(self._round((self.rounds() or [0])[-1]))

    # Rounds

    def rounds(self) -> list[int]:
        """Return the numbers of the rounds on disk, in order."""
        return sorted(int(m[1]) for _, m in self._matching(_ROUND))

    def save_round(self, checkpoint: RoundCheckpoint) -> None:
        """Write a round; what only earlier ones needed goes."""
        server_round = checkpoint.server_round
        self._history().append(server_round, checkpoint.record)
        path = self._round(server_round)
        record = {"absences": checkpoint.absences}
        write(path, self._named(path.name), checkpoint.tensors, record)
        for old, match in self._matching(_ROUND):
            if int(match[1]) <= server_round - _KEPT:
                old.unlink()
        for folder, match in self._matching(_UPLOADS):
            if int(match[1]) < server_round:
                shutil.rmtree(folder)

    def load_round(self, server_round: int) -> RoundCheckpoint:
        """Read a round; its record is empty.

        Raises
        ------
        CheckpointError
            Naming the file, if it is damaged, of another format or another run.
        """
        path = self._round(server_round)
        earlier = [n for n in self.rounds() if n < server_round]
        way_out = "begin anew in another checkpoint_dir"
        if earlier:
            way_out = f"delete it to go on after round {earlier[-1]}"
        tensors, record = read(path, self._named(path.name), way_out)
        return RoundCheckpoint(server_round, tensors, {}, record.get("absences", {}))

    def load_history(self, last_round: int) -> dict[int, dict[str, Any]]:
        """Return the records of all rounds up to one.

        Raises
        ------
        CheckpointError
            If a line is damaged.
        """
        return self._history().load(last_round)

    # Exchanges

    def save_exchange(self, folder: str, record: ExchangeRecord) -> None:
        """Remember how an exchange stands; `folder` is the round and the exchange."""
        path = self._folder(folder) / _EXCHANGE
        write_json(path, self._named(f"{folder}/{_EXCHANGE}"), asdict(record))

    def load_exchange(self, folder: str) -> ExchangeRecord | None:
        """Return how an exchange stands; None if it has not begun.

        Raises
        ------
        CheckpointError
            If it is damaged or of another run.
        """
        path = self.path / folder / _EXCHANGE
        if not path.exists():
            return None
        way_out = "delete it to have the exchange's clients sampled anew"
        name, record = read_json(path, way_out)
        check_name(path, name, self._named(f"{folder}/{_EXCHANGE}"), way_out)
        return ExchangeRecord(**record)

    def reopen(self, server_round: int) -> bool:
        """Have the clients of the last exchange asked again.

        It is the last one of this round, or that of a collection window in the next
        one, in which too few came.

        Returns
        -------
        bool
            Whether it is of this round, which is then to be made again.

        Raises
        ------
        CheckpointError
            If its uploads, or the round before, are no longer there, or the next round
            has begun, whose uploads start from this one's model.
        """
        if under_way := self._last_exchange(server_round + 1):
            record = self.load_exchange(under_way)
            if record is None or record.clients is not None:
                raise CheckpointError(
                    f"{self.path}: round {server_round + 1} has begun with the model "
                    f"of round {server_round}, which cannot be opened again: go on "
                    "without reopen=True"
                )
            self.save_exchange(under_way, replace(record, opened=time.time()))
            return False
        last = self._last_exchange(server_round)
        if last is None or server_round - 1 not in self.rounds():
            raise CheckpointError(
                f"{self.path} has a run up to round {server_round}, whose uploads and "
                "start are not there any more: it cannot be opened again"
            )
        if (record := self.load_exchange(last)) is not None:
            self.save_exchange(last, record.reopened())
        self._tell_left_behind(server_round, last)
        return True

    def _tell_left_behind(self, server_round: int, last: str) -> None:
        """Tell who missed an exchange before the last one, which alone opens again."""
        round_folder, _, name = last.partition("/")
        missing = set[str]()
        for index in range(1, int(name.rpartition("-")[2])):
            record = self.load_exchange(f"{round_folder}/exchange-{index}")
            missing |= set() if record is None else record.missing.keys()
        if missing:
            logger.warning(
                "reopen: round %s is opened at the last of its exchanges, without %s, "
                "who missed an earlier one",
                server_round,
                ", ".join(sorted(missing)),
            )

    def _last_exchange(self, server_round: int) -> str | None:
        """Return the folder of a round's last exchange, if it has begun one."""
        uploads = self.path / f"uploads-{server_round:04d}"
        names = (path.name for path in uploads.glob("exchange-*"))
        numbers = [int(m[1]) for name in names if (m := _NUMBERED.fullmatch(name))]
        return f"{uploads.name}/exchange-{max(numbers)}" if numbers else None

    def is_last(self, folder: str) -> bool:
        """Return whether no later exchange of a folder's round has begun."""
        server_round = int(folder.partition("/")[0].rpartition("-")[2])
        return self._last_exchange(server_round) == folder

    def save_upload(
        self,
        folder: str,
        client: Identity,
        arrays: ArrayRecord,
        metrics: MetricRecord,
    ) -> None:
        """Write a reply that was admitted."""
        self._folder(folder)
        path = self._upload(folder, client.name)
        record = {"metrics": dict(metrics), "client": client.to_record()}
        name = self._named(f"{folder}/{path.name}")
        write(path, name, arrays_to_tensors(arrays), record)

    def has_upload(self, folder: str, client: str) -> bool:
        """Return whether there is an upload of a client."""
        return self._upload(folder, client).exists()

    def load_uploads(
        self, folder: str
    ) -> Iterator[tuple[Identity, ArrayRecord, MetricRecord]]:
        """Read the replies of a round's exchange that were admitted so far.

        A damaged file, or one that belongs elsewhere, is named in the log and set
        aside, as if its client had not been asked yet.
        """
        for path in sorted((self.path / folder).glob(f"*{_ENDING}")):
            try:
                name = self._named(f"{folder}/{path.name}")
                tensors, record = read(path, name, "")
                client = Identity.of_record(record["client"])
                metrics = MetricRecord(record["metrics"])
            except OtherFormatError:
                raise
            except (CheckpointError, KeyError, TypeError, ValueError) as error:
                aside = path.parent / _SET_ASIDE / f"{path.name}.damaged"
                aside.parent.mkdir(exist_ok=True)
                path.replace(aside)
                logger.warning(
                    "%s; it is set aside as %s, and %s is asked again",
                    error,
                    aside,
                    unquote(path.name.removesuffix(_ENDING)),
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
        note = aside / f"{path.name.removesuffix(_ENDING)}.json"
        name = self._named(f"{folder}/{_SET_ASIDE}/{note.name}")
        write_json(note, name, {"client": client, "reason": reason})
        if path.exists():
            path.replace(aside / path.name)

    def load_set_aside(self, folder: str) -> dict[str, str]:
        """Return whose uploads were set aside, and why.

        Raises
        ------
        CheckpointError
            If a note is damaged or of another run.
        """
        notes = {}
        way_out = "delete it to have its client asked again"
        for path in sorted((self.path / folder / _SET_ASIDE).glob("*.json")):
            name, record = read_json(path, way_out)
            own = self._named(f"{folder}/{_SET_ASIDE}/{path.name}")
            check_name(path, name, own, way_out)
            notes[str(record["client"])] = str(record["reason"])
        return notes

    def _named(self, what: str) -> dict[str, str]:
        """Return what a file says of itself, so that none passes for another."""
        return {"format": FORMAT, "run": self.run, "file": what}

    def _matching(self, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
        """Return the entries of that name; what else is there is not ours."""
        matches = ((p, pattern.fullmatch(p.name)) for p in self.path.iterdir())
        return [(path, match) for path, match in matches if match]

    def _folder(self, folder: str) -> Path:
        path = self.path / folder
        if not path.exists():
            path.mkdir(parents=True)
            sync_folder(path.parent.parent)
            sync_folder(path.parent)
        return path

    def _history(self) -> History:
        return History(self.path / _HISTORY, self.run)

    def _upload(self, folder: str, client: str) -> Path:
        # A registered name may hold what a file's name cannot, and be longer.
        name = quote(client, safe="")
        if len(name) > _LONGEST:
            name = f"{name[:_LONGEST]}-{digest_of(client)[:16]}"
        return self.path / folder / f"{name}{_ENDING}"

    def _round(self, server_round: int) -> Path:
        return self.path / f"round-{server_round:04d}.safetensors"
