"""FedFisher's merge: the mode of the product of the clients' posteriors.

Each layer has a linear system, which a solver solves.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Iterate, conjugate_gradient, divided
from flwr_fisher.curvature.operators.lazy import shared_blocks
from flwr_fisher.curvature.structures import preconditioner
from flwr_fisher.devices import usable_device
from flwr_fisher.errors import StructureError
from flwr_fisher.log_lines import watching
from flwr_fisher.merge.linear_system import (
    Device,
    LinearSystem,
    Moves,
    SystemMaker,
    layer_system,
    moved,
)
from flwr_fisher.merge.options import MergeOptions, Score, check_score
from flwr_fisher.merge.paper_solvers import adam, gradient_descent
from flwr_fisher.merge.posterior import LocalPosterior, check_posteriors
from flwr_fisher.params import (
    Params,
    add,
    dot,
    is_finite,
    norm,
    select,
    shares_of,
    weighted_mean,
)


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


def fedfisher(
    posteriors: Sequence[LocalPosterior],
    *,
    score: Score | None = None,
    device: Device = None,
    **options: Any,
) -> MergeResult:
    r"""Merge the clients' models by their Fisher information.

    Finds the parameters that minimise, layer by layer,

    .. math:: \sum_i w_i \|\theta - \theta_i\|^2_{F_i}
              + \lambda_\ell \|\theta - \bar\theta\|^2, \qquad
              \bar\theta = \sum_i p_i \theta_i.

    This is FedFisher's eq. 6 if :math:`w_i = p_i` and :math:`\lambda = 0`. Then there
    may be many minimisers: the result is the one nearest to :math:`\bar\theta` (eq. 7,
    Lemma 1), but with ``adam`` and ``pcg`` it may be any of them. The paper assumes
    clients of equal size; the :math:`p_i = n_i / \sum_j n_j` is what its derivation
    gives. Only `score` needs data. Tensors that no curvature covers (buffers) are
    averaged.

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        One for each client, all with the same keys, shapes and dtypes.
    solver : "pcg" | "cg" | "closed-form" | "adam" | "gd", default "pcg"
        ``pcg``: conjugate gradients, preconditioned by the product of each layer's
        partial traces; it takes a few iterations. ``cg``: the same without a
        preconditioner. For a diagonal layer both compute the exact solution, a
        division. ``closed-form``: the solution of FisherMerge, for diagonals, which
        keeps the mean in entries below 1e-6 of the largest, where the other two divide.
        ``adam``: the optimiser of the paper's experiments. ``gd``: the gradient descent
        of its Algorithm 1.
    anchor : float, optional
        :math:`\rho \ge 0`; :math:`\lambda_\ell` is that share of the mean eigenvalue of
        the layer's :math:`\sum_i w_i F_i`. Default 0.1 with ``pcg``, 0.03 with
        ``cg``, otherwise 0.
    shrink : float, optional
        In [0, 1]: scales correlations between a layer's inputs by ``1 - shrink``.
        Default 0.3 with ``pcg``, but 0.9 for a model with batch norms, whose running
        statistics are among its parameters; 0.1 with ``cg``, otherwise 0.
    damping : float, optional
        In [0, 1]: draws the second moment of a layer's output gradients towards the
        multiple of the identity with the same trace. It is no multiple of the identity
        itself, as in :meth:`Curvature.solve
        <flwr_fisher.curvature.Curvature.solve>`. This is useful if a client is
        certain of nearly every example, so that only a few examples determine the
        moment. It has no effect on a diagonal. Default 0.3 with ``cg``, otherwise 0.
    balance : float, optional
        :math:`\gamma` in [0, 1]: in layer :math:`\ell`,
        :math:`w_i \propto p_i / (\operatorname{tr} F_{i\ell})^\gamma`, since an
        over-confident client's Fisher is small. Default 0.5 with ``pcg``, 1 with
        ``cg``, otherwise 0.
    robust : float, optional
        :math:`\kappa \ge 0`: in layer :math:`\ell`, :math:`w_i \propto p_i / (1 +
        \kappa q_i / \operatorname{median}_j q_j)`, where
        :math:`q_i = \|\bar\theta - \theta_i\|^2_{F_i}` is twice the rise of the
        client's loss at the mean, as its Fisher predicts it. For a client far from the
        mean, this prediction says little. The weights are those of one step for a
        Cauchy loss of q. Default 1 with ``pcg``, otherwise 0.
    max_share : float, optional
        In [0.5, 1]: of a layer's :math:`\sum_i w_i \operatorname{tr} F_i`, one client
        of three or more has at most this share; its :math:`w_i` is lowered to that.
        Default 0.5 with ``pcg`` and ``cg``, otherwise 1.
    trust : float, default inf
        A layer's move away from the mean is at most this times :math:`\sqrt{M - 1}`
        times the root of :math:`\sum_i p_i \|\theta_i - \bar\theta\|^2`, for M clients.
        With 1, that is about the length of the sum of all clients' own moves, if these
        are unlike each other.
    iterations : int, optional
        At most this many: by default 4 (``pcg``), 100 (``cg``) or 2000 (``adam``,
        ``gd``).
    tolerance : float, default 1e-6
        ``pcg``, ``cg`` and ``gd`` stop when a layer's residual has fallen by this
        factor.
    lr : float, default 0.01
        The step of ``adam``; for no other solver.
    score : Callable[[dict[str, Tensor]], float], optional
        For ``adam``: called with the merged parameters every 100 steps and after the
        last. The parameters with the highest score are returned. The paper scores on
        500 examples on the server.
    device : torch.device | str, optional
        The device where layers are merged, one after another. By default that of the
        clients' tensors.
    **options
        `solver` and the ten after it: the fields of
        :class:`~flwr_fisher.merge.MergeOptions`.

    Returns
    -------
    MergeResult
        The merged model, on the device of the clients' parameters. A layer that the
        solver did not solve stays at the mean, and ``unsolved`` names it.

    Raises
    ------
    TypeError
        If an option is not known.
    ConfigurationError
        If a number is out of range, the solver does not use `score`, `lr`, `tolerance`
        or `iterations`, which is given, or the device has no float64.
    ParamsError
        If there is no posterior, their layouts differ, a client's parameters
        or curvature are not finite, or its curvature is negative.
    StructureError
        If curvatures cover different parameters, or a structure has no closed form but
        the solver needs one.

    Notes
    -----
    Curvatures may have any scale that their dtype can hold: the result is that of exact
    arithmetic, up to rounding. A layer is merged in float32, or in its own dtype if
    that is wider; and in float64 if products would be too large or too small.

    Examples
    --------
    Two models that were trained on different data, merged:

    >>> import torch
    >>> from flwr_fisher.curvature import fisher
    >>> from flwr_fisher.merge import LocalPosterior, fedfisher
    >>> from flwr_fisher.params import shared_state
    >>> clients = []
    >>> for data in torch.randn(2, 8, 3):
    ...     model = torch.nn.Linear(3, 2)  # and train it on the data
    ...     F = fisher(model, [data], structure="kfac")
    ...     clients.append(LocalPosterior(shared_state(model), F, len(data)))
    >>> merged = torch.nn.Linear(3, 2)  # a model's own tensors are in `clients`
    >>> merged.load_state_dict(fedfisher(clients).params)
    <All keys matched successfully>

    With numbers: the more certain client has more weight.

    >>> from flwr_fisher.curvature import Diagonal
    >>> sure = LocalPosterior({"w": torch.zeros(1)}, Diagonal({"w": torch.ones(1)}), 5)
    >>> flat = Diagonal({"w": torch.full((1,), 0.25)})
    >>> unsure = LocalPosterior({"w": torch.ones(1)}, flat, 5)
    >>> fedfisher([sure, unsure], solver="closed-form").params
    {'w': tensor([0.2000])}
    """
    merge = MergeOptions(**({"trust": math.inf} | options))
    check_score(score, merge.solver)
    check_posteriors(posteriors)
    if device is not None:
        usable_device(device, "merge on the CPU, device='cpu'")
    return merge_posteriors(posteriors, merge, score=score, device=device)


def merge_posteriors(
    posteriors: Sequence[LocalPosterior],
    options: MergeOptions,
    *,
    score: Score | None = None,
    device: Device = None,
) -> MergeResult:
    """Merge as :func:`fedfisher` does, without its checks, which uploads have passed.

    `options` may have None for the solver's defaults.
    """
    options = options.filled(posteriors[0].params)
    examples = [posterior.num_examples for posterior in posteriors]
    mean = weighted_mean([posterior.params for posterior in posteriors], examples)
    # Each layer's system is computed when it is solved, so that one is in memory.
    systems = [
        partial(layer_system, parts, posteriors, mean, options, device)
        for parts in shared_blocks([posterior.curvature for posterior in posteriors])
    ]
    return solve(mean, systems, options, score, examples)


def fisher_merge(posteriors: Sequence[LocalPosterior]) -> dict[str, Tensor]:
    r"""Return FisherMerge's average (Matena & Raffel 2022), for diagonal curvatures.

    Elementwise :math:`\sum_i p_i F_i \theta_i / \sum_i p_i F_i`, and FedAvg's mean in
    entries where the denominator is below 1e-6 of the largest in its tensor.
    """
    return fedfisher(posteriors, solver="closed-form").params


_FLOOR = 1e-6  # relative to the largest curvature, as in FisherMerge's code
_ROUNDED = 1.001  # how much larger than at the start a residual may be, by rounding


def solve(
    mean: Params,
    systems: Sequence[SystemMaker],
    options: MergeOptions,
    score: Score | None,
    examples: Sequence[float] = (),
) -> MergeResult:
    """Solve each layer's system for its move away from the mean; take the moves.

    If a layer's system is not solved, the layer stays at the mean, and the result names
    it. `examples` has each client's, if the systems know their clients.
    """
    if options.solver == "adam":
        together = [make() for make in systems]
        traces = [system.client_traces for system in together]
        moves, curves = adam(mean, together, options, score)
    else:
        moves, curves, traces = Moves(), [], []
        with watching("merging", len(systems), unit="layers") as progress:
            for make in systems:
                move, norms, held = _solved(mean, make().normalised(), options)
                moves |= move
                curves.append(norms)
                traces.append(held)
                progress.advance()
    residuals = relative_norms(curves)
    return MergeResult(
        moved(mean, moves),
        residuals,
        max(0, len(residuals) - 1),
        shares=_shares(traces, examples),
        unsolved=[name for name, move in moves.items() if move is None],
        options=options,
    )


def _solved(
    mean: Params, system: LinearSystem, options: MergeOptions
) -> tuple[Moves, list[float], list[float]]:
    """Return a layer's move, its residual norms and its clients' traces.

    There is no move if it is not solved. Nothing else of the system is kept, so that
    one layer's system is in memory at a time.
    """
    # No curvature, or one that is not finite, is an error on the CPU.
    with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        end = _iterate(system, options)
        # Twice the objective's rise: x·Ax - 2 x·b = -x·(b + r), because Ax is b - r.
        rise = -dot(end.solution, add(system.rhs, end.residual))
        solution, norms = end.read()
        solution = {name: value.cpu() for name, value in solution.items()}
        move: Moves = {**system.move(solution)}
        if _improves(norms, float(rise)) and is_finite(moved(select(mean, move), move)):
            return move, [n * system.scale for n in norms], system.client_traces
    start = float(norm(system.rhs)) * system.scale  # what is left at the mean
    unsolved: Moves = dict.fromkeys(system.rhs)
    return unsolved, [start if math.isfinite(start) else 0.0], system.client_traces


def _improves(residuals: list[float], rise: float) -> bool:
    """Return whether the solver took a step, and improved on the mean."""
    if not all(map(math.isfinite, residuals)):
        return False
    if len(residuals) == 1:  # there was nothing to solve, or no step could be taken
        return residuals[0] == 0
    # Conjugate gradients lower the objective at every step, but not the residual.
    return residuals[-1] <= _ROUNDED * residuals[0] or rise <= 0


def _iterate(system: LinearSystem, options: MergeOptions) -> Iterate:
    """Return the solver's last iterate."""
    if options.solver == "closed-form":
        return _closed_form(system, _FLOOR)
    if options.solver in ("pcg", "cg") and system.curvature.is_diagonal():
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
    if not system.curvature.is_diagonal():
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
