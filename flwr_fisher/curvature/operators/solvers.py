"""Solving with a curvature: by its eigenvalues, or by conjugate gradients."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from flwr_fisher.params import Params, add, dot, norm


def divided(rhs: Tensor, eigenvalues: Tensor, damping: float) -> Tensor:
    """Return ``rhs / (eigenvalues + damping)``, and 0 where that is nothing."""
    divisor = eigenvalues + damping
    known = divisor > 0
    return torch.where(known, rhs / torch.where(known, divisor, 1), 0)


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors in the matrices' dtype, or float32 for less.

    LAPACK does not converge on some finite matrices in float32, which it tells or gives
    NaN for; float64 does.

    Parameters
    ----------
    matrices : Tensor
        ``[..., n, n]``, symmetric.
    """
    # It has no decompositions of smaller floats.
    wide = matrices if matrices.itemsize >= 4 else matrices.float()
    with suppress(RuntimeError):  # torch.linalg.LinAlgError
        values, vectors = torch.linalg.eigh(wide)
        if values.isfinite().all():
            return values, vectors
    values, vectors = torch.linalg.eigh(wide.double())
    return values.to(wide.dtype), vectors.to(wide.dtype)


def eigen(matrices: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, none negative, and vectors in float64.

    Parameters
    ----------
    matrices : Tensor
        ``[..., n, n]``, symmetric positive semi-definite.
    damping : float
        If 0, eigenvalues that may be rounding are 0: with nothing added to them, they
        would be divided by.
    """
    values, vectors = torch.linalg.eigh(matrices.double())
    share = 0.0 if damping else matrices.shape[-1] * torch.finfo(matrices.dtype).eps
    rounding = share * values.abs().amax(-1, keepdim=True)
    return torch.where(values > rounding, values, 0), vectors


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


_LOOK = 16  # iterations, after which a device is asked whether any is left to do


def queued_conjugate_gradient(
    matvec: Matvec,
    rhs: Params,
    *,
    iterations: int,
    tolerance: float,
    precondition: Matvec | None = None,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Do what :func:`conjugate_gradient` does, on a device that is not waited for.

    What ends the iteration there is decided on the device: from then on steps are 0.

    Returns
    -------
    tuple[dict[str, Tensor], Tensor, Tensor]
        The solution; the norms, of which those after the last step are of nothing; and
        how many steps were taken, a scalar.
    """
    solution = {k: torch.zeros_like(v) for k, v in rhs.items()}
    residual, direction = dict(rhs), dict[str, Tensor]()
    norms = [dot(residual, residual).sqrt()]
    decrease = torch.ones_like(norms[0])
    live = torch.ones_like(norms[0], dtype=torch.bool)
    steps = torch.zeros_like(norms[0])
    for index in range(iterations):
        live = live & (norms[-1] > tolerance * norms[0])
        if index and index % _LOOK == 0 and not live:
            break
        steepest = precondition(residual) if precondition else residual
        previous, decrease = decrease, dot(residual, steepest)
        turn = decrease / previous
        if direction:
            direction = {k: v + turn * direction[k] for k, v in steepest.items()}
        else:
            direction = dict(steepest)
        product = matvec(direction)
        curvature = dot(direction, product)
        live = live & (curvature > 0) & curvature.isfinite()
        step = decrease / curvature
        solution = _stepped(solution, direction, step, live)
        residual = _stepped(residual, product, -step, live)
        norms.append(dot(residual, residual).sqrt())
        steps = steps + live
    return solution, torch.stack(norms), steps


def _stepped(
    start: Params, along: Params, step: Tensor, live: Tensor
) -> dict[str, Tensor]:
    return {k: torch.where(live, v + step * along[k], v) for k, v in start.items()}
