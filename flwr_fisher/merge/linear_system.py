"""The linear systems behind a merge: one for each block that clients share."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flwr_fisher.curvature import Curvature, WeightedSum
from flwr_fisher.curvature.operators.weighted_sum import shared_blocks
from flwr_fisher.merge.options import MergeOptions
from flwr_fisher.merge.posterior import LocalPosterior
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


@dataclass(frozen=True)
class LinearSystem:
    """One independent system, ``(curvature + ridge I) delta = rhs``, over `unit`."""

    curvature: WeightedSum
    rhs: dict[str, Tensor]
    ridge: float
    unit: float = 1.0
    radius: float = math.inf  # the longest step that is trusted

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
        unit = self.curvature.trace() / self.curvature.numel()
        if not unit > 0:
            return self
        curvature = self.curvature.scaled(1 / unit)
        return LinearSystem(
            curvature, scale(self.rhs, 1 / unit), self.ridge / unit, unit, self.radius
        )

    def within(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a step, shortened to the radius if it is longer."""
        length = float(norm(step))
        return scale(step, self.radius / length) if length > self.radius else step

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the system's matrix times a vector."""
        product = self.curvature.matvec(vector)
        return add(product, vector, self.ridge) if self.ridge else product


Systems = Sequence[Callable[[], LinearSystem]]


def linear_systems(
    posteriors: Sequence[LocalPosterior],
    mean: Params,
    options: MergeOptions,
    device: Device = None,
) -> Systems:
    """Return what makes each layer's system for the step away from the mean.

    So that no more than one layer's are held, each is made when it is due, on the
    device or where its tensors are.
    """
    blocks = shared_blocks([posterior.curvature for posterior in posteriors])
    return [
        partial(_system, parts, posteriors, mean, options, device) for parts in blocks
    ]


def _system(
    parts: Sequence[Curvature],
    posteriors: Sequence[LocalPosterior],
    mean: Params,
    options: MergeOptions,
    device: Device,
) -> LinearSystem:
    regularised = [
        part.to(device).regularised(shrink=options.shrink, damping=options.damping)
        for part in parts
    ]
    examples = [posterior.num_examples for posterior in posteriors]
    names = list(WeightedSum(regularised, examples).shapes)  # all cover the same

    def away(posterior: LocalPosterior) -> dict[str, Tensor]:
        step = subtract(select(posterior.params, names), select(mean, names))
        return {name: value.to(device) for name, value in step.items()}

    rises, squares = [], []
    for posterior, part in zip(posteriors, regularised, strict=True):
        vector = away(posterior)
        rises.append(max(0.0, float(dot(vector, part.matvec(vector)))))
        squares.append(float(dot(vector, vector)))
    traces = [part.trace() for part in regularised]
    total = WeightedSum(regularised, _weights(examples, traces, rises, options))
    rhs = {name: torch.zeros_like(mean[name], device=device) for name in names}
    for (weight, part), posterior in zip(total, posteriors, strict=True):
        rhs = add(rhs, part.matvec(away(posterior)), weight)
    shares = shares_of(examples)
    variance = sum(p * square for p, square in zip(shares, squares, strict=True))
    radius = options.trust * math.sqrt((len(posteriors) - 1) * variance)
    return replace(LinearSystem.anchored(total, rhs, options.anchor), radius=radius)


def _weights(
    examples: Sequence[float],
    traces: Sequence[float],
    rises: Sequence[float],
    options: MergeOptions,
) -> list[float]:
    """Return the clients' weights in a layer."""
    # A client that is certain of everything has no curvature, and nothing to balance.
    powers = [trace**options.balance if trace > 0 else 1.0 for trace in traces]
    usual = statistics.median(rises)
    doubts = [1 + options.robust * rise / usual if usual else 1.0 for rise in rises]
    weights = zip(examples, powers, doubts, strict=True)
    return shares_of([n / (power * doubt) for n, power, doubt in weights])
