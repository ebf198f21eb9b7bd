r"""The compression of FedFisher's Appendix C, with packed bytes, for comparison.

Parameters and diagonals: sign and magnitude, :math:`\lceil l |x| / m \rceil / l` with m
the tensor's largest magnitude and :math:`l = 2^{b-1} - 1`, at :math:`b = 16`. Kronecker
factors: U, S and V of the truncated singular value decomposition, each compressed in
the same way at :math:`b = 8`. All factors have the same rank, the largest within the
budget. (The paper counts only the codes; here keys, scales and heads count as well.)
The product of three rounded matrices is neither symmetric nor positive semi-definite,
so the nearest matrix that is both replaces it after decoding.
"""

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.bits import (
    as_bytes,
    largest_level,
    pack,
    packed_size,
    unpack_codes,
)
from flwr_fisher.wire.checks import sum64, to_finite
from flwr_fisher.wire.container import container_bytes
from flwr_fisher.wire.layout import PREFIX, Part, check_shape, parse_key
from flwr_fisher.wire.packing import CheckedPart, entry_of, raw
from flwr_fisher.wire.read_curvature import check_values

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
    for key, kind in kinds.items():
        if kind not in (Part.DIAGONAL, Part.FACTOR):
            raise ConfigurationError(f"codec 'paper' has no form for '{key}'")
    factors = {k: v for k, v in parts.items() if kinds[k] == Part.FACTOR}
    diagonals = {k: v for k, v in parts.items() if k not in factors}
    entries = {
        key: _quantised(value, _PARAMS)
        if value.is_floating_point()
        else as_bytes(value)
        for key, value in {**params, **diagonals}.items()
    }
    rank = _rank(entries, factors, limit)
    return entries | {k: _pack_factor(v, rank) for k, v in factors.items()}


def least_bytes_as_paper(params: Params) -> int:
    """Return bytes that are enough for a diagonal, and for factors of rank 0."""
    diagonal: dict[str, int] = {}
    kfac: dict[str, int] = {}
    for key, tensor in params.items():
        if not tensor.is_floating_point():
            diagonal[key] = kfac[key] = tensor.nbytes
            continue
        size = _SCALE + packed_size(tensor.numel(), _PARAMS)
        of_diagonal = {key: size, f"{PREFIX}diagonal/{key}": size}
        diagonal |= of_diagonal
        if tensor.dim() > 1:
            factors = (f"{PREFIX}kfac/{key}/A", f"{PREFIX}kfac/{key}/G")
            kfac |= {key: size, **dict.fromkeys(factors, _factor_size((1, 1), 0))}
        else:
            kfac |= of_diagonal
    return max(container_bytes(diagonal), container_bytes(kfac))


def _rank(entries: Params, factors: Params, limit: int) -> int:
    sizes = {key: len(entry) for key, entry in entries.items()}
    for rank in range(max((f.shape[-1] for f in factors.values()), default=0), -1, -1):
        spent = {k: _factor_size(f.shape, rank) for k, f in factors.items()}
        if container_bytes({**sizes, **spent}) <= limit:
            return rank
    raise ConfigurationError("codec 'paper' cannot hold this model: use 'lossless'")


def _factor_size(shape: Sequence[int], rank: int) -> int:
    groups, n = shape[:2]
    rank = min(rank, n)
    sides = 2 * (_SCALE + packed_size(groups * n * rank, _FACTORS))
    return _HEAD.size + sides + _SCALE + packed_size(groups * rank, _FACTORS)


def _pack_factor(factor: Tensor, rank: int) -> Tensor:
    U, S, Vh = torch.linalg.svd(factor.float())
    rank = min(rank, factor.shape[-1])
    sides = (U[..., :rank], S[..., :rank], Vh[..., :rank, :])
    body = torch.cat([_quantised(side, _FACTORS).cpu() for side in sides])
    return entry_of(_HEAD.pack(*factor.shape[:2], rank), body)


