"""What limits a single client's influence on a round."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf, isfinite
from typing import TypeVar

from flwr_fisher.errors import WireError, check_range
from flwr_fisher.params import Params
from flwr_fisher.server.exchange import Upload
from flwr_fisher.wire import Payload

P = TypeVar("P", bound=Payload)

_LARGEST = 1e18  # of a size; float32 holds its square
_FEWEST = 3  # of two clients nobody can tell which one is odd
_INCREDIBLE = 10  # times what is allowed: no honest client's, however unlike the others


@dataclass(frozen=True)
class Sizes:
    """What a policy looks at, in float64.

    Parameters
    ----------
    step_norms, curvature_norms : Mapping[str, float]
        What the methods of :class:`~flwr_fisher.wire.payload.Payload` return.
    """

    step_norms: Mapping[str, float]
    curvature_norms: Mapping[str, float]

    @classmethod
    def of(cls, payload: Payload, like: Params) -> "Sizes":
        """Measure an upload: parameters are unpacked for it."""
        return cls(payload.step_norms(like), payload.curvature_norms())

    def check_plausible(self) -> None:
        """Raise :class:`WireError` where no training can have led: it has diverged."""
        for name, size in {**self.step_norms, **self.curvature_norms}.items():
            if not (isfinite(size) and size <= _LARGEST):
                raise WireError(f"is of size {size:g}, which cannot be", field=name)


@dataclass(frozen=True, kw_only=True)
class Policy:
    r"""Limits what a single client can do to a round, among three clients or more.

    What exceeds a limit is cut to it. What exceeds it ten times is no client's, however
    unlike the others' its data are, and is cut to what is usual.

    Parameters
    ----------
    max_weight : float, default 3
        How much a client may weigh, in multiples of the clients' median: nobody can
        check how many examples it has. ``inf`` lifts the limit.
    max_share : float, default 0.5
        Of a layer's summed curvature, of products with it and of inputs' moments: what
        a client has above this share does not count. At a half, no client outweighs all
        others together. In [0.5, 1]; 1 lifts the limit.
    max_distance : float, default 2
        How far a client's parameters may be from those that it was sent, and how long
        its gradient or any other vector may be, in multiples of the clients' median.
        Longer ones are shortened. ``inf`` lifts the limit.

    Raises
    ------
    ConfigurationError
        If a number is out of range.
    """

    max_weight: float = 3.0
    max_share: float = 0.5
    max_distance: float = 2.0

    def __post_init__(self) -> None:
        check_range("max_weight", self.max_weight, 1)
        check_range("max_share", self.max_share, 0.5, 1)
        check_range("max_distance", self.max_distance, 1)

    @property
    def limits(self) -> bool:
        """Whether there is any limit."""
        return min(self.max_weight, self.max_distance) < inf or self.max_share < 1

    def limit(
        self, uploads: Sequence[Upload[P]], sizes: Sequence[Sizes], like: Params
    ) -> tuple[list[Upload[P]], dict[str, str]]:
        """Return the uploads within the limits, and what was limited, by client.

        An upload that keeps to the limits comes back as it is.

        Parameters
        ----------
        uploads : Sequence[Upload]
            Of one exchange, all of one layout.
        sizes : Sequence[Sizes]
            Theirs, as :meth:`Sizes.of` measures them.
        like : Mapping[str, Tensor]
            The parameters that were sent out.
        """
        if len(uploads) < _FEWEST:
            return list(uploads), {}
        weights = self.weights([upload.num_examples for upload in uploads])
        limited = [_reweighted(u, w) for u, w in zip(uploads, weights, strict=True)]
        curvatures = [
            {name: weight * norm for name, norm in own.curvature_norms.items()}
            for weight, own in zip(weights, sizes, strict=True)
        ]
        of_steps = _factors([own.step_norms for own in sizes], self.distances)
        of_curvatures = _factors(curvatures, self.shares)
        reasons = {}
        for i, before in enumerate(uploads):
            if factors := of_steps[i] | of_curvatures[i]:
                payload = limited[i].payload.scaled(factors, like)
                limited[i] = replace(limited[i], payload=payload)
            if limited[i] is not before:
                reasons[before.client] = _reason(before, limited[i], factors)
        return limited, reasons

    def weights(self, weights: Sequence[float]) -> list[float]:
        """Return weights, of which none is more than `max_weight` times the median.

        Examples
        --------
        >>> Policy().weights([10, 20, 90]), Policy().weights([10, 20, 2**62])
        ([10, 20, 60.0], [10, 20, 20])
        """
        return _at_most(self.max_weight, weights)

    def distances(self, distances: Sequence[float]) -> list[float]:
        """Return lengths, of which none is more than `max_distance` medians."""
        return _at_most(self.max_distance, distances)

    def shares(self, curvatures: Sequence[float]) -> list[float]:
        """Return curvatures, of which the largest is cut to its share of all.

        Examples
        --------
        >>> Policy().shares([10, 20, 50]), Policy().shares([10, 20, 1e6])
        ([10, 20, 30.0], [10, 20, 15.0])
        """
        limited = list(curvatures)
        if self.max_share == 1:
            return limited
        largest = max(range(len(limited)), key=limited.__getitem__)
        others = fsum(limited[:largest]) + fsum(limited[largest + 1 :])
        most = others * self.max_share / (1 - self.max_share)
        if limited[largest] > _INCREDIBLE * most:
            limited[largest] = others / (len(limited) - 1)
        else:
            limited[largest] = min(limited[largest], most)
        return limited


def _at_most(multiple: float, values: Sequence[float]) -> list[float]:
    """Return values up to a multiple of the median; the median for incredible ones."""
    if len(values) < _FEWEST or multiple == inf:
        return list(values)
    median = statistics.median(values)
    most = multiple * median
    return [
        median if value > _INCREDIBLE * most else min(value, most) for value in values
    ]


def _reweighted(upload: Upload[P], weight: float) -> Upload[P]:
    if weight == upload.num_examples:
        return upload
    payload = upload.payload.reweighted(weight / upload.num_examples)
    return replace(upload, num_examples=weight, payload=payload)


def _factors(
    sizes: Sequence[Mapping[str, float]],
    limit: Callable[[Sequence[float]], list[float]],
) -> list[dict[str, float]]:
    """Return by what each client's parts are to be multiplied, if not by 1."""
    factors: list[dict[str, float]] = [{} for _ in sizes]
    for name in sizes[0]:
        own = [size[name] for size in sizes]
        for mine, before, after in zip(factors, own, limit(own), strict=True):
            if after < before:
                mine[name] = after / before
    return factors


def _reason(before: Upload[P], after: Upload[P], factors: Mapping[str, float]) -> str:
    parts = []
    if after.num_examples != before.num_examples:
        parts.append(
            f"{before.num_examples:g} examples count as {after.num_examples:g}"
        )
    parts += [f"{name} x {factor:.2g}" for name, factor in factors.items()]
    return ", ".join(parts)
