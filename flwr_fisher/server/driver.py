"""The driver of a run's rounds: it trains, evaluates, saves, and calls callbacks.

Long: a third of it is the interface that a strategy must have.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_fisher.callbacks import Callback
from flwr_fisher.errors import RoundError, listed
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params
from flwr_fisher.server.door import EvaluationDoor, abstains
from flwr_fisher.server.exchange import Exchange, Secure, Uploads, metrics_from
from flwr_fisher.server.journal import ExchangeJournal, Journal
from flwr_fisher.server.mailbox import collect
from flwr_fisher.server.norms import norm_exchange
from flwr_fisher.server.round import (
    ExchangeRun,
    LateReplies,
    StrategySettings,
    door_of,
)
from flwr_fisher.server.run import Run
from flwr_fisher.wire import NUM_EXAMPLES, named_options

_ONLY_TRAINS = (
    "norm statistics: %s can only train. Use a FisherClient with model and loader "
    "there, or call merge.refresh_norms(model, loader) afterwards"
)
TO_EVALUATE = 60.0  # the most seconds to wait for enough clients
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]  # the server's scores


class Strategy(StrategySettings, Protocol):
    """The part of a strategy that the server uses."""

    secure: Secure | None

    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return the exchanges of a round, in their order."""

    def may_skip(self, server_round: int) -> bool:
        """Return whether the run can continue after a failed round."""

    def norms_to_refresh(self, before: Params, after: Params) -> Sequence[str]:
        """Return the norms that the round's clients must measure."""

    def round_config(self, server_round: int, config: ConfigRecord) -> ConfigRecord:
        """Return the caller's config for clients that train."""

    def evaluation_config(
        self, server_round: int, config: ConfigRecord
    ) -> ConfigRecord:
        """Return the caller's config for clients that evaluate."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests to evaluate."""

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate the replies to the evaluation."""


@runtime_checkable
class _Listener(Protocol):
    """A grid that is told which replies were aggregated."""

    def aggregated(self, metrics: Mapping[int, MetricRecord]) -> None:
        """Receive the aggregated replies' metrics by node."""


def exchanges_of(strategy: Strategy, server_round: int) -> Sequence[Exchange[Any]]:
    """Return a round's exchanges, as secure sums if the strategy has `secure=`."""
    exchanges = strategy.exchanges(server_round)
    return secured(strategy, exchanges, f"{server_round}", strategy.weighted_by_key)


def secured(
    strategy: Strategy, exchanges: Sequence[Exchange[Any]], what: str, weighted_by: str
) -> Sequence[Exchange[Any]]:
    """Return exchanges, as secure sums if the strategy has `secure=`."""
    if strategy.secure is None:
        return exchanges
    seed = f"{strategy.seed}/{what}"
    return strategy.secure.secured(exchanges, seed=seed, weighted_by=weighted_by)


