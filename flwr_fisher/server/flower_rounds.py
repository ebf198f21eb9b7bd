"""Rounds of any of Flower's strategies, driven by its hooks and kept in a run."""

import logging
from collections.abc import Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
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
from flwr_fisher.server.admission import read_reply
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.collect import collect
from flwr_fisher.server.driver import Driver
from flwr_fisher.server.exchange import ServerState, Step
from flwr_fisher.wire import arrays_to_tensors

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
    """

    def __init__(
        self, strategy: Strategy, kind: type, cohort: Cohort, weighted_by_key: str
    ) -> None:
        self.strategy, self.kind, self.cohort = strategy, kind, cohort
        self.weighted_by_key = weighted_by_key
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
        nodes = [message.metadata.dst_node_id for message in messages]
        self.cohort.learn(grid, nodes, driver.timeout)
        folder = run.folder(server_round, 1)
        replies, rejected = self._replies(driver, folder, messages)
        good = {n: reply for n, reply in replies.items() if n not in rejected}
        arrays, metrics = self.strategy.aggregate_train(server_round, replies.values())
        reasons = [f"{name}: {reason}" for name, reason in rejected.items()]
        state = ServerState(
            self._params(run.state.params, arrays, reasons), run.state.groups
        )
        counts = {"num-replies": len(good), "num-rejected": len(rejected)}
        joined = MetricRecord({**counts, **(metrics or {})})
        run.stepped(server_round, Step(state), [], joined)
        self._last = server_round
        return {n: _only_metrics(reply) for n, reply in good.items()}

    def _order(self, reply: Message) -> tuple[int, int]:
        return self.cohort.order(reply.metadata.src_node_id)

    def _replies(
        self, driver: Driver, folder: str, messages: list[Message]
    ) -> tuple[dict[str, Message], dict[str, str]]:
        """Return replies by client, in order, and why some are of no use.

        The strategy sees those that failed, not those that it could not read.
        """
        name, run = self.cohort.name, driver.run
        waiting = {name(m.metadata.dst_node_id): m for m in messages}
        replies, rejected = {}, {}
        for client, arrays, metrics in run.load_uploads(folder):
            if (message := waiting.pop(client, None)) is not None:
                content = RecordDict({"arrays": arrays, "metrics": metrics})
                replies[client] = Message(content, reply_to=message)
        for reply in collect(driver.grid, list(waiting.values()), driver.timeout):
            node = reply.metadata.src_node_id
            try:
                records = read_reply(reply, self.weighted_by_key)
                run.save_upload(folder, name(node), *records)
                arrays_to_tensors(records[0])
            except WireError as error:
                rejected[name(node)] = str(error.from_node(node))
                logger.warning("stage 1: left out %s: %s", name(node), error)
                if not reply.has_error():
                    continue
            replies[name(node)] = reply
        ordered = sorted(replies, key=lambda client: self._order(replies[client]))
        return {client: replies[client] for client in ordered}, rejected

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


def _only_metrics(reply: Message) -> MetricRecord:
    (metrics,) = reply.content.metric_records.values()
    return metrics
