"""Curvatures as operators on named tensors, and the solvers of systems with them."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from flwr_fisher.errors import StructureError, check_range
from flwr_fisher.params import Params, add, by_part, dot, flatten, norm, select


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
        return replace(
            self,
            solution=dict(solution),
            residual=dict(residual),
            norms=[*self.norms, norm(residual).double()],
            steps=self.steps + self.live,
        )

    def turned(self, steepest: Params) -> "Iterate":
        """Return the state with conjugate gradients' next direction.

        `steepest` is the residual, multiplied by the preconditioner.
        """
        decrease, direction = dot(self.residual, steepest), dict(steepest)
        if self.decrease is not None:
            direction = self.moved(steepest, self.direction, decrease / self.decrease)
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
        if state.is_over(index):
            break
        residual = state.residual
        state = state.turned(precondition(residual) if precondition else residual)
        state = state.stepped(matvec(state.direction))
    return state


Solver = Callable[[Params], dict[str, Tensor]]

_TOLERANCE = 1e-10  # of conjugate gradients, in float64
_MOST = 10_000  # of their iterations


class Curvature(ABC):
    r"""A symmetric positive semi-definite matrix :math:`F` over named parameters.

    It acts on ``dict[str, Tensor]`` with the keys and shapes in :attr:`shapes`. The
    dense matrix orders its rows as :func:`flwr_fisher.params.flatten` orders the
    parameters, in the order of :attr:`shapes`.

    Every kind of curvature has the methods described here. ``F @ v`` is a product,
    ``F + F2`` a lazy sum, ``c * F`` a multiple with :math:`c \ge 0`, and ``F.solve(b)``
    solves.

    Examples
    --------
    >>> from flwr_fisher.curvature import Diagonal
    >>> F = Diagonal({"w": torch.tensor([1.0, 2.0])})
    >>> F @ {"w": torch.tensor([3.0, 4.0])}
    {'w': tensor([3., 8.])}
    >>> 0.5 * F + F
    WeightedSum(2 parameters, 16 bytes)
    >>> (0.5 * F + F).solve({"w": torch.ones(2)}, damping=0.5)
    {'w': tensor([0.5000, 0.2857])}
    """

    shapes: dict[str, torch.Size]
    """The parameters that this curvature covers, with their shapes."""

    groups: int = 1
    """How many factors of each kind a layer has: a convolution's groups."""

    # A sum is itself a curvature, so its own file sets this: no circle of imports.
    summed: ClassVar[Callable[["Curvature", "Curvature"], "Curvature"]]

    @abstractmethod
    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return :math:`Fv`; `vector` has exactly the keys of :attr:`shapes`."""

    @abstractmethod
    def diagonal(self) -> dict[str, Tensor]:
        """Return the diagonal of :math:`F`, shaped like the parameters."""

    @abstractmethod
    def scaled(self, factor: float) -> "Curvature":
        """Return :math:`cF` for a factor c of at least 0."""

    @abstractmethod
    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Curvature":
        """Return the same kind of curvature with a function of each of its tensors."""

    @property
    def kind(self) -> str:
        """The name of this kind of curvature."""
        return type(self).__name__

    def tensors(self) -> list[Tensor]:
        """Return every tensor that this curvature holds; no copies."""
        every: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            every.append(tensor)
            return tensor

        self.mapped(note)
        return every

    @property
    def nbytes(self) -> int:
        """The size in bytes of this curvature's tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def made(self) -> "Curvature":
        """Return the curvature itself, or what a deferred one computes."""
        return self

    def non_negative(self) -> list[Tensor]:
        """Return numbers that are >= 0 if :math:`F` is positive semi-definite."""
        return list(self.diagonal().values())

    def regularised(self, *, shrink: float = 0.0, damping: float = 0.0) -> "Curvature":
        """Return a copy with correlations shrunk, since they come from a sample.

        :class:`Kronecker` says what it does; a diagonal has no correlations and returns
        itself.

        Parameters
        ----------
        shrink : float
            How much correlations between inputs are reduced, in [0, 1].
        damping : float
            How much correlations between outputs are reduced, in [0, 1].
        """
        return self

    def blocks(self) -> Sequence["Curvature"]:
        """Return the independent diagonal blocks, each a curvature of its own."""
        return [self]

    def trace(self) -> float:
        """Return the sum of the eigenvalues."""
        return float(self.traces())

    def traces(self, parts: int = 1) -> Tensor:
        """Return stacked curvatures' traces, in float64; it waits for no device."""
        rows = by_part(self.diagonal(), parts)
        return torch.stack([row.double().sum(-1) for row in rows]).sum(0)

    def numel(self) -> int:
        """Return :math:`d`, the number of rows."""
        return sum(shape.numel() for shape in self.shapes.values())

    def to_dense(self) -> Tensor:
        """Return :math:`F` as one matrix ``[d, d]``; for small models and tests.

        Each row is the product with a unit vector.
        """
        curvature, rows = self.made(), list[Tensor]()
        unit = {k: v.new_zeros(v.shape) for k, v in curvature.diagonal().items()}
        for entries in unit.values():
            for entry in entries.view(-1):
                entry.fill_(1)
                rows.append(flatten(select(curvature.matvec(unit), self.shapes)))
                entry.fill_(0)
        return torch.stack(rows)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Curvature":
        """Return the curvature on a device, or in a dtype of floats.

        Examples
        --------
        >>> from flwr_fisher.curvature import Diagonal
        >>> Diagonal({"w": torch.ones(5)}).to(dtype=torch.float64)
        Diagonal(5 parameters, 40 bytes)
        """
        return self.mapped(lambda tensor: tensor.to(device=device, dtype=dtype))

    def solve(self, rhs: Params, damping: float = 0.0) -> dict[str, Tensor]:
        r"""Return :math:`(F + \lambda I)^{-1} b`, in the dtype of `rhs`.

        Parameters
        ----------
        rhs : Mapping[str, Tensor]
            :math:`b`, with exactly the keys of :attr:`shapes`.
        damping : float
            :math:`\lambda \ge 0`.

        Raises
        ------
        ConfigurationError
            If `damping` is negative.
        StructureError
            If `rhs` does not fit, or conjugate gradients do not converge.

        Notes
        -----
        Each block is solved in float64, by its eigenvalues. With :math:`\lambda = 0`
        this is the pseudo-inverse: an eigenvalue counts as 0 if it is at most
        :math:`n \varepsilon` of the largest, for n rows and the dtype's
        :math:`\varepsilon`. A :class:`Kronecker` uses the eigenvalues of its two
        factors. The entries of a :class:`Diagonal` are used as they are. The
        eigenvalues of a sum are not known, so conjugate gradients reduce the residual
        to 1e-10 of :math:`b`. With :math:`\lambda = 0`, :math:`b` must then be in the
        range of :math:`F`.

        Examples
        --------
        >>> from flwr_fisher.curvature import Diagonal
        >>> F = Diagonal({"w": torch.tensor([2.0, 0.0])})
        >>> F.solve({"w": torch.ones(2)})
        {'w': tensor([0.5000, 0.0000])}
        >>> F.solve({"w": torch.ones(2)}, damping=2.0)
        {'w': tensor([0.2500, 0.5000])}
        """
        check_range("damping", damping, 0)
        self.check(rhs)
        wide = {name: value.double() for name, value in rhs.items()}
        solution: dict[str, Tensor] = {}
        for block in self.blocks():
            solution |= block.solver(damping)(select(wide, block.shapes))
        return {name: solution[name].to(value.dtype) for name, value in rhs.items()}

    def solver(self, damping: float) -> Solver:
        """Return a solver for one of :meth:`blocks`, in float64."""
        wide = self.to(dtype=torch.float64)

        def solve(rhs: Params) -> dict[str, Tensor]:
            solution, norms = conjugate_gradient(
                lambda vector: add(wide.matvec(vector), vector, damping),
                rhs,
                iterations=min(10 * self.numel(), _MOST),
                tolerance=_TOLERANCE,
            ).read()
            if not norms[-1] <= _TOLERANCE * norms[0]:  # NaN is not, either
                raise StructureError(
                    f"{self}: {len(norms) - 1} steps of conjugate gradients leave a "
                    f"residual of {norms[-1] / norms[0]:.0e} of the right-hand side: "
                    "pass more damping"
                )
            return solution

        return solve

    def __matmul__(self, vector: Params) -> dict[str, Tensor]:
        return self.matvec(vector)

    def __add__(self, other: "Curvature") -> "Curvature":
        if not isinstance(other, Curvature):
            return NotImplemented
        return Curvature.summed(self, other)

    def __mul__(self, factor: float) -> "Curvature":
        check_range("a curvature's factor", factor, 0)
        return self.scaled(factor)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"{self.kind}({self.numel()} parameters, {self.nbytes} bytes)"

    def check(self, vector: Params) -> None:
        """Raise :class:`StructureError` unless `vector` has this curvature's layout."""
        if not isinstance(vector, Mapping):
            raise StructureError(
                "a curvature multiplies a dict with the parameters' names and shapes, "
                f"not a {type(vector).__name__}: pass "
                "params.unflatten(vector, curvature.shapes) for a flat vector"
            )
        shapes = {name: tensor.shape for name, tensor in vector.items()}
        if shapes != self.shapes:
            wrong = [
                *(f"it lacks '{name}'" for name in self.shapes.keys() - shapes),
                *(f"no '{name}' is expected" for name in shapes.keys() - self.shapes),
                *(
                    f"'{name}' has shape {tuple(shapes[name])}, expected {tuple(shape)}"
                    for name, shape in self.shapes.items()
                    if shapes.get(name, shape) != shape
                ),
            ]
            raise StructureError(
                f"the vector does not fit the curvature: {', '.join(sorted(wrong))}"
            )


