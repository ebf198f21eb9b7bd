"""Floats as codes of a few bits, block by block, each block with a scale of its own.

One scale for a whole tensor would let its largest entry decide how coarse all others
become; a scale for every :data:`BLOCK` values costs 1/8 bit a value and confines that
to a block (Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022,
section 2.1). Which levels to take is a choice of what must come back well: absolute
values (:class:`Linear`), ratios (:class:`Logarithmic`) or something between the two
(:class:`SquareRoot`).

Encoded are first the scales of all blocks as float32, a block's own side by side, then
the codes of all values as :mod:`flwr_fisher.wire.bits` packs them. The bound that each
class states is one for exact arithmetic. On top of it comes rounding: of scales to
float32, of values to the dtype that they are decoded to, and, unless that is float64,
of what is computed on the way to float32.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from flwr_fisher.errors import WireError, check_range
from flwr_fisher.wire.bits import pack, packed_size, unpack

__all__ = ["BLOCK", "Linear", "Logarithmic", "Quantiser", "SquareRoot"]

BLOCK = 256  # values that share their scales
_SCALE = torch.finfo(torch.float32)
_TINY = _SCALE.smallest_normal * _SCALE.eps  # the smallest positive float32


@dataclass(frozen=True)
class Quantiser(ABC):
    """Turns floats into bytes and back, with a bound on the error.

    Parameters
    ----------
    bits : int
        A code's width, from 2 to 16.

    Raises
    ------
    ConfigurationError
        If `bits` is out of range.

    Attributes
    ----------
    signed : bool
        Whether values may be negative.
    """

    bits: int
    signed: ClassVar[bool] = False
    _per_block: ClassVar[int] = 1  # scales

    def __post_init__(self) -> None:
        check_range("bits", self.bits, 2, 16)

    def size(self, count: int) -> int:
        """Return how many bytes `count` values take, scales included.

        Examples
        --------
        >>> Linear(6).size(1000)  # four blocks
        766
        """
        return self._head(count) + packed_size(count, self.bits)

    def encode(self, values: Tensor) -> Tensor:
        """Return values as bytes.

        Parameters
        ----------
        values : Tensor
            Finite floats of any dtype and shape; not negative, unless the kind is
            signed. A float64 beyond float32's range counts as the end of that range.

        Returns
        -------
        Tensor
            uint8, ``[size(values.numel())]``, on the values' device.

        Raises
        ------
        ValueError
            If a value is not finite, or negative where the kind is not signed.
        """
        flat = values.detach().reshape(-1).to(_working(values.dtype))
        if not len(flat):
            return flat.new_empty(0, dtype=torch.uint8)
        low, high = (float(end) for end in flat.aminmax())
        if not (isfinite(low) and isfinite(high)):
            raise ValueError("holds NaN or infinity")
        if low < 0 and not self.signed:
            raise ValueError(f"holds {low}, and {type(self).__name__} takes no sign")
        if flat.dtype == torch.float64:
            flat = flat.clamp(-_SCALE.max, _SCALE.max)
        blocks = pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        scales = self._scales(blocks).to(torch.float32)
        codes = self._codes(blocks, scales.to(blocks.dtype)).to(torch.int32)
        packed = pack(codes.view(-1)[: len(flat)], self.bits)
        return torch.cat([scales.view(-1).view(torch.uint8), packed])

    def decode(
        self, data: Tensor, count: int, dtype: torch.dtype, *, field: str
    ) -> Tensor:
        """Return the values that bytes stand for; the bytes may be anybody's.

        Parameters
        ----------
        data : Tensor
            uint8, ``[size(count)]``.
        count : int
            How many values there are.
        dtype : torch.dtype
            The float dtype of the result. What is beyond its range becomes its largest
            or smallest finite value.
        field : str
            The key in the record, for the error.

        Returns
        -------
        Tensor
            ``[count]``, finite, and not negative unless the kind is signed; on the
            data's device.

        Raises
        ------
        WireError
            If `data` has another dtype or shape, or holds a scale or a code that
            :meth:`encode` never writes.
        """
        if data.dtype != torch.uint8:
            raise WireError(f"dtype {data.dtype}, expected torch.uint8", field=field)
        if data.shape != (expected := (self.size(count),)):
            reason = f"shape {tuple(data.shape)}, expected {expected}"
            raise WireError(reason, field=field)
        if not count:
            return data.new_empty(0, dtype=dtype)
        head, working = self._head(count), _working(dtype)
        # A view of wider numbers needs bytes that begin where such a number may.
        scales = data[:head].clone(memory_format=torch.contiguous_format)
        scales = scales.view(torch.float32).view(-1, self._per_block).to(working)
        if not self._valid(scales):
            raise WireError("holds a scale that no block can have", field=field)
        codes = unpack(data[head:], self.bits, count)
        if codes.max() > self._largest:
            raise WireError("holds a code that stands for no value", field=field)
        blocks = pad(codes, (0, -count % BLOCK)).view(-1, BLOCK)
        values = self._values(blocks.to(working), scales).view(-1)[:count]
        if (limit := torch.finfo(dtype).max) < _SCALE.max:
            values = values.clamp_(-limit, limit)
        return values.to(dtype)

    def _head(self, count: int) -> int:
        """Return how many bytes the scales take."""
        return -(-count // BLOCK) * self._per_block * 4

    @property
    def _largest(self) -> int:
        """The largest code that stands for a value."""
        return (1 << self.bits) - 1

    def _valid(self, scales: Tensor) -> bool:
        """Return whether blocks ``[n, BLOCK]`` can have these scales."""
        return bool((scales.isfinite() & (scales >= 0)).all())

    @abstractmethod
    def _scales(self, blocks: Tensor) -> Tensor:
        """Return the scales ``[n, 1 or 2]`` of blocks ``[n, BLOCK]``."""

    @abstractmethod
    def _codes(self, blocks: Tensor, scales: Tensor) -> Tensor:
        """Return the codes, still as floats, by the scales as they will be read."""

    @abstractmethod
    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return what codes stand for, which may overwrite them."""


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
        return (1 << (self.bits - 1)) - 1

    @property
    def _largest(self) -> int:
        return 2 * self._centre

    def _scales(self, blocks: Tensor) -> Tensor:
        return blocks.abs().amax(1, keepdim=True)

    def _codes(self, blocks: Tensor, scales: Tensor) -> Tensor:
        # Rounded to float32, a scale may be just below the value that it comes from.
        ratios = (blocks / _divisor(scales)).clamp_(-1, 1)
        return ratios.mul_(self._centre).round_().add_(self._centre)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        # Multiplied by the scale first, a code could overflow.
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
    zeros, positive values as positive ones that are off by half a step at most:

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
        ends = torch.stack([low, high], 1).clamp_(_TINY, _SCALE.max)
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
        # The ends are exact, so nothing rounds to 0 or beyond what float32 holds.
        values.clamp_(scales[:, :1], scales[:, 1:])
        return values.masked_fill_(codes == 0, 0).to(codes.dtype)

    def _grid(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower end, and the step of the logs, in float64.

        A ratio of two float32 does not always fit into one.
        """
        ends = _divisor(scales.to(torch.float64))
        low, high = ends[:, :1], ends[:, 1:]
        return low, (high / low).log_() / (self._largest - 1)


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _divisor(scales: Tensor) -> Tensor:
    """Replace zeros, by which only zeros would be divided, with ones."""
    return scales.masked_fill(scales == 0, 1)
