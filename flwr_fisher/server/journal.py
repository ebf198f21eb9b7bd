"""The journal of a run: a folder with all that is needed to resume it.

The folder contains (format 7):

``run.safetensors``
    The record of the run: its options, and the format's number.
``round-0003.safetensors``
    The server's state after a round, for the last two rounds; 0 is the start. Its
    record has the metrics of all rounds so far, and the clients that sit out.
``uploads-0004/exchange-1.safetensors``
    The record of an exchange of the next round: which clients it asks; and when it is
    closed, whose replies its step used.
``uploads-0004/exchange-1/<client>.safetensors``
    The arrays of an admitted reply, with its client and metrics in the record. They
    stay until the next round is finished.
``lock``
    Is locked by the server that uses the folder.

Each file stands for itself: its header has its record as JSON, the run's id, its own
place in the folder, and a digest of all that. It is written under another name, and
renamed when it is whole. So whatever a crash leaves is a state from which the run goes
on, and a file that is damaged, or of another run, is noticed. A later version reads
this format, or refuses it by its number.
"""

import json
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from filelock import FileLock, Timeout
from flwr.app import ArrayRecord, MetricRecord
from safetensors import SafetensorError
from torch import Tensor

from flwr_fisher.errors import CheckpointError, ConfigurationError, kept_record, plain
from flwr_fisher.files import digest_of, load_record, save_record, sweep, sync_folder
from flwr_fisher.log_lines import logger
from flwr_fisher.server.cohort import Identity
from flwr_fisher.wire import arrays_to_tensors, tensors_to_arrays

FORMAT = 7
# After a SuperLink was killed, its ServerApp ends only after 15 seconds, or more on a
# busy machine, while the next one has started.
PATIENCE = 60.0  # seconds
_LONGEST = 160  # characters of a client's name in a file's name
_ELSEWHERE = "begin a new run in another checkpoint_dir"


@dataclass(frozen=True)
class ExchangeRecord:
    """The journal's record of an exchange.

    Parameters
    ----------
    clients : list[str] | None
        The names of the sampled clients; None in a collection window, in which every
        client that connects is asked.
    connected : int
        How many clients there were.
    opened : float
        When it began, in seconds since 1970.
    config : dict[str, str] | None
        The round's config for clients, as texts; None of a run of an earlier version.
    optional : bool
        Whether the round can do without the exchange.
    needed : int
        How many clients an optional exchange needs.
    reopened : bool
        Whether it was opened again after its round was finished.
    closed : list[str] | None
        The clients whose replies the step used; None before the step.
    missing, rejected : dict[str, str]
        After the exchange was closed: the clients without a reply, and those with a
        reply that was not usable, with the reasons.
    absences : dict[str, Any]
        The clients that sit out afterwards.
    """

    clients: list[str] | None
    connected: int
    opened: float
    config: dict[str, str] | None = None
    optional: bool = False
    needed: int = 1
    reopened: bool = False
    closed: list[str] | None = None
    missing: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    absences: dict[str, Any] = field(default_factory=dict)

    def check_config(self, config: Mapping[str, str], way_out: str) -> None:
        """Raise :class:`CheckpointError` if the round began with another config."""
        began = config if self.config is None else self.config
        for key in sorted({*began, *config}):
            before, now = began.get(key), config.get(key)
            if before != now:
                raise CheckpointError(
                    f"the round began with {key}={before} in its config, and now it is "
                    f"{now}: resume with the same, or {way_out}"
                )


