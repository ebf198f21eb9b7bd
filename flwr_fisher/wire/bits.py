"""Small unsigned integers (codes) packed into bytes without gaps.

The bits are in little-endian order: code i occupies the bits ``i * bits`` to
``(i + 1) * bits - 1``, its lowest first, and bit j of the stream is bit ``j % 8`` of
byte ``j // 8``, counted from the lowest. Unused bits of the last byte are zero. The
host must be little-endian, too.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from flwr_fisher.errors import WireError, check_range

_GROUP = 8  # codes; the fewest that fill whole bytes whatever their width
_WORD = 64  # bits
_AT_ONCE = 1 << 16  # groups that are unpacked at once: their words take 4 MiB


def packed_size(count: int, bits: int) -> int:
    """Return how many bytes `count` codes of `bits` bits take.

    Examples
    --------
    >>> packed_size(3, 6)
    3
    """
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into bytes.

    Parameters
    ----------
    codes : Tensor
        ``[n]``, of any integer dtype, each in ``[0, 2**bits)``. This is not checked: a
        larger code would overwrite its neighbours' bits.
    bits : int
        From 1 to 16.

    Returns
    -------
    Tensor
        uint8, ``[packed_size(n, bits)]``, on the codes' device.

    Raises
    ------
    ConfigurationError
        If `bits` is out of range.

    Examples
    --------
    >>> pack(torch.tensor([1, 2, 3]), 6)  # 000011 000010 000001, read from the right
    tensor([129,  48,   0], dtype=torch.uint8)
    """
    check_range("bits", bits, 1, 16)
    if bits == 8:
        return codes.to(torch.uint8)
    if bits == 16:
        return codes.to(torch.int16).view(torch.uint8)
    groups = pad(codes, (0, -len(codes) % _GROUP)).view(-1, _GROUP)
    words = codes.new_zeros(len(groups), _words(bits), dtype=torch.int64)
    for i in range(_GROUP):
        code = groups[:, i].to(torch.int64)
        word, shift = divmod(i * bits, _WORD)
        words[:, word] |= code << shift
        if shift + bits > _WORD:
            words[:, word + 1] |= code >> (_WORD - shift)
    stream = words.view(torch.uint8)[:, :bits]
    return stream.reshape(-1)[: packed_size(len(codes), bits)]


def unpack(data: Tensor, bits: int, count: int) -> Tensor:
    """Undo :func:`pack`.

    Parameters
    ----------
    data : Tensor
        uint8, ``[packed_size(count, bits)]``. Unused bits are ignored.
    bits : int
        From 1 to 16.
    count : int
        The number of codes.

    Returns
    -------
    Tensor
        int32, ``[count]``, on the data's device.

    Raises
    ------
    ConfigurationError
        If `bits` is out of range.
    ValueError
        If `data` has another size than `count` codes have, or another dtype.

    Examples
    --------
    >>> unpack(torch.tensor([129, 48, 0], dtype=torch.uint8), 6, 3)
    tensor([1, 2, 3], dtype=torch.int32)
    """
    if not 1 <= bits <= 16:  # the check itself takes as long as a small tensor
        check_range("bits", bits, 1, 16)
    size = packed_size(count, bits)
    if data.dtype != torch.uint8 or data.shape != (size,):
        raise ValueError(
            f"{count} codes of {bits} bits are torch.uint8 of shape ({size},), "
            f"got {data.dtype} of shape {tuple(data.shape)}"
        )
    if bits == 8:
        return data.to(torch.int32)
    if bits == 16:
        # A view as wider numbers needs aligned bytes, which a clone has.
        wide = data.clone(memory_format=torch.contiguous_format).view(torch.int16)
        return wide.to(torch.int32) & 0xFFFF
    codes = data.new_empty(-(-count // _GROUP), _GROUP, dtype=torch.int32)
    stream = data.new_zeros(len(codes), _words(bits) * _WORD // 8)
    on_cpu = data.device.type == "cpu"
    # NumPy takes a fraction of torch's time where there are few codes.
    arrays: tuple[Any, Any, Any] = (data, stream, codes)
    if on_cpu:
        arrays = (data.numpy(), stream.numpy(), codes.numpy())
    _unpack_groups(arrays, bits, _places(bits, None if on_cpu else data.device))
    return codes.view(-1)[:count]


def _unpack_groups(arrays: tuple[Any, Any, Any], bits: int, places: Any) -> None:
    """Fill ``codes [groups, 8]``, by way of ``stream [groups, bytes]`` of zeros.

    The data and these are all tensors, or all NumPy's arrays.
    """
    data, stream, codes = arrays
    word, shifts, masks = places
    whole, rest = divmod(len(data), bits)
    stream[:whole, :bits] = data[: whole * bits].reshape(whole, bits)
    if rest:
        stream[whole, :rest] = data[whole * bits :]
    words = stream.view(torch.int64 if isinstance(stream, Tensor) else np.int64)
    cut = _WORD // bits  # the code that begins in one word and ends in the next
    held = _WORD % bits if bits > _GROUP else 0
    for start in range(0, len(words), _AT_ONCE):
        some = words[start : start + _AT_ONCE]
        code = (some[:, word] if bits > _GROUP else some) >> shifts
        code &= masks
        if held:
            code[:, cut] |= (some[:, 1] << held) & ((1 << bits) - 1)
        codes[start : start + _AT_ONCE] = code


@lru_cache
def _places(bits: int, device: torch.device | None) -> Any:
    """Return a group's codes' words, their shifts there, and masks of their bits.

    They are tensors on a device, or NumPy's arrays. The masks also clear the sign bits
    that a right shift copies in.
    """
    starts = [divmod(i * bits, _WORD) for i in range(_GROUP)]
    word, shifts = zip(*starts, strict=True)
    masks = [(1 << min(bits, _WORD - shift)) - 1 for shift in shifts]
    where = np.array([word, shifts, masks])
    return where if device is None else torch.from_numpy(where).to(device)


def unpack_codes(
    data: Tensor, bits: int, count: int, largest: int, *, field: str
) -> Tensor:
    """Undo :func:`pack` for codes from 0 to `largest`; the data are not trusted.

    Raises
    ------
    WireError
        If a code is larger.
    """
    codes = unpack(data, bits, count)
    if count and largest < (1 << bits) - 1 and int(_largest(codes)) > largest:
        raise WireError("holds a code that stands for no value", field=field)
    return codes


def _largest(codes: Tensor) -> Any:
    return codes.numpy().max() if codes.device.type == "cpu" else codes.max()


def largest_level(bits: int) -> int:
    """Return c, where codes from 0 to 2c stand for the levels from -c to c."""
    return (1 << (bits - 1)) - 1


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's own bytes, uint8 in one dimension."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _words(bits: int) -> int:
    """Return how many words a group of codes takes."""
    return -(-_GROUP * bits // _WORD)
