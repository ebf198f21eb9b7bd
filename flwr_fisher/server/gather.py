"""The replies to one exchange: from disk, from those who are asked, from who comes."""

import time
from collections.abc import Collection, Iterable
from typing import Any, Protocol

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_fisher.errors import CheckpointError
from flwr_fisher.log_lines import logger
from flwr_fisher.printable import listed
from flwr_fisher.server.cohort import Cohort, Sample
from flwr_fisher.server.door import Door
from flwr_fisher.server.journal import ExchangeJournal, ExchangeRecord
from flwr_fisher.server.mailbox import Receive
from flwr_fisher.server.receive import receive, restore
from flwr_fisher.server.waiting import Waiting

_DEAD, _SILENT = 60.0, 3600.0  # seconds until a node is asked again, at first


class Asking(Protocol):
    """An exchange, as far as whom it asks and what they are sent."""

    server_round: int
    admission: Door[Any]

    @property
    def cohort(self) -> Cohort:
        """Who knows the clients."""

    @property
    def waiting(self) -> Waiting:
        """How long to wait, and for how many."""

    @property
    def needed(self) -> int:
        """How many usable replies there must be."""

    def sample(self, grid: Grid, timeout: float) -> Sample:
        """Return whom to ask."""

    def require_same_parameters(
        self, grid: Grid, nodes: list[int], others: Iterable[int], timeout: float
    ) -> list[int]:
        """Reject those nodes whose uploads could not be merged; return the rest."""

    def messages(self, config: ConfigRecord, nodes: Iterable[int]) -> list[Message]:
        """Return the requests to some of the nodes."""


