"""The driver of a run's rounds: it trains, evaluates, saves, and calls callbacks."""

import copy
from collections.abc import Callable, Mapping, Sequence
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
from flwr_fisher.errors import ConfigurationError, RoundError, listed, printable
from flwr_fisher.log_lines import logger
from flwr_fisher.server.door import (
    TRAIN,
    LeftOut,
    comparable,
    read_metrics,
    weight_of,
)
from flwr_fisher.server.exchange import Exchange, metrics_from, sessions
from flwr_fisher.server.journal import ExchangeJournal
from flwr_fisher.server.mailbox import NodeReply, collect
from flwr_fisher.server.round import ExchangeRun, Strategy, requests
from flwr_fisher.server.run import Run
from flwr_fisher.server.waiting import Waiting
from flwr_fisher.wire import NUM_EXAMPLES, named_options

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]  # the server's scores
_LONGEST_WAIT = 60.0  # seconds until enough clients are connected to evaluate


class Driver:
    """Drives a strategy's rounds on a grid, and stores them in a run."""

    def __init__(self, strategy: Strategy, grid: Grid, run: Run) -> None:
        self.strategy, self.cohort = strategy, strategy.cohort
        self.grid, self.run = grid, run
        self.server_round = run.server_round  # the current round
        # The exchange whose late replies are kept, because it can be opened again.
        # Earlier exchanges hold no model any more.
        self._last: ExchangeRun[Any] | None = None

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
            self._last = None
        journal = run.exchange_journal(server_round, index)
        under_way = ExchangeRun(
            self.strategy, exchange, run.state, config, self.grid, journal, previous
        )
        try:
            under_way.gather(partial(self._take_late, journal))
            step, uploads, metrics = under_way.step()
        except RoundError:
            if exchange.optional:  # a resumed run does not try it again
                under_way.close([])
            raise
        under_way.close(uploads)
        run.take_step(server_round, exchange, step, uploads, metrics)
        # A secure sum is not opened again: the difference would reveal a client.
        if journal.on_disk and self.strategy.secure is None and not exchange.optional:
            self._last = under_way
        # Before the policy's limits, which the next exchange has, too.
        return {u.number: u.num_examples for u in under_way.door.admitted}

    def _take_late(self, journal: ExchangeJournal, reply: NodeReply) -> None:
        """Handle a reply that comes after the end of its exchange.

        It is counted. If its exchange is the last one, which can be opened again, the
        journal admits the reply, so that it counts then.
        """
        if reply.from_superlink:
            return
        self.cohort.replied(reply.node)
        self.run.count_late(self.server_round)
        last = self._last
        if last is not None and (
            last.journal is not journal
            or journal.has(self.cohort.identity(reply.node))  # it is not replaced
        ):
            last = None
        logger.warning(
            "%s: the reply of %s to round %s came too late for it%s",
            TRAIN,
            self.cohort.name(reply.node),
            journal.server_round,
            "" if last is None else "; keeping it, for reopen=True",
        )
        if last is not None:
            last.keep_late(reply)


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
    left_out = LeftOut("aggregate_evaluate")
    replies: dict[int, Message] = {}
    metrics: dict[int, MetricRecord] = {}

    def enough() -> bool:
        wanted = strategy.waiting.enough(num_asked - len(abstaining))
        return len(metrics) >= max(wanted, 1)

    for reply in collect(cohort.mailbox(grid), messages, timeout, enough=enough):
        node, name = reply.node, cohort.name(reply.node)
        if reply.from_superlink and not reply.nothing_will_come:
            continue  # the time is up
        due.discard(node)
        if reply.nothing_will_come:
            left_out.miss([name], printable(reply.message.error.reason))
            continue
        try:
            scores = read_metrics(reply.message)
            if dict(scores) == {NUM_EXAMPLES: 0}:  # the client has no data for it
                abstaining.add(node)
                continue
            weight_of(scores, strategy.weighted_by_key)
            metrics[node], replies[node] = scores, reply.message
        except Exception as error:  # untrusted replies can fail in any way
            left_out.reject(name, error, node)
    if abstaining:
        cohort.abstaining |= abstaining
        names = listed(map(cohort.name, abstaining))
        logger.info("configure_evaluate: without data for evaluation: %s", names)
    if enough():
        reason = "not waited for, since enough have replied"
    else:
        reason = f"none within {timeout:.0f} s"
        cohort.missed(due, server_round)
    left_out.miss(map(cohort.name, due), reason)
    left_out.log_missing()
    contents = _comparable_replies(strategy, replies, metrics, left_out)
    left_out.log_repeated()
    returned = strategy.aggregate_evaluate(server_round, contents) if contents else None
    return metrics_from(returned, "evaluate_metrics_aggr_fn")


def _comparable_replies(
    strategy: Strategy,
    replies: Mapping[int, Message],
    metrics: Mapping[int, MetricRecord],
    left_out: LeftOut,
) -> list[Message]:
    """Return the replies whose metrics can be averaged, in the clients' order.

    A strict policy limits their weights.
    """
    cohort, key, policy = strategy.cohort, strategy.weighted_by_key, strategy.policy
    good, others = comparable(metrics)
    for node, reason in others.items():
        left_out.reject(cohort.name(node), f"'metrics': it {reason}", node)
    nodes = sorted(good, key=cohort.order)
    weights = [weight_of(metrics[node], key) for node in nodes]
    limited = policy.weights(weights) if policy.limit_scores else weights
    comparables = []
    for node, before, after in zip(nodes, weights, limited, strict=True):
        if after < before:
            text = "%s: limited %s: weight x %.2g"
            logger.warning(text, left_out.stage, cohort.name(node), after / before)
        message = copy.copy(replies[node])
        record = MetricRecord({**good[node], key: after})
        message.content = RecordDict({"metrics": record})
        comparables.append(message)
    return comparables
