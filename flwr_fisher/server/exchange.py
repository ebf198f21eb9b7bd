"""The types between server and strategy: state, exchange, upload and step.

A strategy returns a round's exchanges, and computes a step from each one's uploads. It
holds no state of its own, so a run can be resumed from its journal.

Long: half of it is docstrings.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from torch import Tensor

from flwr_fisher.errors import CheckpointError, ConfigurationError, check_known
from flwr_fisher.params import Params, weighted_mean
from flwr_fisher.server.privacy import Privacy
from flwr_fisher.wire import (
    ConfigValue,
    Payload,
    join_groups,
    named_options,
    split_groups,
    tensors_to_arrays,
)

P = TypeVar("P", bound=Payload)
Groups = Mapping[str, Params]
_GROUPS = "groups/"
_CLIENTS = ("sampled", "all")
# options that the library sets itself
_RESERVED = ("query", "report-local", "run", "seed", "tell-frozen")


class _Group(dict[str, Tensor]):
    """A group of tensors by name, which names itself in errors."""

    def __init__(self, name: str, tensors: Params) -> None:
        super().__init__(tensors)
        self.name = name

    def __missing__(self, key: str) -> Tensor:
        raise CheckpointError(
            f"the state's group '{self.name}' has no '{key}', only {sorted(self)}: "
            "resume with the version of flwr-fisher that began the run, or begin a "
            "new run in another checkpoint_dir. In a method of your own, return in "
            "each Step all groups that the next one reads"
        )


@dataclass(frozen=True)
class ServerState:
    """The server's state, on which the next round depends.

    Parameters
    ----------
    params : dict[str, Tensor]
        The global parameters and buffers.
    groups : Mapping[str, Mapping[str, Tensor]]
        A strategy's own tensors by the name of their group: moments, control variates,
        an optimiser's state. A group's name has no slash. What a step does not carry
        on into its new state is gone.

    Examples
    --------
    >>> import torch
    >>> state = ServerState({}, {"control": {"w": torch.zeros(1)}})
    >>> state.group("control"), state.group("moments")
    ({'w': tensor([0.])}, {})
    """

    params: dict[str, Tensor]
    groups: Groups = field(default_factory=dict)

    def group(self, name: str) -> Params:
        """Return the group of tensors of a name, or an empty one.

        Where a step reads a tensor of it that is not there, the error is a
        :class:`CheckpointError`, which names both.
        """
        return _Group(name, self.groups.get(name, {}))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name: parameters, and ``groups/<group>/<name>``."""
        return {**self.params, **join_groups(self.groups, _GROUPS)}

    @classmethod
    def from_tensors(cls, tensors: Params) -> "ServerState":
        """Return the state from the tensors of :meth:`to_tensors`."""
        return cls(*split_groups(tensors, _GROUPS))


@dataclass(frozen=True)
class Upload(Generic[P]):
    """A client's reply, checked and decoded.

    Parameters
    ----------
    node_id : int
        Who sent it, this time.
    client : str
        Who that is in every run: a registered name, ``partition-3``, or ``node-…``
        where nothing better is known.
    num_examples : float
        Its weight.
    payload : Payload
        What it computed.
    metrics : MetricRecord
        Its metrics.
    num_bytes : int
        The serialised size of what it sent.
    number : int
        What the client knows itself by: its partition, or its node's id.
    members : Sequence[int], default ()
        Where it stands for the sum over several clients: their numbers.
    limited : Mapping[str, float]
        What the policy has cut, and to which part of it: ``weight``, and parts of the
        payload. Empty for nothing.
    taken : float, default 1
        Which part is left of what the client also keeps, the exchange's `kept`.
    """

    node_id: int
    client: str
    num_examples: float
    payload: P
    metrics: MetricRecord
    num_bytes: int
    number: int = 0
    members: Sequence[int] = ()
    limited: Mapping[str, float] = field(default_factory=dict)
    taken: float = 1.0


WEIGHT = "weight"
Uploads = Sequence[Upload[P]]


def weights_of(uploads: Uploads[Any]) -> list[float]:
    """Return the clients' weights."""
    return [upload.num_examples for upload in uploads]


