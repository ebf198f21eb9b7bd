"""Several ``evaluate_fn`` as one, and means of clients' numbers."""

import math
from collections.abc import Mapping, Sequence

from flwr.app import ArrayRecord, MetricRecord

from flwr_fisher.log_lines import logger
from flwr_fisher.server.driver import EvaluateFn


def combine(*functions: EvaluateFn | None) -> EvaluateFn:
    """Return one ``evaluate_fn`` that calls several in order, and joins their metrics.

    If two metrics have the same name, the later one counts, and the log says so. None
    in place of a function is ignored.

    Examples
    --------
    >>> evaluate_fn = combine(
    ...     lambda server_round, arrays: MetricRecord({"loss": 0.5}),
    ...     lambda server_round, arrays: None,
    ...     lambda server_round, arrays: MetricRecord({"round": server_round}),
    ... )
    >>> dict(evaluate_fn(3, ArrayRecord()))
    {'loss': 0.5, 'round': 3}
    """

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        joined: MetricRecord | None = None
        for function in functions:
            metrics = function(server_round, arrays) if function else None
            if metrics is None:
                continue
            joined = MetricRecord() if joined is None else joined
            if odd := [k for k, v in metrics.items() if k in joined and joined[k] != v]:
                text = "combine: two functions return %s; the last one's value counts"
                logger.warning(text, ", ".join(odd))
            joined.update(metrics)
        return joined

    return evaluate_fn


def numbers(record: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers under a prefix, by names without the prefix."""
    return {
        key.removeprefix(prefix): value
        for key, value in record.items()
        if key.startswith(prefix)
        and isinstance(value, int | float)
        and math.isfinite(value)
    }


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the unweighted mean of every number that all rows have.

    Sums are exact, so the rows' order does not matter.

    Examples
    --------
    >>> means([{"loss": 1.0, "accuracy": 0.5}, {"loss": 2.0}])
    {'loss': 1.5}
    """
    return {
        key: math.fsum(row[key] for row in rows) / len(rows)
        for key in (rows[0] if rows else ())
        if all(key in row for row in rows)
    }


def warn_unmeasured(measure: str, server_round: int, reason: str) -> None:
    """Log why a round has no value of a measure."""
    logger.warning("No %s in round %d: %s", measure, server_round, reason)
