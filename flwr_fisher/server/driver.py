"""The driver of a run's rounds: it trains, evaluates, saves, and calls callbacks."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from flwr_fisher.callbacks import Callback
from flwr_fisher.errors import ConfigurationError, RoundError, WireError, listed
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params
from flwr_fisher.server.door import TRAIN, Door, comparable
from flwr_fisher.server.exchange import (
    Exchange,
    ServerState,
    Step,
    Uploads,
    metrics_from,
    sessions,
)
from flwr_fisher.server.journal import ExchangeJournal
from flwr_fisher.server.mailbox import NodeReply, collect
from flwr_fisher.server.round import ExchangeRun, Strategy, door_of, requests
from flwr_fisher.server.run import Run
from flwr_fisher.server.waiting import Waiting
from flwr_fisher.wire import NUM_EXAMPLES, Payload, named_options

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]  # the server's scores
_LONGEST_WAIT = 60.0  # seconds until enough clients are connected to evaluate


class Driver:
    """Drives a strategy's rounds on a grid, and stores them in a run."""

    def __init__(self, strategy: Strategy, grid: Grid, run: Run) -> None:
        self.strategy, self.cohort = strategy, strategy.cohort
        self.grid, self.run = grid, run
        self.server_round = run.server_round  # the current round
        # The exchange whose late replies are kept, because it can be opened again, and
        # what makes a door for them. Earlier exchanges hold no model any more.
        self._open_again: tuple[ExchangeJournal, Callable[[], Door[Any]]] | None = None

    def rounds(
        self,
        num_rounds: int,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        callbacks: Sequence[Callback],
    ) -> None:
        """Do the remaining rounds, until `num_rounds` or until a callback ends the run.

        Raises
        ------
        RoundError
            If a round fails and must not be skipped.
        CallbackError
            If a callback failed. Its round is finished then.
        """
        run, strategy = self.run, self.strategy
        if evaluate_fn and run.server_round == 0:
            self._evaluate_here(0, evaluate_fn)
            run.finish(0)
        if run.id is not None:
            named = named_options({"run": run.id})
            train_config = ConfigRecord({**train_config, **named})
        ended = bool(run.server_round) and run.run_callbacks(callbacks)
        if run.server_round and run.server_round >= num_rounds:
            logger.info(
                "All rounds are finished. The result has the model, but no uploads and "
                "no details: reopen=True merges the last uploads again"
            )
        for server_round in range(run.server_round + 1, num_rounds + 1):
            if ended:
                break
            logger.info("")
            logger.info("[ROUND %s/%s]", server_round, num_rounds)
            self.server_round = server_round
            self._train(train_config)
            config = ConfigRecord({**evaluate_config})
            config = strategy.evaluation_config(server_round, config)
            config = _checked("evaluation_config", config, server_round)
            metrics = evaluate(strategy, server_round, run.arrays(), config, self.grid)
            run.client_evaluated(server_round, metrics)
            if evaluate_fn:
                self._evaluate_here(server_round, evaluate_fn)
            run.finish(server_round, self.cohort.absences())
            ended = run.run_callbacks(callbacks)

    def _train(self, train_config: ConfigRecord) -> None:
        """Do the current round's exchanges, or skip the round if they fail."""
        strategy, server_round = self.strategy, self.server_round
        before = self.run.state
        try:
            config = ConfigRecord({**train_config})  # the caller's stays as it is
            config = strategy.round_config(server_round, config)
            config = _checked("round_config", config, server_round)
            if strategy.fraction_train > 0.0:  # or else FedAvg only evaluates
                self._do_exchanges(config)
            self.run.has_merged = True
        except BaseException as error:  # also of the user's own functions, and Ctrl+C
            self.run.undo_round(before)
            skip = strategy.waiting.on_failed_round == "skip"
            skip = skip and isinstance(error, RoundError)
            if not (skip and strategy.may_skip(server_round)):
                raise
            self.run.skip_round(server_round, error)

    def _evaluate_here(self, server_round: int, evaluate_fn: EvaluateFn) -> None:
        """Evaluate on the server, and note the metrics."""
        returned = evaluate_fn(server_round, self.run.arrays())
        self.run.evaluated(server_round, metrics_from(returned, "evaluate_fn"))

    # --- the exchanges of a round

    def _do_exchanges(self, config: ConfigRecord) -> None:
        """Do the current round's exchanges, and take each one's step.

        Uploads that an interrupted run admitted are read from disk, and the server does
        not request them again.

        Raises
        ------
        RoundError
            If an exchange ends with too few usable replies, and is not optional.
        CheckpointError
            If an upload on disk is of another version of this library.
        """
        run, begin = self.run, self.run.state
        previous: dict[int, float] = {}  # weights of the last exchange's clients
        index = 0  # of the exchange in the journal; secure sums have several for one
        for session in sessions(self._exchanges()):
            before, exchange = run.state, session[0]
            if exchange.prepare is not None:
                # Only now is it known what must be asked, if anything.
                prepared = exchange.prepare(begin, before)
                if prepared is None:
                    continue
                session = [exchange := prepared]
            try:
                for stage in self._stages(session, index):
                    index += 1
                    previous = self._do_exchange(stage, index, config, previous)
            except RoundError as error:
                if not exchange.optional:
                    raise
                run.state = before
                logger.warning(
                    "%s: the model stays that of the step before, because %s",
                    exchange.log_name,
                    error,
                )

    def _exchanges(self) -> Sequence[Exchange[Any]]:
        """Return the strategy's exchanges for the current round.

        Raises
        ------
        ConfigurationError
            If the strategy returned something else than a list of exchanges.
        """
        exchanges: object = self.strategy.exchanges(self.server_round)
        if not isinstance(exchanges, list | tuple) or not all(
            isinstance(exchange, Exchange) for exchange in exchanges
        ):
            raise ConfigurationError(
                f"exchanges() must return a list of Exchange, got {exchanges!r:.80}"
            )
        return exchanges

    def _stages(
        self, session: Sequence[Exchange[Any]], done: int
    ) -> Sequence[Exchange[Any]]:
        """Return the exchanges themselves, or those of their secure sums."""
        strategy = self.strategy
        if strategy.secure is None:
            return session
        seed = f"{strategy.seed}/{self.server_round}/{done}"
        optional = session[0].optional
        weighted_by = NUM_EXAMPLES if optional else strategy.weighted_by_key
        return strategy.secure.secured(session, seed=seed, weighted_by=weighted_by)

    def _do_exchange(
        self,
        exchange: Exchange[Any],
        index: int,
        config: ConfigRecord,
        previous: Mapping[int, float],
    ) -> dict[int, float]:
        """Do one exchange; return the weights of its clients by number."""
        run, server_round = self.run, self.server_round
        if not exchange.optional:  # free uploads before the next ones arrive
            run.forget_uploads()
        journal = run.exchange_journal(server_round, index)
        under_way = ExchangeRun(
            self.strategy, exchange, run.state, config, self.grid, journal, previous
        )
        if not exchange.optional:
            # It must not hold the exchange's uploads, and must not change its sum.
            alone = replace(exchange, additive=None)
            make_door = partial(door_of, self.strategy, alone, run.state, {})
            self._open_again = journal, make_door
        try:
            under_way.gather(partial(self._take_late, journal))
            step, uploads, metrics = under_way.step()
        except RoundError:
            if exchange.optional:  # a resumed run does not try it again
                under_way.close([])
            raise
        under_way.close(uploads)
        run.take_step(server_round, exchange, step, uploads, metrics)
        # Before the policy's limits, which the next exchange has, too.
        return {u.number: u.num_examples for u in under_way.door.admitted}

    def _take_late(self, journal: ExchangeJournal, reply: NodeReply) -> None:
        """Handle a reply that comes after the end of its exchange.

        It is counted. If the exchange can still be opened again, which no secure sum
        can, its journal admits the reply, so that it counts then.
        """
        if reply.from_superlink:
            return
        self.cohort.replied(reply.node)
        self.run.count_late(self.server_round)
        identity, make_door = self.cohort.identity(reply.node), None
        if self._open_again is not None and self._open_again[0] is journal:
            current = journal.server_round == self.server_round
            # An admitted reply is not replaced.
            keep = current and journal.on_disk and not journal.has(identity)
            if keep and self.strategy.secure is None:
                make_door = self._open_again[1]
        logger.warning(
            "%s: the reply of %s to round %s came too late for it%s",
            TRAIN,
            self.cohort.name(reply.node),
            journal.server_round,
            "; keeping it, for reopen=True" if make_door else "",
        )
        if make_door and (records := make_door().take(reply)) is not None:
            journal.save(identity, *records)


