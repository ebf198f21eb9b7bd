"""The driver of a run's rounds: it trains, evaluates, saves, and calls callbacks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from flwr_fisher.callbacks import Callback
from flwr_fisher.errors import ConfigurationError, RoundError
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params
from flwr_fisher.server.evaluation import evaluate
from flwr_fisher.server.exchange import Uploads, metrics_from
from flwr_fisher.server.journal import Journal
from flwr_fisher.server.late import LateReplies
from flwr_fisher.server.norms import norm_exchange, who_can_measure
from flwr_fisher.server.round import ExchangeRun, Strategy, door_of, with_secure_sums
from flwr_fisher.server.run import Run
from flwr_fisher.wire import NUM_EXAMPLES, named_options

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]  # the server's scores


@runtime_checkable
class _Listener(Protocol):
    """A grid that is told which replies were aggregated."""

    def aggregated(self, metrics: Mapping[int, MetricRecord]) -> None:
        """Receive the aggregated replies' metrics by node."""


class Driver:
    """Drives a strategy's rounds on a grid, and stores them in a run."""

    def __init__(self, strategy: Strategy, grid: Grid, run: Run) -> None:
        self.strategy, self.cohort = strategy, strategy.cohort
        self.grid, self.run, self.timeout = grid, run, strategy.timeout
        self.server_round = run.server_round  # the current round
        self._late: LateReplies | None = None  # of the last exchange

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
            self._log_finished(num_rounds)
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

    def _log_finished(self, num_rounds: int) -> None:
        """Log that a resumed run has no rounds left."""
        text = "All rounds are finished. The result has the model, but no uploads "
        text += "and no details"
        if self.strategy.secure is None:  # or else no round may be opened again
            last = self.run.server_round
            own = "" if last == num_rounds else f" and num_rounds={last}"
            text += f": add reopen=True{own} to merge the last uploads again"
        logger.info("%s", text)

    def _train(self, train_config: ConfigRecord) -> None:
        """Do the current round's exchanges, or skip the round if they fail."""
        strategy, server_round = self.strategy, self.server_round
        before = self.run.state
        try:
            config = ConfigRecord({**train_config})  # the caller's stays as it is
            config = strategy.round_config(server_round, config)
            self.do_exchanges(_checked("round_config", config, server_round))
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

    def do_exchanges(self, config: ConfigRecord) -> None:
        """Do the current round's exchanges, and take each one's step.

        Uploads that an interrupted run admitted are read from disk, and the server does
        not request them again.

        Raises
        ------
        RoundError
            If an exchange ends with too few usable replies.
        CheckpointError
            If an upload on disk is of another version of this library.
        """
        strategy, run, server_round = self.strategy, self.run, self.server_round
        if strategy.fraction_train == 0.0:  # FedAvg's way to evaluate only
            return
        uploads: Uploads[Any] = []
        before = run.state.params
        exchanges = strategy.exchanges(server_round)
        exchanges = with_secure_sums(strategy, exchanges, f"{server_round}")
        for index, exchange in enumerate(exchanges, start=1):
            exchange = exchange.after(uploads)
            # Free the uploads of the last exchange before this one's arrive.
            uploads = []
            run.forget_uploads()
            journal = run.exchange_journal(server_round, index)
            under_way = ExchangeRun(
                strategy, exchange, run.state, config, self.grid, journal
            )
            under_way.gather(self._late_replies(under_way))
            step, uploads, metrics = under_way.step()
            under_way.close(uploads)
            del under_way  # it holds the uploads, too
            if isinstance(self.grid, _Listener):
                # Uploads from the disk came from other nodes.
                present = self.cohort.present(self.grid, self.timeout)
                nodes = {self.cohort.name(node): node for node in present}
                own = {u.client: u.metrics for u in uploads if u.client in nodes}
                self.grid.aggregated({nodes[client]: own[client] for client in own})
            run.take_step(server_round, step, uploads, metrics)
        clients = {u.client: (u.number, u.num_examples) for u in uploads}
        self._refresh_norms(before, clients, config)

    def _refresh_norms(
        self,
        before: Params,
        clients: Mapping[str, tuple[int, float]],
        config: ConfigRecord,
    ) -> None:
        """Let the round's clients measure the new model's norms, if requested.

        `clients` has their numbers and weights by name. Those that have left are not
        asked, nor those whose ClientApp only trains. If no client remains, the round
        ends without new statistics. This is not in the journal: a run that resumes in
        the midst of it does it again.
        """
        strategy, run, server_round = self.strategy, self.run, self.server_round
        merged = run.state
        prefixes = strategy.norms_to_refresh(before, merged.params)
        if not prefixes:
            return
        present = self.cohort.present(self.grid, self.timeout)
        weights = who_can_measure(self.cohort, present, clients)
        exchange = norm_exchange(prefixes, weights, frozen=strategy.moves_norms)
        try:
            if not weights:
                raise RoundError("no client of the round can measure them")
            logger.info(
                "norm statistics: asking %d clients for the new model's", len(weights)
            )
            label = f"{server_round}/norms"
            for one in with_secure_sums(strategy, [exchange], label, NUM_EXAMPLES):
                journal = Journal(None).exchange_journal(server_round, 1)
                under_way = ExchangeRun(
                    strategy,
                    one,
                    run.state,
                    config,
                    self.grid,
                    journal,
                    optional=True,
                )
                late = LateReplies(self.cohort, None, journal, self._count_late)
                under_way.gather(late)
                step, uploads, _ = under_way.step()
                run.refresh(server_round, step, uploads)
        except RoundError as error:
            run.state = merged
            logger.warning(
                "norm statistics: %d batch norms keep the mean of the clients' "
                "statistics, which belong to other weights than the new model's, so "
                "the model may be far worse; the documentation's \"Networks with batch "
                'norm" says more. The reason: %s',
                len(prefixes),
                error,
            )

    def _late_replies(self, under_way: ExchangeRun[Any]) -> LateReplies:
        """Return the handler of replies that come after the end of an exchange."""
        if self._late is not None:
            self._late.forget()
        # It must not hold this exchange's uploads, and must not change its sum. A
        # secure sum is never opened again.
        alone = replace(under_way.exchange, additive=None)
        door = partial(door_of, self.strategy, alone, under_way.state)
        self._late = LateReplies(
            self.cohort,
            door if self.strategy.secure is None else None,
            under_way.journal,
            self._count_late,
        )
        return self._late

    def _count_late(self) -> int:
        self.run.count_late(self.server_round)
        return self.server_round


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
