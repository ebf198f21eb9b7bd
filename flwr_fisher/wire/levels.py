"""The levels that codes of a few bits stand for.

Which to take depends on what must be kept well: absolute values (:class:`Linear`),
ratios (:class:`Logarithmic`) or something between the two (:class:`SquareRoot`).

The error bound in each class holds for exact arithmetic. Rounding adds to it: scales
are rounded to float32, values to the dtype that they are decoded to, and intermediate
results to float32 unless that dtype is float64.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flwr_fisher.wire.bits import largest_level
from flwr_fisher.wire.quantise import Quantiser

_FLOAT32 = torch.finfo(torch.float32)
_TINY = _FLOAT32.smallest_normal * _FLOAT32.eps  # the smallest positive float32


@dataclass(frozen=True)
class Linear(Quantiser):
    """Equidistant levels from -m to m, m being the block's largest absolute value.

    The levels are ``k m / c`` for the integers k from -c to c, ``c = 2**(bits-1) - 1``,
    so that zero is one, and code ``k + c`` stands for level k. The error is at most
    half a step:

        |x - x̂| <= m / (2 c)

    Parameters
    ----------
    bits : int
        A code's width, from 2 (levels -m, 0 and m) to 16.

    Examples
    --------
    >>> values, linear = torch.tensor([-3.0, 0.0, 1.9, 0.6]), Linear(3)
    >>> data = linear.encode(values)
    >>> data.numel(), linear.decode(data, 4, values.dtype, field="x")
    (6, tensor([-3.,  0.,  2.,  1.]))
    """

    signed: ClassVar[bool] = True

    @property
    def _centre(self) -> int:
        return largest_level(self.bits)

    @property
    def _largest(self) -> int:
        return 2 * self._centre

    def _scales(self, blocks: Tensor) -> Tensor:
        return blocks.abs().amax(1, keepdim=True)

    def _codes(self, blocks: Tensor, scales: Tensor) -> Tensor:
        # A scale rounded to float32 may be just below the block's largest value.
        ratios = (blocks / _divisor(scales)).clamp_(-1, 1)
        return ratios.mul_(self._centre).round_().add_(self._centre)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        # Multiplying a code by the scale before dividing could overflow.
        return codes.sub_(self._centre).div_(self._centre).mul_(scales)


@dataclass(frozen=True)
class SquareRoot(Quantiser):
    """Levels whose square roots are equidistant from 0 to the block's largest value m.

    Code k stands for ``m (k / c)**2``, ``c = 2**bits - 1``. The error is at most half a
    step of the roots:

        |√x - √x̂| <= √m / (2 c)

    Parameters
    ----------
    bits : int
        A code's width, from 2 to 16.

    Examples
    --------
    >>> values, root = torch.tensor([9.0, 0.0, 1.2, 3.9]), SquareRoot(2)
    >>> root.decode(root.encode(values), 4, values.dtype, field="x")
    tensor([9.0000, 0.0000, 1.0000, 4.0000])
    """

    def _scales(self, blocks: Tensor) -> Tensor:
        return blocks.amax(1, keepdim=True)

    def _codes(self, blocks: Tensor, scales: Tensor) -> Tensor:
        ratios = (blocks / _divisor(scales)).clamp_(0, 1)
        return ratios.sqrt_().mul_(self._largest).round_()

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.div_(self._largest).square_().mul_(scales)


@dataclass(frozen=True)
class Logarithmic(Quantiser):
    """Zero, and geometric levels between a block's smallest and largest positive value.

    Code 0 stands for 0 and code k for ``l q**(k-1)``, ``q = (m/l)**(1/(2**bits-2))``, l
    being the block's smallest positive value and m its largest. Zeros come back as
    zeros, and positive values as positive values with an error of at most half a step:

        q**(-1/2) <= x̂ / x <= q**(1/2)

    A positive float64 below float32's range counts as float32's smallest.

    Parameters
    ----------
    bits : int
        A code's width, from 2 to 16.

    Examples
    --------
    >>> values, log = torch.tensor([1e-6, 0.0, 2e-2, 1e2]), Logarithmic(2)
    >>> log.decode(log.encode(values), 4, values.dtype, field="x")
    tensor([1.0000e-06, 0.0000e+00, 1.0000e-02, 1.0000e+02])
    """

    _per_block: ClassVar[int] = 2

    def _scales(self, blocks: Tensor) -> Tensor:
        high = blocks.amax(1)
        low = blocks.masked_fill(blocks == 0, float("inf")).amin(1)
        ends = torch.stack([low, high], 1).clamp_(_TINY, _FLOAT32.max)
        return ends.masked_fill_((high == 0)[:, None], 0)

    def _valid(self, scales: Tensor) -> bool:
        low, high = scales.unbind(1)
        ordered = (low <= high) & ((low > 0) | (high == 0))
        return super()._valid(scales) and bool(ordered.all())

    def _codes(self, blocks: Tensor, scales: Tensor) -> Tensor:
        low, step = self._grid(scales)
        codes = (blocks / low).log_().div_(_divisor(step)).round_().add_(1)
        # A log may be below 0 where the scale was rounded, and is -inf where x is 0.
        return codes.clamp_(1, self._largest).masked_fill_(blocks == 0, 0)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        low, step = self._grid(scales)
        values = ((codes - 1) * step).exp_().mul_(low)
        # With the exact ends as limits, nothing rounds to 0 or beyond float32's range.
        values.clamp_(scales[:, :1], scales[:, 1:])
        return values.masked_fill_(codes == 0, 0).to(codes.dtype)

    def _grid(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower end and the logarithms' step, in float64.

        The ratio of two float32 numbers may be outside float32's range.
        """
        ends = _divisor(scales.to(torch.float64))
        low, high = ends[:, :1], ends[:, 1:]
        return low, (high / low).log_() / (self._largest - 1)


def _divisor(scales: Tensor) -> Tensor:
    """Replace zeros with ones; a block whose scale is 0 holds only zeros."""
    return scales.masked_fill(scales == 0, 1)
