"""Solvers for a curvature: by its eigenvalues, or by conjugate gradients."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.params import Params, add, dot, norm


def divided(rhs: Tensor, eigenvalues: Tensor, damping: float) -> Tensor:
    """Return ``rhs / (eigenvalues + damping)``, and 0 where the divisor is 0."""
    divisor = eigenvalues + damping
    known = divisor > 0
    return torch.where(known, rhs / torch.where(known, divisor, 1), 0)


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors in the matrices' dtype, at least float32.

    For some finite matrices in float32, LAPACK does not converge: it raises an error or
    returns NaN. Then float64 is used.

    Parameters
    ----------
    matrices : Tensor
        ``[..., n, n]``, symmetric.
    """
    wide = matrices if matrices.itemsize >= 4 else matrices.float()
    with suppress(RuntimeError):  # torch.linalg.LinAlgError
        values, vectors = torch.linalg.eigh(wide)
        if values.isfinite().all():
            return values, vectors
    values, vectors = torch.linalg.eigh(wide.double())
    return values.to(wide.dtype), vectors.to(wide.dtype)


def eigen(matrices: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, clamped at 0, and eigenvectors, in float64.

    Parameters
    ----------
    matrices : Tensor
        ``[..., n, n]``, symmetric positive semi-definite.
    damping : float
        If it is 0, eigenvalues that may be only rounding are set to 0, because a solver
        would divide by them.
    """
    values, vectors = torch.linalg.eigh(matrices.double())
    share = 0.0 if damping else matrices.shape[-1] * torch.finfo(matrices.dtype).eps
    rounding = share * values.abs().amax(-1, keepdim=True)
    return torch.where(values > rounding, values, 0), vectors


def known_moments(moments: Tensor, damping: float) -> Tensor:
    r"""Return second moments in float64, without those that may be only rounding.

    Parameters
    ----------
    moments : Tensor
        ``[groups, m, n]``, in K-FAC's eigenbasis.
    damping : float
        If it is 0, moments of at most :math:`mn\varepsilon^2` of the largest are set
        to 0, for the dtype's :math:`\varepsilon`. They are squares, of a product: this
        is the share that :func:`eigen` uses for `m` rows, times that for `n`.
    """
    rows, columns = moments.shape[-2:]
    least = 0.0 if damping else rows * columns * torch.finfo(moments.dtype).eps ** 2
    wide = moments.double()
    return torch.where(wide > least * wide.amax((-2, -1), keepdim=True), wide, 0)


Matvec = Callable[[Params], dict[str, Tensor]]


@dataclass(frozen=True)
class Solution:
    """The end of an iteration, as tensors that are still on their device.

    Parameters
    ----------
    values, residual : dict[str, Tensor]
        The solution, and the residual.
    norms : Tensor
        The residual's norm before each iteration and at the end, in float64. Entries
        after the last step have no meaning.
    steps : Tensor
        The number of steps, a scalar.
    """

    values: dict[str, Tensor]
    residual: dict[str, Tensor]
    norms: Tensor
    steps: Tensor

    def read(self) -> tuple[dict[str, Tensor], list[float]]:
        """Return the solution, and the norms up to the last step, from the device."""
        *norms, steps = torch.cat([self.norms, self.steps.reshape(1)]).tolist()
        return self.values, norms[: 1 + int(steps)]


_LOOK = 128  # more iterations than a merge's conjugate gradients have by default


class Iteration:
    """The state of an iteration, which ends as soon as the residual is small enough.

    The CPU does not wait for an accelerator: the accelerator itself decides whether the
    iteration goes on, and steps after the end change nothing.

    Parameters
    ----------
    rhs : Mapping[str, Tensor]
        The right-hand side; the solution starts from zero.
    iterations : int
        At most this many.
    tolerance : float
        Stop when the residual's norm has fallen by this factor.
    look : int, default 128
        After this many iterations, the CPU reads from an accelerator whether to go
        on.
    """

    def __init__(
        self, rhs: Params, iterations: int, tolerance: float, look: int = _LOOK
    ) -> None:
        self.values = {k: torch.zeros_like(v) for k, v in rhs.items()}
        self.residual = dict(rhs)
        self._norms = [norm(rhs).double()]
        self._live = torch.ones_like(self._norms[0], dtype=torch.bool)
        self._steps = torch.zeros_like(self._norms[0])
        self._most, self._tolerance, self._look = iterations, tolerance, look
        self._waits = self._live.device.type != "cpu"

    def __iter__(self) -> Iterator[int]:
        """Iterate as long as the residual is too long."""
        for index in range(self._most):
            self.require(self._norms[-1] > self._tolerance * self._norms[0])
            if self.is_over(at_once=bool(index) and index % self._look == 0):
                return
            yield index

    def require(self, condition: Tensor) -> None:
        """Stop the iteration if this scalar tensor is false."""
        self._live = self._live & condition

    def is_over(self, *, at_once: bool = False) -> bool:
        """Return whether it is known to have ended, without waiting for the device."""
        return (at_once or not self._waits) and not self._live

    def step(self, direction: Params, length: Tensor) -> None:
        """Move the solution along a direction; the caller then calls :meth:`left`."""
        self.values = self.moved(self.values, direction, length)
        self._steps = self._steps + self._live

    def moved(self, start: Params, along: Params, length: Tensor) -> dict[str, Tensor]:
        """Return tensors plus a change, or unchanged if the iteration has ended."""
        if not self._waits:
            return add(start, along, float(length))
        moved = {k: v + length.to(v) * along[k] for k, v in start.items()}
        return {k: torch.where(self._live, moved[k], v) for k, v in start.items()}

    def left(self, residual: Params) -> None:
        """Note the residual after a step."""
        self.residual = dict(residual)
        self._norms.append(norm(residual).double())

    def solution(self) -> Solution:
        """Return the end of the iteration."""
        norms = torch.stack(self._norms)
        return Solution(self.values, self.residual, norms, self._steps)


def conjugate_gradient(
    matvec: Matvec,
    rhs: Params,
    *,
    iterations: int,
    tolerance: float,
    precondition: Matvec | None = None,
    look: int = _LOOK,
) -> Solution:
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
    look : int, default 128
        After this many iterations, the CPU reads from an accelerator whether to go
        on.

    Returns
    -------
    Solution
        If no step is possible, because the matrix is not positive in its direction or a
        product is not finite, the iteration ends with the last iterate.

    Notes
    -----
    On a singular system in float32, many hundreds of iterations after convergence lead
    away from the solution of least norm. Use a tolerance above rounding, an anchor, or
    float64.
    """
    iteration = Iteration(rhs, iterations, tolerance, look)
    direction = dict[str, Tensor]()
    decrease: Tensor | None = None
    for _ in iteration:
        residual = iteration.residual
        steepest = precondition(residual) if precondition else residual
        previous, decrease = decrease, dot(residual, steepest)
        if previous is None:
            direction = dict(steepest)
        else:
            direction = iteration.moved(steepest, direction, decrease / previous)
        product = matvec(direction)
        curvature = dot(direction, product)
        # rounding once the range is exhausted, or NaN
        iteration.require((curvature > 0) & curvature.isfinite())
        if iteration.is_over():
            break
        length = decrease / curvature
        iteration.step(direction, length)
        iteration.left(iteration.moved(residual, product, -length))
    return iteration.solution()
