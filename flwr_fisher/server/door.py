"""The door: all checks of a reply. A client that fails one is left out of the round.

Every reply passes the same checks: its sender, its size, its format, the plausibility
of its numbers, and the policy. The log tells every result in the same form.

Long: one class has all checks.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Generic

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from flwr_fisher.errors import FlwrFisherError, RoundError, WireError, listed, printable
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params
from flwr_fisher.server.cohort import FREEZE_THE_SAME, Cohort, unlike_most
from flwr_fisher.server.exchange import WEIGHT, P, Upload, metrics_from
from flwr_fisher.server.identity import Identity, Key, by_reason
from flwr_fisher.server.mailbox import NodeReply
from flwr_fisher.server.policy import Policy, Sizes, remembered
from flwr_fisher.wire import NUM_EXAMPLES, reply_bytes
from flwr_fisher.wire.answer import split_frozen
from flwr_fisher.wire.options import LONGEST_NAME, MOST_METRICS, MOST_NUMBERS

_REASON, _LONG_REASON, _LINES = 500, 800, 20
_SLIGHT = 0.5  # a smaller cut is not logged
_HEAVIEST = 1e15  # examples: above it, a weight is not plausible
# the beginnings of a log line
TRAIN, NORMS_STAGE = "aggregate_train", "norm statistics"


# --- bounds


def read_metrics(message: Message, weighted_by_key: str) -> MetricRecord:
    """Return a reply's MetricRecord, which has the client's weight.

    Raises
    ------
    WireError
        If the client failed, there is not exactly one ``MetricRecord``, the weight is
        missing, not positive or not finite, or the metrics are larger than metrics can
        be.
    """
    if message.has_error():
        reason = printable(message.error.reason, _REASON)
        raise WireError(f"the client failed: {reason}", field="error")
    records = list(message.content.metric_records.values())
    if len(records) != 1:
        reason = f"expected one MetricRecord, got {len(records)}"
        raise WireError(reason, field="content")
    (metrics,) = records
    numbers = sum(len(v) for v in metrics.values() if isinstance(v, list))
    reason = ""
    if len(metrics) > MOST_METRICS:
        reason = f"{len(metrics)} metrics, but at most {MOST_METRICS} are allowed"
    elif any(len(name) > LONGEST_NAME for name in metrics):
        reason = f"a metric's name has more than {LONGEST_NAME} characters"
    elif numbers > MOST_NUMBERS:
        reason = f"{numbers} numbers in lists, but at most {MOST_NUMBERS} are allowed"
    if reason:
        raise WireError(reason, field="metrics")
    weight_of(metrics, weighted_by_key)
    return metrics


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
    reason = "the weight must be a positive number"
    if isinstance(weight, int | float) and weight > _HEAVIEST:
        reason = f"must be at most {_HEAVIEST:g} examples"
    if weight is None and key != NUM_EXAMPLES:
        raise WireError(
            "is not among the client's metrics, but is the strategy's weighted_by_key: "
            "return it from train_fn and evaluate_fn, and let a mod add it to replies "
            "to requests that call neither",
            field=key,
        )
    reason += f", got {printable(repr(weight))}"
    raise WireError(reason, field=key)


def comparable(
    metrics: Mapping[Key, MetricRecord],
) -> tuple[dict[Key, MetricRecord], dict[Key, str]]:
    """Return the metrics that can be averaged, and why some clients' cannot.

    Flower refuses all metrics of a round whose clients do not report the same. Here an
    entry counts if more than half of the clients report it, and no NaN or infinity;
    other entries are dropped. A client that lacks an entry that counts, or reports NaN
    or infinity for it, is left out of the metrics. Its upload still counts.

    Examples
    --------
    >>> own = {"a": {"x": 1}, "b": {"x": 2, "y": 3}, "c": {"y": 4}}
    >>> kept, others = comparable({k: MetricRecord(v) for k, v in own.items()})
    >>> {k: dict(v) for k, v in kept.items()}, others
    ({'b': {'x': 2, 'y': 3}}, {'a': "reports no 'y'", 'c': "reports no 'x'"})
    """
    every = [(own, entry) for own in metrics.values() for entry in _entries(own)]
    reported = Counter(entry for _, entry in every)
    finite = Counter(entry for own, entry in every if _finite(own[entry[0]]))
    common = [entry for entry, n in finite.items() if 2 * n > len(metrics)]
    for (name, size), n in reported.items():
        if 2 * n > len(metrics) and (name, size) not in common:
            logger.warning(
                "metrics without '%s', which is NaN or infinite for so many clients "
                "that it has no mean",
                printable(name),
            )
    kept: dict[Key, MetricRecord] = {}
    mismatched: dict[Key, str] = {}
    for client, record in metrics.items():
        there = set(_entries(record))
        missing = [entry for entry in common if entry not in there]
        infinite = [name for name, _ in common if not _finite(record.get(name))]
        if missing:
            mismatched[client] = _lacks(record, *missing[0])
        elif infinite:
            reason = f"reports a '{printable(infinite[0])}' that is NaN or infinite"
            mismatched[client] = reason
        else:
            names = {name for name, _ in common}
            own = {name: value for name, value in record.items() if name in names}
            kept[client] = MetricRecord(own)
    return kept, mismatched


def _entries(record: MetricRecord) -> list[tuple[str, int]]:
    """Return the metrics' names with lengths (-1 for a number)."""
    sizes = (len(v) if isinstance(v, list) else -1 for v in record.values())
    return list(zip(record, sizes, strict=True))


