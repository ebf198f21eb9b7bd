"""What an older server returns: losses and metrics by round."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

Losses = list[tuple[int, float]]
Metrics = dict[str, list[tuple[int, Any]]]


@dataclass
class History:
    """The fields of Flower's ``History``, made of a strategy's result.

    Examples
    --------
    >>> result = Result(evaluate_metrics_serverapp={1: MetricRecord({"loss": 0.5})})
    >>> History.of(result).losses_centralized
    [(1, 0.5)]
    """

    losses_distributed: Losses = field(default_factory=list)
    losses_centralized: Losses = field(default_factory=list)
    metrics_distributed_fit: Metrics = field(default_factory=dict)
    metrics_distributed: Metrics = field(default_factory=dict)
    metrics_centralized: Metrics = field(default_factory=dict)

    @classmethod
    def of(cls, result: Result) -> "History":
        """Sort a result's metrics."""
        distributed = _by_name(result.evaluate_metrics_clientapp)
        centralized = _by_name(result.evaluate_metrics_serverapp)
        return cls(
            distributed.pop("loss", []),
            centralized.pop("loss", []),
            _by_name(result.train_metrics_clientapp),
            distributed,
            centralized,
        )

    def lines(self) -> list[str]:
        """Return it for a log."""
        own = ((f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self))
        return [f"{name}: {values}" for name, values in own if values]


def _by_name(rounds: Mapping[int, MetricRecord]) -> Metrics:
    metrics: Metrics = {}
    for server_round, record in rounds.items():
        for name, value in record.items():
            metrics.setdefault(name, []).append((server_round, value))
    return metrics
