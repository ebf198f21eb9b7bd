r"""Curvatures of any scale, rescaled by a power of two so that products stay in range.

float32 ends at 1e38. Factors :math:`A = G = 10^{30} I` are finite, but the entries of
:math:`G \otimes A` are not. The product of two factors at 1e-20 is 0. So a merge takes
a curvature as :math:`2^{-e} F` and its exponent e, which no dtype limits. A power of
two changes no digit. A curvature within range has e = 0, and stays as it is.
"""

import math
from functools import singledispatch

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.curvature.operators.factors import (
    DenseFactor,
    LowRankFactor,
    SymmetricFactor,
)
from flwr_fisher.curvature.operators.kronecker import EigenKronecker, Kronecker
from flwr_fisher.curvature.operators.lazy import Deferred, WeightedSum
from flwr_fisher.curvature.operators.plain import BlockDiagonal, Dense, Diagonal
from flwr_fisher.params import Params

_ROOMS = 5  # the rise of a loss is two factors, two steps, and a sum over all entries


def widest_exponent(dtype: torch.dtype) -> int:
    """Return the largest exponent of a factor, or of a step: 25 for float32."""
    return int(math.log2(torch.finfo(dtype).max)) // _ROOMS


def exponent_of(number: float) -> int:
    """Return e for a number in [2**e, 2**(e + 1)); 0 for zero, infinity and NaN."""
    return math.frexp(number)[1] - 1 if number and math.isfinite(number) else 0


def largest_entry(tensor: Tensor) -> float:
    """Return the largest absolute value, or 0 without entries; makes no copy."""
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high))


def power_of_two(exponent: int) -> float:
    """Return ``2**exponent``, or the nearest float."""
    return math.ldexp(1.0, max(-1022, min(exponent, 1022)))


def shifted(params: Params, exponent: int) -> dict[str, Tensor]:
    """Return tensors times ``2**exponent``, even if that is no float of their dtype."""
    return {name: _shifted(tensor, exponent) for name, tensor in params.items()}


def _shifted(tensor: Tensor, exponent: int) -> Tensor:
    half = exponent // 2
    return (tensor * power_of_two(half)).mul_(power_of_two(exponent - half))


@singledispatch
def rescaled(curvature: Curvature) -> tuple[Curvature, int]:
    r"""Return a curvature as :math:`2^{-e} F`, and e.

    For a kind of curvature that is not known here, return the curvature itself and 0.

    Examples
    --------
    >>> rescaled(Diagonal({"w": torch.tensor([2.0**100, 2.0**99])}))[1]
    100
    >>> rescaled(Diagonal({"w": torch.tensor([3.0])}))
    (Diagonal(1 parameters, 4 B), 0)
    """
    return curvature, 0


@rescaled.register
def _(curvature: Deferred) -> tuple[Curvature, int]:
    return rescaled(curvature.made())


@rescaled.register
def _(curvature: Diagonal | Dense) -> tuple[Curvature, int]:
    exponent = _beyond(*curvature.tensors())
    if not exponent:
        return curvature, 0
    return curvature.mapped(lambda tensor: _shifted(tensor, -exponent)), exponent


@rescaled.register
def _(curvature: Kronecker) -> tuple[Curvature, int]:
    A, of_inputs = _rescaled_factor(curvature.A_factor)
    G, of_outputs = _rescaled_factor(curvature.G_factor)
    if not of_inputs and not of_outputs:
        return curvature, 0
    return curvature.with_factors(A, G), of_inputs + of_outputs


@rescaled.register
def _(curvature: EigenKronecker) -> tuple[Curvature, int]:
    # A basis counts twice; an honest one has unit vectors.
    basis_A, e_A = _within(curvature.basis_A, rooms=1)
    basis_G, e_G = _within(curvature.basis_G, rooms=1)
    moments, e_moments = _within(curvature.moments)
    if not (e_A or e_G or e_moments):
        return curvature, 0
    layer = curvature.with_factors(basis_A, basis_G, moments)
    return layer, 2 * (e_A + e_G) + e_moments


