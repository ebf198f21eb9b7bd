"""FedFisher's conjugate gradients for a server that sees only sums over clients.

:func:`~flwr_fisher.merge.fedfisher` iterates without a break. Here, the server asks its
clients for a product in each iteration. Between two iterations, the state of every
layer is an :class:`~flwr_fisher.curvature.operators.base.Iterate` in float64, which
the server keeps as tensors::

    layers = begin(traces, pull, anchor)
    for _ in range(iterations):  # each of them is an exchange with the clients
        product = ...  # the clients' mean of F_i z, for the layers' directions z
        layers = advanced(traces, layers, product, options)
    result = merged(mean, layers)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_fisher.curvature import Curvature, Diagonal, Kronecker, WeightedSum
from flwr_fisher.curvature.operators.base import Iterate, Matvec, divided
from flwr_fisher.curvature.structures import preconditioner
from flwr_fisher.merge.fedfisher import MergeResult, relative_norms
from flwr_fisher.merge.options import MergeOptions
from flwr_fisher.params import Params, add, dot, double, is_finite, norm, scale, select

# The fields of an `Iterate`: a tensor for each parameter, and for each layer.
_VECTORS = ("solution", "residual", "direction")
_NUMBERS = ("norms", "steps", "live", "decrease")
ITERATE = (*_VECTORS, *_NUMBERS)  # the groups of `to_groups`


def begin(traces: Curvature, pull: Params, anchor: float) -> list[Iterate]:
    r"""Return each layer's first state, at the clients' mean.

    Parameters
    ----------
    traces : Curvature
        The sum of the clients' :func:`~flwr_fisher.merge.partial_traces`.
    pull : Mapping[str, Tensor]
        :math:`\sum_i p_i F_i (\theta_i - \bar\theta)`.
    anchor : float
        Of the merge.
    """
    layers = []
    for system in _layer_systems(traces, anchor):
        rhs = system.scaled(pull)
        state = Iterate.start(rhs)  # the solution is 0, and the residual is `rhs`
        if system.inverse is None:
            # Without curvature there is nothing to solve, and no direction.
            state = _at_rest(state)
        elif system.is_diagonal:
            # The server knows a diagonal sum itself: the inverse is the solution.
            zero = {name: torch.zeros_like(value) for name, value in rhs.items()}
            state = _at_rest(state.after(system.inverse(rhs), zero))
        else:
            # The first direction, for which the server asks the clients' products.
            state = state.turned(system.inverse(rhs))
        layers.append(state)
    return layers


def step_of_product(
    traces: Curvature, product: Params, anchor: float
) -> dict[str, Tensor]:
    r"""Return the step to which one client's product would lead by itself.

    It is :math:`(F + \lambda I)^{-1} F_i v`, the ridge shared between a layer's
    factors. If the client's numbers are no product of its Fisher, it is long, because
    the merge divides them by curvatures near 0.

    Parameters
    ----------
    traces : Curvature
        The :func:`~flwr_fisher.merge.partial_traces` of F. With the client's own F, the
        step is never longer than v.
    product : Mapping[str, Tensor]
        What the client says is :math:`F_i v`.
    anchor : float
        Of the merge.
    """
    step: dict[str, Tensor] = {}
    for system in _layer_systems(traces, anchor):
        rhs = system.scaled(product)
        step |= rhs if system.inverse is None else system.inverse(rhs)
    return step


def advanced(
    traces: Curvature, layers: Sequence[Iterate], product: Params, options: MergeOptions
) -> list[Iterate]:
    r"""Return the layers' states after one step, with their next directions.

    Parameters
    ----------
    traces : Curvature
        As for :func:`begin`.
    layers : Sequence[Iterate]
        The last states.
    product : Mapping[str, Tensor]
        :math:`\sum_i p_i F_i z`, for the layers' directions z.
    options : MergeOptions
        `anchor` and `tolerance` are used.
    """
    after = []
    systems = _layer_systems(traces, options.anchor)
    for system, state in zip(systems, layers, strict=True):
        # This is the body of `conjugate_gradient`'s loop, from one product to the next.
        state = state.while_above(options.tolerance)
        if state.live and system.inverse is not None:
            # The clients' products have neither the layer's scale nor the ridge.
            own = add(system.scaled(product), state.direction, system.ridge)
            # Clients get the direction rounded to their dtype, and so does the state.
            # The slope along it is no longer exactly the `decrease`.
            slope = dot(state.direction, state.residual)
            state = state.stepped(own, slope)
        # A layer that has ended waits for the others, with a direction of 0.
        if state.live and system.inverse is not None:
            state = state.turned(system.inverse(state.residual))
        else:
            state = _at_rest(state)
        after.append(state)
    return after


def begun_again(
    traces: Curvature, layers: Sequence[Iterate], pull: Params, anchor: float
) -> list[Iterate]:
    r"""Return the layers' states with new residuals, after some clients have left.

    The solutions stay. The next directions are conjugate to none before them. The
    systems' preconditioners remain those of all clients.

    Parameters
    ----------
    traces : Curvature
        As for :func:`begin`.
    layers : Sequence[Iterate]
        The last states, of solutions :math:`\delta`.
    pull : Mapping[str, Tensor]
        :math:`\sum_i p_i F_i (\theta_i - \bar\theta - \delta)` over the clients that
        are left.
    anchor : float
        Of the merge.
    """
    again = []
    for system, state in zip(_layer_systems(traces, anchor), layers, strict=True):
        if state.live and system.inverse is not None:
            left = add(system.scaled(pull), state.solution, -system.ridge)
            norms = [*state.norms[:-1], norm(left).double()]
            state = replace(state, residual=left, norms=norms, decrease=None)
            state = state.turned(system.inverse(left))
        again.append(state)
    return again


def merged(mean: Params, layers: Sequence[Iterate]) -> MergeResult:
    """Return the model of the current state.

    If no step was possible for a layer, it stays at the mean, and the result names it.

    Parameters
    ----------
    mean : Mapping[str, Tensor]
        The clients' mean parameters and buffers.
    layers : Sequence[Iterate]
        The last states.
    """
    params, unsolved, curves = dict(mean), list[str](), list[list[float]]()
    for state in layers:
        solution, norms = state.read()
        moved = {k: mean[k] + move.to(mean[k]) for k, move in solution.items()}
        finite = all(map(math.isfinite, norms)) and is_finite(moved)
        # Each step lowers the objective. Without one, only zero is a solution.
        if finite and (len(norms) > 1 or norms[0] == 0):
            params |= moved
        else:
            unsolved += solution
        curves.append(norms)
    norms = relative_norms(curves)
    return MergeResult(
        params, norms, max(0, len(norms) - 1), unsolved=unsolved, mean=dict(mean)
    )


def to_groups(layers: Sequence[Iterate]) -> dict[str, dict[str, Tensor]]:
    """Return the layers' states as named groups of tensors.

    The groups of vectors have a tensor for each parameter. Those of numbers have a
    tensor for each layer, whose name is the layer's index.
    """
    groups = {
        name: {k: v for state in layers for k, v in getattr(state, name).items()}
        for name in _VECTORS
    }
    for index, state in enumerate(layers):
        # A layer that ended before it had a direction has no decrease.
        decrease = state.norms[0] * 0 if state.decrease is None else state.decrease
        numbers = (torch.stack(state.norms), state.steps, state.live, decrease)
        for name, value in zip(_NUMBERS, numbers, strict=True):
            groups.setdefault(name, {})[str(index)] = value
    return groups


def from_groups(groups: Mapping[str, Params], traces: Curvature) -> list[Iterate]:
    """Return the layers' states from the groups of :func:`to_groups`."""
    layers = []
    for index, block in enumerate(traces.blocks()):
        vectors = (select(groups[name], block.shapes) for name in _VECTORS)
        solution, residual, direction = vectors
        norms, steps, live, decrease = (groups[name][str(index)] for name in _NUMBERS)
        state = Iterate(solution, residual, [*norms], steps, live, direction, decrease)
        layers.append(state)
    return layers


