"""The journal of a run: a folder with all that is needed to resume it.

The folder contains (format 6):

``journal.jsonl``
    A line of JSON for each event, in order, with the run's id and a digest of the line.
    The events are: the run has ``begun``, with its options; an exchange was
    ``opened``, with the clients that it asks; a reply was ``admitted``, with its client
    and metrics; an exchange was ``closed``, with the clients whose replies it used; a
    round is ``finished``, with its metrics. (Version 0.3 also wrote ``set aside``, for
    a reply that turned out to be bad, and moved its file away.)
``round-0003.safetensors``
    The server's state after a round, for the last two rounds; 0 is the start.
``uploads-0004/exchange-1/<client>.safetensors``
    The arrays of an admitted reply. They stay until the next round is finished.
``lock``, ``holder.txt``
    The server that uses the folder.

Only the journal says what has happened. A file beside it counts if it has the digest in
its line. So a file is written first (under another name, then renamed, and its folder
synced), and its line afterwards. A crash can leave a file without a line, or the
beginning of a last line; both are ignored. A later version reads this format, or
refuses it by its number.
"""

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from filelock import FileLock, Timeout
from flwr.app import ArrayRecord, MetricRecord
from safetensors import SafetensorError
from torch import Tensor

from flwr_fisher.errors import (
    CheckpointError,
    ConfigurationError,
    kept_record,
    plain,
)
from flwr_fisher.files import (
    digest_of,
    load_record,
    save_record,
    save_text,
    sweep,
    sync_folder,
)
from flwr_fisher.log_lines import logger
from flwr_fisher.server.cohort import Identity
from flwr_fisher.wire import arrays_to_tensors, tensors_to_arrays

FORMAT = "6"
# After a SuperLink was killed, its ServerApp ends only after 15 seconds, or more on a
# busy machine, while the next one has started.
PATIENCE = 60.0  # seconds
_FILE = "journal.jsonl"
_LONGEST = 160  # characters of a client's name in a file's name
_ELSEWHERE = "begin a new run in another checkpoint_dir"

Event = dict[str, Any]


@dataclass(frozen=True)
class ExchangeRecord:
    """The journal's record of an exchange.

    Parameters
    ----------
    clients : list[str] | None
        The names of the sampled clients; None in a collection window, in which every
        client that connects is asked.
    wanted : int
        How many replies the server wanted.
    connected : int
        How many clients there were.
    opened : float
        When it began, in seconds since 1970.
    optional : bool
        Whether the round can do without the exchange.
    closed : list[str] | None
        The clients whose replies the step used; None before the step.
    missing, rejected : dict[str, str]
        After the exchange was closed: the clients without a reply, and those with a
        reply that was not usable, with the reasons.
    absences : dict[str, Any]
        The clients that sit out afterwards.
    """

    clients: list[str] | None
    wanted: int
    connected: int
    opened: float
    optional: bool = False
    closed: list[str] | None = None
    missing: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    absences: dict[str, Any] = field(default_factory=dict)

    def again(self) -> "ExchangeRecord":
        """Return the record of the exchange when it is opened again, now."""
        return replace(self, opened=time.time(), closed=None)


