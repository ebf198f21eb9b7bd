r"""Curvatures of any scale, rescaled by a power of two so that products stay in range.

float32 ends at 1e38, and the curvature of a client that is sure of all its examples may
be 1e-30. A solver takes products of it with two steps, and their sums. So a merge takes
a curvature as :math:`2^{-e} F` and its exponent e, which no dtype limits. A power of
two changes no digit. A curvature within range has e = 0, and stays as it is.
"""

import math

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.curvature.operators.factors import SymmetricFactor
from flwr_fisher.curvature.operators.kronecker import Kronecker
from flwr_fisher.params import Params

_ROOMS = 5  # the rise of a loss is two factors, two steps, and a sum over all entries


def widest_exponent(dtype: torch.dtype) -> int:
    """Return the largest exponent of a factor, or of a step: 25 for float32."""
    return int(math.log2(torch.finfo(dtype).max)) // _ROOMS


def exponent_of(number: float) -> int:
    """Return e for a number in [2**e, 2**(e + 1)); 0 for zero, infinity and NaN."""
    return math.frexp(number)[1] - 1 if number and math.isfinite(number) else 0


def power_of_two(exponent: int) -> float:
    """Return ``2**exponent``, or the nearest float."""
    return math.ldexp(1.0, max(-1022, min(exponent, 1022)))


def shifted(params: Params, exponent: int) -> dict[str, Tensor]:
    """Return tensors times ``2**exponent``, even if that is no float of their dtype."""
    half = exponent // 2
    return {
        name: (tensor * power_of_two(half)).mul_(power_of_two(exponent - half))
        for name, tensor in params.items()
    }


def rescaled(curvature: Curvature) -> tuple[Curvature, int]:
    r"""Return a curvature as :math:`2^{-e} F`, with a mean eigenvalue near 1, and e.

    Its trace, in float64, decides; of a Kronecker product, each factor's.

    Examples
    --------
    >>> from flwr_fisher.curvature import Diagonal
    >>> rescaled(Diagonal({"w": torch.tensor([2.0**100, 2.0**100])}))[1]
    100
    >>> rescaled(Diagonal({"w": torch.tensor([3.0])}))
    (Diagonal(1 parameters, 4 B), 0)
    """
    curvature = curvature.made()
    if isinstance(curvature, Kronecker):
        A, of_inputs = _rescaled_factor(curvature.A_factor)
        G, of_outputs = _rescaled_factor(curvature.G_factor)
        if not of_inputs and not of_outputs:
            return curvature, 0
        return curvature.with_factors(A, G), of_inputs + of_outputs
    exponent = _exponent(curvature.trace(), curvature.numel())
    dtypes = [t.dtype for t in curvature.tensors() if t.is_floating_point()]
    if abs(exponent) <= 2 * min(map(widest_exponent, dtypes), default=0):
        return curvature, 0
    half = exponent // 2  # a float32 tensor may not hold the whole power
    part = curvature.scaled(power_of_two(-half))
    return part.scaled(power_of_two(half - exponent)), exponent


def _rescaled_factor(factor: SymmetricFactor) -> tuple[SymmetricFactor, int]:
    trace = factor.trace()
    exponent = _exponent(float(trace.double().sum()), factor.shape[:2].numel())
    if abs(exponent) <= widest_exponent(trace.dtype):
        return factor, 0
    return factor.scaled(power_of_two(-exponent)), exponent


def _exponent(trace: float, rows: int) -> int:
    """Return the exponent of the mean eigenvalue, such that it has a power's root."""
    return exponent_of(trace / max(rows, 1)) // 4 * 4
