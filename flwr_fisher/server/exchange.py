"""The types between server and strategy: state, exchange, upload and step.

A round is a list of exchanges, which a strategy returns. The server sends an exchange's
request to clients, checks their replies, and gives them as uploads to the exchange's
step, which returns the next state. A strategy holds no state of its own, so a run can
be resumed from its journal.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, WireError, check_known, listed, plain
from flwr_fisher.params import NORM_STATISTICS, Params, weighted_mean
from flwr_fisher.server.privacy import Privacy
from flwr_fisher.wire import (
    ConfigValue,
    Payload,
    arrays_to_tensors,
    join_groups,
    split_groups,
    tensors_to_arrays,
)

P = TypeVar("P", bound=Payload)
Groups = Mapping[str, Params]
_GROUPS = "groups/"
*_, _COUNT = NORM_STATISTICS
_CLIENTS = ("sampled", "all", "previous")
# options that the library sets itself
_RESERVED = ("query", "run", "seed", "tell")


@dataclass(frozen=True)
class ServerState:
    """The server's state, on which the next round depends.

    Parameters
    ----------
    params : dict[str, Tensor]
        The global parameters and buffers.
    groups : Mapping[str, Mapping[str, Tensor]]
        A strategy's own tensors by the name of their group: moments, control variates,
        an optimiser's state. A group's name has no slash. A group that a step does not
        put into the new state is lost.

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
        """Return the group of tensors of a name, or an empty one."""
        return self.groups.get(name, {})

    def without(self, *names: str) -> Groups:
        """Return all groups but those of these names."""
        return {k: v for k, v in self.groups.items() if k not in names}

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name: parameters, and ``groups/<group>/<name>``."""
        return {**self.params, **join_groups(self.groups, _GROUPS)}

    @classmethod
    def from_tensors(cls, tensors: Params) -> "ServerState":
        """Return the state from the tensors of :meth:`to_tensors`."""
        return cls(*split_groups(tensors, _GROUPS))

    @classmethod
    def first(cls, arrays: ArrayRecord, groups: Groups) -> "ServerState":
        """Return a run's first state.

        Flower's own strategies average a batch norm's count of batches, too, and return
        it as a float. Here it becomes an integer again, as clients have it.

        Raises
        ------
        ConfigurationError
            If an array is not finite, or of a dtype that cannot be trained.
        """
        try:
            params = arrays_to_tensors(arrays)
        except WireError as error:
            raise ConfigurationError(
                f"the initial arrays cannot be trained: {error}"
            ) from error
        for name, value in params.items():
            if name.rpartition(".")[2] == _COUNT and value.is_floating_point():
                params[name] = value.round().long()
        return cls(params, groups)


@dataclass(frozen=True)
class Upload(Generic[P]):
    """A client's reply, checked and decoded.

    Parameters
    ----------
    node_id : int
        The node that sent it; its id differs from run to run.
    client : str
        The client's name, the same in every run: its registered name, or
        ``partition-3``, or ``node-…`` if neither is known.
    num_examples : float
        The client's weight.
    payload : Payload
        What the client computed.
    metrics : MetricRecord
        The client's metrics.
    num_bytes : int
        The size of the reply.
    number : int
        The number by which the client knows itself: its partition, or its node's id.
    members : Sequence[int], default ()
        If this upload is the sum over several clients, as `additive` and `secure` make
        it: their numbers.
    limited : Mapping[str, float]
        What the policy has cut (``weight``, and parts of the payload), with the share
        that is left. Empty if it has cut nothing.
    taken : float, default 1
        Only with the exchange's `kept`: the share that is left of that part.
    likelihood : str, default ""
        The client's likelihood; empty if it does not say.
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
    likelihood: str = ""


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
        Uploads whose payloads are ``Additive``.
    name : str
        The name of a part of these payloads.
    """
    vectors = [upload.payload.part(name) for upload in uploads]
    return weighted_mean(vectors, weights_of(uploads))


def check_groups(groups: object, who: str) -> None:
    """Raise :class:`ConfigurationError` unless `who` returned groups of tensors."""
    if not isinstance(groups, Mapping):
        raise ConfigurationError(
            f"{who} returned {groups!r:.40}, but the groups of a state are a dict of "
            "dicts of tensors"
        )
    for name, group in groups.items():
        _check_tensors(group, f"{who} returned the group {name!r}")


def _check_tensors(tensors: object, what: str) -> None:
    if not isinstance(tensors, Mapping) or not all(
        isinstance(value, Tensor) for value in tensors.values()
    ):
        raise ConfigurationError(f"{what} as {tensors!r:.80}, not as a dict of tensors")


def _forms(params: Params) -> dict[str, str]:
    """Return each tensor's dtype and shape, as text."""
    return {k: f"{v.dtype} of {tuple(v.shape)}" for k, v in params.items()}