class Driver:
    """Drives a strategy's rounds on a grid, and stores them in a run.

    Parameters
    ----------
    strategy : Strategy
        Defines what a round requests, and what the server computes from the uploads.
    grid : Grid
        The grid of clients.
    run : Run
        The run, which stores the rounds.
    timeout : float
        Seconds to wait for the replies of an exchange, and for nodes to connect.
    """

    def __init__(
        self, strategy: Strategy, grid: Grid, run: Run, timeout: float
    ) -> None:
        self.strategy, self.cohort = strategy, strategy.cohort
        self.grid, self.run, self.timeout = grid, run, timeout
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
            logger.info(
                "All rounds are finished. The result has the model, but no uploads and "
                "no details: add reopen=True to merge the last round's uploads again"
            )
        for server_round in range(run.server_round + 1, num_rounds + 1):
            if ended:
                break
            logger.info("")
            logger.info("[ROUND %s/%s]", server_round, num_rounds)
            self.server_round, before = server_round, run.state
            try:
                self.do_exchanges(strategy.round_config(server_round, train_config))
            except RoundError as error:
                skip = strategy.waiting.on_failed_round == "skip"
                if not (skip and strategy.may_skip(server_round)):
                    raise
                run.skip_round(server_round, before, error)
            self.evaluate(strategy.evaluation_config(server_round, evaluate_config))
            if evaluate_fn:
                self._evaluate_here(server_round, evaluate_fn)
            run.finish(server_round, self.cohort.absences())
            ended = run.run_callbacks(callbacks)

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
        if self.strategy.fraction_train == 0.0:  # FedAvg's way to evaluate only
            return
        uploads: Uploads[Any] = []
        before = self.run.state.params
        exchanges = exchanges_of(self.strategy, self.server_round)
        for index, exchange in enumerate(exchanges, start=1):
            # Free the uploads of the last exchange before this one's arrive.
            uploads = []
            self.run.forget_uploads()
            journal = self.run.exchange(self.server_round, index)
            under_way = self._exchange_run(exchange, config, journal)
            under_way.gather(self._late_replies(under_way))
            outcome = under_way.step()
            under_way.close(outcome.uploads)
            uploads, step, metrics = outcome.uploads, outcome.step, outcome.metrics
            del under_way, outcome  # they hold the uploads, too
            if isinstance(self.grid, _Listener):
                # Uploads from the disk came from other nodes.
                present = self.cohort.present(self.grid, self.timeout)
                nodes = {self.cohort.name(node): node for node in present}
                own = {u.client: u.metrics for u in uploads if u.client in nodes}
                self.grid.aggregated({nodes[client]: own[client] for client in own})
            self.run.take_step(self.server_round, step, uploads, metrics)
        clients = {u.client: (u.number, u.num_examples) for u in uploads}
        self._refresh_norms(before, clients, config)

    def _exchange_run(
        self,
        exchange: Exchange[Any],
        config: ConfigRecord,
        journal: ExchangeJournal,
        *,
        optional: bool = False,
    ) -> ExchangeRun[Any]:
        return ExchangeRun(
            self.strategy,
            exchange,
            self.run.state,
            self.server_round,
            config,
            self.grid,
            journal,
            self.timeout,
            optional=optional,
        )

    def _refresh_norms(
        self,
        before: Params,
        clients: Mapping[str, tuple[int, float]],
        config: ConfigRecord,
    ) -> None:
        """Let the round's clients measure the new model's norms, if requested.

        Who has gone since is left out, as is whose ClientApp only trains; the round is
        finished without it where nobody is left. It is not in the journal: a run that
        resumes in the midst of it does it again.

        Parameters
        ----------
        before : Mapping[str, Tensor]
            What the round began with.
        clients : Mapping[str, tuple[int, float]]
            The round's, by name: their numbers and weights.
        config : ConfigRecord
            The caller's.
        """
        merged, strategy = self.run.state, self.strategy
        prefixes = strategy.norms_to_refresh(before, merged.params)
        if not prefixes:
            return
        weights = self._who_can_measure(clients)
        exchange = norm_exchange(prefixes, weights)
        try:
            if not weights:
                raise RoundError("all clients of the round have disconnected")
            logger.info(
                "norm statistics: asking %d clients for the new model's", len(weights)
            )
            what = f"{self.server_round}/norms"
            for one in secured(strategy, [exchange], what, NUM_EXAMPLES):
                journal = Journal(None).exchange(self.server_round, 1)
                under_way = self._exchange_run(one, config, journal, optional=True)
                under_way.gather(
                    LateReplies(
                        self.cohort, None, journal, self.server_round, self._count_late
                    )
                )
                outcome = under_way.step()
                self.run.refresh(self.server_round, outcome.step, outcome.uploads)
        except RoundError as error:
            self.run.state = merged
            logger.warning(
                "norm statistics: %d batch norms keep the mean of the clients' "
                "statistics, which belong to other weights than the new model's, so "
                "the model may be far worse; the documentation's \"Networks with batch "
                'norm" says more. The reason: %s',
                len(prefixes),
                error,
            )

    def _who_can_measure(
        self, clients: Mapping[str, tuple[int, float]]
    ) -> dict[int, float]:
        """Return the weights of the clients that can measure; log those that cannot."""
        present = self.cohort.present(self.grid, self.timeout)
        nodes = {self.cohort.identity(n).number: n for n in present}
        if gone := [c for c, (number, _) in clients.items() if number not in nodes]:
            logger.warning("norm statistics: disconnected: %s", listed(gone))
        there = {c: own for c, own in clients.items() if own[0] in nodes}
        able = self.cohort.do_any_job
        asked = {c: own for c, own in there.items() if nodes[own[0]] in able}
        if others := there.keys() - asked.keys():
            logger.warning(_ONLY_TRAINS, listed(others))
        return dict(asked.values())

    def _late_replies(self, under_way: ExchangeRun[Any]) -> LateReplies:
        """Return the handler of replies that come after the end of an exchange."""
        if self._late is not None:
            self._late.forget()
        # It must not hold this exchange's uploads, and must not change its sum.
        alone = replace(under_way.exchange, additive=None)
        self._late = LateReplies(
            self.cohort,
            partial(door_of, self.strategy, alone, under_way.state),
            under_way.journal,
            self.server_round,
            self._count_late,
        )
        return self._late

    def _count_late(self) -> int:
        self.run.count_late(self.server_round)
        return self.server_round

    def evaluate(self, config: ConfigRecord) -> None:
        """Let clients evaluate the run's parameters, as the strategy configures it.

        A client without data to evaluate on says so, and the server does not ask it
        again.
        """
        strategy, cohort, server_round = self.strategy, self.cohort, self.server_round
        config = ConfigRecord({**config, **named_options({"may-abstain": True})})
        messages = [
            message
            for message in strategy.configure_evaluate(
                server_round, self.run.arrays(), config, self.grid
            )
            if message.metadata.dst_node_id not in cohort.abstaining
        ]
        due = {message.metadata.dst_node_id for message in messages}
        num_asked, new = len(due), set[int]()  # nodes that abstain for the first time
        door = EvaluationDoor(cohort, strategy.weighted_by_key, strategy.policy)

        def enough() -> bool:
            wanted = strategy.waiting.enough(num_asked - len(new))
            return len(door.admitted) >= max(wanted, 1)

        for reply in collect(
            cohort.mailbox(self.grid), messages, self.timeout, enough=enough
        ):
            if reply.from_superlink and not reply.nothing_will_come:
                continue  # the time is up
            due.discard(reply.node)
            if abstains(reply.message):
                new.add(reply.node)
            else:
                door.take(reply)
        if new:
            cohort.abstaining |= new
            names = listed(map(cohort.name, new))
            logger.info("configure_evaluate: %s have no data for evaluation", names)
        if enough():
            door.mark_missing(due, "not waited for, since enough have replied")
        else:
            door.mark_missing(due, f"none within {self.timeout:.0f} s")
            cohort.missed(due, server_round)
        door.log_missing()
        returned = door.average(server_round, strategy.aggregate_evaluate)
        metrics = metrics_from(returned, "evaluate_metrics_aggr_fn")
        self.run.client_evaluated(server_round, metrics)
