"""The door: all checks of a reply. A client that fails one is left out of the round.

Every reply passes the same checks, in this order: who sent it, its bounds, its format,
the plausibility of its numbers (:meth:`Door.take`); and, when all have come, whether it
agrees with most others, and the policy (:meth:`Door.uploads`).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from flwr_fisher.errors import FlwrFisherError, RoundError, WireError, listed, printable
from flwr_fisher.log_lines import logger
from flwr_fisher.server.cohort import (
    FREEZE_THE_SAME,
    Cohort,
    Identity,
    by_reason,
    claimed_twice,
    unlike_most,
)
from flwr_fisher.server.exchange import Exchange, P, ServerState, Upload, metrics_from
from flwr_fisher.server.mailbox import NodeReply
from flwr_fisher.server.policy import Policy, Sizes, remembered
from flwr_fisher.wire import NUM_EXAMPLES, arrays_bytes
from flwr_fisher.wire.options import (
    LONGEST_NAME,
    MOST_METRICS,
    MOST_NUMBERS,
    split_not_sent,
)

Key = TypeVar("Key", bound=Hashable)
Record = TypeVar("Record")
Aggregate = Callable[[list[RecordDict], str], MetricRecord]

_REASON, _LONG_REASON, _LINES = 500, 800, 20
_SLIGHT = 0.5  # a smaller cut is not logged
_HEAVIEST = 1e15  # examples: above it, a weight is not plausible
TRAIN = "aggregate_train"  # the beginning of a log line
_DIFFERENCES = (  # of what no array of an upload shows
    "its frozen parameters, which the server does not send, differ from those of {}: "
    + FREEZE_THE_SAME,
    "its data set names its classes otherwise than those of {}: number them by one "
    "list, with a target_transform",
    "its likelihood differs from that of {}: give all clients the same",
)


# --- bounds


def read_metrics(message: Message) -> MetricRecord:
    """Return a reply's MetricRecord.

    Raises
    ------
    WireError
        If the client failed, there is not exactly one ``MetricRecord``, or the metrics
        are larger than metrics can be.
    """
    if message.has_error():
        reason = printable(message.error.reason, _REASON)
        raise WireError(f"the client failed: {reason}", field="error")
    metrics = _only(message.content.metric_records.values(), "MetricRecord")
    numbers = sum(len(v) for v in metrics.values() if isinstance(v, list))
    for what, count, most in (
        ("metrics", len(metrics), MOST_METRICS),
        ("characters in a name", max(map(len, metrics), default=0), LONGEST_NAME),
        ("numbers in lists", numbers, MOST_NUMBERS),
    ):
        if count > most:
            raise WireError(
                f"{count} {what}, but at most {most} are allowed", field="metrics"
            )
    return metrics


def _only(records: Collection[Record], kind: str) -> Record:
    """Return the one record of its kind in a reply."""
    if len(records) != 1:
        raise WireError(f"expected one {kind}, got {len(records)}", field="content")
    return next(iter(records))


def weight_of(metrics: MetricRecord, key: str) -> float:
    """Return a client's weight.

    Raises
    ------
    WireError
        If it is missing, not positive, not finite, or above 1e15 examples.
    """
    weight = metrics.get(key)
    if isinstance(weight, int | float) and 0 < weight <= _HEAVIEST:
        return weight
    if weight is None and key != NUM_EXAMPLES:
        raise WireError(
            "is not among the client's metrics, but is the strategy's weighted_by_key",
            field=key,
        )
    reason = f"the weight must be a positive number up to {_HEAVIEST:g}"
    raise WireError(f"{reason}, got {printable(repr(weight))}", field=key)


def comparable(
    metrics: Mapping[Key, MetricRecord],
) -> tuple[dict[Key, MetricRecord], dict[Key, str]]:
    """Return the metrics that can be averaged, and why some clients' cannot.

    Flower refuses all metrics of a round whose clients do not report the same. Here an
    entry counts if more than half of the clients report it, and no NaN or infinity. A
    client that lacks such an entry is left out of the metrics; its upload still counts.

    Examples
    --------
    >>> reported = {"a": {"x": 1}, "b": {"x": 2, "y": 3}, "c": {"y": 4}}
    >>> good, others = comparable({k: MetricRecord(v) for k, v in reported.items()})
    >>> {k: dict(v) for k, v in good.items()}, others
    ({'b': {'x': 2, 'y': 3}}, {'a': "has no finite 'y'", 'c': "has no finite 'x'"})
    """
    # An entry is a name with its form: a number, or a list of so many numbers.
    entries = {client: _finite_entries(record) for client, record in metrics.items()}
    counts = Counter(entry for reported in entries.values() for entry in reported)
    common = [entry for entry, n in counts.items() if 2 * n > len(metrics)]
    names = {name for name, _ in common}
    good: dict[Key, MetricRecord] = {}
    others: dict[Key, str] = {}
    for client, record in metrics.items():
        if missing := [entry for entry in common if entry not in entries[client]]:
            name, size = missing[0]
            form = "" if size is None else f" of {size} numbers"
            others[client] = f"has no finite '{printable(name)}'{form}"
        else:
            good[client] = MetricRecord({k: v for k, v in record.items() if k in names})
    return good, others


def _finite_entries(record: MetricRecord) -> list[tuple[str, int | None]]:
    """Return the finite metrics' names, with the lengths of those that are lists."""
    entries: list[tuple[str, int | None]] = []
    for name, value in record.items():
        values = value if isinstance(value, list) else [value]
        if all(isinstance(x, int | float) and math.isfinite(x) for x in values):
            entries.append((name, len(value) if isinstance(value, list) else None))
    return entries