class Journal:
    """Writes and reads a run's files, and locks its folder.

    Without a folder it writes nothing.

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
        self.path = None if path is None else Path(path).expanduser()
        if self.path is not None:
            with _writing(self.path):
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock = _locked(self.path)
                for folder in (self.path, *self.path.glob("uploads-*/**/")):
                    sweep(folder)

    def release(self) -> None:
        """Release the folder's lock."""
        if self.path is not None:
            self._lock.release()

    # --- rounds

    def begin(self, options: Mapping[str, Any]) -> None:
        """Begin a run with its options, which are JSON values."""
        self.run = secrets.token_hex(8) if self.path else ""
        self.options = dict(options)
        self.write(self._file, {"format": FORMAT, "options": self.options})

    def load(self) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
        """Return the last finished round, with its state and its record.

        It is None if no run has begun in the folder.

        Raises
        ------
        CheckpointError
            If a file is damaged, missing, or of another version. It names the file, and
            says what to do.
        """
        if self.path is None:
            return None
        if not self._file.exists():
            others = [*self.path.glob("round-*"), *self.path.glob("journal.jsonl")]
            if others:
                raise CheckpointError(
                    f"{self._file} is missing, beside {others[0]}: restore it, or "
                    f"{_ELSEWHERE}. Version 0.3 can finish its own runs"
                )
            return None
        _, begun = self.read(self._file, f"{_ELSEWHERE}; the last model is beside it")
        if begun.get("format") != FORMAT:
            raise CheckpointError(
                f"{self._file} has format {begun.get('format')!r}, not {FORMAT}: "
                "resume with the version of flwr-fisher that began the run, or "
                f"{_ELSEWHERE}"
            )
        self.run, self.options = begun["run"], begun["options"]
        if not (rounds := self._rounds()):
            if not any(self.path.glob("uploads-*")):
                return None  # a crash, just after the run had begun
            state = self._state(0)
            raise CheckpointError(
                f"{state}, or a later one, is missing: restore it, or {_ELSEWHERE}"
            )
        *earlier, last = rounds
        way_out = f"delete it to go on after round {earlier[-1]}" if earlier else ""
        tensors, record = self.read(self._state(last), way_out or _ELSEWHERE)
        self._prune(last)
        return last, tensors, record

    def _rounds(self) -> list[int]:
        """Return the finished rounds whose states are in the folder, in order."""
        assert self.path is not None
        names = [path.stem[6:] for path in self.path.glob("round-*.safetensors")]
        return sorted(int(number) for number in names if number.isdecimal())

    def finish(
        self,
        server_round: int,
        tensors: Mapping[str, Tensor],
        history: Mapping[str, Any],
        absences: Mapping[str, Any],
    ) -> None:
        """Save a finished round: the state after it, and its record.

        Delete what only earlier rounds needed. Round 0 is the start. Metrics, and the
        clients that sit out afterwards, are JSON values.
        """
        record = {"history": dict(history), "absences": dict(absences)}
        self.write(self._state(server_round), record, tensors)
        self._prune(server_round)

    def reopen(self, last: int) -> bool:
        """Open the last exchange again, so that its clients are asked again.

        It is the last exchange of the last finished round. If too few clients replied
        in a collection window of the next round, it is the exchange of that window.

        Returns
        -------
        bool
            Whether the last round must be repeated.

        Raises
        ------
        CheckpointError
            If its uploads, or the state of the round before, have been deleted, or if
            the next round has begun: that round's uploads start from this round's
            model.
        """
        if under_way := self._last_exchange(last + 1):
            record = under_way.record
            if record is not None and record.reopened:
                return False  # by a server that died before it had finished again
            if record is None or record.clients is not None:
                raise CheckpointError(
                    f"{self.path}: round {last + 1} has begun with the model of round "
                    f"{last}, which cannot be opened again: leave reopen=True out"
                )
            self._open(under_way, record)
            return False
        merge, before = self._last_exchange(last), self._state(last - 1)
        if merge is None or merge.record is None or not before.exists():
            raise CheckpointError(
                f"{self.path} no longer has the uploads and the start of round {last}, "
                "so that round cannot be opened again: resume without reopen=True"
            )
        self.read(before, "resume without reopen=True")
        if merge.index > 1 and merge.record.clients is not None:
            text = "Only the round's last exchange is repeated: "
            logger.warning(text + "no client joins it that it had not asked")
        self._open(merge, replace(merge.record, reopened=True))
        self._state(last).unlink()  # now the round is given up
        return True

    def _open(self, exchange: "ExchangeJournal", record: ExchangeRecord) -> None:
        """Open an exchange again; those after it began with the model that it made."""
        exchange.note(replace(record, opened=time.time(), closed=None))
        for later in self._exchanges(exchange.server_round):
            if later > exchange.index:
                self.exchange_journal(exchange.server_round, later).delete()

    def _last_exchange(self, server_round: int) -> "ExchangeJournal | None":
        """Return the last exchange of a round that is not optional, if there is one."""
        for index in reversed(self._exchanges(server_round)):
            exchange = self.exchange_journal(server_round, index)
            if exchange.record is not None and not exchange.record.optional:
                return exchange
        return None

    def _exchanges(self, server_round: int) -> list[int]:
        """Return the numbers of a round's exchanges that have begun, in order."""
        files = self.uploads(server_round).glob("exchange-*.safetensors")
        return sorted(int(path.stem.removeprefix("exchange-")) for path in files)

    def exchange_journal(self, server_round: int, index: int) -> "ExchangeJournal":
        """Return the part of a round's exchange, counted from 1."""
        return ExchangeJournal(self, server_round, index)

    @property
    def _file(self) -> Path:
        return (self.path or Path()) / "run.safetensors"

    def _state(self, server_round: int) -> Path:
        return (self.path or Path()) / f"round-{server_round:04d}.safetensors"

    def uploads(self, server_round: int) -> Path:
        """Return the folder of a round's exchanges."""
        return (self.path or Path()) / f"uploads-{server_round:04d}"

    def _prune(self, server_round: int) -> None:
        """Delete what is no longer needed after a round."""
        if self.path is not None:
            # The round before stays, so that this one can be done again.
            self._state(server_round - 2).unlink(missing_ok=True)
            shutil.rmtree(self.uploads(server_round - 1), ignore_errors=True)

    # --- files

    def write(
        self,
        path: Path,
        record: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write a file of the run: a record of JSON values, and tensors."""
        if self.path is None:
            return
        # Two runs with one seed have the same tensors, but must not be mixed.
        origin = {"run": self.run, "file": str(path.relative_to(self.path))}
        with _writing(path):
            if not path.parent.exists():
                path.parent.mkdir(mode=0o700, parents=True)
                sync_folder(path.parent.parent.parent)
                sync_folder(path.parent.parent)
            text = json.dumps({**record, **origin})
            save_record(path, tensors or {}, {"record": text})

    def read(
        self, path: Path, way_out: str
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read a file of the run; `way_out` says what to do, for an error.

        Raises
        ------
        CheckpointError
            If the file is damaged, or belongs to another run or another place. It names
            the file.
        """
        try:
            tensors, texts = load_record(path)
            record = json.loads(texts["record"])
            if record["file"] != str(path.relative_to(self.path or Path())):
                raise ValueError(f"it is the run's {record['file']}")
            if self.run not in ("", record["run"]):
                raise ValueError("it is of another run")
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged, or not the file of this run: {error}; {way_out}"
            ) from error
        return tensors, record


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
        self.folder = journal.uploads(server_round) / f"exchange-{index}"
        self._file = self.folder.with_suffix(".safetensors")
        if self.on_disk and self._file.exists():
            _, record = journal.read(self._file, self.way_out)
            del record["run"], record["file"]
            record.pop("wanted", None)  # as files have it that were written before
            with kept_record(self._file):
                self.record = ExchangeRecord(**record)

    @property
    def on_disk(self) -> bool:
        """Whether the run is kept on disk."""
        return self._journal.path is not None

    @property
    def way_out(self) -> str:
        """What to do if a file of the exchange is damaged."""
        return f"delete {self.folder.parent} to do the round again"

    def note(self, record: ExchangeRecord) -> ExchangeRecord:
        """Set and write the exchange's record."""
        self._journal.write(self._file, asdict(record))
        self.record = record
        return record

    def save(
        self, client: Identity, arrays: ArrayRecord, metrics: MetricRecord
    ) -> None:
        """Save a reply as soon as it is admitted."""
        if self.on_disk:
            record = {"client": asdict(client), "metrics": dict(metrics)}
            # A registered name may be longer than a file's, with other characters.
            name = quote(client.name, safe="")
            if len(name) > _LONGEST:
                name = f"{name[:_LONGEST]}-{digest_of(client.name)[:16]}"
            path = self.folder / f"{name}.safetensors"
            self._journal.write(path, record, arrays_to_tensors(arrays))

    def uploads(self) -> Iterator[tuple[Identity, ArrayRecord, MetricRecord]]:
        """Read the admitted replies from the folder.

        If a file is damaged, the log names it. Then its client is asked again.
        """
        for path in sorted(self.folder.glob("*.safetensors")) if self.on_disk else ():
            try:
                tensors, record = self._journal.read(path, "asking its client again")
            except CheckpointError as error:
                logger.warning("%s", error)
                continue
            with kept_record(path):
                client = Identity(**record["client"])
                metrics = MetricRecord(record["metrics"])
            yield client, tensors_to_arrays(tensors), metrics

    def delete(self) -> None:
        """Delete all files of the exchange."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._file.unlink(missing_ok=True)


def _locked(folder: Path) -> FileLock:
    """Return a folder's lock, which ends with this process.

    If another process has the lock, this waits up to a minute for it to end.
    """
    lock, taken = FileLock(folder / "lock"), f"{folder} is in use by another server"
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("%s: waiting %.0f s for it to end", taken, PATIENCE)
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            raise CheckpointError(
                f"{taken}. If it is an earlier start of this run, wait for its end, or "
                "stop it by `flwr list` and `flwr stop` (Ctrl-C of `flwr run` stops "
                "only the log). If it is another run, pass another checkpoint_dir"
            ) from None
    return lock


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
