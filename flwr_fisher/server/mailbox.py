"""Sending messages, and receiving replies: until when, and from which node.

A reply's ``src_node_id`` need not be the node that was asked: for a node that is gone,
the SuperLink answers under its own id.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from math import ceil, inf, isinf

from flwr.app import Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.flower_internals import SUPERLINK_NODE_ID, ErrorCode
from flwr_fisher.options import Options, option


class Waiting(Options):
    """When a round ends, in addition to its deadline (`timeout` of ``start``).

    A client that misses a deadline sits out the next round. If it misses more, it sits
    out two rounds, four, …, until it replies. If too few other clients are connected,
    it is asked nonetheless. Options that are not for training or for a collection
    window also apply to evaluation.

    Raises
    ------
    ConfigurationError
        If a number is out of range, or a window has an `enough_fraction`.

    Examples
    --------
    >>> Waiting(enough_fraction=0.8).enough(10)
    8
    """

    enough_fraction: float = option(
        1.0,
        "A request ends when this share of its clients has sent a usable reply. "
        "Below 1 the result depends on which clients are fast.",
        above=0,
        high=1,
    )
    enough_replies: int | None = option(
        None,
        "A request also ends when this many replies are usable, but not with fewer "
        "than ``min_train_nodes``. In a collection window only this limit applies, not "
        "`enough_fraction`.",
        low=1,
    )
    window: float | None = option(
        None,
        "Seconds of a collection window, which replaces the deadline of a request to "
        "train. While it is open, clients are asked when they connect. If a client's "
        "node dies, or its ClientApp is killed, the client is asked again after one "
        "minute, if it is connected, then after two, four, …. With a "
        "``checkpoint_dir``, a silent client is asked again after an hour, two, four, "
        "…, because a node that was restarted has forgotten the request; and the "
        "window has this length in total, even if the server is restarted.",
        above=0,
    )
    on_failed_round: str = option(
        "raise",
        "What happens after a round with too few usable replies. ``raise``: the run "
        "ends with a ``RoundError``, and can be resumed there. ``skip``: the round "
        "changes nothing, and the run goes on, as with Flower's own strategies.",
        choices=("raise", "skip"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.enough_fraction != 1.0:
            raise ConfigurationError(
                "enough_fraction does not go with a window, which asks all that "
                "connect: pass enough_replies"
            )

    def enough(self, asked: int | None) -> float:
        """Return how many usable replies are enough, if `asked` clients are asked.

        `asked` is None in a collection window, which takes all that come.
        """
        limit = inf if self.enough_replies is None else self.enough_replies
        if asked is None:
            return limit
        return min(limit, ceil(round(asked * self.enough_fraction, 9)))


_FOREVER = 12 * 3600.0  # seconds; Flower's own, for messages without a deadline
_UNSENT = (
    "the SuperLink took no message for it: it is gone, or the message is too large"
)
_SHORTEST = 1.0  # Flower refuses messages with a lifetime of 0
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 3.0  # seconds between pulls, as Flower's own
QUERY_LIFETIME = 600.0  # seconds
_FOR_GOOD = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED)
# seconds without an answer until a query ends
_SHORTEST_GAP, _LONGEST_GAP = 10.0, 60.0


@dataclass(frozen=True)
class NodeReply:
    """A reply, with the node that was asked.

    Parameters
    ----------
    node : int
        The node that was asked.
    message : Message
        The reply.
    """

    node: int
    message: Message

    @property
    def from_superlink(self) -> bool:
        """Whether the SuperLink answered in place of the node."""
        sender = self.message.metadata.src_node_id
        from_link = self.message.has_error() and sender == SUPERLINK_NODE_ID
        return from_link and sender != self.node

    @property
    def nothing_will_come(self) -> bool:
        """Whether no reply will come: the node is gone, or its ClientApp was killed."""
        return self.message.has_error() and self.message.error.code in _FOR_GOOD


Receive = Callable[[NodeReply], object]
Newcomers = Callable[[], Iterable[Message] | None]


@dataclass(frozen=True)
class _Due:
    node: int
    expires: float
    late: Receive


class Mailbox:
    """Sends messages on a grid, and collects the outstanding replies."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._due: dict[str, _Due] = {}
        self.awaited: set[str] = set()  # ids of messages with a waiting caller
        self._num_unsent = count()
        # Replies that arrived while another exchange waited.
        self._held: list[tuple[str, NodeReply]] = []

    def send(
        self, messages: Iterable[Message], lifetime: float, late: Receive
    ) -> set[str]:
        """Send messages that expire after `lifetime` seconds, 12 hours if infinite.

        `late` is called with a reply that comes when nobody waits for it any more. If
        the SuperLink does not take a message, the reply is the same as from a node that
        is gone.

        Returns
        -------
        set[str]
            The ids of the messages.
        """
        sent = list(messages)
        lifetime = _FOREVER if isinf(lifetime) else max(lifetime, _SHORTEST)
        for message in sent:
            message.metadata.ttl = lifetime
        taken = set(self.grid.push_messages(sent))
        expires, ids = time.monotonic() + lifetime, set[str]()
        for message in sent:
            id_, node = message.metadata.message_id, message.metadata.dst_node_id
            if id_ in taken:
                self._due[id_] = _Due(node, expires, late)
            else:
                id_ = f"unsent-{next(self._num_unsent)}"
                error = Error(ErrorCode.NODE_UNAVAILABLE, _UNSENT)
                reply = NodeReply(node, Message(error, reply_to=message))
                self._held.append((id_, reply))
            ids.add(id_)
        return ids

    def pull(self, wanted: Iterable[str] = ()) -> list[tuple[str, NodeReply]]:
        """Return the replies to `wanted` messages; pass others to their senders."""
        wanted = set(wanted)
        replies = [(id_, reply) for id_, reply in self._held if id_ in wanted]
        self._held = [held for held in self._held if held[0] not in wanted]
        now = time.monotonic()  # the SuperLink has dropped what has expired
        self._due = {
            id_: due
            for id_, due in self._due.items()
            if due.expires >= now or id_ in wanted
        }
        if not self._due:
            return replies
        for message in self.grid.pull_messages(set(self._due)):
            id_ = message.metadata.reply_to_message_id
            if (due := self._due.pop(id_, None)) is None:
                continue  # it answers no known message
            reply = NodeReply(due.node, message)
            if id_ in wanted:
                replies.append((id_, reply))
            elif id_ in self.awaited:
                self._held.append((id_, reply))
            else:
                due.late(reply)
        return replies


