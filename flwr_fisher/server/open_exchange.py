"""One exchange under way: whom it asks, what they are sent, what came of it."""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message_type import MessageType
from flwr.serverapp import Grid

from flwr_fisher.errors import ParamsError, RoundError, StructureError
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params
from flwr_fisher.randomness import seed_of_clients
from flwr_fisher.server.cohort import Cohort, Sample
from flwr_fisher.server.door import Door
from flwr_fisher.server.exchange import (
    Exchange,
    ServerState,
    Step,
    Upload,
    Uploads,
)
from flwr_fisher.server.policy import Policy
from flwr_fisher.server.waiting import Waiting
from flwr_fisher.wire import Payload, named_options

P = TypeVar("P", bound=Payload)

# What a step raises that cannot work with what it is given.
_STEP_ERRORS = (
    ParamsError,
    StructureError,
    ArithmeticError,
    torch.linalg.LinAlgError,  # type: ignore[attr-defined]
)
MetricsAggregator = Callable[[list[RecordDict], str], MetricRecord]


class Sampling(Protocol):
    """What the server reads of a strategy: FedAvg's settings, a seed and a cohort."""

    seed: int
    cohort: Cohort
    policy: Policy
    waiting: Waiting
    fraction_train: float
    min_train_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MetricsAggregator


def requests(
    sampling: Sampling,
    server_round: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    nodes: Iterable[int],
    message_type: str = MessageType.TRAIN,
) -> list[Message]:
    """Return the messages that ask nodes; the caller's records are left as they are."""
    seed = named_options({"seed": seed_of_clients(sampling.seed)})
    sent = {**config, "server-round": server_round, **seed}
    content = RecordDict({sampling.arrayrecord_key: arrays})
    content[sampling.configrecord_key] = ConfigRecord(sent)
    return [
        Message(content, node, message_type, group_id=str(server_round))
        for node in nodes
    ]


@dataclass(frozen=True)
class Finished(Generic[P]):
    """What became of an exchange: the step, its uploads, the clients' metrics."""

    step: Step
    uploads: Uploads[P]
    metrics: MetricRecord


def new_admission(sampling: Sampling, exchange: Exchange[P], like: Params) -> Door[P]:
    """Return what admits an exchange's replies.

    Parameters
    ----------
    sampling : Sampling
        The strategy.
    exchange : Exchange
        What it asks.
    like : Mapping[str, Tensor]
        The run's parameters.
    """
    policy = sampling.policy
    if exchange.fold is not None:  # what is added at once cannot be weighed against
        policy = replace(policy, max_weight=math.inf, max_distance=math.inf)
    return Door(
        sampling.cohort,
        exchange.read,
        like,
        sampling.weighted_by_key,
        policy,
        fold=exchange.fold,
        quiet=bool(exchange.part),
    )


