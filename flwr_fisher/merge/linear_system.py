"""A merge's linear systems, one for each layer, from the clients' curvatures.

Long: a layer's equation, and its scale in floating point, belong together.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from flwr_fisher.curvature import Curvature, WeightedSum
from flwr_fisher.curvature.operators.lazy import shared_blocks
from flwr_fisher.curvature.operators.rescaled import (
    exponent_of,
    power_of_two,
    rescaled,
    shifted,
    widest_exponent,
)
from flwr_fisher.devices import Reads
from flwr_fisher.merge.options import MergeSettings
from flwr_fisher.merge.posterior import LocalPosterior
from flwr_fisher.merge.weights import layer_weights
from flwr_fisher.params import (
    Params,
    add,
    dot,
    norm,
    scale,
    select,
    shares_of,
    subtract,
)

Device = torch.device | str | None

_SMALL = 2**28  # bytes of all clients' products in a layer that may be kept


@dataclass(frozen=True)
class StepUnit:
    """The unit of a system's step delta, and the longest step that is trusted."""

    exponent: int = 0  # delta is the step divided by 2**exponent
    radius: float = math.inf  # the longest delta that is trusted

    def step(self, delta: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a solution as a step, shortened to the radius if it is longer."""
        length = float(norm(delta)) if self.radius < math.inf else 0.0
        if length > self.radius:
            delta = scale(delta, self.radius / length)
        return shifted(delta, self.exponent) if self.exponent else delta


@dataclass(frozen=True)
class LinearSystem:
    """One independent system, ``(curvature + ridge I) delta = rhs``.

    The curvature and the ridge are divided by `scale`, the step delta by its unit, and
    the right-hand side by both, because a float may not hold them in the scale of the
    uploads.
    """

    curvature: WeightedSum
    rhs: dict[str, Tensor]
    ridge: float
    scale: float = 1.0
    unit: StepUnit = field(default_factory=StepUnit)

    @classmethod
    def anchored(
        cls, curvature: WeightedSum, rhs: dict[str, Tensor], anchor: float
    ) -> "LinearSystem":
        """Return the system whose ridge is `anchor` times the mean eigenvalue."""
        return cls(curvature, rhs, anchor * curvature.trace() / curvature.numel())

    def normalised(self) -> "LinearSystem":
        """Return the same system with a mean eigenvalue of 1.

        Confident clients' curvatures may be so small that float32 cannot hold the
        squares that a solver takes.
        """
        mean = self.curvature.trace() / self.curvature.numel()
        if not mean > 0:
            return self
        return replace(
            self,
            curvature=self.curvature.scaled(1 / mean),
            rhs=scale(self.rhs, 1 / mean),
            ridge=self.ridge / mean,
            scale=self.scale * mean,
        )

    def unscaled(self) -> "LinearSystem":
        """Return the system at its original scale, in float64 if it was rescaled."""
        exponent, radius = self.unit.exponent, self.unit.radius
        if self.scale == 1 and not exponent:
            return self
        wide = {name: value.double() for name, value in self.rhs.items()}
        wide_terms = [term.to(dtype=torch.float64) for term in self.curvature.terms]
        return LinearSystem(
            WeightedSum(wide_terms, self.curvature.weights).scaled(self.scale),
            shifted(scale(wide, self.scale), exponent),
            self.ridge * self.scale,
            unit=StepUnit(radius=radius * power_of_two(exponent)),
        )

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the system's matrix times a vector."""
        product = self.curvature.matvec(vector)
        return add(product, vector, self.ridge) if self.ridge else product


# Each computes a layer's system, and queues its device reads in the given queue.
SystemMaker = Callable[[Reads], LinearSystem]
SystemMakers = Sequence[SystemMaker]


def linear_systems(
    posteriors: Sequence[LocalPosterior],
    mean: Params,
    settings: MergeSettings,
    device: Device = None,
) -> SystemMakers:
    """Return functions that compute each layer's system for its step from the mean.

    A system is computed when it is needed, so that only one layer's tensors are in
    memory. They are on the given device, or where the clients' tensors are.
    """
    blocks = shared_blocks([posterior.curvature for posterior in posteriors])
    return [
        partial(_layer_system, parts, posteriors, mean, settings, device)
        for parts in blocks
    ]


def _layer_system(
    parts: Sequence[Curvature],
    posteriors: Sequence[LocalPosterior],
    mean: Params,
    settings: MergeSettings,
    device: Device,
    reads: Reads,
) -> LinearSystem:
    r"""Return one layer's system; its solution is the layer's step from the mean.

    .. math:: \Big(\sum_i w_i F_i + \lambda I\Big) (\theta - \bar\theta)
              = \sum_i w_i F_i (\theta_i - \bar\theta)

    (FedFisher, eq. 7, around the mean of the clients' parameters.) :math:`F_i` is
    client i's curvature, regularised; :math:`w_i` are :func:`layer_weights`;
    :math:`\lambda` is `anchor` times the mean eigenvalue of the sum. Both sides are
    divided by powers of two where floats would not hold them.
    """
    curvatures, relative, highest = _regularised(parts, settings, device)
    unweighted = WeightedSum(curvatures, relative)
    mean = {name: _wide(mean[name], device) for name in unweighted.shapes}
    steps = _ClientSteps(posteriors, mean, device)
    found = steps.measured(curvatures, reads)
    unweighted.traces = found.traces
    if exponent := _step_exponent(found.largest, steps.mean):
        steps = replace(steps, exponent=exponent)
        found = steps.measured(curvatures, reads)
    examples = [posterior.num_examples for posterior in posteriors]
    weights = layer_weights(
        examples,
        _products(relative, unweighted.traces),
        _products(relative, found.fisher_squares),
        settings,
    )
    total = unweighted.reweighted(weights)
    shift = _shift(total, steps.mean)
    total = total.scaled(power_of_two(-shift)) if shift else total
    made_again = (part.matvec(steps.of(index)) for index, part in enumerate(curvatures))
    system = LinearSystem.anchored(
        total, _weighted_sum(total, found.products or made_again, mean), settings.anchor
    )
    return replace(
        system,
        scale=power_of_two(highest + shift),
        unit=StepUnit(
            steps.exponent, settings.trust * _spread(examples, found.squared_lengths)
        ),
    )


def _regularised(
    parts: Sequence[Curvature], settings: MergeSettings, device: Device
) -> tuple[list[Curvature], list[float], int]:
    """Return the clients' curvatures with `shrink` and `damping`, and their scales.

    Each curvature is divided by a power of two of its own, so that floats hold it. Also
    returned are these powers, divided by the highest of them, and the exponent of that.
    The power of a curvature that is far below the largest comes to 0: in the sum, too,
    nothing would be left of it.
    """
    curvatures, exponents = [], []
    assert settings.shrink is not None  # of_model has filled it in
    for part in parts:
        # on its own device: numbers in the host's memory are read without a wait
        held, exponent = rescaled(part.mapped(partial(_wide, device=None)))
        exponents.append(exponent)
        there = held if device is None else held.mapped(partial(_wide, device=device))
        curvatures.append(
            there.regularised(shrink=settings.shrink, damping=settings.damping)
        )
    highest = max(exponents)
    relative = [math.ldexp(1.0, exponent - highest) for exponent in exponents]
    return curvatures, relative, highest


def _products(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a * b for a, b in zip(left, right, strict=True)]


def _weighted_sum(
    total: WeightedSum, products: Iterable[Params], like: Params
) -> dict[str, Tensor]:
    """Return the right-hand side: the sum of each client's weight times its product."""
    rhs = {name: torch.zeros_like(like[name]) for name in total.shapes}
    for weight, product in zip(total.weights, products, strict=True):
        rhs = add(rhs, product, weight)
    return rhs


def _spread(examples: Sequence[float], squared_lengths: Sequence[float]) -> float:
    """Return the root mean square distance of the clients from their mean."""
    variance = sum(_products(shares_of(examples), squared_lengths))
    return math.sqrt((len(squared_lengths) - 1) * variance)


def _wide(tensor: Tensor, device: Device) -> Tensor:
    """Return a tensor on a device, in at least float32, for the solver.

    An accelerator is not waited for: it reads from memory that PyTorch keeps for that.
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    dtype = wide if tensor.is_floating_point() else tensor.dtype
    goes_up = device is not None and torch.device(device).type != "cpu"
    return tensor.to(device, dtype, non_blocking=goes_up)


@dataclass(frozen=True)
class _Measured:
    """Measurements of all clients' steps away from the mean, for a system."""

    traces: list[float]  # of the curvatures
    fisher_squares: list[float]  # of each step in the client's own curvature
    squared_lengths: list[float]
    largest: float  # entry of all
    products: list[dict[str, Tensor]]  # with steps; none if they would be large


@dataclass(frozen=True)
class _ClientSteps:
    """The clients' steps away from the mean, divided by ``2**exponent``.

    They are made when they are used: all clients' would take as much memory again.
    """

    posteriors: Sequence[LocalPosterior]
    mean: Params
    device: Device
    exponent: int = 0

    def of(self, index: int) -> dict[str, Tensor]:
        """Return a client's steps."""
        own, mean = select(self.posteriors[index].params, self.mean), self.mean
        params = {name: _wide(value, self.device) for name, value in own.items()}
        if self.exponent:
            params, mean = (shifted(x, -self.exponent) for x in (params, mean))
        return subtract(params, mean)

    def measured(self, curvatures: Sequence[Curvature], reads: Reads) -> _Measured:
        """Return the measurements, from one pass over the steps and one device read."""
        numbers, products = [], []
        size = 4 * sum(value.numel() for value in self.mean.values())
        small = size * len(curvatures) <= _SMALL
        for index, curvature in enumerate(curvatures):
            step = self.of(index)
            product = curvature.matvec(step)
            own = [curvature.queued_trace(), dot(step, product), dot(step, step)]
            extremes = [torch.aminmax(v) for v in step.values() if v.numel()]
            own += [value for pair in extremes for value in pair]
            numbers.append(torch.stack([value.double() for value in own]))
            products += [product] if small else []
        (read,) = reads.queue(torch.stack(numbers)).values()
        traces, squares, lengths, *entries = map(list, zip(*read.tolist(), strict=True))
        largest = max((abs(value) for each in entries for value in each), default=0.0)
        positive = [max(0.0, square) for square in squares]
        return _Measured(traces, positive, lengths, largest, products)


def _step_exponent(largest: float, like: Params) -> int:
    """Return the exponent of the longest step, or 0 if it is within range."""
    # A difference of two finite numbers may be infinite.
    most = min(torch.finfo(value.dtype).max for value in like.values())
    exponent = exponent_of(min(largest, most))
    return exponent if abs(exponent) > _widest(like) else 0


def _shift(total: WeightedSum, like: Params) -> int:
    """Return the exponent of the mean eigenvalue, or 0 if it is within range."""
    exponent = exponent_of(total.trace() / total.numel())
    return exponent if abs(exponent) > 2 * _widest(like) else 0


def _widest(like: Params) -> int:
    return min(widest_exponent(value.dtype) for value in like.values())
