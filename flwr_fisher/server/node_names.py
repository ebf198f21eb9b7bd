"""Names of nodes that hold in every run."""

import time
from collections.abc import Collection, Iterable, Mapping

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flwr_fisher.log_lines import logger
from flwr_fisher.printable import printable
from flwr_fisher.server.collect import ANSWERED_WITHIN, query
from flwr_fisher.server.identity import Identity, Order
from flwr_fisher.server.mailbox import Mailbox, Reply
from flwr_fisher.server.rejections import listed
from flwr_fisher.wire import LIBRARY

_LARGEST_ID = 2**63
_ASK_AGAIN = 60.0  # seconds after a node died, if it is connected
_TRIES = 3  # of a node that answers with an error

# What tells another ClientApp from ours, by a sign of its answer to the question.
_OTHERS = {
    # A client_fn is given no query; older apps know no such message.
    "Invalid message type: query": (
        "its ClientApp is that of a NumPyClient, or of another client_fn: make it "
        "app = flwr_fisher.legacy.client_app(client_fn, model=..., trainloader=...), "
        "as docs/moving-from-numpyclient.md shows"
    ),
    "No query function registered": (
        "its ClientApp is not flwr-fisher's, whose clients say that they are: add "
        "app.query()(identify) and fisher_arrays of flwr_fisher.client to it, or use "
        "FisherClient, as docs/moving-from-fedavg.md shows"
    ),
}
_PLAIN = _OTHERS["No query function registered"]