def _at_rest(state: Iterate) -> Iterate:
    """Return a state that has ended, whose zero direction asks for no product."""
    zero = {name: torch.zeros_like(value) for name, value in state.solution.items()}
    return replace(state, live=torch.zeros_like(state.live), direction=zero)


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
    is_diagonal: bool
    inverse: Matvec | None  # an approximate inverse, or None without curvature

    def scaled(self, vector: Params) -> dict[str, Tensor]:
        """Return the layer's part of the clients' vector, at the layer's scale."""
        return scale(double(select(vector, self.names)), 1 / self.unit)


def _layer_systems(traces: Curvature, anchor: float) -> Iterator[_LayerSystem]:
    return (_layer_system(block.made(), anchor) for block in traces.blocks())


def _layer_system(block: Curvature, anchor: float) -> _LayerSystem:
    """Return a layer's system; `block` is the sum of the clients' partial traces."""
    names, wide = list(block.shapes), block.to(dtype=torch.float64)
    # Both partial traces have the sum's trace. The unit is the mean eigenvalue.
    traces = wide.A_factor.trace() if isinstance(wide, Kronecker) else wide.traces()
    unit = float(traces.sum()) / block.numel()
    if not (unit > 0 and math.isfinite(unit)):
        return _LayerSystem(names, 1.0, 0.0, isinstance(wide, Diagonal), None)
    if isinstance(wide, Diagonal):
        return _LayerSystem(names, unit, anchor, True, _divided_by(wide, unit, anchor))
    assert isinstance(wide, Kronecker)
    # The product of the two has the square of the trace, group by group.
    trace = traces.clamp_min(torch.finfo(traces.dtype).tiny).reshape(-1, 1, 1)
    product = wide.with_factors(wide.A / unit, wide.G / trace)
    inverse = preconditioner(WeightedSum([product], [1.0]), anchor)
    return _LayerSystem(names, unit, anchor, False, inverse)


def _divided_by(block: Diagonal, unit: float, ridge: float) -> Matvec:
    """Return a function that divides by a diagonal, with 0 where that is 0."""
    return lambda vector: {
        name: divided(torch.where(entry > 0, vector[name], 0.0), entry / unit, ridge)
        for name, entry in block.entries.items()
    }
