"""Solving a merge's systems by the chosen solver."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from flwr_fisher.curvature import Diagonal
from flwr_fisher.curvature.operators.conjugate_gradient import conjugate_gradient
from flwr_fisher.errors import StructureError
from flwr_fisher.merge.iterative import (
    Progress,
    Score,
    best_of,
    gradient_descent,
    paper_adam,
)
from flwr_fisher.merge.linear_system import LinearSystem, Systems
from flwr_fisher.merge.options import MergeOptions
from flwr_fisher.merge.preconditioner import preconditioner
from flwr_fisher.params import Params, add, norm, select

_FLOOR = 1e-6  # of a block's largest curvature, as FisherMerge's code has it


@dataclass(frozen=True)
class MergeResult:
    """What a merge gives.

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
    """

    params: dict[str, Tensor] = field(repr=False)
    residuals: list[float] = field(repr=False)
    iterations: int
    shares: list[float] = field(default_factory=list)


def solve(
    mean: Params,
    systems: Systems,
    options: MergeOptions,
    score: Score | None,
    progress: Progress | None,
) -> MergeResult:
    """Solve the blocks' systems for the step away from the mean, and take it."""

    def merged(delta: Params) -> dict[str, Tensor]:
        steps = {k: step.to(mean[k]) for k, step in delta.items()}
        return {k: v + steps[k] if k in steps else v for k, v in mean.items()}

    if options.solver == "adam":
        blocks = [make() for make in systems]
        scored = (
            None if score is None else (lambda d: score(merged(_within(blocks, d))))
        )
        delta, norms = _adam(blocks, options, scored, progress)
        delta = _within(blocks, delta)
    else:
        delta, norms = _block_by_block(systems, options, progress)
    return MergeResult(merged(delta), norms, len(norms) - 1)


def _within(blocks: list[LinearSystem], delta: Params) -> dict[str, Tensor]:
    parts = (block.within(select(delta, block.rhs)) for block in blocks)
    return {name: value for part in parts for name, value in part.items()}


def _block_by_block(
    systems: Systems, options: MergeOptions, progress: Progress | None
) -> tuple[dict[str, Tensor], list[float]]:
    delta: dict[str, Tensor] = {}
    curves = []
    for make in systems:
        step, norms = _step(make, options)
        delta |= step
        curves.append(norms)
        if progress is not None:
            left = norms[-1] / norms[0] if norms[0] else 0.0
            progress(
                f"solver: {next(iter(step))}, {len(curves)} of {len(systems)}: "
                f"{len(norms) - 1} iterations, residual {left:.1e}"
            )
    return delta, _relative(curves)


def _step(
    make: Callable[[], LinearSystem], options: MergeOptions
) -> tuple[dict[str, Tensor], list[float]]:
    """Return a block's step and the residual's norms; the system is gone with it."""
    block = make().normalised()
    solution, norms = _solved(block, options)
    return block.within(solution), [value * block.unit for value in norms]


def _solved(
    block: LinearSystem, options: MergeOptions
) -> tuple[dict[str, Tensor], list[float]]:
    """Return a block's solution, and the residual's norms."""
    if options.solver == "closed-form":
        return _closed_form(block, _FLOOR)
    if options.solver in ("pcg", "cg") and _is_diagonal(block):
        # What many iterations would get to, of which float32 loses the digits.
        return _closed_form(block, floor=0.0)
    find = gradient_descent
    if options.solver == "cg":
        find = conjugate_gradient
    elif options.solver == "pcg":
        inverse = preconditioner(block.curvature, block.ridge)
        find = partial(conjugate_gradient, precondition=inverse)
    return find(
        block.matvec,
        block.rhs,
        iterations=options.iterations,
        tolerance=options.tolerance,
    )


def _relative(curves: list[list[float]]) -> list[float]:
    """Join the layers' residual norms; a layer that is done keeps its last one."""
    length = max((len(curve) for curve in curves), default=0)
    padded = [curve + curve[-1:] * (length - len(curve)) for curve in curves]
    norms = [math.hypot(*values) for values in zip(*padded, strict=True)]
    return [value / norms[0] if norms[0] else 0.0 for value in norms]


def _is_diagonal(block: LinearSystem) -> bool:
    return all(isinstance(term, Diagonal) for term in block.curvature.terms)


def _closed_form(
    block: LinearSystem, floor: float
) -> tuple[dict[str, Tensor], list[float]]:
    """Divide; a curvature of at most `floor` of the block's largest knows nothing."""
    if not _is_diagonal(block):
        raise StructureError(
            f"the curvature of {list(block.rhs)} is not diagonal, so it has no closed "
            "form: use solver='pcg', or structure='diagonal'"
        )
    entries = block.curvature.diagonal()
    least = floor * max(float(entry.max()) for entry in entries.values())
    solution = {}
    for name, entry in entries.items():
        known = entry > least
        divisor = torch.where(known, entry + block.ridge, 1.0)
        solution[name] = torch.where(known, block.rhs[name] / divisor, 0.0)
    left = add(block.rhs, block.matvec(solution), -1.0)
    return solution, [float(norm(block.rhs)), float(norm(left))]


def _adam(
    blocks: list[LinearSystem],
    options: MergeOptions,
    score: Score | None,
    progress: Progress | None,
) -> tuple[dict[str, Tensor], list[float]]:
    rhs = {name: value for block in blocks for name, value in block.rhs.items()}

    def matvec(vector: Params) -> dict[str, Tensor]:
        parts = (block.matvec(select(vector, block.rhs)) for block in blocks)
        return {name: value for part in parts for name, value in part.items()}

    diagonal = all(_is_diagonal(block) for block in blocks)
    iterates = paper_adam(matvec, rhs, lr=options.lr, epsilon_inside=not diagonal)
    delta, norms = best_of(iterates, options.iterations, score, progress)
    return delta, _relative([norms])