def unpack_params(entry: Tensor, like: Tensor, *, field: str) -> Tensor:
    """Read a parameter of the shape and dtype of `like`; a diagonal is packed so, too.

    Raises
    ------
    WireError
        Naming the entry that is wrong.
    """
    if not like.is_floating_point():
        if len(entry) != like.numel() * like.itemsize:
            raise WireError(f"{len(entry)} bytes", field=field)
        return raw(entry, like, field=field)
    (values,) = _dequantised(entry, [like.shape], _PARAMS, field)
    return to_finite(values, like.dtype, field=field)


def unpack_part(entry: Tensor, params: Params, *, field: str) -> Tensor:
    """Read a part of a curvature over `params`.

    Raises
    ------
    WireError
        Naming the entry that is wrong.
    """
    part, names = parse_key(field, params)
    if part == Part.DIAGONAL:
        return unpack_params(entry, params[names[0]], field=field)
    if part != Part.FACTOR or len(entry) < _HEAD.size:
        raise WireError("no form of codec 'paper'", field=field)
    groups, n, rank = _HEAD.unpack(entry[: _HEAD.size].numpy().tobytes())
    check_shape(field, (groups, n, n), params)
    if rank > n:
        raise WireError(f"rank {rank} of a matrix with {n} rows", field=field)
    sides = [(groups, n, rank), (groups, 1, rank), (groups, rank, n)]
    U, S, Vh = _dequantised(entry[_HEAD.size :], sides, _FACTORS, field)
    product = U * S @ Vh
    if not product.isfinite().all():
        raise WireError("its values overflow", field=field)
    return to_finite(_nearest_psd(product), params[names[0]].dtype, field=field)


def check_part(entry: Tensor, params: Params, *, field: str) -> CheckedPart:
    """Check a part of a curvature by unpacking it.

    Raises
    ------
    WireError
        Naming the entry that is wrong.
    """
    part = unpack_part(entry, params, field=field)
    check_values(field, part, params)
    if parse_key(field, params)[0] == Part.DIAGONAL:
        traces = [sum64(part)]
    else:
        traces = part.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64).tolist()
    return CheckedPart(tuple(part.shape), part.dtype, lambda: part, traces)


def _nearest_psd(matrices: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((matrices / 2 + matrices.mT / 2).double())
    kept: Tensor = vectors * values.clamp_min(0).unsqueeze(-2) @ vectors.mT
    return ((kept + kept.mT) / 2).float()


def _quantised(values: Tensor, bits: int) -> Tensor:
    flat = values.detach().reshape(-1).float()
    levels = largest_level(bits)
    scale = flat.abs().max() if len(flat) else flat.new_zeros(())
    ratio = flat.abs() / (scale if scale > 0 else 1)
    codes = (ratio * levels).ceil().clamp_max(levels) * flat.sign() + levels
    return torch.cat([as_bytes(scale), pack(codes.to(torch.int32), bits)])


def _dequantised(
    data: Tensor, shapes: Sequence[Sequence[int]], bits: int, field: str
) -> list[Tensor]:
    """Return the tensors of these shapes that the data are."""
    levels, tensors = largest_level(bits), []
    for shape in shapes:
        count = math.prod(shape)
        end = _SCALE + packed_size(count, bits)
        if len(data) < end:
            raise WireError(f"{len(data)} bytes, expected {end}", field=field)
        scale = data[:_SCALE].clone().view(torch.float32)
        if not (scale.isfinite() & (scale >= 0)).all():
            raise WireError("holds a scale that is negative or not finite", field=field)
        codes = unpack_codes(data[_SCALE:end], bits, count, 2 * levels, field=field)
        tensors.append(((codes - levels) / levels * scale).view(tuple(shape)))
        data = data[end:]
    if len(data):
        raise WireError(f"{len(data)} bytes too many", field=field)
    return tensors
