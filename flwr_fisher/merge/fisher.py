"""FedFisher's merge: the mode of the product of the clients' posteriors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flwr_fisher.curvature import Diagonal, WeightedSum, aligned_blocks
from flwr_fisher.errors import ConfigurationError, StructureError
from flwr_fisher.merge.options import MergeOptions, merge_options
from flwr_fisher.merge.posterior import LocalPosterior, check_posteriors, fedavg
from flwr_fisher.merge.solvers import (
    Progress,
    Score,
    best_of,
    conjugate_gradient,
    gradient_descent,
    paper_adam,
)
from flwr_fisher.params import Params, add, norm, scale, select, subtract

__all__ = ["MergeResult", "fisher_merge", "merge_fisher"]

_FLOOR = 1e-6  # of a block's largest curvature, as FisherMerge's code has it
_SCORE_EVERY = 100


@dataclass(frozen=True)
class MergeResult:
    """What a merge found.

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
        Each client's share of the summed curvature's trace; they add up to 1.
    """

    params: dict[str, Tensor] = field(repr=False)
    residuals: list[float] = field(repr=False)
    iterations: int
    shares: list[float]


@dataclass(frozen=True)
class _Block:
    """One independent system, ``(curvature + ridge I) delta = rhs``, over `unit`."""

    curvature: WeightedSum
    rhs: dict[str, Tensor]
    ridge: float
    unit: float = 1.0

    def normalised(self) -> "_Block":
        """Return the same system with a mean eigenvalue of 1.

        Confident clients' curvatures may be so small that float32 cannot hold the
        squares that a solver takes.
        """
        unit = self.curvature.trace() / self.curvature.numel()
        if not unit > 0:
            return self
        curvature = self.curvature.scaled(1 / unit)
        return _Block(curvature, scale(self.rhs, 1 / unit), self.ridge / unit, unit)

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        product = self.curvature.matvec(vector)
        return add(product, vector, self.ridge) if self.ridge else product


def merge_fisher(
    posteriors: Sequence[LocalPosterior],
    *,
    solver: str = "cg",
    anchor: float | None = None,
    shrink: float | None = None,
    damping: float | None = None,
    balance: float | None = None,
    iterations: int | None = None,
    tolerance: float = 1e-6,
    lr: float = 0.01,
    score: Score | None = None,
    progress: Progress | None = None,
) -> MergeResult:
    r"""Merge the clients' models by their Fisher information.

    Finds the parameters that minimise, layer by layer,

    .. math:: \sum_i w_i \|\theta - \theta_i\|^2_{F_i}
              + \lambda_\ell \|\theta - \bar\theta\|^2, \qquad
              \bar\theta = \sum_i p_i \theta_i,

    FedFisher's eq. 6 with :math:`w_i = p_i` and :math:`\lambda = 0`; of its many
    minimisers then the one nearest :math:`\bar\theta` (eq. 7, Lemma 1; with ``adam``,
    some minimiser). The paper assumes clients of equal size; the
    :math:`p_i = n_i / \sum_j n_j` is what its derivation gives. No data is needed,
    except by `score`. What no curvature covers (buffers) is averaged.

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        One a client, all with the same keys and shapes.
    solver : "cg" | "closed-form" | "adam" | "gd", default "cg"
        ``cg``: conjugate gradients, for any structure. ``closed-form``: for diagonals.
        ``adam``: the optimiser of the paper's experiments. ``gd``: the gradient descent
        of its Algorithm 1.
    anchor : float, optional
        :math:`\rho \ge 0`; :math:`\lambda_\ell` is that share of the mean eigenvalue of
        the layer's :math:`\sum_i w_i F_i`. Default 0.03 with ``cg``, otherwise 0.
    shrink : float, optional
        In [0, 1]: scales correlations between a layer's inputs by ``1 - shrink``.
        Default 0.1 with ``cg``, otherwise 0.
    damping : float, optional
        In [0, 1]: draws the second moment of a layer's output gradients towards the
        multiple of the identity with the same trace; a client that is sure of nearly
        every example estimates it from few. K-FAC only. Default 0.3 with ``cg``,
        otherwise 0.
    balance : float, optional
        :math:`\gamma` in [0, 1]: in layer :math:`\ell`,
        :math:`w_i \propto p_i / (\operatorname{tr} F_{i\ell})^\gamma`, since an
        over-confident client's Fisher is small. Default 1 with ``cg``, otherwise 0.
    iterations : int, optional
        At most this many: by default 100 (``cg``) or 2000 (``adam``, ``gd``).
    tolerance : float, default 1e-6
        ``cg`` and ``gd`` stop when a layer's residual has fallen by this factor.
    lr : float, default 0.01
        The step of ``adam``.
    score : Callable[[dict[str, Tensor]], float], optional
        For ``adam``: called with the merged parameters every 100 steps, the best of
        which (the highest) is returned. The paper scores on 500 examples that its
        server holds.
    progress : Callable[[str], object], optional
        Told, in words, how each layer's solution went.

    Returns
    -------
    MergeResult
        On the device of the clients' parameters.

    Raises
    ------
    UnknownNameError
        If `solver` is not known.
    ConfigurationError
        If a number is out of range, or `score` is given to another solver.
    ParamsError
        If there is no posterior, or their layouts differ.
    StructureError
        If curvatures cover different parameters, or a closed form is asked for a
        structure that has none.

    Examples
    --------
    >>> sure = LocalPosterior({"w": torch.zeros(1)}, Diagonal({"w": torch.ones(1)}), 5)
    >>> flat = Diagonal({"w": torch.full((1,), 0.25)})
    >>> unsure = LocalPosterior({"w": torch.ones(1)}, flat, 5)
    >>> merge_fisher([sure, unsure], solver="closed-form").params
    {'w': tensor([0.2000])}
    """
    options = merge_options(
        solver,
        anchor=anchor,
        shrink=shrink,
        damping=damping,
        balance=balance,
        iterations=iterations,
        tolerance=tolerance,
        lr=lr,
    )
    if score is not None and solver != "adam":
        raise ConfigurationError(f"score is for solver='adam', not '{solver}'")
    check_posteriors(posteriors)
    mean = fedavg(posteriors)
    blocks, shares = _blocks(posteriors, mean, options)

    def merged(delta: Params) -> dict[str, Tensor]:
        steps = {k: step.to(mean[k].dtype) for k, step in delta.items()}
        return {k: v + steps[k] if k in steps else v for k, v in mean.items()}

    if solver == "adam":
        scored = None if score is None else (lambda delta: score(merged(delta)))
        delta, norms = _adam(blocks, options, scored, progress)
    else:
        delta, norms = _block_by_block(blocks, options, progress)
    return MergeResult(merged(delta), norms, len(norms) - 1, shares)


def fisher_merge(posteriors: Sequence[LocalPosterior]) -> dict[str, Tensor]:
    r"""Return FisherMerge's average (Matena & Raffel 2022), for diagonal curvatures.

    Elementwise :math:`\sum_i p_i F_i \theta_i / \sum_i p_i F_i`, and FedAvg's mean
    where the denominator is below 1e-6 of its tensors' largest.
    """
    return merge_fisher(posteriors, solver="closed-form").params


def _blocks(
    posteriors: Sequence[LocalPosterior], mean: Params, options: MergeOptions
) -> tuple[list[_Block], list[float]]:
    """Set up each layer's system for the step away from the mean.

    Also return each client's share of all layers' traces.
    """
    curvatures = [
        p.curvature.regularised(shrink=options.shrink, damping=options.damping)
        for p in posteriors
    ]
    examples = [posterior.num_examples for posterior in posteriors]
    blocks, shares = [], [0.0] * len(posteriors)
    for parts in aligned_blocks(curvatures):
        traces = [part.trace() for part in parts]
        weights = _weights(examples, traces, options.balance)
        total = WeightedSum(parts, weights)
        rhs = {name: torch.zeros_like(mean[name]) for name in total.shapes}
        for (weight, part), posterior in zip(total, posteriors, strict=True):
            away = subtract(select(posterior.params, rhs), select(mean, rhs))
            rhs = add(rhs, part.matvec(away), weight)
        ridge = options.anchor * total.trace() / total.numel()
        blocks.append(_Block(total, rhs, ridge))
        shares = [s + w * t for s, w, t in zip(shares, weights, traces, strict=True)]
    return blocks, _normalised(shares) if sum(shares) else _normalised(examples)


def _weights(examples: list[float], traces: list[float], balance: float) -> list[float]:
    # A client that is certain of everything has no curvature, and nothing to balance.
    powers = [trace**balance if trace > 0 else 1.0 for trace in traces]
    return _normalised([n / power for n, power in zip(examples, powers, strict=True)])


def _normalised(values: list[float]) -> list[float]:
    total = sum(values)
    return [value / total for value in values]


def _block_by_block(
    blocks: list[_Block], options: MergeOptions, progress: Progress | None
) -> tuple[dict[str, Tensor], list[float]]:
    delta: dict[str, Tensor] = {}
    curves = []
    steps, tolerance = options.iterations, options.tolerance
    for block in (block.normalised() for block in blocks):
        if options.solver == "closed-form":
            solution, norms = _closed_form(block)
        elif options.solver == "cg":
            solution, norms = conjugate_gradient(
                block.matvec, block.rhs, iterations=steps, tolerance=tolerance
            )
        else:
            solution, norms = gradient_descent(
                block.matvec, block.rhs, iterations=steps, tolerance=tolerance
            )
        delta |= solution
        curves.append([value * block.unit for value in norms])
        if progress is not None:
            left = norms[-1] / norms[0] if norms[0] else 0.0
            progress(
                f"solver: {next(iter(block.rhs))}, {len(curves)} of {len(blocks)}: "
                f"{len(norms) - 1} iterations, residual {left:.1e}"
            )
    return delta, _relative(curves)


def _relative(curves: list[list[float]]) -> list[float]:
    """Join the layers' residual norms; a layer that is done keeps its last one."""
    length = max((len(curve) for curve in curves), default=0)
    padded = [curve + curve[-1:] * (length - len(curve)) for curve in curves]
    norms = [math.hypot(*values) for values in zip(*padded, strict=True)]
    return [value / norms[0] if norms[0] else 0.0 for value in norms]


