"""Who takes part: nodes known by what they hold, since node ids differ in every run."""

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.serverapp import Grid

from flwr_fisher.errors import RoundError
from flwr_fisher.log_lines import logger
from flwr_fisher.server.agreement import Agreement
from flwr_fisher.server.connected import most_nodes
from flwr_fisher.server.mailbox import Mailbox
from flwr_fisher.server.node_names import NodeNames
from flwr_fisher.server.rejections import listed
from flwr_fisher.server.waiting import Waiting

_GONE_WITHIN = 120.0  # seconds until the SuperLink has noticed that a node is gone


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
    others : "welcome" | "beside" | "refused", default "welcome"
        Whether nodes whose ClientApp is not of this library may take part.
    """

    def __init__(self, seed: int, others: str = "welcome") -> None:
        super().__init__(others)
        self.seed, self.agreement = seed, Agreement()
        self.connected = 0  # how many nodes were, when last sampled from
        self._mailbox: Mailbox | None = None
        # By name: how many deadlines it missed in a row, and until which round it is
        # left out for it.
        self._missed: dict[str, tuple[int, int]] = {}
        self._passed_over: set[str] = set()  # names
        self._given_up: set[int] = set()  # nodes whose answer is not waited for
        self.abstaining: set[int] = set()  # nodes that have nothing to evaluate on

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
        nodes = self.ready(grid, max(available, minimum), minimum, timeout)
        wanted = max(int(len(nodes) * fraction), minimum)
        candidates = self._reliable(nodes, minimum, server_round)
        wanted = min(wanted, len(candidates))
        size = min(waiting.to_ask(wanted), len(candidates))
        chosen = random.Random(f"{self.seed}/{server_round}/{purpose}")
        return Sample(sorted(chosen.sample(candidates, size), key=self.order), wanted)

    def missed(self, nodes: Iterable[int], server_round: int) -> None:
        """Note who let a deadline pass: it sits out a while, longer each time."""
        for name in map(self.name, nodes):
            times = self._missed.get(name, (0, 0))[0] + 1
            self._missed[name] = times, server_round + 2 ** (times - 1)

    def passed_over(self, nodes: Iterable[int], server_round: int) -> None:
        """Note who was not waited for: twice in a row is as good as a deadline."""
        names = {self.name(node): node for node in nodes}
        again = names.keys() & self._passed_over
        self._passed_over |= names.keys()
        self.missed([names[name] for name in again], server_round)

    def replied(self, node: int) -> None:
        """Note that a node is alive."""
        self._missed.pop(self.name(node), None)
        self._passed_over.discard(self.name(node))

    def absences(self) -> dict[str, Any]:
        """Return who sits out, as JSON holds it: a resumed run samples as this one."""
        passed = sorted(self._passed_over)
        return {"missed": dict(self._missed), "passed-over": passed}

    def recall_absences(self, record: Mapping[str, Any]) -> None:
        """Take up what :meth:`absences` returned in an earlier life of the run."""
        missed = record.get("missed", {})
        self._missed = {name: (times, until) for name, (times, until) in missed.items()}
        self._passed_over = set(record.get("passed-over", ()))

    def _reliable(
        self, nodes: Sequence[int], minimum: int, server_round: int
    ) -> list[int]:
        """Return the nodes without those that sit out, unless they are needed."""
        until = {name: last for name, (_, last) in self._missed.items()}
        out = [n for n in nodes if until.get(self.name(n), 0) >= server_round]
        others = [node for node in nodes if node not in out]
        needed = out[: max(minimum - len(others), 0)]
        if idle := [node for node in out if node not in needed]:
            logger.info(
                "Not asked, since they let a deadline pass: %s",
                self._listed(idle),
            )
        return sorted([*others, *needed], key=self.order)

    def ready(
        self, grid: Grid, available: int, minimum: int, timeout: float
    ) -> list[int]:
        """Return the connected nodes that can be asked, in order, once they are enough.

        As many as are to be available have two minutes to answer: a SuperLink lists a
        node that has gone, or starts again, for as long. Then fewer begin.

        Raises
        ------
        RoundError
            As for :meth:`sample`.
        """
        mailbox = self.mailbox(grid)
        began = time.monotonic()
        deadline = began + timeout
        while True:
            connected = list(grid.get_node_ids())
            nodes: list[int] = []
            if len(connected) >= available:
                nodes = self.learn(mailbox, connected, deadline - time.monotonic())
                silent = self._silent(connected)
                gone = time.monotonic() > began + _GONE_WITHIN
                there = len(connected) - len(set(silent) - self._given_up)
                if len(nodes) >= minimum and (there >= available or gone):
                    self._go_without(silent)
                    nodes.sort(key=self.order)
                    self.connected = len(nodes)
                    return nodes
                # A client that was restarted is refused until its old node is gone.
                # Where all run another app, as all do in most runs, none will change.
                foreign = all(
                    n in self.refused and n in self.foreign for n in connected
                )
                if not silent and (foreign or gone):
                    break
            fewer = most_nodes(grid, available) < available
            if fewer or time.monotonic() > deadline:
                waited = min(time.monotonic() - began, timeout)
                raise RoundError(self._too_few(connected, available, waited))
            logger.info(
                "Waiting for nodes to connect: %d connected (minimum required: %d)%s.",
                len(connected),
                available,
                self._held_up(connected, available),
            )
            time.sleep(1)
            mailbox.pull()
        raise RoundError(
            f"{len(nodes)} nodes can be asked, and {minimum} are needed:\n"
            + "\n".join(self._refusals())
        )

    def _go_without(self, silent: Sequence[int]) -> None:
        """Tell once who is listed as connected, and has not answered."""
        if new := [node for node in silent if node not in self._given_up]:
            logger.warning(
                "Not asked, since no answer has come yet: %s", self._listed(new)
            )
        self._given_up.update(silent)

    def _silent(self, connected: Sequence[int]) -> list[int]:
        """Return the connected nodes that have not answered yet."""
        return [node for node in connected if node not in self.answered]

    def _listed(self, nodes: Sequence[int]) -> str:
        return listed([self.name(node) for node in nodes])

    def _held_up(self, connected: Sequence[int], needed: int) -> str:
        """Return why nodes that are connected cannot be asked yet."""
        told = f", {len(self.refused)} refused" if self.refused else ""
        silent = self._silent(connected)
        if silent and len(connected) >= needed:
            told += f", no answer yet from {self._listed(silent)}"
        return told

    def _refusals(self) -> list[str]:
        """Return a line for each reason, with the nodes that are refused for it."""
        alike: dict[str, list[str]] = {}
        for node, reason in self.refused.items():
            alike.setdefault(reason, []).append(self.name(node))
        return [f"{listed(names)}: {reason}" for reason, names in alike.items()]

    def _too_few(self, connected: Sequence[int], needed: int, waited: float) -> str:
        if len(connected) < needed:
            return (
                f"{len(connected)} nodes are connected after {waited:.0f} s, and "
                f"{needed} are needed: start more SuperNodes, or lower "
                "min_available_nodes and min_train_nodes"
            )
        silent = self._silent(connected)
        if refused := self._refusals():
            return "\n".join(
                [f"too few nodes can be asked after {waited:.0f} s:", *refused]
            )
        return (
            f"of {len(connected)} nodes that are connected, {self._listed(silent)} did "
            f"not answer within {waited:.0f} s: see whether their ClientApp starts, "
            "or lower min_train_nodes"
        )
