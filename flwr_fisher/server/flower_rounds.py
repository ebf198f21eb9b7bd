"""Rounds of any of Flower's strategies, driven by its hooks and kept in a run.

Long: a second driver.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message_type import MessageType
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
    FedAvg,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    Krum,
    MultiKrum,
    Strategy,
)
from torch import Tensor

from flwr_fisher.errors import RoundError, WireError
from flwr_fisher.log_lines import logger
from flwr_fisher.server.cohort import Cohort, Sample
from flwr_fisher.server.door import Door
from flwr_fisher.server.driver import TO_EVALUATE, Driver
from flwr_fisher.server.exchange import ServerState, Step, Upload
from flwr_fisher.server.gather import Gathering
from flwr_fisher.server.policy import Policy
from flwr_fisher.server.waiting import Waiting
from flwr_fisher.wire import arrays_to_tensors
from flwr_fisher.wire.plain_upload import PlainUpload

# Flower's strategies that keep nothing from one round to the next.
_STATELESS = {Bulyan, FedAvg, FedMedian, FedProx, FedTrimmedAvg, Krum, MultiKrum}


Configure = Callable[[int, ArrayRecord, ConfigRecord, Grid], Iterable[Message]]


class FlowerRounds:
    """A strategy of Flower's, of which nothing is known but its hooks.

    Parameters
    ----------
    strategy : Strategy
        Makes messages and aggregates replies.
    inner : Strategy
        The same, without what may be wrapped around it to sample.
    unaddressed : Callable[…]
        Makes the messages as ``configure_train`` does, to whomever.
    cohort : Cohort
        Knows the clients' names.
    weighted_by_key : str
        A metric that every reply has.
    policy : Policy
        How far a single client's say may go.
    waiting : Waiting
        How long a round waits, and for how many.
    """

    def __init__(
        self,
        strategy: Strategy,
        inner: Strategy,
        unaddressed: Configure,
        cohort: Cohort,
        weighted_by_key: str,
        policy: Policy,
        waiting: Waiting,
    ) -> None:
        self.strategy, self.inner, self.unaddressed = strategy, inner, unaddressed
        self.kind = type(inner)
        self.cohort, self.waiting = cohort, waiting
        self.weighted_by_key, self.policy = weighted_by_key, policy
        self._last = 0  # round that this object has driven

    def train(
        self, driver: Driver, server_round: int, config: ConfigRecord
    ) -> dict[str, MetricRecord]:
        """Have it do a round; return its clients' metrics by name.

        Raises
        ------
        RoundError
            If too few nodes are connected, or it aggregated nothing, or something that
            is no model.
        """
        if self._last != server_round - 1 and self.kind not in _STATELESS:
            logger.warning(
                "Resuming inside stage 1: what %s keeps from one round to the next, if "
                "anything, is in no checkpoint, and starts anew",
                self.kind.__name__,
            )
        run, grid = driver.run, driver.grid
        kept = run.kept(server_round, 1)
        new = partial(self._admission, run.state.params)
        opened = _Opened(self, server_round, run.arrays(), config, grid, new())
        late = driver.late(self.cohort, new, kept, server_round)
        Gathering(grid, opened, kept, config, driver.timeout).run(late)
        admission = opened.admission
        uploads = admission.uploads(needed=0)
        for client, reason in admission.withdrawn.items():
            kept.set_aside(client, reason)
        records = shared_by_all([upload.metrics for upload in uploads])
        replies = [
            _reply(upload, own, opened.request(upload), self.weighted_by_key)
            for upload, own in zip(uploads, records, strict=True)
        ]
        # They are in the clients' order.
        arrays, metrics = self.inner.aggregate_train(server_round, replies)
        reasons = admission.rejected.lines()
        state = ServerState(
            self._params(run.state.params, arrays, reasons), run.state.groups
        )
        counts = {"num-replies": len(uploads), "num-rejected": len(admission.rejected)}
        if admission.missing:
            counts["num-missing"] = len(admission.missing)
        joined = MetricRecord({**counts, **(metrics or {})})
        clients = [upload.client for upload in uploads]
        out = admission.missing, admission.rejected.reasons
        kept.close(clients, *out, self.cohort.absences())
        run.stepped(server_round, Step(state), [], joined)
        self._last = server_round
        return {upload.client: upload.metrics for upload in uploads}

    def evaluate(self, driver: Driver, server_round: int, config: ConfigRecord) -> None:
        """Have its clients evaluate; without enough of them, warn."""
        listing = _Listing(driver.grid)
        if getattr(self.inner, "fraction_evaluate", 1.0):
            names = ("min_available_nodes", "min_evaluate_nodes")
            most = max(getattr(self.inner, name, 1) for name in names)
            timeout = min(driver.timeout, TO_EVALUATE)
            try:
                listing.nodes = self.cohort.ready(driver.grid, most, most, timeout)
            except RoundError as error:  # what was trained does not depend on it
                logger.warning("configure_evaluate: no client evaluates: %s", error)
                return
        driver.evaluate(
            self.strategy,
            self.cohort,
            server_round,
            config,
            self.weighted_by_key,
            self.policy,
            self.waiting,
            grid=cast(Grid, listing),
        )

    def _admission(self, like: Mapping[str, Tensor]) -> Door[PlainUpload]:
        return Door(
            self.cohort,
            PlainUpload.from_arrays,
            like,
            self.weighted_by_key,
            self.policy,
        )

    def _params(
        self,
        params: Mapping[str, Tensor],
        arrays: ArrayRecord | None,
        reasons: list[str],
    ) -> dict[str, Tensor]:
        """Return the new model in the old one's order and dtypes."""
        if arrays is None:
            raise RoundError(
                f"{self.kind.__name__} aggregated nothing in stage 1:\n"
                + "\n".join(reasons)
            )
        try:
            return _like(params, arrays)
        except WireError as error:
            raise RoundError(
                f"{self.kind.__name__} made no model in stage 1: {error}"
            ) from error


