"""Names of nodes that hold in every run."""

import logging
import time
from collections.abc import Collection, Iterable, Mapping

from flwr.app import RecordDict
from flwr.serverapp import Grid

from flwr_fisher.printable import printable
from flwr_fisher.server.collect import ANSWERED_WITHIN, query
from flwr_fisher.server.identity import Identity, Order
from flwr_fisher.server.mailbox import Mailbox, Reply
from flwr_fisher.server.rejections import listed

logger = logging.getLogger("flwr")

_LARGEST_ID = 2**63
_ASK_AGAIN = 60.0  # seconds after a node died, if it is connected


class NodeNames:
    """Knows nodes by what holds in every run: node ids differ.

    A node goes by the name that it is registered by (``flwr supernode register``),
    which the SuperLink vouches for; else by the partition that it says it holds; else
    by its id. Where two connected nodes claim one name, or one partition, neither is
    asked: nobody can tell whose it is. A registered node loses nothing to the claim of
    one that is not.

    A node that does not answer is not there to be asked more, until it does.

    Attributes
    ----------
    answered : set[int]
        Nodes that are there to be asked more.
    refused : dict[int, str]
        Connected nodes that must not take part, with the reason.
    """

    def __init__(self) -> None:
        self._known: dict[int, Identity] = {}
        self._asked: dict[int, str] = {}  # with the name that it is registered by
        self._until: dict[int, float] = {}  # when a question expires
        self.answered: set[int] = set()
        self.refused: dict[int, str] = {}

    def identity(self, node_id: int) -> Identity:
        """Return who a node is."""
        return self._known.get(node_id, Identity(node_id))

    def name(self, node_id: int) -> str:
        """Return a client's name: the same in every run, where one is known."""
        if node_id in self.refused:
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
            for reply in query(mailbox, new, RecordDict(), wait, self._take):
                self._take(reply)
            self._tell_nameless(new)
        self._refuse_doubles(nodes)
        return [n for n in nodes if n in self.answered and n not in self.refused]

    def _take(self, reply: Reply) -> None:
        """Take a node's answer, whenever it comes."""
        if reply.of_link or reply.of_the_dead:
            self._until[reply.node] = time.monotonic() + _ASK_AGAIN
            return
        node, message = reply.node, reply.message
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

    def _refuse_doubles(self, nodes: Iterable[int]) -> None:
        """Refuse the connected nodes whose names, or numbers, are not theirs alone."""
        connected = [self.identity(node) for node in nodes]
        before, self.refused = self.refused, {}
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
        for node in self.refused.keys() - before.keys():
            logger.warning("node-%s is not asked: %s", node, self.refused[node])

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


def _registered_names(grid: Grid) -> Mapping[int, str]:
    """Return the names by which nodes are registered, of those that have one."""
    return {info.node_id: info.name for info in grid.get_nodes() if info.name}
