"""Flower's hooks of a strategy: which are called, and a round in its own loop."""

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.log_lines import logger
from flwr_fisher.server.exchange import Exchange, Groups, ServerState, check_groups
from flwr_fisher.server.journal import Journal
from flwr_fisher.server.mailbox import Requested
from flwr_fisher.server.round import ExchangeRun, Strategy, with_secure_sums
from flwr_fisher.wire import tensors_to_arrays


def initial_groups_of(strategy: Strategy) -> Groups:
    """Return the groups of a new run's state, after a check."""
    groups = strategy.initial_groups()
    check_groups(groups, f"{type(strategy).__name__}.initial_groups")
    return groups


def check_hooks(strategy: type, own: type) -> None:
    """Raise an error for a user's hooks that only Flower's loop, or nobody, would call.

    The user's class may have other bases beside `own`, the base of this library's.

    Raises
    ------
    ConfigurationError
        With the hooks that `start` calls, or the order of the bases.
    """
    name, order = strategy.__name__, strategy.__mro__
    for base in order:
        if issubclass(own, base) or base.__module__.startswith("flwr_fisher."):
            continue
        for hook in vars(base).keys() & {"configure_train", "aggregate_train"}:
            raise ConfigurationError(
                f"start() does not call {base.__name__}.{hook}: for a config of each "
                "round, such as its lr, override round_config(); to keep each round's "
                "model, pass start(callbacks=...); for another step, override "
                "exchanges() (the documentation's \"A method of your own, in your "
                "app\"). Flower's own loop calls it: Strategy.start(strategy, ...), of "
                "flwr.serverapp.strategy"
            )
        hidden = order.index(base) > order.index(own)
        if hidden and "configure_evaluate" in vars(base):
            raise ConfigurationError(
                f"{base.__name__}.configure_evaluate is never called, since {name} has "
                f"this library's in front of it: name {base.__name__} first among the "
                f"bases of {name}"
            )


class HookedRounds:
    """The rounds of other loops than a strategy's ``start``, with one exchange each."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._state: ServerState | None = None  # after the last round
        self._last_round = 0
        self._under_way: ExchangeRun[Any] | None = None
        self._requested = Requested()

    def configure(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Sample clients and return their messages, without changing `config`."""
        strategy = self.strategy
        if strategy.fraction_train == 0.0:
            return []
        if server_round <= self._last_round:  # another run, with the same strategy
            self._state, self._last_round = None, 0
        last = self._state
        exchange = self._only_exchange(server_round)
        groups = initial_groups_of(strategy) if last is None else last.groups
        state = ServerState.first(arrays, groups)
        strategy.check(state)
        journal = Journal(None).exchange_journal(server_round, 1)
        self._under_way = ExchangeRun(strategy, exchange, state, config, grid, journal)
        _, messages = self._under_way.open()
        self._requested = Requested(messages)
        return messages

    def aggregate(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies to :meth:`configure`'s messages; take the step."""
        if self.strategy.fraction_train == 0.0:
            return None, None
        self._only_exchange(server_round)
        under_way, self._under_way = self._under_way, None
        if under_way is None or under_way.server_round != server_round:
            raise ConfigurationError(
                f"call configure_train of round {server_round} before its "
                "aggregate_train"
            )
        for message in replies:
            under_way.door.take(self._requested.reply(message))
        step, _, metrics = under_way.step()
        state = self._state = step.state
        self._last_round = server_round
        if norms := self.strategy.norms_to_refresh(
            under_way.state.params, state.params
        ):
            logger.warning(
                "norm statistics: %d batch norms keep the mean of the clients' "
                "statistics, because Flower's own loop has one request a round. Use "
                "this library's `start`, or merge.refresh_norms(model, loader)",
                len(norms),
            )
        every = MetricRecord({**metrics, **step.metrics})
        return tensors_to_arrays(state.params), every

    def _only_exchange(self, server_round: int) -> Exchange[Any]:
        strategy, every = self.strategy, self.strategy.exchanges(server_round)
        exchange, *others = with_secure_sums(strategy, every, f"{server_round}")
        if others:
            raise ConfigurationError(
                f"a round of {type(strategy).__name__} has {1 + len(others)} "
                "exchanges, but configure_train and aggregate_train can do only one: "
                "use this library's `start`"
            )
        return exchange