class Diagonal(Curvature):
    """A diagonal matrix, kept as tensors of the parameters' shapes.

    Parameters
    ----------
    entries : Mapping[str, Tensor]
        The diagonal, non-negative, one tensor a parameter.

    Examples
    --------
    >>> fisher = Diagonal({"w": torch.tensor([1.0, 2.0])})
    >>> fisher.matvec({"w": torch.tensor([3.0, 4.0])})
    {'w': tensor([3., 8.])}
    """

    def __init__(self, entries: Params) -> None:
        self.entries = dict(entries)
        self.shapes = {name: entry.shape for name, entry in entries.items()}

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the elementwise product."""
        self.check(vector)
        return {name: entry * vector[name] for name, entry in self.entries.items()}

    def diagonal(self) -> dict[str, Tensor]:
        """Return the entries (copies)."""
        return {name: entry.clone() for name, entry in self.entries.items()}

    def scaled(self, factor: float) -> "Diagonal":
        """Return the diagonal times a factor."""
        return Diagonal({name: entry * factor for name, entry in self.entries.items()})

    def blocks(self) -> list["Diagonal"]:
        """Return one block for each parameter."""
        return [Diagonal({name: entry}) for name, entry in self.entries.items()]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Diagonal":
        """Return the diagonal with a function applied to its entries."""
        return Diagonal({name: function(entry) for name, entry in self.entries.items()})

    def solver(self, damping: float) -> Solver:
        """Return a solver, which divides."""
        entries = {name: entry.double() for name, entry in self.entries.items()}
        return lambda rhs: {k: divided(rhs[k], e, damping) for k, e in entries.items()}


class BlockDiagonal(Curvature):
    """A block-diagonal curvature: one child for each group of parameters.

    This is what ``fisher(structure="kfac")`` returns: a :class:`Kronecker` for each
    layer that has one, and a :class:`Diagonal` for the remaining parameters.

    Parameters
    ----------
    children : Sequence[Curvature]
        Curvatures over disjoint parameters.
    """

    def __init__(self, children: Sequence[Curvature]) -> None:
        self.children = tuple(children)
        names = [name for child in self.children for name in child.shapes]
        if shared := sorted(k for k, times in Counter(names).items() if times > 1):
            raise StructureError(f"parameters {shared} are in more than one block")
        self.shapes = {k: s for c in self.children for k, s in c.shapes.items()}

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return :math:`Fv`, child by child."""
        self.check(vector)
        parts = (c.matvec(select(vector, c.shapes)) for c in self.children)
        return {k: v for part in parts for k, v in part.items()}

    def diagonal(self) -> dict[str, Tensor]:
        """Return the children's diagonals."""
        return {k: v for c in self.children for k, v in c.diagonal().items()}

    def scaled(self, factor: float) -> "BlockDiagonal":
        """Return the curvature with each child scaled."""
        return BlockDiagonal([c.scaled(factor) for c in self.children])

    def regularised(
        self, *, shrink: float = 0.0, damping: float = 0.0
    ) -> "BlockDiagonal":
        """Return the curvature with each child regularised."""
        parts = [c.regularised(shrink=shrink, damping=damping) for c in self.children]
        return BlockDiagonal(parts)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "BlockDiagonal":
        """Return the curvature with a function applied to the children's tensors."""
        return BlockDiagonal([child.mapped(function) for child in self.children])

    def made(self) -> "BlockDiagonal":
        """Return the curvature with its deferred children computed."""
        return BlockDiagonal([child.made() for child in self.children])

    def blocks(self) -> list[Curvature]:
        """Return the children's blocks."""
        return [block for child in self.children for block in child.blocks()]
