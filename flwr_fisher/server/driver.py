"""A run's rounds, start to end: ask, collect, admit, step, keep."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_fisher.log_lines import logger
from flwr_fisher.printable import listed
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.door import Door, EvaluationDoor, abstains
from flwr_fisher.server.exchange import Exchange, Secure, Uploads
from flwr_fisher.server.gather import Gathering
from flwr_fisher.server.journal import ExchangeJournal
from flwr_fisher.server.mailbox import collect
from flwr_fisher.server.open_exchange import OpenExchange, Sampling, new_admission
from flwr_fisher.server.policy import Policy
from flwr_fisher.server.receive import Late
from flwr_fisher.server.run import Run
from flwr_fisher.server.waiting import Waiting
from flwr_fisher.wire import named_options

TO_EVALUATE = 60.0  # seconds at most, until enough clients are there


class Method(Sampling, Protocol):
    """A strategy, as far as the server knows it."""

    secure: Secure | None

    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return what a round asks of its clients, one request after another."""


@runtime_checkable
class _Listener(Protocol):
    """A grid that wants to know whose replies were aggregated."""

    def aggregated(self, metrics: Mapping[int, MetricRecord]) -> None:
        """Learn their metrics, by node."""


def _exchanges(method: Method, server_round: int) -> Sequence[Exchange[Any]]:
    """Return what a round asks, as secure sums where the strategy wants them."""
    exchanges = method.exchanges(server_round)
    if method.secure is None:
        return exchanges
    return method.secure.secured(
        exchanges,
        seed=f"{method.seed}/{server_round}",
        weighted_by=method.weighted_by_key,
    )


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
        self.server_round = run.server_round  # under way
        self._late: Late | None = None  # of the last exchange

    def train(self, method: Method, server_round: int, config: ConfigRecord) -> None:
        """Do a round's exchanges.

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

        Raises
        ------
        RoundError
            If an exchange ends with too few usable replies.
        CheckpointError
            If an upload on disk is of another version of this library.
        """
        if method.fraction_train == 0.0:  # FedAvg's way to evaluate without training
            return
        uploads: Uploads[Any]
        for index, exchange in enumerate(_exchanges(method, server_round), start=1):
            # The uploads of the last exchange go before those of this one come.
            uploads = []
            self.run.forget_uploads()
            state = self.run.state
            opened = OpenExchange(method, exchange, state, server_round)
            kept = self.run.kept(server_round, index)
            gathering = Gathering(self.grid, opened, kept, config, self.timeout)
            # It must not hold this exchange's uploads until the last late reply.
            alone = replace(exchange, fold=None)  # the sum is not to change any more
            admission = partial(new_admission, method, alone, state.params)
            late = self.late(method.cohort, admission, kept, server_round)
            gathering.run(late)
            try:
                finished = opened.finish()
            finally:
                for client, reason in opened.admission.withdrawn.items():
                    kept.set_aside(client, reason)
            uploads, step = finished.uploads, finished.step
            clients = [upload.client for upload in uploads]
            done = opened.admission
            out = done.missing, done.rejected.reasons
            kept.close(clients, *out, method.cohort.absences())
            metrics = finished.metrics
            del opened, gathering, finished, done  # which hold them, too
            if isinstance(self.grid, _Listener):
                nodes = self._nodes(method.cohort)  # of uploads from disk, other ones
                own = {u.client: u.metrics for u in uploads if u.client in nodes}
                self.grid.aggregated({nodes[client]: own[client] for client in own})
            self.run.stepped(server_round, step, uploads, metrics)

    def evaluate(
        self,
        strategy: Strategy,
        cohort: Cohort,
        server_round: int,
        config: ConfigRecord,
        weighted_by_key: str,
        policy: Policy,
        waiting: Waiting,
        grid: Grid | None = None,
    ) -> None:
        """Have clients evaluate the run's parameters, as the strategy says.

        Who has nothing to evaluate on says so, and is not asked again. `grid` is what
        the strategy samples from, by default the run's.
        """
        self.server_round = server_round
        config = ConfigRecord({**config, **named_options({"may-abstain": True})})
        messages = [
            message
            for message in strategy.configure_evaluate(
                server_round, self.run.arrays(), config, grid or self.grid
            )
            if message.metadata.dst_node_id not in cohort.abstaining
        ]
        due = {message.metadata.dst_node_id for message in messages}
        num_asked, new = len(due), set[int]()  # who abstains, and did not before
        door = EvaluationDoor(cohort, weighted_by_key, policy)

        def enough() -> bool:
            return len(door.admitted) >= max(waiting.enough(num_asked - len(new)), 1)

        for reply in collect(
            cohort.mailbox(self.grid), messages, self.timeout, enough=enough
        ):
            if reply.of_link and not reply.of_the_dead:
                continue  # the time is up
            due.discard(reply.node)
            if abstains(reply.message):
                new.add(reply.node)
            else:
                door.take(reply)
        if new:
            cohort.abstaining |= new
            names = listed(map(cohort.name, new))
            logger.info("configure_evaluate: nothing to evaluate on has %s", names)
        if enough():
            door.mark_missing(due, "not waited for, since enough have replied")
        else:
            door.mark_missing(due, f"none within {self.timeout:.0f} s")
            cohort.missed(due, server_round)
        door.log_missing()
        metrics = door.average(server_round, strategy.aggregate_evaluate)
        self.run.client_evaluated(server_round, metrics)

    def late(
        self,
        cohort: Cohort,
        admission: Callable[[], Door[Any]],
        kept: ExchangeJournal,
        server_round: int,
    ) -> Late:
        """Return what takes the replies that come when a round's exchange is over."""
        self.server_round = server_round
        if self._late is not None:
            self._late.forget()
        self._late = Late(cohort, admission, kept, server_round, self._count_late)
        return self._late

    def _count_late(self) -> int:
        self.run.count_late(self.server_round)
        return self.server_round

    def _nodes(self, cohort: Cohort) -> dict[str, int]:
        """Return the nodes that are connected, by their clients' names."""
        connected, mailbox = list(self.grid.get_node_ids()), cohort.mailbox(self.grid)
        nodes = cohort.learn(mailbox, connected, self.timeout)
        return {cohort.name(node): node for node in nodes}
