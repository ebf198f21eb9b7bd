"""Replies as they arrive."""

import time
from collections.abc import Iterable, Iterator

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

_QUERY_TIMEOUT = 60.0
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 3.0  # seconds between pulls, as Flower's own


def collect(
    grid: Grid, messages: Iterable[Message], timeout: float
) -> Iterator[Message]:
    """Send messages and yield replies as they arrive, until all have or time is up."""
    due = {id_ for id_ in grid.push_messages(messages) if id_}
    deadline, wait = time.monotonic() + timeout, _FIRST_WAIT
    while due:
        replies = list(grid.pull_messages(due))
        for reply in replies:
            due.discard(reply.metadata.reply_to_message_id)
            yield reply
        if time.monotonic() > deadline:
            return
        if due and not replies:
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        else:
            wait = _FIRST_WAIT


def query(
    grid: Grid, nodes: Iterable[int], content: RecordDict, timeout: float
) -> Iterator[Message]:
    """Ask nodes what costs them little; yield answers for a minute at most."""
    questions = [Message(content, node, MessageType.QUERY) for node in nodes]
    return collect(grid, questions, min(timeout, _QUERY_TIMEOUT))
