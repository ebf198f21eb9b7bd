"""The protocol that all strategies of this library share: sample, check, step, save."""

import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message_type import MessageType
from flwr.serverapp import Grid
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from flwr_fisher.errors import (
    CheckpointError,
    ConfigurationError,
    RoundError,
    WireError,
    check_range,
    check_whole,
)
from flwr_fisher.measures import EvaluateFn, MeasuredGrid
from flwr_fisher.strategies.cohort import Cohort
from flwr_fisher.strategies.replies import MetricsAggregator, Replies
from flwr_fisher.strategies.run import Run
from flwr_fisher.strategies.state import (
    CurvatureResult,
    Exchange,
    ServerState,
    Step,
    Upload,
)
from flwr_fisher.wire import SERVER, arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.nodes import collect

__all__ = ["CurvatureStrategy", "EvaluateFn"]

logger = logging.getLogger("flwr")


class CurvatureStrategy(FedAvg):
    """Base of this library's strategies: FedAvg's habits, another aggregation.

    A subclass says what a round asks of clients (:meth:`exchanges`) and what it makes
    of their uploads (:meth:`step`). The base samples clients, checks every reply (a bad
    one is left out by name; the round fails only below `min_train_nodes`), and keeps
    finished rounds and accepted uploads on disk.

    Clients are sampled, and uploads ordered, by partition id, a function of (`seed`,
    round): node ids are random in every run. The same seed and thread count give the
    same model, bit for bit, on a CPU.

    Parameters
    ----------
    fraction_train, fraction_evaluate : float, default 1.0
        Fraction of the connected nodes to sample.
    min_train_nodes, min_evaluate_nodes, min_available_nodes : int, default 2
        As in ``FedAvg``. `min_train_nodes` is also how many usable replies a round
        needs.
    weighted_by_key : str, default "num-examples"
        The metric that weights clients.
    arrayrecord_key, configrecord_key : str
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : Callable, optional
        As in ``FedAvg``.
    seed : int, default 0
        Determines sampling, and with the round and the partition a client's randomness.

    Raises
    ------
    ConfigurationError
        If an argument is out of range.
    """

    def __init__(
        self,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsAggregator | None = None,
        evaluate_metrics_aggr_fn: MetricsAggregator | None = None,
        seed: int = 0,
    ) -> None:
        check_range("fraction_train", fraction_train, 0, 1)
        check_range("fraction_evaluate", fraction_evaluate, 0, 1)
        check_range("min_train_nodes", min_train_nodes, 1)
        check_range("min_evaluate_nodes", min_evaluate_nodes, 0)
        check_range("min_available_nodes", min_available_nodes, 1)
        super().__init__(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
            weighted_by_key=weighted_by_key,
            arrayrecord_key=arrayrecord_key,
            configrecord_key=configrecord_key,
            train_metrics_aggr_fn=train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn=evaluate_metrics_aggr_fn,
        )
        check_whole("seed", seed)
        self.seed = seed
        self._cohort = Cohort(seed)
        self._state = ServerState({})
        self._timeout = 3600.0

    @abstractmethod
    def exchanges(self, server_round: int) -> Sequence[Exchange]:
        """Return what a round asks of its clients, one request after another."""

    @abstractmethod
    def step(self, state: ServerState, uploads: Sequence[Upload]) -> Step:
        """Make the next state of an exchange's uploads, which are at least one."""

    def check(self, state: ServerState) -> None:
        """Refuse a model that this strategy cannot work with, before any client trains.

        Raises
        ------
        ConfigurationError
            Naming the argument, and the way out.
        """

    def check_rounds(self, num_rounds: int) -> None:
        """Refuse a number of rounds that this strategy cannot work with.

        Raises
        ------
        ConfigurationError
            Saying which it can.
        """

    def extra(self) -> dict[str, Tensor]:
        """Return what a new run's state holds beside parameters; by default nothing."""
        return {}

    def options(self) -> dict[str, Any]:
        """Return what a resumed run must have in common with the one it continues."""
        return {
            "strategy": type(self).__name__,
            "seed": self.seed,
            "fraction_train": self.fraction_train,
            "min_train_nodes": self.min_train_nodes,
            "weighted_by_key": self.weighted_by_key,
        }

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 1,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        *,
        checkpoint_dir: str | Path | None = None,
        resume: bool = False,
    ) -> CurvatureResult:
        """Run the federation; Flower's ``start``, and runs that survive a crash.

        Parameters
        ----------
        grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config
            As in Flower's ``Strategy.start``; one round by default.
        evaluate_fn : Callable[[int, ArrayRecord], MetricRecord | None], optional
            As there: called before the first round and after each.
        checkpoint_dir : str | Path, optional
            Keeps every finished round, and the running round's uploads as they arrive.
        resume : bool, default False
            Go on where `checkpoint_dir` stands: finished rounds are not repeated, nor
            are clients asked again whose upload of the running round is there. The
            result equals the uninterrupted run's, bit for bit.

        Returns
        -------
        CurvatureResult
            Flower's ``Result`` with the last round's uploads and details.

        Raises
        ------
        RoundError
            If a round ends with fewer than `min_train_nodes` usable replies.
        CheckpointError
            If `checkpoint_dir` holds another run, or a damaged file.
        """
        self.check_rounds(num_rounds)
        logger.info("Starting %s strategy:", type(self).__name__)
        self.summary()
        self._timeout, began = timeout, time.monotonic()
        run = Run.begin(
            initial_arrays, self.options(), checkpoint_dir, resume, self.extra()
        )
        self.check(run.state)
        if evaluate_fn and run.server_round == 0:
            run.evaluated(0, evaluate_fn(0, initial_arrays))
        for server_round in range(run.server_round + 1, num_rounds + 1):
            logger.info("")
            logger.info("[ROUND %s/%s]", server_round, num_rounds)
            self._train(grid, run, server_round, train_config or ConfigRecord())
            self._evaluate(grid, run, server_round, evaluate_config or ConfigRecord())
            if evaluate_fn:
                run.evaluated(server_round, evaluate_fn(server_round, run.arrays()))
            run.finish(server_round)
        logger.info("")
        logger.info("Strategy execution finished in %.2fs", time.monotonic() - began)
        return run.result()

    def _train(
        self, grid: Grid, run: Run, server_round: int, config: ConfigRecord
    ) -> None:
        if self.fraction_train == 0.0:  # FedAvg's way to evaluate without training
            return
        for index, exchange in enumerate(self.exchanges(server_round), start=1):
            place = self._place(server_round, index)
            nodes = self._sample_to_train(grid, server_round)
            replies = self._replies(exchange, run.state, expected=len(nodes))
            asked = self._restore(run, place, nodes, replies)
            # What the next exchange's clients answered hangs on who answered this one.
            if run.has_uploads(self._place(server_round, index + 1)):
                asked = []
            arrays = _joined(exchange, run.state)
            messages = self._messages(
                server_round, arrays, exchange.configure(config), asked
            )
            for message in collect(grid, messages, self._timeout):
                records = replies.take(message)
                if records is not None:
                    client = self._cohort.name(message.metadata.src_node_id)
                    run.save_upload(place, client, *records)
            uploads = replies.settle(self.min_train_nodes)
            if isinstance(grid, MeasuredGrid):
                grid.aggregated({u.node_id: u.metrics for u in uploads})
            step = self._step(exchange, run.state, uploads)
            metrics = replies.metrics(self.train_metrics_aggr_fn)
            run.stepped(server_round, step, uploads, metrics)

    @staticmethod
    def _place(server_round: int, exchange: int) -> str:
        return f"uploads-{server_round:04d}/exchange-{exchange}"

    def _replies(
        self, exchange: Exchange, state: ServerState, expected: int
    ) -> Replies:
        key = self.weighted_by_key
        return Replies(self._cohort, exchange.read, state.params, key, expected)

    def _restore(
        self, run: Run, place: str, nodes: list[int], replies: Replies
    ) -> list[int]:
        """Take uploads that an interrupted run left; return who is still to ask."""
        by_name = {self._cohort.name(node): node for node in nodes}
        for client, arrays, metrics in run.load_uploads(place):
            if (node := by_name.pop(client, None)) is None:
                continue
            try:
                replies.accept(node, arrays, metrics)
            except WireError as error:
                raise CheckpointError(
                    f"the upload kept as {place}/{client} is damaged: {error}; without "
                    "that file the client is asked again"
                ) from error
        return sorted(by_name.values(), key=self._cohort.order)

    def _step(
        self, exchange: Exchange, state: ServerState, uploads: Sequence[Upload]
    ) -> Step:
        """Take the step, and see that it led somewhere."""
        step = (exchange.step or self.step)(state, uploads)
        for name, value in step.state.params.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise RoundError(
                    f"the step made '{name}' NaN or infinite out of finite uploads; "
                    "the round is not finished, and its uploads are kept where there "
                    "is a checkpoint_dir"
                )
        return step

    def _evaluate(
        self, grid: Grid, run: Run, server_round: int, config: ConfigRecord
    ) -> None:
        messages = self.configure_evaluate(server_round, run.arrays(), config, grid)
        replies = list(collect(grid, messages, self._timeout))
        run.client_evaluated(
            server_round, self.aggregate_evaluate(server_round, replies)
        )

    def _sample(
        self,
        grid: Grid,
        server_round: int,
        purpose: str,
        fraction: float,
        minimum: int,
    ) -> list[int]:
        nodes = self._cohort.sample(
            grid,
            fraction=fraction,
            minimum=minimum,
            available=self.min_available_nodes,
            server_round=server_round,
            purpose=purpose,
            timeout=self._timeout,
        )
        logger.info("configure_%s: Sampled %s nodes", purpose, len(nodes))
        return nodes

    def _sample_to_train(self, grid: Grid, server_round: int) -> list[int]:
        minimum = self.min_train_nodes
        return self._sample(grid, server_round, "train", self.fraction_train, minimum)

    def _messages(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        nodes: Iterable[int],
        message_type: str = MessageType.TRAIN,
    ) -> list[Message]:
        told = ConfigRecord({**config, "server-round": server_round, "seed": self.seed})
        content = RecordDict(
            {self.arrayrecord_key: arrays, self.configrecord_key: told}
        )
        return [
            Message(content, node, message_type, group_id=str(server_round))
            for node in nodes
        ]

    # Flower's own hooks, for loops other than `start`; they know one exchange a round.

    def _only_exchange(self, server_round: int) -> Exchange:
        exchange, *others = self.exchanges(server_round)
        if others:
            raise ConfigurationError(
                f"a round of {type(self).__name__} has {1 + len(others)} exchanges, "
                "and configure_train and aggregate_train know one: use this library's "
                "`start`"
            )
        return exchange

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and make their messages; `config` is left as it is."""
        if self.fraction_train == 0.0:
            return []
        exchange = self._only_exchange(server_round)
        extra = self._state.extra or self.extra()
        self._state = ServerState(arrays_to_tensors(arrays), extra)
        self.check(self._state)
        nodes = self._sample_to_train(grid, server_round)
        joined = _joined(exchange, self._state)
        return self._messages(server_round, joined, exchange.configure(config), nodes)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies to :meth:`configure_train`'s messages and take the step."""
        if self.fraction_train == 0.0:
            return None, None
        replies = list(replies)
        exchange = self._only_exchange(server_round)
        checked = self._replies(exchange, self._state, expected=len(replies))
        for message in replies:
            checked.take(message)
        uploads = checked.settle(self.min_train_nodes)
        step = self._step(exchange, self._state, uploads)
        self._state = step.state
        metrics = {**checked.metrics(self.train_metrics_aggr_fn), **step.metrics}
        return tensors_to_arrays(step.state.params), MetricRecord(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients to evaluate; `config` is left as it is."""
        if self.fraction_evaluate == 0.0:
            return []
        fraction, minimum = self.fraction_evaluate, self.min_evaluate_nodes
        nodes = self._sample(grid, server_round, "evaluate", fraction, minimum)
        kind = MessageType.EVALUATE
        return self._messages(server_round, arrays, config, nodes, kind)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the clients' metrics, in an order that depends on no timing.

        Replies that do not fit each other are worth a warning, not the round.
        """
        ordered = sorted(
            replies, key=lambda reply: self._cohort.order(reply.metadata.src_node_id)
        )
        try:
            return super().aggregate_evaluate(server_round, ordered)
        except InconsistentMessageReplies as error:
            logger.warning("aggregate_evaluate: left out the round: %s", error)
            return None


def _joined(exchange: Exchange, state: ServerState) -> ArrayRecord:
    """Return the parameters' record with what else is sent, under ``server/``."""
    sent = {f"{SERVER}{key}": value for key, value in exchange.send(state).items()}
    return tensors_to_arrays({**exchange.start(state), **sent})
