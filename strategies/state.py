"""What a strategy hands from one step to the next: frozen values, in and out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.app.typing import ConfigRecordValues
from flwr.serverapp.strategy import Result
from torch import Tensor

from flwr_fisher.errors import StructureError
from flwr_fisher.merge import DiagonalSums, LocalPosterior
from flwr_fisher.params import Params
from flwr_fisher.wire import FisherUpload, SumsUpload

__all__ = ["CurvatureResult", "Exchange", "Payload", "ServerState", "Step", "Upload"]


class Payload(Protocol):
    """What a client computed, decoded and checked.

    One whose layout is not of parameters has ``disagrees``: a field, and what is wrong
    with a layout there that is not most clients'.
    """

    def layout(self) -> tuple[str, ...]:
        """Return what all clients of a round must have in common."""


Reader = Callable[[ArrayRecord, Params], Payload]


@dataclass(frozen=True)
class Exchange:
    """One request to the sampled clients.

    Parameters
    ----------
    config : Mapping[str, …]
        What the clients are to do; it joins ``train_config`` in the ``ConfigRecord``.
    read : Callable[[ArrayRecord, Params], Payload]
        Decodes and checks a reply, given the parameters that were sent out; raises
        ``WireError``.
    send : Callable[[ServerState], Params]
        What is sent beside the parameters, by name; a client finds it under
        ``server/``.
    step : Callable[[ServerState, Sequence[Upload]], Step], optional
        What the uploads make of the state, where it is not the strategy's ``step``: in
        a round of two exchanges, the first's.
    start : Callable[[ServerState], Params]
        The parameters and buffers that are sent out, where they are not the state's.
    """

    config: Mapping[str, ConfigRecordValues] = field(default_factory=dict)
    read: Reader = FisherUpload.from_arrays
    send: "Callable[[ServerState], Params]" = lambda state: {}
    step: "Callable[[ServerState, Sequence[Upload]], Step] | None" = None
    start: "Callable[[ServerState], Params]" = lambda state: state.params

    def configure(self, base: ConfigRecord) -> ConfigRecord:
        """Return a new record: the caller's keys, and over them the exchange's."""
        return ConfigRecord({**base, **self.config})


@dataclass(frozen=True)
class Upload:
    """A client's reply, checked and decoded.

    Parameters
    ----------
    node_id : int
        Who sent it, this time.
    client : str
        Who that is in every run: ``partition-3``, or ``node-…`` where nothing better is
        known.
    num_examples : float
        Its weight.
    payload : Payload
        What it computed.
    metrics : MetricRecord
        Its metrics.
    num_bytes : int
        The serialised size of what it sent.
    """

    node_id: int
    client: str
    num_examples: float
    payload: Payload
    metrics: MetricRecord
    num_bytes: int

    @property
    def posterior(self) -> LocalPosterior:
        """A ``FisherUpload`` as the merging functions take it."""
        payload = self.payload
        if not isinstance(payload, FisherUpload):
            raise StructureError(
                f"{self.client} uploaded a {type(payload).__name__}, which has no "
                "posterior: with aggregate='sums' there is only upload.sums"
            )
        return LocalPosterior(payload.params, payload.curvature, self.num_examples)

    @property
    def sums(self) -> DiagonalSums:
        """A ``SumsUpload`` as :func:`flwr_fisher.merge.add_sums` takes it."""
        if not isinstance(self.payload, SumsUpload):
            raise StructureError(
                f"{self.client} uploaded a {type(self.payload).__name__}, not the sums "
                "of aggregate='sums'"
            )
        return self.payload.sums


@dataclass(frozen=True)
class ServerState:
    """Everything that the next round depends on.

    Parameters
    ----------
    params : dict[str, Tensor]
        The global parameters and buffers.
    extra : dict[str, Tensor]
        A strategy's own tensors: moments, control variates, an optimiser's state.
    """

    params: dict[str, Tensor]
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What a strategy's ``step`` returns.

    Parameters
    ----------
    state : ServerState
        The new state.
    metrics : dict[str, int | float | list[float]]
        What joins the round's aggregated train metrics.
    details : Any
        What the last step leaves for ``CurvatureResult.details``.
    """

    state: ServerState
    metrics: dict[str, int | float | list[float]] = field(default_factory=dict)
    details: Any = None


@dataclass(repr=False)
class CurvatureResult(Result):
    """Flower's ``Result``, and what the last round was made of.

    Attributes
    ----------
    uploads : list[Upload]
        The uploads of the last round's last exchange, in the clients' order; empty if
        a resumed run had nothing left to do.
    details : Any
        What the strategy reports of its last step; see each strategy.
    """

    uploads: list[Upload] = field(default_factory=list)
    details: Any = None
