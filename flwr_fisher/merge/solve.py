"""Solving a merge's linear systems, one a layer, by the chosen solver."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flwr_fisher.curvature import Diagonal
from flwr_fisher.curvature.operators.rescaled import power_of_two
from flwr_fisher.curvature.operators.solvers import (
    conjugate_gradient,
    queued_conjugate_gradient,
)
from flwr_fisher.errors import StructureError
from flwr_fisher.merge.linear_system import LinearSystem, SystemMakers
from flwr_fisher.merge.options import MergeSettings, Report, Score
from flwr_fisher.merge.solvers import (
    best_of,
    gradient_descent,
    paper_adam,
    preconditioner,
)
from flwr_fisher.params import Params, add, dot, norm, select

# A step by parameter; None where a system was not solved.
Steps = dict[str, Tensor | None]

_FLOOR = 1e-6  # of a system's largest curvature, as FisherMerge's code has it
_ROUNDED = 1.001  # of the residual at the start


@dataclass(frozen=True)
class MergeResult:
    """The merged model, and how the solver did.

    Parameters
    ----------
    params : dict[str, Tensor]
        The merged parameters, with the keys, shapes and dtypes of the clients'.
    residuals : list[float]
        The norm of the residual over all layers, before the first iteration and after
        each, relative to the first; for a closed form, before and after it.
    iterations : int
        How many iterations the slowest layer took.
    shares : list[float]
        Each client's share of the summed curvature's trace; they add up to 1. Empty
        where only sums over the clients are known.
    unsolved : list[str]
        The parameters whose system the solver did not solve: it could take no step, or
        what it ended with is not finite, or worse than the mean. They are the mean's.
    outliers : dict[int, float]
        The places of the clients that were left out, each with its distance from the
        others in multiples of the median.
    settings : MergeSettings, optional
        What the merge was done with.
    mean : dict[str, Tensor], optional
        FedAvg's mean, where only sums over the clients are known.
    """

    params: dict[str, Tensor] = field(repr=False)
    residuals: list[float] = field(repr=False)
    iterations: int
    shares: list[float] = field(default_factory=list)
    unsolved: list[str] = field(default_factory=list)
    outliers: dict[int, float] = field(default_factory=dict)
    settings: MergeSettings | None = field(default=None, repr=False)
    mean: dict[str, Tensor] | None = field(default=None, repr=False)


def solve(
    mean: Params,
    systems: SystemMakers,
    settings: MergeSettings,
    score: Score | None,
    progress: Report | None,
) -> MergeResult:
    """Solve each layer's system for its step away from the mean, and take the steps.

    A layer whose system is not solved stays at the mean, and is named.
    """
    if settings.solver == "adam":
        every = [make().unscaled() for make in systems]
        delta, residuals = _adam(mean, every, settings, score, progress)
    else:
        delta, residuals = _one_by_one(mean, systems, settings, progress)
    unsolved = [name for name, step in delta.items() if step is None]
    if unsolved and progress is not None:
        progress(f"solver: {', '.join(unsolved)} not solved, and left at the mean")
    merged = _moved(mean, delta)
    return MergeResult(
        merged,
        residuals,
        max(0, len(residuals) - 1),
        unsolved=unsolved,
        settings=settings,
    )


def _moved(mean: Params, delta: Steps) -> dict[str, Tensor]:
    return {
        k: v if (step := delta.get(k)) is None else (v + step.to(v.device)).to(v.dtype)
        for k, v in mean.items()
    }


def _one_by_one(
    mean: Params,
    systems: SystemMakers,
    settings: MergeSettings,
    progress: Report | None,
) -> tuple[Steps, list[float]]:
    delta: Steps = {}
    curves = []
    for index, make in enumerate(systems, start=1):
        step, residuals = _solve_one(mean, make, settings)
        delta |= step
        curves.append(residuals)
        if progress is not None:
            left = residuals[-1] / residuals[0] if residuals[0] else 0.0
            progress(
                f"solver: {next(iter(step))}, {index} of {len(systems)}: "
                f"{len(residuals) - 1} iterations, residual {left:.1e}"
            )
    return delta, relative_norms(curves)


def _solve_one(
    mean: Params, make: Callable[[], LinearSystem], settings: MergeSettings
) -> tuple[Steps, list[float]]:
    """Make one layer's system and solve it; return its step and residual norms.

    The system is freed on return.
    """
    system = make().normalised()
    scale = system.scale * power_of_two(system.step_exponent)
    try:
        solution, residuals = _solved(system, settings)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # No curvature, or one that is not finite.
        solution, residuals = {}, [float(norm(system.rhs))]
    solved = _is_solved(system, solution, residuals, settings)
    step = system.within(solution) if solved else {}
    if not is_finite(_moved(select(mean, step), {**step})):
        step = {}
    if step:
        return {**step}, [value * scale for value in residuals]
    start = residuals[0] * scale  # what is left at the mean
    return dict.fromkeys(system.rhs), [start if math.isfinite(start) else 0.0]


def _is_solved(
    system: LinearSystem,
    solution: Params,
    residuals: list[float],
    settings: MergeSettings,
) -> bool:
    """Whether a solver got anywhere, and not somewhere worse than the mean."""
    if (
        not solution
        or not all(map(math.isfinite, residuals))
        or not is_finite(solution)
    ):
        return False
    if len(residuals) == 1:  # there was nothing to solve, or no step could be taken
        return residuals[0] == 0 or settings.tolerance >= 1
    if residuals[-1] <= _ROUNDED * residuals[0]:
        return True
    # Conjugate gradients lower the objective at every step, but not the residual.
    there = {name: v.to(system.rhs[name].device) for name, v in solution.items()}
    pulled = add(system.matvec(there), system.rhs, -2.0)
    return float(dot(there, pulled)) <= 0


def is_finite(params: Params) -> bool:
    """Return whether no entry is NaN or infinite."""
    return all(bool(value.isfinite().all()) for value in params.values())


def _solved(
    system: LinearSystem, settings: MergeSettings
) -> tuple[dict[str, Tensor], list[float]]:
    """Return a system's solution, and the residual's norms."""
    if settings.solver == "closed-form":
        return _closed_form(system, _FLOOR)
    if settings.solver in ("pcg", "cg") and _is_diagonal(system):
        # What many iterations would get to, of which float32 loses the digits.
        return _closed_form(system, floor=0.0)
    most, tolerance = settings.iterations, settings.tolerance
    problem = system.matvec, system.rhs
    if settings.solver not in ("pcg", "cg"):
        return gradient_descent(*problem, iterations=most, tolerance=tolerance)
    inverse = None
    if settings.solver == "pcg":
        inverse = preconditioner(system.curvature, system.ridge)
    if _device_of(system).type != "cpu":
        queued = queued_conjugate_gradient(
            *problem, iterations=most, tolerance=tolerance, precondition=inverse
        )
        solution, residuals = _read(*queued)
        if all(map(math.isfinite, residuals)):
            return solution, residuals
    return conjugate_gradient(
        *problem, iterations=most, tolerance=tolerance, precondition=inverse
    )


def _device_of(system: LinearSystem) -> torch.device:
    return next(iter(system.rhs.values())).device


def _read(
    solution: dict[str, Tensor], residuals: Tensor, steps: Tensor
) -> tuple[dict[str, Tensor], list[float]]:
    """Return a solution on the CPU, and the norms of the steps that were taken.

    An accelerator is waited for here, once.
    """
    dtype = residuals.dtype
    flat = [value.reshape(-1) for value in solution.values()]
    whole = torch.cat([*flat, residuals, steps.reshape(1).to(dtype)]).cpu()
    *parts, rest = torch.split(whole, [*map(len, flat), len(residuals) + 1])
    pairs = zip(solution.items(), parts, strict=True)
    found = {name: part.reshape(v.shape).to(v.dtype) for (name, v), part in pairs}
    numbers = rest.tolist()
    return found, numbers[: 1 + int(numbers[-1])]


def relative_norms(curves: list[list[float]]) -> list[float]:
    """Join the layers' residual norms; a layer that is done keeps its last one."""
    length = max((len(curve) for curve in curves), default=0)
    padded = [curve + curve[-1:] * (length - len(curve)) for curve in curves]
    residuals = [math.hypot(*values) for values in zip(*padded, strict=True)]
    return [value / residuals[0] if residuals[0] else 0.0 for value in residuals]


