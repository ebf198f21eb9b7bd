"""The identities of clients, by names that are the same in every run.

Node ids are random in each run.

Long: one client's identity, and the registry of all.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flwr_fisher.errors import listed, printable
from flwr_fisher.flower_internals import nodes_of
from flwr_fisher.log_lines import logger
from flwr_fisher.server.mailbox import QUERY_LIFETIME, Mailbox, NodeReply, query
from flwr_fisher.wire.answer import Answer

Order = tuple[int, int, str]
Key = TypeVar("Key")

_ASK_AGAIN = 60.0  # seconds after a node died for which it still counts as connected
_TRIES = 3  # of a node that answers with an error

# How to recognise another library's ClientApp by its answer to the query.
_FOREIGN = {
    # A client_fn gets no query; older apps do not know this message.
    "Invalid message type: query": (
        "its ClientApp is that of a NumPyClient, or of another client_fn: use "
        "app = flwr_fisher.legacy.client_app(client_fn, model=..., trainloader=...), "
        'as the documentation\'s "Change a NumPyClient app" shows'
    ),
    "No query function registered": (
        "its ClientApp is not flwr-fisher's: add app.query()(identify) and "
        "fisher_arrays of flwr_fisher.client to it, or use FisherClient, as "
        'the documentation\'s "Change a FedAvg app" shows'
    ),
}
_PLAIN = _FOREIGN["No query function registered"]


@dataclass(frozen=True)
class Identity:
    """A client's identity: its registered name, its partition, or its node id.

    Parameters
    ----------
    node : int
        The node's id in this run.
    registered : str
        The node's registered name, which the SuperLink has checked; empty if it has
        none.
    partition : int, optional
        The partition that the node claims to hold.
    """

    node: int
    registered: str = ""
    partition: int | None = None

    @property
    def name(self) -> str:
        """The client's name, the same in every run if possible."""
        return self.registered or self._own

    @property
    def _own(self) -> str:
        """The name of a client that is not registered."""
        if self.partition is not None:
            return f"partition-{self.partition}"
        return f"node-{self.node}"

    @property
    def order(self) -> Order:
        """A sort key that does not depend on node ids, if possible."""
        if self.registered:
            return (1, 0, self.registered)
        if self.partition is not None:
            return (0, self.partition, "")
        return (2, self.node, "")

    @property
    def number(self) -> int:
        """The client's number: its partition, or its node id."""
        return self.node if self.partition is None else self.partition

    @property
    def names(self) -> set[str]:
        """All names that the client may have had before the run was resumed.

        Examples
        --------
        >>> sorted(Identity(7, "a", 3).names)
        ['a', 'node-7', 'partition-3']
        """
        return {self.name, self._own, f"node-{self.node}"}


