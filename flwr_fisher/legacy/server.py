"""Adapters that run a `server_fn` with a strategy of this library."""

import copy
import time
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from torch import nn

from flwr_fisher.client.problem import checked_metrics
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.legacy.client import NDArray, Order, from_list, names_of, to_list
from flwr_fisher.log_lines import logger
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import TCT, CurvatureResult, CurvatureStrategy
from flwr_fisher.strategies.base import OLDER_NAMES
from flwr_fisher.wire import arrays_to_tensors

OlderEvaluateFn = Callable[
    [int, list[NDArray], dict[str, Any]], tuple[float, dict[str, Any]] | None
]
ConfigFn = Callable[[int], dict[str, Any]]


class _Older(CurvatureStrategy):
    """A strategy with an older one's settings that ``start`` does not have."""

    older_model: nn.Module
    older_options: Mapping[str, Any]
    on_fit_config_fn: ConfigFn | None
    on_evaluate_config_fn: ConfigFn | None

    def round_config(self, server_round: int, config: ConfigRecord) -> ConfigRecord:
        config = _joined(config, self.on_fit_config_fn, server_round)
        return super().round_config(server_round, config)

    def evaluation_config(
        self, server_round: int, config: ConfigRecord
    ) -> ConfigRecord:
        config = _joined(config, self.on_evaluate_config_fn, server_round)
        return super().evaluation_config(server_round, config)


