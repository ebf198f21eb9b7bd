"""Adapters that give this library's strategies the settings of Flower's older ones."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import nn

from flwr_fisher.client.loops import checked_metrics
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.legacy.lists import (
    NDArray,
    Order,
    arrays_of,
    from_list,
    names_of,
    order_of,
    to_list,
)
from flwr_fisher.strategies import TCT, CurvatureStrategy
from flwr_fisher.strategies.base import OLDER_NAMES
from flwr_fisher.wire import arrays_to_tensors

OlderEvaluateFn = Callable[
    [int, list[NDArray], dict[str, Any]], tuple[float, dict[str, Any]] | None
]
ConfigFn = Callable[[int], dict[str, Any]]
AggregateFn = Callable[[list[tuple[int, dict[str, Any]]]], dict[str, Any]]


@dataclass
class Older:
    """The settings of an older strategy that ``start`` does not have.

    Parameters
    ----------
    model : nn.Module
        The model, which gives names to lists of arrays, and has the initial parameters.
    names : list[str]
        The names of the entries of such lists.
    evaluate_fn, on_fit_config_fn, on_evaluate_config_fn
        As for Flower's older strategies.
    start : Mapping[str, Any]
        Keywords of ``start``.
    """

    model: nn.Module
    names: list[str]
    evaluate_fn: OlderEvaluateFn | None
    on_fit_config_fn: ConfigFn | None
    on_evaluate_config_fn: ConfigFn | None
    start: Mapping[str, Any]

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate the arrays by the older function."""
        assert self.evaluate_fn is not None
        model = copy.deepcopy(self.model)
        model.load_state_dict(arrays_to_tensors(arrays), strict=False)
        scores = self.evaluate_fn(server_round, to_list(model, self.names), {})
        if scores is None:
            return None
        loss, metrics = scores
        return MetricRecord(
            {**checked_metrics(metrics, "evaluate_fn"), "loss": float(loss)}
        )


class _PerRound(CurvatureStrategy):
    """A strategy that sends clients a different config in each round."""

    older: Older

    def round_config(self, server_round: int, config: ConfigRecord) -> ConfigRecord:
        own = _joined(config, self.older.on_fit_config_fn, server_round)
        return super().round_config(server_round, own)

    def evaluation_config(
        self, server_round: int, config: ConfigRecord
    ) -> ConfigRecord:
        own = _joined(config, self.older.on_evaluate_config_fn, server_round)
        return super().evaluation_config(server_round, own)