class Gathering:
    """Asks an exchange's clients, and feeds it with what they reply.

    Parameters
    ----------
    grid : Grid
        Reaches the clients.
    opened : Asking
        The exchange.
    kept : ExchangeJournal
        What is on disk of it.
    config : ConfigRecord
        For the clients.
    timeout : float
        Seconds to wait, where there is no collection window.
    """

    def __init__(
        self,
        grid: Grid,
        opened: Asking,
        kept: ExchangeJournal,
        config: ConfigRecord,
        timeout: float,
    ) -> None:
        self.grid, self.opened, self.kept = grid, opened, kept
        self.config, self.timeout = config, timeout
        self.cohort, self.waiting = opened.cohort, opened.waiting
        self._expected: set[str] | None = None  # names; None: whoever comes
        self._asked: list[int] = []
        self._names: set[str] = set()  # all that those may be called
        self._times: dict[int, int] = {}  # how often each node was asked
        self._since: dict[int, float] = {}  # when it was
        self._died: dict[int, float] = {}  # when it was noticed
        self._due: set[int] = set()

    def run(self, late: Receive) -> None:
        """Gather the replies.

        Raises
        ------
        RoundError
            If too few clients are connected when the time is up.
        CheckpointError
            If it was begun with a collection window, and there is none now.
        """
        record, admission = self.kept.record, self.opened.admission
        if record is not None:
            admission.expected = len(record.clients or ())
        restore(admission, self.kept, record)
        if record is not None:
            self.cohort.connected = record.connected
            if record.closed is not None:
                there = {upload.client for upload in admission.admitted}
                if lost := set(record.closed) - there:
                    record = self.kept.reopen(lost)
                else:
                    self.cohort.recall_absences(record.absences)
                    return
            if record.clients is not None and record.connected <= len(record.clients):
                self._tell_newcomers(record.clients)
        messages, timeout = list[Message](), self.timeout
        if self._in_window(record):
            if record is None:
                record = self.kept.open(None, 0, 0)
            assert self.waiting.window is not None
            timeout = record.opened + self.waiting.window - time.time()
            enough = self.waiting.enough_in_window
            logger.info("configure_train: the window closes in %.0f s", timeout)
        else:
            if record is None:
                record, messages = self._open()
            self._expected = set(record.clients or ())
            admission.expected = len(self._expected)
            enough = self.waiting.enough(record.wanted)
        enough = max(enough, self.opened.needed)
        if timeout > 0:
            receive(
                self.grid,
                self.cohort,
                self.opened.server_round,
                admission,
                self.kept,
                messages,
                timeout,
                late=late,
                enough=lambda: len(admission.admitted) >= enough,
                newcomers=self._newcomers,
                due=self._due,
            )
        self._tell_absent()

    def _tell_newcomers(self, clients: Collection[str]) -> None:
        """Tell who was not there when all that were there were asked."""
        mailbox = self.cohort.mailbox(self.grid)
        nodes = self.cohort.learn(mailbox, list(self.grid.get_node_ids()), self.timeout)
        expected = {*clients, *self.opened.admission.done()}
        new = [n for n in nodes if not self.cohort.identity(n).names & expected]
        if new:
            logger.warning(
                "configure_train: not asked, since round %s began without them: %s; "
                "one that begins with Waiting(window=...) takes whoever comes",
                self.opened.server_round,
                listed([self.cohort.name(node) for node in new]),
            )

    def _in_window(self, record: ExchangeRecord | None) -> bool:
        """Return whether whoever comes is asked: as the exchange was begun."""
        if record is None:
            return self.waiting.window is not None
        if record.clients is None and self.waiting.window is None:
            raise CheckpointError(
                f"round {self.opened.server_round} was begun with a collection window: "
                "resume it with Waiting(window=...)"
            )
        return record.clients is None

    def _open(self) -> tuple[ExchangeRecord, list[Message]]:
        """Sample the clients, and remember whom."""
        sample = self.opened.sample(self.grid, self.timeout)
        names = [self.cohort.name(node) for node in sample.nodes]
        record = self.kept.open(names, sample.wanted, self.cohort.connected)
        admission = self.opened.admission
        new = admission.without_done(sample.nodes)  # who has left an upload on disk?
        nodes = self.opened.require_same_parameters(self.grid, new, [], self.timeout)
        admission.check_enough(self.opened.needed, len(nodes))
        return record, self._ask(nodes)

    def _newcomers(self) -> list[Message] | None:
        """Return the messages to those who have connected and were not asked yet."""
        left = self._left()
        if self._expected is not None and not left:
            return None
        connected = list(self.grid.get_node_ids())
        mailbox = self.cohort.mailbox(self.grid)
        nodes = self.cohort.learn(mailbox, connected, self.timeout)
        if self._expected is None:
            self.cohort.connected = len(nodes)
            nodes = self.opened.admission.without_done(nodes)
            new = [node for node in nodes if self._may_be_asked(node)]
            first = [node for node in new if node not in self._times]
            self.opened.admission.expected += len(first)
        else:
            new = [n for n in nodes if self.cohort.identity(n).names & left]
        new.sort(key=self.cohort.order)
        if self._expected is not None:
            new = self.opened.require_same_parameters(
                self.grid, new, self._asked, self.timeout
            )
        # In a window nobody knows yet what most train: the uploads themselves tell.
        return self._ask(new)

    def _may_be_asked(self, node: int) -> bool:
        """Return whether to ask a node of a window, at first or once more.

        A node that died is asked when it is back, later each time. A node that was
        restarted may have lost the request, and nobody would know: so who is silent is
        asked again, too, where clients hand over what they have finished.
        """
        if (times := self._times.get(node, 0)) == 0:
            return True
        now, factor = time.monotonic(), 1 << (times - 1)
        if node in self._due:
            return self.kept.on_disk and now > self._since[node] + factor * _SILENT
        self._died.setdefault(node, now)
        return now > self._died[node] + factor * _DEAD

    def _ask(self, nodes: list[int]) -> list[Message]:
        for node in nodes:
            self._times[node] = self._times.get(node, 0) + 1
            self._since[node] = time.monotonic()
            self._died.pop(node, None)
            self._names |= self.cohort.identity(node).names
        self._asked += nodes
        self._due |= set(nodes)
        return self.opened.messages(self.config, nodes)

    def _left(self) -> set[str]:
        """Return the names of those who were to be asked, and have not been yet."""
        if not self._expected:
            return set()
        return self._expected - self._names - self.opened.admission.done()

    def _tell_absent(self) -> None:
        """Note who was to be asked, and could not be."""
        for name in sorted(self._left()):
            reason = "it did not connect"
            if name.startswith("node-"):
                reason += (
                    " under this id; give nodes a partition-id, or register them, to "
                    "know them again"
                )
            self.opened.admission.missing[name] = reason
