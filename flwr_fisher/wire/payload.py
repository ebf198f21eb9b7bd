"""The base class of all payloads, and how far their parameters move the model."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Self

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError, printable
from flwr_fisher.params import NORM_STATISTICS, DeferredParams, Params, rounded

PARAMETERS = "parameters"
_SMALL = 0.01
# The statistics of batch norms have their own scales, unlike the weights'.
_MOST_BATCHES = 1_000_000  # on which a client trains in a round
_MEAN, _VARIANCE, _COUNT = NORM_STATISTICS


class Payload(ABC):
    """A client's upload: a frozen dataclass that is sent as one ``ArrayRecord``.

    Attributes
    ----------
    disagreement : tuple[str, str]
        The error for an upload whose layout differs from most clients': the field, and
        the reason.
    """

    disagreement: ClassVar[tuple[str, str]] = (
        "curvature/",
        "covers other parameters than most clients' does",
    )

    @abstractmethod
    def layout(self) -> tuple[str, ...]:
        """Return what must be equal in all uploads of a round."""

    @abstractmethod
    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels."""

    def check_weight(self, weight: float) -> None:  # noqa: B027
        """Raise :class:`WireError` if the upload's weight contradicts the metrics.

        Most uploads have no weight of their own.
        """

    # A policy limits clients by the numbers that follow. It does not limit an upload
    # that returns none.

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return by part how far the upload would move the model, in float64.

        They are distances from `like`, which the server sent, and norms of vectors. A
        client's should not be much longer than most clients'.
        """
        return {}

    def curvature_norms(self) -> dict[str, float]:
        """Return each part's weight relative to other clients', in float64.

        They are traces of curvatures, layer by layer, and at least 0. They are not yet
        multiplied by the number of examples.
        """
        return {}

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
        return self

    def reweighted(self, factor: float) -> Self:
        """Return the upload of a client with `factor` times as many examples.

        Only an upload that has its client's weight in its numbers changes.
        """
        return self


def norm64(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over all tensors in float64.

    Examples
    --------
    >>> norm64([torch.full((4,), 2.0**100)]) == 2.0**101  # float32 has no such square
    True
    """
    wide = torch.float64
    return math.hypot(
        *(float(torch.linalg.vector_norm(t, dtype=wide)) for t in tensors)
    )


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
            size = (
                norm64([start]) if value.is_floating_point() else value.numel() ** 0.5
            )
            distances[part] = math.hypot(distances.get(part, 0.0), distance)
            norms[part] = math.hypot(norms.get(part, 0.0), size)
    return {part: max(d, _SMALL * norms[part]) for part, d in distances.items()}


def _check_statistics(name: str, value: Tensor, start: Tensor) -> None:
    if name.endswith(_VARIANCE) and (value < 0).any():
        raise WireError("a variance below 0", field=name)
    counts = name.endswith(_COUNT)
    if counts and ((value < 0) | (value > start + _MOST_BATCHES)).any():
        reason = f"{printable(value.tolist())} batches, after {start.tolist()}"
        raise WireError(reason, field=name)


def drawn_back(params: Params, like: Params, factors: Mapping[str, float]) -> Params:
    r"""Return :math:`\theta_0 + f\,(\theta_i - \theta_0)`.

    Parameters
    ----------
    params, like : Mapping[str, Tensor]
        As for :func:`displacements`.
    factors : Mapping[str, float]
        :math:`f`, by the keys of :func:`displacements`; groups without a factor stay as
        they are.
    """

    def make(name: str) -> Tensor:
        value = params[name]
        factor = factors.get(_part(name, value), 1.0)
        if factor == 1.0 or name not in like:
            return value
        start = like[name].double()
        return rounded(start.add(value.double() - start, alpha=factor), value.dtype)

    if isinstance(params, DeferredParams):
        return DeferredParams(params.layout, make)
    return {name: make(name) for name in params}


def _part(name: str, value: Tensor) -> str:
    alone = name.endswith((_MEAN, _VARIANCE)) or not value.is_floating_point()
    return name if alone else PARAMETERS
