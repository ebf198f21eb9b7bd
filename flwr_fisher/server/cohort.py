"""The cohort of a round: connected nodes, sampled by seed and round.

Long: half of it is log texts about nodes that the server waits for.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from flwr_fisher.errors import (
    ClientError,
    RoundError,
    check_whole,
    kept_record,
    listed,
)
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params
from flwr_fisher.server.identity import Key, NodeNames, by_reason
from flwr_fisher.server.mailbox import Mailbox, NodeReply, query
from flwr_fisher.server.waiting import Waiting
from flwr_fisher.wire import named_options
from flwr_fisher.wire.answer import Answer, frozen_name, of_products, some

_GONE_WITHIN = 120.0  # seconds until the SuperLink notices that a node is gone
FREEZE_THE_SAME = (
    "load the same pre-trained parameters on every client, and make adapters with "
    "the same seed"
)
_QUIET = 30.0  # seconds of waiting until the log says what to do
_WAITING = "Waiting for nodes to connect: %d connected (minimum required: %d)%s."

Said = TypeVar("Said")


@dataclass(frozen=True)
class Sample:
    """The nodes that a round asks.

    Parameters
    ----------
    nodes : list[int]
        The nodes to ask, in the clients' order.
    wanted : int
        How many replies are wanted. With over-selection this is fewer than the nodes.
    """

    nodes: list[int]
    wanted: int


class Cohort(NodeNames):
    """The nodes of a run, named by partition, and sampled by seed and round."""

    def __init__(self, seed: int, allow_foreign: bool = True) -> None:
        super().__init__(allow_foreign)
        self.seed = seed
        self.connected = 0  # the number of nodes at the last sampling
        self.abstaining: set[int] = set()  # nodes without data for evaluation
        self._mailbox: Mailbox | None = None
        # By name: how many deadlines a node missed in a row, and the round until which
        # it sits out.
        self._missed: dict[str, tuple[int, int]] = {}
        self._passed_over: set[str] = set()  # names of clients that were too late once
        self._given_up: set[int] = set()  # nodes that are not waited for
        # By node: names of trained parameters; names and digests of frozen ones.
        self._trained: dict[int, frozenset[str] | None] = {}
        self._frozen: dict[int, frozenset[str]] = {}
        self._alike: dict[frozenset[str], frozenset[str]] = {}  # to share equal sets

    def mailbox(self, grid: Grid) -> Mailbox:
        """Return the grid's mailbox, which knows the outstanding replies."""
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
        """Return the round's nodes, a function of seed, round and connected nodes.

        Raises
        ------
        RoundError
            If, after `timeout` seconds, too few nodes are connected, have answered, or
            have a name that no other node claims.
        """
        nodes = self.ready(grid, available, minimum, timeout, purpose)
        wanted = max(int(len(nodes) * fraction), minimum)
        candidates = self._reliable(nodes, minimum, server_round)
        wanted = min(wanted, len(candidates))
        size = min(waiting.to_ask(wanted), len(candidates))
        chosen = random.Random(f"{self.seed}/{server_round}/{purpose}")
        return Sample(sorted(chosen.sample(candidates, size), key=self.order), wanted)

    # --- nodes that sit out

    def missed(self, nodes: Iterable[int], server_round: int) -> None:
        """Note a node that missed a deadline: it sits out, longer each time."""
        for name in map(self.name, nodes):
            times = self._missed.get(name, (0, 0))[0] + 1
            self._missed[name] = times, server_round + 2 ** (times - 1)

    def passed_over(self, nodes: Iterable[int], server_round: int) -> None:
        """Note a node that was too late; twice in a row counts as a missed deadline."""
        names = {self.name(node): node for node in nodes}
        again = names.keys() & self._passed_over
        self._passed_over |= names.keys()
        self.missed([names[name] for name in again], server_round)

    def replied(self, node: int) -> None:
        """Note that a node replied, so that it no longer sits out."""
        self._missed.pop(self.name(node), None)
        self._passed_over.discard(self.name(node))

    def absences(self) -> dict[str, Any]:
        """Return the nodes that sit out, for the journal of a resumed run."""
        passed = sorted(self._passed_over)
        return {"missed": dict(self._missed), "passed-over": passed}

    def recall_absences(self, record: Mapping[str, Any]) -> None:
        """Restore what :meth:`absences` returned before the run was resumed.

        Raises
        ------
        CheckpointError
            If another version wrote it.
        """
        with kept_record("the run's record of the clients that sit out"):
            missed = record.get("missed", {}).items()
            self._missed = {name: (times, until) for name, (times, until) in missed}
            self._passed_over = set(record.get("passed-over", ()))

    def _reliable(
        self, nodes: Sequence[int], minimum: int, server_round: int
    ) -> list[int]:
        """Return the nodes that do not sit out, and others only if needed."""
        until = {name: last for name, (_, last) in self._missed.items()}
        out = [n for n in nodes if until.get(self.name(n), 0) >= server_round]
        others = [node for node in nodes if node not in out]
        needed = out[: max(minimum - len(others), 0)]
        if idle := out[len(needed) :]:
            text = "Not asking nodes that did not reply in time before: %s"
            logger.info(text, self._listed(idle))
        return sorted([*others, *needed], key=self.order)

    # --- connected nodes

    def present(self, grid: Grid, timeout: float) -> list[int]:
        """Return the connected nodes that may be asked."""
        return self.learn(self.mailbox(grid), list(grid.get_node_ids()), timeout)

    def ready(
        self,
        grid: Grid,
        available: int,
        minimum: int,
        timeout: float,
        purpose: str = "train",
    ) -> list[int]:
        """Wait for enough nodes that can be asked; return them in order.

        The server waits up to two minutes until ``min_available_nodes`` nodes have
        answered, because a SuperLink lists a node for that long after it has gone or
        restarted. Then it begins with fewer.

        Raises
        ------
        RoundError
            As for :meth:`sample`.
        """
        options = {"min_available_nodes": available, f"min_{purpose}_nodes": minimum}
        needed, mailbox = max(available, minimum), self.mailbox(grid)
        began = time.monotonic()
        deadline, line = began + timeout, ""
        while True:
            connected = list(grid.get_node_ids())
            silent, over = list[int](), False
            if are_there := len(connected) >= needed:
                nodes = self.learn(mailbox, connected, deadline - time.monotonic())
                silent = [node for node in connected if node not in self.answered]
                gone = time.monotonic() > began + _GONE_WITHIN
                there = len(connected) - len(set(silent) - self._given_up)
                if len(nodes) >= minimum and (there >= needed or gone):
                    self._give_up(silent)
                    self.connected = len(nodes)
                    return sorted(nodes, key=self.order)
                # A restarted client is refused until its old node is gone.
                # If all nodes run another app, as is usual then, none will change.
                foreign = self.refused.keys() & self.foreign.keys()
                over = not silent and (gone or foreign >= set(connected))
            over |= time.monotonic() > deadline or most_nodes(grid, needed) < needed
            waited = min(time.monotonic() - began, timeout)
            if over and are_there:
                raise RoundError(self._too_few(nodes, silent, options, waited))
            lower = _lower(options, len(connected))
            if over:
                few = _too_few_connected(len(connected), needed, waited, lower)
                raise RoundError(few)
            refused = f", {len(self.refused)} refused" if self.refused else ""
            if silent:
                refused += f", no answer yet from {self._listed(silent)}"
            if waited > _QUIET and not are_there:
                out = _more_nodes(len(connected), lower)
                refused += f", for {timeout:.0f} s at most. To begin, {out}"
            before, line = line, _WAITING % (len(connected), needed, refused)
            if line != before:
                logger.info("%s", line)
            time.sleep(1)
            mailbox.pull()

    def _give_up(self, silent: Sequence[int]) -> None:
        """Log, once, the connected nodes that have not answered."""
        if new := [node for node in silent if node not in self._given_up]:
            text = "Not asking nodes that have not answered yet: %s"
            logger.warning(text, self._listed(new))
        self._given_up.update(silent)

    def _listed(self, nodes: Sequence[int]) -> str:
        return listed(map(self.name, nodes))

    def _refusals(self) -> list[str]:
        """Return a line for each reason, with the names of the refused nodes."""
        reasons = by_reason(self.refused).items()
        return [f"{self._listed(nodes)}: {why}" for why, nodes in reasons]

    def _too_few(
        self,
        nodes: Sequence[int],
        silent: Sequence[int],
        options: Mapping[str, int],
        waited: float,
    ) -> str:
        """Return why enough nodes are connected, but too few of them can be asked."""
        count, needed = len(nodes), max(options.values())
        wanted = [f"{name}={n}" for name, n in options.items() if n > count]
        lines = [
            f"only {count} of {needed} required nodes ({', '.join(wanted)}) can be "
            f"asked after {waited:.0f} s:",
            *self._refusals(),
        ]
        if silent:
            # An evaluation waits a minute at most.
            more = "" if "min_evaluate_nodes" in options else " raise start's timeout,"
            lines.append(
                f"{self._listed(silent)}: no answer. Check that the ClientApp starts "
                f"there,{more} or {_lower(options, count)}"
            )
        return "\n".join(lines)

    # --- trained and frozen parameters

    def mismatched(
        self, grid: Grid, nodes: Sequence[int], like: Params, timeout: float
    ) -> dict[int, ClientError]:
        """Return the nodes with other parameters than most nodes', with the difference.

        They train other parameters of `like`, which the server sends, or their frozen
        parameters, which it does not send, have other values. The server queries each
        node once, before it trains, and waits at most a minute. A node that does not
        answer is not returned: it may fail later, by itself. A node that does not
        report its frozen parameters may have any. The order of `nodes` is the same in
        every run.
        """
        take = partial(self._take_trained, frozenset(like))
        if new := [node for node in nodes if node not in self._trained]:
            self._trained |= dict.fromkeys(new)
            config = ConfigRecord({**named_options({"query": "trained"})})
            content = RecordDict({"config": config})
            for reply in query(self.mailbox(grid), new, content, timeout, take):
                take(reply)
        trained = {n: own for n in nodes if (own := self._trained[n]) is not None}
        if text := of_products(frozenset[str]().union(*trained.values())):
            self.warn_once(text, "products of adapters")
        reasons = unlike_most(trained, _difference)
        left = [n for n in nodes if n in self._frozen and n not in reasons]
        reasons |= unlike_most({n: self._frozen[n] for n in left}, _other_values)
        return {node: ClientError(why) for node, why in reasons.items()}

    def _take_trained(self, names: frozenset[str], reply: NodeReply) -> None:
        """Store which of these names a node trains, and which others it freezes."""
        answer = Answer.of(reply.message)
        if answer.trained is not None:
            self._trained[reply.node] = names & answer.trained
        if (frozen := answer.frozen_beside(names)) is not None:
            self._frozen[reply.node] = self._alike.setdefault(frozen, frozen)


