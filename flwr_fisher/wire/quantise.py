r"""Tensors as bytes in native widths, and safe readers of untrusted bytes.

An *entry* is one tensor: its head (:data:`HEAD`), then scales in float32, then codes.
The head has the form, the bits of a code, and three sizes of a curvature's part.

``RAW``
    the tensor's own bytes;
``FLOAT``
    float16, relative to one scale that maps the largest value M to :math:`2^{15}`. A
    diagonal has no signs. Some of its values have 16 bits, and the others, spread
    evenly among them, have 8: the leading bits of float16, which are the exponent and
    three bits of the mantissa. The error of x is at most :math:`x / 2^{11} + M /
    2^{40}` or :math:`x / 2^4 + M / 2^{33}`;
``ROWS``
    integers of 8 bits, relative to the largest value m of each :data:`ROW` values: the
    error is at most :math:`m / 254`.

Rounding to float32, or to the tensor's dtype, adds to these errors. Matrices have forms
of their own (:mod:`flwr_fisher.wire.matrices`).
"""

import struct
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import pad

from flwr_fisher.errors import WireError
from flwr_fisher.files import to_bytes

ROW = 256  # values that share a scale: with one a tensor, its largest would decide all
SCALE = 4  # bytes
_HEAD = struct.Struct("<BBIII")
HEAD = _HEAD.size
_FINE = struct.Struct("<I")  # how many values have more bits
_TOP = 15  # the largest value's exponent in float16
_INFINITY = 0x7C00  # float16's bits
_KEPT = 1 << 14  # values of a diagonal whose spread is remembered
_DROPPED = 7  # bits of float16, without its sign, that 8 bits leave out
_HALF, _LARGEST = torch.finfo(torch.float16).max, torch.finfo(torch.float32).max
Sizes = tuple[int, int, int]
Bytes = NDArray[np.uint8]


class Packing(IntEnum):
    """The form of an entry, which its first byte names."""

    RAW = 0
    FLOAT = 1
    ROWS = 2
    WHOLE = 3
    COLUMNS = 4


WIDTHS = {
    Packing.RAW: (0,),
    Packing.FLOAT: (16,),
    Packing.ROWS: (8,),
    Packing.WHOLE: (16, 8),
    Packing.COLUMNS: (16, 8),
}