class NodeNames:
    """Knows nodes by what holds in every run: node ids differ.

    A node goes by the name that it is registered by (``flwr supernode register``),
    which the SuperLink vouches for; else by the partition that it says it holds; else
    by its id. Where two connected nodes claim one name, or one partition, neither is
    asked: nobody can tell whose it is. A registered node loses nothing to the claim of
    one that is not.

    A node that does not answer is not there to be asked more, until it does. One whose
    app fails at the question, again and again, goes by its id: it may well train.

    Parameters
    ----------
    others : "welcome" | "beside" | "refused", default "welcome"
        Whether nodes may take part whose ClientApp is not of this library: any, or
        beside at least one that is, or none. Each of this library's tells its version
        when it is asked; an app that knows no query, or answers without, is another.

    Attributes
    ----------
    answered : set[int]
        Nodes that are there to be asked more.
    refused : dict[int, str]
        Connected nodes that must not take part, with the reason.
    foreign : dict[int, str]
        Nodes whose ClientApp is another, and what to do about it.
    """

    def __init__(self, others: str = "welcome") -> None:
        self.others = others
        self._known: dict[int, Identity] = {}
        self._asked: dict[int, str] = {}  # with the name that it is registered by
        self._until: dict[int, float] = {}  # when a question expires
        self._errors: dict[int, int] = {}  # how often a node answered with one
        self._told: set[str] = set()  # such errors
        self.answered: set[int] = set()
        self.refused: dict[int, str] = {}
        self.foreign: dict[int, str] = {}

    def identity(self, node_id: int) -> Identity:
        """Return who a node is."""
        return self._known.get(node_id, Identity(node_id))

    def name(self, node_id: int) -> str:
        """Return a client's name: the same in every run, where one is known."""
        if node_id in self.refused and node_id not in self.foreign:
            return f"node-{node_id}"
        return self.identity(node_id).name

    def order(self, node_id: int) -> Order:
        """Return a sort key that does not depend on node ids, where possible."""
        return self.identity(node_id).order

    def number(self, node_id: int) -> int:
        """Return what the client itself is known by: its partition, or its node."""
        return self.identity(node_id).number

    def recall(self, client: Identity) -> None:
        """Know a client by the node's id that it had in an earlier life of the run."""
        self._known.setdefault(client.node, client)

    def learn(
        self, mailbox: Mailbox, nodes: Collection[int], timeout: float
    ) -> list[int]:
        """Ask nodes met for the first time which partition they hold.

        Their answers are waited for only where nobody is known yet: who connects later
        is asked, and takes part once it has answered.

        Parameters
        ----------
        mailbox : Mailbox
            Reaches them.
        nodes : Collection[int]
            Those that are connected.
        timeout : float
            Seconds to wait for answers, at most a minute.

        Returns
        -------
        list[int]
            Those that have answered and are not refused.
        """
        now = time.monotonic()
        again = {n for n, until in self._until.items() if until < now} - self.answered
        if new := [n for n in nodes if n not in self._asked or n in again]:
            names = _registered_names(mailbox.grid)
            self._asked |= {node: names.get(node, "") for node in new}
            self._known |= {
                node: Identity(node, name)
                for node, name in names.items()
                if node in new
            }
            self._until |= dict.fromkeys(new, now + ANSWERED_WITHIN)
            wait = 0.0 if self.answered.intersection(nodes) else timeout
            asked = new
            while asked:
                for reply in query(mailbox, asked, RecordDict(), wait, self._take):
                    self._take(reply)
                asked = [n for n in asked if n in self._errors.keys() - self.answered]
            self._tell_nameless(new)
        self._refuse(nodes)
        return [n for n in nodes if n in self.answered and n not in self.refused]

    def _take(self, reply: Reply) -> None:
        """Take a node's answer, whenever it comes."""
        if reply.of_link or reply.of_the_dead:
            self._until[reply.node] = time.monotonic() + _ASK_AGAIN
            return
        node, message = reply.node, reply.message
        if (reason := _of_another(message)) is not None:
            self.foreign[node] = reason
        elif message.has_error() and not self._gives_up(node, message.error.reason):
            self._until[node] = time.monotonic()
            return
        self.answered.add(node)
        records = message.content.metric_records if message.has_content() else {}
        partition = next(
            (r["partition-id"] for r in records.values() if "partition-id" in r), None
        )
        if isinstance(partition, int) and 0 <= partition < _LARGEST_ID:
            self._known[node] = Identity(node, self._asked.get(node, ""), partition)
        elif partition is not None:
            logger.warning(
                "node-%s claims partition %s, which cannot be: it goes by its id",
                node,
                printable(repr(partition)),
            )

    def _gives_up(self, node: int, error: str | None) -> bool:
        """Note an error; return whether the node is not asked once more."""
        self._errors[node] = self._errors.get(node, 0) + 1
        if self._errors[node] < _TRIES:
            return False
        if (reason := printable(error)) not in self._told:
            self._told.add(reason)
            logger.warning(
                "node-%s cannot tell its partition-id, and goes by its id: %s",
                node,
                reason,
            )
        return True

    def _refuse(self, nodes: Collection[int]) -> None:
        """Refuse the connected nodes that must not take part; tell of new ones."""
        before, self.refused = self.refused, {}
        self._refuse_doubles(nodes)
        foreign = [node for node in nodes if node in self.foreign]
        beside = self.others == "beside" and len(foreign) < len(nodes)
        if self.others != "welcome" and not beside:
            self.refused |= {node: self.foreign[node] for node in foreign}
        others: dict[str, list[str]] = {}  # mostly all of a run's nodes
        for node in self.refused.keys() - before.keys():
            if node in self.foreign:
                others.setdefault(self.foreign[node], []).append(self.name(node))
            else:
                logger.warning("node-%s is not asked: %s", node, self.refused[node])
        for reason, names in others.items():
            logger.warning("%s: not asked: %s", listed(names), reason)

    def _refuse_doubles(self, nodes: Iterable[int]) -> None:
        """Refuse the nodes whose names, or numbers, are not theirs alone."""
        connected = [self.identity(node) for node in nodes]
        alike: dict[str | int, list[Identity]] = {}
        for one in connected:
            for claim in (one.name, one.number):
                alike.setdefault(claim, []).append(one)
        for one in connected:
            # A node's own id is nobody else's, whoever claims it.
            same = alike[one.name] + (
                [] if one.partition is None else alike[one.number]
            )
            # What an unregistered node claims costs no registered one its place.
            nodes = {other.node for other in same if other.registered}
            if not one.registered:
                nodes = {other.node for other in same}
            if len(nodes | {one.node}) > 1:
                several = listed([f"node-{node}" for node in nodes])
                self.refused[one.node] = (
                    f"'{printable(one.name)}' is claimed by more than one node "
                    f"({several}): give each a partition-id of its own, or register "
                    "them by name, whom no claim can cost its place"
                )

    def _tell_nameless(self, new: Iterable[int]) -> None:
        nameless = [
            node
            for node in new
            if node in self.answered and self.identity(node).order[0] == 2
        ]
        if nameless:
            logger.info(
                "%d nodes did not tell a partition-id of their own; they go by node "
                "id, so another run may choose others",
                len(nameless),
            )


def _of_another(message: Message) -> str | None:
    """Return what to do about another library's app; None where it is none."""
    if message.has_error():
        error = str(message.error.reason)
        return next((why for sign, why in _OTHERS.items() if sign in error), None)
    records = message.content.config_records.values()
    return None if any(LIBRARY in record for record in records) else _PLAIN


def _registered_names(grid: Grid) -> Mapping[int, str]:
    """Return the names by which nodes are registered, of those that have one."""
    return {info.node_id: info.name for info in grid.get_nodes() if info.name}
