"""Floats as codes of a few bits, in blocks of values that share a scale.

With one scale for a whole tensor, its largest entry would decide how coarse all other
entries become. A scale for every :data:`BLOCK` values costs 1/8 bit per value, and
limits that effect to a block (Dettmers et al., "8-bit optimizers via block-wise
quantization", ICLR 2022, section 2.1). :mod:`flwr_fisher.wire.levels` defines the
values that the codes stand for.

The bytes are first the scales of all blocks as float32, those of one block side by
side, then the codes of all values, packed by :mod:`flwr_fisher.wire.bits`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from flwr_fisher.errors import WireError, check_range
from flwr_fisher.wire.bits import as_bytes, pack, packed_size, unpack_codes
from flwr_fisher.wire.checks import are_finite_and_not_negative

BLOCK = 256  # values that share their scales
_LARGEST_SCALE = torch.finfo(torch.float32).max


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
        >>> from flwr_fisher.wire.levels import Linear
        >>> Linear(6).size(1000)  # four blocks
        766
        """
        return self._head(count) + packed_size(count, self.bits)

    def encode(self, values: Tensor) -> Tensor:
        """Return values as bytes.

        Parameters
        ----------
        values : Tensor
            Finite floats of any dtype and shape; not negative, unless the class is
            signed. A float64 beyond float32's range counts as the end of that range.

        Returns
        -------
        Tensor
            uint8, ``[size(values.numel())]``, on the values' device.

        Raises
        ------
        ValueError
            If a value is not finite, or negative where the class is not signed.
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
            flat = flat.clamp(-_LARGEST_SCALE, _LARGEST_SCALE)
        blocks = pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        scales = self._scales(blocks).to(torch.float32)
        codes = self._codes(blocks, scales.to(blocks.dtype)).to(torch.int32)
        packed = pack(codes.view(-1)[: len(flat)], self.bits)
        return torch.cat([as_bytes(scales), packed])

    def decode(
        self, data: Tensor, count: int, dtype: torch.dtype, *, field: str
    ) -> Tensor:
        """Return the values that bytes stand for; the bytes are not trusted.

        Parameters
        ----------
        data : Tensor
            uint8, ``[size(count)]``.
        count : int
            How many values there are.
        dtype : torch.dtype
            The float dtype of the result. A value beyond its range becomes its largest
            or smallest finite value.
        field : str
            The key in the record, for the error.

        Returns
        -------
        Tensor
            ``[count]``, finite, and not negative unless the class is signed; on the
            data's device.

        Raises
        ------
        WireError
            If `data` has another dtype or shape, or holds a scale or a code that
            :meth:`encode` never writes.
        """
        working = _working(dtype)
        scales, codes = self._checked(data, count, working, field)
        if not count:
            return data.new_empty(0, dtype=dtype)
        blocks = pad(codes, (0, -count % BLOCK)).view(-1, BLOCK)
        values = self._values(blocks.to(working), scales).view(-1)[:count]
        if (limit := torch.finfo(dtype).max) < _LARGEST_SCALE:
            values = values.clamp_(-limit, limit)
        return values.to(dtype)

    def _checked(
        self, data: Tensor, count: int, working: torch.dtype, field: str
    ) -> tuple[Tensor, Tensor]:
        """Return the scales ``[blocks, 1 or 2]`` and the codes ``[count]``."""
        if data.dtype != torch.uint8:
            raise WireError(f"dtype {data.dtype}, expected torch.uint8", field=field)
        if data.shape != (expected := (self.size(count),)):
            reason = f"shape {tuple(data.shape)}, expected {expected}"
            raise WireError(reason, field=field)
        # A view as wider numbers needs aligned bytes, which a clone has.
        head = self._head(count)
        scales = data[:head].clone(memory_format=torch.contiguous_format)
        scales = scales.view(torch.float32).view(-1, self._per_block).to(working)
        if not self._valid(scales):
            raise WireError("holds a scale that no block can have", field=field)
        codes = unpack_codes(data[head:], self.bits, count, self._largest, field=field)
        return scales, codes

    def _head(self, count: int) -> int:
        """Return how many bytes the scales take."""
        return -(-count // BLOCK) * self._per_block * 4

    @property
    def _largest(self) -> int:
        """The largest code that stands for a value."""
        return (1 << self.bits) - 1

    def _valid(self, scales: Tensor) -> bool:
        """Return whether blocks ``[n, BLOCK]`` can have these scales."""
        return are_finite_and_not_negative(scales)

    @abstractmethod
    def _scales(self, blocks: Tensor) -> Tensor:
        """Return the scales ``[n, 1 or 2]`` of blocks ``[n, BLOCK]``."""

    @abstractmethod
    def _codes(self, blocks: Tensor, scales: Tensor) -> Tensor:
        """Return the codes as floats, for the scales as a reader will have them."""

    @abstractmethod
    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the values that codes stand for; this may overwrite the codes."""


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