def _lacks(record: MetricRecord, name: str, size: int) -> str:
    """Return how a client's metrics lack an entry: another form of it, or none."""
    if name not in record:
        return f"reports no '{printable(name)}'"
    own = record[name]
    forms = [
        "a number" if n < 0 else f"a list of {n}"
        for n in (len(own) if isinstance(own, list) else -1, size)
    ]
    return f"reports '{printable(name)}' as {forms[0]}, and not as {forms[1]}"


def _finite(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(x, int | float) and math.isfinite(x) for x in values)


# --- rejected clients


class Rejections:
    """The rejected clients with the reasons, in the order of their rejection.

    The first client with a reason is logged at once. :meth:`summarise` logs all others
    with the same reason. So a thousand clients with one mistake take two lines in the
    log.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._nodes: dict[str, str] = {}
        self._unlogged: dict[tuple[str, str], list[str]] = {}

    def __len__(self) -> int:
        return len(self.reasons)

    def add(
        self, client: str, reason: object, *, stage: str, node: int | None = None
    ) -> None:
        """Note and log why a client is left out; the reason may come from outside."""
        if isinstance(reason, Exception) and not isinstance(reason, FlwrFisherError):
            reason = f"{type(reason).__name__}: {reason}"
        text = printable(reason, _LONG_REASON)
        first = text not in self.reasons.values()
        self.reasons[client] = text
        if node is not None:
            self._nodes[client] = f"node {node}: "
        if first:
            sender = self._nodes.get(client, "")
            logger.warning("%s: left out %s: %s%s", stage, client, sender, text)
        else:
            self._unlogged.setdefault((stage, text), []).append(client)

    def summarise(self) -> None:
        """Log the clients that were left out for reasons that the log has already."""
        for (stage, reason), clients in self._unlogged.items():
            logger.warning("%s: left out %s, too: %s", stage, listed(clients), reason)
        self._unlogged.clear()

    def lines(self) -> list[str]:
        """Return a line for each reason, with the clients' names, for an error."""
        lines = []
        for reason, clients in by_reason(self.reasons).items():
            sender = self._nodes.get(clients[0], "") if len(clients) == 1 else ""
            lines.append(f"{listed(clients)}: {sender}{reason}")
        more = len(lines) - _LINES
        return lines[:_LINES] + [f"… and {more} more reasons"] * (more > 0)


def _parts(limited: Mapping[str, float]) -> list[float]:
    return [float(part) for name, part in limited.items() if name != WEIGHT]


# --- the door