def _checked(name: str, returned: object, server_round: int) -> ConfigRecord:
    """Return the config that a strategy's method returned.

    Raises
    ------
    ConfigurationError
        If it is something else.
    """
    if not isinstance(returned, Mapping):
        raise ConfigurationError(
            f"{name}() must return the config of round {server_round}, got "
            f"{returned!r:.80}: return ConfigRecord({{**config, 'lr': 0.1}})"
        )
    return ConfigRecord({**returned})


# --- the clients' evaluation


def requests_to_evaluate(
    strategy: Strategy,
    server_round: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    grid: Grid,
) -> list[Message]:
    """Sample clients for evaluation, and return their messages."""
    if strategy.fraction_evaluate == 0.0:
        return []
    try:
        nodes, _ = strategy.cohort.sample(
            grid,
            fraction=strategy.fraction_evaluate,
            minimum=strategy.min_evaluate_nodes,
            available=strategy.min_available_nodes,
            server_round=server_round,
            purpose="evaluate",
            timeout=min(strategy.timeout, _LONGEST_WAIT),
            waiting=Waiting(),
        )
    except RoundError as error:  # the training does not depend on it
        logger.warning("configure_evaluate: no client evaluates: %s", error)
        return []
    logger.info("configure_evaluate: Sampled %s nodes", len(nodes))
    kind = MessageType.EVALUATE
    return requests(strategy, server_round, lambda node: arrays, config, nodes, kind)


