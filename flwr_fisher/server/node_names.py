"""Names of nodes that hold in every run."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from flwr.app import RecordDict
from flwr.serverapp import Grid

from flwr_fisher.printable import printable
from flwr_fisher.server.collect import query
from flwr_fisher.server.rejections import listed

logger = logging.getLogger("flwr")

Order = tuple[int, int, str]

_LARGEST_ID = 2**63


@dataclass(frozen=True)
class _Identity:
    """Who a node is: by the name that it is registered by, its partition, or its id."""

    node: int
    registered: str = ""
    partition: int | None = None

    @property
    def name(self) -> str:
        if self.registered:
            return self.registered
        if self.partition is not None:
            return f"partition-{self.partition}"
        return f"node-{self.node}"

    @property
    def order(self) -> Order:
        if self.registered:
            return (1, 0, self.registered)
        if self.partition is not None:
            return (0, self.partition, "")
        return (2, self.node, "")

    @property
    def number(self) -> int:
        """What the client itself is known by."""
        return self.node if self.partition is None else self.partition


class NodeNames:
    """Knows nodes by what holds in every run: node ids differ.

    A node goes by the name that it is registered by (``flwr supernode register``),
    which the SuperLink vouches for; else by the partition that it says it holds; else
    by its id. Where two connected nodes claim one name, or one partition, neither is
    asked: nobody can tell whose it is. A registered node loses nothing to the claim of
    one that is not.

    Attributes
    ----------
    answered : set[int]
        Nodes that are there to be asked more.
    refused : dict[int, str]
        Connected nodes that must not take part, with the reason.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Identity] = {}
        self.answered: set[int] = set()
        self.refused: dict[int, str] = {}

    def name(self, node_id: int) -> str:
        """Return a client's name: the same in every run, where one is known."""
        if node_id in self.refused:
            return f"node-{node_id}"
        return self._identity(node_id).name

    def order(self, node_id: int) -> Order:
        """Return a sort key that does not depend on node ids, where possible."""
        return self._identity(node_id).order

    def number(self, node_id: int) -> int:
        """Return what the client itself is known by: its partition, or its node."""
        return self._identity(node_id).number

    def learn(self, grid: Grid, nodes: Collection[int], timeout: float) -> None:
        """Ask nodes met for the first time which partition they hold.

        Parameters
        ----------
        grid : Grid
            Reaches them.
        nodes : Collection[int]
            Those that are connected.
        timeout : float
            Seconds to wait for answers, at most a minute.
        """
        new = [node for node in nodes if node not in self._known]
        if new:
            names = _registered_names(grid)
            claims = self._claims(grid, new, timeout)
            for node in new:
                partition = claims.get(node)
                self._known[node] = _Identity(node, names.get(node, ""), partition)
            self._tell_nameless(new)
        self._refuse_doubles(nodes)

    def _identity(self, node_id: int) -> _Identity:
        return self._known.get(node_id, _Identity(node_id))

    def _claims(
        self, grid: Grid, nodes: Iterable[int], timeout: float
    ) -> dict[int, int]:
        claims = {}
        for reply in query(grid, nodes, RecordDict(), timeout):
            node = reply.metadata.src_node_id
            self.answered.add(node)
            records = reply.content.metric_records if reply.has_content() else {}
            partition = next(
                (r["partition-id"] for r in records.values() if "partition-id" in r),
                None,
            )
            if isinstance(partition, int) and 0 <= partition < _LARGEST_ID:
                claims[node] = partition
            elif partition is not None:
                logger.warning(
                    "node-%s claims partition %s, which cannot be: it goes by its id",
                    node,
                    printable(repr(partition)),
                )
        return claims

    def _refuse_doubles(self, nodes: Iterable[int]) -> None:
        """Refuse the connected nodes whose names, or numbers, are not theirs alone."""
        connected = [self._identity(node) for node in nodes]
        before, self.refused = self.refused, {}
        alike: dict[str | int, list[_Identity]] = {}
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
        nameless = [node for node in new if self._identity(node).order[0] == 2]
        if nameless:
            logger.info(
                "%d nodes did not tell a partition-id of their own; they go by node "
                "id, so another run may choose others",
                len(nameless),
            )


def _registered_names(grid: Grid) -> Mapping[int, str]:
    """Return the names by which nodes are registered, of those that have one."""
    return {info.node_id: info.name for info in grid.get_nodes() if info.name}
