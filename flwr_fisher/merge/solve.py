"""The solution of a merge's linear systems, one for each layer, by a solver."""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flwr_fisher.curvature import Diagonal
from flwr_fisher.curvature.operators.rescaled import power_of_two
from flwr_fisher.curvature.operators.solvers import Solution, conjugate_gradient
from flwr_fisher.devices import Read, Reads
from flwr_fisher.errors import StructureError
from flwr_fisher.merge.linear_system import (
    LinearSystem,
    StepUnit,
    SystemMaker,
    SystemMakers,
)
from flwr_fisher.merge.options import MergeSettings, Report, Score
from flwr_fisher.merge.solvers import (
    best_of,
    gradient_descent,
    paper_adam,
    preconditioner,
)
from flwr_fisher.params import Params, add, dot, is_finite, norm, select

# A step by parameter, or None if a system was not solved.
Steps = dict[str, Tensor | None]

_FLOOR = 1e-6  # of a system's largest curvature, as FisherMerge's code has it
_ROUNDED = 1.001  # of the residual at the start


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
    outliers : dict[int, float]
        The clients that were left out, by their numbers in the order of the posteriors,
        with their distance from the others in multiples of the median.
    settings : MergeSettings, optional
        The settings of the merge.
    mean : dict[str, Tensor], optional
        FedAvg's mean, if only sums over the clients are known.
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
    """Solve each layer's system for its step away from the mean; take the steps.

    If a layer's system is not solved, the layer stays at the mean, and the result names
    it.
    """
    reads = Reads()
    if settings.solver == "adam":
        every = [make(reads).unscaled() for make in systems]
        delta, residuals = _adam(mean, every, settings, score, progress)
    else:
        delta, residuals = _one_by_one(mean, systems, settings, progress, reads)
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
    reads: Reads,
) -> tuple[Steps, list[float]]:
    """Solve one layer's system after the other.

    What came of a layer is read with what the next one's system is made of, so that an
    accelerator is waited for once a layer.
    """
    delta: Steps = {}
    curves = []
    begun = (_begun(make, settings, reads) for make in systems)
    for index, layer in enumerate(_each_after_the_next(begun), start=1):
        step, residuals = _result(mean, layer, settings)
        delta |= step
        curves.append(residuals)
        if progress is not None:
            left = residuals[-1] / residuals[0] if residuals[0] else 0.0
            progress(
                f"solver: {next(iter(step))}, {index} of {len(systems)}: "
                f"{len(residuals) - 1} iterations, residual {left:.1e}"
            )
    return delta, relative_norms(curves)


@dataclass(frozen=True)
class _Layer:
    """A solved layer: its solution, without its system."""

    names: list[str]
    scale: float
    unit: StepUnit
    start: Read  # the residual's norm at the mean
    numbers: Read | None  # the solution, norms, steps and objective; None: not solved


def _begun(make: SystemMaker, settings: MergeSettings, reads: Reads) -> _Layer:
    """Compute one layer's system and solve it; the system is freed on return."""
    system = make(reads).normalised()
    scale = system.scale * power_of_two(system.unit.exponent)
    start, numbers = reads.queue(norm(system.rhs)), None
    # No curvature, or one that is not finite, is an error on the CPU.
    with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        found = _solved(system, settings)
        # Half of it: x (A x - 2 b), where A x is b without the residual.
        rise = -dot(found.values, add(system.rhs, found.residual))
        tensors = found.values.values()
        numbers = reads.queue(*tensors, found.norms, found.steps, rise)
    return _Layer(list(system.rhs), scale, system.unit, start, numbers)


def _each_after_the_next(layers: Iterable[_Layer]) -> Iterator[_Layer]:
    """Yield each layer once the next one has been started; the last one at the end."""
    before: list[_Layer] = []
    for layer in layers:
        yield from before
        before = [layer]
    yield from before


def _result(
    mean: Params, layer: _Layer, settings: MergeSettings
) -> tuple[Steps, list[float]]:
    """Return a layer's step and its residual norms."""
    step: dict[str, Tensor] = {}
    residuals: list[float] = []
    if layer.numbers is not None:
        *values, norms, steps, rise = layer.numbers.values()
        solution = dict(zip(layer.names, values, strict=True))
        residuals = norms[: 1 + int(steps)].tolist()
        if _is_solved(solution, residuals, float(rise), settings):
            step = layer.unit.step(solution)
    if not is_finite(_moved(select(mean, step), {**step})):
        step = {}
    if step:
        return {**step}, [value * layer.scale for value in residuals]
    start = float(layer.start.values()[0]) * layer.scale  # what is left at the mean
    return dict.fromkeys(layer.names), [start if math.isfinite(start) else 0.0]


