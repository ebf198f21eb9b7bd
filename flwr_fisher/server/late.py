"""Replies that come after the end of their exchange."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr_fisher.log_lines import logger
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.door import TRAIN, Door
from flwr_fisher.server.journal import ExchangeJournal
from flwr_fisher.server.mailbox import NodeReply


@dataclass
class LateReplies:
    """Handles replies that come after the end of their exchange.

    They are counted. If the run is kept, and the round is still the last one, the
    journal admits them, so that they count if the round is opened again.

    Parameters
    ----------
    cohort : Cohort
        The run's clients.
    door : Callable[[], Door], optional
        Makes a door that admits them. It has the round's parameters, but not its
        uploads.
    journal : ExchangeJournal
        The journal of their exchange, which keeps them.
    count : Callable[[], int]
        Counts a late reply, and returns the number of the current round.
    """

    cohort: Cohort
    door: Callable[[], Door[Any]] | None
    journal: ExchangeJournal
    count: Callable[[], int]

    def __call__(self, reply: NodeReply) -> None:
        """Handle a late reply."""
        if reply.from_superlink:
            return
        self.cohort.replied(reply.node)
        identity = self.cohort.identity(reply.node)
        server_round = self.journal.server_round
        current = self.count() == server_round
        # An admitted reply is not replaced.
        kept = current and self.journal.on_disk and not self.journal.has(identity)
        new_door = self.door if kept else None
        logger.warning(
            "%s: the reply of %s to round %s came too late for it%s",
            TRAIN,
            self.cohort.name(reply.node),
            server_round,
            "; keeping it, for reopen=True" if new_door else "",
        )
        if new_door and (records := new_door().take(reply)) is not None:
            self.journal.save(identity, *records)

    def forget(self) -> None:
        """Only count late replies from now on: another exchange has begun."""
        self.door = None