class Journal:
    """Writes and reads a run's events, and locks its folder.

    Without a folder it remembers the exchanges of the current round, and writes
    nothing.

    Parameters
    ----------
    path : str | Path | None
        The folder; made if it does not exist.

    Attributes
    ----------
    run : str
        The run's id; empty without a folder, or before the run has begun.
    options : dict[str, Any]
        The options with which the run began.
    finished : dict[int, dict[str, Any]]
        The ``metrics`` and ``absences`` of each finished round.

    Raises
    ------
    CheckpointError
        If another server has the folder, it cannot be written, or it is a file or an
        empty string.
    """

    def __init__(self, path: str | Path | None) -> None:
        if path == "" or (path is not None and Path(path).expanduser().is_file()):
            wrong = f"a file, {path}" if path else '""'
            raise CheckpointError(f"checkpoint_dir is {wrong}: pass a folder, or None")
        self.run, self.options = "", dict[str, Any]()
        self.finished: dict[int, Event] = {}
        self._exchanges: dict[tuple[int, int], ExchangeJournal] = {}
        self._end = 0  # the end of the last whole line
        self.path = None if path is None else Path(path).expanduser()
        if self.path is not None:
            with _writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = FolderLock(self.path)
                sweep([self.path, *self.path.glob("uploads-*/**/")])

    def release(self) -> None:
        """Release the folder's lock."""
        if self.path is not None:
            self._lock.release()

    def begin(self, options: Mapping[str, Any]) -> None:
        """Record the begin of a run with its options, which are JSON values."""
        self.run, self._end = secrets.token_hex(8) if self.path else "", 0
        self.append("begun", format=FORMAT, options=dict(options))

    def load(self) -> list[int]:
        """Read the journal; return the rounds with saved states, in order.

        Raises
        ------
        CheckpointError
            It names the line that is damaged or belongs to another run or version, or
            the file with another format, and says what to do.
        """
        if self.path is None:
            return []
        file = self.path / _FILE
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        for number, text in enumerate(lines, start=1):
            event = self._event(text, where := f"{file}, line {number}")
            with kept_record(where):
                self._apply(event)
            self._end += len(text) + 1
        # An exchange without its folder has not begun.
        self._exchanges = {
            key: exchange
            for key, exchange in self._exchanges.items()
            if exchange.folder.is_dir()
        }
        if rounds := self.rounds():
            self._prune(rounds[-1])
        elif self.finished or any(self.path.glob("round-*[1-9]*.safetensors")):
            raise CheckpointError(
                f"{file}, or the state of its last round, is missing or incomplete: "
                f"restore it, or {_ELSEWHERE}"
            )
        return rounds

    def _event(self, text: bytes, where: str) -> Event:
        """Read and check a line of the journal."""
        first, out = not self._end, "delete the line to go on without its event"
        if first:
            out = f"{_ELSEWHERE}; the last model is beside it"
        try:
            event: Event = json.loads(text)
            if first and event.get("format") != FORMAT:
                raise CheckpointError(
                    f"{where} has format {event.get('format')!r}, but this version "
                    f"reads {FORMAT!r}: resume with the version of flwr-fisher that "
                    f"began the run, or {_ELSEWHERE}"
                )
            del event["digest"]
            if _line(event).encode() != text + b"\n":
                raise ValueError("its content has changed since it was written")
            run = event["run"]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{where} is damaged: {error}; {out}") from error
        self.run = run if first else self.run
        if run != self.run:
            raise CheckpointError(f"{where} belongs to another run; {out}")
        return event

    def append(self, event: str, **content: Any) -> None:
        """Write an event to the disk."""
        at = datetime.now(UTC).isoformat(" ", "seconds")
        line = {"at": at, "event": event, "run": self.run, **content}
        if self.path is not None:
            self._write_line(self.path / _FILE, line)
        self._apply(line)

    def _write_line(self, file: Path, line: Event) -> None:
        text = _line(line)
        with _writing(file):
            if not self._end:  # so that a journal has its first line, or does not exist
                save_text(file, text)
            else:
                with file.open("r+b") as lines:
                    lines.seek(self._end)
                    lines.truncate()  # a line that a crash, or a full disk, cut off
                    lines.write(text.encode())
                    lines.flush()
                    os.fsync(lines.fileno())
        self._end += len(text)  # ASCII, as JSON is written

    def _apply(self, event: Event) -> None:
        """Update the state by an event, when it happens and when it is read."""
        match event["event"]:
            case "begun":
                self.options = event["options"]
            case "finished":
                last = event["round"]
                self.finished[last] = event
                self._exchanges = {
                    k: e for k, e in self._exchanges.items() if k[0] >= last
                }
            case kind:
                now = event["round"], event["exchange"]
                if kind == "opened":
                    # Perhaps again: the round has begun, and its later exchanges, which
                    # started from the state after this one, have not.
                    self.finished.pop(now[0], None)
                    self._exchanges = {
                        key: exchange
                        for key, exchange in self._exchanges.items()
                        if key[0] != now[0] or key <= now
                    }
                self.exchange_journal(*now).apply(event)

    # --- rounds

    def rounds(self) -> list[int]:
        """Return the finished rounds with saved states, in order."""
        return sorted(n for n in self.finished if self._state(n).exists())

    def finish(
        self,
        server_round: int,
        tensors: Mapping[str, Tensor],
        metrics: Mapping[str, Any],
        absences: Mapping[str, Any],
    ) -> None:
        """Record a finished round, with the state after it.

        Delete what only earlier rounds needed. Round 0 is the start. Metrics, and the
        clients that sit out afterwards, are JSON values.
        """
        content = self.write(self._state(server_round), tensors)
        known = {"metrics": dict(metrics), "absences": dict(absences)}
        self.append("finished", round=server_round, **known, **content)
        self._prune(server_round)

    def load_state(self, server_round: int) -> dict[str, Tensor]:
        """Read the server's state after a round.

        Raises
        ------
        CheckpointError
            If the file is not the one that the journal names. It names the file.
        """
        earlier, out = [n for n in self.rounds() if n < server_round], _ELSEWHERE
        if earlier:
            out = f"delete it to go on after round {earlier[-1]}"
        return self.read(self._state(server_round), self.finished[server_round], out)

    def _state(self, server_round: int) -> Path:
        return (self.path or Path()) / f"round-{server_round:04d}.safetensors"

    def _prune(self, server_round: int) -> None:
        """Delete what is no longer needed after a round."""
        if self.path is not None:
            # The round before stays, so that this one can be done again.
            self._state(server_round - 2).unlink(missing_ok=True)
            uploads = self.path / f"uploads-{server_round - 1:04d}"
            shutil.rmtree(uploads, ignore_errors=True)

    # --- exchanges

    def exchange_journal(self, server_round: int, index: int) -> "ExchangeJournal":
        """Return the record of a round's exchange, counted from 1."""
        key = (server_round, index)
        return self._exchanges.setdefault(key, ExchangeJournal(self, *key))

    def reopen(self, server_round: int) -> bool:
        """Open the last exchange again, so that its clients are asked again.

        It is the last exchange of this round. If too few clients replied in a
        collection window of the next round, it is the exchange of that window.

        Returns
        -------
        bool
            Whether it is an exchange of this round, which must then be repeated.

        Raises
        ------
        CheckpointError
            If its uploads, or the state of the round before, have been deleted, or if
            the next round has begun: that round's uploads start from this round's
            model.
        """
        if under_way := self.last_exchange(server_round + 1):
            if self._state(server_round + 1).exists():
                return False  # finished, then opened again by a server that died
            record = under_way.record
            if record is None or record.clients is not None:
                raise CheckpointError(
                    f"{self.path}: round {server_round + 1} has begun with the model "
                    f"of round {server_round}, so that round cannot be opened again: "
                    "resume without reopen=True"
                )
            under_way.note(record.again())
            return False
        last = self.last_exchange(server_round)
        if last is None or server_round - 1 not in self.rounds():
            raise CheckpointError(
                f"{self.path} no longer has the uploads and the start of round "
                f"{server_round}, so that round cannot be opened again: resume "
                "without reopen=True"
            )
        before = server_round - 1  # is whole; this round is given up
        self.read(
            self._state(before), self.finished[before], "resume without reopen=True"
        )
        if last.record is not None:
            last.note(last.record.again())
        return True

    def last_exchange(self, server_round: int) -> "ExchangeJournal | None":
        """Return the last exchange of a round that is not optional, if there is one."""
        begun = [
            key
            for key, exchange in self._exchanges.items()
            if key[0] == server_round
            and not (exchange.record is not None and exchange.record.optional)
        ]
        return self._exchanges[max(begun)] if begun else None

    # --- files beside the journal

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Write tensors; return the file's entry for a line."""
        if self.path is None:
            return {}
        name = str(path.relative_to(self.path))
        with _writing(path):
            # Two runs with one seed have the same tensors, but must not be mixed.
            content = save_record(path, tensors, {"run": self.run, "file": name})
        return {"file": name, "content": content}

    def read(self, path: Path, event: Event, out: str = "") -> dict[str, Tensor]:
        """Read the tensors of an event; `out` says what to do, for an error.

        Raises
        ------
        CheckpointError
            If the file is damaged, or belongs to another run. It names the file.
        """
        try:
            return load_record(path, event["content"])[0]
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            reason = f"{path} is damaged, or not the file of this run: {error}"
            raise CheckpointError(f"{reason}; {out}" if out else reason) from error


