"""The solvers of FedFisher's paper: Adam as in its experiments, and gradient descent.

By default a merge uses neither.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Iterate, Matvec
from flwr_fisher.log_lines import watching
from flwr_fisher.merge.linear_system import LinearSystem, Moves, moved
from flwr_fisher.merge.options import MergeOptions, Score
from flwr_fisher.params import Params, add, is_finite, norm, select

# The iterate, and the norm of its residual.
Iterates = Iterator[tuple[dict[str, Tensor], Tensor]]

_EVERY = 100  # steps from one score to the next


def adam(
    mean: Params,
    systems: Sequence[LinearSystem],
    options: MergeOptions,
    score: Score | None,
) -> tuple[Moves, list[list[float]]]:
    """Solve all systems at once.

    Return the moves, None where they are not finite, and the residual norms of all
    systems together, as one list. Without a score, the last iterate counts.
    """
    rhs = {name: value for system in systems for name, value in system.rhs.items()}

    def matvec(vector: Params) -> dict[str, Tensor]:
        return _joined(system.matvec(select(vector, system.rhs)) for system in systems)

    def moves_of(delta: Params) -> dict[str, Tensor]:
        near = {name: value.cpu() for name, value in delta.items()}
        return _joined(s.move(select(near, s.rhs)) for s in systems)

    diagonal = all(system.curvature.is_diagonal() for system in systems)
    iterates = paper_adam(matvec, rhs, lr=options.lr, epsilon_inside=not diagonal)
    residuals: list[Tensor] = []
    best: tuple[float, dict[str, Tensor]] | None = None
    most = options.iterations
    with watching("merging", most, unit="steps") as progress:
        for step, (delta, residual) in enumerate(islice(iterates, most + 1)):
            residuals.append(residual.double())
            progress.advance()
            # The CPU waits for an accelerator only to compute a score.
            if score is not None and step and (step % _EVERY == 0 or step == most):
                value = score(moved(mean, {**moves_of(delta)}))
                if best is None or value > best[0]:
                    best = value, delta
    moves: Moves = {**moves_of(delta if best is None else best[1])}
    merged = moved(mean, moves)
    for system in systems:
        if not is_finite(select(merged, system.rhs)):
            moves |= dict.fromkeys(system.rhs)
    norms = torch.stack(residuals)
    return moves, [norms.tolist() if norms.isfinite().all() else [1.0]]


def _joined(parts: Iterable[Params]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.items()}


def paper_adam(
    matvec: Matvec, rhs: Params, *, lr: float, epsilon_inside: bool
) -> Iterates:
    r"""Yield the iterates of Adam as FedFisher's experiments used it.

    With the gradient v, :math:`m \leftarrow v + 0.9 m`,
    :math:`s \leftarrow v^2 + 0.99 s`, and a step of :math:`\eta m / \sqrt{s + 0.01}`
    (K-FAC) or :math:`\eta m / (\sqrt s + 0.01)` (diagonal); no bias correction.

    Parameters
    ----------
    matvec, rhs
        As in :func:`conjugate_gradient`.
    lr : float
        :math:`\eta`; the paper's is 0.01.
    epsilon_inside : bool
        Which of the two forms of the step to take.

    Yields
    ------
    tuple[dict[str, Tensor], Tensor]
        The iterate, and the norm of its residual, a scalar. The iterates have no end.
    """
    iterate = {k: torch.zeros_like(v) for k, v in rhs.items()}
    momentum = second = iterate
    while True:
        gradient = add(matvec(iterate), rhs, -1.0)
        yield iterate, norm(gradient)
        momentum = {k: v + 0.9 * momentum[k] for k, v in gradient.items()}
        second = {k: v * v + 0.99 * second[k] for k, v in gradient.items()}
        if epsilon_inside:
            steps = {k: m / (second[k] + 0.01).sqrt() for k, m in momentum.items()}
        else:
            steps = {k: m / (second[k].sqrt() + 0.01) for k, m in momentum.items()}
        iterate = add(iterate, steps, -lr)


def largest_eigenvalue(matvec: Matvec, like: Params, iterations: int = 100) -> Tensor:
    """Return the largest eigenvalue by power iteration from a fixed random start.

    It is a scalar in float64, and 0 if a product is 0. The CPU does not wait for an
    accelerator.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = partial(torch.randn, generator=generator, dtype=torch.float32)
    vector = {k: drawn(v.shape).to(v, non_blocking=True) for k, v in like.items()}
    size = norm(vector).double()
    for _ in range(iterations):
        shortened = torch.where(size > 0, 1 / size, 0)
        vector = matvec({k: v * shortened.to(v) for k, v in vector.items()})
        size = norm(vector).double()
    return size


def gradient_descent(
    matvec: Matvec, rhs: Params, *, iterations: int, tolerance: float
) -> Iterate:
    r"""Solve with FedFisher's gradient descent (Algorithm 1, Lemma 1).

    The step is the lemma's bound :math:`1 / \lambda_{\max}`. Arguments and results are
    those of :func:`~flwr_fisher.curvature.operators.base.conjugate_gradient`.
    """
    largest = largest_eigenvalue(matvec, rhs)
    state = Iterate.start(rhs).only_if(largest > 0)
    for index in range(iterations):
        state = state.while_above(tolerance)
        # It seldom ends before its last step, so it never reads from an accelerator.
        if state.is_over(index, look=max(1, iterations)):
            break
        solution = state.moved(state.solution, state.residual, 1 / largest)
        state = state.after(solution, add(rhs, matvec(solution), -1.0))
    return state
