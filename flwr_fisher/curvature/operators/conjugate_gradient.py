"""Conjugate gradients on named tensors."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flwr_fisher.params import Params, add, dot

Matvec = Callable[[Params], dict[str, Tensor]]


def conjugate_gradient(
    matvec: Matvec, rhs: Params, *, iterations: int, tolerance: float
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

    Returns
    -------
    tuple[dict[str, Tensor], list[float]]
        The solution, and the norm of the residual before each iteration and at the end.

    Notes
    -----
    On a singular system float32 loses the least norm in many hundreds of iterations
    past convergence: give a tolerance above rounding, an anchor, or float64.
    """
    solution = {k: torch.zeros_like(v) for k, v in rhs.items()}
    direction = residual = dict(rhs)
    squared = dot(residual, residual)
    norms = [math.sqrt(float(squared))]
    for _ in range(iterations):
        if norms[-1] <= tolerance * norms[0]:
            break
        product = matvec(direction)
        curvature = dot(direction, product)
        if float(curvature) <= 0:  # rounding, once the range is exhausted
            break
        step = float(squared / curvature)
        solution = add(solution, direction, step)
        residual = add(residual, product, -step)
        previous, squared = squared, dot(residual, residual)
        direction = add(residual, direction, float(squared / previous))
        norms.append(math.sqrt(float(squared)))
    return solution, norms
