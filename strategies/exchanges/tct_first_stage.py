"""TCT's first stage: any strategy's rounds, within TCT's run."""

from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.driver import Driver
from flwr_fisher.server.exchange import Groups, ServerState
from flwr_fisher.server.flower_rounds import FlowerRounds
from flwr_fisher.server.policy import Policy
from flwr_fisher.server.waiting import Waiting
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.baselines.repeatable import Repeatable

_SCOPE = "stage1"  # where its tensors are in the run's state


class FirstStage:
    """Does a strategy's rounds: this library's by the driver, Flower's by its hooks.

    Parameters
    ----------
    strategy : Strategy
        Flower's, or one of this library's whose rounds have one exchange.
    cohort : Cohort
        TCT's, which knows the clients' names.
    weighted_by_key : str
        A metric that every reply has.
    policy : Policy
        How far a single client's say may go.
    waiting : Waiting
        How long a round waits, and for how many.

    Raises
    ------
    ConfigurationError
        If it is no strategy, a round of it has several exchanges, or it samples its
        own clients where there is a collection window.
    """

    def __init__(
        self,
        strategy: Strategy,
        cohort: Cohort,
        weighted_by_key: str,
        policy: Policy,
        waiting: Waiting,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise ConfigurationError(
                "stage1 must be an instance of a Flower Strategy, such as FedProx(), "
                f"not {strategy!r}"
            )
        inner = strategy.strategy if isinstance(strategy, Repeatable) else strategy
        self.name = type(inner).__name__
        if isinstance(inner, CurvatureStrategy) and len(inner.exchanges(1)) > 1:
            raise ConfigurationError(
                f"a round of {self.name} has more than one exchange, and a round of "
                "stage1 has one: take another strategy, such as FedAvg, FedProx or "
                "Scaffold"
            )
        self._own = strategy if isinstance(strategy, CurvatureStrategy) else None
        self._weighted_by_key, self._policy = weighted_by_key, policy
        self._waiting = waiting
        if self._own is None and waiting.window is not None:
            raise ConfigurationError(
                f"stage1={self.name} samples its own clients, and a window asks "
                "whoever comes: take one of this library's, such as Scaffold, or no "
                "window"
            )
        unaddressed = (
            strategy.unaddressed
            if isinstance(strategy, Repeatable)
            else strategy.configure_train
        )
        self._hooks = FlowerRounds(
            strategy, inner, unaddressed, cohort, weighted_by_key, policy, waiting
        )

    @property
    def is_flowers(self) -> bool:
        """Whether the strategy is Flower's, which works with any client."""
        return self._own is None

    def check_secure(self) -> None:
        """Refuse a strategy whose uploads the server sees.

        Raises
        ------
        ConfigurationError
            Naming it.
        """
        if self._own is None or self._own.secure is None:
            raise ConfigurationError(
                f"stage1={self.name} has its uploads seen by the server, and secure= "
                "is for both stages: take SecureFedAvg(), or another strategy of this "
                "library's with secure=SecureSums()"
            )
        self._own.check_secure()

    def initial_groups(self) -> Groups:
        """Return what a new run's state holds of it."""
        own = {} if self._own is None else self._own.initial_groups()
        return ServerState({}).with_inner(_SCOPE, ServerState({}, own)).groups

    def options(self) -> dict[str, Any]:
        """Return what a resumed run must have in common."""
        own = {} if self._own is None else self._own.options()
        return {"stage1": self.name, "stage1_options": own}

    def train(
        self, driver: Driver, server_round: int, config: ConfigRecord
    ) -> Mapping[str, MetricRecord]:
        """Do a round; return the clients' metrics by name."""
        if self._own is None:
            metrics = self._hooks.train(driver, server_round, config)
        else:
            self._own.check(driver.run.state.inner(_SCOPE))
            uploads = driver.train(self._own, server_round, config, scope=_SCOPE)
            metrics = {upload.client: upload.metrics for upload in uploads}
        driver.run.add_metrics(server_round, {"stage": 1})
        return metrics

    def absences(self) -> dict[str, Any]:
        """Return which clients of a strategy of this library's sit out."""
        return {} if self._own is None else self._own.absences()

    def recall_absences(self, record: Mapping[str, Any]) -> None:
        """Take up what :meth:`absences` returned."""
        if self._own is not None:
            self._own.recall_absences(record)

    def evaluate(self, driver: Driver, server_round: int, config: ConfigRecord) -> None:
        """Have clients evaluate as the strategy does."""
        if self._own is None:
            self._hooks.evaluate(driver, server_round, config)
            return
        self._own.timeout = driver.timeout
        driver.evaluate(
            self._own,
            self._own.cohort,
            server_round,
            config,
            self._weighted_by_key,
            self._policy,
            self._waiting,
        )