def unlike_most(
    said: Mapping[Key, Said], difference: Callable[[Said, Said, str], str]
) -> dict[Key, str]:
    """Return the nodes with another answer than most, with the difference.

    If no two nodes have the same answer, all nodes are returned, because no answer is
    more likely to be right.

    Parameters
    ----------
    said : Mapping[Key, Said]
        The answers, by client.
    difference : Callable[[Said, Said, str], str]
        Makes a text from a node's answer, another answer, and the name of those who
        gave the other one: "most" or "others".
    """
    counts = Counter(said.values()).most_common()
    if len(counts) < 2:
        return {}
    common, number = counts[0]
    whom = "most" if 2 * number > len(said) else "others"
    unlike = {k: own for k, own in said.items() if number == 1 or own != common}
    return {
        key: difference(own, counts[1][0] if own == common else common, whom)
        for key, own in unlike.items()
    }


def _other_values(own: frozenset[str], other: frozenset[str], whom: str) -> str:
    names = {frozen_name(each) for each in own ^ other}
    return f"its frozen {some(names)} differ from those of {whom}: {FREEZE_THE_SAME}"


def _difference(own: frozenset[str], other: frozenset[str], whom: str) -> str:
    parts = []
    if extra := own - other:
        parts.append(f"it trains {some(extra)}, which {whom} freeze")
    if missing := other - own:
        parts.append(f"it freezes {some(missing)}, which {whom} train")
    return f"{'; '.join(parts)}: freeze the same parameters on every client"