def mean_vector(uploads: Uploads[Any], name: str) -> dict[str, Tensor]:
    """Return the weighted mean of the clients' vectors of that name.

    Parameters
    ----------
    uploads : Sequence[Upload]
        Their payloads are ``Additive``.
    name : str
        A part of theirs.
    """
    vectors = [upload.payload.part(name) for upload in uploads]
    return weighted_mean(vectors, weights_of(uploads))


@dataclass(frozen=True)
class Step:
    """The result of a strategy's step.

    Parameters
    ----------
    state : ServerState
        The new state.
    metrics : Mapping[str, int | float | list[float]]
        What joins the round's aggregated train metrics.
    details : Any
        What the last step leaves for ``CurvatureResult.details``.
    summed : Upload, optional
        What stands for all clients' uploads, where only their sum is known.
    quiet : bool, default False
        Whether it is a step on the way to another, of which alone the log tells.
    """

    state: ServerState
    metrics: Mapping[str, int | float | list[float]] = field(default_factory=dict)
    details: Any = None
    summed: Upload[Any] | None = None
    quiet: bool = False


class Total(Protocol):
    """A running sum of uploads."""

    def __call__(self, payload: Any, weight: float) -> Any:
        """Add an upload; return it without its tensors."""

    def mean(self, uploads: Sequence[tuple[Any, float]]) -> Payload:
        """Return the mean of uploads, given them or their remains."""


@dataclass(frozen=True)
class Summation(Generic[P]):
    """How an exchange's uploads are summed, for a step that needs only their mean.

    Parameters
    ----------
    weighted : bool, default True
        Whether the step takes the mean, weighted by the clients' examples. Else the
        uploads have their weights in them.
    read : Callable[[ArrayRecord, Params], P], optional
        Reads the mean, or the sum, which has an upload's keys, shapes and dtypes.
        Default: as an upload is read.
    privacy : Privacy, optional
        Clients clip what they add, less the parameters that they were sent, and add
        noise to it; each then counts once.
    total : Total, optional
        Adds uploads up in any case, such as :class:`~flwr_fisher.wire.RunningMean`. It
        begins anew with each exchange.
    alone : bool, default True
        Whether the step is given `total`'s mean alone, as one upload.
    keep_all : bool, default False
        Whether all uploads are kept until the last, since a policy weighs them against
        each other. Else `total` is given each as it comes, and no more than one is
        kept.
    """

    weighted: bool = True
    read: Callable[[ArrayRecord, Params], P] | None = None
    privacy: Privacy | None = None
    total: Total | None = None
    alone: bool = True
    keep_all: bool = False

    def mean(self, total: Total, uploads: Uploads[Any]) -> Upload[Any]:
        """Return the uploads' mean as one upload, of all their clients."""
        mean = total.mean([(u.payload, self.weight(u.num_examples)) for u in uploads])
        members = uploads[0].members or [upload.number for upload in uploads]
        weight = math.fsum(upload.num_examples for upload in uploads)
        name, none = f"the mean over {len(members)} clients", MetricRecord()
        return Upload(0, name, weight, mean, none, num_bytes=0, members=members)

    def weight(self, num_examples: float) -> float:
        """Return an upload's weight in the sum."""
        return num_examples if self.weighted and self.privacy is None else 1.0

    def add(self, payload: P, weight: float) -> P:
        """Add an arriving upload; return it without its tensors."""
        assert self.total is not None
        left: P = self.total(payload, self.weight(weight))
        return left