@rescaled.register
def _(curvature: WeightedSum) -> tuple[Curvature, int]:
    terms, exponents = zip(*map(rescaled, curvature.terms), strict=True)
    if not any(exponents):
        return curvature, 0
    weights = [
        w * math.ldexp(1.0, e - max(exponents))
        for w, e in zip(curvature.weights, exponents, strict=True)
    ]
    return WeightedSum(terms, weights), max(exponents)


@rescaled.register
def _(curvature: BlockDiagonal) -> tuple[Curvature, int]:
    held = [rescaled(child) for child in curvature.children]
    if not any(exponent for _, exponent in held):
        return curvature, 0
    highest = max(exponent for _, exponent in held)
    children = [
        child if e == highest else child.scaled(power_of_two(e - highest))
        for child, e in held
    ]
    return BlockDiagonal(children), highest


def _rescaled_factor(factor: SymmetricFactor) -> tuple[SymmetricFactor, int]:
    if isinstance(factor, DenseFactor):
        return _rescaled_dense(factor)
    if isinstance(factor, LowRankFactor):
        return _rescaled_low_rank(factor)
    return factor, 0


def _rescaled_dense(factor: DenseFactor) -> tuple[SymmetricFactor, int]:
    # All of it, not its diagonal alone: it may not be semi-definite.
    of_matrix = _even(_beyond(factor.matrix, rooms=1))
    if isinstance(factor.scale, Tensor):
        of_scale = _even(_beyond(factor.scale, rooms=1))
    else:
        exponent, most = exponent_of(factor.scale), widest_exponent(factor.matrix.dtype)
        of_scale = _even(exponent) if abs(exponent) > most else 0
    exponent = of_matrix + of_scale
    if not of_matrix and not of_scale:
        return factor, 0
    # A matrix in range is not copied.
    matrix = _shifted(factor.matrix, -of_matrix) if of_matrix else factor.matrix
    rest = None if factor.rest is None else _shifted(factor.rest, -exponent)
    return DenseFactor(matrix, factor.scale * power_of_two(-of_scale), rest), exponent


def _rescaled_low_rank(factor: LowRankFactor) -> tuple[SymmetricFactor, int]:
    """Scale the rows or the lengths, because directions may be integers on the wire."""
    vectors = [factor.directions, factor.lengths]
    vectors += [] if factor.rows is None else [factor.rows]
    sizes = [largest_entry(tensor) for tensor in vectors]
    rest = largest_entry(factor.rest)
    exponents = [2 * sum(map(exponent_of, sizes))] if all(sizes) else []
    exponents += [exponent_of(rest)] if rest else []
    exponent = max(exponents, default=0)
    if abs(exponent) <= widest_exponent(factor.rest.dtype):
        return factor, 0
    exponent = _even(exponent)  # so that its root is a power of two as well
    shifted_rest = _shifted(factor.rest, -exponent)
    *others, last = vectors[1:]
    scaled = [*others, _shifted(last, -exponent // 2)]
    lengths, rows = scaled if len(scaled) == 2 else (scaled[0], None)
    return LowRankFactor(factor.directions, lengths, shifted_rest, rows), exponent


def _within(tensor: Tensor, rooms: int = 2) -> tuple[Tensor, int]:
    """Return ``2**-e`` times a tensor, within range, and e."""
    exponent = _beyond(tensor, rooms=rooms)
    return (_shifted(tensor, -exponent), exponent) if exponent else (tensor, 0)


def _beyond(*tensors: Tensor, rooms: int = 2) -> int:
    """Return the exponent of the largest entry, or 0 if that is within range."""
    exponent = exponent_of(max(map(largest_entry, tensors), default=0.0))
    within = rooms * min(widest_exponent(tensor.dtype) for tensor in tensors)
    return exponent if abs(exponent) > within else 0


def _even(exponent: int) -> int:
    return exponent - exponent % 2