class NodeNames:
    """The registry of all nodes' identities.

    A node's name is the one with which it was registered (``flwr supernode register``),
    because the SuperLink checks it. Without such a name it is the partition that the
    node claims to hold, and without a partition the node's id. If two connected nodes
    claim the same name or the same partition, the server asks neither, because it
    cannot know whose it is. The claim of a node that is not registered does not affect
    a registered node.

    A node that does not answer the query gets no other request until it does. If its
    app fails at the query again and again, the node's name is its id, because it may
    still be able to train.

    Parameters
    ----------
    allow_foreign : bool, default True
        Whether nodes may take part whose ClientApp is foreign. An app of this library
        answers the query with its version. An app that has no query, or answers without
        a version, is foreign.

    Attributes
    ----------
    answered : set[int]
        Nodes that have answered and may get requests.
    refused : dict[int, str]
        Connected nodes that must not take part, with the reason.
    foreign : dict[int, str]
        Nodes whose ClientApp is foreign, and what to do about it.
    do_any_job : set[int]
        Nodes that can do every job, not only a training.
    """

    def __init__(self, allow_foreign: bool = True) -> None:
        self.allow_foreign = allow_foreign
        self._known: dict[int, Identity] = {}
        self._registered: dict[int, str] = {}  # names of the asked nodes, or ""
        self._until: dict[int, float] = {}  # when a query expires
        self._errors: dict[int, int] = {}  # how often a node answered with one
        self._warned: set[str] = set()  # warnings that the log has already
        self.answered: set[int] = set()
        self.refused: dict[int, str] = {}
        self.foreign: dict[int, str] = {}
        self.do_any_job: set[int] = set()

    def identity(self, node_id: int) -> Identity:
        """Return a node's identity."""
        return self._known.get(node_id, Identity(node_id))

    def name(self, node_id: int) -> str:
        """Return a client's name, the same in every run if possible."""
        if node_id in self.refused and node_id not in self.foreign:
            return f"node-{node_id}"
        return self.identity(node_id).name

    def order(self, node_id: int) -> Order:
        """Return a sort key that does not depend on node ids, if possible."""
        return self.identity(node_id).order

    def named(self, numbers: Collection[int]) -> list[str]:
        """Return the names of the clients with these numbers, connected or not."""
        known = sorted(self._known.values(), key=lambda client: client.order)
        return list(dict.fromkeys(c.name for c in known if c.number in numbers))

    def recall(self, client: Identity) -> None:
        """Restore a client's identity, with its node id before the resume."""
        self._known.setdefault(client.node, client)

    def learn(
        self, mailbox: Mailbox, nodes: Collection[int], timeout: float
    ) -> list[int]:
        """Ask new nodes for their partitions.

        The server waits for their answers, at most a minute, only if it knows no node
        yet. A node that connects later is queried, and takes part when it has answered.

        Returns
        -------
        list[int]
            Those that have answered and are not refused.
        """
        now = time.monotonic()
        again = {n for n, until in self._until.items() if until < now} - self.answered
        if new := [n for n in nodes if n not in self._registered or n in again]:
            names = _registered_names(mailbox.grid)
            for node in new:
                self._registered[node] = names.get(node, "")
                if node in names:
                    self._known[node] = Identity(node, names[node])
            self._until |= dict.fromkeys(new, now + QUERY_LIFETIME)
            wait = 0.0 if self.answered.intersection(nodes) else timeout
            due = new
            while due:
                replies = query(mailbox, due, RecordDict(), wait, self._take)
                due = [reply.node for reply in replies if self._take(reply)]
            self._log_nameless(new)
        self._refuse(nodes)
        return [n for n in nodes if n in self.answered and n not in self.refused]

    def _take(self, reply: NodeReply) -> bool:
        """Store a node's answer, whenever it comes; return whether to ask again."""
        node, message = reply.node, reply.message
        if reply.from_superlink or reply.nothing_will_come:
            self._until[node] = time.monotonic() + _ASK_AGAIN
            return False
        answer = Answer.of(message)
        if reason := _foreign_because(message, answer):
            self.foreign[node] = reason
        elif message.has_error() and not self._gives_up(node, message.error.reason):
            self._until[node] = time.monotonic()
            return True
        self.answered.add(node)
        if answer.any_job:
            self.do_any_job.add(node)
        if answer.partition is not None:
            registered = self._registered.get(node, "")
            self._known[node] = Identity(node, registered, answer.partition)
        if answer.problem:
            logger.warning(
                "node-%s %s, which is not valid: it is known as %s",
                node,
                answer.problem,
                self.identity(node).name,
            )
        return False

    def _gives_up(self, node: int, error: str | None) -> bool:
        """Note an error; return whether to stop asking the node."""
        self._errors[node] = self._errors.get(node, 0) + 1
        if self._errors[node] < _TRIES:
            return False
        reason, name = printable(error), self.identity(node).name
        text = f"node-{node} failed to send its partition-id, and is known as {name}: "
        self.warn_once(text + reason, f"partition-id: {reason}")
        return True

    def warn_once(self, text: str, key: str = "") -> None:
        """Log a warning once a run: one for each key, which is the text by default."""
        if (key or text) not in self._warned:
            self._warned.add(key or text)
            logger.warning("%s", text)

    def _refuse(self, nodes: Collection[int]) -> None:
        """Refuse the connected nodes that must not take part; log new refusals."""
        before, self.refused = self.refused, {}
        self._refuse_doubles(nodes)
        foreign = [node for node in nodes if node in self.foreign]
        if not self.allow_foreign:
            self.refused |= {node: self.foreign[node] for node in foreign}
        new = self.refused.keys() - before.keys()
        for node in new - self.foreign.keys():
            logger.warning("Not asking node-%s: %s", node, self.refused[node])
        others = {node: self.foreign[node] for node in new & self.foreign.keys()}
        for reason, own in by_reason(others).items():  # usually all nodes of the run
            logger.warning("Not asking %s: %s", listed(map(self.name, own)), reason)

    def _refuse_doubles(self, nodes: Iterable[int]) -> None:
        """Refuse the nodes that share a name or a number with another node."""
        connected = [self.identity(node) for node in nodes]
        claims: dict[str | int, list[Identity]] = {}
        for one in connected:
            for claim in (one.name, one.number):
                claims.setdefault(claim, []).append(one)
        for one in connected:
            # A node's id is always its own, even if another node claims it.
            same = claims[one.name] + (
                [] if one.partition is None else claims[one.number]
            )
            # A registered node keeps its place, whatever an unregistered one claims.
            nodes = {
                other.node for other in same if other.registered or not one.registered
            }
            if len(nodes | {one.node}) > 1:
                several = listed([f"node-{node}" for node in nodes])
                # Registered nodes have other names, and only the partition in common.
                shown = one if one.partition is None else replace(one, registered="")
                out = "give each node its own partition-id"
                if not one.registered:
                    out += ", or register nodes by name, since no claim can replace a "
                    out += "registered node"
                self.refused[one.node] = (
                    f"more than one node claims '{printable(shown.name)}' ({several}): "
                    f"{out}. A restarted node is asked again once the SuperLink finds "
                    "its former one gone"
                )

    def _log_nameless(self, new: Iterable[int]) -> None:
        nameless = {n for n in self.answered.intersection(new) if self.order(n)[0] == 2}
        if nameless:
            logger.info(
                "%d nodes have no partition-id, so they are known by their node id: "
                "another run with the same seed may sample others",
                len(nameless),
            )


def by_reason(reasons: Mapping[Key, str]) -> dict[str, list[Key]]:
    """Group clients, or nodes, by their reason."""
    groups: dict[str, list[Key]] = {}
    for one, reason in reasons.items():
        groups.setdefault(reason, []).append(one)
    return groups


def _foreign_because(message: Message, answer: Answer) -> str:
    """Return advice for a node with another library's app, or ""."""
    if message.has_error():
        error = str(message.error.reason)
        return next((why for sign, why in _FOREIGN.items() if sign in error), "")
    return "" if answer.of_library else _PLAIN


def _registered_names(grid: Grid) -> Mapping[int, str]:
    """Return the registered names of the nodes that have one."""
    return {info.node_id: info.name for info in nodes_of(grid) if info.name}
