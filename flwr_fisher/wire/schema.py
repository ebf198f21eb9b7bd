"""The base class of all payloads, which declare their parts.

A payload is a frozen dataclass. Each field that travels is declared with :func:`part`
or :func:`description`: its key in the record, its dtype and shape, its bounds, and
whether a policy limits it. Reading, checking, writing, scaling and the layout that all
clients' uploads must share follow from the declarations.
"""

import math
from abc import ABC
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, Self, cast

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError, printable
from flwr_fisher.params import NORM_STATISTICS, Params, rounded
from flwr_fisher.wire.arrays import (
    Layout,
    announced_shape,
    check_same_keys,
    description_text,
    read_arrays,
    read_description,
    tensors_to_arrays,
)

PARAMETERS = "parameters"
_SMALL = 0.01
# The statistics of batch norms have their own scales, unlike the weights'.
_MOST_BATCHES = 1_000_000  # on which a client trains in a round
_MEAN, _VARIANCE, _COUNT = NORM_STATISTICS
_DESCRIPTION = 1024  # bytes of a description, at most

# What a policy limits of a part: its distance from the tensor that the server sent
# under its key, its norm, or the size of a curvature, times the client's weight.
Limit = Literal["", "model", "step", "curvature"]


@dataclass(frozen=True)
class Part:
    """What a payload declares of one of its parts.

    Parameters
    ----------
    key : str
        The part's key in the record, and its name for a policy.
    dtype : torch.dtype, default float32
        The dtype of its tensor. A part with the limit "model" has the dtype and shape
        of what the server sent.
    shape : tuple[int | str, ...]
        Its shape. A text stands for a length that is equal in all parts of the payload,
        and at most :meth:`Payload.lengths` says.
    limit : "" | "model" | "step" | "curvature", default ""
        What a policy limits.
    low, above : float, optional
        All entries must be at least `low`, and greater than `above`.
    summed : bool, default False
        Whether it is a sum over the client's examples. A policy sees it per example,
        and a client with twice the weight has twice of it.
    counts : bool, default False
        Whether it is a number of examples, at most the client's weight.
    is_text : bool, default False
        Whether it is a description.
    """

    key: str
    dtype: torch.dtype = torch.float32
    shape: tuple[int | str, ...] = ()
    limit: Limit = ""
    low: float | None = None
    above: float | None = None
    summed: bool = False
    counts: bool = False
    is_text: bool = False

    def layout(self, like: Params, lengths: Mapping[str, int]) -> Layout:
        """Return its dtype and shape, for the model that the server sent."""
        if self.limit == "model":
            return like[self.key].dtype, like[self.key].shape
        named = [n if isinstance(n, int) else lengths.get(n) for n in self.shape]
        return self.dtype, named

    def check(self, value: Tensor) -> None:
        """Raise :class:`WireError` unless a tensor is within the bounds."""
        if self.low is not None and (value < self.low).any():
            least = "negative" if self.low == 0 else f"below {self.low:g}"
            raise WireError(f"must not be {least}", field=self.key)
        if self.above is not None and not (value > self.above).all():
            reason = f"must be above {self.above:g}, got {float(value.min()):g}"
            raise WireError(reason, field=self.key)


def part(
    key: str,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int | str, ...] = (),
    **facts: Any,
) -> Any:
    """Declare a field that travels as one tensor, by what :class:`Part` takes."""
    return field(metadata={"part": Part(key, dtype, shape, **facts)})


def description(key: str) -> Any:
    """Declare a field that travels as JSON: a ``dict``, equal for all clients."""
    return field(metadata={"part": Part(key, torch.uint8, (key,), is_text=True)})


