"""Any of Flower's strategies, driven by its hooks within another strategy's run."""

import logging
from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import InconsistentMessageReplies
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

from flwr_fisher.errors import ConfigurationError, RoundError, WireError
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.cohort import Cohort
from flwr_fisher.strategies.repeatable import Repeatable
from flwr_fisher.strategies.replies import read_reply
from flwr_fisher.strategies.run import Run
from flwr_fisher.strategies.state import ServerState, Step
from flwr_fisher.wire import arrays_to_tensors
from flwr_fisher.wire.nodes import collect

__all__ = ["FirstStage"]

logger = logging.getLogger("flwr")

_EXTRA = "stage1/"
# Flower's strategies that keep nothing from one round to the next.
_STATELESS = {Bulyan, FedAvg, FedMedian, FedProx, FedTrimmedAvg, Krum, MultiKrum}


class FirstStage:
    """Runs a strategy's rounds and keeps them in a :class:`Run`.

    Parameters
    ----------
    strategy : Strategy
        Flower's, or one of this library's whose rounds have one exchange. What the
        latter keep between rounds is in the run's state, under ``stage1/``.
    cohort : Cohort
        Knows the clients' names.
    weighted_by_key : str
        A metric that every reply has.

    Raises
    ------
    ConfigurationError
        If it is no strategy, or one that its hooks cannot drive.
    """

    def __init__(
        self, strategy: Strategy, cohort: Cohort, weighted_by_key: str
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise ConfigurationError(
                "stage1 must be an instance of a Flower Strategy, such as FedProx(), "
                f"not {strategy!r}"
            )
        inner = strategy.strategy if isinstance(strategy, Repeatable) else strategy
        if isinstance(inner, CurvatureStrategy) and len(inner.exchanges(1)) > 1:
            raise ConfigurationError(
                f"a round of {type(inner).__name__} has more than one exchange, and "
                "stage1 is driven by hooks that know one: take another strategy, such "
                "as FedAvg, FedProx or Scaffold"
            )
        self.strategy, self._inner, self._cohort = strategy, inner, cohort
        self._weighted_by_key = weighted_by_key
        self._last = 0  # round that this object has driven

    @property
    def name(self) -> str:
        """What the log calls it."""
        return type(self._inner).__name__

    def extra(self) -> dict[str, Tensor]:
        """Return what a new run's state holds of it."""
        inner = self._inner
        own = inner.extra() if isinstance(inner, CurvatureStrategy) else {}
        return {f"{_EXTRA}{key}": value for key, value in own.items()}

    def options(self) -> dict[str, Any]:
        """Return what a resumed run must have in common."""
        inner = self._inner
        own = inner.options() if isinstance(inner, CurvatureStrategy) else {}
        return {"stage1": self.name, "stage1_options": own}

    def train(
        self,
        grid: Grid,
        run: Run,
        server_round: int,
        config: Mapping[str, Any],
        timeout: float,
    ) -> dict[str, MetricRecord]:
        """Have it do a round; return its clients' metrics by name.

        Raises
        ------
        RoundError
            If it aggregated nothing, or something that is no model.
        """
        self._resume(run, server_round, timeout)
        messages = list(
            self.strategy.configure_train(
                server_round, run.arrays(), ConfigRecord({**config}), grid
            )
        )
        nodes = [message.metadata.dst_node_id for message in messages]
        self._cohort.learn(grid, nodes, timeout)
        place = CurvatureStrategy._place(server_round, 1)
        replies, rejected = self._replies(grid, run, place, messages, timeout)
        good = {n: reply for n, reply in replies.items() if n not in rejected}
        arrays, metrics = self.strategy.aggregate_train(server_round, replies.values())
        reasons = [f"{name}: {reason}" for name, reason in rejected.items()]
        state = self._state(run, arrays, reasons)
        counts = {"num-replies": len(good), "num-rejected": len(rejected)}
        joined = MetricRecord({**counts, **(metrics or {})})
        run.stepped(server_round, Step(state, {"stage": 1}), [], joined)
        self._last = server_round
        return {n: _only_metrics(reply) for n, reply in good.items()}

    def evaluate(
        self,
        grid: Grid,
        run: Run,
        server_round: int,
        config: Mapping[str, Any],
        timeout: float,
    ) -> None:
        """Have it evaluate on clients."""
        told = ConfigRecord({**config})
        messages = self.strategy.configure_evaluate(
            server_round, run.arrays(), told, grid
        )
        replies = sorted(collect(grid, messages, timeout), key=self._order)
        try:
            found = self.strategy.aggregate_evaluate(server_round, replies)
        except InconsistentMessageReplies as error:
            logger.warning("aggregate_evaluate: left out the round: %s", error)
            return
        run.client_evaluated(server_round, found)

    def _order(self, reply: Message) -> tuple[int, int]:
        return self._cohort.order(reply.metadata.src_node_id)

    def _resume(self, run: Run, server_round: int, timeout: float) -> None:
        """Put the strategy's state back as the run has it."""
        if isinstance(self._inner, CurvatureStrategy):
            extra = {
                key.removeprefix(_EXTRA): value
                for key, value in run.state.extra.items()
                if key.startswith(_EXTRA)
            }
            self._inner._state = ServerState({}, extra)
            self._inner._timeout = timeout
        elif self._last != server_round - 1 and type(self._inner) not in _STATELESS:
            logger.warning(
                "Resuming inside stage 1: what %s keeps from one round to the next, if "
                "anything, is in no checkpoint, and starts anew",
                self.name,
            )

    def _replies(
        self,
        grid: Grid,
        run: Run,
        place: str,
        messages: list[Message],
        timeout: float,
    ) -> tuple[dict[str, Message], dict[str, str]]:
        """Return replies by client, in order, and why some are of no use.

        The strategy sees those that failed, not those that it could not read.
        """
        name = self._cohort.name
        waiting = {name(m.metadata.dst_node_id): m for m in messages}
        replies, rejected = {}, {}
        for client, arrays, metrics in run.load_uploads(place):
            if (message := waiting.pop(client, None)) is not None:
                content = RecordDict({"arrays": arrays, "metrics": metrics})
                replies[client] = Message(content, reply_to=message)
        for reply in collect(grid, list(waiting.values()), timeout):
            node = reply.metadata.src_node_id
            try:
                records = read_reply(reply, self._weighted_by_key)
                run.save_upload(place, name(node), *records)
                arrays_to_tensors(records[0])
            except WireError as error:
                rejected[name(node)] = str(error.from_node(node))
                logger.warning("stage 1: left out %s: %s", name(node), error)
                if not reply.has_error():
                    continue
            replies[name(node)] = reply
        found = sorted(replies, key=lambda client: self._order(replies[client]))
        return {client: replies[client] for client in found}, rejected

    def _state(
        self, run: Run, arrays: ArrayRecord | None, reasons: list[str]
    ) -> ServerState:
        """Return the run's state with the new model in it."""
        if arrays is None:
            raise RoundError(
                f"{self.name} aggregated nothing in stage 1:\n" + "\n".join(reasons)
            )
        extra = {k: v for k, v in run.state.extra.items() if not k.startswith(_EXTRA)}
        if isinstance(self._inner, CurvatureStrategy):
            own = self._inner._state.extra
            extra |= {f"{_EXTRA}{key}": value for key, value in own.items()}
        try:
            return ServerState(_like(run.state.params, arrays), extra)
        except WireError as error:
            raise RoundError(
                f"{self.name} made no model in stage 1: {error}"
            ) from error


def _like(params: Mapping[str, Tensor], arrays: ArrayRecord) -> dict[str, Tensor]:
    """Return the arrays in the parameters' order and dtypes: counters stay integers."""
    found = arrays_to_tensors(arrays)
    if odd := sorted(params.keys() ^ found.keys()):
        raise WireError("missing, or unexpected", field=odd[0])
    same = {}
    for key, value in params.items():
        if found[key].shape != value.shape:
            raise WireError(f"has shape {tuple(found[key].shape)}", field=key)
        whole = found[key].is_floating_point() and not value.is_floating_point()
        same[key] = (found[key].round() if whole else found[key]).to(value.dtype)
    return same


def _only_metrics(reply: Message) -> MetricRecord:
    (metrics,) = reply.content.metric_records.values()
    return metrics