# --- clients without a usable reply


class LeftOut:
    """The clients of a request whose reply the server lacks or cannot use.

    The first client with a reason is logged at once. :meth:`log_repeated` logs all
    others with the same reason. So a thousand clients with one mistake take two lines
    in the log.

    Parameters
    ----------
    stage : str
        The beginning of a line in the log, as in Flower's.

    Attributes
    ----------
    rejected : dict[str, str]
        The clients whose replies are not usable, with the reasons.
    missing : dict[str, str]
        The clients without a reply, with the reasons.
    """

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.rejected: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self._senders: dict[str, str] = {}
        self._unlogged: dict[str, str] = {}

    def reject(
        self, client: str, reason: object, node: int | None = None, stage: str = ""
    ) -> None:
        """Note and log why a client is left out; the reason may come from outside."""
        if isinstance(reason, Exception) and not isinstance(reason, FlwrFisherError):
            reason = f"{type(reason).__name__}: {reason}"
        text = printable(reason, _LONG_REASON)
        sender = "" if node is None else f"node {node}: "
        if text in self.rejected.values():  # a mistake that another client made, too
            self._unlogged[client] = text
        else:
            start = f"{stage or self.stage}: left out {client}: {sender}"
            logger.warning("%s%s", start, text)
        self.rejected[client], self._senders[client] = text, sender

    def mark_missing(self, clients: Iterable[str], reason: str) -> None:
        """Note the clients without a reply, and why."""
        self.missing |= dict.fromkeys(clients, reason)

    def log_repeated(self) -> None:
        """Log the clients that are rejected for reasons that the log has already."""
        for reason, clients in by_reason(self._unlogged).items():
            who = listed(clients)
            logger.warning("%s: left out %s, too: %s", self.stage, who, reason)
        self._unlogged.clear()

    def log_missing(self) -> None:
        """Log the clients without a reply."""
        for line in self._missing_lines():
            logger.warning("%s: left out %s", self.stage, line)

    def lines(self) -> list[str]:
        """Return a line for each reason, with the clients' names, for an error."""
        lines = []
        for reason, clients in by_reason(self.rejected).items():
            sender = self._senders[clients[0]] if len(clients) == 1 else ""
            lines.append(f"{listed(clients)}: {sender}{reason}")
        if (more := len(lines) - _LINES) > 0:
            lines[_LINES:] = [f"… and {more} more reasons"]
        return lines + self._missing_lines()

    def _missing_lines(self) -> list[str]:
        reasons = by_reason(self.missing).items()
        return [f"{listed(clients)}: no reply, {why}" for why, clients in reasons]


