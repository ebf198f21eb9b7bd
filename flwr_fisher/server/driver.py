"""A run's rounds, start to end: ask, collect, admit, step, keep."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import Strategy

from flwr_fisher.errors import CheckpointError, WireError
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.collect import collect
from flwr_fisher.server.exchange import Exchange, ServerState, Uploads
from flwr_fisher.server.open_exchange import OpenExchange, Sampling
from flwr_fisher.server.run import Run

logger = logging.getLogger("flwr")


class Method(Sampling, Protocol):
    """A strategy, as far as the server knows it."""

    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return what a round asks of its clients, one request after another."""


@runtime_checkable
class _Listener(Protocol):
    """A grid that wants to know whose replies were aggregated."""

    def aggregated(self, metrics: Mapping[int, MetricRecord]) -> None:
        """Learn their metrics, by node."""


class Driver:
    """Does rounds of a strategy on a grid, and keeps them in a run.

    Parameters
    ----------
    grid : Grid
        Reaches the clients.
    run : Run
        Where the rounds go.
    timeout : float
        Seconds to wait for the replies of an exchange, and for nodes to connect.
    """

    def __init__(self, grid: Grid, run: Run, timeout: float) -> None:
        self.grid, self.run, self.timeout = grid, run, timeout

    def train(
        self,
        method: Method,
        server_round: int,
        config: ConfigRecord,
        *,
        scope: str | None = None,
    ) -> Uploads[Any]:
        """Do a round's exchanges; return the last one's uploads.

        Uploads that an interrupted run admitted are taken from disk, and their clients
        are not asked again.

        Parameters
        ----------
        method : Method
            The strategy.
        server_round : int
            The round.
        config : ConfigRecord
            The caller's, for the clients.
        scope : str, optional
            Of a strategy that runs within another: where its groups of tensors are in
            the run's state.

        Raises
        ------
        RoundError
            If an exchange ends with too few usable replies.
        CheckpointError
            If an upload on disk is damaged.
        """
        if method.fraction_train == 0.0:  # FedAvg's way to evaluate without training
            return []
        uploads: Uploads[Any] = []
        for index, exchange in enumerate(method.exchanges(server_round), start=1):
            opened = OpenExchange(
                method,
                exchange,
                self._state(scope),
                self.grid,
                server_round,
                self.timeout,
            )
            folder = self.run.folder(server_round, index)
            nodes = self._restore(opened, folder)
            # The next exchange has begun: its clients answered what came of the replies
            # to this one, so nobody else may join them now.
            if self.run.has_uploads(self.run.folder(server_round, index + 1)):
                nodes = []
            self._receive(opened, opened.messages(config, nodes), folder)
            finished = opened.finish()
            uploads, step = finished.uploads, finished.step
            if isinstance(self.grid, _Listener):
                self.grid.aggregated({u.node_id: u.metrics for u in uploads})
            if scope is not None:
                step = replace(step, state=self.run.state.with_inner(scope, step.state))
            self.run.stepped(server_round, step, uploads, finished.metrics)
        return uploads

    def evaluate(
        self,
        strategy: Strategy,
        cohort: Cohort,
        server_round: int,
        config: ConfigRecord,
    ) -> None:
        """Have clients evaluate the run's parameters, as the strategy says."""
        messages = strategy.configure_evaluate(
            server_round, self.run.arrays(), config, self.grid
        )
        replies = collect(self.grid, messages, self.timeout)
        aggregate = strategy.aggregate_evaluate
        metrics = aggregate_in_order(aggregate, cohort, server_round, replies)
        self.run.client_evaluated(server_round, metrics)

    def _state(self, scope: str | None) -> ServerState:
        return self.run.state if scope is None else self.run.state.inner(scope)

    def _receive(
        self, opened: OpenExchange[Any], messages: list[Message], folder: str
    ) -> None:
        """Take replies as they arrive; keep each that is admitted."""
        for message in collect(self.grid, messages, self.timeout):
            records = opened.admission.take(message)
            if records is not None:
                client = opened.sampling.cohort.name(message.metadata.src_node_id)
                self.run.save_upload(folder, client, *records)

    def _restore(self, opened: OpenExchange[Any], folder: str) -> list[int]:
        """Take uploads that an interrupted run left; return who is still to ask."""
        cohort = opened.sampling.cohort
        by_name = {cohort.name(node): node for node in opened.nodes}
        for client, arrays, metrics in self.run.load_uploads(folder):
            if (node := by_name.pop(client, None)) is None:
                continue
            try:
                opened.admission.admit(node, arrays, metrics)
            except WireError as error:
                raise CheckpointError(
                    f"the upload kept as {folder}/{client} is damaged: {error}; without"
                    " that file the client is asked again"
                ) from error
        return sorted(by_name.values(), key=cohort.order)


def aggregate_in_order(
    aggregate: Callable[[int, Iterable[Message]], MetricRecord | None],
    cohort: Cohort,
    server_round: int,
    replies: Iterable[Message],
) -> MetricRecord | None:
    """Aggregate evaluations in an order that depends on no timing.

    Replies that do not fit each other are worth a warning, not the round.
    """
    ordered = sorted(
        replies, key=lambda reply: cohort.order(reply.metadata.src_node_id)
    )
    try:
        return aggregate(server_round, ordered)
    except InconsistentMessageReplies as error:
        logger.warning("aggregate_evaluate: left out the round: %s", error)
        return None
