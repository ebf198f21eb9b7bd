"""The clients' evaluation of a model: requests, the checks of replies, the averages."""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from flwr_fisher.errors import RoundError, WireError, listed
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.door import Door, comparable
from flwr_fisher.server.exchange import metrics_from
from flwr_fisher.server.mailbox import NodeReply, collect
from flwr_fisher.server.policy import Policy
from flwr_fisher.server.round import Strategy, requests
from flwr_fisher.server.waiting import Waiting
from flwr_fisher.wire import NUM_EXAMPLES, Payload, named_options

Aggregate = Callable[[int, Iterable[Message]], MetricRecord | None]

_LONGEST_WAIT = 60.0  # seconds until enough clients are connected


def requests_to_evaluate(
    strategy: Strategy,
    server_round: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    grid: Grid,
) -> list[Message]:
    """Sample clients for evaluation, and return their messages."""
    if strategy.fraction_evaluate == 0.0:
        return []
    try:
        nodes = strategy.cohort.sample(
            grid,
            fraction=strategy.fraction_evaluate,
            minimum=strategy.min_evaluate_nodes,
            available=strategy.min_available_nodes,
            server_round=server_round,
            purpose="evaluate",
            timeout=min(strategy.timeout, _LONGEST_WAIT),
            waiting=Waiting(),
        ).nodes
    except RoundError as error:  # the training does not depend on it
        logger.warning("configure_evaluate: no client evaluates: %s", error)
        return []
    logger.info("configure_evaluate: Sampled %s nodes", len(nodes))
    kind = MessageType.EVALUATE
    return requests(strategy, server_round, lambda node: arrays, config, nodes, kind)


def evaluate(
    strategy: Strategy,
    server_round: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    grid: Grid,
) -> MetricRecord | None:
    """Let clients evaluate parameters, as the strategy configures it.

    A client without data to evaluate on says so, and the server does not ask it again.
    """
    cohort, timeout = strategy.cohort, strategy.timeout
    config = ConfigRecord({**config, **named_options({"may-abstain": True})})
    messages = [
        message
        for message in strategy.configure_evaluate(server_round, arrays, config, grid)
        if message.metadata.dst_node_id not in cohort.abstaining
    ]
    due = {message.metadata.dst_node_id for message in messages}
    num_asked, new = len(due), set[int]()  # nodes that abstain for the first time
    door = EvaluationDoor(cohort, strategy.weighted_by_key, strategy.policy)

    def enough() -> bool:
        wanted = strategy.waiting.enough(num_asked - len(new))
        return len(door.admitted) >= max(wanted, 1)

    for reply in collect(cohort.mailbox(grid), messages, timeout, enough=enough):
        if reply.from_superlink and not reply.nothing_will_come:
            continue  # the time is up
        due.discard(reply.node)
        if abstains(reply.message):
            new.add(reply.node)
        else:
            door.take(reply)
    if new:
        cohort.abstaining |= new
        names = listed(map(cohort.name, new))
        logger.info("configure_evaluate: without data for evaluation: %s", names)
    if enough():
        door.mark_missing(due, "not waited for, since enough have replied")
    else:
        door.mark_missing(due, f"none within {timeout:.0f} s")
        cohort.missed(due, server_round)
    door.log_missing()
    metrics = door.average(server_round, strategy.aggregate_evaluate)
    return metrics_from(metrics, "evaluate_metrics_aggr_fn")


def abstains(message: Message) -> bool:
    """Return whether a client says that it has no data for evaluation."""
    if not message.has_content() or len(message.content) != 1:
        return False
    records = list(message.content.metric_records.values())
    return len(records) == 1 and dict(records[0]) == {NUM_EXAMPLES: 0}


class Scores(Payload):
    """The empty upload of an evaluate reply, which has only metrics."""

    def layout(self) -> tuple[str, ...]:
        """Return an empty layout, equal for all clients."""
        return ()

    def to_arrays(self) -> ArrayRecord:
        """Return no arrays."""
        return ArrayRecord()


def _no_arrays(record: ArrayRecord, like: Params) -> Scores:
    return Scores()


class EvaluationDoor(Door[Scores]):
    """Checks evaluate replies, which have only metrics."""

    def __init__(self, cohort: Cohort, weighted_by_key: str, policy: Policy) -> None:
        if not policy.limit_scores:
            policy = replace(policy, max_weight=math.inf)
        super().__init__(cohort, _no_arrays, {}, weighted_by_key, policy, quiet=True)
        self.stage = "aggregate_evaluate"
        self._messages: dict[int, Message] = {}
        self._scores: dict[str, MetricRecord] = {}  # the metrics that most report

    def _arrays(self, message: Message) -> ArrayRecord:
        return ArrayRecord()

    def take(self, reply: NodeReply) -> tuple[ArrayRecord, MetricRecord] | None:
        """Admit or reject a reply, and keep its message."""
        self._messages[reply.node] = reply.message
        return super().take(reply)

    def _withdraw_mismatched(self) -> None:
        """Reject the replies without the metrics that most clients report."""
        own = {upload.client: upload.metrics for upload in self.admitted}
        self._scores, mismatched = comparable(own)
        for upload in [u for u in self.admitted if u.client in mismatched]:
            error = WireError(f"it {mismatched[upload.client]}", field="metrics")
            self.withdraw(upload, error)

    def average(self, server_round: int, aggregate: Aggregate) -> MetricRecord | None:
        """Return the metrics that a strategy aggregates, in the clients' order.

        It is None if no reply is usable, or the strategy cannot aggregate them.
        """
        messages = []
        for upload in self.uploads(needed=0):
            message = copy.copy(self._messages[upload.node_id])
            weight = {self.weighted_by_key: upload.num_examples}
            record = MetricRecord({**self._scores[upload.client], **weight})
            message.content = RecordDict({"metrics": record})
            messages.append(message)
        return aggregate(server_round, messages) if messages else None
