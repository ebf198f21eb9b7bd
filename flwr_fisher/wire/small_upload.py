"""The entries of a small upload read together, where each alone costs mostly overhead.

What ``unpack_params`` and ``check_part`` of :mod:`flwr_fisher.wire.packing` do takes
some thirty operations an entry, whatever its size. Here the entries of the usual form
are laid side by side and take them once. Whatever is unusual, or wrong, is left to
those two functions, which name it.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from flwr_fisher.params import Params
from flwr_fisher.wire import packing
from flwr_fisher.wire.bits import largest_level, packed_size, unpack
from flwr_fisher.wire.checks import are_finite_and_not_negative
from flwr_fisher.wire.coded_matrices import WholeMatrices
from flwr_fisher.wire.layout import Part, check_shape, parse_key
from flwr_fisher.wire.packing import CheckedPart, Form
from flwr_fisher.wire.quantise import BLOCK

_WIDE = 16  # bits of a parameter within FedAvg's size
_FLOAT = 4  # bytes of a scale


def unpack_all_params(entries: Params, like: Params) -> dict[str, Tensor]:
    """Return what ``unpack_params`` does of every entry, in the order of `like`."""
    usual = [key for key in like if _is_wide(entries[key], like[key])]
    values = _wide_values([entries[key] for key in usual]) if usual else None
    made: dict[str, Tensor] = {}
    if values is not None:
        ends = np.cumsum([_blocks(like[key]) * BLOCK for key in usual])
        for key, end in zip(usual, ends.tolist(), strict=True):
            start = end - _blocks(like[key]) * BLOCK
            own = values[start : start + like[key].numel()]
            made[key] = own.view(like[key].shape)
    return {
        key: made[key]
        if key in made
        else packing.unpack_params(entries[key], like[key], field=key)
        for key in like
    }


def _blocks(like: Tensor) -> int:
    return -(-like.numel() // BLOCK)


def _is_wide(entry: Tensor, like: Tensor) -> bool:
    """Return whether an entry has float32 as codes of 16 bits, and its right size."""
    size = 2 + _FLOAT * _blocks(like) + 2 * like.numel()
    return (
        like.dtype == torch.float32
        and len(entry) == size > 2
        and entry[:2].tolist() == [Form.LINEAR, _WIDE]
    )


def _wide_values(entries: list[Tensor]) -> Tensor | None:
    """Return all values, padded to whole blocks; None if a byte is not as it should."""
    scales, codes = [], []
    for entry in entries:
        data = entry.numpy()
        # Of each block, 4 bytes of scale and 512 of codes, of which the last has fewer.
        blocks = -(-(len(data) - 2) // (_FLOAT + 2 * BLOCK))
        end = 2 + _FLOAT * blocks
        scales.append(data[2:end])
        codes += [data[end:], np.zeros(-(len(data) - end) % (2 * BLOCK), np.uint8)]
    levels, c = np.concatenate(codes).view(np.uint16), largest_level(_WIDE)
    scale = np.concatenate(scales).view(np.float32)
    if not are_finite_and_not_negative(torch.from_numpy(scale)):
        return None
    if levels.max() > 2 * c:
        return None
    values = levels.astype(np.float32).reshape(-1, BLOCK)
    values -= c
    values /= np.float32(c)
    values *= scale[:, None]
    return torch.from_numpy(values.reshape(-1))


def check_all_parts(entries: Params, params: Params) -> dict[str, CheckedPart]:
    """Return what ``check_part`` does of every entry, in the same order."""
    batches: dict[int, dict[str, tuple[int, int]]] = {}
    for key, entry in entries.items():
        part, names = parse_key(key, params)
        if part != Part.FACTOR or len(entry) < packing.HEAD:
            continue
        form, bits, groups, n, _ = packing.LONG.unpack_from(entry.numpy().data)
        if (
            form == Form.WHOLE
            and 2 <= bits <= 8
            and params[names[0]].dtype == torch.float32
        ):
            check_shape(key, (groups, n, n), params)
            count = groups * n * (n + 1) // 2
            size = packing.HEAD + _FLOAT * groups * n + packed_size(count, bits)
            if len(entry) == size > packing.HEAD:
                batches.setdefault(bits, {})[key] = (groups, n)
    checked: dict[str, CheckedPart] = {}
    for bits, sizes in batches.items():
        checked |= _whole(entries, sizes, bits)
    return {
        key: checked[key]
        if key in checked
        else packing.check_part(entry, params, field=key)
        for key, entry in entries.items()
    }


def _whole(
    entries: Params, sizes: dict[str, tuple[int, int]], bits: int
) -> Iterator[tuple[str, CheckedPart]]:
    """Yield the factors that came whole; none if a byte is not as it should be."""
    heads, bodies = [], []
    for key, (groups, n) in sizes.items():
        data = entries[key].numpy()
        end = packing.HEAD + _FLOAT * groups * n
        heads.append(data[packing.HEAD : end])
        # Eight codes fill whole bytes: each factor's begin with a new eight.
        bodies += [data[end:], np.zeros(-(len(data) - end) % bits, np.uint8)]
    norms, stream = np.concatenate(heads).view(np.float32), np.concatenate(bodies)
    count, centre = 8 * (len(stream) // bits), largest_level(bits)
    codes = unpack(torch.from_numpy(stream), bits, count).numpy()
    lengths, at, of_norms = torch.from_numpy(norms), 0, 0
    fits = are_finite_and_not_negative(lengths)
    # Whose squares do not overflow, with more room for rounding than `check_part` has.
    fits = fits and 1.002 * float(norms.max()) ** 2 < torch.finfo(torch.float32).max
    if not fits or codes.max() > 2 * centre:
        return
    signed = torch.from_numpy((codes - centre).astype(np.int8))
    squares = norms.astype(np.float64) ** 2
    for key, (groups, n) in sizes.items():
        each = n * (n + 1) // 2
        mine = slice(of_norms, of_norms + groups * n)
        whole = WholeMatrices(
            lengths[mine].view(groups, n),
            signed[at : at + groups * each].view(groups, each),
            squares[mine].reshape(groups, n).sum(-1).tolist(),
        )
        shape = (groups, n, n)
        yield key, CheckedPart(shape, torch.float32, whole.factor, whole.traces)
        of_norms, at = of_norms + groups * n, at + 8 * -(-groups * each // 8)
