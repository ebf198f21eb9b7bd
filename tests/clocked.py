"""A federation on a fake clock: clients that hang, die, come late or in the middle."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from types import SimpleNamespace

from flwr.app import Error, Message
from virtual import Clock, Node

from flwr_fisher.flower_internals import SUPERLINK_NODE_ID, ErrorCode
from flwr_fisher.server import cohort, journal, mailbox, round
from flwr_fisher.testing import LocalGrid

GONE = Error(ErrorCode.NODE_UNAVAILABLE, "Node unavailable")
CRASHED = Error(ErrorCode.CLIENT_APP_CRASHED, "ClientApp crashed")
EXPIRED = Error(ErrorCode.MESSAGE_UNAVAILABLE, "Message unavailable")


@dataclass
class Behaviour:
    """How a client's node behaves.

    Parameters
    ----------
    seconds : Callable[[int], float]
        By how often it was asked to train before: how long it takes; ``inf``: hangs.
    answers : float
        How long a query takes.
    connected : Callable[[float], bool]
        By the time: whether it is.
    dies : float
        When the SuperLink notices that it is gone.
    crashes : int
        How many trainings end with the ClientApp's process.
    """

    seconds: Callable[[int], float] = lambda times: 1.0
    answers: float = 0.1
    connected: Callable[[float], bool] = lambda now: True
    dies: float = inf
    crashes: int = 0


@dataclass
class Asked:
    """A message to a node that is under way."""

    message: Message
    due: float
    expires: float


class KilledError(Exception):
    """The server is killed."""


class ClockedGrid(LocalGrid):
    """Replies come when their time has come; the link answers for who is gone."""

    server_dies = inf  # when: it ends with a KilledError

    def __init__(self, app, behaviours, clock, num_supernodes):
        super().__init__(app, num_supernodes, seed=3)
        self.behaviours, self.clock = behaviours, clock
        self.under_way = {}
        self.times = {}
        self.sent = []  # when, what, whom
        self.lifetimes = []

    def behaviour(self, node):
        return self.behaviours.get(self.nodes[node], Behaviour())

    def now(self):
        if self.clock.now > self.server_dies:
            raise KilledError
        return self.clock.now

    def get_node_ids(self):
        now = self.now()
        nodes = [n for n in self.nodes if self.behaviour(n).connected(now)]
        alive = [n for n in nodes if now < self.behaviour(n).dies]
        return random.sample(alive, len(alive))

    def get_nodes(self):
        return [Node(node) for node in self.get_node_ids()]

    def push_messages(self, messages):
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for id_, message in zip(ids, messages, strict=True):
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            how, now = self.behaviour(node), self.clock.now
            self.sent.append((now, kind, self.nodes[node]))
            takes = how.answers
            if kind != "query":
                times = self.times.get(node, 0)
                takes, self.times[node] = how.seconds(times), times + 1
                self.lifetimes.append(message.metadata.ttl)
            expires = now + message.metadata.ttl
            self.under_way[id_] = Asked(message, now + takes, expires)
        return ids

    def pull_messages(self, message_ids):
        replies, now = [], self.now()
        for id_ in sorted(set(message_ids) & self.under_way.keys()):
            asked = self.under_way[id_]
            node = asked.message.metadata.dst_node_id
            if asked.expires < now:
                replies.append(self.link_answers(asked.message, EXPIRED))
            elif asked.due <= now and self.crashes(asked.message):
                replies.append(Message(CRASHED, reply_to=asked.message))
            elif asked.due <= now and asked.due < self.behaviour(node).dies:
                replies.append(self._handle(self._waiting.pop(id_)))
            elif self.behaviour(node).dies <= now:
                replies.append(self.link_answers(asked.message, GONE))
            else:
                continue
            del self.under_way[id_]
        return replies

    def crashes(self, message):
        """Whether a training ends with its process."""
        how = self.behaviour(message.metadata.dst_node_id)
        if message.metadata.message_type == "query" or not how.crashes:
            return False
        how.crashes -= 1
        return True

    def link_answers(self, message, error):
        """What a SuperLink replies for a node, under its own id."""
        reply = Message(error, reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
        return reply


def stop(monkeypatch):
    """Give the server a clock that goes on only while it sleeps."""
    stopped = Clock()
    timed = cohort, mailbox, round
    for module in timed:
        monkeypatch.setattr(module, "time", stopped)
    monkeypatch.setattr(journal, "time", SimpleNamespace(time=stopped.time))
    return stopped


def options_of(**options):
    """A strategy's, without evaluation and whatever else is a second request."""
    return {
        "fraction_evaluate": 0.0,
        "norm_statistics": "average",
        "refine": None,
        **options,
    }