class Door(Generic[P]):
    """Checks the replies to one request, and admits, limits or rejects them.

    If a reply fails at any step, with any exception, its client is left out, and
    nothing else happens. `like` has the parameters that were sent out; `fold` and
    `kept` are the exchange's. If `quiet`, replies are not logged one by one.

    Attributes
    ----------
    stage : str
        The beginning of a line in the log, as in Flower's.
    expected : int
        How many clients were asked, for the log.
    admitted : list[Upload]
        The admitted uploads, in the order of their arrival.
    rejected : Rejections
        The clients whose replies are not usable, with the reasons.
    withdrawn : dict[str, str]
        Those of the rejected clients that were admitted at first.
    missing : dict[str, str]
        The clients without a reply, with the reasons.
    limited : dict[str, Mapping[str, float]]
        What the policy has cut, by client, as in :class:`Upload`.
    remembered : dict[str, float]
        The numbers that the policy needs in the next round.
    """

    def __init__(
        self,
        cohort: Cohort,
        read: Callable[[ArrayRecord, Params], P],
        like: Params,
        weighted_by_key: str,
        policy: Policy,
        *,
        fold: Callable[[P, float], P] | None = None,
        kept: str = "",
        quiet: bool = False,
    ) -> None:
        self.cohort, self.read, self.like = cohort, read, like
        self.weighted_by_key, self.policy = weighted_by_key, policy
        self.fold, self.kept, self.quiet, self.expected = fold, kept, quiet, 0
        self.stage = TRAIN
        self.admitted: list[Upload[P]] = []
        self.rejected = Rejections()
        self.withdrawn: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.limited: dict[str, Mapping[str, float]] = {}
        self.remembered: dict[str, float] = {}
        self._clients: dict[str, Identity] = {}
        self._sizes: dict[str, Sizes] = {}
        self._weights: dict[str, float] = {}  # after the policy
        self._digests: dict[str, str] = {}  # of parameters frozen and not sent
        self.way_out = ""  # the end of an error, if there are too few uploads

    # --- one reply

    def take(self, reply: NodeReply) -> tuple[ArrayRecord, MetricRecord] | None:
        """Admit or reject a reply; return the records of an admitted one.

        A client that replies twice, from two nodes, counts once.
        """
        identity = self.cohort.identity(reply.node)
        if self.has(identity):
            return None
        if reply.from_superlink or reply.nothing_will_come:
            self.mark_missing([reply.node], printable(reply.message.error.reason))
            return None
        try:
            metrics = read_metrics(reply.message, self.weighted_by_key)
            arrays = self._arrays(reply.message)
            self.admit(identity, arrays, metrics)
            return arrays, metrics
        except Exception as error:  # untrusted replies can fail in any way
            self.reject(reply.node, error)
            return None

    def _arrays(self, message: Message) -> ArrayRecord:
        records = list(message.content.array_records.values())
        if len(records) != 1:
            reason = f"expected one ArrayRecord, got {len(records)}"
            raise WireError(reason, field="content")
        return records[0]

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
        self._check_claim(identity)
        own, digest = split_frozen(arrays)
        payload = self.read(own, self.like)
        weight = weight_of(metrics, self.weighted_by_key)
        payload.check_weight(weight)
        sizes = Sizes.of(payload, self.like)
        sizes.check_plausible()
        size = reply_bytes(arrays, metrics)
        if self.fold is not None and not digest:
            payload = self.fold(payload, weight)
        node, name, number = identity.node, identity.name, identity.number
        self.admitted.append(Upload(node, name, weight, payload, metrics, size, number))
        self._clients[name], self._sizes[name] = identity, sizes
        if digest:
            self._digests[name] = digest
        self.missing.pop(name, None)
        if not self.quiet:
            logger.info(
                "%s: %s of %s replies (%s, %g examples)",
                self.stage,
                count := len(self.admitted) + len(self.rejected),
                max(self.expected, count),
                name,
                weight,
            )

    def _check_claim(self, identity: Identity) -> None:
        """Check that no partition counts twice; a registered node keeps its own.

        Two nodes can be here with one partition if the second one connected after the
        first was asked, or if the SuperLink has registered one of them since.
        """
        if (partition := identity.partition) is None:
            return
        for other in list(self._clients.values()):
            if other.partition != partition:
                continue
            reason = (
                f"partition {partition} is also {{}}'s, which is registered: give each "
                "node its own partition-id"
            )
            if other.registered and not identity.registered:
                raise WireError(reason.format(other.name), field="partition-id")
            if identity.registered and not other.registered:
                error = WireError(reason.format(identity.name), field="partition-id")
                if self.fold is not None:  # a summand cannot be removed from a sum
                    raise error
                for upload in [u for u in self.admitted if u.client == other.name]:
                    self.withdraw(upload, error)

    def reject(self, node: int, error: Exception, stage: str = "") -> None:
        """Reject a node's client."""
        name = self.cohort.name(node)
        self.rejected.add(name, error, stage=stage or self.stage, node=node)

    def withdraw(self, upload: Upload[P], error: Exception) -> None:
        """Reject an upload after its admission."""
        self.admitted = [u for u in self.admitted if u.client != upload.client]
        self.rejected.add(upload.client, error, stage=self.stage, node=upload.node_id)
        self.withdrawn[upload.client] = self.rejected.reasons[upload.client]

    def mark_missing(self, nodes: Iterable[int], reason: str) -> None:
        """Note the nodes without a reply, and why."""
        self.missing |= {self.cohort.name(node): reason for node in nodes}

    # --- clients that have replied

    def has(self, identity: Identity) -> bool:
        """Return whether a client's reply was admitted."""
        return identity.name in self._clients

    def done(self) -> set[str]:
        """Return the names of all clients with an admitted or rejected reply."""
        names = {name for known in self._clients.values() for name in known.names}
        return names | self.rejected.reasons.keys()

    def without_done(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes of clients without an admitted or rejected reply.

        A registered node is recognised by its name and id. Its partition does not
        count, because another node may have claimed it.
        """
        done, left = self.done(), []
        for node in nodes:
            known = self.cohort.identity(node)
            names = {known.name, f"node-{node}"} if known.registered else known.names
            if not names & done:
                left.append(node)
        return left

    def log_missing(self) -> None:
        """Log the clients without a reply."""
        for line in self._missing_lines():
            logger.warning("%s: %s", self.stage, line)

    def _missing_lines(self) -> list[str]:
        reasons = by_reason(self.missing).items()
        return [f"no reply from {listed(clients)}: {why}" for why, clients in reasons]

    # --- all replies

    def uploads(
        self, needed: int, before: Mapping[str, float] | None = None
    ) -> list[Upload[P]]:
        """Return the uploads in an order that is independent of node ids and timing.

        Uploads that do not agree with most are rejected first; then the policy limits
        the others. `before` are the numbers that the policy remembered from the last
        round.

        Raises
        ------
        RoundError
            With every reason, if there are fewer than `needed`.
        """
        self.admitted.sort(key=lambda upload: self._clients[upload.client].order)
        self._withdraw_mismatched()
        self._fold_held()
        self.check_enough(needed)
        sizes = [self._sizes[upload.client] for upload in self.admitted]
        references = self.policy.references(sizes, before or {}, self.kept)
        self.remembered = remembered(references, before or {}, self.kept)
        uploads = [
            replace(upload, taken=upload.limited.get(self.kept, 1.0))
            for upload in self.policy.limit(self.admitted, sizes, self.like, references)
        ]
        self.limited = {u.client: u.limited for u in uploads if u.limited}
        for client, factors in self.limited.items():
            if min(factors.values()) > _SLIGHT:
                continue  # the round's metrics have it
            parts = ", ".join(f"{name} x {part:.2g}" for name, part in factors.items())
            logger.warning("%s: limited %s: %s", self.stage, client, parts)
        self._weights = {upload.client: upload.num_examples for upload in uploads}
        return uploads

    def check_enough(self, needed: int, awaited: int = 0) -> None:
        """Check that there are enough uploads, counting outstanding ones.

        Raises
        ------
        RoundError
            With every reason, if there are fewer than `needed`.
        """
        self.rejected.summarise()
        if (count := len(self.admitted) + awaited) >= needed:
            return
        lines = self.rejected.lines() + self._missing_lines()
        lines += [self.way_out] if self.way_out else []
        wanted = f"min_train_nodes={needed}"
        if self.stage != TRAIN:
            wanted = f"at least {needed} is needed"
        few = f"{count} usable {'reply' if count == 1 else 'replies'}"
        if awaited:
            few += " is possible" if count == 1 else " are possible"
        reasons = "\n" + "\n".join(lines) if lines else " no other client was asked"
        raise RoundError(f"only {few}, but {wanted}:{reasons}")

    def _fold_held(self) -> None:
        """Add up the uploads that were held back until all layouts were known."""
        if self.fold is None:
            return
        for i, upload in enumerate(self.admitted):
            if self._digests.pop(upload.client, ""):
                payload = self.fold(upload.payload, upload.num_examples)
                self.admitted[i] = replace(upload, payload=payload)

    def _withdraw_mismatched(self) -> None:
        """Reject the uploads with another layout, or frozen part, than most have."""
        self._withdraw_other_layouts()
        uploads = {u.client: u for u in self.admitted if u.client in self._digests}
        said = {client: self._digests[client] for client in uploads}
        for client, reason in unlike_most(said, _other_digest).items():
            self.withdraw(uploads[client], WireError(reason, field="frozen"))

    def _withdraw_other_layouts(self) -> None:
        layouts = [upload.payload.layout() for upload in self.admitted]
        if len(set(layouts)) < 2:
            return
        common = Counter(layouts).most_common(1)[0][0]
        for upload, layout in zip(list(self.admitted), layouts, strict=True):
            if layout != common:
                field, reason = upload.payload.disagreement
                others = sorted(set(layout) ^ set(common))
                what = others or "the same in another order"
                self.withdraw(upload, WireError(f"{reason}: {what}", field=field))

    def metrics(
        self, aggregate: Callable[[list[RecordDict], str], MetricRecord]
    ) -> MetricRecord:
        """Return the admitted replies' aggregated metrics, and their number.

        An error of the user's function ends the run, unless the replies have no metrics
        or not the one that it reads: not all of a run's requests are trainings.
        """
        key, weights = self.weighted_by_key, self._weights
        own = {
            u.client: MetricRecord({**u.metrics, key: weights[u.client]})
            for u in self.admitted
        }
        kept, mismatched = comparable(own)
        for client, reason in mismatched.items():
            logger.warning("%s: metrics without %s: it %s", self.stage, client, reason)
        averaged = self._aggregated(list(kept.values()), aggregate)
        counts = {"num-replies": len(self.admitted), "num-rejected": len(self.rejected)}
        if self.missing:
            counts["num-missing"] = len(self.missing)
        limited = {}
        if self.limited:
            counts["num-limited"] = len(self.limited)
            factors = [self.limited.get(u.client, {}) for u in self.admitted]
            limited = {
                "limited-weights": [float(own.get(WEIGHT, 1)) for own in factors],
                "limited-parts": [min(_parts(own), default=1.0) for own in factors],
            }
        return MetricRecord({**averaged, **counts, **limited})

    def _aggregated(
        self,
        records: Sequence[MetricRecord],
        aggregate: Callable[[list[RecordDict], str], MetricRecord],
    ) -> MetricRecord:
        """Return what the user's function makes of the clients' metrics."""
        returned, key = None, self.weighted_by_key
        if records:
            try:
                returned = aggregate([RecordDict({"metrics": r}) for r in records], key)
            except Exception as error:
                names = {name for record in records for name in record}
                lacking = isinstance(error, KeyError) and names.isdisjoint(error.args)
                if names - {key, NUM_EXAMPLES} and not lacking:
                    raise
                self.cohort.warn_once(
                    f"{self.stage}: no metrics of train_metrics_aggr_fn, which failed "
                    f"for replies with {listed(names)} alone: {error!r}"
                )
        return metrics_from(returned, "train_metrics_aggr_fn") or MetricRecord()


def _other_digest(own: str, other: str, whom: str) -> str:
    """Return the reason for rejecting a client with other frozen values.

    It was not asked for them before its training, so the difference shows only now.
    """
    return (
        f"its frozen parameters, which the server does not send, differ from those of "
        f"{whom}: {FREEZE_THE_SAME}. Outside of a collection window, this is found "
        "before the training if the app's query function answers with "
        "identify(message, context, model)"
    )