def metrics_from(returned: object, who: str) -> MetricRecord | None:
    """Return the metrics that a user's function returned, or None for none.

    Raises
    ------
    ConfigurationError
        If a run's journal, and a ``MetricRecord``, cannot hold them.
    """
    try:
        if returned is None:
            return None
        metrics = dict(returned)  # type: ignore[call-overload]
        return MetricRecord({name: plain(value) for name, value in metrics.items()})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{who} must return a MetricRecord of numbers or None, got "
            f"{returned!r:.80} ({error})"
        ) from error


@dataclass(frozen=True)
class Step:
    """The result of an exchange's step.

    Parameters
    ----------
    state : ServerState
        The new state.
    metrics : Mapping[str, int | float | list[float]]
        Metrics that are added to the round's aggregated train metrics.
    details : Any
        After the last exchange that is not optional, this becomes
        ``CurvatureResult.details``.
    summed : Upload, optional
        The one upload that replaces all clients' uploads, if only their sum is known.
    quiet : bool, default False
        Whether its metrics are not logged, because it only prepares a later step, or
        logs what it does.
    """

    state: ServerState
    metrics: Mapping[str, int | float | list[float]] = field(default_factory=dict)
    details: Any = None
    summed: Upload[Any] | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Summation(Generic[P]):
    """How an exchange's uploads are summed, for a step that needs only their mean.

    Parameters
    ----------
    weighted : bool, default True
        Whether the step takes the mean, weighted by the clients' examples. If not, the
        uploads are already multiplied by their weights.
    read : Callable[[ArrayRecord, Params], P], optional
        Reads the mean or the sum, which has the keys, shapes and dtypes of an upload.
        Default: the function that reads an upload.
    privacy : Privacy, optional
        Each client subtracts the parameters that it received from its contribution,
        clips the difference, and adds noise to it. Each client then counts once.
    mean : Callable[[Sequence[tuple[P, float]]], P], optional
        Takes the weighted mean also without a secure sum, such as
        :func:`~flwr_fisher.wire.exact_mean`; then the step always receives one upload.
    bits : 32 | 64, default 32
        The fewest bits of a number in a secure sum. Sums of squares need 64: with 32,
        rounding can make a matrix of second moments indefinite.
    """

    weighted: bool = True
    read: Callable[[ArrayRecord, Params], P] | None = None
    privacy: Privacy | None = None
    mean: Callable[[Sequence[tuple[P, float]]], P] | None = None
    bits: int = 32


