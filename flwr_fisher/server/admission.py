"""From reply messages to checked uploads; a bad one never spoils the others."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from flwr_fisher.errors import FlwrFisherError, RoundError, WireError
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params
from flwr_fisher.printable import printable
from flwr_fisher.server.exchange import Upload
from flwr_fisher.server.identity import Identity
from flwr_fisher.server.mailbox import Reply
from flwr_fisher.server.node_names import NodeNames
from flwr_fisher.server.policy import Policy, Sizes
from flwr_fisher.server.rejections import Rejections, listed
from flwr_fisher.server.replies import comparable, read_train_reply, weight_of
from flwr_fisher.wire import Payload, reply_bytes

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
    quiet : bool, default False
        Whether the log does not tell of each reply.
    fold : Callable[[P, float], P], optional
        Adds an upload to a sum, and returns what is kept of it.
    """

    def __init__(
        self,
        names: NodeNames,
        read: Callable[[ArrayRecord, Params], P],
        like: Params,
        weighted_by_key: str,
        expected: int,
        policy: Policy,
        quiet: bool = False,
        fold: Callable[[P, float], P] | None = None,
    ) -> None:
        self.names, self.read, self.like = names, read, like
        self.weighted_by_key, self.expected = weighted_by_key, expected
        self.policy, self.quiet, self.fold = policy, quiet, fold
        self.admitted: list[Upload[P]] = []
        self.rejected = Rejections()
        self.withdrawn: dict[str, str] = {}  # admitted at first; with the reason
        self.missing: dict[str, str] = {}  # from whom nothing came; with the reason
        self.num_limited = 0
        self._clients: dict[str, Identity] = {}
        self._sizes: dict[str, Sizes] = {}
        self._weights: dict[str, float] = {}  # within the policy

    def has(self, client: Identity) -> bool:
        """Return whether a client's reply was admitted."""
        return client.name in self._clients

    def done(self) -> set[str]:
        """Return all that those may be called who have replied, in whatever way."""
        names = {name for client in self._clients.values() for name in client.names}
        return names | self.rejected.reasons.keys()

    def without_done(self, nodes: Iterable[int]) -> list[int]:
        """Return those nodes whose clients have not replied, in whatever way.

        A registered one's partition may have replied: anyone can claim it.
        """
        done, left = self.done(), []
        for node in nodes:
            client = self.names.identity(node)
            names = {client.name, f"node-{node}"} if client.registered else client.names
            if not names & done:
                left.append(node)
        return left

    def take(self, reply: Reply) -> tuple[ArrayRecord, MetricRecord] | None:
        """Admit or reject a reply; return the records of one that was admitted."""
        if reply.of_link or reply.of_the_dead:
            self.miss([reply.node], printable(reply.message.error.reason))
            return None
        try:
            records = read_train_reply(reply.message, self.weighted_by_key)
            self.admit(self.names.identity(reply.node), *records)
            return records
        except Exception as error:  # of what arrived, anything can be wrong
            self.reject(reply.node, error)
            return None

    def admit(
        self, client: Identity, arrays: ArrayRecord, metrics: MetricRecord
    ) -> None:
        """Decode, check and keep a client's records, and tell the log.

        Raises
        ------
        WireError
            Naming the key that is wrong. What a payload's reader raises beside is not
            caught.
        """
        self._check_claim(client)
        payload = self.read(arrays, self.like)
        weight = weight_of(metrics, self.weighted_by_key)
        payload.check_weight(weight)
        sizes = Sizes.of(payload, self.like)
        sizes.check_plausible()
        size = reply_bytes(arrays, metrics)
        if self.fold is not None:
            payload = self.fold(payload, weight)
        node, name, number = client.node, client.name, client.number
        self.admitted.append(Upload(node, name, weight, payload, metrics, size, number))
        self._clients[name], self._sizes[name] = client, sizes
        self.missing.pop(name, None)
        if self.quiet:
            return
        logger.info(
            "aggregate_train: %s of %s replies (%s, %g examples)",
            count := len(self.admitted) + len(self.rejected),
            max(self.expected, count),
            name,
            weight,
        )

    def _check_claim(self, client: Identity) -> None:
        """See that no partition counts twice: it is the registered node's that has it.

        Only one of them was connected when it was asked, or the SuperLink has
        registered the node since.
        """
        if client.partition is None:
            return
        for other in list(self._clients.values()):
            if other.partition != client.partition:
                continue
            reason = f"partition {client.partition} is also {{}}'s, which is registered"
            if other.registered and not client.registered:
                raise WireError(reason.format(other.name), field="partition-id")
            if client.registered and not other.registered:
                error = WireError(reason.format(client.name), field="partition-id")
                if self.fold is not None:  # what was added up cannot be taken out
                    raise error
                for upload in [u for u in self.admitted if u.client == other.name]:
                    self.withdraw(upload, error)

    def uploads(self, needed: int) -> list[Upload[P]]:
        """Return the uploads in an order that depends on no node id and no timing.

        Those that do not agree with most are rejected first, and no client's has a
        larger say than the policy gives it.

        Raises
        ------
        RoundError
            With every reason, if there are fewer than `needed`.
        """
        self.admitted.sort(key=lambda upload: self._clients[upload.client].order)
        self._withdraw_odd()
        self.check_enough(needed)
        sizes = [self._sizes[upload.client] for upload in self.admitted]
        limited, reasons = self.policy.limit(self.admitted, sizes, self.like)
        for client, reason in reasons.items():
            logger.warning("%s: limited %s: %s", _STAGE, client, reason)
        self.num_limited = len(reasons)
        self._weights = {upload.client: upload.num_examples for upload in limited}
        return limited

    def metrics(
        self, aggregate: Callable[[list[RecordDict], str], MetricRecord]
    ) -> MetricRecord:
        """Return the admitted replies' aggregated metrics, and how many there were."""
        key = self.weighted_by_key
        own = {
            upload.client: MetricRecord(
                {**upload.metrics, key: self._weights[upload.client]}
            )
            for upload in self.admitted
        }
        kept, odd = comparable(own)
        for client, reason in odd.items():
            logger.warning("%s: metrics without %s: it %s", _STAGE, client, reason)
        contents = [RecordDict({"metrics": record}) for record in kept.values()]
        counts = {"num-replies": len(own), "num-rejected": len(self.rejected)}
        if self.missing:
            counts["num-missing"] = len(self.missing)
        if self.num_limited:
            counts["num-limited"] = self.num_limited
        averaged = aggregate(contents, key) if contents else {}
        return MetricRecord({**averaged, **counts})

    def reject(self, node: int, error: Exception, stage: str = _STAGE) -> None:
        """Note, and tell the log, why a client is left out."""
        self._reject(self.names.name(node), node, error, stage)

    def miss(self, nodes: Iterable[int], reason: str) -> None:
        """Note from which nodes nothing came, and why."""
        self.missing |= {self.names.name(node): reason for node in nodes}

    def tell_missing(self) -> None:
        """Tell the log from whom nothing came."""
        for line in self._missing_lines():
            logger.warning("%s: %s", _STAGE, line)

    def _missing_lines(self) -> list[str]:
        reasons: dict[str, list[str]] = {}
        for client, reason in self.missing.items():
            reasons.setdefault(reason, []).append(client)
        return [f"no reply from {listed(c)}: {why}" for why, c in reasons.items()]

    def turn_away(self, client: Identity, error: Exception) -> None:
        """Reject what was kept of a client, which need not be connected."""
        self._reject(client.name, client.node, error, _STAGE)

    def withdraw(self, upload: Upload[P], error: Exception) -> None:
        """Reject an upload that was admitted before."""
        self.admitted = [u for u in self.admitted if u.client != upload.client]
        self._reject(upload.client, upload.node_id, error, _STAGE)
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
        lines = self.rejected.lines() + self._missing_lines()
        raise RoundError(
            f"{len(self.admitted) + awaited} usable replies, and min_train_nodes="
            f"{needed}:\n" + "\n".join(lines)
        )

    def _reject(self, client: str, node: int, error: Exception, stage: str) -> None:
        expected = isinstance(error, FlwrFisherError)
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        self.rejected.add(client, reason, stage=stage, node=node)

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
