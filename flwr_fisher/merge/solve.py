"""The solution of a merge's linear systems, one for each layer, by a solver."""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.solvers import (
    Iterate,
    conjugate_gradient,
    divided,
)
from flwr_fisher.curvature.structures import preconditioner
from flwr_fisher.errors import StructureError
from flwr_fisher.merge.linear_system import LinearSystem, Moves, SystemMaker, moved
from flwr_fisher.merge.options import MergeOptions, Report, Score
from flwr_fisher.merge.paper_solvers import adam, gradient_descent
from flwr_fisher.params import Params, add, dot, is_finite, norm, select, shares_of

_FLOOR = 1e-6  # relative to the largest curvature, as in FisherMerge's code
_ROUNDED = 1.001  # how much larger than at the start a residual may be, by rounding


@dataclass(frozen=True)
class MergeResult:
    """The merged model, with what the solver reports.

    Parameters
    ----------
    params : dict[str, Tensor]
        The merged parameters, with the keys, shapes and dtypes of the clients'.
    residuals : list[float]
        The norm of the residual over all layers, relative to the first: before the
        first iteration and after each iteration. For a closed form: before and after
        it.
    iterations : int
        How many iterations the slowest layer took.
    shares : list[float]
        Each client's share of the summed curvature's trace; they add up to 1. Empty if
        only sums over the clients are known.
    unsolved : list[str]
        The parameters whose system the solver did not solve, because it could take no
        step, or because its result is not finite or worse than the mean. These
        parameters stay at the mean.
    options : MergeOptions, optional
        The options of the merge, with all defaults.
    mean : dict[str, Tensor], optional
        FedAvg's mean, if only sums over the clients are known.
    """

    params: dict[str, Tensor] = field(repr=False)
    residuals: list[float] = field(repr=False)
    iterations: int
    shares: list[float] = field(default_factory=list)
    unsolved: list[str] = field(default_factory=list)
    options: MergeOptions | None = field(default=None, repr=False)
    mean: dict[str, Tensor] | None = field(default=None, repr=False)


def solve(
    mean: Params,
    systems: Sequence[SystemMaker],
    options: MergeOptions,
    score: Score | None,
    progress: Report | None,
    examples: Sequence[float] = (),
) -> MergeResult:
    """Solve each layer's system for its move away from the mean; take the moves.

    If a layer's system is not solved, the layer stays at the mean, and the result names
    it. `examples` has each client's, if the systems know their clients.
    """
    if options.solver == "adam":
        together = [make() for make in systems]
        traces = [system.client_traces for system in together]
        moves, curves = adam(mean, together, options, score, progress)
    else:
        moves, curves, traces = Moves(), [], []
        for index, make in enumerate(systems, start=1):
            move, norms, held = _solved(mean, make().normalised(), options)
            moves |= move
            curves.append(norms)
            traces.append(held)
            if progress is not None:
                progress(f"solver: {next(iter(move))}, {index} of {len(systems)}")
    unsolved = [name for name, move in moves.items() if move is None]
    residuals = relative_norms(curves)
    return MergeResult(
        moved(mean, moves),
        residuals,
        max(0, len(residuals) - 1),
        shares=_shares(traces, examples),
        unsolved=unsolved,
        options=options,
    )


def _solved(
    mean: Params, system: LinearSystem, options: MergeOptions
) -> tuple[Moves, list[float], list[float]]:
    """Return a layer's move, its residual norms and its clients' traces.

    There is no move if it is not solved.
    """
    # No curvature, or one that is not finite, is an error on the CPU.
    with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        end = _iterate(system, options)
        # Twice the objective's rise: x·Ax - 2 x·b = -x·(b + r), because Ax is b - r.
        rise = -dot(end.solution, add(system.rhs, end.residual))
        solution, norms = end.read()
        solution = {name: value.cpu() for name, value in solution.items()}
        if _improves(solution, norms, float(rise)):
            move: Moves = {**system.move(solution)}
            if is_finite(moved(select(mean, move), move)):
                return move, [n * system.scale for n in norms], system.client_traces
    start = float(norm(system.rhs)) * system.scale  # what is left at the mean
    unsolved: Moves = dict.fromkeys(system.rhs)
    return unsolved, [start if math.isfinite(start) else 0.0], system.client_traces


def _improves(solution: Params, residuals: list[float], rise: float) -> bool:
    """Return whether the solver took a step, and improved on the mean."""
    if not all(map(math.isfinite, residuals)) or not is_finite(solution):
        return False
    if len(residuals) == 1:  # there was nothing to solve, or no step could be taken
        return residuals[0] == 0
    # Conjugate gradients lower the objective at every step, but not the residual.
    return residuals[-1] <= _ROUNDED * residuals[0] or rise <= 0


def _iterate(system: LinearSystem, options: MergeOptions) -> Iterate:
    """Return the solver's last iterate."""
    if options.solver == "closed-form":
        return _closed_form(system, _FLOOR)
    if options.solver in ("pcg", "cg") and system.is_diagonal():
        # Many iterations would lead here, up to float32's rounding.
        return _closed_form(system, floor=0.0)
    most, tolerance = options.iterations, options.tolerance
    problem = system.matvec, system.rhs
    if options.solver == "gd":
        return gradient_descent(*problem, iterations=most, tolerance=tolerance)
    inverse = None
    if options.solver == "pcg":
        inverse = preconditioner(system.curvature, system.ridge)
    return conjugate_gradient(
        *problem, iterations=most, tolerance=tolerance, precondition=inverse
    )


def relative_norms(curves: Sequence[list[float]]) -> list[float]:
    """Return the norms of all layers together; a finished layer keeps its last norm."""
    length = max((len(curve) for curve in curves), default=0)
    padded = [curve + curve[-1:] * (length - len(curve)) for curve in curves]
    residuals = [math.hypot(*values) for values in zip(*padded, strict=True)]
    return [value / residuals[0] if residuals[0] else 0.0 for value in residuals]


def _shares(traces: Iterable[list[float]], examples: Sequence[float]) -> list[float]:
    """Return the clients' shares of the curvature, or else of the examples."""
    total = [0.0] * len(examples)
    for layer in traces:
        total = [a + b for a, b in zip(total, layer, strict=True)]
    return shares_of(total if sum(total) else examples)


def _closed_form(system: LinearSystem, floor: float) -> Iterate:
    """Solve by division; entries of at most `floor` times the largest count as 0."""
    if not system.is_diagonal():
        raise StructureError(
            f"the curvature of {list(system.rhs)} is not diagonal, and only a diagonal "
            "one has a closed form: use solver='pcg', or structure='diagonal'"
        )
    entries = system.curvature.diagonal()
    tops = torch.stack([entry.max().double() for entry in entries.values()])
    least = floor * tops.max()
    solution = {}
    for name, entry in entries.items():
        rhs = torch.where(entry > least.to(entry.dtype), system.rhs[name], 0.0)
        solution[name] = divided(rhs, entry, system.ridge)
    left = add(system.rhs, system.matvec(solution), -1.0)
    return Iterate.start(system.rhs).after(solution, left)
