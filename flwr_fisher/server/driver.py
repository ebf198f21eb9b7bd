"""The driver of a run's rounds: it trains, evaluates, saves, and calls callbacks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flwr_fisher.callbacks import Callback
from flwr_fisher.errors import (
    CheckpointError,
    ConfigurationError,
    FlwrFisherError,
    RoundError,
    listed,
    printable,
)
from flwr_fisher.log_lines import logger, shown
from flwr_fisher.server.door import TRAIN, LeftOut, comparable, read_metrics, weight_of
from flwr_fisher.server.exchange import Exchange, metrics_from, sessions
from flwr_fisher.server.mailbox import NodeReply, collect
from flwr_fisher.server.round import ExchangeRun, Strategy, must_be_alike, requests
from flwr_fisher.server.run import Run
from flwr_fisher.wire import NUM_EXAMPLES, named_options
from flwr_fisher.wire.options import adapter_warning

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]  # the server's scores
_LONGEST_WAIT = 60.0  # seconds until enough clients are connected to evaluate
_NO_DATA = MetricRecord({NUM_EXAMPLES: 0})  # of a client that has none to evaluate on


class Driver:
    """Drives a strategy's rounds on a grid, and stores them in a run."""

    def __init__(self, strategy: Strategy, grid: Grid, run: Run) -> None:
        self.strategy, self.cohort = strategy, strategy.cohort
        self.grid, self.run = grid, run
        self.server_round = run.server_round  # the current round
        self.good = run.state  # of the last whole round, but for what is optional

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
        ConfigurationError
            If the model is to be refined, but no exchange of the last round does it.
        CallbackError
            If a callback failed. Its round is finished then.
        """
        run, refine = self.run, self.strategy.refine is not None and num_rounds
        if refine and not any(each.refines for each in self._exchanges(num_rounds)):
            raise ConfigurationError(
                f"refine= has no effect on {type(self.strategy).__name__}: let its "
                "exchanges() end with *refinements(self, server_round), which "
                "norm_statistics='refresh' needs, too; or pass refine=None"
            )
        if text := adapter_warning(run.state.params):
            logger.warning("%s", text)
        if evaluate_fn and run.server_round == 0:
            self._evaluate_here(evaluate_fn)
            run.finish(0, {})
        if run.journal.run:  # so that clients know the run after it is resumed
            named = named_options({"run": run.journal.run})
            train_config = ConfigRecord({**train_config, **named})
        ended = bool(run.server_round) and run.run_callbacks(callbacks)
        if run.server_round and run.server_round >= num_rounds:
            logger.info(
                "All rounds are finished. The result has the model alone: reopen=True "
                "asks clients that were missing, and merges the last uploads again"
            )
        for server_round in range(run.server_round + 1, num_rounds + 1):
            if ended:
                break
            logger.info("")
            logger.info("[ROUND %s/%s]", server_round, num_rounds)
            self.server_round = server_round
            self._train(train_config)
            self._evaluate(self._config("evaluation_config", evaluate_config))
            if evaluate_fn:
                self._evaluate_here(evaluate_fn)
            run.finish(server_round, self.cohort.absences())
            ended = run.run_callbacks(callbacks)

    def _train(self, train_config: ConfigRecord) -> None:
        """Do the current round's exchanges, or skip the round if they fail."""
        strategy, server_round = self.strategy, self.server_round
        self.good = self.run.state
        try:
            self.run.begin_round()
            config = self._config("round_config", train_config)
            if strategy.fraction_train > 0.0:  # or else FedAvg only evaluates
                self._do_exchanges(config)
            self.run.has_merged = True
        except BaseException as error:  # also of the user's own functions, and Ctrl+C
            skip = strategy.waiting.on_failed_round == "skip"
            skip &= isinstance(error, RoundError) and strategy.may_skip(server_round)
            self.run.undo_round(self.good)
            if not skip:
                raise
            self.run.skip_round(server_round, error)

    def _config(self, hook: str, config: ConfigRecord) -> ConfigRecord:
        """Return what a strategy's hook makes of a config, which stays as it is.

        Raises
        ------
        ConfigurationError
            If it returned something else.
        """
        make = getattr(self.strategy, hook)
        returned = make(self.server_round, ConfigRecord({**config}))
        if not isinstance(returned, Mapping):
            raise ConfigurationError(
                f"{hook}() must return the config of round {self.server_round}, got "
                f"{returned!r:.80}: return ConfigRecord({{**config, 'lr': 0.1}})"
            )
        return ConfigRecord({**returned})

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
        every = [*sessions(self._exchanges(self.server_round))]
        for number, session in enumerate(every, 1):
            before, exchange = run.state, session[0]
            if exchange.prepare is not None:
                # Only now is it known what must be asked, if anything.
                prepared = exchange.prepare(begin, before)
                if prepared is None:
                    continue
                session = [exchange := prepared]
            weights, needed = previous, 0
            try:
                for stage in self._stages(session, index):
                    index += 1
                    weights, needed = self._do_exchange(
                        stage, index, config, weights, needed
                    )
                # Optional exchanges ask the same clients one after another: if each
                # asked those that answered the last one, fewer would be left.
                if not (exchange.optional and exchange.clients == "previous"):
                    previous = weights
            except RoundError as error:
                if not exchange.optional:
                    raise
                run.state, cause = before, error.__cause__
                logger.warning(
                    "%s: the model stays that of the step before, because %s",
                    exchange.log_name,
                    error,
                    exc_info=None if isinstance(cause, FlwrFisherError) else cause,
                )
            if all(later[0].optional for later in every[number:]):
                self.good, run.has_merged = run.state, True
                run.count_in(self.cohort.named)

    def _exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return the strategy's exchanges for a round.

        Raises
        ------
        ConfigurationError
            If the strategy returned something else than a list of exchanges.
        """
        exchanges: object = self.strategy.exchanges(server_round)
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
        weighted_by = NUM_EXAMPLES if session[0].optional else strategy.weighted_by_key
        return strategy.secure.secured(session, seed=seed, weighted_by=weighted_by)

    def _do_exchange(
        self,
        exchange: Exchange[Any],
        index: int,
        config: ConfigRecord,
        previous: Mapping[int, float],
        needed: int,
    ) -> tuple[dict[int, float], int]:
        """Do one exchange.

        Return its clients' weights by number, and how many it needs: of an optional
        sum's clients, each stage needs as many as the first one.
        """
        run, server_round = self.run, self.server_round
        if not exchange.optional:  # free uploads before the next ones arrive
            run.keep_uploads()
        journal = run.journal.exchange_journal(server_round, index)
        under_way = ExchangeRun(
            self.strategy, exchange, run.state, config, self.grid, journal, previous
        )
        if exchange.optional:
            under_way.needed = max(under_way.needed, needed)
        try:
            under_way.gather(partial(self._take_late, server_round))
            step, uploads, metrics = under_way.step()
            under_way.close(uploads)
            door = under_way.door
            others = {**door.left_out.missing, **door.left_out.rejected}
            run.take_step(
                server_round, exchange, step, uploads, metrics, others, door.limited
            )
        except BaseException as error:  # also of the user's own functions, and Ctrl+C
            if not exchange.optional:
                run.keep_uploads(under_way.door.admitted)
                raise
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise
            under_way.close([])  # a resumed run does not try it again
            if isinstance(error, RoundError):
                raise
            raise RoundError(f"it failed: {error!r}") from error
        # Before the policy's limits, which the next exchange has, too.
        weights = {u.number: u.num_examples for u in under_way.door.admitted}
        return weights, under_way.needed

    def _take_late(self, asked_in: int, reply: NodeReply) -> None:
        """Log a reply that comes after the end of its exchange.

        With a journal, its client has kept it, and sends it if the exchange is opened
        again.
        """
        if not reply.from_superlink:
            self.cohort.replied(reply.node)
            text = "%s: the reply of %s to round %s came too late for it"
            logger.warning(text, TRAIN, self.cohort.name(reply.node), asked_in)

    # --- evaluation

    def _evaluate_here(self, evaluate_fn: EvaluateFn) -> None:
        """Evaluate on the server, and note the metrics."""
        returned = evaluate_fn(self.server_round, self.run.arrays())
        metrics = metrics_from(returned, "evaluate_fn")
        if metrics is not None:
            logger.info("Global evaluation")
            logger.info("\t└──> MetricRecord: %s", shown(metrics))
            self.run.note("evaluate_metrics_serverapp", self.server_round, metrics)

    def _evaluate(self, config: ConfigRecord) -> None:
        """Let clients evaluate the parameters, and note their metrics."""
        if not (nodes := self._sampled_to_evaluate()):
            return
        left_out = LeftOut("aggregate_evaluate")
        scores = self._scores(nodes, config, left_out)
        left_out.log_missing()
        aggregated = self._aggregated(scores, left_out)
        left_out.log_repeated()
        if aggregated is not None:
            logger.info("\t└──> Aggregated MetricRecord: %s", shown(aggregated))
            self.run.note("evaluate_metrics_clientapp", self.server_round, aggregated)

    def _scores(
        self, nodes: Sequence[int], config: ConfigRecord, left_out: LeftOut
    ) -> dict[int, MetricRecord]:
        """Request an evaluation of nodes, and return their metrics.

        A client without data to evaluate on says so, and the server does not ask it
        again.
        """
        strategy, cohort, timeout = self.strategy, self.cohort, self.strategy.timeout
        arrays, kind = self.run.arrays(), MessageType.EVALUATE
        asked = ConfigRecord({**config, **named_options({"may-abstain": True})})
        messages = requests(
            strategy, self.server_round, lambda node: arrays, asked, nodes, kind
        )
        due, abstaining = set(nodes), set[int]()
        scores: dict[int, MetricRecord] = {}

        def enough() -> bool:
            wanted = strategy.waiting.enough(len(nodes) - len(abstaining))
            return len(scores) >= max(wanted, 1)

        mailbox = cohort.mailbox(self.grid)
        for reply in collect(mailbox, messages, timeout, enough=enough):
            node, name = reply.node, cohort.name(reply.node)
            if reply.from_superlink and not reply.nothing_will_come:
                continue  # its time is up: it is still due
            due.discard(node)
            try:
                if reply.nothing_will_come:
                    reason = printable(reply.message.error.reason)
                    left_out.mark_missing([name], reason)
                elif (metrics := read_metrics(reply.message)) == _NO_DATA:
                    abstaining.add(node)
                else:
                    weight_of(metrics, strategy.weighted_by_key)
                    scores[node] = metrics
            except Exception as error:  # untrusted replies can fail in any way
                left_out.reject(name, error, node)
        if abstaining:
            cohort.abstaining |= abstaining
            names = listed(map(cohort.name, abstaining))
            logger.info("configure_evaluate: without data for evaluation: %s", names)
        reason = "not waited for, since enough have replied"
        if not enough():
            reason = f"none within {timeout:.0f} s"
            cohort.missed(due, self.server_round)
        left_out.mark_missing(map(cohort.name, due), reason)
        return scores

    def _sampled_to_evaluate(self) -> list[int]:
        """Return the nodes that are asked to evaluate; the training needs none."""
        strategy = self.strategy
        if strategy.fraction_evaluate == 0.0:
            return []
        try:
            nodes = self.cohort.sample(
                self.grid,
                fraction=strategy.fraction_evaluate,
                minimum=strategy.min_evaluate_nodes,
                available=0,  # who has left does not come back to evaluate
                server_round=self.server_round,
                purpose="evaluate",
                timeout=min(strategy.timeout, _LONGEST_WAIT),
            )
        except RoundError as error:
            logger.warning("configure_evaluate: no client evaluates: %s", error)
            return []
        logger.info("configure_evaluate: Sampled %s nodes", len(nodes))
        asked = self.grid, nodes, self.run.state.params, strategy.timeout
        alike = must_be_alike(strategy, self._exchanges(self.server_round))
        # What their scores mean is unlike, too.
        unlike = self.cohort.mismatched(*asked, parameters=alike)
        without = self.cohort.abstaining | unlike.keys()
        # Of others, it is their last upload that told.
        without |= {n for n in nodes if self.cohort.name(n) in self.cohort.unlike}
        return [n for n in nodes if n not in without]

    def _aggregated(
        self, scores: Mapping[int, MetricRecord], left_out: LeftOut
    ) -> MetricRecord | None:
        """Return what the user's function makes of the metrics that can be averaged.

        A strict policy limits the clients' weights.
        """
        strategy, cohort = self.strategy, self.cohort
        key, policy = strategy.weighted_by_key, strategy.policy
        good, others = comparable(scores)
        for node, why in others.items():
            left_out.reject(cohort.name(node), f"'metrics': it {why}", node)
        if not good:
            return None
        nodes = sorted(good, key=cohort.order)
        weights = [weight_of(scores[node], key) for node in nodes]
        limited = policy.weights(weights) if policy.limit_scores else weights
        contents = []
        for node, before, after in zip(nodes, weights, limited, strict=True):
            if after < before:
                text = "%s: limited %s: weight x %.2g"
                logger.warning(text, left_out.stage, cohort.name(node), after / before)
            record = MetricRecord({**good[node], key: after})
            contents.append(RecordDict({"metrics": record}))
        returned = strategy.evaluate_metrics_aggr_fn(contents, key)
        return metrics_from(returned, "evaluate_metrics_aggr_fn")