# --- the door


class Door(Generic[P]):
    """Checks the replies to one request, and admits, limits or rejects them.

    If a reply fails at any step, with any exception, its client is left out, and
    nothing else happens.

    Parameters
    ----------
    cohort : Cohort
        Who is who.
    policy : Policy
        Limits the uploads.
    weighted_by : str
        The metric that is a client's weight.
    exchange : Exchange
        How to read the replies, and how they are summed.
    state : ServerState
        The state whose parameters were sent out.
    weights : Mapping[int, float]
        Weights, by client's number, that replace the reported ones.

    Attributes
    ----------
    expected : int
        How many clients were asked, for the log.
    admitted : list[Upload]
        The admitted uploads, in the order of their arrival.
    left_out : LeftOut
        The clients without a usable reply.
    limited : dict[str, Mapping[str, float]]
        What the policy has cut, by client, as in :class:`Upload`.
    remembered : dict[str, float]
        The numbers that the policy needs in the next round.
    way_out : str
        The end of the error if there are too few uploads.
    """

    def __init__(
        self,
        cohort: Cohort,
        policy: Policy,
        weighted_by: str,
        exchange: Exchange[P],
        state: ServerState,
        weights: Mapping[int, float],
    ) -> None:
        self.cohort, self.exchange, self.like = cohort, exchange, state.params
        self.weighted_by, self.weights = weighted_by, weights
        self.policy = policy
        self._measure = exchange.measure and exchange.measure(state)
        self.left_out = LeftOut(exchange.log_name if exchange.optional else TRAIN)
        self.expected, self.way_out = 0, ""
        self.admitted: list[Upload[P]] = []
        self.limited: dict[str, Mapping[str, float]] = {}
        self.remembered: dict[str, float] = {}
        # What else is known of each admitted client, by its name.
        self._clients: dict[str, Identity] = {}
        self._sizes: dict[str, Sizes] = {}
        # By each claim, a name or a number: the clients that made it.
        self._claims: defaultdict[str | int, set[str]] = defaultdict(set)
        self._not_sent: dict[str, tuple[str, ...]] = {}  # see client/messages.py

    # --- one reply

    def take(self, reply: NodeReply) -> tuple[ArrayRecord, MetricRecord] | None:
        """Admit or reject a reply; return the records of an admitted one.

        A client that replies twice, from two nodes, counts once.
        """
        identity, name = self.cohort.identity(reply.node), self.cohort.name(reply.node)
        if self.has(identity):
            return None
        if reply.from_superlink or reply.nothing_will_come:
            why = printable(reply.message.error.reason, _REASON)
            self.left_out.mark_missing([name], why)
            return None
        try:
            metrics = read_metrics(reply.message)
            arrays = _only(reply.message.content.array_records.values(), "ArrayRecord")
            self.admit(identity, arrays, metrics)
            return arrays, metrics
        except Exception as error:  # untrusted replies can fail in any way
            self.left_out.reject(name, error, reply.node)
            return None

    def admit(
        self, identity: Identity, arrays: ArrayRecord, metrics: MetricRecord
    ) -> None:
        """Decode, check and keep a client's records.

        Raises
        ------
        WireError
            It names the wrong key. Other exceptions of a payload's reader are not
            caught.
        """
        # 1. Who is it? Only now are two clients with one partition seen together.
        self._check_claim(identity)
        # 2. Bounds and format: the reader decides both before it decodes anything.
        record, not_sent = split_not_sent(arrays)
        payload = self.exchange.read(record, self.like)
        # 3. Is it an answer to what was sent?
        measured = self._measure(payload) if self._measure else {}
        # 4. Plausibility: the weight, and the sizes, which the policy compares later.
        said = weight_of(metrics, self.weighted_by)
        payload.check_weight(said)
        weight = self.weights.get(identity.number, said)
        sizes = Sizes.of(payload, self.like, measured)
        sizes.check_plausible()
        node, name, number = identity.node, identity.name, identity.number
        size = arrays_bytes(arrays)
        told = *not_sent.split(" ", 2), "", ""
        upload = Upload(
            node, name, weight, payload, metrics, size, number, likelihood=told[2]
        )
        self.admitted.append(upload)
        self._clients[upload.client], self._sizes[upload.client] = identity, sizes
        for claim in (name, number):
            self._claims[claim].add(name)
        self._not_sent[upload.client] = told
        self.left_out.missing.pop(upload.client, None)
        if not self.exchange.quiet:
            count = len(self.admitted) + len(self.left_out.rejected)
            # In an optional exchange a client need not have read all its data.
            of = "" if self.exchange.optional else f", {weight:g} examples"
            stage, expected = self.left_out.stage, max(self.expected, count)
            text = "%s: %s of %s replies (%s%s)"
            logger.info(text, stage, count, expected, upload.client, of)

    def _check_claim(self, identity: Identity) -> None:
        """Check that no partition counts twice; a registered node keeps its own.

        Two nodes can be here with one partition if the second one connected after the
        first was asked, or if the SuperLink has registered one of them since.
        """
        near = self._claims[identity.name] | self._claims[identity.number]
        if not near:
            return
        here = [upload.client for upload in self.admitted if upload.client in near]
        refused = claimed_twice([*(self._clients[each] for each in here), identity])
        if identity.node in refused:
            raise WireError(refused[identity.node], field="partition-id")
        for upload in [u for u in self.admitted if u.node_id in refused]:
            error = WireError(refused[upload.node_id], field="partition-id")
            self.withdraw(upload, error)

    def withdraw(self, upload: Upload[P], error: Exception) -> None:
        """Reject an upload after its admission."""
        self.admitted = [u for u in self.admitted if u.client != upload.client]
        self.left_out.reject(upload.client, error, upload.node_id)

    # --- clients that have replied

    def has(self, identity: Identity) -> bool:
        """Return whether a client's reply was admitted."""
        return identity.name in self._clients

    def done(self) -> set[str]:
        """Return the names of all clients with an admitted or rejected reply."""
        names = {name for known in self._clients.values() for name in known.names}
        return names | self.left_out.rejected.keys()

    def without_done(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes of clients without an admitted or rejected reply.

        A registered node is recognised by its name and id. Its partition does not
        count, because another node may have claimed it.
        """
        # A client may have had another name before the server was restarted: that of
        # its partition, before it was registered; or that of its node, before it
        # answered who it is. So any of its names counts.
        done, left = self.done(), []
        for node in nodes:
            known = self.cohort.identity(node)
            names = {known.name, f"node-{node}"} if known.registered else known.names
            if not names & done:
                left.append(node)
        return left

    # --- all replies

    def uploads(self, needed: int, before: Mapping[str, float]) -> list[Upload[P]]:
        """Return the uploads in an order that is independent of node ids and timing.

        Parameters
        ----------
        needed : int
            How many there must be.
        before : Mapping[str, float]
            The numbers that the policy remembered in the last round.

        Raises
        ------
        RoundError
            With every reason, if there are fewer than `needed`.
        """
        self.admitted.sort(key=lambda upload: self._clients[upload.client].order)
        # 1. Those that do not agree with most are rejected.
        self._withdraw_mismatched()
        self.check_enough(needed)
        # 2. The policy limits the others, by what most of them have sent.
        sizes = [self._sizes[upload.client] for upload in self.admitted]
        kept = self.exchange.kept
        references = self.policy.references(sizes, before, kept)
        self.remembered = remembered(references, before, kept)
        uploads = [
            replace(upload, taken=upload.limited.get(kept, 1.0))
            for upload in self.policy.limit(self.admitted, sizes, self.like, references)
        ]
        self.limited = {u.client: u.limited for u in uploads if u.limited}
        for client, factors in self.limited.items():
            if min(factors.values()) > _SLIGHT:
                continue  # the round's metrics have it
            parts = ", ".join(f"{name} x {part:.2g}" for name, part in factors.items())
            text = "%s: limited %s: %s (it sent more than most)"
            logger.warning(text, self.left_out.stage, client, parts)
        return uploads

    def check_enough(self, needed: int, awaited: int = 0) -> None:
        """Check that there are enough uploads, counting outstanding ones.

        Raises
        ------
        RoundError
            With every reason, if there are fewer than `needed`.
        """
        self.left_out.log_repeated()
        if (count := len(self.admitted) + awaited) >= needed:
            return
        lines = self.left_out.lines() + ([self.way_out] if self.way_out else [])
        optional = self.exchange.optional
        wanted = f"{needed} must reply" if optional else f"min_train_nodes={needed}"
        few = f"{count} usable {'reply' if count == 1 else 'replies'}"
        if awaited:
            few += " is possible" if count == 1 else " are possible"
        reasons = "\n" + "\n".join(lines) if lines else " no other client was asked"
        raise RoundError(f"only {few}, but {wanted}:{reasons}")

    def _withdraw_mismatched(self) -> None:
        """Reject the uploads with another layout, or what is not sent, than most."""
        # What most have sent decides, not the first that came: it may be the odd one.
        layouts = [upload.payload.layout() for upload in self.admitted]
        common = Counter(layouts).most_common(1)[0][0] if layouts else ()
        for upload, layout in zip(list(self.admitted), layouts, strict=True):
            if layout != common:
                field, reason = upload.payload.disagreement
                what = sorted(set(layout) ^ set(common)) or "the same in another order"
                self.withdraw(upload, WireError(f"{reason}: {what}", field=field))
        # They were not asked before their training, so it shows only now.
        self.cohort.unlike -= {upload.client for upload in self.admitted}
        for number, reason in enumerate(_DIFFERENCES):
            uploads = {u.client: u for u in self.admitted}
            said = {c: t for c in uploads if (t := self._not_sent[c][number])}
            for client, (_, whom) in unlike_most(said).items():
                error = WireError(reason.format(whom), field="frozen")
                self.withdraw(uploads[client], error)
                self.cohort.unlike.add(client)

    def metrics(
        self, aggregate: Aggregate, uploads: Sequence[Upload[P]]
    ) -> MetricRecord:
        """Return the uploads' aggregated metrics, and how many replies there were."""
        key = self.weighted_by
        # The weights are those that counted in the step, after the policy.
        weighted = {
            u.client: MetricRecord({**u.metrics, key: u.num_examples}) for u in uploads
        }
        good, mismatched = comparable(weighted)
        for client, reason in mismatched.items():
            stage = self.left_out.stage
            logger.warning("%s: metrics without %s: it %s", stage, client, reason)
        rejected = len(self.left_out.rejected)
        counts = {"num-replies": len(uploads), "num-rejected": rejected}
        if self.left_out.missing:
            counts["num-missing"] = len(self.left_out.missing)
        return MetricRecord({**self._aggregated(good.values(), aggregate), **counts})

    def _aggregated(
        self, records: Collection[MetricRecord], aggregate: Aggregate
    ) -> Mapping[str, Any]:
        """Return what the user's function makes of the clients' metrics.

        Not all requests are trainings. If the replies have no metrics, the function is
        not called; if they lack the one that it reads, the round has none of its own.
        """
        names = {name for record in records for name in record}
        if not names - {self.weighted_by, NUM_EXAMPLES}:
            return {}
        try:
            contents = [RecordDict({"metrics": record}) for record in records]
            returned = aggregate(contents, self.weighted_by)
        except KeyError as error:
            if not names.isdisjoint(error.args):
                raise
            self.cohort.warn_once(
                f"{self.left_out.stage}: no metrics of train_metrics_aggr_fn, which "
                f"failed for replies with {listed(names)} alone: {error!r}"
            )
            return {}
        return metrics_from(returned, "train_metrics_aggr_fn") or {}
