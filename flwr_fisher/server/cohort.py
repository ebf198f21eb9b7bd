"""The cohort of a run: who its clients are, who is connected, and who is asked.

Node ids are random in each run, so clients have names that are the same in every run,
and a round samples them by seed and round.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from flwr_fisher import __version__
from flwr_fisher.errors import (
    ClientError,
    RoundError,
    check_whole,
    kept_record,
    listed,
    printable,
    quoted,
)
from flwr_fisher.flower_internals import nodes_of
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params
from flwr_fisher.server.mailbox import QUERY_LIFETIME, Mailbox, NodeReply, query
from flwr_fisher.wire import named_options
from flwr_fisher.wire.options import Answer, frozen_name

Order = tuple[int, int, str]
Key = TypeVar("Key")
Said = TypeVar("Said")

_GONE_WITHIN = 120.0  # seconds until the SuperLink notices that a node is gone
_ASK_AGAIN = 60.0  # seconds after a node died for which it still counts as connected
FREEZE_THE_SAME = (
    "load the same pre-trained parameters on every client, and make adapters with "
    "the same seed"
)
# How to recognise another library's ClientApp by its answer to the query.
_FOREIGN = {
    # A client_fn gets no query; older apps do not know this message.
    "Invalid message type: query": (
        "its ClientApp is that of a NumPyClient, or of another client_fn: use "
        'flwr_fisher.legacy.client_app(client_fn, ...) (the page "Change a '
        'NumPyClient app")'
    ),
    "No query function registered": (
        "its ClientApp is not flwr-fisher's: add app.query()(identify) and "
        'fisher_arrays to it, or use FisherClient (the page "Change a FedAvg app")'
    ),
}


def _foreign(version: str | None) -> str:
    """Return why an app of this version of the library is foreign; empty if not."""
    if version is None:
        return _FOREIGN["No query function registered"]
    text = "its ClientApp runs flwr-fisher %s, the server %s: install one on both"
    same = version.split(".")[:2] == __version__.split(".")[:2]
    return "" if same else text % (version, __version__)


# --- one client


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
        return self.registered or self.unregistered_name

    @property
    def unregistered_name(self) -> str:
        """The name that the client has without a registration."""
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
        return {self.name, self.unregistered_name, f"node-{self.node}"}


# --- all clients


class Cohort:
    """The nodes of a run, named by partition, and sampled by seed and round.

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
    seed : int
        Decides, with the round, which clients are sampled.
    allow_foreign : bool, default True
        Whether nodes may take part whose ClientApp is foreign. An app of this library
        answers the query with its version. An app that has no query, answers without a
        version, or with one whose first two numbers differ from the server's, is
        foreign.

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
    connected : int
        The number of nodes at the last sampling.
    enough : float
        How many usable replies ended the last exchange that drew its clients.
    abstaining : set[int]
        Nodes without data for evaluation.
    unlike : set[str]
        Clients whose last upload told of other labels or frozen layers than most.
    """

    def __init__(self, seed: int, allow_foreign: bool = True) -> None:
        self.seed, self.allow_foreign = seed, allow_foreign
        self.answered: set[int] = set()
        self.refused: dict[int, str] = {}
        self.foreign: dict[int, str] = {}
        self.do_any_job: set[int] = set()
        self.connected, self.enough = 0, 0.0
        self.abstaining, self.unlike = set[int](), set[str]()
        self._mailbox: Mailbox | None = None
        self._known: dict[int, Identity] = {}
        self._registered: dict[int, str] = {}  # names of the asked nodes, or ""
        self._ask_again: dict[int, float] = {}  # when, if there is no answer by then
        self._failed: set[int] = set()  # nodes that answered a query with an error
        self._warned: set[str] = set()  # warnings that the log has already
        # By name: how many deadlines a node missed in a row, and the round until which
        # it sits out.
        self._missed: dict[str, tuple[int, int]] = {}
        self._numbers: dict[str, int] = {}  # the first one of each registered name
        self._patience = _GONE_WITHIN  # seconds for which nodes are waited for
        # By node: names of trained parameters; names and digests of frozen ones; and
        # what the labels are.
        self._trained: dict[int, frozenset[str] | None] = {}
        self._frozen: dict[int, frozenset[str]] = {}
        self._likelihoods: dict[int, str] = {}
        self._classes: dict[int, str] = {}

    def mailbox(self, grid: Grid) -> Mailbox:
        """Return the grid's mailbox, which knows the outstanding replies."""
        if self._mailbox is None or self._mailbox.grid is not grid:
            self._mailbox = Mailbox(grid)
        return self._mailbox

    def warn_once(self, text: str, key: str = "") -> None:
        """Log a warning once a run: one for each key, which is the text by default."""
        if (key or text) not in self._warned:
            self._warned.add(key or text)
            logger.warning("%s", text)

    # --- who is who

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

    def some_numbers(self, most: int) -> list[int]:
        """Return the numbers of all clients that are known, or of `most` of them."""
        known = sorted({client.number for client in self._known.values()})
        return random.Random(f"{self.seed}/some").sample(known, min(most, len(known)))

    def recall(self, client: Identity) -> None:
        """Restore a client's identity, with its node id before the resume."""
        self._known.setdefault(client.node, client)

    def present(self, grid: Grid, timeout: float) -> list[int]:
        """Return the connected nodes that may be asked."""
        return self.learn(self.mailbox(grid), list(grid.get_node_ids()), timeout)

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
        again = {node for node, when in self._ask_again.items() if when < now}
        again -= self.answered
        if new := [n for n in nodes if n not in self._registered or n in again]:
            names = {info.node_id: info.name for info in nodes_of(mailbox.grid)}
            for node in new:
                self._registered[node] = names.get(node) or ""
                if name := self._registered[node]:
                    self._known[node] = Identity(node, name)
            self._ask_again |= dict.fromkeys(new, now + QUERY_LIFETIME)
            wait = 0.0 if self.answered.intersection(nodes) else timeout
            if wait:
                logger.info("Asking %s nodes which clients they are", len(new))
            due = new
            while due:
                replies = query(mailbox, due, RecordDict(), wait, self._take)
                due = [reply.node for reply in replies if self._take(reply)]
        self._refuse(nodes)
        return [n for n in nodes if n in self.answered and n not in self.refused]

    def _take(self, reply: NodeReply) -> bool:
        """Store a node's answer, whenever it comes; return whether to ask again."""
        node, message = reply.node, reply.message
        if reply.from_superlink or reply.nothing_will_come:
            self._ask_again[node] = time.monotonic() + _ASK_AGAIN
            return False
        answer = Answer.of(message)
        foreign = _foreign(answer.version)
        if message.has_error():
            error = str(message.error.reason)
            foreign = next((why for sign, why in _FOREIGN.items() if sign in error), "")
        if foreign:
            self.foreign[node] = foreign
        elif message.has_error() and node not in self._failed:
            self._failed.add(node)  # the error may pass, such as a lack of memory
            self._ask_again[node] = time.monotonic()
            return True
        elif message.has_error():
            reason, name = printable(error), self.identity(node).name
            text = f"node-{node} failed to send its partition-id, and is known as"
            self.warn_once(f"{text} {name}: {reason}", key=f"partition-id: {reason}")
        self.answered.add(node)
        self._known.setdefault(node, Identity(node))
        if answer.any_job:
            self.do_any_job.add(node)
        if answer.partition is not None:
            registered = self._registered.get(node, "")
            self._known[node] = Identity(node, registered, answer.partition)
        known = self._known[node]
        before = self._numbers.setdefault(known.name, known.number)
        if known.registered and before != known.number:
            self.warn_once(
                f"{known.name} was client {before}, and is now {known.number}: what it "
                "keeps for a method, and its part of an open exchange, is not found "
                "again; start a node with --node-config 'partition-id=0', for example, "
                "for it to be the same client whatever its node id"
            )
        return False

    def _refuse(self, nodes: Collection[int]) -> None:
        """Refuse the connected nodes that must not take part; log new refusals."""
        before = self.refused
        self.refused = claimed_twice([self.identity(node) for node in nodes])
        if not self.allow_foreign:
            self.refused |= {n: self.foreign[n] for n in nodes if n in self.foreign}
        new = {n: why for n, why in self.refused.items() if n not in before}
        for reason, refused in by_reason(new).items():  # often all nodes of the run
            logger.warning("Not asking %s: %s", self._listed(refused), reason)

    # --- who is asked

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
        all_connected: bool = False,
    ) -> list[int]:
        """Choose the nodes that a round asks.

        They are a function of seed, round and connected nodes, in the clients' order.

        Raises
        ------
        RoundError
            If, after `timeout` seconds, too few nodes are connected, have answered, or
            have a name that no other node claims.
        """
        asked = (available, minimum, timeout, purpose)
        nodes = self.ready(grid, *asked, all_connected=all_connected)
        candidates = self._reliable(nodes, minimum, server_round)
        size = min(max(int(len(nodes) * fraction), minimum), len(candidates))
        chosen = random.Random(f"{self.seed}/{server_round}/{purpose}")
        return sorted(chosen.sample(candidates, size), key=self.order)

    def ready(
        self,
        grid: Grid,
        available: int,
        minimum: int,
        timeout: float,
        purpose: str = "train",
        *,
        all_connected: bool = False,
    ) -> list[int]:
        """Wait for enough nodes that can be asked; return them in order.

        The server waits up to two minutes until ``min_available_nodes`` nodes have
        answered (with `all_connected`, all that are connected), because a SuperLink
        lists a node for that long after it has gone or restarted. Then it begins with
        fewer.

        Raises
        ------
        RoundError
            As for :meth:`sample`.
        """
        needed, mailbox = max(available, minimum), self.mailbox(grid)
        options = {"min_available_nodes": available, f"min_{purpose}_nodes": minimum}
        began, line = time.monotonic(), ""
        while True:
            connected = list(grid.get_node_ids())
            waited = time.monotonic() - began
            count, state = len(connected), "are connected"
            nodes, silent, hopeless = list[int](), list[int](), False
            if count >= needed:
                nodes = self.learn(mailbox, connected, timeout - waited)
                waited = time.monotonic() - began
                silent = [node for node in connected if node not in self.answered]
                count, state = len(nodes), "can be asked"
                # A restarted client is refused until its old node is gone. Another
                # library's app stays what it is.
                others = self.refused.keys() & self.foreign.keys()
                all_others = others >= set(connected)
                hopeless = not silent and (all_others or waited > _GONE_WITHIN)
            answered = len(connected) - len(silent)
            here = answered >= needed and not (all_connected and silent)
            if (here or waited > self._patience) and len(nodes) >= minimum:
                if silent:
                    text = "Not asking nodes that have not answered yet: "
                    self.warn_once(text + self._listed(silent))
                    self._patience = 0.0  # they are waited for once a run
                self.connected = len(nodes)
                return sorted(nodes, key=self.order)
            if hopeless or waited > timeout or most_nodes(grid, needed) < needed:
                few = [f"{name}={n}" for name, n in options.items() if n > count]
                lines = [
                    f"only {count} of {needed} required nodes ({', '.join(few)}) "
                    f"{state} after {min(waited, timeout):.0f} s"
                ]
                for why, refused in by_reason(self.refused).items():
                    lines.append(f"{self._listed(refused)}: {why}")
                lines += [f"no answer: {self._listed(silent)}"] if silent else []
                raise RoundError("\n".join(lines))
            last, line = line, _waiting_line(len(connected), needed, purpose)
            if silent:
                line += f", no answer yet from {self._listed(silent)}"
            if line != last:
                logger.info("%s", line)
            time.sleep(1)
            mailbox.pull()

    def _listed(self, nodes: Iterable[int]) -> str:
        return listed(map(self.name, nodes))

    # --- nodes that sit out

    def missed(self, nodes: Iterable[int], server_round: int) -> None:
        """Note a node that missed a deadline: it sits out, longer each time."""
        for name in map(self.name, nodes):
            times = self._missed.get(name, (0, 0))[0] + 1
            self._missed[name] = times, server_round + 2 ** (times - 1)

    def replied(self, node: int) -> None:
        """Note that a node replied, so that it no longer sits out."""
        self._missed.pop(self.name(node), None)

    def absences(self) -> dict[str, Any]:
        """Return who sits out or is unlike most, and all numbers, for a resumed run."""
        known = {"numbers": dict(self._numbers), "unlike": sorted(self.unlike)}
        return {"missed": dict(self._missed), **known}

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
            self._numbers |= record.get("numbers", {})
            self.unlike |= set(record.get("unlike", ()))

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

    # --- trained and frozen parameters

    def mismatched(
        self,
        grid: Grid,
        nodes: Sequence[int],
        like: Params,
        timeout: float,
        *,
        parameters: bool,
    ) -> dict[int, ClientError]:
        """Return the nodes that are unlike most nodes, and an error that says how.

        Their labels have another likelihood, or their data sets other names of classes;
        with `parameters`, also those that train other parameters of `like`, which the
        server sends, or whose frozen parameters have other values. The server queries
        each node once, before its first task, and waits at most a minute. A node that
        does not answer is not returned: it may fail later, by itself. A node that does
        not report its frozen parameters may have any. The order of `nodes` is the
        same in every run.
        """
        take = partial(self._take_trained, frozenset(like))
        if new := [node for node in nodes if node not in self._trained]:
            self._trained |= dict.fromkeys(new)
            config = ConfigRecord({**named_options({"query": "trained"})})
            content = RecordDict({"config": config})
            for reply in query(self.mailbox(grid), new, content, timeout, take):
                take(reply)
        # All that have answered in this run are compared, not these nodes alone.
        known = sorted(self._trained, key=self.order)
        trained = {n: t for n in known if (t := self._trained[n]) is not None}
        answers: list[tuple[Mapping[int, Any], Callable[..., str]]] = []
        if parameters:
            answers += [(trained, _difference), (self._frozen, _other_values)]
        answers += [(self._likelihoods, _other_labels), (self._classes, _other_classes)]
        errors: dict[int, ClientError] = {}
        for said, difference in answers:
            left = {n: said[n] for n in known if n in said and n not in errors}
            for node, (other, whom) in unlike_most(left).items():
                errors[node] = ClientError(difference(left[node], other, whom))
        return errors

    def _take_trained(self, names: frozenset[str], reply: NodeReply) -> None:
        """Store which of these names a node trains, and what else it is compared by."""
        answer = Answer.of(reply.message)
        if answer.trained is not None:
            self._trained[reply.node] = names & answer.trained
        if (frozen := answer.frozen_beside(names)) is not None:
            self._frozen[reply.node] = frozen
        if answer.likelihood is not None:
            self._likelihoods[reply.node] = answer.likelihood
        if answer.classes is not None:
            self._classes[reply.node] = answer.classes


