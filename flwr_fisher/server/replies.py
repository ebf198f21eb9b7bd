"""What every reply must be, before anything in it is looked at."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from flwr.app import ArrayRecord, Message, MetricRecord

from flwr_fisher.errors import WireError
from flwr_fisher.printable import printable

Key = TypeVar("Key")

_ENTRIES, _NUMBERS, _NAME = 1000, 100_000, 200  # of a reply's metrics
_REASON = 500


def read_train_reply(
    message: Message, weighted_by_key: str
) -> tuple[ArrayRecord, MetricRecord]:
    """Return a train reply's two records.

    Raises
    ------
    WireError
        If the client failed, there is not exactly one of each, the weight is missing,
        not positive or not finite, or the metrics are more than metrics can be.
    """
    _check_no_error(message)
    arrays = list(message.content.array_records.values())
    metrics = list(message.content.metric_records.values())
    if len(arrays) != 1 or len(metrics) != 1:
        raise WireError(
            f"expected one ArrayRecord and one MetricRecord, got {len(arrays)} and "
            f"{len(metrics)}",
            field="content",
        )
    _check_metrics(metrics[0])
    weight_of(metrics[0], weighted_by_key)
    return arrays[0], metrics[0]


def read_evaluate_reply(message: Message, weighted_by_key: str) -> MetricRecord:
    """Return an evaluate reply's only metrics.

    Raises
    ------
    WireError
        As for :func:`read_train_reply`.
    """
    _check_no_error(message)
    metrics = list(message.content.metric_records.values())
    if len(metrics) != 1:
        reason = f"expected one MetricRecord, got {len(metrics)}"
        raise WireError(reason, field="content")
    _check_metrics(metrics[0])
    weight_of(metrics[0], weighted_by_key)
    return metrics[0]


def abstains(message: Message) -> bool:
    """Return whether a client says that it has nothing to evaluate on."""
    if not message.has_content() or len(message.content) != 1:
        return False
    records = list(message.content.metric_records.values())
    return len(records) == 1 and dict(records[0]) == {"num-examples": 0}


def weight_of(metrics: MetricRecord, key: str) -> float:
    """Return a client's weight.

    Raises
    ------
    WireError
        If it is missing, not positive or not finite.
    """
    weight = metrics.get(key)
    if isinstance(weight, int | float) and math.isfinite(weight) and weight > 0:
        return weight
    reason = f"the weight must be a positive number, got {printable(repr(weight))}"
    raise WireError(reason, field=key)


def comparable(
    metrics: Mapping[Key, MetricRecord],
) -> tuple[dict[Key, MetricRecord], dict[Key, str]]:
    """Return metrics that can be averaged, and why some clients' cannot.

    Flower refuses all metrics of a round whose clients do not report the same. Here
    those entries count that more than half of the clients report; others are dropped,
    and a client that lacks one of them, or for which one is NaN or infinite, is left
    out of the metrics. What it uploaded counts all the same.

    Examples
    --------
    >>> own = {"a": {"x": 1}, "b": {"x": 2, "y": 3}, "c": {"y": 4}}
    >>> kept, odd = comparable({k: MetricRecord(v) for k, v in own.items()})
    >>> {k: dict(v) for k, v in kept.items()}, odd
    ({'b': {'x': 2, 'y': 3}}, {'a': "reports no 'y'", 'c': "reports no 'x'"})
    """
    entries = {client: _entries(record) for client, record in metrics.items()}
    counts = Counter(entry for own in entries.values() for entry in own)
    common = [entry for entry, n in counts.items() if 2 * n > len(metrics)]
    kept: dict[Key, MetricRecord] = {}
    odd: dict[Key, str] = {}
    for client, record in metrics.items():
        missing = [name for name, size in common if (name, size) not in entries[client]]
        wild = [name for name, _ in common if not _finite(record.get(name))]
        if missing:
            odd[client] = f"reports no '{printable(missing[0])}'"
        elif wild:
            odd[client] = f"reports a '{printable(wild[0])}' that is NaN or infinite"
        elif len(common) == len(entries[client]):
            kept[client] = record
        else:
            names = {name for name, _ in common}
            own = {name: value for name, value in record.items() if name in names}
            kept[client] = MetricRecord(own)
    return kept, odd


def shared_by_all(metrics: Sequence[MetricRecord]) -> list[MetricRecord]:
    """Return the entries that all clients have, and that are finite for all.

    Flower's own strategies average nothing, parameters neither, where metrics differ.
    """
    if not metrics:
        return []
    shared = set(_entries(metrics[0])).intersection(*map(_entries, metrics))
    names = [
        name
        for name in metrics[0]
        if name in dict(shared) and all(_finite(record[name]) for record in metrics)
    ]
    return [MetricRecord({k: record[k] for k in names}) for record in metrics]


def _entries(record: MetricRecord) -> dict[tuple[str, int], None]:
    """Return names with lengths, -1 for a number; in order."""
    return {
        (name, len(value) if isinstance(value, list) else -1): None
        for name, value in record.items()
    }


def _finite(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(x, int | float) and math.isfinite(x) for x in values)


def _check_no_error(message: Message) -> None:
    if message.has_error():
        reason = printable(message.error.reason, _REASON)
        raise WireError(f"the client failed: {reason}", field="error")


def _check_metrics(metrics: MetricRecord) -> None:
    if len(metrics) > _ENTRIES:
        reason = f"{len(metrics)} metrics, and at most {_ENTRIES} can be"
        raise WireError(reason, field="metrics")
    if any(len(name) > _NAME for name in metrics):
        reason = f"a metric's name has more than {_NAME} characters"
        raise WireError(reason, field="metrics")
    numbers = sum(len(v) for v in metrics.values() if isinstance(v, list))
    if numbers > _NUMBERS:
        reason = f"{numbers} numbers in lists, and at most {_NUMBERS} can be"
        raise WireError(reason, field="metrics")
