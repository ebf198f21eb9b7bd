"""Evaluate replies: those that can be averaged, in an order that is always the same."""

import copy
from collections.abc import Callable, Iterable

from flwr.app import Message, MetricRecord, RecordDict

from flwr_fisher.errors import FlwrFisherError
from flwr_fisher.server.mailbox import Reply
from flwr_fisher.server.node_names import NodeNames
from flwr_fisher.server.policy import Policy
from flwr_fisher.server.rejections import Rejections
from flwr_fisher.server.replies import comparable, read_evaluate_reply, weight_of

_STAGE = "aggregate_evaluate"

Aggregate = Callable[[int, Iterable[Message]], MetricRecord | None]


def aggregate_evaluations(
    aggregate: Aggregate,
    names: NodeNames,
    server_round: int,
    replies: Iterable[Reply],
    weighted_by_key: str,
    policy: Policy,
) -> MetricRecord | None:
    """Have a strategy aggregate the replies that fit; a bad one costs a warning.

    Parameters
    ----------
    aggregate : Callable[[int, Iterable[Message]], MetricRecord | None]
        The strategy's ``aggregate_evaluate``.
    names : NodeNames
        Knows the clients' names, and their order.
    server_round : int
        The round.
    replies : Iterable[Reply]
        In any order.
    weighted_by_key : str
        The metric that weights clients.
    policy : Policy
        How much a single client may weigh.

    Returns
    -------
    MetricRecord | None
        None where no reply is of use, or the strategy can make nothing of them.
    """
    rejected = Rejections()
    messages: dict[str, Message] = {}
    metrics: dict[str, MetricRecord] = {}
    for reply in sorted(replies, key=lambda reply: names.order(reply.node)):
        node, message = reply.node, reply.message
        client = names.name(node)
        try:
            metrics[client] = read_evaluate_reply(message, weighted_by_key)
            messages[client] = message
        except Exception as error:  # of what arrived, anything can be wrong
            expected = isinstance(error, FlwrFisherError)
            reason = error if expected else f"{type(error).__name__}: {error}"
            rejected.add(client, reason, stage=_STAGE, node=node)
    kept, odd = comparable(metrics)
    for client, reason in odd.items():
        rejected.add(client, f"it {reason}", stage=_STAGE)
    rejected.summarise()
    if not kept:
        return None
    weights = policy.weights([weight_of(r, weighted_by_key) for r in kept.values()])
    weighted = [
        _with(messages[client], MetricRecord({**record, weighted_by_key: weight}))
        for (client, record), weight in zip(kept.items(), weights, strict=True)
    ]
    return aggregate(server_round, weighted)


def _with(message: Message, metrics: MetricRecord) -> Message:
    """Return a reply with these metrics alone."""
    changed = copy.copy(message)
    changed.content = RecordDict({"metrics": metrics})
    return changed
