"""Solvers for a curvature: by its eigenvalues, or by conjugate gradients."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

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


Matvec = Callable[[Params], dict[str, Tensor]]

_LOOK = 128  # more iterations than a merge's conjugate gradients have by default


@dataclass(frozen=True)
class Iterate:
    """The state of a solver between two steps, on its device.

    A CPU decides at once whether the iteration goes on. For an accelerator it does not
    wait: the accelerator decides by `live`, and steps after the end change nothing.

    Parameters
    ----------
    solution, residual : dict[str, Tensor]
        The solution so far, and what is left of the right-hand side.
    norms : list[Tensor]
        The residual's norm at the start and after each step, in float64. Entries after
        the last of `steps` have no meaning.
    steps : Tensor
        The number of steps, a scalar.
    live : Tensor
        Whether the iteration goes on, a scalar.
    direction : dict[str, Tensor]
        Along which the next step of conjugate gradients goes.
    decrease : Tensor, optional
        The product of the residual with the preconditioned one, from which conjugate
        gradients have made the direction.
    """

    solution: dict[str, Tensor]
    residual: dict[str, Tensor]
    norms: list[Tensor]
    steps: Tensor
    live: Tensor
    direction: dict[str, Tensor] = field(default_factory=dict)
    decrease: Tensor | None = None

    @classmethod
    def start(cls, rhs: Params) -> "Iterate":
        """Return the state at zero."""
        first = norm(rhs).double()
        zero = {name: torch.zeros_like(value) for name, value in rhs.items()}
        live = torch.ones_like(first, dtype=torch.bool)
        return cls(zero, dict(rhs), [first], torch.zeros_like(first), live)

    @property
    def waits(self) -> bool:
        """Whether the CPU would have to wait to know what is live."""
        return self.live.device.type != "cpu"

    def while_above(self, tolerance: float) -> "Iterate":
        """Return the state, which has ended once the residual has fallen so far."""
        return self.only_if(self.norms[-1] > tolerance * self.norms[0])

    def only_if(self, condition: Tensor) -> "Iterate":
        """Return the state, which has ended if a scalar tensor is false."""
        return replace(self, live=self.live & condition)

    def is_over(self, index: int, look: int = _LOOK) -> bool:
        """Return whether it has ended; of an accelerator, read this once in a while."""
        reads = not self.waits or (index > 0 and index % look == 0)
        return reads and not self.live

    def moved(self, start: Params, along: Params, length: Tensor) -> dict[str, Tensor]:
        """Return tensors plus a change, or unchanged if the iteration has ended."""
        if not self.waits:
            return add(start, along, float(length)) if self.live else dict(start)
        moved = {k: v + length.to(v) * along[k] for k, v in start.items()}
        return {k: torch.where(self.live, moved[k], v) for k, v in start.items()}

    def after(self, solution: Params, residual: Params) -> "Iterate":
        """Return the state after a step to a solution, with its residual."""
        if not self.waits and not self.live:
            return self
        norms = [*self.norms, norm(residual).double()]
        steps = self.steps + self.live
        return replace(
            self,
            solution=dict(solution),
            residual=dict(residual),
            norms=norms,
            steps=steps,
        )

    def turned(self, steepest: Params) -> "Iterate":
        """Return the state with conjugate gradients' next direction.

        `steepest` is the residual, multiplied by the preconditioner.
        """
        decrease, direction = dot(self.residual, steepest), dict(steepest)
        if self.decrease is not None:
            turn = decrease / self.decrease
            direction = self.moved(steepest, self.direction, turn)
        return replace(self, direction=direction, decrease=decrease)

    def stepped(self, product: Params, slope: Tensor | None = None) -> "Iterate":
        """Return the state after conjugate gradients' step along the direction.

        If the matrix is not positive along it, or the product is not finite, the
        iteration ends here: its range is exhausted, up to rounding.

        Parameters
        ----------
        product : Mapping[str, Tensor]
            The matrix times the direction.
        slope : Tensor, optional
            The product of the residual with the direction, if rounding has changed the
            direction; by default `decrease`, which is equal otherwise.
        """
        curvature = dot(self.direction, product)
        state = self.only_if((curvature > 0) & curvature.isfinite())
        slope = self.decrease if slope is None else slope
        assert slope is not None  # `turned` has set it
        length = slope / curvature
        solution = state.moved(state.solution, state.direction, length)
        return state.after(solution, state.moved(state.residual, product, -length))

    def read(self) -> tuple[dict[str, Tensor], list[float]]:
        """Return the solution, and the norms up to the last step, on the CPU."""
        *norms, steps = torch.stack([*self.norms, self.steps]).tolist()
        return self.solution, norms[: 1 + int(steps)]


def conjugate_gradient(
    matvec: Matvec,
    rhs: Params,
    *,
    iterations: int,
    tolerance: float,
    precondition: Matvec | None = None,
    look: int = _LOOK,
) -> Iterate:
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
    Iterate
        If no step is possible, because the matrix is not positive in its direction or a
        product is not finite, the iteration ends with the last iterate.

    Notes
    -----
    On a singular system in float32, many hundreds of iterations after convergence lead
    away from the solution of least norm. Use a tolerance above rounding, an anchor, or
    float64.
    """
    state = Iterate.start(rhs)
    for index in range(iterations):
        state = state.while_above(tolerance)
        if state.is_over(index, look):
            break
        residual = state.residual
        state = state.turned(precondition(residual) if precondition else residual)
        state = state.stepped(matvec(state.direction))
    return state
