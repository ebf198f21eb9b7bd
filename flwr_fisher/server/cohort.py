"""Who takes part: nodes known by what they hold, since node ids differ in every run."""

import logging
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flwr.serverapp import Grid

from flwr_fisher.errors import RoundError
from flwr_fisher.server.agreement import Agreement
from flwr_fisher.server.mailbox import Mailbox
from flwr_fisher.server.node_names import NodeNames
from flwr_fisher.server.rejections import listed
from flwr_fisher.server.waiting import Waiting

logger = logging.getLogger("flwr")


@dataclass(frozen=True)
class Sample:
    """Whom to ask.

    Parameters
    ----------
    nodes : list[int]
        In the clients' order.
    wanted : int
        How many replies are wanted: fewer, where more are asked than needed.
    """

    nodes: list[int]
    wanted: int


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
        self._mailbox: Mailbox | None = None
        # By node: how many deadlines it missed in a row, and until which round it is
        # left out for it.
        self._missed: dict[int, tuple[int, int]] = {}

    def mailbox(self, grid: Grid) -> Mailbox:
        """Return the mailbox of a grid, which knows what is due."""
        if self._mailbox is None or self._mailbox.grid is not grid:
            self._mailbox = Mailbox(grid)
        return self._mailbox

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
        waiting: Waiting,
    ) -> Sample:
        """Return the round's nodes, a function of seed, round and who is connected.

        Raises
        ------
        RoundError
            If too few nodes are connected when `timeout` seconds have passed, or answer
            by then, or claim names of their own.
        """
        nodes = self._wait(grid, max(available, minimum), minimum, timeout)
        nodes.sort(key=self.order)
        self.connected = len(nodes)
        wanted = max(int(len(nodes) * fraction), minimum)
        candidates = self._reliable(nodes, minimum, server_round)
        wanted = min(wanted, len(candidates))
        size = min(waiting.to_ask(wanted), len(candidates))
        chosen = random.Random(f"{self.seed}/{server_round}/{purpose}")
        return Sample(sorted(chosen.sample(candidates, size), key=self.order), wanted)

    def missed(self, nodes: Iterable[int], server_round: int) -> None:
        """Note who let a deadline pass: it sits out a while, longer each time."""
        for node in nodes:
            times = self._missed.get(node, (0, 0))[0] + 1
            self._missed[node] = times, server_round + 2 ** (times - 1)

    def replied(self, node: int) -> None:
        """Note that a node is alive."""
        self._missed.pop(node, None)

    def _reliable(
        self, nodes: Sequence[int], minimum: int, server_round: int
    ) -> list[int]:
        """Return the nodes without those that sit out, unless they are needed."""
        out = [n for n in nodes if self._missed.get(n, (0, 0))[1] >= server_round]
        others = [node for node in nodes if node not in out]
        needed = out[: max(minimum - len(others), 0)]
        if idle := [node for node in out if node not in needed]:
            logger.info(
                "Not asked, since they let a deadline pass: %s",
                listed([self.name(node) for node in idle]),
            )
        return sorted([*others, *needed], key=self.order)

    def _wait(
        self, grid: Grid, available: int, minimum: int, timeout: float
    ) -> list[int]:
        """Return the connected nodes that answer, once they are enough."""
        mailbox = self.mailbox(grid)
        deadline = time.monotonic() + timeout
        while True:
            connected = list(grid.get_node_ids())
            nodes: list[int] = []
            if len(connected) >= available:
                nodes = self.learn(mailbox, connected, deadline - time.monotonic())
                silent = [node for node in connected if node not in self.answered]
                if len(nodes) >= minimum or not silent:
                    break
            if time.monotonic() > deadline:
                raise RoundError(self._too_few(connected, available, timeout))
            logger.info(
                "Waiting for nodes to connect: %d connected (minimum required: %d).",
                len(connected),
                available,
            )
            time.sleep(1)
            mailbox.pull()
        if len(nodes) < minimum:
            raise RoundError(
                f"{len(nodes)} nodes can be asked, and {minimum} are needed:\n"
                + "\n".join(f"node-{n}: {why}" for n, why in self.refused.items())
            )
        return nodes

    def _too_few(self, connected: Sequence[int], needed: int, timeout: float) -> str:
        if len(connected) < needed:
            return (
                f"{len(connected)} nodes are connected after {timeout:.0f} s, and "
                f"{needed} are needed: start more SuperNodes, or lower "
                "min_available_nodes and min_train_nodes"
            )
        silent = [self.name(node) for node in connected if node not in self.answered]
        return (
            f"of {len(connected)} nodes that are connected, {listed(silent)} did not "
            f"answer within {timeout:.0f} s: see whether their ClientApp starts, or "
            "lower min_train_nodes"
        )
