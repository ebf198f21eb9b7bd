"""A merge's linear systems, one for each layer, from the clients' curvatures.

A system's solution is a *move*: how far a layer's parameters go from the clients' mean.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from flwr_fisher.curvature import Curvature, Diagonal, WeightedSum
from flwr_fisher.curvature.operators.lazy import shared_blocks
from flwr_fisher.curvature.operators.rescaled import (
    exponent_of,
    power_of_two,
    rescaled,
    shifted,
    widest_exponent,
)
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

_SMALL = 2**28  # bytes of all clients' products in a layer that may be kept
_MAJORITY = 3  # at least so many clients have a majority without any one of them


# A move by parameter, or None if a system was not solved.
Moves = dict[str, Tensor | None]


@dataclass(frozen=True)
class MoveUnit:
    """The unit of a system's solution delta, and the longest move that is trusted."""

    exponent: int = 0  # delta is the move divided by 2**exponent
    radius: float = math.inf  # the longest delta that is trusted

    def move(self, delta: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a solution as a move, shortened to the radius if it is longer."""
        length = float(norm(delta)) if self.radius < math.inf else 0.0
        if length > self.radius:
            delta = scale(delta, self.radius / length)
        return shifted(delta, self.exponent) if self.exponent else delta


def moved(mean: Params, moves: Moves) -> dict[str, Tensor]:
    """Return the mean after the moves, in its dtypes."""
    return {
        k: v if (move := moves.get(k)) is None else (v + move.to(v.device)).to(v.dtype)
        for k, v in mean.items()
    }


@dataclass(frozen=True)
class LinearSystem:
    """One layer's independent system, ``(curvature + ridge I) delta = rhs``.

    The curvature and the ridge are divided by `scale`, delta by its unit, and the
    right-hand side by both, because a float may not hold them in the scale of the
    uploads. `client_traces` has the trace of each client's term, in that scale; if only
    sums are known, it is empty.
    """

    curvature: WeightedSum
    rhs: dict[str, Tensor]
    ridge: float
    scale: float = 1.0
    unit: MoveUnit = field(default_factory=MoveUnit)
    client_traces: list[float] = field(default_factory=list)

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

    def is_diagonal(self) -> bool:
        """Return whether every curvature in the sum is diagonal."""
        return all(isinstance(term, Diagonal) for term in self.curvature.terms)

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the system's matrix times a vector."""
        product = self.curvature.matvec(vector)
        return add(product, vector, self.ridge) if self.ridge else product


# Computes a layer's system when it is needed, so that one layer's are in memory.
SystemMaker = Callable[[], LinearSystem]


def linear_systems(
    posteriors: Sequence[LocalPosterior],
    mean: Params,
    options: MergeOptions,
    device: Device,
) -> Sequence[SystemMaker]:
    """Return functions that compute each layer's system for its move from the mean.

    The system's tensors are on the given device, or where the clients' tensors are.
    """
    blocks = shared_blocks([posterior.curvature for posterior in posteriors])
    return [
        partial(_layer_system, parts, posteriors, mean, options, device)
        for parts in blocks
    ]


def _layer_system(
    parts: Sequence[Curvature],
    posteriors: Sequence[LocalPosterior],
    mean: Params,
    options: MergeOptions,
    device: Device,
) -> LinearSystem:
    r"""Return one layer's system; its solution is the layer's move from the mean.

    .. math:: \Big(\sum_i w_i F_i + \lambda I\Big) (\theta - \bar\theta)
              = \sum_i w_i F_i (\theta_i - \bar\theta)

    These are the normal equations of FedFisher's eq. 6, around the mean of the clients'
    parameters. :math:`F_i` is client i's curvature, regularised; :math:`w_i` are
    :func:`layer_weights`; :math:`\lambda` is `anchor` times the mean eigenvalue of the
    sum. If floats had no range, this would be the function, with the rest of the
    arguments from the options::

        F = [part.regularised(shrink=shrink, damping=damping) for part in parts]
        moves = [subtract(posterior.params, mean) for posterior in posteriors]
        squares = [dot(move, F_i @ move) for F_i, move in zip(F, moves)]
        weights = layer_weights(examples, [F_i.trace() for F_i in F], squares, options)
        rhs = sum(w * (F_i @ move) for w, F_i, move in zip(weights, F, moves))
        return LinearSystem.anchored(WeightedSum(F, weights), rhs, anchor)

    Here, three things are divided by powers of two: each curvature (the highest power
    is ``2**exponent``), the moves (``2**moves.exponent``), and the sum (``2**shift``).
    Nearly always all three are 1.
    """
    # The clients' curvatures, regularised. From here on, `unweighted.weights` are the
    # powers of two by which the curvatures were divided, relative to the highest.
    unweighted, exponent = _regularised(parts, options, device)
    mean = {name: _wide(mean[name], device) for name in unweighted.shapes}

    # How far each client is from the mean, in its own curvature's measure. If floats
    # cannot hold the moves' squares, the moves are divided by a power of two first.
    moves = _ClientMoves(posteriors, mean, device)
    measured = moves.measured(unweighted.terms)
    if unit := _exponent_of_moves(measured.largest, mean):
        moves = replace(moves, exponent=unit)
        measured = moves.measured(unweighted.terms)

    # These two measures, and the clients' examples, decide the weights.
    examples = [posterior.num_examples for posterior in posteriors]
    weights = layer_weights(
        examples,
        _products(unweighted.weights, measured.traces),
        _products(unweighted.weights, measured.fisher_squares),
        options,
    )
    weights = _products(unweighted.weights, weights)

    # The matrix is the weighted sum, and the right-hand side is the sum of the clients'
    # products with the same weights.
    total = WeightedSum(unweighted.terms, weights, measured.traces)
    shift = _exponent_of_mean(total, mean)
    total = total.scaled(power_of_two(-shift)) if shift else total
    products = measured.products or moves.products(total.terms)
    system = LinearSystem.anchored(
        total, _weighted_sum(total, products, mean), options.anchor
    )

    # The system says by what it was divided, so that its solution becomes a move again.
    unscale = power_of_two(exponent + shift)
    radius = options.trust * _trusted_length(examples, measured.squared_lengths)
    return replace(
        system,
        scale=unscale,
        unit=MoveUnit(moves.exponent, radius),
        client_traces=[t * unscale for t in _products(total.weights, total.traces)],
    )


def layer_weights(
    examples: Sequence[float],
    traces: Sequence[float],
    squared_distances: Sequence[float],
    options: MergeOptions,
) -> list[float]:
    r"""Return the clients' weights :math:`w_i` in a layer, which add up to 1.

    :math:`w_i \propto n_i / (t_i^\gamma (1 + \kappa q_i / \operatorname{median} q))`,
    with the options `balance` (:math:`\gamma`) and `robust` (:math:`\kappa`). For three
    or more clients, each :math:`w_i t_i` is then limited to `max_share` of the sum.

    Parameters
    ----------
    examples : Sequence[float]
        :math:`n_i`.
    traces : Sequence[float]
        :math:`t_i = \operatorname{tr} F_i`, at any one scale.
    squared_distances : Sequence[float]
        :math:`q_i = \|\bar\theta - \theta_i\|^2_{F_i}`, each client's distance from the
        mean, measured by its own Fisher. It is twice the rise of its loss at the mean
        that the Fisher predicts.
    options : MergeOptions
        The options of the merge.
    """
    # A client without curvature has nothing to balance.
    powers = [trace**options.balance if trace > 0 else 1.0 for trace in traces]
    usual = statistics.median(squared_distances)
    doubts = [
        1 + options.robust * q / usual if usual else 1.0 for q in squared_distances
    ]
    weights = zip(examples, powers, doubts, strict=True)
    shares = shares_of([n / (power * doubt) for n, power, doubt in weights])
    if len(shares) < _MAJORITY:
        return shares
    return _capped(shares, traces, options.max_share)


def _capped(
    weights: list[float], traces: Sequence[float], max_share: float
) -> list[float]:
    """Return weights that limit each client to a share of the summed curvature.

    At one half or more, no more than one client can be above it. One that alone has
    curvature gets no weight: its layer stays at the mean.
    """
    held = _products(weights, traces)
    top = max(range(len(held)), key=held.__getitem__)
    others = sum(held[:top]) + sum(held[top + 1 :])
    if max_share == 1 or not held[top] * (1 - max_share) > others * max_share:
        return weights
    factor = others * max_share / (held[top] * (1 - max_share))
    return shares_of([w * factor if i == top else w for i, w in enumerate(weights)])


def _regularised(
    parts: Sequence[Curvature], options: MergeOptions, device: Device
) -> tuple[WeightedSum, int]:
    """Return the sum of the curvatures with `shrink` and `damping`, and an exponent.

    Each curvature is divided by a power of two of its own, so that floats hold it. The
    sum's weights are these powers, divided by the highest; the exponent is that of the
    highest. A curvature that is far below the largest gets the weight 0, because
    rounding would remove it from the sum anyway.
    """
    WeightedSum(parts, [1.0] * len(parts))  # an error unless all cover the same
    terms, exponents = [], []
    for part in parts:
        # on its own device: numbers in the host's memory are read without a wait
        held, exponent = rescaled(part.mapped(partial(_wide, device=None)))
        exponents.append(exponent)
        there = held if device is None else held.mapped(partial(_wide, device=device))
        terms.append(there.regularised(shrink=options.shrink, damping=options.damping))
    highest = max(exponents)
    weights = [math.ldexp(1.0, exponent - highest) for exponent in exponents]
    return WeightedSum(terms, weights), highest


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


def _trusted_length(
    examples: Sequence[float], squared_lengths: Sequence[float]
) -> float:
    """Return what `trust` multiplies: a length, in the unit of the clients' moves.

    It is √(M - 1) times the root mean square of the lengths of the M clients' moves.
    """
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
    """Measurements of all clients' moves away from the mean, for a system."""

    traces: list[float]  # of the curvatures
    fisher_squares: list[float]  # of each move in the client's own curvature
    squared_lengths: list[float]
    largest: float  # entry of all
    products: list[dict[str, Tensor]]  # with moves; none if they would be large


@dataclass(frozen=True)
class _ClientMoves:
    """The clients' moves away from the mean, divided by ``2**exponent``.

    They are made when they are used: all clients' would take as much memory again.
    """

    posteriors: Sequence[LocalPosterior]
    mean: Params
    device: Device
    exponent: int = 0

    def of_client(self, index: int) -> dict[str, Tensor]:
        """Return a client's moves."""
        trained, mean = select(self.posteriors[index].params, self.mean), self.mean
        params = {name: _wide(value, self.device) for name, value in trained.items()}
        if self.exponent:
            params, mean = (shifted(x, -self.exponent) for x in (params, mean))
        return subtract(params, mean)

    def products(self, curvatures: Sequence[Curvature]) -> Iterator[Params]:
        """Yield each client's curvature times its moves."""
        for index, curvature in enumerate(curvatures):
            yield curvature.matvec(self.of_client(index))

    def measured(self, curvatures: Sequence[Curvature]) -> _Measured:
        """Return the measurements, from one pass over the moves and one device read."""
        numbers, products = [], []
        size = 4 * sum(value.numel() for value in self.mean.values())
        small = size * len(curvatures) <= _SMALL
        for index, curvature in enumerate(curvatures):
            move = self.of_client(index)
            product = curvature.matvec(move)
            client = [curvature.queued_trace(), dot(move, product), dot(move, move)]
            extremes = [torch.aminmax(v) for v in move.values() if v.numel()]
            client += [value for pair in extremes for value in pair]
            numbers.append(torch.stack([value.double() for value in client]))
            products += [product] if small else []
        read = torch.stack(numbers).tolist()
        traces, squares, lengths, *entries = map(list, zip(*read, strict=True))
        largest = max((abs(value) for each in entries for value in each), default=0.0)
        positive = [max(0.0, square) for square in squares]
        return _Measured(traces, positive, lengths, largest, products)


def _exponent_of_moves(largest: float, like: Params) -> int:
    """Return the exponent of the longest move, or 0 if it is within range."""
    # A difference of two finite numbers may be infinite.
    most = min(torch.finfo(value.dtype).max for value in like.values())
    exponent = exponent_of(min(largest, most))
    return exponent if abs(exponent) > _widest(like) else 0


def _exponent_of_mean(total: WeightedSum, like: Params) -> int:
    """Return the exponent of the mean eigenvalue, or 0 if it is within range."""
    exponent = exponent_of(total.trace() / total.numel())
    return exponent if abs(exponent) > 2 * _widest(like) else 0


def _widest(like: Params) -> int:
    return min(widest_exponent(value.dtype) for value in like.values())