class Payload(ABC):  # noqa: B024
    """A client's upload: a frozen dataclass that is sent as one ``ArrayRecord``.

    A subclass declares its fields with :func:`part` and :func:`description`. One that
    travels in another form overrides :meth:`layout` and :meth:`to_arrays`.

    Attributes
    ----------
    disagreement : tuple[str, str]
        The error for an upload whose layout differs from most clients': the field, and
        the reason.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class Moments(Payload):
    ...     mean: Tensor = part("mean", torch.float64, ("p",), limit="step")
    ...     count: Tensor = part("count", torch.int64, above=0, counts=True)
    ...
    ...     @classmethod
    ...     def lengths(cls, like):
    ...         return {"p": 10}
    >>> sent = Moments(torch.ones(4, dtype=torch.float64), torch.tensor(3))
    >>> arrived = Moments.read(sent.to_arrays(), like={})
    >>> arrived.layout(), arrived.step_norms({})
    (('mean (4,)', 'count ()'), {'mean': 2.0})
    """

    disagreement: ClassVar[tuple[str, str]] = (
        "curvature/",
        "covers other parameters than most clients' does",
    )

    # --- the declared parts

    @classmethod
    def declared(cls) -> dict[str, Part]:
        """Return the declarations by the fields' names."""
        every: tuple[Field[Any], ...] = fields(cls) if is_dataclass(cls) else ()
        return {f.name: f.metadata["part"] for f in every if "part" in f.metadata}

    def _tensors(self) -> list[tuple[str, Part, Tensor]]:
        """Return the declared parts that are tensors, with their fields' names."""
        return [
            (name, part, getattr(self, name))
            for name, part in self.declared().items()
            if not part.is_text
        ]

    @classmethod
    def lengths(cls, like: Params) -> Mapping[str, int]:
        """Return how long each length that a shape names may be.

        Parameters
        ----------
        like : Mapping[str, Tensor]
            The parameters that the server sent.
        """
        return {}

    def check(self, like: Params) -> None:  # noqa: B027
        """Raise :class:`WireError` unless the parts fit each other and the model.

        It is called with an upload that was read, after all declared checks.
        """

    # --- reading and writing

    def layout(self) -> tuple[str, ...]:
        """Return what must be equal in all uploads of a round."""
        return tuple(
            f"{part.key} {getattr(self, name)}"
            if part.is_text
            else f"{part.key} {tuple(getattr(self, name).shape)}"
            for name, part in self.declared().items()
        )

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels."""
        values = {p.key: getattr(self, name) for name, p in self.declared().items()}
        tensors = {
            key: value if isinstance(value, Tensor) else description_text(value)
            for key, value in values.items()
        }
        return tensors_to_arrays(tensors)

    @classmethod
    def read(cls, record: ArrayRecord, like: Params, **lengths: int) -> Self:
        """Read and check a record, none of which is trusted.

        Parameters
        ----------
        record : ArrayRecord
            The received record.
        like : Mapping[str, Tensor]
            The parameters that the server sent.
        **lengths : int
            How long each length that a shape names may be, in place of
            :meth:`lengths`.

        Raises
        ------
        WireError
            It names the key that is missing, unexpected or unreadable, has another
            shape or dtype, is not finite, or is out of its bounds.
        """
        declared = cls.declared()
        most = {p.key: _DESCRIPTION for p in declared.values() if p.is_text}
        most |= lengths or cls.lengths(like)
        known = _lengths(declared.values(), record, most)
        layouts = {p.key: p.layout(like, known) for p in declared.values()}
        tensors = read_arrays(record, layouts)
        check_same_keys(tensors, layouts)
        values: dict[str, Any] = {}
        for name, part in declared.items():
            if part.is_text:
                values[name] = read_description(tensors[part.key], part.key)
            else:
                part.check(tensors[part.key])
                values[name] = tensors[part.key]
        payload = cls(**values)
        payload.check(like)
        return payload

    # --- a client's weight

    def check_weight(self, weight: float) -> None:
        """Raise :class:`WireError` if it counts more examples than the metrics do."""
        for _, part, value in self._tensors():
            # A count that `reweighted` has multiplied is rounded.
            if part.counts and float(value) > weight * (1 + 1e-12):
                reason = f"{float(value):g} examples, but the metrics say {weight:g}"
                raise WireError(reason, field=part.key)

    def counting(self, examples: int | None) -> Self:
        """Return the upload with its sums scaled to this number of examples."""
        counts = [float(v) for _, part, v in self._tensors() if part.counts]
        if examples is None or not counts or not counts[0]:
            return self
        return self.reweighted(examples / counts[0])

    def reweighted(self, factor: float) -> Self:
        """Return the upload of a client with `factor` times as many examples.

        Only the parts that are sums over examples change.
        """
        sums = {name: v * factor for name, part, v in self._tensors() if part.summed}
        return cast(Self, replace(cast(Any, self), **sums)) if sums else self

    # --- a policy limits clients by the numbers that follow

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return by part how far the upload would move the model, in float64.

        They are distances from `like`, which the server sent, and norms of vectors. A
        client's should not be much longer than most clients'.
        """
        sent = {p.key: v for _, p, v in self._tensors() if p.limit == "model"}
        moved = {k: sum(displacements({k: v}, like).values()) for k, v in sent.items()}
        return self._sizes("step") | moved

    def curvature_norms(self) -> dict[str, float]:
        """Return each part's weight relative to other clients', in float64.

        They are traces of curvatures, layer by layer, and at least 0. They are not yet
        multiplied by the number of examples.
        """
        return self._sizes("curvature")

    def _sizes(self, limit: Limit) -> dict[str, float]:
        tensors = self._tensors()
        count = next((float(v) for _, p, v in tensors if p.counts), 1.0)
        return {
            p.key: norm64([v]) / (count if p.summed else 1)
            for _, p, v in tensors
            if p.limit == limit
        }

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return the upload with some parts scaled down.

        Parameters
        ----------
        factors : Mapping[str, float]
            Factors of at most 1, by the keys of :meth:`step_norms` and
            :meth:`curvature_norms`.
        like : Mapping[str, Tensor]
            The parameters that the server sent.
        """
        changed = {}
        for name, part, value in self._tensors():
            if part.limit == "model":
                # As displacements name it: a group, or an integer's own name.
                own = dict.fromkeys((PARAMETERS, part.key), factors.get(part.key, 1.0))
                changed[name] = drawn_back({part.key: value}, like, own)[part.key]
            elif part.limit and part.key in factors:
                changed[name] = value * factors[part.key]
        return cast(Self, replace(cast(Any, self), **changed)) if changed else self


def _lengths(
    parts: Iterable[Part], record: ArrayRecord, most: Mapping[str, int]
) -> dict[str, int]:
    """Return each named length, as the first part that has it announces it."""
    known: dict[str, int] = {}
    for part in parts:
        if part.key not in record:
            continue
        shape = announced_shape(part.key, record[part.key])
        for name, length in zip(part.shape, shape, strict=False):
            if isinstance(name, str) and name not in known:
                if not 1 <= length <= most[name]:
                    reason = f"length {length}, expected 1 to {most[name]}"
                    raise WireError(reason, field=part.key)
                known[name] = length
    return known


# --- how far parameters move the model


def norm64(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over all tensors in float64.

    Examples
    --------
    >>> norm64([torch.full((4,), 2.0**100)]) == 2.0**101  # float32 has no such square
    True
    """
    norms = (torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors)
    return math.hypot(*map(float, norms))