def as_legacy(
    strategy: type[CurvatureStrategy],
    *,
    model: nn.Module,
    initial_parameters: Any = None,
    order: Order = "state",
    evaluate_fn: OlderEvaluateFn | None = None,
    on_fit_config_fn: ConfigFn | None = None,
    on_evaluate_config_fn: ConfigFn | None = None,
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
    order : "state" | "parameters" | "trainable" | Sequence[str], default "state"
        The entries of the lists; see :func:`from_numpy_client`.
    evaluate_fn : Callable[[int, list[ndarray], dict], tuple[float, dict] | None]
        Called before the first round and after each; ``loss`` and its metrics are in
        the result's ``evaluate_metrics_serverapp``.
    on_fit_config_fn, on_evaluate_config_fn : Callable[[int], dict], optional
        Return the config for a round's clients.
    checkpoint_dir, resume, reopen
        As for :meth:`CurvatureStrategy.start`.
    **options
        ``fraction_fit``, ``fraction_evaluate``, ``min_fit_clients``,
        ``min_evaluate_clients``, ``min_available_clients``; and `strategy`'s own. The
        metrics of clients are averaged, weighted by their numbers of examples.

    Raises
    ------
    ConfigurationError
        If it is not a strategy of this library, or is ``TCT``, whose model is none of
        the network's arrays; or if a setting has no counterpart.
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
    if issubclass(strategy, TCT):
        raise ConfigurationError(
            "as_legacy with TCT: its second stage fits another model, whose arrays are "
            "in no list of the network's. Call TCT().start(...) in an @app.main, and "
            "score its TCTModel"
        )
    keywords = {OLDER_NAMES.get(name, name): value for name, value in options.items()}
    kind = type(strategy.__name__, (_Older, strategy), {"__doc__": strategy.__doc__})
    made: _Older = kind(**keywords)
    model, names = copy.deepcopy(model), names_of(model, order)
    if initial_parameters is not None:
        # Flower's older `Parameters` have a list of serialised arrays.
        arrays = [
            np.load(BytesIO(array), allow_pickle=False)
            if isinstance(array, bytes)
            else array
            for array in getattr(initial_parameters, "tensors", initial_parameters)
        ]
        tensors = from_list(model, names, arrays, "initial_parameters")
        model.load_state_dict(tensors, strict=False)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        assert evaluate_fn is not None
        scored = copy.deepcopy(model)
        scored.load_state_dict(arrays_to_tensors(arrays), strict=False)
        scores = evaluate_fn(server_round, to_list(scored, names), {})
        if scores is None:
            return None
        metrics = checked_metrics(scores[1], "evaluate_fn")
        return MetricRecord({**metrics, "loss": float(scores[0])})

    start = {"checkpoint_dir": checkpoint_dir, "resume": resume, "reopen": reopen}
    made.older_model = model
    scores = {} if evaluate_fn is None else {"evaluate_fn": evaluate}
    made.older_options = start | scores
    made.on_fit_config_fn = on_fit_config_fn
    made.on_evaluate_config_fn = on_evaluate_config_fn
    return made


def _joined(
    config: ConfigRecord, config_fn: ConfigFn | None, server_round: int
) -> ConfigRecord:
    return ConfigRecord({**config, **(config_fn(server_round) if config_fn else {})})


class History:
    """The result of an older server: losses and metrics by round.

    Parameters
    ----------
    result : Result
        The result of a strategy.

    Examples
    --------
    >>> result = Result(evaluate_metrics_serverapp={1: MetricRecord({"loss": 0.5})})
    >>> History(result).losses_centralized
    [(1, 0.5)]
    """

    def __init__(self, result: Result) -> None:
        self.metrics_distributed_fit = _by_name(result.train_metrics_clientapp)
        self.metrics_distributed = _by_name(result.evaluate_metrics_clientapp)
        self.metrics_centralized = _by_name(result.evaluate_metrics_serverapp)
        self.losses_distributed = self.metrics_distributed.pop("loss", [])
        self.losses_centralized = self.metrics_centralized.pop("loss", [])


def _by_name(rounds: Mapping[int, MetricRecord]) -> dict[str, list[tuple[int, Any]]]:
    metrics: dict[str, list[tuple[int, Any]]] = {}
    for server_round, record in rounds.items():
        for name, value in record.items():
            metrics.setdefault(name, []).append((server_round, value))
    return metrics


class Server:
    """A base class in place of Flower's older ``Server``; it calls ``start``.

    Parameters
    ----------
    client_manager : ClientManager, optional
        Not used: this library's strategies choose clients by seed and round.
    strategy : CurvatureStrategy
        A strategy from :func:`as_legacy`.

    Attributes
    ----------
    grid : Grid | None
        The grid of clients; :func:`server_app` sets it.
    result : CurvatureResult | None
        What the strategy returned.
    """

    def __init__(self, *, client_manager: Any = None, strategy: Any = None) -> None:
        self.strategy = strategy
        self.grid: Grid | None = None
        self.result: CurvatureResult | None = None

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        """Run the federation; return its history and the seconds that it took.

        Raises
        ------
        ConfigurationError
            If the strategy is not from :func:`as_legacy`, or the app is not from
            :func:`server_app`.
        """
        if not isinstance(self.strategy, _Older) or self.grid is None:
            raise ConfigurationError(
                f"{type(self.strategy).__name__} must be from as_legacy(FedFish, "
                "model=...), and the app from server_app(server_fn)"
            )
        began, options = time.monotonic(), dict(self.strategy.older_options)
        if timeout is not None:
            options["timeout"] = timeout
        arrays = ArrayRecord(shared_state(self.strategy.older_model))
        self.result = self.strategy.start(self.grid, arrays, num_rounds, **options)
        return History(self.result), time.monotonic() - began


def server_app(server_fn: Callable[[Context], Any]) -> ServerApp:
    """Return an app for a `server_fn`, in place of ``ServerApp(server_fn=server_fn)``.

    Parameters
    ----------
    server_fn : Callable[[Context], ServerAppComponents]
        Yours, whose strategy :func:`as_legacy` made. A ``server`` of your own derives
        from :class:`flwr_fisher.legacy.Server`.

    Examples
    --------
    ::

        app = server_app(server_fn)
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        components = server_fn(context)
        server, config = components.server, components.config
        if server is None:
            server = Server(strategy=components.strategy)
        elif not isinstance(server, Server):
            raise ConfigurationError(
                f"{type(server).__name__} must derive from flwr_fisher.legacy.Server"
            )
        server.grid = grid
        rounds = getattr(config, "num_rounds", 1)
        timeout = getattr(config, "round_timeout", None)
        history, seconds = server.fit(num_rounds=rounds, timeout=timeout)
        logger.info("Run finished %s round(s) in %.2fs", rounds, seconds)
        for name, values in vars(history).items():
            logger.info("\t%s: %s", name.replace("_", " "), values)

    return app