def _is_diagonal(system: LinearSystem) -> bool:
    return all(isinstance(term, Diagonal) for term in system.curvature.terms)


def _closed_form(
    system: LinearSystem, floor: float
) -> tuple[dict[str, Tensor], list[float]]:
    """Divide; an entry of at most `floor` times the system's largest counts as 0."""
    if not _is_diagonal(system):
        raise StructureError(
            f"the curvature of {list(system.rhs)} is not diagonal, so it has no closed "
            "form: use solver='pcg', or structure='diagonal'"
        )
    entries = system.curvature.diagonal()
    least = floor and floor * max(float(entry.max()) for entry in entries.values())
    solution = {}
    for name, entry in entries.items():
        known = entry > least
        divisor = torch.where(known, entry + system.ridge, 1.0)
        solution[name] = torch.where(known, system.rhs[name] / divisor, 0.0)
    left = add(system.rhs, system.matvec(solution), -1.0)
    if _device_of(system).type != "cpu":
        residuals = torch.stack([dot(v, v).sqrt() for v in (system.rhs, left)])
        return _read(solution, residuals, torch.ones_like(residuals[0]))
    return solution, [float(norm(system.rhs)), float(norm(left))]


def _adam(
    mean: Params,
    systems: list[LinearSystem],
    settings: MergeSettings,
    score: Score | None,
    progress: Report | None,
) -> tuple[Steps, list[float]]:
    """Solve all systems at once, and again without those that do not end finite."""
    rhs = {name: value for system in systems for name, value in system.rhs.items()}

    def matvec(vector: Params) -> dict[str, Tensor]:
        return _joined(system.matvec(select(vector, system.rhs)) for system in systems)

    def steps(delta: Params) -> dict[str, Tensor]:
        return _joined(system.within(select(delta, system.rhs)) for system in systems)

    scored = None if score is None else (lambda d: score(_moved(mean, {**steps(d)})))
    diagonal = all(_is_diagonal(system) for system in systems)
    iterates = paper_adam(matvec, rhs, lr=settings.lr, epsilon_inside=not diagonal)
    solution, residuals = best_of(iterates, settings.iterations, scored, progress)
    delta: Steps = {**steps(solution)}
    moved = _moved(mean, delta)
    solved = [s for s in systems if is_finite(select(moved, s.rhs))]
    if len(solved) == len(systems):
        return delta, relative_norms([residuals])
    if not solved:
        return dict.fromkeys(rhs), [1.0]
    again, residuals = _adam(mean, solved, settings, score, progress)
    return dict.fromkeys(rhs) | again, residuals


def _joined(parts: Iterable[Params]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.items()}