@dataclass(frozen=True)
class Exchange(Generic[P]):
    """One request to clients, and the step from their replies.

    Parameters
    ----------
    options : Mapping[str, …]
        What the clients must do: ``job``, by default the training, and the job's
        options. They are added to ``train_config`` in the ``ConfigRecord``, as
        ``fisher.job``, ….
    read : Callable[[ArrayRecord, Params], P]
        Decodes and checks a reply, from the parameters that were sent out; raises
        ``WireError``.
    step : Callable[[ServerState, Uploads[P]], Step]
        Computes the next state from the uploads, at least one.
    send : Callable[[ServerState], Mapping[str, Mapping[str, Tensor]]]
        Further tensors to send with the parameters, in named groups.
    start : Callable[[ServerState], Params]
        The parameters and buffers to send, if they are not those of the state.
    clients : "sampled" | "all" | "previous" | Callable[[ServerState], Collection[int]]
        Which clients receive the request: by default the strategy's fraction of those
        that are connected, the same ones in each exchange of a round; or all that are
        connected; or those whose uploads the round's exchange before this one used,
        with the weights that they had there (optional ones that asked such clients do
        not count); or those with the returned numbers.
    require_same_parameters : bool, default False
        Skip, before they train, clients that train other parameters than most, or whose
        frozen parameters have other values.
    additive : Summation, optional
        With ``Summation()``, the step may receive one upload: the mean of all, with
        their total weight. Write it with `weighted_mean`, and it is right in both
        cases. By default it receives each client's upload.
    kept : str
        The part of an upload that clients also keep on their disks. If the policy cuts
        it, the clients also keep only the share that the server used. They learn this
        share with their next request, from ``Membership``.
    measure : Callable[[ServerState], Callable[[P], Mapping[str, float]]], optional
        Called once in an exchange. It returns a function that looks at an upload beside
        what was sent. The function returns further lengths of steps for the policy, by
        the part to cut. It raises ``WireError`` for an upload that cannot be the
        answer.
    name : str
        Its name in the log. With a name, ``CurvatureResult.exchange_uploads`` keeps the
        last round's uploads under it.
    optional : bool, default False
        Whether the round is good without it. Only clients that are connected are asked,
        half of those that it names are enough, and who does not answer is skipped. If
        it fails, the model of the step before remains, and the log says so. Its step
        does not change the result's `uploads` and `details`. Clients are weighted by
        their examples.
    refines : bool, default False
        Whether it improves a model that is already whole. ``CurvatureResult.unrefined``
        is the model before the first such exchange of the last round. The next round
        begins from that model, so ask for it in the last round alone: ``if server_round
        == self.num_rounds``.
    prepare : Callable[[ServerState, ServerState], Exchange | None], optional
        Called when its turn comes, with the states at the begin of the round and now.
        It returns the exchange to do in its place, usually ``replace(exchange,
        options=…)``; or None, to leave it out.
    quiet : bool, default False
        Whether its replies are not logged one by one.
    limit_curvature : bool, default True
        Whether the policy's `max_curvature` holds for its uploads. It need not where
        the step itself limits what a client's curvature counts.

    Raises
    ------
    ConfigurationError
        If an option has a name that the library gives itself, or `clients` is a word
        with no meaning here.
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
    measure: Callable[[ServerState], Callable[[P], Mapping[str, float]]] | None = None
    name: str = ""
    optional: bool = False
    refines: bool = False
    prepare: "Callable[[ServerState, ServerState], Exchange[P] | None] | None" = None
    quiet: bool = False
    limit_curvature: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.clients, str):
            check_known("clients", self.clients, _CLIENTS)
        if reserved := sorted(self.options.keys() & set(_RESERVED)):
            raise ConfigurationError(
                f"the option {reserved[0]!r} of an Exchange is the library's own: use "
                "another name"
            )

    @property
    def log_name(self) -> str:
        """The exchange's name in the log."""
        return self.name or str(self.options.get("job", "train"))

    def take(self, state: ServerState, uploads: Uploads[P]) -> Step:
        """Take the step, with the uploads or with their mean.

        Raises
        ------
        ConfigurationError
            If the strategy's function returned something else than a step, or params
            of other names, shapes or dtypes than the model's. It names the function.
        """
        if self.additive is not None and self.additive.mean is not None:
            uploads = [_joined(uploads, self.additive.mean)]
        step: object = self.step(state, uploads)
        function = getattr(self.step, "func", self.step)  # of a partial
        who = getattr(function, "__qualname__", repr(function))
        if not isinstance(step, Step) or not isinstance(step.state, ServerState):
            raise ConfigurationError(
                f"{who} returned {step!r:.80}, but a step must return "
                "Step(ServerState(params, groups), metrics)"
            )
        _check_tensors(step.state.params, f"{who} returned the params")
        model, made = _forms(state.params), _forms(step.state.params)
        # TCT's "tct/weight" may be new: no parameter's name has a slash.
        names = {*model, *(name for name in made if "/" not in name)}
        if wrong := sorted(k for k in names if model.get(k) != made.get(k)):
            ours, theirs = (form.get(wrong[0], "absent") for form in (model, made))
            raise ConfigurationError(
                f"{who} returned params that are not the model's in {listed(wrong)}: "
                f"'{wrong[0]}' is {ours} in the model, and {theirs} there. Return "
                "ServerState({**state.params, **changed}, groups)"
            )
        check_groups(step.state.groups, who)
        metrics: Any = metrics_from(step.metrics, f"{who} in the metrics of its Step")
        return replace(step, metrics=metrics or {})

    def numbers(
        self, state: ServerState, previous: Mapping[int, float]
    ) -> Collection[int] | None:
        """Return the numbers of the clients to ask, or None if they are sampled."""
        if not isinstance(self.clients, str):
            return self.clients(state)
        return previous.keys() if self.clients == "previous" else None

    def records(self, state: ServerState) -> Callable[[int], ArrayRecord]:
        """Return a function from a client's number to the record to send.

        Here the record is the same for all clients.
        """
        record = tensors_to_arrays(self.tensors(state))
        return lambda number: record

    def tensors(self, state: ServerState) -> Params:
        """Return what all clients are sent: parameters and groups."""
        return {**self.start(state), **join_groups(self.send(state))}


def _joined(
    uploads: Uploads[P], mean: Callable[[Sequence[tuple[P, float]]], P]
) -> Upload[P]:
    """Return the uploads' mean as one upload, of all their clients."""
    payload = mean([(upload.payload, upload.num_examples) for upload in uploads])
    members = uploads[0].members or [upload.number for upload in uploads]
    weight = math.fsum(weights_of(uploads))
    name, none = f"the mean over {len(members)} clients", MetricRecord()
    return Upload(0, name, weight, payload, none, num_bytes=0, members=members)


def sessions(exchanges: Sequence[Exchange[Any]]) -> Iterator[list[Exchange[Any]]]:
    """Yield the exchanges that succeed or fail together, and share a secure sum's keys.

    An exchange that is optional, or prepared when its turn comes, is one by itself.
    """

    def is_alone(exchange: Exchange[Any]) -> bool:
        return exchange.optional or exchange.prepare is not None

    for alone, group in groupby(exchanges, is_alone):
        if alone:
            yield from ([exchange] for exchange in group)
        else:
            yield list(group)


@runtime_checkable
class Secure(Protocol):
    """The interface of a strategy's ``secure=``, which replaces uploads by secure sums.

    :class:`flwr_fisher.secure.SecureSums` is one.
    """

    def settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must have in common, as JSON."""

    def check(self, exchanges: Sequence[Exchange[Any]], who: str) -> None:
        """Raise :class:`ConfigurationError` unless sums can replace the uploads."""

    def secured(
        self, exchanges: Sequence[Exchange[Any]], *, seed: str, weighted_by: str
    ) -> Sequence[Exchange[Any]]:
        """Return the exchanges that replace these, and show only sums."""