class OpenExchange(Generic[P]):
    """Knows whom to ask, is fed with their replies, and then finished.

    Parameters
    ----------
    sampling : Sampling
        The strategy.
    exchange : Exchange
        What it asks.
    state : ServerState
        Where the run stands.
    server_round : int
        The round.
    """

    def __init__(
        self,
        sampling: Sampling,
        exchange: Exchange[P],
        state: ServerState,
        server_round: int,
    ) -> None:
        self.sampling, self.exchange, self.state = sampling, exchange, state
        self.server_round = server_round
        self.admission = new_admission(sampling, exchange, state.params)

    @property
    def cohort(self) -> Cohort:
        """Who knows the clients."""
        return self.sampling.cohort

    @property
    def waiting(self) -> Waiting:
        """How long to wait, and for how many."""
        return self.sampling.waiting

    @property
    def needed(self) -> int:
        """How many usable replies there must be."""
        return self.sampling.min_train_nodes

    def sample(self, grid: Grid, timeout: float) -> Sample:
        """Return whom to ask.

        Raises
        ------
        RoundError
            If too few nodes are connected when the time is up, or too few of them train
            the same parameters.
        """
        sampling = self.sampling
        if self.exchange.asks is not None:
            return self._named(grid, self.exchange.asks(self.state), timeout)
        sample = sampling.cohort.sample(
            grid,
            fraction=1.0 if self.exchange.everyone else sampling.fraction_train,
            minimum=sampling.min_train_nodes,
            available=sampling.min_available_nodes,
            server_round=self.server_round,
            purpose="train",
            timeout=timeout,
            waiting=sampling.waiting,
        )
        logger.info("configure_train: Sampled %s nodes", len(sample.nodes))
        self.admission.expected = len(sample.nodes)
        return sample

    def _named(self, grid: Grid, numbers: Collection[int], timeout: float) -> Sample:
        """Return those of these clients that are connected."""
        minimum, cohort = min(self.needed, len(numbers)), self.cohort
        ready = cohort.ready(grid, minimum, minimum, timeout)
        nodes = [node for node in ready if cohort.identity(node).number in numbers]
        if self.exchange.part:
            text = "configure_train: secure sum, %s: asking %s nodes"
            logger.info(text, self.exchange.part, len(nodes))
        else:
            logger.info("configure_train: asking %s nodes", len(nodes))
        self.admission.expected = len(nodes)
        return Sample(nodes, len(nodes))

    def require_same_parameters(
        self, grid: Grid, nodes: list[int], others: Iterable[int], timeout: float
    ) -> list[int]:
        """Reject those nodes whose uploads could not be merged; return the rest.

        Parameters
        ----------
        grid : Grid
            Reaches them.
        nodes : list[int]
            Those that are to be asked.
        others : Iterable[int]
            Those that were asked before.
        timeout : float
            Seconds to wait for what they tell, at most a minute.
        """
        if not self.exchange.require_same_parameters or not nodes:
            return nodes
        everyone = [*others, *nodes]
        mismatched = self.cohort.mismatched(grid, everyone, self.state.params, timeout)
        for node in mismatched.keys() & set(nodes):
            self.admission.reject(node, mismatched[node], "configure_train")
        return [node for node in nodes if node not in mismatched]

    def messages(self, config: ConfigRecord, nodes: Iterable[int]) -> list[Message]:
        """Return the requests to some of the nodes."""
        exchange, configured = self.exchange, self.exchange.configure(config)
        if exchange.send_each is None:
            arrays = exchange.arrays(self.state)
            return requests(self.sampling, self.server_round, arrays, configured, nodes)
        own, messages = exchange.send_each(self.state), list[Message]()
        for node in nodes:
            groups = own(self.cohort.identity(node).number)
            arrays = exchange.arrays(self.state, groups)
            messages += requests(
                self.sampling, self.server_round, arrays, configured, [node]
            )
        return messages

    def finish(self) -> Finished[P]:
        """Take the step, and see that it led somewhere.

        An upload with which no step can be taken, not even by itself, is withdrawn.

        Raises
        ------
        RoundError
            If there are too few uploads, or the step made a parameter that is not
            finite, and no upload alone is to blame.
        """
        step = None
        while step is None:
            uploads = self.admission.uploads(self.sampling.min_train_nodes)
            try:
                step = self._step(uploads)
            except _STEP_ERRORS as error:
                if not self._withdraw_culprits(uploads):
                    raise RoundError(
                        f"the step failed: {error}; the round is not finished, and its "
                        "uploads are kept where there is a checkpoint_dir"
                    ) from error
        metrics = self.admission.metrics(self.sampling.train_metrics_aggr_fn)
        return Finished(step, uploads, metrics)

    def _step(self, uploads: Uploads[P]) -> Step:
        step = self.exchange.step(self.state, uploads)
        for name, value in step.state.params.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise ParamsError(
                    f"it made '{name}' NaN or infinite out of finite uploads"
                )
        return step

    def _withdraw_culprits(self, uploads: Uploads[P]) -> bool:
        """Withdraw the uploads with which a step fails that takes nothing else."""
        culprits: list[tuple[Upload[P], Exception]] = []
        for upload in uploads:
            try:
                self._step([upload])
            except _STEP_ERRORS as failure:
                culprits.append((upload, failure))
        if len(culprits) == len(uploads):
            return False  # the step itself fails, whatever it is given
        for upload, reason in culprits:
            self.admission.withdraw(upload, reason)
        return bool(culprits)
