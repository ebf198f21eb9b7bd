"""Replies, from disk and as they arrive: admitted, kept, told of."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_fisher.log_lines import logger
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.door import Door
from flwr_fisher.server.journal import ExchangeJournal, ExchangeRecord
from flwr_fisher.server.mailbox import Newcomers, Receive, Reply, collect

_STAGE = "aggregate_train"

_AT_ONCE = 4  # uploads that are held, where they are added up as they come


def restore(
    admission: Door[Any], kept: ExchangeJournal, record: ExchangeRecord | None
) -> None:
    """Admit uploads that an interrupted run left, whoever is connected now.

    An upload that turned out to be bad stays where it is, and its client rejected. Of
    an exchange that was closed, those count of which its step was made.
    """
    set_aside = kept.all_set_aside
    closed = None
    if record is not None and record.closed is not None:
        closed, set_aside = record.closed, {**record.rejected, **set_aside}
        admission.missing |= record.missing
    for name, reason in set_aside.items():
        admission.rejected.add(name, reason, stage=_STAGE)
    for client, arrays, metrics in kept.uploads():
        if closed is not None and client.name not in closed:
            continue
        admission.names.recall(client)
        try:
            admission.admit(client, arrays, metrics)
        except Exception as error:  # admitted once, by another version perhaps
            admission.reject_saved(client, error)
            kept.set_aside(client.name, admission.rejected.reasons[client.name])


def receive(
    grid: Grid,
    cohort: Cohort,
    server_round: int,
    admission: Door[Any],
    kept: ExchangeJournal,
    messages: Iterable[Message],
    timeout: float,
    *,
    late: Receive,
    enough: Callable[[], bool],
    newcomers: Newcomers = lambda: None,
    due: set[int] | None = None,
) -> None:
    """Take replies as they arrive, and keep each that is admitted; tell who is missing.

    Parameters
    ----------
    grid : Grid
        Reaches the clients.
    cohort : Cohort
        Knows them; a client that lets the deadline pass sits out a while.
    server_round : int
        The round.
    admission : Door
        Takes the replies.
    kept : ExchangeJournal
        Where they are kept.
    messages : Iterable[Message]
        To those who are connected.
    timeout : float
        Seconds.
    late, enough, newcomers
        As in :func:`~flwr_fisher.server.collect.collect`.
    due : set[int], optional
        Is kept up to date with the nodes that have not replied.
    """
    due = set() if due is None else due
    messages, silent = list(messages), list[int]()
    deadline = time.monotonic() + timeout
    due |= {message.metadata.dst_node_id for message in messages}
    for reply in collect(
        cohort.mailbox(grid),
        messages,
        timeout,
        late=late,
        enough=enough,
        newcomers=newcomers,
        at_once=_AT_ONCE if admission.fold is not None else None,
    ):
        due.discard(reply.node)
        client = cohort.identity(reply.node)
        if admission.has(client):
            continue  # it has come back under another node's id, and replied before
        if not reply.of_link:
            cohort.replied(reply.node)
        elif not reply.of_the_dead:
            silent.append(reply.node)
        if (records := admission.take(reply)) is not None:
            kept.save(client, *records)
    if enough():
        admission.mark_missing(due, "not waited for, since enough have replied")
        cohort.passed_over(due, server_round)
    else:
        if time.monotonic() > deadline:
            admission.mark_missing([*due, *silent], f"none within {timeout:.0f} s")
        cohort.missed([*due, *silent], server_round)
    admission.log_missing()


@dataclass
class Late:
    """What becomes of a reply that comes when its exchange is over.

    It is counted. Where the run is kept and its round is still the last one, it is
    admitted to the disk, for when the round is opened again.

    Parameters
    ----------
    cohort : Cohort
        Knows the clients.
    admission : Callable[[], Door], optional
        Makes what admits it; holds the round's parameters.
    kept : ExchangeJournal
        Where it goes.
    server_round : int
        Its round.
    count : Callable[[], int]
        Counts it; returns the round that is under way.
    """

    cohort: Cohort
    admission: Callable[[], Door[Any]] | None
    kept: ExchangeJournal
    server_round: int
    count: Callable[[], int]

    def __call__(self, reply: Reply) -> None:
        """Take it."""
        if reply.of_link:
            return
        self.cohort.replied(reply.node)
        client = self.cohort.identity(reply.node)
        current = self.count() == self.server_round
        new = self.admission if current and self.kept.on_disk else None
        logger.warning(
            "%s: late: the reply of %s to round %s came after its end%s",
            _STAGE,
            self.cohort.name(reply.node),
            self.server_round,
            "; it is kept for when that is opened again" if new else "",
        )
        if new is None or self.kept.has(client):
            return  # what was admitted is not replaced
        if (records := new().take(reply)) is not None:
            self.kept.save(client, *records)

    def forget(self) -> None:
        """Admit no more: another exchange has begun. Only count."""
        self.admission = None