def _closed_form(block: _Block) -> tuple[dict[str, Tensor], list[float]]:
    if not all(isinstance(term, Diagonal) for term in block.curvature.terms):
        raise StructureError(
            f"the curvature of {list(block.rhs)} is not diagonal, so it has no closed "
            "form: use solver='cg', or structure='diagonal'"
        )
    entries = block.curvature.diagonal()
    floor = _FLOOR * max(float(entry.max()) for entry in entries.values())
    solution = {}
    for name, entry in entries.items():
        known = entry > floor
        divisor = torch.where(known, entry + block.ridge, 1.0)
        solution[name] = torch.where(known, block.rhs[name] / divisor, 0.0)
    left = add(block.rhs, block.matvec(solution), -1.0)
    return solution, [float(norm(block.rhs)), float(norm(left))]


def _adam(
    blocks: list[_Block],
    options: MergeOptions,
    score: Score | None,
    progress: Progress | None,
) -> tuple[dict[str, Tensor], list[float]]:
    rhs = {name: value for block in blocks for name, value in block.rhs.items()}

    def matvec(vector: Params) -> dict[str, Tensor]:
        parts = (block.matvec(select(vector, block.rhs)) for block in blocks)
        return {name: value for part in parts for name, value in part.items()}

    diagonal = all(
        isinstance(term, Diagonal) for block in blocks for term in block.curvature.terms
    )
    iterates = paper_adam(matvec, rhs, lr=options.lr, epsilon_inside=not diagonal)
    delta, norms = best_of(
        iterates,
        iterations=options.iterations,
        score=score,
        every=_SCORE_EVERY,
        progress=progress,
    )
    return delta, _relative([norms])