def packed_size(count: int, bits: int) -> int:
    """Return how many bytes `count` codes of 16 or 8 bits take."""
    return count * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return integers of 16 or 8 bits as bytes.

    Examples
    --------
    >>> pack(torch.tensor([1, -1]), 16)
    tensor([  1,   0, 255, 255], dtype=torch.uint8)
    """
    return codes.to(torch.int16 if bits == 16 else torch.int8).view(torch.uint8)


def unpack(data: Bytes, bits: int) -> NDArray[np.signedinteger]:
    """Return the integers in bytes of :func:`pack`; all bytes are valid."""
    # PyTorch needs aligned numbers, and a copy is aligned.
    return data.copy().view(np.int16) if bits == 16 else data.view(np.int8)


def levels(bits: int) -> int:
    """Return the largest code c; codes are the integers from -c to c."""
    return (1 << (bits - 1)) - 1


def as_scales(data: Bytes, field: str) -> NDArray[np.float32]:
    """Return bytes as scales in float32; raise :class:`WireError` for invalid ones."""
    scales = data.copy().view(np.float32)
    # The least and the largest are NaN if there is one.
    if len(scales) and not 0 <= float(scales.min()) <= float(scales.max()) < np.inf:
        raise WireError("holds a scale that is negative or not finite", field=field)
    return scales


def entry_of(
    form: Packing, bits: int, body: Tensor, sizes: Sizes = (0, 0, 0)
) -> Tensor:
    """Return an entry: its head and its body."""
    head = bytearray(_HEAD.pack(form, bits, *sizes))
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8).to(body.device), body])


def read_head(entry: ArrayLike, field: str) -> tuple[Packing, int, Sizes, Bytes]:
    """Return an entry's form, bits, sizes and body.

    Readers use NumPy: a server reads thousands of small entries, and each call of
    PyTorch takes several times as long.

    Raises
    ------
    WireError
        If there is no such form, or the form does not have this number of bits.
    """
    every = np.asarray(entry, np.uint8)
    if len(every) < HEAD:
        raise WireError(
            f"{len(every)} bytes, fewer than its head of {HEAD}", field=field
        )
    number, bits, *sizes = _HEAD.unpack_from(every.data)
    try:
        form = Packing(number)
    except ValueError as error:
        raise WireError(f"unknown form {number}", field=field) from error
    if bits not in WIDTHS[form]:
        raise WireError(f"codes of {bits} bits in form {form.name}", field=field)
    return form, bits, (sizes[0], sizes[1], sizes[2]), every[HEAD:]


# --- parameters -----------------------------------------------------------------------


def size_of_param(tensor: Tensor, bits: int) -> int:
    """Return the size of :func:`encode_param`'s entry."""
    count = tensor.numel()
    form = _form_of(tensor, bits)
    if form == Packing.RAW:
        return HEAD + count * tensor.itemsize
    scales = 1 if form == Packing.FLOAT else -(-count // ROW)
    return HEAD + SCALE * scales + packed_size(count, bits)


def encode_param(tensor: Tensor, bits: int) -> Tensor:
    """Return a parameter's entry, with its own bytes if these are no more."""
    form = _form_of(tensor, bits)
    if form == Packing.RAW:
        return entry_of(form, 0, to_bytes(tensor))
    if form == Packing.ROWS:
        return entry_of(form, bits, _encode_rows(_wide(tensor), bits))
    scale, words = _to_words(_wide(tensor))
    return entry_of(form, bits, torch.cat([to_bytes(scale), pack(words, bits)]))


def _form_of(tensor: Tensor, bits: int) -> Packing:
    if not tensor.is_floating_point() or 8 * tensor.itemsize <= bits:
        return Packing.RAW
    return Packing.FLOAT if bits == 16 else Packing.ROWS


def decode_param(entry: ArrayLike, like: Tensor, *, field: str) -> Tensor:
    """Return a parameter of the shape and dtype of `like`.

    Raises
    ------
    WireError
        If the entry does not fit this parameter.
    """
    form, bits, _, body = read_head(entry, field)
    if form == Packing.RAW:
        return _raw(body, like, field)
    known = form == Packing.ROWS or (form == Packing.FLOAT and bits == 16)
    if not known or not like.is_floating_point():
        reason = f"form {form.name} for a parameter of {like.dtype}"
        raise WireError(reason, field=field)
    if form == Packing.ROWS:
        values = _decode_rows(body, like.numel(), like.dtype, bits, field)
        return values.view(like.shape)
    _check_size(body, SCALE + packed_size(like.numel(), bits), field)
    half = body[SCALE:].view(np.float16).reshape(like.shape)
    if not np.isfinite(half).all():
        raise WireError("must not be NaN or infinity", field=field)
    return _from_half(body[:SCALE], half, like.dtype, field)


def _raw(body: Bytes, like: Tensor, field: str) -> Tensor:
    if len(body) != (expected := like.numel() * like.itemsize):
        raise WireError(
            f"{len(body)} bytes, expected {expected} for {tuple(like.shape)} in "
            f"{like.dtype}, as the server sent it: train a model of that dtype",
            field=field,
        )
    if like.dtype == torch.bool and len(body) and body.max() > 1:
        raise WireError("holds entries other than 0 and 1", field=field)
    tensor = torch.empty(like.shape, dtype=like.dtype)
    tensor.view(-1).view(torch.uint8).numpy()[:] = body
    if not tensor.isfinite().all():
        raise WireError("holds NaN or infinity", field=field)
    return tensor


# --- diagonals ------------------------------------------------------------------------


def size_of_diagonal(count: int, fine: int) -> int:
    """Return the size of :func:`encode_diagonal`'s entry."""
    return HEAD + SCALE + _FINE.size + count + fine


def encode_diagonal(tensor: Tensor, fine: int) -> Tensor:
    """Return the entry of values >= 0: `fine` of them in 16 bits, the others in 8."""
    scale, words = _to_words(_wide(tensor).abs_())
    few = torch.from_numpy(_spread(len(words), fine)).to(words.device)
    count = torch.frombuffer(bytearray(_FINE.pack(fine)), dtype=torch.uint8)
    # The leading 8 bits, but for the sign, are rounded, and not up to infinity.
    rounded = (words[few].to(torch.int32) + (1 << (_DROPPED - 1))) >> _DROPPED
    body = [
        to_bytes(scale),
        count.to(words.device),
        pack(words[~few], 16),
        pack(rounded.clamp_(max=(_INFINITY - 1) >> _DROPPED), 8),
    ]
    return entry_of(Packing.FLOAT, 16, torch.cat(body))


def decode_diagonal(
    body: Bytes, count: int, dtype: torch.dtype, *, field: str
) -> Tensor:
    """Return the values of a body, ``[count]``.

    Raises
    ------
    WireError
        If the body is not valid, or has a negative value.
    """
    start = SCALE + _FINE.size
    if len(body) < start:
        raise WireError(f"{len(body)} bytes, expected {start} and codes", field=field)
    (fine,) = _FINE.unpack_from(body.data, SCALE)
    if fine > count:
        raise WireError(f"{fine} values with more bits, of {count}", field=field)
    _check_size(body, size_of_diagonal(count, fine) - HEAD, field)
    end = start + packed_size(fine, 16)
    few = (_spread if count > _KEPT else _known_spread)(count, fine)
    words = np.empty(count, np.uint16)
    words[~few] = body[start:end].view(np.uint16)
    words[few] = body[end:].astype(np.uint16) << _DROPPED
    # A sign is the first bit, and infinity the largest of the others.
    if count and words.max() >= _INFINITY:
        raise WireError("must not be negative, NaN or infinity", field=field)
    return _from_half(body[:SCALE], words.view(np.float16), dtype, field)


def _spread(count: int, fine: int) -> NDArray[np.bool_]:
    """Return which values have fewer bits: they are spread evenly over all."""
    few, coarse = np.zeros(count, np.bool_), count - fine
    few[(np.arange(1, coarse + 1) * count - 1) // max(coarse, 1)] = True
    return few


_known_spread = lru_cache(256)(_spread)


# --- floats ---------------------------------------------------------------------------


def _to_words(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return a scale, and values relative to it as float16's bits, in int16."""
    top = flat.abs().amax() if len(flat) else flat.new_zeros(())
    scale = (top / 2**_TOP).clamp(max=_LARGEST).float()
    ratio = flat / torch.where(scale > 0, scale, torch.inf).to(flat.dtype)
    return scale, ratio.clamp_(-_HALF, _HALF).to(torch.float16).view(torch.int16)


def _from_half(
    scale: Bytes, half: NDArray[np.float16], dtype: torch.dtype, field: str
) -> Tensor:
    working = np.float64 if dtype == torch.float64 else np.float32
    values: NDArray[np.floating] = half.astype(working)
    (factor,), limit = as_scales(scale, field), torch.finfo(dtype).max
    with np.errstate(over="ignore"):
        values *= factor
    if float(factor) * _HALF > limit:
        values.clip(-limit, limit, out=values)
    return torch.from_numpy(values).to(dtype)


# --- rows -----------------------------------------------------------------------------


def _encode_rows(flat: Tensor, bits: int) -> Tensor:
    rows = pad(flat, (0, -len(flat) % ROW)).view(-1, ROW)
    scales = rows.abs().amax(-1, keepdim=True).clamp_(max=_LARGEST).float()
    ratio = rows / torch.where(scales > 0, scales, torch.inf).to(rows.dtype)
    codes = (ratio.clamp_(-1, 1) * levels(bits)).round_().to(torch.int8)
    return torch.cat([to_bytes(scales), pack(codes.view(-1)[: len(flat)], bits)])


def _decode_rows(
    body: Bytes, count: int, dtype: torch.dtype, bits: int, field: str
) -> Tensor:
    head = SCALE * -(-count // ROW)
    _check_size(body, head + packed_size(count, bits), field)
    scales = torch.from_numpy(as_scales(body[:head], field)).unsqueeze(-1)
    codes = torch.from_numpy(unpack(body[head:], bits))
    rows = pad(codes, (0, -count % ROW)).view(-1, ROW).to(_working(dtype))
    # Divide first: a code times its scale could overflow. One code is below -c.
    values = rows.div_(levels(bits)).clamp_(-1, 1).mul_(scales)
    limit = torch.finfo(dtype).max
    return values.view(-1)[:count].clamp_(-limit, limit).to(dtype)


def _check_size(body: Bytes, expected: int, field: str) -> None:
    if len(body) != expected:
        raise WireError(f"{len(body)} bytes, expected {expected}", field=field)


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _wide(tensor: Tensor) -> Tensor:
    """Return a flat copy in float32 or float64."""
    return tensor.detach().reshape(-1).to(_working(tensor.dtype), copy=True)
