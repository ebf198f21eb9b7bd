"""Replies as they arrive: until there are enough, or the time is up."""

import time
from collections.abc import Callable, Iterable, Iterator

from flwr.app import Message, MessageType, RecordDict

from flwr_fisher.server.mailbox import Mailbox, Receive, Reply

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 3.0  # seconds between pulls, as Flower's own
ANSWERED_WITHIN = 600.0  # seconds that a question lives
_SHORTEST_GAP, _LONGEST_GAP = 10.0, 60.0  # seconds

Newcomers = Callable[[], Iterable[Message] | None]


def collect(
    mailbox: Mailbox,
    messages: Iterable[Message],
    timeout: float,
    *,
    late: Receive = lambda reply: None,
    enough: Callable[[], bool] = lambda: False,
    newcomers: Newcomers = lambda: None,
    lifetime: float | None = None,
    at_once: int | None = None,
) -> Iterator[Reply]:
    """Send messages and yield replies as they arrive.

    It ends when all have replied, there are enough, or the time is up. What has arrived
    by then is yielded.

    Parameters
    ----------
    mailbox : Mailbox
        Sends and receives.
    messages : Iterable[Message]
        To be sent at once.
    timeout : float
        Seconds.
    late : Callable[[Reply], object]
        Called with a reply that comes after the end.
    enough : Callable[[], bool]
        Whether to end.
    newcomers : Callable[[], Iterable[Message] | None]
        Returns messages to nodes that have connected meanwhile; None where no other
        node is expected, so that all have replied when these have.
    lifetime : float, optional
        Of messages, in seconds; by default they die with the time.
    at_once : int, optional
        How many replies are held at most; by default all that have come.
    """
    deadline, wait = time.monotonic() + timeout, _FIRST_WAIT
    due: set[str] = set()
    come: Iterable[Message] | None = messages
    try:
        while not enough():
            if come := list(come or ()):
                left = deadline - time.monotonic() if lifetime is None else lifetime
                sent = set(mailbox.send(come, left, late))
                due |= sent
                mailbox.awaited |= sent
            replies = mailbox.pull(due, at_once)
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
) -> Iterator[Reply]:
    """Ask nodes what costs them little; yield their answers.

    A node that is silent is waited for no longer than the others took twice over:
    after
    the last answer 10 seconds at least, and a minute at most.
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
        mailbox, questions, timeout, late=late, enough=silence, lifetime=ANSWERED_WITHIN
    ):
        answered.append(time.monotonic())
        yield reply