class ExchangeJournal:
    """An exchange's part of a journal, as :meth:`Journal.exchange_journal` returns it.

    Attributes
    ----------
    record : ExchangeRecord | None
        The exchange's record; None if it has not begun.
    """

    def __init__(self, journal: Journal, server_round: int, index: int) -> None:
        self.server_round, self.index = server_round, index
        self.record: ExchangeRecord | None = None
        self._journal = journal
        self._admitted: dict[str, Event] = {}

    @property
    def folder(self) -> Path:
        """The folder of the exchange's files."""
        name = f"uploads-{self.server_round:04d}/exchange-{self.index}"
        return (self._journal.path or Path()) / name

    @property
    def on_disk(self) -> bool:
        """Whether the run is kept on disk."""
        return self._journal.path is not None

    def apply(self, event: Event) -> None:
        """Update the record by an event of this exchange."""
        match event["event"]:
            case "opened" | "closed":
                self.record = ExchangeRecord(**event["record"])
            case "admitted":
                MetricRecord(event["metrics"])  # is one
                self._admitted[Identity(**event["client"]).name] = event
            case "set aside":  # by version 0.3
                self._admitted.pop(event["client"], None)

    def note(self, record: ExchangeRecord) -> ExchangeRecord:
        """Write an event of this exchange."""
        self._make_folder()
        event = "opened" if record.closed is None else "closed"
        self._append(event, record=asdict(record))
        return record

    def open(
        self,
        clients: list[str] | None,
        wanted: int,
        connected: int,
        *,
        optional: bool = False,
    ) -> ExchangeRecord:
        """Record the begin of the exchange, with its clients."""
        now = time.time()
        return self.note(ExchangeRecord(clients, wanted, connected, now, optional))

    def reopen(self, lost: Collection[str]) -> ExchangeRecord:
        """Record that the exchange must be closed again, because uploads are damaged.

        Raises
        ------
        CheckpointError
            If a later exchange has begun, which depends on the lost uploads.
        """
        assert self.record is not None
        last = self._journal.last_exchange(self.server_round)
        if last is not None and last.index > self.index:
            names = ", ".join(sorted(lost))
            raise CheckpointError(
                f"{self.folder}: the upload of {names} is damaged, or no longer "
                "accepted, and the round's later exchanges used it: restore it, or "
                f"delete {self.folder.parent} to do the round again"
            )
        return self.note(self.record.again())

    def close(
        self,
        clients: Iterable[str],
        missing: Mapping[str, str],
        rejected: Mapping[str, str],
        absences: Mapping[str, Any],
    ) -> None:
        """Record the clients whose uploads the step used, for a resumed run.

        The other arguments are those of :class:`ExchangeRecord`.
        """
        assert self.record is not None
        closed = replace(
            self.record,
            closed=sorted(clients),
            missing=dict(missing),
            rejected=dict(rejected),
            absences=dict(absences),
        )
        if closed != self.record:
            self.note(closed)

    def save(
        self, client: Identity, arrays: ArrayRecord, metrics: MetricRecord
    ) -> None:
        """Save a reply as soon as it is admitted."""
        content = {}
        if self.on_disk:
            self._make_folder()
            tensors = arrays_to_tensors(arrays)
            content = self._journal.write(self._path(client.name), tensors)
        known = {"client": asdict(client), "metrics": dict(metrics)}
        self._append("admitted", **known, **content)

    def has(self, client: Identity) -> bool:
        """Return whether an upload of a client was admitted."""
        return client.name in self._admitted

    def uploads(self) -> Iterator[tuple[Identity, ArrayRecord, MetricRecord]]:
        """Read the admitted replies from the folder, in their order.

        If a file is damaged, the log names it. Then its client is asked again.
        """
        for name, event in list(self._admitted.items()) if self.on_disk else ():
            try:
                tensors = self._journal.read(self._path(name), event)
            except CheckpointError as error:
                del self._admitted[name]
                logger.warning("%s. Asking %s again", error, name)
                continue
            client = Identity(**event["client"])
            yield client, tensors_to_arrays(tensors), MetricRecord(event["metrics"])

    def _append(self, event: str, **content: Any) -> None:
        where = {"round": self.server_round, "exchange": self.index}
        self._journal.append(event, **where, **content)

    def _path(self, client: str) -> Path:
        """Return the file of a client's upload."""
        # A registered name may be longer than a file's name, and hold other characters.
        name = quote(client, safe="")
        if len(name) > _LONGEST:
            name = f"{name[:_LONGEST]}-{digest_of(client)[:16]}"
        return self.folder / f"{name}.safetensors"

    def _make_folder(self) -> None:
        if self.on_disk and not self.folder.exists():
            with _writing(self.folder):
                self.folder.mkdir(parents=True)
                sync_folder(self.folder.parent.parent)
                sync_folder(self.folder.parent)