def _is_solved(
    solution: Params, residuals: list[float], rise: float, settings: MergeSettings
) -> bool:
    """Return whether the solver took a step, and improved on the mean."""
    if not all(map(math.isfinite, residuals)) or not is_finite(solution):
        return False
    if len(residuals) == 1:  # there was nothing to solve, or no step could be taken
        return residuals[0] == 0 or settings.tolerance >= 1
    # Conjugate gradients lower the objective at every step, but not the residual.
    return residuals[-1] <= _ROUNDED * residuals[0] or rise <= 0


def _solved(system: LinearSystem, settings: MergeSettings) -> Solution:
    if settings.solver == "closed-form":
        return _closed_form(system, _FLOOR)
    if settings.solver in ("pcg", "cg") and _is_diagonal(system):
        # What many iterations would reach, beyond float32's digits.
        return _closed_form(system, floor=0.0)
    most, tolerance = settings.iterations, settings.tolerance
    problem = system.matvec, system.rhs
    if settings.solver not in ("pcg", "cg"):
        return gradient_descent(*problem, iterations=most, tolerance=tolerance)
    inverse = None
    if settings.solver == "pcg":
        inverse = preconditioner(system.curvature, system.ridge)
    return conjugate_gradient(
        *problem, iterations=most, tolerance=tolerance, precondition=inverse
    )


def relative_norms(curves: list[list[float]]) -> list[float]:
    """Return the norms of all layers together; a finished layer keeps its last norm."""
    length = max((len(curve) for curve in curves), default=0)
    padded = [curve + curve[-1:] * (length - len(curve)) for curve in curves]
    residuals = [math.hypot(*values) for values in zip(*padded, strict=True)]
    return [value / residuals[0] if residuals[0] else 0.0 for value in residuals]


def _is_diagonal(system: LinearSystem) -> bool:
    return all(isinstance(term, Diagonal) for term in system.curvature.terms)


def _closed_form(system: LinearSystem, floor: float) -> Solution:
    """Solve by division; entries of at most `floor` times the largest count as 0."""
    if not _is_diagonal(system):
        raise StructureError(
            f"the curvature of {list(system.rhs)} is not diagonal, and only a diagonal "
            "one has a closed form: use solver='pcg', or structure='diagonal'"
        )
    entries = system.curvature.diagonal()
    tops = torch.stack([entry.max().double() for entry in entries.values()])
    least = floor * tops.max() if floor else torch.zeros_like(tops[0])
    solution = {}
    for name, entry in entries.items():
        known = entry > least.to(entry.dtype)
        divisor = torch.where(known, entry + system.ridge, 1.0)
        solution[name] = torch.where(known, system.rhs[name] / divisor, 0.0)
    left = add(system.rhs, system.matvec(solution), -1.0)
    norms = torch.stack([norm(v).double() for v in (system.rhs, left)])
    return Solution(solution, left, norms, torch.ones_like(norms[0]))


def _adam(
    mean: Params,
    systems: list[LinearSystem],
    settings: MergeSettings,
    score: Score | None,
    progress: Report | None,
) -> tuple[Steps, list[float]]:
    """Solve all systems at once; repeat it without those that do not stay finite."""
    rhs = {name: value for system in systems for name, value in system.rhs.items()}
    reads = Reads()

    def matvec(vector: Params) -> dict[str, Tensor]:
        return _joined(system.matvec(select(vector, system.rhs)) for system in systems)

    def steps(delta: Params) -> dict[str, Tensor]:
        values = reads.queue(*delta.values()).values()
        near = dict(zip(delta, values, strict=True))
        return _joined(s.unit.step(select(near, s.rhs)) for s in systems)

    scored = None if score is None else (lambda d: score(_moved(mean, {**steps(d)})))
    diagonal = all(_is_diagonal(system) for system in systems)
    iterates = paper_adam(matvec, rhs, lr=settings.lr, epsilon_inside=not diagonal)
    solution, norms = best_of(iterates, settings.iterations, scored, progress)
    read = reads.queue(norms)
    delta: Steps = {**steps(solution)}
    residuals: list[float] = read.values()[0].tolist()
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