# --- before a server app begins


def wait_for_nodes(grid: Grid, minimum: int, timeout: float = 3600.0) -> list[int]:
    """Wait until enough nodes are connected; return them.

    In a simulation all nodes are connected from the start; SuperNodes connect one after
    another.

    Parameters
    ----------
    grid : Grid
        The server app's.
    minimum : int
        How many there must be.
    timeout : float, default 3600
        Seconds to wait.

    Raises
    ------
    RoundError
        If too few are connected after that time. If the grid's clients are virtual, and
        too few, it is raised at once.
    """
    check_whole("minimum", minimum, 1)
    began, last = time.monotonic(), -1
    while len(nodes := list(grid.get_node_ids())) < minimum:
        waited = time.monotonic() - began
        if waited >= timeout or most_nodes(grid, minimum) < minimum:
            lower = "lower the minimum, which is min-nodes in the apps"
            raise RoundError(_too_few_connected(len(nodes), minimum, waited, lower))
        if len(nodes) != last:
            last = len(nodes)
            logger.info(_WAITING, last, minimum, "")
        time.sleep(1)
    return nodes


def _lower(options: Mapping[str, int], count: int) -> str:
    """Return which options to lower for so many nodes."""
    names = [name for name, least in options.items() if least > count]
    # A resumed run must have the same min_train_nodes.
    new = " in a new run" if "min_train_nodes" in names else ""
    return f"lower {' and '.join(names)}{new}"


def _too_few_connected(count: int, needed: int, waited: float, lower: str) -> str:
    text = f"only {count} of {needed} required nodes are connected after {waited:.0f} s"
    return f"{text}: {_more_nodes(count, lower)}"


def _more_nodes(count: int, lower: str) -> str:
    """Return what to do if only so many nodes are connected."""
    if not count:  # no lower minimum would do
        return "start SuperNodes, and check that they reach this SuperLink"
    return f"start more SuperNodes (in a simulation, raise num-supernodes), or {lower}"


def most_nodes(grid: Grid, known: int) -> int:
    """Return the largest number of nodes: a virtual grid's, or `known`."""
    most: int = getattr(grid, "num_supernodes", known)
    return most
