"""From reply messages to checked uploads; a bad one never spoils the others."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from flwr_fisher.errors import FlwrFisherError, RoundError, WireError
from flwr_fisher.params import Params
from flwr_fisher.server.exchange import Upload
from flwr_fisher.server.node_names import NodeNames
from flwr_fisher.wire import Payload, serialized_bytes

logger = logging.getLogger("flwr")

P = TypeVar("P", bound=Payload)


def read_reply(
    message: Message, weighted_by_key: str
) -> tuple[ArrayRecord, MetricRecord]:
    """Return a train reply's two records.

    Raises
    ------
    WireError
        If the client failed, or there is not exactly one of each, or the weight is
        missing, not positive or not finite.
    """
    if message.has_error():
        reason = f"the client failed: {message.error.reason}"
        raise WireError(reason, field="error")
    arrays = list(message.content.array_records.values())
    metrics = list(message.content.metric_records.values())
    if len(arrays) != 1 or len(metrics) != 1:
        raise WireError(
            f"expected one ArrayRecord and one MetricRecord, got {len(arrays)} and "
            f"{len(metrics)}",
            field="content",
        )
    _weight(metrics[0], weighted_by_key)
    return arrays[0], metrics[0]


class Admission(Generic[P]):
    """The replies of one exchange: what was admitted, and what was wrong with others.

    Parameters
    ----------
    names : NodeNames
        Knows the clients' names.
    read : Callable[[ArrayRecord, Params], P]
        Decodes and checks a reply.
    like : Mapping[str, Tensor]
        The parameters that were sent out.
    weighted_by_key : str
        The metric that weights clients.
    expected : int
        How many clients were asked.
    """

    def __init__(
        self,
        names: NodeNames,
        read: Callable[[ArrayRecord, Params], P],
        like: Params,
        weighted_by_key: str,
        expected: int,
    ) -> None:
        self.names, self.read, self.like = names, read, like
        self.weighted_by_key, self.expected = weighted_by_key, expected
        self.admitted: list[Upload[P]] = []
        self.rejected: dict[str, str] = {}

    def take(self, message: Message) -> tuple[ArrayRecord, MetricRecord] | None:
        """Admit or reject a reply; return the records of one that was admitted."""
        node = message.metadata.src_node_id
        try:
            records = read_reply(message, self.weighted_by_key)
            self.admit(node, *records)
            return records
        except WireError as error:
            self.reject(node, error.from_node(node))
            return None

    def admit(self, node: int, arrays: ArrayRecord, metrics: MetricRecord) -> None:
        """Decode, check and keep a client's records, and tell the log.

        Raises
        ------
        WireError
            Naming the key that is wrong.
        """
        payload = self.read(arrays, self.like)
        weight = _weight(metrics, self.weighted_by_key)
        payload.check_weight(weight)
        size = serialized_bytes(RecordDict({"arrays": arrays, "metrics": metrics}))
        client = self.names.name(node)
        self.admitted.append(Upload(node, client, weight, payload, metrics, size))
        logger.info(
            "aggregate_train: %s of %s replies (%s, %g examples)",
            len(self.admitted) + len(self.rejected),
            self.expected,
            client,
            weight,
        )

    def uploads(self, needed: int) -> list[Upload[P]]:
        """Return the uploads in an order that depends on no node id and no timing.

        Those that do not agree with most are rejected first.

        Raises
        ------
        RoundError
            With every reason, if there are fewer than `needed`.
        """
        self.admitted.sort(key=lambda upload: self.names.order(upload.node_id))
        if self.admitted:
            field, reason = self.admitted[0].payload.disagreement
            self._reject_odd(field, reason, lambda upload: upload.payload.layout())
        # Flower refuses a whole round whose clients do not report the same metrics.
        reason = "has other entries than most clients' have"
        self._reject_odd("metrics", reason, _metric_names)
        self.check_enough(needed)
        return self.admitted

    def metrics(
        self, aggregate: Callable[[list[RecordDict], str], MetricRecord]
    ) -> MetricRecord:
        """Return the admitted replies' aggregated metrics, and how many there were."""
        contents = [RecordDict({"metrics": upload.metrics}) for upload in self.admitted]
        counts = {"num-replies": len(contents), "num-rejected": len(self.rejected)}
        return MetricRecord({**aggregate(contents, self.weighted_by_key), **counts})

    def reject(
        self, node: int, error: FlwrFisherError, stage: str = "aggregate_train"
    ) -> None:
        """Note, and tell the log, why a client is left out."""
        client = self.names.name(node)
        self.rejected[client] = str(error)
        logger.warning("%s: left out %s: %s", stage, client, error)

    def _reject_odd(
        self,
        field: str,
        reason: str,
        layout_of: Callable[[Upload[P]], tuple[str, ...]],
    ) -> None:
        """Reject the uploads whose layout is not the one that most have."""
        layouts = [layout_of(upload) for upload in self.admitted]
        if len(set(layouts)) < 2:
            return
        common = Counter(layouts).most_common(1)[0][0]
        for upload, layout in zip(list(self.admitted), layouts, strict=True):
            if layout != common:
                odd = sorted(set(layout) ^ set(common)) or "the same in another order"
                error = WireError(f"{reason}: {odd}", field=field, node=upload.node_id)
                self.admitted.remove(upload)
                self.reject(upload.node_id, error)

    def check_enough(self, needed: int, awaited: int = 0) -> None:
        """See that there are enough uploads, with those that are still awaited.

        Raises
        ------
        RoundError
            With every reason, if there are fewer than `needed`.
        """
        if len(self.admitted) + awaited >= needed:
            return
        silent = self.expected - len(self.admitted) - len(self.rejected) - awaited
        lines = [f"{client}: {reason}" for client, reason in self.rejected.items()]
        lines += [f"{silent} clients did not reply in time"] * (silent > 0)
        raise RoundError(
            f"{len(self.admitted) + awaited} usable replies, and min_train_nodes="
            f"{needed}:\n" + "\n".join(lines)
        )


def _weight(metrics: MetricRecord, key: str) -> float:
    weight = metrics.get(key)
    if isinstance(weight, int | float) and math.isfinite(weight) and weight > 0:
        return weight
    reason = f"the weight must be a positive number, got {weight!r}"
    raise WireError(reason, field=key)


def _metric_names(upload: Upload[P]) -> tuple[str, ...]:
    return tuple(
        key if isinstance(value, int | float) else f"{key}[{len(value)}]"
        for key, value in sorted(upload.metrics.items())
    )