def displacements(params: Params, like: Params) -> dict[str, float]:
    """Return the parameters' distances from `like`, one for each group of tensors.

    The group ``parameters`` has all floating-point tensors except batch norm's
    statistics. Each of these is a group of its own, under its name, and so is each
    tensor of integers, such as an index, but for batch norm's counters. A distance
    below a hundredth of the group's own norm counts as a hundredth: so small a step
    does no harm, and near an optimum the ratios between clients' last steps may be
    arbitrary. Of integers, it is a hundredth of a step by one in each of them.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        A client's parameters; names that `like` lacks are left out.
    like : Mapping[str, Tensor]
        The parameters that the server sent to the client.

    Raises
    ------
    WireError
        If a variance is below 0, or a count of batches is impossible; it names them. A
        distance would not show them, but the model's outputs, or clients, would fail
        with them.
    """
    distances: dict[str, float] = {}
    norms: dict[str, float] = {}
    for name, value in params.items():
        if (start := like.get(name)) is None:
            continue
        _check_statistics(name, value, start)
        if not name.endswith(_COUNT):
            part = _part(name, value)
            distance = norm64([value.double() - start.double()])
            floats = value.is_floating_point()
            size = norm64([start]) if floats else value.numel() ** 0.5
            distances[part] = math.hypot(distances.get(part, 0.0), distance)
            norms[part] = math.hypot(norms.get(part, 0.0), size)
    return {part: max(d, _SMALL * norms[part]) for part, d in distances.items()}


def _check_statistics(name: str, value: Tensor, start: Tensor) -> None:
    if name.endswith(_VARIANCE) and (value < 0).any():
        raise WireError("a variance below 0", field=name)
    if name.endswith(_COUNT) and ((value < 0) | (value > start + _MOST_BATCHES)).any():
        reason = f"{printable(value.tolist())} batches, after {start.tolist()}"
        raise WireError(reason, field=name)


def drawn_back(
    params: Params, like: Params, factors: Mapping[str, float]
) -> dict[str, Tensor]:
    r"""Return :math:`\theta_0 + f\,(\theta_i - \theta_0)`.

    Parameters
    ----------
    params, like : Mapping[str, Tensor]
        As for :func:`displacements`.
    factors : Mapping[str, float]
        :math:`f`, by the keys of :func:`displacements`; groups without a factor stay as
        they are.
    """

    def drawn(name: str, value: Tensor) -> Tensor:
        factor = factors.get(_part(name, value), 1.0)
        if factor == 1.0 or name not in like:
            return value
        start = like[name].double()
        return rounded(start.add(value.double() - start, alpha=factor), value.dtype)

    return {name: drawn(name, value) for name, value in params.items()}


def _part(name: str, value: Tensor) -> str:
    alone = name.endswith((_MEAN, _VARIANCE)) or not value.is_floating_point()
    return name if alone else PARAMETERS
