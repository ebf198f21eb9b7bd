"""What is on disk of one exchange, if the run is kept at all."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, MetricRecord

from flwr_fisher.errors import CheckpointError
from flwr_fisher.server.checkpoint import CheckpointDir, ExchangeRecord
from flwr_fisher.server.door import Door
from flwr_fisher.server.identity import Identity


class KeptExchange:
    """An exchange's record and uploads on disk; nothing where a run is not kept.

    Parameters
    ----------
    disk : CheckpointDir | None
        The run's directory.
    folder : str
        The exchange's, in it.
    """

    def __init__(self, disk: CheckpointDir | None, folder: str) -> None:
        self._disk, self._folder = disk, folder

    def record(self) -> ExchangeRecord | None:
        """Return how it stands; None if it has not begun."""
        return None if self._disk is None else self._disk.load_exchange(self._folder)

    def open(
        self, clients: list[str] | None, wanted: int, connected: int
    ) -> ExchangeRecord:
        """Remember that it begins, and with whom."""
        record = ExchangeRecord(clients, wanted, connected, time.time())
        if self._disk is not None:
            self._disk.save_exchange(self._folder, record)
        return record

    def reopen(self, record: ExchangeRecord, lost: Collection[str]) -> ExchangeRecord:
        """Remember that it is to be closed anew, since uploads of it are damaged.

        Raises
        ------
        CheckpointError
            If a later exchange has begun, which the uploads that are lost have a part
            in.
        """
        assert self._disk is not None
        if not self._disk.is_last(self._folder):
            folder, names = self._disk.path / self._folder, ", ".join(sorted(lost))
            raise CheckpointError(
                f"{folder}: the upload of {names} is damaged, and the round has gone "
                f"on with it: put it back, or delete {folder.parent} to do the round "
                "again"
            )
        self._disk.save_exchange(self._folder, opened := record.reopened())
        return opened

    def close(
        self,
        record: ExchangeRecord,
        clients: Iterable[str],
        admission: Door[Any],
        absences: Mapping[str, Any],
    ) -> None:
        """Remember of whose uploads the step was made: it is the same when resumed.

        Parameters
        ----------
        record : ExchangeRecord
            How the exchange stood.
        clients : Iterable[str]
            Whose uploads those were.
        admission : Door
            Knows who else was asked, and what was wrong.
        absences : Mapping[str, Any]
            Who sits out, as JSON holds it.
        """
        if self._disk is not None:
            closed = replace(
                record,
                closed=sorted(clients),
                missing=dict(admission.missing),
                rejected=dict(admission.rejected.reasons),
                absences=dict(absences),
            )
            self._disk.save_exchange(self._folder, closed)

    def save(
        self, client: Identity, arrays: ArrayRecord, metrics: MetricRecord
    ) -> None:
        """Keep a reply as soon as it is admitted."""
        if self._disk is not None:
            self._disk.save_upload(self._folder, client, arrays, metrics)

    def has(self, client: Identity) -> bool:
        """Return whether there is an upload of a client."""
        return self._disk is not None and self._disk.has_upload(
            self._folder, client.name
        )

    def uploads(self) -> Iterator[tuple[Identity, ArrayRecord, MetricRecord]]:
        """Return the replies that were admitted."""
        return iter(()) if self._disk is None else self._disk.load_uploads(self._folder)

    def set_aside(self, client: str, reason: str) -> None:
        """Put away an upload that turned out to be bad."""
        if self._disk is not None:
            self._disk.set_aside(self._folder, client, reason)

    def all_set_aside(self) -> dict[str, str]:
        """Return whose uploads were set aside, and why."""
        return {} if self._disk is None else self._disk.load_set_aside(self._folder)

    @property
    def on_disk(self) -> bool:
        """Whether the run is kept."""
        return self._disk is not None