def evaluate(
    strategy: Strategy,
    server_round: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    grid: Grid,
) -> MetricRecord | None:
    """Let clients evaluate parameters, as the strategy configures it.

    A client without data to evaluate on says so, and the server does not ask it again.
    """
    cohort, timeout = strategy.cohort, strategy.timeout
    config = ConfigRecord({**config, **named_options({"may-abstain": True})})
    messages = [
        message
        for message in strategy.configure_evaluate(server_round, arrays, config, grid)
        if message.metadata.dst_node_id not in cohort.abstaining
    ]
    due = {message.metadata.dst_node_id for message in messages}
    num_asked, abstaining = len(due), set[int]()
    door = EvaluationDoor(strategy)

    def enough() -> bool:
        wanted = strategy.waiting.enough(num_asked - len(abstaining))
        return len(door.admitted) >= max(wanted, 1)

    for reply in collect(cohort.mailbox(grid), messages, timeout, enough=enough):
        if reply.from_superlink and not reply.nothing_will_come:
            continue  # the time is up
        due.discard(reply.node)
        if _abstains(reply.message):
            abstaining.add(reply.node)
        else:
            door.take(reply)
    if abstaining:
        cohort.abstaining |= abstaining
        names = listed(map(cohort.name, abstaining))
        logger.info("configure_evaluate: without data for evaluation: %s", names)
    if enough():
        door.mark_missing(due, "not waited for, since enough have replied")
    else:
        door.mark_missing(due, f"none within {timeout:.0f} s")
        cohort.missed(due, server_round)
    door.log_missing()
    replies = door.replies()
    metrics = strategy.aggregate_evaluate(server_round, replies) if replies else None
    return metrics_from(metrics, "evaluate_metrics_aggr_fn")


def _abstains(message: Message) -> bool:
    """Return whether a client says that it has no data for evaluation."""
    if not message.has_content() or len(message.content) != 1:
        return False
    records = list(message.content.metric_records.values())
    return len(records) == 1 and dict(records[0]) == {NUM_EXAMPLES: 0}


class Scores(Payload):
    """The empty upload of an evaluate reply, which has only metrics."""

    def layout(self) -> tuple[str, ...]:
        """Return an empty layout, equal for all clients."""
        return ()

    def to_arrays(self) -> ArrayRecord:
        """Return no arrays."""
        return ArrayRecord()


def _no_arrays(record: ArrayRecord, like: Params) -> Scores:
    return Scores()


def _no_step(state: ServerState, uploads: Uploads[Scores]) -> Step:
    return Step(state)


class EvaluationDoor(Door[Scores]):
    """Checks evaluate replies, which have only metrics."""

    def __init__(self, strategy: Strategy) -> None:
        policy = strategy.policy
        if not policy.limit_scores:
            policy = replace(policy, max_weight=math.inf)
        exchange = Exchange({}, _no_arrays, _no_step, optional=True)
        key, none = strategy.weighted_by_key, ServerState({})
        super().__init__(strategy.cohort, exchange, none, policy, key, {})
        self.stage, self.quiet = "aggregate_evaluate", True
        self._messages: dict[int, Message] = {}
        self._scores: dict[str, MetricRecord] = {}  # the metrics that most report

    def _arrays(self, message: Message) -> ArrayRecord:
        return ArrayRecord()

    def take(self, reply: NodeReply) -> tuple[ArrayRecord, MetricRecord] | None:
        """Admit or reject a reply, and keep its message."""
        self._messages[reply.node] = reply.message
        return super().take(reply)

    def _withdraw_mismatched(self) -> None:
        """Reject the replies without the metrics that most clients report."""
        reported = {upload.client: upload.metrics for upload in self.admitted}
        self._scores, mismatched = comparable(reported)
        for upload in [u for u in self.admitted if u.client in mismatched]:
            error = WireError(f"it {mismatched[upload.client]}", field="metrics")
            self.withdraw(upload, error)

    def replies(self) -> list[Message]:
        """Return the replies for a strategy to aggregate, in the clients' order."""
        messages = []
        for upload in self.uploads(needed=0):
            message = copy.copy(self._messages[upload.node_id])
            weight = {self.weighted_by: upload.num_examples}
            record = MetricRecord({**self._scores[upload.client], **weight})
            message.content = RecordDict({"metrics": record})
            messages.append(message)
        return messages
