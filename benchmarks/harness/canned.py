"""A grid whose replies were made before, so that a round is the server's work alone."""

import time
from collections.abc import Iterable
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flwr_fisher.flower_internals import identify_process, round_trip, set_message_id

AT_ONCE = 100  # replies in a pull


class CannedGrid(Grid):
    """Answers every message with a reply that was made before, and notes its time."""

    def __init__(
        self, count: int, replies: list[RecordDict], trained: Iterable[str]
    ) -> None:
        self.nodes = {10**9 + 7 * number: number for number in range(count)}
        self.replies, self.trained, self.spent = replies, list(trained), 0.0
        self._waiting: dict[str, Message] = {}
        self._count = 0
        identify_process(1)

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """No strategy looks at it."""
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """No strategy calls it."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes."""
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Accept messages."""
        messages, ids = list(messages), []
        began = time.process_time()
        for message in messages:
            self._count += 1
            ids.append(f"message-{self._count}")
            set_message_id(message, ids[-1])
            self._waiting[ids[-1]] = message
        self.spent += time.process_time() - began
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the next replies, as many as one pull brings."""
        began = time.process_time()
        wanted = set(message_ids) or self._waiting.keys()
        due = [id_ for id_ in self._waiting if id_ in wanted][:AT_ONCE]
        replies = [self._answer(self._waiting.pop(id_)) for id_ in due]
        self.spent += time.process_time() - began
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return all replies."""
        self.push_messages(messages)
        replies: list[Message] = []
        while self._waiting:
            replies += self.pull_messages(())
        return replies

    def _answer(self, message: Message) -> Message:
        number = self.nodes[message.metadata.dst_node_id]
        content = self.replies[number % len(self.replies)]
        if message.metadata.message_type == "query":
            content = RecordDict({"told": MetricRecord({"partition-id": number})})
            content["client"] = ConfigRecord({"flwr-fisher": "0.1.0"})
            if message.content.config_records:
                names = ConfigRecord({"trained": self.trained})
                content = RecordDict({"told": names})
        return Message(round_trip(content), reply_to=message)
