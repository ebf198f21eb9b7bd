"""FedFisher's conjugate gradients for a server that sees only sums over clients.

:func:`~flwr_fisher.merge.fedfisher` iterates without a break. Here, the server asks its
clients for a product in each iteration. An :class:`Iterate` holds the state of every
layer between two iterations, as tensors.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.curvature import Curvature, Diagonal, Kronecker, WeightedSum
from flwr_fisher.curvature.operators.solvers import Matvec
from flwr_fisher.curvature.structures import preconditioner
from flwr_fisher.merge.options import MergeSettings
from flwr_fisher.merge.solve import MergeResult, relative_norms
from flwr_fisher.params import Params, add, dot, double, is_finite, norm, scale, select


@dataclass(frozen=True)
class Iterate:
    """The state of conjugate gradients, layer by layer, in float64.

    Parameters
    ----------
    solution, residual, direction : dict[str, Tensor]
        Over all parameters with a curvature. The clients multiply `direction`.
    decrease : list[float]
        For each layer, the product of the residual with the preconditioned residual.
    norms : list[list[float]]
        For each layer, the residual's norm at the start and after each iteration.
    """

    solution: dict[str, Tensor]
    residual: dict[str, Tensor]
    direction: dict[str, Tensor]
    decrease: list[float]
    norms: list[list[float]]

    def to_groups(self) -> dict[str, dict[str, Tensor]]:
        """Return the state as named groups of tensors."""
        longest = max(map(len, self.norms), default=0)
        padded = [own + [math.nan] * (longest - len(own)) for own in self.norms]
        numbers = {"decrease": self.decrease, "norms": padded}
        return {
            "solution": self.solution,
            "residual": self.residual,
            "direction": self.direction,
            "progress": {
                name: torch.tensor(value, dtype=torch.float64)
                for name, value in numbers.items()
            },
        }

    @classmethod
    def from_groups(cls, groups: Mapping[str, Params]) -> "Iterate":
        """Return the state from the groups of :meth:`to_groups`."""
        norms: list[list[float]] = groups["progress"]["norms"].tolist()
        return cls(
            dict(groups["solution"]),
            dict(groups["residual"]),
            dict(groups["direction"]),
            groups["progress"]["decrease"].tolist(),
            [[value for value in own if not math.isnan(value)] for own in norms],
        )


def begin(traces: Curvature, pull: Params, settings: MergeSettings) -> Iterate:
    r"""Return the first state, at the clients' mean.

    Parameters
    ----------
    traces : Curvature
        The sum of the clients' :func:`~flwr_fisher.merge.partial_traces`.
    pull : Mapping[str, Tensor]
        :math:`\sum_i p_i F_i (\theta_i - \bar\theta)`.
    settings : MergeSettings
        `anchor` is used.
    """
    solution: dict[str, Tensor] = {}
    residual: dict[str, Tensor] = {}
    direction: dict[str, Tensor] = {}
    decrease, norms = [], []
    for system in _layer_systems(traces, settings.anchor):
        rhs = scale(double(select(pull, system.names)), 1 / system.unit)
        zero = {name: torch.zeros_like(value) for name, value in rhs.items()}
        steepest = zero if system.inverse is None else system.inverse(rhs)
        at_once = system.diagonal and system.inverse is not None
        solution |= steepest if at_once else zero
        residual |= zero if at_once else rhs
        direction |= zero if at_once else steepest
        decrease.append(float(dot(rhs, steepest)))
        norms.append([float(norm(rhs)), 0.0] if at_once else [float(norm(rhs))])
    return Iterate(solution, residual, direction, decrease, norms)


def own_move(traces: Curvature, pull: Params, anchor: float) -> dict[str, Tensor]:
    r"""Return the move to which one client's pull would lead without the others.

    :math:`(F_i + \lambda I)^{-1} F_i (\theta_i - \bar\theta)`, the ridge shared
    between a layer's factors. It is never longer than the client's move from the mean.
    If the client's numbers are no product of its Fisher, it is long, because the merge
    divides them by curvatures near 0.

    Parameters
    ----------
    traces : Curvature
        The client's own :func:`~flwr_fisher.merge.partial_traces`.
    pull : Mapping[str, Tensor]
        What it says is :math:`F_i (\theta_i - \bar\theta)`.
    anchor : float
        Of the merge.
    """
    move: dict[str, Tensor] = {}
    for system in _layer_systems(traces, anchor):
        rhs = scale(double(select(pull, system.names)), 1 / system.unit)
        move |= rhs if system.inverse is None else system.inverse(rhs)
    return move


def advanced(
    traces: Curvature, before: Iterate, product: Params, settings: MergeSettings
) -> Iterate:
    r"""Return the state after one step, with the next direction.

    Parameters
    ----------
    traces, settings
        As for :func:`begin`.
    before : Iterate
        The last one.
    product : Mapping[str, Tensor]
        :math:`\sum_i p_i F_i z`, for its direction z.
    """
    parts = []
    for index, system in enumerate(_layer_systems(traces, settings.anchor)):
        own = Iterate(
            select(before.solution, system.names),
            select(before.residual, system.names),
            select(before.direction, system.names),
            [before.decrease[index]],
            [before.norms[index]],
        )
        parts.append(_stepped(system, own, select(product, system.names), settings))
    return Iterate(
        {k: v for part in parts for k, v in part.solution.items()},
        {k: v for part in parts for k, v in part.residual.items()},
        {k: v for part in parts for k, v in part.direction.items()},
        [value for part in parts for value in part.decrease],
        [own for part in parts for own in part.norms],
    )


def merged(
    mean: Params, iterate: Iterate, layers: Sequence[Sequence[str]]
) -> MergeResult:
    """Return the model of the current state.

    If no step was possible for a layer, it stays at the mean, and the result names it.

    Parameters
    ----------
    mean : Mapping[str, Tensor]
        The clients' mean parameters and buffers.
    iterate : Iterate
        The last one.
    layers : Sequence[Sequence[str]]
        The names of each layer's parameters, as in the sum of curvatures.
    """
    params, unsolved = dict(mean), list[str]()
    for names, own in zip(layers, iterate.norms, strict=True):
        move = select(iterate.solution, names)
        moved = {name: mean[name] + move[name].to(mean[name]) for name in names}
        if _is_solved(move, own) and is_finite(moved):
            params |= moved
        else:
            unsolved += names
    norms = relative_norms(iterate.norms)
    return MergeResult(
        params, norms, max(0, len(norms) - 1), unsolved=unsolved, mean=dict(mean)
    )


def _is_solved(move: Params, norms: Sequence[float]) -> bool:
    """Return whether a step was taken or none was needed; each lowers the objective."""
    if not is_finite(move) or not all(map(math.isfinite, norms)):
        return False
    return len(norms) > 1 or norms[0] == 0


@dataclass(frozen=True)
class _LayerSystem:
    r"""The server's knowledge of one layer's linear system, at the layer's own scale.

    .. math:: \Big(\tfrac1u \sum_i p_i F_i + \rho I\Big)\, \delta
              = \tfrac1u \sum_i p_i F_i (\theta_i - \bar\theta),

    with u the mean eigenvalue of the sum, so that the system's mean eigenvalue is 1.
    Products with the sum come from the clients.
    """

    names: list[str]  # of the layer's parameters
    unit: float  # u
    ridge: float  # rho
    diagonal: bool
    inverse: Matvec | None  # an approximate inverse, or None without curvature


def _layer_systems(traces: Curvature, anchor: float) -> Iterator[_LayerSystem]:
    return (_layer_system(block.made(), anchor) for block in traces.blocks())


def _layer_system(block: Curvature, anchor: float) -> _LayerSystem:
    """Return a layer's system; `block` is the sum of the clients' partial traces."""
    names, wide = list(block.shapes), block.to(dtype=torch.float64)
    # Both partial traces have the sum's trace.
    traces = (
        wide.A_factor.trace() if isinstance(wide, Kronecker) else wide.queued_trace()
    )
    unit = float(traces.sum()) / block.numel()
    if not (unit > 0 and math.isfinite(unit)):
        return _LayerSystem(names, 1.0, 0.0, isinstance(block, Diagonal), None)
    if isinstance(wide, Diagonal):
        return _LayerSystem(names, unit, anchor, True, _divided_by(wide, unit, anchor))
    assert isinstance(wide, Kronecker)
    # The product of the two has the square of the trace, group by group.
    own = traces.clamp_min(torch.finfo(traces.dtype).tiny).reshape(-1, 1, 1)
    product = wide.with_factors(wide.A / unit, wide.G / own)
    inverse = preconditioner(WeightedSum([product], [1.0]), anchor)
    return _LayerSystem(names, unit, anchor, False, inverse)


def _divided_by(block: Diagonal, unit: float, ridge: float) -> Matvec:
    """Return a function that divides by a diagonal, with 0 where that is 0."""

    def solve(vector: Params) -> dict[str, Tensor]:
        solution = {}
        for name, entry in block.entries.items():
            known = entry > 0
            divisor = torch.where(known, entry / unit + ridge, 1.0)
            solution[name] = torch.where(known, vector[name] / divisor, 0.0)
        return solution

    return solve


def _stepped(
    system: _LayerSystem, own: Iterate, product: Params, settings: MergeSettings
) -> Iterate:
    """Take one layer's step; if none is possible, stay and request no product."""
    zero = {name: torch.zeros_like(value) for name, value in own.direction.items()}
    stay = Iterate(own.solution, own.residual, zero, own.decrease, own.norms)
    norms = own.norms[0]
    done = norms[-1] <= settings.tolerance * norms[0]
    if system.inverse is None or system.diagonal or done:
        return stay
    product = add(scale(double(product), 1 / system.unit), own.direction, system.ridge)
    curvature = float(dot(own.direction, product))
    if not 0 < curvature < math.inf:
        return stay
    # Clients get the rounded direction, so whether there is one is checked again.
    length = float(dot(own.direction, own.residual)) / curvature
    solution = add(own.solution, own.direction, length)
    residual = add(own.residual, product, -length)
    steepest = system.inverse(residual)
    decrease = float(dot(residual, steepest))
    turn = decrease / own.decrease[0]
    direction = add(steepest, own.direction, turn)
    return Iterate(
        solution, residual, direction, [decrease], [[*norms, float(norm(residual))]]
    )
