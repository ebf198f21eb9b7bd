"""Rounds of any of Flower's strategies, driven by its hooks and kept in a run."""

import logging
from collections.abc import Mapping
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message_type import MessageType
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
from flwr_fisher.server.admission import Admission
from flwr_fisher.server.checkpoint import ExchangeRecord
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.driver import Driver
from flwr_fisher.server.exchange import ServerState, Step, Upload
from flwr_fisher.server.kept import KeptExchange
from flwr_fisher.server.policy import Policy
from flwr_fisher.server.receive import receive, restore
from flwr_fisher.server.replies import shared_by_all
from flwr_fisher.server.waiting import Waiting
from flwr_fisher.wire import arrays_to_tensors
from flwr_fisher.wire.plain_upload import PlainUpload

logger = logging.getLogger("flwr")

# Flower's strategies that keep nothing from one round to the next.
_STATELESS = {Bulyan, FedAvg, FedMedian, FedProx, FedTrimmedAvg, Krum, MultiKrum}


class FlowerRounds:
    """A strategy of Flower's, of which nothing is known but its hooks.

    Parameters
    ----------
    strategy : Strategy
        Makes messages and aggregates replies.
    kind : type
        What it is, without what may be wrapped around it.
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
        kind: type,
        cohort: Cohort,
        weighted_by_key: str,
        policy: Policy,
        waiting: Waiting,
    ) -> None:
        self.strategy, self.kind, self.cohort = strategy, kind, cohort
        self.weighted_by_key, self.policy = weighted_by_key, policy
        self.waiting = waiting
        self._last = 0  # round that this object has driven

    def train(
        self, driver: Driver, server_round: int, config: ConfigRecord
    ) -> dict[str, MetricRecord]:
        """Have it do a round; return its clients' metrics by name.

        Raises
        ------
        RoundError
            If it aggregated nothing, or something that is no model.
        """
        if self._last != server_round - 1 and self.kind not in _STATELESS:
            logger.warning(
                "Resuming inside stage 1: what %s keeps from one round to the next, if "
                "anything, is in no checkpoint, and starts anew",
                self.kind.__name__,
            )
        run, grid = driver.run, driver.grid
        messages = list(
            self.strategy.configure_train(server_round, run.arrays(), config, grid)
        )
        connected, mailbox = list(grid.get_node_ids()), self.cohort.mailbox(grid)
        self.cohort.learn(mailbox, connected, driver.timeout)
        kept = run.kept(server_round, 1)
        admission = self._admission(run.state.params)
        admission.expected = len(messages)
        record = self._gather(driver, server_round, kept, admission, messages)
        uploads = admission.uploads(needed=0)
        for client, reason in admission.withdrawn.items():
            kept.set_aside(client, reason)
        requests = {self.cohort.name(m.metadata.dst_node_id): m for m in messages}
        records = shared_by_all([upload.metrics for upload in uploads])
        replies = [
            _reply(upload, own, requests.get(upload.client), self.weighted_by_key)
            for upload, own in zip(uploads, records, strict=True)
        ]
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        reasons = admission.rejected.lines()
        state = ServerState(
            self._params(run.state.params, arrays, reasons), run.state.groups
        )
        counts = {"num-replies": len(uploads), "num-rejected": len(admission.rejected)}
        joined = MetricRecord({**counts, **(metrics or {})})
        kept.close(record, [upload.client for upload in uploads])
        run.stepped(server_round, Step(state), [], joined)
        self._last = server_round
        return {upload.client: upload.metrics for upload in uploads}

    def _admission(self, like: Mapping[str, Tensor]) -> Admission[PlainUpload]:
        return Admission(
            self.cohort,
            PlainUpload.from_arrays,
            like,
            self.weighted_by_key,
            expected=0,
            policy=self.policy,
        )

    def _gather(
        self,
        driver: Driver,
        server_round: int,
        kept: KeptExchange,
        admission: Admission[PlainUpload],
        messages: list[Message],
    ) -> ExchangeRecord:
        """Collect the replies, and those that an interrupted run left on disk."""
        names = {m.metadata.dst_node_id: "" for m in messages}
        names = {node: self.cohort.name(node) for node in names}
        record = kept.record()
        restore(admission, kept, record)
        if record is not None and record.closed is not None:
            return record
        if record is None:
            record = kept.open(list(names.values()), len(messages), len(messages))
        done = admission.done()
        left = [m for m in messages if names[m.metadata.dst_node_id] not in done]
        new = partial(self._admission, driver.run.state.params)
        wanted = self.waiting.enough(len(messages))
        receive(
            driver.grid,
            self.cohort,
            server_round,
            admission,
            kept,
            left,
            driver.timeout,
            late=driver.late(self.cohort, new, kept, server_round),
            enough=lambda: len(admission.admitted) >= wanted,
        )
        return record

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