def claimed_twice(connected: Sequence[Identity]) -> dict[int, str]:
    """Return the nodes that share a name or a partition with others, and why not."""
    claims: dict[str | int, list[Identity]] = {}
    for client in connected:
        for claim in (client.name, client.number):
            claims.setdefault(claim, []).append(client)
    refused = {}
    for client in connected:
        same = list(claims[client.name])
        if client.partition is not None:  # or else its number is its id: its own
            same += claims[client.number]
        # A registered node keeps its place, whatever an unregistered one claims.
        rivals = {o.node for o in same if o.registered or not client.registered}
        if rivals <= {client.node}:
            continue
        # Registered nodes have other names, and only the partition in common.
        shared = client.name if client.partition is None else client.unregistered_name
        nodes = listed([f"node-{node}" for node in rivals])
        refused[client.node] = (
            f"more than one node claims '{printable(shared)}' ({nodes}): give each "
            "node its own partition-id, or register nodes. A restarted node is asked "
            "again once the SuperLink finds its former one gone"
        )
    return refused


def unlike_most(said: Mapping[Key, Said]) -> dict[Key, tuple[Said, str]]:
    """Return the clients with another answer than most.

    If no two clients have the same answer, all are returned, because no answer is more
    likely to be right.

    Returns
    -------
    dict[Key, tuple[Said, str]]
        For each such client another answer, and who gave it: "most" or "others".
    """
    counts = Counter(said.values()).most_common()
    if len(counts) < 2:
        return {}
    common, number = counts[0]
    whom = "most" if 2 * number > len(said) else "others"
    return {
        key: (counts[1][0] if answer == common else common, whom)
        for key, answer in said.items()
        if number == 1 or answer != common
    }


