"""From reply messages to checked uploads; a bad one never spoils the others."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from flwr_fisher.errors import FlwrFisherError, RoundError, WireError
from flwr_fisher.params import Params
from flwr_fisher.server.exchange import Upload
from flwr_fisher.server.node_names import NodeNames
from flwr_fisher.server.policy import Policy, Sizes
from flwr_fisher.server.rejections import Rejections
from flwr_fisher.server.replies import comparable, read_train_reply, weight_of
from flwr_fisher.wire import Payload, reply_bytes

logger = logging.getLogger("flwr")

P = TypeVar("P", bound=Payload)

_STAGE = "aggregate_train"


class Admission(Generic[P]):
    """The replies of one exchange: what was admitted, and what was wrong with others.

    Each reply goes through the same steps: its records, its weight, its payload, which
    has bounds of its own, and whether its numbers can be. Whatever fails at any of
    them, by whatever exception, costs that client its place, and nothing else.

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
    policy : Policy
        How far a single client's say may go.
    """

    def __init__(
        self,
        names: NodeNames,
        read: Callable[[ArrayRecord, Params], P],
        like: Params,
        weighted_by_key: str,
        expected: int,
        policy: Policy,
    ) -> None:
        self.names, self.read, self.like = names, read, like
        self.weighted_by_key, self.expected = weighted_by_key, expected
        self.policy = policy
        self.admitted: list[Upload[P]] = []
        self.rejected = Rejections()
        self.withdrawn: dict[str, str] = {}  # admitted at first; with the reason
        self.num_limited = 0
        self._sizes: dict[int, Sizes] = {}  # by node
        self._weights: dict[int, float] = {}  # within the policy

    def take(self, message: Message) -> tuple[ArrayRecord, MetricRecord] | None:
        """Admit or reject a reply; return the records of one that was admitted."""
        node = message.metadata.src_node_id
        try:
            records = read_train_reply(message, self.weighted_by_key)
            self.admit(node, *records)
            return records
        except Exception as error:  # of what arrived, anything can be wrong
            self.reject(node, error)
            return None

    def admit(self, node: int, arrays: ArrayRecord, metrics: MetricRecord) -> None:
        """Decode, check and keep a client's records, and tell the log.

        Raises
        ------
        WireError
            Naming the key that is wrong. What a payload's reader raises beside is not
            caught.
        """
        if (reason := self.names.refused.get(node)) is not None:
            raise WireError(reason, field="partition-id")
        payload = self.read(arrays, self.like)
        weight = weight_of(metrics, self.weighted_by_key)
        payload.check_weight(weight)
        sizes = Sizes.of(payload, self.like)
        sizes.check_plausible()
        size = reply_bytes(arrays, metrics)
        client = self.names.name(node)
        number = self.names.number(node)
        upload = Upload(node, client, weight, payload, metrics, size, number)
        self.admitted.append(upload)
        self._sizes[node] = sizes
        logger.info(
            "aggregate_train: %s of %s replies (%s, %g examples)",
            len(self.admitted) + len(self.rejected),
            self.expected,
            client,
            weight,
        )

    def uploads(self, needed: int) -> list[Upload[P]]:
        """Return the uploads in an order that depends on no node id and no timing.

        Those that do not agree with most are rejected first, and no client's has a
        larger say than the policy gives it.

        Raises
        ------
        RoundError
            With every reason, if there are fewer than `needed`.
        """
        self.admitted.sort(key=lambda upload: self.names.order(upload.node_id))
        self._withdraw_odd()
        self.check_enough(needed)
        sizes = [self._sizes[upload.node_id] for upload in self.admitted]
        limited, reasons = self.policy.limit(self.admitted, sizes, self.like)
        for client, reason in reasons.items():
            logger.warning("%s: limited %s: %s", _STAGE, client, reason)
        self.num_limited = len(reasons)
        self._weights = {upload.node_id: upload.num_examples for upload in limited}
        return limited

    def metrics(
        self, aggregate: Callable[[list[RecordDict], str], MetricRecord]
    ) -> MetricRecord:
        """Return the admitted replies' aggregated metrics, and how many there were."""
        key = self.weighted_by_key
        own = {
            upload.client: MetricRecord(
                {**upload.metrics, key: self._weights[upload.node_id]}
            )
            for upload in self.admitted
        }
        kept, odd = comparable(own)
        for client, reason in odd.items():
            logger.warning("%s: metrics without %s: it %s", _STAGE, client, reason)
        contents = [RecordDict({"metrics": record}) for record in kept.values()]
        counts = {"num-replies": len(own), "num-rejected": len(self.rejected)}
        if self.num_limited:
            counts["num-limited"] = self.num_limited
        averaged = aggregate(contents, key) if contents else {}
        return MetricRecord({**averaged, **counts})

    def reject(self, node: int, error: Exception, stage: str = _STAGE) -> None:
        """Note, and tell the log, why a client is left out."""
        expected = isinstance(error, FlwrFisherError)
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        self.rejected.add(self.names.name(node), reason, stage=stage, node=node)

    def withdraw(self, upload: Upload[P], error: Exception) -> None:
        """Reject an upload that was admitted before."""
        self.admitted = [u for u in self.admitted if u.client != upload.client]
        self.reject(upload.node_id, error)
        self.withdrawn[upload.client] = self.rejected.reasons[upload.client]

    def check_enough(self, needed: int, awaited: int = 0) -> None:
        """See that there are enough uploads, with those that are still awaited.

        Raises
        ------
        RoundError
            With every reason, if there are fewer than `needed`.
        """
        self.rejected.summarise()
        if len(self.admitted) + awaited >= needed:
            return
        silent = self.expected - len(self.admitted) - len(self.rejected) - awaited
        lines = self.rejected.lines()
        lines += [f"{silent} clients did not reply in time"] * (silent > 0)
        raise RoundError(
            f"{len(self.admitted) + awaited} usable replies, and min_train_nodes="
            f"{needed}:\n" + "\n".join(lines)
        )

    def _withdraw_odd(self) -> None:
        """Reject the uploads whose layout is not the one that most have."""
        layouts = [upload.payload.layout() for upload in self.admitted]
        if len(set(layouts)) < 2:
            return
        common = Counter(layouts).most_common(1)[0][0]
        for upload, layout in zip(list(self.admitted), layouts, strict=True):
            if layout != common:
                field, reason = upload.payload.disagreement
                odd = sorted(set(layout) ^ set(common)) or "the same in another order"
                self.withdraw(upload, WireError(f"{reason}: {odd}", field=field))
