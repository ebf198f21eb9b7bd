"""FedFisher's own solvers: gradient descent, and its experiments' optimiser."""

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.solvers import Matvec
from flwr_fisher.params import Params, add, norm, scale

Score = Callable[[dict[str, Tensor]], float]
Progress = Callable[[str], object]
Iterates = Iterator[tuple[dict[str, Tensor], float]]

_EVERY = 100  # steps from one score to the next


def largest_eigenvalue(matvec: Matvec, like: Params, iterations: int = 100) -> float:
    """Return the largest eigenvalue by power iteration from a fixed random start."""
    generator = torch.Generator().manual_seed(0)
    vector = {
        k: torch.randn(v.shape, generator=generator).to(v) for k, v in like.items()
    }
    value = 0.0
    for _ in range(iterations):
        size = float(norm(vector))
        if size == 0:
            return 0.0
        vector = matvec(scale(vector, 1 / size))
        value = float(norm(vector))
    return value


def gradient_descent(
    matvec: Matvec, rhs: Params, *, iterations: int, tolerance: float
) -> tuple[dict[str, Tensor], list[float]]:
    r"""Solve with FedFisher's gradient descent (Algorithm 1, Lemma 1).

    The step is the lemma's bound :math:`1 / \lambda_{\max}`. Arguments and results are
    those of :func:`conjugate_gradient`.
    """
    solution = {k: torch.zeros_like(v) for k, v in rhs.items()}
    residual = dict(rhs)
    norms = [float(norm(residual))]
    largest = largest_eigenvalue(matvec, rhs)
    for _ in range(iterations if largest > 0 else 0):
        if norms[-1] <= tolerance * norms[0]:
            break
        solution = add(solution, residual, 1 / largest)
        residual = add(rhs, matvec(solution), -1.0)
        norms.append(float(norm(residual)))
    return solution, norms


def paper_adam(
    matvec: Matvec, rhs: Params, *, lr: float, epsilon_inside: bool
) -> Iterates:
    r"""Yield the iterates of the optimiser that FedFisher's experiments used.

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
    tuple[dict[str, Tensor], float]
        The iterate, and the residual's norm there; endless.
    """
    iterate = {k: torch.zeros_like(v) for k, v in rhs.items()}
    momentum = second = iterate
    while True:
        gradient = add(matvec(iterate), rhs, -1.0)
        yield iterate, float(norm(gradient))
        momentum = {k: v + 0.9 * momentum[k] for k, v in gradient.items()}
        second = {k: v * v + 0.99 * second[k] for k, v in gradient.items()}
        if epsilon_inside:
            steps = {k: m / (second[k] + 0.01).sqrt() for k, m in momentum.items()}
        else:
            steps = {k: m / (second[k].sqrt() + 0.01) for k, m in momentum.items()}
        iterate = add(iterate, steps, -lr)


def best_of(
    iterates: Iterates,
    iterations: int,
    score: Score | None,
    progress: Progress | None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Take iterates, score some, and return the best and all residual norms.

    Without a score it is the last one that is returned.
    """
    norms: list[float] = []
    best: tuple[float, dict[str, Tensor]] | None = None
    for index, (iterate, residual) in enumerate(islice(iterates, iterations + 1)):
        norms.append(residual)
        if not index or index % _EVERY:
            continue
        if progress is not None:
            progress(f"solver: {index} of {iterations} steps, residual {residual:.1e}")
        if score is not None:
            value = score(iterate)
            if best is None or value > best[0]:
                best = value, iterate
    return (iterate if best is None else best[1]), norms