class _Opened:
    """A round under way: whom the strategy asks, and what it sends them."""

    needed = 0  # what is too few is the strategy's to say

    def __init__(
        self,
        rounds: FlowerRounds,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
        admission: Door[PlainUpload],
    ) -> None:
        self._rounds, self.server_round = rounds, server_round
        self.cohort, self.waiting = rounds.cohort, rounds.waiting
        self.admission = admission
        self._arrays, self._config = arrays, config
        self._grid = _Listing(grid)
        self._made: list[Message] | None = None

    def sample(self, grid: Grid, timeout: float) -> Sample:
        """Have the strategy sample among the nodes that can be asked."""
        strategy, inner = self._rounds.strategy, self._rounds.inner
        names = ("min_available_nodes", "min_train_nodes")
        most = max(getattr(inner, name, 1) for name in names)
        self._grid.nodes = self.cohort.ready(grid, most, most, timeout)
        made = strategy.configure_train(
            self.server_round, self._arrays, self._config, cast(Grid, self._grid)
        )
        self._made = list(made)
        nodes = [message.metadata.dst_node_id for message in self._made]
        return Sample(sorted(nodes, key=self.cohort.order), len(nodes))

    def require_same_parameters(
        self, grid: Grid, nodes: list[int], others: Iterable[int], timeout: float
    ) -> list[int]:
        """Return all: what clients train is not this library's to say."""
        return nodes

    def messages(self, config: ConfigRecord, nodes: Iterable[int]) -> list[Message]:
        """Return the strategy's requests to nodes.

        Where another life of the run sampled them, they get what any would.
        """
        nodes = list(nodes)
        if not nodes:
            return []
        made = {message.metadata.dst_node_id: message for message in self._messages()}
        any_one = next(iter(made.values()), None)
        if any_one is None:
            return []
        kind, group = any_one.metadata.message_type, str(self.server_round)
        return [
            made.get(node) or Message(any_one.content, node, kind, group_id=group)
            for node in nodes
        ]

    def request(self, upload: Upload[PlainUpload]) -> Message | None:
        """Return the request to whom replied."""
        made = {message.metadata.dst_node_id: message for message in self._messages()}
        return made.get(upload.node_id)

    def _messages(self) -> list[Message]:
        """Return what the strategy sends; it may remember what it was asked."""
        if self._made is None:
            self._grid.nodes = list(range(1, self.cohort.connected + 1))
            made = self._rounds.unaddressed(
                self.server_round, self._arrays, self._config, cast(Grid, self._grid)
            )
            self._made = list(made)
        return self._made


class _Listing:
    """A grid with these nodes alone, so that nobody waits for others to connect."""

    def __init__(self, grid: Grid) -> None:
        self._grid, self.nodes = grid, list[int]()

    def get_node_ids(self) -> Iterable[int]:
        """Return them."""
        return list(self.nodes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)


def shared_by_all(metrics: Sequence[MetricRecord]) -> list[MetricRecord]:
    """Return the entries that all clients have, and that are finite for all.

    Flower's own strategies average nothing, parameters neither, where metrics differ.
    """
    if not metrics:
        return []
    shared = set(_entries(metrics[0])).intersection(*map(_entries, metrics))
    names = [
        name
        for name in metrics[0]
        if name in dict(shared) and all(_finite(record[name]) for record in metrics)
    ]
    return [MetricRecord({k: record[k] for k in names}) for record in metrics]


def _entries(record: MetricRecord) -> dict[tuple[str, int], None]:
    """Return names with lengths, -1 for a number; in order."""
    return {
        (name, len(value) if isinstance(value, list) else -1): None
        for name, value in record.items()
    }


def _finite(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(x, int | float) and isfinite(x) for x in values)


def _like(params: Mapping[str, Tensor], arrays: ArrayRecord) -> dict[str, Tensor]:
    """Return the arrays in the parameters' order and dtypes: counters stay integers."""
    tensors = arrays_to_tensors(arrays)
    if odd := sorted(params.keys() ^ tensors.keys()):
        raise WireError("missing, or unexpected", field=odd[0])
    same = {}
    for key, value in params.items():
        if tensors[key].shape != value.shape:
            raise WireError(f"has shape {tuple(tensors[key].shape)}", field=key)
        whole = tensors[key].is_floating_point() and not value.is_floating_point()
        same[key] = (tensors[key].round() if whole else tensors[key]).to(value.dtype)
    return same


def _reply(
    upload: Upload[PlainUpload],
    metrics: MetricRecord,
    request: Message | None,
    key: str,
) -> Message:
    """Return the reply that a strategy is to see, with records of Flower's names.

    Who replied in an earlier life of the run need not have been asked in this one.
    """
    content = RecordDict({"arrays": upload.payload.to_arrays()})
    content["metrics"] = MetricRecord({**metrics, key: upload.num_examples})
    if request is None:
        request = Message(RecordDict(), upload.node_id, MessageType.TRAIN)
    return Message(content, reply_to=request)
