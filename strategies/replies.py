"""From reply messages to checked uploads; a bad one never spoils the others."""

import logging
import math
from collections import Counter
from collections.abc import Callable

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from flwr_fisher.errors import FlwrFisherError, RoundError, WireError
from flwr_fisher.params import Params
from flwr_fisher.strategies.cohort import Cohort
from flwr_fisher.strategies.state import Reader, Upload
from flwr_fisher.wire import PREFIX, SumsUpload, serialized_bytes

__all__ = ["MetricsAggregator", "Replies", "read_reply", "read_upload"]

logger = logging.getLogger("flwr")

MetricsAggregator = Callable[[list[RecordDict], str], MetricRecord]

_DISAGREES = (PREFIX, "covers other parameters than most clients' does")


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
    weight = metrics[0].get(weighted_by_key)
    usable = isinstance(weight, int | float) and math.isfinite(weight)
    if not usable or not isinstance(weight, int | float) or weight <= 0:
        reason = f"the weight must be a positive number, got {weight!r}"
        raise WireError(reason, field=weighted_by_key)
    return arrays[0], metrics[0]


def read_upload(
    node_id: int,
    client: str,
    arrays: ArrayRecord,
    metrics: MetricRecord,
    *,
    read: Reader,
    like: Params,
    weighted_by_key: str,
) -> Upload:
    """Decode and check a client's arrays.

    Raises
    ------
    WireError
        Naming the key that is wrong.
    """
    payload = read(arrays, like)
    weight = metrics[weighted_by_key]
    assert isinstance(weight, int | float)
    if isinstance(payload, SumsUpload):
        payload.check_weight(weight)
    size = serialized_bytes(RecordDict({"arrays": arrays, "metrics": metrics}))
    return Upload(node_id, client, weight, payload, metrics, size)


class Replies:
    """The replies of one exchange: what was accepted, and what was wrong with others.

    Parameters
    ----------
    cohort : Cohort
        Knows the clients' names.
    read : Callable[[ArrayRecord, Params], Payload]
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
        cohort: Cohort,
        read: Reader,
        like: Params,
        weighted_by_key: str,
        expected: int,
    ) -> None:
        self.cohort, self.read, self.like = cohort, read, like
        self.weighted_by_key, self.expected = weighted_by_key, expected
        self.accepted: list[Upload] = []
        self.rejected: dict[str, str] = {}

    def take(self, message: Message) -> tuple[ArrayRecord, MetricRecord] | None:
        """Accept or reject a reply; return the records of one that was accepted."""
        node = message.metadata.src_node_id
        try:
            records = read_reply(message, self.weighted_by_key)
            self.accept(node, *records)
            return records
        except WireError as error:
            self.reject(self.cohort.name(node), error.from_node(node))
            return None

    def accept(self, node: int, arrays: ArrayRecord, metrics: MetricRecord) -> None:
        """Decode, check and keep a client's records, and tell the log."""
        upload = read_upload(
            node,
            self.cohort.name(node),
            arrays,
            metrics,
            read=self.read,
            like=self.like,
            weighted_by_key=self.weighted_by_key,
        )
        self.accepted.append(upload)
        logger.info(
            "aggregate_train: %s of %s replies (%s, %g examples)",
            len(self.accepted) + len(self.rejected),
            self.expected,
            upload.client,
            upload.num_examples,
        )

    def settle(self, needed: int) -> list[Upload]:
        """Return the uploads in an order that depends on no node id and no timing.

        Raises
        ------
        RoundError
            With every reason, if there are fewer than `needed`.
        """
        self.accepted.sort(key=lambda upload: self.cohort.order(upload.node_id))
        kind = type(self.accepted[0].payload) if self.accepted else None
        what, reason = getattr(kind, "disagrees", _DISAGREES)
        self._agree(what, reason, _layout)
        # Flower refuses a whole round whose clients do not report the same metrics.
        self._agree("metrics", "has other entries than most clients' have", _metrics)
        self._check_enough(needed)
        return self.accepted

    def metrics(self, aggregate: MetricsAggregator) -> MetricRecord:
        """Return the accepted replies' aggregated metrics, and how many there were."""
        contents = [RecordDict({"metrics": upload.metrics}) for upload in self.accepted]
        counts = {"num-replies": len(contents), "num-rejected": len(self.rejected)}
        return MetricRecord({**aggregate(contents, self.weighted_by_key), **counts})

    def reject(self, client: str, error: FlwrFisherError) -> None:
        """Leave a reply out, and tell the log why."""
        self.rejected[client] = str(error)
        logger.warning("aggregate_train: left out %s: %s", client, error)

    def _agree(
        self, what: str, reason: str, layout_of: Callable[[Upload], tuple[str, ...]]
    ) -> None:
        layouts = [layout_of(upload) for upload in self.accepted]
        if len(set(layouts)) < 2:
            return
        common = Counter(layouts).most_common(1)[0][0]
        for upload, layout in zip(list(self.accepted), layouts, strict=True):
            if layout != common:
                odd = sorted(set(layout) ^ set(common))
                error = WireError(f"{reason}: {odd}", field=what, node=upload.node_id)
                self.accepted.remove(upload)
                self.reject(upload.client, error)

    def _check_enough(self, needed: int) -> None:
        if len(self.accepted) >= needed:
            return
        silent = self.expected - len(self.accepted) - len(self.rejected)
        lines = [f"{client}: {reason}" for client, reason in self.rejected.items()]
        lines += [f"{silent} clients did not reply in time"] * (silent > 0)
        raise RoundError(
            f"{len(self.accepted)} usable replies, and min_train_nodes={needed}:\n"
            + "\n".join(lines)
        )


def _layout(upload: Upload) -> tuple[str, ...]:
    return upload.payload.layout()


def _metrics(upload: Upload) -> tuple[str, ...]:
    return tuple(
        key if isinstance(value, int | float) else f"{key}[{len(value)}]"
        for key, value in sorted(upload.metrics.items())
    )