def as_legacy(
    strategy: type[CurvatureStrategy],
    *,
    model: nn.Module,
    initial_parameters: Any = None,
    order: Order | None = None,
    evaluate_fn: OlderEvaluateFn | None = None,
    on_fit_config_fn: ConfigFn | None = None,
    on_evaluate_config_fn: ConfigFn | None = None,
    fit_metrics_aggregation_fn: AggregateFn | None = None,
    evaluate_metrics_aggregation_fn: AggregateFn | None = None,
    checkpoint_dir: Any = None,
    resume: bool = False,
    reopen: bool = False,
    **options: Any,
) -> CurvatureStrategy:
    """Return a strategy for a `server_fn`, in place of ``flwr.server.strategy``'s.

    The older strategies' settings keep their names and their meaning. The settings of
    `strategy` can be given, too. :func:`server_app` runs the result.

    Parameters
    ----------
    strategy : type[CurvatureStrategy]
        ``FedFisherOneShot``, ``FedFish``, …: the class.
    model : nn.Module
        The clients' network: it gives names to the lists of arrays of `evaluate_fn` and
        `initial_parameters`, and determines which parameters are trained. It is left as
        it is.
    initial_parameters : Parameters | list[ndarray], optional
        The initial parameters of the run. Default: those of `model`.
    order : "state" | "parameters" | "trainable" | Sequence[str], optional
        The entries of the lists; see :func:`from_numpy_client`. Default: the order of
        `initial_parameters`, or ``state`` without them.
    evaluate_fn : Callable[[int, list[ndarray], dict], tuple[float, dict] | None]
        Called before the first round and after each; ``loss`` and its metrics are in
        the result's ``evaluate_metrics_serverapp``.
    on_fit_config_fn, on_evaluate_config_fn : Callable[[int], dict], optional
        Return the config for a round's clients.
    fit_metrics_aggregation_fn, evaluate_metrics_aggregation_fn : Callable, optional
        Called with ``[(num_examples, metrics), …]``. Default: Flower's weighted mean.
    checkpoint_dir, resume, reopen
        As for :meth:`CurvatureStrategy.start`.
    **options
        ``fraction_fit``, ``fraction_evaluate``, ``min_fit_clients``,
        ``min_evaluate_clients``, ``min_available_clients``; and `strategy`'s own.

    Raises
    ------
    ConfigurationError
        If it is not a strategy of this library, or a setting has no counterpart.
    ParamsError
        If the initial parameters are not the model's.

    Examples
    --------
    ::

        strategy = as_legacy(
            FedFisherOneShot, model=net, fraction_fit=0.5, evaluate_fn=evaluate
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))
    """
    if not (isinstance(strategy, type) and issubclass(strategy, CurvatureStrategy)):
        raise ConfigurationError(
            "as_legacy takes a class of flwr_fisher.strategies, such as "
            f"FedFisherOneShot, and its settings as keywords, not {strategy!r}"
        )
    if evaluate_fn is not None and issubclass(strategy, TCT):
        raise ConfigurationError(
            "evaluate_fn gets only a network's arrays, but TCT's model has more: use "
            "strategy.start(..., evaluate_fn=...)"
        )
    aggregate = {
        "train_metrics_aggr_fn": fit_metrics_aggregation_fn,
        "evaluate_metrics_aggr_fn": evaluate_metrics_aggregation_fn,
    }
    keywords = {OLDER_NAMES.get(name, name): value for name, value in options.items()}
    keywords |= {k: _aggregated(fn) for k, fn in aggregate.items() if fn is not None}
    kind = type(strategy.__name__, (_PerRound, strategy), {"__doc__": strategy.__doc__})
    made: _PerRound = kind(**keywords)
    start = {"checkpoint_dir": checkpoint_dir, "resume": resume, "reopen": reopen}
    network, names = _begun(model, initial_parameters, order)
    made.older = Older(
        network, names, evaluate_fn, on_fit_config_fn, on_evaluate_config_fn, start
    )
    return made


def _begun(
    model: nn.Module, initial_parameters: Any, order: Order | None
) -> tuple[nn.Module, list[str]]:
    """Return a copy of the model with its initial parameters, and the lists' names."""
    network = copy.deepcopy(model)
    arrays = None if initial_parameters is None else arrays_of(initial_parameters)
    if arrays is not None and order is None:
        order = order_of(model, arrays)
    names = names_of(model, "state" if order is None else order)
    if arrays is not None:
        tensors = from_list(model, names, arrays, "initial_parameters")
        network.load_state_dict(tensors, strict=False)
    return network, names


def _joined(
    config: ConfigRecord, config_fn: ConfigFn | None, server_round: int
) -> ConfigRecord:
    own = {} if config_fn is None else config_fn(server_round)
    return ConfigRecord({**config, **own})


def _aggregated(
    function: AggregateFn,
) -> Callable[[list[RecordDict], str], MetricRecord]:
    """Return an older aggregation function in Flower's new form, with the mean loss."""

    def aggregate(contents: list[RecordDict], key: str) -> MetricRecord:
        records: list[dict[str, Any]] = [
            dict(next(iter(content.metric_records.values()))) for content in contents
        ]
        pairs = [(record.pop(key), record) for record in records]
        name = getattr(function, "__name__", "the function")
        own = checked_metrics(function(pairs), name)
        if all("loss" in record for record in records):
            total = sum(weight for weight, _ in pairs)
            own["loss"] = sum(w * record["loss"] for w, record in pairs) / total
        return MetricRecord({**own})

    return aggregate
