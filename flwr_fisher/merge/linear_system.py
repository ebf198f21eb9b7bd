"""The linear systems behind a merge: one for each block that clients share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.curvature import WeightedSum
from flwr_fisher.curvature.operators.weighted_sum import shared_blocks
from flwr_fisher.merge.options import MergeOptions
from flwr_fisher.merge.posterior import LocalPosterior
from flwr_fisher.params import Params, add, scale, select, shares_of, subtract


@dataclass(frozen=True)
class LinearSystem:
    """One independent system, ``(curvature + ridge I) delta = rhs``, over `unit`."""

    curvature: WeightedSum
    rhs: dict[str, Tensor]
    ridge: float
    unit: float = 1.0

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
            curvature, scale(self.rhs, 1 / unit), self.ridge / unit, unit
        )

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the system's matrix times a vector."""
        product = self.curvature.matvec(vector)
        return add(product, vector, self.ridge) if self.ridge else product


def linear_systems(
    posteriors: Sequence[LocalPosterior], mean: Params, options: MergeOptions
) -> tuple[list[LinearSystem], list[float]]:
    """Set up each layer's system for the step away from the mean.

    Also return each client's share of all layers' traces.
    """
    curvatures = [
        p.curvature.regularised(shrink=options.shrink, damping=options.damping)
        for p in posteriors
    ]
    examples = [posterior.num_examples for posterior in posteriors]
    blocks, shares = [], [0.0] * len(posteriors)
    for parts in shared_blocks(curvatures):
        traces = [part.trace() for part in parts]
        weights = _weights(examples, traces, options.balance)
        total = WeightedSum(parts, weights)
        rhs = {name: torch.zeros_like(mean[name]) for name in total.shapes}
        for (weight, part), posterior in zip(total, posteriors, strict=True):
            away = subtract(select(posterior.params, rhs), select(mean, rhs))
            rhs = add(rhs, part.matvec(away), weight)
        blocks.append(LinearSystem.anchored(total, rhs, options.anchor))
        shares = [s + w * t for s, w, t in zip(shares, weights, traces, strict=True)]
    return blocks, shares_of(shares if sum(shares) else examples)


def _weights(examples: list[float], traces: list[float], balance: float) -> list[float]:
    # A client that is certain of everything has no curvature, and nothing to balance.
    powers = [trace**balance if trace > 0 else 1.0 for trace in traces]
    return shares_of([n / power for n, power in zip(examples, powers, strict=True)])
