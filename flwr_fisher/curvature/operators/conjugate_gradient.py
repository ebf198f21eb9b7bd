"""Conjugate gradients on named tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

from flwr_fisher.params import Params, add, dot, norm

Matvec = Callable[[Params], dict[str, Tensor]]


def conjugate_gradient(
    matvec: Matvec,
    rhs: Params,
    *,
    iterations: int,
    tolerance: float,
    precondition: Matvec | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Solve with conjugate gradients (Hestenes & Stiefel 1952).

    Parameters
    ----------
    matvec : Callable
        Multiplies with the matrix.
    rhs : Mapping[str, Tensor]
        The right-hand side, in the matrix's range.
    iterations : int
        At most this many.
    tolerance : float
        Stop when the residual's norm has fallen by this factor.
    precondition : Callable, optional
        Multiplies with a positive definite approximation of the inverse.

    Returns
    -------
    tuple[dict[str, Tensor], list[float]]
        The solution, and the norm of the residual before each iteration and at the end.
        Where no step can be taken, because the matrix is not positive along it or a
        product is not finite, both end with the iterate before.

    Notes
    -----
    On a singular system float32 loses the least norm in many hundreds of iterations
    past convergence: give a tolerance above rounding, an anchor, or float64.
    """
    solution = {k: torch.zeros_like(v) for k, v in rhs.items()}
    residual, direction = dict(rhs), dict[str, Tensor]()
    norms = [float(norm(residual))]
    decrease = torch.ones(())
    for _ in range(iterations):
        if norms[-1] <= tolerance * norms[0]:
            break
        steepest = precondition(residual) if precondition else residual
        previous, decrease = decrease, dot(residual, steepest)
        turn = float(decrease / previous)
        direction = add(steepest, direction, turn) if direction else steepest
        product = matvec(direction)
        curvature = dot(direction, product)
        # Rounding, once the range is exhausted, or no number at all.
        if not 0 < float(curvature) < float("inf"):
            break
        step = float(decrease / curvature)
        solution = add(solution, direction, step)
        residual = add(residual, product, -step)
        norms.append(float(norm(residual)))
    return solution, norms