@dataclass(frozen=True)
class Exchange(Generic[P]):
    """One request to the sampled clients, and the step from their replies.

    Parameters
    ----------
    options : Mapping[str, …]
        What the clients are to do: ``job``, by default to train, and what it takes.
        They join ``train_config`` in the ``ConfigRecord``, as ``fisher.job``, ….
    read : Callable[[ArrayRecord, Params], P]
        Decodes and checks a reply, given the parameters that were sent out; raises
        ``WireError``.
    step : Callable[[ServerState, Uploads[P]], Step]
        Makes the next state of the uploads, which are at least one.
    send : Callable[[ServerState], Mapping[str, Mapping[str, Tensor]]]
        What is sent beside the parameters, in named groups.
    start : Callable[[ServerState], Params]
        The parameters and buffers that are sent out, where they are not the state's.
    clients : "sampled" | "all" | Callable[[ServerState], Collection[int]]
        Who is asked: by default the strategy's fraction of those that are connected, or
        all of these, or those with the numbers that are returned.
    require_same_parameters : bool, default False
        Leave out those that train other parameters than most, or freeze other values,
        before they train.
    additive : Summation, optional
        How a sum may take the uploads' place; None: the step needs each by itself.
    kept : str
        The part of an upload that clients also keep on their disks. Where the policy
        cuts it, what they keep changes by no more than what the server took: they are
        told with their next request, by ``Membership``.
    check : Callable[[ServerState], Callable[[P], None]], optional
        Makes, once an exchange, what refuses an upload that cannot be an answer to what
        was sent: it raises ``WireError``.

    Raises
    ------
    ConfigurationError
        If an option has a name that the library gives itself, or a value that a
        ``ConfigRecord`` cannot hold, or `clients` is another word.
    """

    options: Mapping[str, ConfigValue]
    read: Callable[[ArrayRecord, Params], P]
    step: Callable[[ServerState, Uploads[P]], Step]
    send: Callable[[ServerState], Groups] = lambda state: {}
    start: Callable[[ServerState], Params] = lambda state: state.params
    clients: str | Callable[[ServerState], Collection[int]] = "sampled"
    require_same_parameters: bool = False
    additive: Summation[P] | None = None
    kept: str = ""
    check: Callable[[ServerState], Callable[[P], None]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.clients, str):
            check_known("clients", self.clients, _CLIENTS)
        for name, value in self.options.items():
            if name in _RESERVED:
                raise ConfigurationError(
                    f"the option {name!r} of an Exchange is reserved, because the "
                    "library sends it itself: use another name"
                )
            try:
                ConfigRecord({name: value})
            except TypeError as error:
                raise ConfigurationError(
                    f"the option {name!r} of an Exchange is {value!r:.80}, but a "
                    "ConfigRecord holds only numbers, texts, bytes and lists of "
                    "these: pass one of them, or leave the option out"
                ) from error

    @property
    def fold(self) -> Callable[[P, float], P] | None:
        """The function that adds an arriving upload to the sum, if there is one."""
        own = self.additive
        return None if own is None or own.total is None or own.keep_all else own.add

    def take(self, state: ServerState, uploads: Uploads[P]) -> Step:
        """Take the step, with the uploads or with their mean."""
        own = self.additive
        if own is not None and own.total is not None and own.alone:
            uploads = [own.mean(own.total, uploads)]
        return self.step(state, uploads)

    def configure(self, base: ConfigRecord) -> ConfigRecord:
        """Return a new record with the caller's entries and the options."""
        return ConfigRecord({**base, **named_options(self.options)})

    @property
    def log_name(self) -> str:
        """The exchange's name in the log, empty for the only one of a round."""
        return ""

    def records(self, state: ServerState) -> Callable[[int], ArrayRecord]:
        """Return a function from a client's number to the record to send.

        Here it is the same for all.
        """
        record = self.arrays(state)
        return lambda number: record

    def arrays(self, state: ServerState, own: Groups | None = None) -> ArrayRecord:
        """Return the record to send: parameters, and groups beside them.

        Parameters
        ----------
        state : ServerState
            Where the run stands.
        own : Mapping[str, Mapping[str, Tensor]], optional
            Groups for one client alone.
        """
        groups = {**self.send(state), **(own or {})}
        return tensors_to_arrays({**self.start(state), **join_groups(groups)})


@runtime_checkable
class Secure(Protocol):
    """The interface of a strategy's ``secure=``, which replaces uploads by secure sums.

    :class:`flwr_fisher.secure.SecureSums` is one.
    """

    @property
    def bits(self) -> int:
        """How many bits a summed number has."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must have in common, as JSON."""

    def check(self, exchanges: Sequence[Exchange[Any]], who: str) -> None:
        """Raise :class:`ConfigurationError` unless sums can replace the uploads."""

    def secured(
        self, exchanges: Sequence[Exchange[Any]], *, seed: str, weighted_by: str
    ) -> Sequence[Exchange[Any]]:
        """Return the exchanges that replace a round's, and show only sums."""
