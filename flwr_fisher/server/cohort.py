"""Who takes part: nodes known by what they hold, since node ids differ in every run."""

import logging
import random
import time

from flwr.serverapp import Grid

from flwr_fisher.errors import RoundError
from flwr_fisher.server.agreement import Agreement
from flwr_fisher.server.node_names import NodeNames

logger = logging.getLogger("flwr")


class Cohort(NodeNames):
    """Names nodes by partition and samples them by seed and round.

    Parameters
    ----------
    seed : int
        The strategy's.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.agreement = seed, Agreement()
        self.connected = 0  # how many nodes were, when last sampled from

    def sample(
        self,
        grid: Grid,
        *,
        fraction: float,
        minimum: int,
        available: int,
        server_round: int,
        purpose: str,
        timeout: float,
    ) -> list[int]:
        """Return the round's nodes, a function of seed, round and who is connected.

        Raises
        ------
        RoundError
            If too few nodes are connected when `timeout` seconds have passed, or claim
            names of their own.
        """
        connected = self._wait(grid, max(available, minimum), timeout)
        self.learn(grid, connected, timeout)
        nodes = [node for node in connected if node not in self.refused]
        if len(nodes) < minimum:
            raise RoundError(
                f"{len(nodes)} nodes can be asked, and {minimum} are needed:\n"
                + "\n".join(f"node-{n}: {why}" for n, why in self.refused.items())
            )
        nodes.sort(key=self.order)
        self.connected = len(nodes)
        size = max(int(len(nodes) * fraction), minimum)
        chosen = random.Random(f"{self.seed}/{server_round}/{purpose}")
        return sorted(chosen.sample(nodes, size), key=self.order)

    def _wait(self, grid: Grid, needed: int, timeout: float) -> list[int]:
        deadline = time.monotonic() + timeout
        while len(nodes := list(grid.get_node_ids())) < needed:
            if time.monotonic() > deadline:
                raise RoundError(
                    f"{len(nodes)} nodes are connected after {timeout:.0f} s, and "
                    f"{needed} are needed: start more SuperNodes, or lower "
                    "min_available_nodes and min_train_nodes"
                )
            logger.info(
                "Waiting for nodes to connect: %d connected (minimum required: %d).",
                len(nodes),
                needed,
            )
            time.sleep(1)
        return nodes
