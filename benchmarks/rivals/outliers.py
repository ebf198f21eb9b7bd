"""Robust merging: clients whose models are far from the others' are left out."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_fisher.curvature import Curvature, WeightedSum
from flwr_fisher.curvature.operators.lazy import shared_blocks
from flwr_fisher.merge.linear_system import Device
from flwr_fisher.merge.posterior import LocalPosterior, check_posteriors
from flwr_fisher.params import dot

MAJORITY = 3  # at least so many clients have a majority without any one of them
JUDGES = 20  # at most so many clients' Fishers measure the others
SquaredDistances = list[list[float]]  # of every client, by the measuring client


@dataclass(frozen=True)
class Screened:
    """The clients to merge, with their example counts, and the outliers."""

    posteriors: list[LocalPosterior]
    indices: list[int]  # of them, among all clients
    distances: list[float]  # all clients', in multiples of the median

    def outliers(self) -> dict[int, float]:
        """Return the distances of the clients that are left out."""
        kept = set(self.indices)
        return {i: d for i, d in enumerate(self.distances) if i not in kept}


def without_outliers(
    posteriors: Sequence[LocalPosterior], outlier: float, device: Device = None
) -> Screened:
    r"""Return the clients without outliers, with capped example counts.

    In layer :math:`\ell`, with the coordinate-wise median :math:`c` of the clients'
    parameters, client j's Fisher measures client i by

    .. math:: q_{ij\ell} = \|\theta_{i\ell} - c_\ell\|^2_{F_{j\ell}}, \qquad
              d_i^2 = \operatorname{mean}_\ell \operatorname{median}_{j \ne i}
              \frac{q_{ij\ell}}{\operatorname{median}_k q_{kj\ell}}.

    A client is left out if :math:`d_i` is more than `outlier` times the median. For the
    others, :math:`n_i` is limited to `outlier` times the median of all. The curvature
    and the number of examples that a client reports do not change its own distance, and
    change those of the others only by way of the medians. Parameters without a
    curvature are measured by the Euclidean norm. Two clients have no majority, so both
    stay as they are.

    With more than 20 clients, 20 evenly spaced ones measure.

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        One for each client.
    outlier : float
        At least 1.
    device : torch.device | str, optional
        The device where layers are measured, one after another.
    """
    check_posteriors(posteriors)
    everyone = list(range(len(posteriors)))
    if len(posteriors) < MAJORITY:
        return Screened(list(posteriors), everyone, [1.0] * len(posteriors))
    distances = _distances(posteriors, device)
    kept = [index for index in everyone if distances[index] <= outlier]
    most = outlier * statistics.median(p.num_examples for p in posteriors)
    capped = [
        replace(p, num_examples=most) if p.num_examples > most else p
        for p in (posteriors[index] for index in kept)
    ]
    return Screened(capped, kept, distances)


def _distances(posteriors: Sequence[LocalPosterior], device: Device) -> list[float]:
    """Return every client's distance, divided by the median of all."""
    judges = _judges(len(posteriors))
    by_layer = _distances_by_layer(posteriors, device)
    per_layer = [_median_of_judges(each, judges) for each in by_layer]
    roots = [math.sqrt(statistics.fmean(own)) for own in zip(*per_layer, strict=True)]
    return _in_medians(roots or [0.0] * len(posteriors))


def _judges(clients: int) -> list[int]:
    number = min(clients, JUDGES)
    return [index * clients // number for index in range(number)]


def _distances_by_layer(
    posteriors: Sequence[LocalPosterior], device: Device
) -> Iterator[SquaredDistances]:
    """Yield the distances in each layer, then in each tensor without curvature."""
    judges = _judges(len(posteriors))
    for parts in shared_blocks([posterior.curvature for posterior in posteriors]):
        together = WeightedSum(parts, [1.0] * len(parts))  # all cover the same
        away = _moves_from_median(posteriors, list(together.shapes), device)
        yield [_squared_distances(parts[judge], away, device) for judge in judges]
    covered = posteriors[0].curvature.shapes
    for name, like in posteriors[0].params.items():
        if name not in covered and like.is_floating_point():
            away = _moves_from_median(posteriors, [name], device)
            yield [[float(dot(move, move)) for move in away]] * len(judges)


def _moves_from_median(
    posteriors: Sequence[LocalPosterior], names: Sequence[str], device: Device
) -> list[dict[str, Tensor]]:
    """Return the clients' moves from the median, over some parameters, in float64."""
    moves: list[dict[str, Tensor]] = [{} for _ in posteriors]
    for name in names:
        values = torch.stack([p.params[name].to(device).double() for p in posteriors])
        for move, value in zip(moves, values - _median(values), strict=True):
            move[name] = value
    return moves


def _median(values: Tensor) -> Tensor:
    """Return the median over dimension 0; for even counts, the mean of the middle."""
    ordered, last = values.sort(0).values, len(values) - 1
    return (ordered[last // 2] + ordered[last - last // 2]) / 2


def _squared_distances(
    curvature: Curvature, away: Sequence[dict[str, Tensor]], device: Device
) -> list[float]:
    """Return the moves' squared lengths in a Fisher's norm, in float64."""
    wide = curvature.made().to(device, torch.float64)
    squares = (float(dot(move, wide.matvec(move))) for move in away)
    return [math.inf if math.isnan(square) else max(0.0, square) for square in squares]


def _median_of_judges(
    distances: SquaredDistances, judges: Sequence[int]
) -> list[float]:
    """Return each client's squared distance, the median over the others' Fishers."""
    relative = [_in_medians(each) for each in distances]
    return [
        statistics.median(
            own[client]
            for judge, own in zip(judges, relative, strict=True)
            if judge != client
        )
        for client in range(len(relative[0]))
    ]


def _in_medians(values: Sequence[float]) -> list[float]:
    """Return values divided by their median; infinite ones if that is 0."""
    usual = statistics.median(values)
    return [
        1.0 if value == usual else value / usual if usual else math.inf
        for value in values
    ]