def collect(
    mailbox: Mailbox,
    messages: Iterable[Message],
    timeout: float,
    *,
    late: Receive = lambda reply: None,
    enough: Callable[[], bool] = lambda: False,
    newcomers: Newcomers = lambda: None,
    lifetime: float | None = None,
) -> Iterator[NodeReply]:
    """Send messages and yield replies as they arrive.

    It ends when all have replied, there are enough, or the time is up. What has arrived
    by then is yielded.

    Parameters
    ----------
    mailbox : Mailbox
        Sends and receives.
    messages : Iterable[Message]
        Messages that are sent at once.
    timeout : float
        Seconds.
    late : Callable[[NodeReply], object]
        Called with a reply that comes after the end.
    enough : Callable[[], bool]
        Returns whether to end before all have replied.
    newcomers : Callable[[], Iterable[Message] | None]
        Returns messages to nodes that have connected since, or None if nobody else is
        expected; then the wait ends when all who were asked have replied.
    lifetime : float, optional
        Seconds after which messages expire; by default `timeout`.
    """
    deadline, wait = time.monotonic() + timeout, _FIRST_WAIT
    due: set[str] = set()
    come: Iterable[Message] | None = messages
    try:
        while not enough():
            if come := list(come or ()):
                left = deadline - time.monotonic() if lifetime is None else lifetime
                sent = mailbox.send(come, left, late)
                due |= sent
                mailbox.awaited |= sent
            replies = mailbox.pull(due)
            for id_, reply in replies:
                due.discard(id_)
                mailbox.awaited.discard(id_)
                yield reply
            if time.monotonic() > deadline or enough():
                return
            come = newcomers()
            if not due and come is None:
                return
            if come or replies:
                wait = _FIRST_WAIT
            else:
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
    finally:
        mailbox.awaited -= due


def query(
    mailbox: Mailbox,
    nodes: Iterable[int],
    content: RecordDict,
    timeout: float,
    late: Receive,
) -> Iterator[NodeReply]:
    """Send nodes a cheap query; yield their answers.

    The wait for a silent node depends on the others: after the last answer it is twice
    the time that they took, but at least 10 seconds and at most a minute.
    """
    began = time.monotonic()
    answered: list[float] = []

    def silence() -> bool:
        if not answered:
            return time.monotonic() - began > _LONGEST_GAP
        gap = min(max(2 * (answered[-1] - began), _SHORTEST_GAP), _LONGEST_GAP)
        return time.monotonic() - answered[-1] > gap

    questions = [Message(content, node, MessageType.QUERY) for node in nodes]
    for reply in collect(
        mailbox, questions, timeout, late=late, enough=silence, lifetime=QUERY_LIFETIME
    ):
        answered.append(time.monotonic())
        yield reply