def _difference(trained: frozenset[str], other: frozenset[str], whom: str) -> str:
    parts = []
    if added := trained - other:
        parts.append(f"it trains {quoted(added)}, which {whom} freeze")
    if missing := other - trained:
        parts.append(f"it freezes {quoted(missing)}, which {whom} train")
    return f"{'; '.join(parts)}: freeze the same parameters on every client"


def _other_values(frozen: frozenset[str], other: frozenset[str], whom: str) -> str:
    names = {frozen_name(described) for described in frozen ^ other}
    return f"its frozen {quoted(names)} differ from those of {whom}: {FREEZE_THE_SAME}"


def _other_labels(likelihood: str, other: str, whom: str) -> str:
    return (
        f"it has likelihood='{printable(likelihood)}', and {whom} have "
        f"'{printable(other)}': give all clients the same"
    )


def _other_classes(classes: str, other: str, whom: str) -> str:
    return (
        f"its data set names its classes {printable(classes)}, and those of {whom} "
        f"{printable(other)}: number them by one list, with a target_transform"
    )


def by_reason(reasons: Mapping[Key, str]) -> dict[str, list[Key]]:
    """Group clients, or nodes, by their reason."""
    groups: dict[str, list[Key]] = {}
    for key, reason in reasons.items():
        groups.setdefault(reason, []).append(key)
    return groups


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
        If too few are connected after that time. With a
        :class:`~flwr_fisher.testing.LocalGrid`, which says how many it has, it is
        raised at once.
    """
    check_whole("minimum", minimum, 1)
    began, last = time.monotonic(), -1
    while len(nodes := list(grid.get_node_ids())) < minimum:
        waited = time.monotonic() - began
        if waited >= timeout or most_nodes(grid, minimum) < minimum:
            raise RoundError(
                f"only {len(nodes)} of {minimum} required nodes are connected after "
                f"{waited:.0f} s: start more, or lower the minimum (apps: min-nodes)"
            )
        if len(nodes) != last:
            last = len(nodes)
            logger.info("%s", _waiting_line(last, minimum))
        time.sleep(1)
    return nodes


def _waiting_line(count: int, needed: int, purpose: str = "train") -> str:
    text = f"Waiting for nodes to connect: {count} of {needed} required nodes"
    text += " to evaluate the model, which is whole" if purpose == "evaluate" else ""
    return f"{text} (flwr run's --federation-config has a simulation's num-supernodes)"


def most_nodes(grid: Grid, known: int) -> int:
    """Return the largest number of nodes: a `LocalGrid`'s, or `known`."""
    most: int = getattr(grid, "num_supernodes", known)
    return most
