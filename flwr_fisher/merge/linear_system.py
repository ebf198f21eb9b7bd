"""A merge's linear systems, one for each layer, from the clients' curvatures.

A system's solution is a *move*: how far a layer's parameters go from the clients' mean.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from flwr_fisher.curvature import Curvature, WeightedSum
from flwr_fisher.curvature.operators.stacked import StackedSum, stacks
from flwr_fisher.merge.options import MergeOptions
from flwr_fisher.merge.posterior import LocalPosterior
from flwr_fisher.params import (
    Params,
    add,
    by_part,
    norm,
    repeated,
    scale,
    select,
    shares_of,
    side_by_side,
    subtract,
)

Device = torch.device | str | None

_MAJORITY = 3  # at least so many clients have a majority without any one of them
# The range that float32 is used for. A solver multiplies an eigenvalue with two moves
# and sums over all entries, and float32 ends at 2**127 and 2**-126.
_LARGEST_MOVE = 2.0**25
_LARGEST_EIGENVALUE = 2.0**50


# A move by parameter, or None if a system was not solved.
Moves = dict[str, Tensor | None]


def moved(mean: Params, moves: Moves) -> dict[str, Tensor]:
    """Return the mean after the moves, in its dtypes."""
    return {
        k: v if (move := moves.get(k)) is None else (v + move.to(v.device)).to(v.dtype)
        for k, v in mean.items()
    }


@dataclass(frozen=True)
class LinearSystem:
    """One layer's independent system, ``(curvature + ridge I) delta = rhs``.

    All three are divided by `scale`, which leaves delta unchanged. A move is delta,
    shortened to `radius` if it is longer. `client_traces` has the trace of
    each client's term before that division; if only sums are known, it is empty.
    """

    curvature: WeightedSum
    rhs: dict[str, Tensor]
    ridge: float
    scale: float = 1.0
    radius: float = math.inf
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

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the system's matrix times a vector."""
        product = self.curvature.matvec(vector)
        return add(product, vector, self.ridge) if self.ridge else product

    def move(self, delta: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a solution as a move, shortened to the radius if it is longer."""
        length = float(norm(delta)) if self.radius < math.inf else 0.0
        return scale(delta, self.radius / length) if length > self.radius else delta


# Computes a layer's system when it is needed, so that one layer's are in memory.
SystemMaker = Callable[[], LinearSystem]


def layer_system(
    parts: Sequence[Curvature],
    posteriors: Sequence[LocalPosterior],
    mean: Params,
    options: MergeOptions,
    device: Device,
) -> LinearSystem:
    r"""Return one layer's system; its solution is the layer's move from the mean.

    Its tensors are on the given device, or where the clients' tensors are.

    .. math:: \Big(\sum_i w_i F_i + \lambda I\Big) (\theta - \bar\theta)
              = \sum_i w_i F_i (\theta_i - \bar\theta)

    These are the normal equations of FedFisher's eq. 6, around the mean of the clients'
    parameters. :math:`F_i` is client i's curvature, regularised; :math:`w_i` are
    :func:`layer_weights`; :math:`\lambda` is `anchor` times the mean eigenvalue of the
    sum. In short, with the rest of the arguments from the options::

        F = [part.regularised(shrink=shrink, damping=damping) for part in parts]
        moves = [subtract(posterior.params, mean) for posterior in posteriors]
        squares = [dot(move, F_i @ move) for F_i, move in zip(F, moves)]
        weights = layer_weights(examples, [F_i.trace() for F_i in F], squares, options)
        rhs = sum(w * (F_i @ move) for w, F_i, move in zip(weights, F, moves))
        return LinearSystem.anchored(WeightedSum(F, weights), rhs, anchor)
    """
    size = WeightedSum(parts, [1.0] * len(parts)).numel()  # all cover the same

    # Each client's curvature, and how far the client is from the mean, in the measure
    # of that curvature. Nearly always float32 holds all products. If these numbers say
    # that it may not, the layer is computed in float64.
    layer = _measured(parts, posteriors, mean, options, device, torch.float32)
    if not layer.fits_float32(size):
        layer = _measured(parts, posteriors, mean, options, device, torch.float64)

    # The traces, these distances and the clients' examples decide the weights.
    examples = [posterior.num_examples for posterior in posteriors]
    weights = layer_weights(examples, layer.traces, layer.fisher_squares, options)

    # The matrix is the weighted sum, and the right-hand side is the sum of the clients'
    # products with the same weights.
    terms, held, rhs = [], [], dict[str, Tensor]()
    for members, stack in layer.stacks:
        products = stack.matvec(layer.moves(members))
        own = torch.tensor([weights[i] for i in members], dtype=torch.float64)
        where = next(iter(products.values())).device
        term = StackedSum(stack, own.to(where, non_blocking=True), parts[0].shapes)
        product = term.sum_of(products)
        rhs = add(rhs, product) if rhs else product
        terms.append(term)
        held.append(sum(weights[i] * layer.traces[i] for i in members))
    total = WeightedSum(terms, [1.0] * len(terms), held)

    # The radius is about the length of the sum of all clients' moves, if these point in
    # unrelated directions: the root mean square of their lengths, times the root of
    # M - 1.
    variance = sum(_products(shares_of(examples), layer.squared_lengths))
    return replace(
        LinearSystem.anchored(total, rhs, options.anchor),
        radius=options.trust * math.sqrt((len(examples) - 1) * variance),
        client_traces=_products(weights, layer.traces),
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
    # Fishers of clients that are sure of their examples are small. `balance` undoes a
    # part of this. A client without curvature has nothing to balance.
    powers = [trace**options.balance if trace > 0 else 1.0 for trace in traces]
    usual = statistics.median(squared_distances)
    doubts = [
        1 + options.robust * q / usual if usual else 1.0 for q in squared_distances
    ]
    # The power makes up for a confident client's small Fisher. The doubt lowers the
    # weight of a client that is far from the mean.
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


def _products(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a * b for a, b in zip(left, right, strict=True)]


@dataclass(frozen=True)
class _Layer:
    """One layer of all clients: their curvatures, and their moves from the mean."""

    # The regularised curvatures in stacks, each with its clients' positions.
    stacks: list[tuple[list[int], Curvature]]
    # Makes some clients' moves, side by side, when they are used: all clients' would
    # take as much memory again.
    moves: Callable[[Sequence[int]], dict[str, Tensor]]
    traces: list[float]  # of the curvatures
    fisher_squares: list[float]  # of each move in the client's own curvature
    squared_lengths: list[float]
    largest: list[float]  # entry of each client's moves

    def fits_float32(self, size: int) -> bool:
        """Return whether float32 holds a solver's products; zeros always do."""
        limits = [(trace / size, _LARGEST_EIGENVALUE) for trace in self.traces]
        limits += [(entry, _LARGEST_MOVE) for entry in self.largest]
        return all(not v or 1 / most <= abs(v) <= most for v, most in limits)


def _measured(
    parts: Sequence[Curvature],
    posteriors: Sequence[LocalPosterior],
    mean: Params,
    options: MergeOptions,
    device: Device,
    dtype: torch.dtype,
) -> _Layer:
    """Return the layer in at least `dtype`, from one pass and one read of a device."""
    wide = partial(_wide, device=device, dtype=dtype)
    layer_mean = {name: wide(mean[name]) for name in parts[0].shapes}

    def moves_of(members: Sequence[int]) -> dict[str, Tensor]:
        trained = {
            name: wide(side_by_side([posteriors[i].params[name] for i in members]))
            for name in layer_mean
        }
        return subtract(trained, repeated(layer_mean, len(members)))

    # Numbers stay on their device until all clients are measured: an accelerator is
    # waited for once a layer.
    measured, numbers, order = [], [], list[int]()
    for members, stack in stacks(parts):
        curvature = stack.mapped(wide).regularised(
            shrink=options.shrink, damping=options.damping
        )
        moves, count = moves_of(members), len(members)
        rows = by_part(moves, count)
        products = by_part(select(curvature.matvec(moves), moves), count)
        pairs = zip(rows, products, strict=True)
        square = torch.stack([(a * b).sum(-1) for a, b in pairs]).sum(0).clamp_min(0)
        length = torch.stack([row.square().sum(-1) for row in rows]).sum(0)
        largest = torch.stack([row.abs().amax(-1) for row in rows]).amax(0)
        each = curvature.traces(count), square, length, largest
        numbers.append(torch.stack([value.double() for value in each]))
        measured.append((members, curvature))
        order += members
    every: list[list[float]] = torch.cat(numbers, -1).tolist()
    places = sorted(range(len(order)), key=order.__getitem__)
    return _Layer(measured, moves_of, *([row[i] for i in places] for row in every))


def _wide(tensor: Tensor, device: Device, dtype: torch.dtype) -> Tensor:
    """Return a tensor on a device, its floats in at least `dtype`, for the solver.

    An accelerator is not waited for: it reads from memory that PyTorch keeps for that.
    """
    wide = torch.promote_types(tensor.dtype, dtype)
    goes_up = device is not None and torch.device(device).type != "cpu"
    target = wide if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device, target, non_blocking=goes_up)
