"""A run's rounds, start to end: ask, collect, admit, step, keep."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_fisher.server.admission import Admission
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.collect import collect
from flwr_fisher.server.evaluation import aggregate_evaluations
from flwr_fisher.server.exchange import Exchange, ServerState, Uploads
from flwr_fisher.server.open_exchange import OpenExchange, Sampling
from flwr_fisher.server.policy import Policy
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
            If an upload on disk is of another version of this library.
        """
        if method.fraction_train == 0.0:  # FedAvg's way to evaluate without training
            return []
        uploads: Uploads[Any] = []
        for index, exchange in enumerate(method.exchanges(server_round), start=1):
            # The uploads of the last exchange go before those of this one come.
            uploads = []
            self.run.forget_uploads()
            opened = OpenExchange(
                method,
                exchange,
                self._state(scope),
                self.grid,
                server_round,
                self.timeout,
            )
            folder = self.run.folder(server_round, index)
            nodes = self.restore(opened.admission, folder, opened.nodes)
            # The next exchange has begun: its clients answered what came of the replies
            # to this one, so nobody else may join them now.
            if self.run.has_uploads(self.run.folder(server_round, index + 1)):
                nodes = []
            self.receive(opened.admission, opened.messages(config, nodes), folder)
            try:
                finished = opened.finish()
            finally:
                self.set_aside(opened.admission, folder)
            uploads, step = finished.uploads, finished.step
            metrics = finished.metrics
            del opened, finished  # which hold them, too
            if isinstance(self.grid, _Listener):
                self.grid.aggregated({u.node_id: u.metrics for u in uploads})
            if scope is not None:
                step = replace(step, state=self.run.state.with_inner(scope, step.state))
            self.run.stepped(server_round, step, uploads, metrics)
        return uploads

    def evaluate(
        self,
        strategy: Strategy,
        cohort: Cohort,
        server_round: int,
        config: ConfigRecord,
        weighted_by_key: str,
        policy: Policy,
    ) -> None:
        """Have clients evaluate the run's parameters, as the strategy says."""
        messages = strategy.configure_evaluate(
            server_round, self.run.arrays(), config, self.grid
        )
        replies = collect(self.grid, messages, self.timeout)
        aggregate = strategy.aggregate_evaluate
        metrics = aggregate_evaluations(
            aggregate, cohort, server_round, replies, weighted_by_key, policy
        )
        self.run.client_evaluated(server_round, metrics)

    def restore(
        self, admission: Admission[Any], folder: str, nodes: Iterable[int]
    ) -> list[int]:
        """Admit uploads that an interrupted run left; return which nodes are to ask.

        An upload that turned out to be bad stays where it is, and its client rejected.
        """
        names = admission.names
        by_name = {names.name(node): node for node in nodes}
        for client, reason in self.run.load_set_aside(folder).items():
            if by_name.pop(client, None) is not None:
                admission.rejected.add(client, reason, stage="aggregate_train")
        for client, arrays, metrics in self.run.load_uploads(folder):
            if (node := by_name.pop(client, None)) is None:
                continue
            try:
                admission.admit(node, arrays, metrics)
            except Exception as error:  # admitted once, by another version perhaps
                admission.reject(node, error)
                reason = admission.rejected.reasons[client]
                self.run.set_aside(folder, client, reason)
        return sorted(by_name.values(), key=names.order)

    def receive(
        self, admission: Admission[Any], messages: Iterable[Message], folder: str
    ) -> None:
        """Take replies as they arrive; keep each that is admitted."""
        for message in collect(self.grid, messages, self.timeout):
            records = admission.take(message)
            if records is not None:
                client = admission.names.name(message.metadata.src_node_id)
                self.run.save_upload(folder, client, *records)

    def set_aside(self, admission: Admission[Any], folder: str) -> None:
        """Put away what was admitted, and turned out to be bad."""
        for client, reason in admission.withdrawn.items():
            self.run.set_aside(folder, client, reason)

    def _state(self, scope: str | None) -> ServerState:
        return self.run.state if scope is None else self.run.state.inner(scope)
