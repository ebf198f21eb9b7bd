"""Names of nodes that hold in every run."""

import logging
from collections.abc import Iterable

from flwr.app import RecordDict
from flwr.serverapp import Grid

from flwr_fisher.server.collect import query

logger = logging.getLogger("flwr")


class NodeNames:
    """Knows nodes by the partition that they hold: node ids differ in every run."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[int, int]] = {}
        self.answered: set[int] = set()  # nodes that are there to be asked more

    def name(self, node_id: int) -> str:
        """Return a client's name: the same in every run, where a query told it."""
        known, number = self._names.get(node_id, (1, node_id))
        return f"node-{number}" if known else f"partition-{number}"

    def order(self, node_id: int) -> tuple[int, int]:
        """Return a sort key that does not depend on node ids, where possible."""
        return self._names.get(node_id, (1, node_id))

    def learn(self, grid: Grid, nodes: Iterable[int], timeout: float) -> None:
        """Ask nodes met for the first time which partition they hold."""
        new = [node for node in nodes if node not in self._names]
        self._names |= {node: (1, node) for node in new}
        taken = set(self._names.values())
        for reply in query(grid, new, RecordDict(), timeout):
            node = reply.metadata.src_node_id
            self.answered.add(node)
            records = reply.content.metric_records if reply.has_content() else {}
            found = {k: v for record in records.values() for k, v in record.items()}
            partition = found.get("partition-id")
            if isinstance(partition, int) and (0, partition) not in taken:
                self._names[node] = (0, partition)
                taken.add((0, partition))
        if unknown := [node for node in new if self._names[node][0]]:
            logger.info(
                "%d nodes did not tell a partition-id of their own; they go by node "
                "id, so another run may choose others",
                len(unknown),
            )
