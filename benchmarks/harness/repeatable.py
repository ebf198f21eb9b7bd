"""Flower's own strategies, on this library's cohorts."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_fisher.errors import ConfigurationError, check_whole
from flwr_fisher.randomness import seed_of_clients
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.wire import named_options

_TIMEOUT = 3600.0


class Repeatable(Strategy):
    """One of Flower's strategies, so that runs of it repeat and compare.

    Flower samples nodes, whose ids differ in every run, by the global ``random``, and
    adds replies up as they arrive. Here the wrapped strategy says how many clients to
    ask and what; who is asked is a function of (`seed`, round), as for
    :class:`CurvatureStrategy` of the same seed and fraction, replies come in the
    clients' order, and ``fisher.seed`` joins their config.

    Parameters
    ----------
    strategy : Strategy
        Flower's ``FedAvg``, or any that asks the same of all clients of a round.
    seed : int, default 0
        Determines sampling, and with the round and the partition a client's randomness.

    Raises
    ------
    ConfigurationError
        If it is no strategy, or the seed no integer.

    Examples
    --------
    ::

        strategy = Repeatable(FedProx(fraction_train=0.4, proximal_mu=0.1), seed=3)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=50)
    """

    def __init__(self, strategy: Strategy, *, seed: int = 0) -> None:
        if not isinstance(strategy, Strategy):
            raise ConfigurationError(
                "strategy must be an instance of a Flower Strategy, such as FedAvg(), "
                f"not {strategy!r}"
            )
        check_whole("seed", seed)
        self.strategy, self.seed = strategy, seed
        self.cohort = Cohort(seed)

    def summary(self) -> None:
        """Log the strategy's configuration."""
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the strategy make its messages; choose who gets them."""
        made = self.unaddressed(server_round, arrays, config, grid)
        return self._addressed(list(made), server_round, "train", grid)

    def unaddressed(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the strategy make its messages, to whom it likes."""
        seed = named_options({"seed": seed_of_clients(self.seed)})
        seeded = ConfigRecord({**config, **seed})
        return self.strategy.configure_train(server_round, arrays, seeded, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Have the strategy aggregate the replies, put in order."""
        return self.strategy.aggregate_train(server_round, self._ordered(replies))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the strategy make its messages; choose who gets them."""
        seed = named_options({"seed": seed_of_clients(self.seed)})
        seeded = ConfigRecord({**config, **seed})
        made = self.strategy.configure_evaluate(server_round, arrays, seeded, grid)
        return self._addressed(list(made), server_round, "evaluate", grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Have the strategy aggregate the replies, put in order."""
        return self.strategy.aggregate_evaluate(server_round, self._ordered(replies))

    def _addressed(
        self, made: list[Message], server_round: int, purpose: str, grid: Grid
    ) -> list[Message]:
        if not made:
            return []
        nodes = self.cohort.sample(
            grid,
            fraction=0.0,
            minimum=len(made),
            available=len(made),
            server_round=server_round,
            purpose=purpose,
            timeout=_TIMEOUT,
        )
        kind, group = made[0].metadata.message_type, str(server_round)
        pairs = zip(made, nodes, strict=True)
        return [Message(m.content, node, kind, group_id=group) for m, node in pairs]

    def _ordered(self, replies: Iterable[Message]) -> list[Message]:
        return sorted(
            replies, key=lambda reply: self.cohort.order(reply.metadata.src_node_id)
        )
