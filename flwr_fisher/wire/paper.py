r"""The compression of FedFisher's Appendix C, with packed bytes, for comparison.

Parameters and diagonals: sign and magnitude, :math:`\lceil l |x| / m \rceil / l` with m
the tensor's largest magnitude and :math:`l = 2^{b-1} - 1`, at :math:`b = 16`. Kronecker
factors: U, S and V of the truncated singular value decomposition, each compressed in
the same way at :math:`b = 8`. All factors have the same rank, the largest within the
budget. (The paper counts only the codes; here keys, scales and heads count as well.)
The product of three rounded matrices is neither symmetric nor positive semi-definite,
so the nearest matrix that is both replaces it after decoding.
"""

import struct

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.bits import pack, packed_size, unpack
from flwr_fisher.wire.checks import to_finite
from flwr_fisher.wire.container import container_bytes
from flwr_fisher.wire.layout import PREFIX, Part, check_shape, parse_key

__all__ = ["least_bytes_as_paper", "pack_as_paper", "unpack_as_paper"]

_HEAD = struct.Struct("<III")  # groups, n, rank
_PARAMS, _FACTORS = 16, 8  # bits
_SCALE = 4  # bytes


def pack_as_paper(params: Params, parts: Params, limit: int) -> dict[str, Tensor]:
    """Pack parameters and their curvature, diagonal or K-FAC, into `limit` bytes.

    Raises
    ------
    ConfigurationError
        If the curvature is of another structure, or not even rank 0 fits.
    """
    kinds = {key: parse_key(key, params)[0] for key in parts}
    if odd := [k for k, v in kinds.items() if v not in (Part.DIAGONAL, Part.FACTOR)]:
        raise ConfigurationError(f"codec 'paper' has no form for '{odd[0]}'")
    entries = {key: _pack_values(value) for key, value in params.items()}
    factors = {}
    for key, value in parts.items():
        if kinds[key] == Part.FACTOR:
            factors[key] = value
        else:
            entries[key] = _quantised(value, _PARAMS)
    rank = _rank(entries, factors, limit)
    return entries | {k: _pack_factor(v, rank) for k, v in factors.items()}


def least_bytes_as_paper(params: Params) -> int:
    """Return bytes that are enough for a diagonal, and for factors of rank 0."""
    diagonal: dict[str, int] = {}
    kfac: dict[str, int] = {}
    for key, tensor in params.items():
        floats = tensor.is_floating_point()
        size = (
            _SCALE + packed_size(tensor.numel(), _PARAMS) if floats else tensor.nbytes
        )
        diagonal[key] = kfac[key] = size
        if floats:
            diagonal[f"{PREFIX}diagonal/{key}"] = size
        if floats and tensor.dim() > 1:
            kfac[f"{PREFIX}kfac/{key}/A"] = _factor_size(1, 1, 0)
            kfac[f"{PREFIX}kfac/{key}/G"] = _factor_size(1, 1, 0)
        elif floats:
            kfac[f"{PREFIX}diagonal/{key}"] = size
    return max(container_bytes(diagonal), container_bytes(kfac))


def unpack_as_paper(entries: Params, like: Params) -> dict[str, Tensor]:
    """Undo :func:`pack_as_paper`, with every check.

    Raises
    ------
    WireError
        Naming the entry that is wrong.
    """
    return {
        key: _unpack_part(key, entry, like)
        if key.startswith(PREFIX)
        else _unpack_values(key, entry, like[key])
        for key, entry in entries.items()
    }


def _rank(entries: Params, factors: Params, limit: int) -> int:
    sizes = {key: len(entry) for key, entry in entries.items()}
    for rank in range(max((f.shape[-1] for f in factors.values()), default=0), -1, -1):
        spent = {
            k: _factor_size(f.shape[0], f.shape[1], rank) for k, f in factors.items()
        }
        if container_bytes({**sizes, **spent}) <= limit:
            return rank
    raise ConfigurationError("codec 'paper' cannot hold this model: use 'lossless'")


def _factor_size(groups: int, n: int, rank: int) -> int:
    rank = min(rank, n)
    sides = 2 * (_SCALE + packed_size(groups * n * rank, _FACTORS))
    return _HEAD.size + sides + _SCALE + packed_size(groups * rank, _FACTORS)