class FolderLock:
    """A folder's lock, held until it is released or its process ends.

    If another process has the lock, this waits up to a minute for it to end.

    Parameters
    ----------
    folder : Path
        An existing folder.

    Raises
    ------
    CheckpointError
        If another server has the lock. It names that server.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = FileLock(folder / "lock")
        self._holder = folder / "holder.txt"
        process = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self._wait(folder, process)
        since = datetime.now(UTC).isoformat(" ", "seconds")
        self._holder.write_text(f"{process}, since {since}\n")

    def _wait(self, folder: Path, process: str) -> None:
        """Wait for the holder to end, unless it is this process itself."""
        holder = "its name is not known yet"
        if self._holder.exists():
            holder = self._holder.read_text().strip()
        patience = 0.0 if holder.startswith(f"{process},") else PATIENCE
        taken = f"{folder} is in use by another run ({holder})"
        if patience:
            logger.warning("%s: waiting %.0f s for it to end", taken, patience)
        try:
            self._lock.acquire(timeout=patience)
        except Timeout as error:
            raise CheckpointError(
                f"{taken}. If it is an earlier start of this run, wait for its end, or "
                "stop it by `flwr list` and `flwr stop` (Ctrl-C of `flwr run` stops "
                "only the log). If it is another run, pass another checkpoint_dir"
            ) from error

    def release(self) -> None:
        """Release the folder."""
        self._holder.unlink(missing_ok=True)
        self._lock.release()


def as_kept(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's options in the form in which they are kept and compared.

    Raises
    ------
    ConfigurationError
        If one of them is no JSON value.
    """
    for name, value in (kept := plain(dict(options))).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"a strategy's settings() must return JSON, and {name!r} is "
                f"{value!r:.80} ({error}): return numbers, texts, and lists of these"
            ) from error
    return dict(kept)


def _line(event: Event) -> str:
    """Return an event as a line of the journal."""
    return f"{json.dumps({**event, 'digest': digest_of(event)})}\n"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name the file in errors of the disk, in a ``with`` block."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"cannot write {path} ({error}): check its disk, then pass resume=True. "
            "All that was written before is intact"
        ) from error
