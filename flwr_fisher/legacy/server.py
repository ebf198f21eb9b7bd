"""An adapter that makes a `server_fn` an app of Flower's Message API."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.legacy.strategy import Older
from flwr_fisher.log_lines import logger
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import CurvatureResult


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

    def __repr__(self) -> str:
        return f"History({vars(self)})"


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
        self._client_manager, self.strategy = client_manager, strategy
        self.grid: Grid | None = None
        self.result: CurvatureResult | None = None

    def client_manager(self) -> Any:
        """Return the client manager."""
        return self._client_manager

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        """Run the federation; return its history and the seconds that it took.

        Raises
        ------
        ConfigurationError
            If the strategy is not from :func:`as_legacy`, or the app is not from
            :func:`server_app`.
        """
        older = getattr(self.strategy, "older", None)
        if not isinstance(older, Older):
            raise ConfigurationError(
                f"{type(self.strategy).__name__} is not from as_legacy: wrap a "
                "strategy of flwr_fisher.strategies, as_legacy(FedFish, model=...), or "
                "keep ServerApp(server_fn=...) for this one"
            )
        if self.grid is None:
            raise ConfigurationError(
                "this Server has no grid: use flwr_fisher.legacy.server_app("
                "server_fn), not ServerApp(server_fn=...)"
            )
        began = time.monotonic()
        options = dict(older.start)
        if timeout is not None:
            options["timeout"] = timeout
        if older.evaluate_fn is not None:
            options["evaluate_fn"] = older.evaluate
        arrays = ArrayRecord(shared_state(older.model))
        result = self.strategy.start(self.grid, arrays, num_rounds, **options)
        self.result = result
        return History(result), time.monotonic() - began


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
        server, config = _server(components), components.config
        server.grid = grid
        rounds = getattr(config, "num_rounds", 1)
        history, seconds = server.fit(
            num_rounds=rounds, timeout=getattr(config, "round_timeout", None)
        )
        logger.info("[SUMMARY]")
        logger.info("Run finished %s round(s) in %.2fs", rounds, seconds)
        for name, values in vars(history).items():
            if values:
                logger.info("\t%s: %s", name.replace("_", " "), values)

    return app


def _server(components: Any) -> Server:
    """Return a server for the components' strategy.

    Raises
    ------
    ConfigurationError
        If it is one of the user's that derives from Flower's.
    """
    server, manager = components.server, components.client_manager
    if isinstance(server, Server):
        made = server
    elif server is None:
        made = Server(client_manager=manager, strategy=components.strategy)
    elif _is_flowers(server):
        made = Server(client_manager=server.client_manager(), strategy=server.strategy)
    else:
        raise ConfigurationError(
            f"{type(server).__name__} derives from Flower's Server, which runs only "
            "older strategies: derive it from flwr_fisher.legacy.Server, or return "
            "ServerAppComponents(strategy=..., config=...)"
        )
    manager = made.client_manager()
    if manager is not None and not _is_flowers(manager):
        logger.warning(
            "Ignoring %s: flwr_fisher's strategies sample clients by seed and round",
            type(manager).__name__,
        )
    return made


def _is_flowers(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "flwr"