def _pack_values(value: Tensor) -> Tensor:
    if value.is_floating_point():
        return _quantised(value, _PARAMS)
    return value.detach().contiguous().view(-1).view(torch.uint8)


def _unpack_values(key: str, entry: Tensor, like: Tensor) -> Tensor:
    if like.is_floating_point():
        values, rest = _dequantised(entry, like.numel(), _PARAMS, key)
        _check_end(rest, key)
        return to_finite(values, like.dtype, field=key).view(like.shape)
    if len(entry) != like.numel() * like.itemsize:
        raise WireError(f"{len(entry)} bytes", field=key)
    if like.dtype == torch.bool and len(entry) and entry.max() > 1:
        raise WireError("holds what is no bool", field=key)
    return entry.clone().view(like.dtype).view(like.shape)


def _pack_factor(factor: Tensor, rank: int) -> Tensor:
    U, S, Vh = torch.linalg.svd(factor.float())
    rank = min(rank, factor.shape[-1])
    head = torch.frombuffer(
        bytearray(_HEAD.pack(*factor.shape[:2], rank)), dtype=torch.uint8
    )
    sides = (U[..., :rank], S[..., :rank], Vh[..., :rank, :])
    return torch.cat([head, *(_quantised(side, _FACTORS).cpu() for side in sides)])


def _unpack_part(key: str, entry: Tensor, like: Params) -> Tensor:
    part, names = parse_key(key, like)
    dtype = like[names[0]].dtype
    if part == Part.DIAGONAL:
        shape = like[names[0]].shape
        values, rest = _dequantised(entry, shape.numel(), _PARAMS, key)
        _check_end(rest, key)
        return to_finite(values, dtype, field=key).view(shape)
    if part != Part.FACTOR or len(entry) < _HEAD.size:
        raise WireError("no form of codec 'paper'", field=key)
    groups, n, rank = _HEAD.unpack(entry[: _HEAD.size].numpy().tobytes())
    check_shape(key, (groups, n, n), like)
    if rank > n:
        raise WireError(f"rank {rank} of a matrix with {n} rows", field=key)
    U, rest = _dequantised(entry[_HEAD.size :], groups * n * rank, _FACTORS, key)
    S, rest = _dequantised(rest, groups * rank, _FACTORS, key)
    V, rest = _dequantised(rest, groups * n * rank, _FACTORS, key)
    _check_end(rest, key)
    left, right = U.view(groups, n, rank), V.view(groups, rank, n)
    product = left * S.view(groups, 1, rank) @ right
    if not product.isfinite().all():
        raise WireError("its values overflow", field=key)
    return to_finite(_nearest_psd(product), dtype, field=key)


def _nearest_psd(matrices: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((matrices / 2 + matrices.mT / 2).double())
    kept: Tensor = vectors * values.clamp_min(0).unsqueeze(-2) @ vectors.mT
    return ((kept + kept.mT) / 2).float()


def _quantised(values: Tensor, bits: int) -> Tensor:
    flat = values.detach().reshape(-1).float()
    levels = (1 << (bits - 1)) - 1
    scale = flat.abs().max() if len(flat) else flat.new_zeros(())
    ratio = flat.abs() / (scale if scale > 0 else 1)
    codes = (ratio * levels).ceil().clamp_max(levels) * flat.sign() + levels
    packed = pack(codes.to(torch.int32), bits)
    return torch.cat([scale.reshape(1).view(torch.uint8), packed])


def _dequantised(
    data: Tensor, count: int, bits: int, field: str
) -> tuple[Tensor, Tensor]:
    """Return the values at the beginning of the data, and the rest of the data."""
    end = _SCALE + packed_size(count, bits)
    if len(data) < end:
        raise WireError(f"{len(data)} bytes, expected {end}", field=field)
    scale = data[:_SCALE].clone().view(torch.float32)
    if not (scale.isfinite() & (scale >= 0)).all():
        raise WireError("holds a scale that is negative or not finite", field=field)
    levels = (1 << (bits - 1)) - 1
    codes = unpack(data[_SCALE:end], bits, count)
    if count and codes.max() > 2 * levels:
        raise WireError("holds a code that stands for no value", field=field)
    return (codes - levels) / levels * scale, data[end:]


def _check_end(rest: Tensor, field: str) -> None:
    if len(rest):
        raise WireError(f"{len(rest)} bytes too many", field=field)
