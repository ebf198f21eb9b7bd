r"""The compression of FedFisher's Appendix C, as real bytes.

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
from collections.abc import Mapping, Sequence

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.curvature.structures import Form
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.files import to_bytes
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import Params
from flwr_fisher.wire import curvature_to_tensors
from flwr_fisher.wire.arrays import fedavg_bytes
from flwr_fisher.wire.codec import container_bytes, from_container, to_container
from flwr_fisher.wire.layout import Key, block_of, join_blocks, keys_by_block
from flwr_fisher.wire.quantise import levels, pack, packed_size, unpack

_HEAD = struct.Struct("<III")  # groups, n, rank
_PARAMS, _FACTORS = 16, 8  # bits
_SCALE = 4  # bytes


def pack_as_paper(client: LocalPosterior) -> ArrayRecord:
    """Return parameters and a diagonal or K-FAC curvature in FedAvg's bytes.

    Raises
    ------
    ConfigurationError
        If not even rank 0 fits.
    """
    params, parts = client.params, curvature_to_tensors(client.curvature)
    forms = {key: Key.parse(key, params).form for key in parts}
    factors = {k: v for k, v in parts.items() if forms[k] == Form.MATRIX}
    entries = {
        key: _quantised(value, _PARAMS)
        if value.is_floating_point()
        else to_bytes(value)
        for key, value in {**params, **parts}.items()
        if key not in factors
    }
    rank = _rank(entries, factors, fedavg_bytes(params))
    return to_container(
        entries | {key: _packed(value, rank) for key, value in factors.items()}
    )


def unpack_as_paper(record: ArrayRecord, client: LocalPosterior) -> LocalPosterior:
    """Undo :func:`pack_as_paper`, for the client that sent it."""
    like = client.params
    read = from_container(record, limit=1 << 40, count=len(like))
    entries = {key: torch.from_numpy(entry.copy()) for key, entry in read.items()}
    params = {key: _unpacked_param(entries.pop(key), like[key]) for key in like}
    parts = {key: _unpacked_part(key, entry, like) for key, entry in entries.items()}
    blocks = [
        block_of({key: parts[key] for key in keys}, like)
        for keys in keys_by_block(parts, like)
    ]
    return LocalPosterior(params, join_blocks(blocks), client.num_examples)


def _rank(entries: Params, factors: Params, limit: int) -> int:
    sizes = {key: len(entry) for key, entry in entries.items()}
    for rank in range(max((f.shape[-1] for f in factors.values()), default=0), -1, -1):
        spent = {k: _factor_size(f.shape, rank) for k, f in factors.items()}
        if container_bytes({**sizes, **spent}) <= limit:
            return rank
    raise ConfigurationError("the paper's codec cannot hold this model")


def _factor_size(shape: Sequence[int], rank: int) -> int:
    groups, n = shape[:2]
    rank = min(rank, n)
    sides = 2 * (_SCALE + packed_size(groups * n * rank, _FACTORS))
    return _HEAD.size + sides + _SCALE + packed_size(groups * rank, _FACTORS)


def _packed(factor: Tensor, rank: int) -> Tensor:
    U, S, Vh = torch.linalg.svd(factor.float())
    rank = min(rank, factor.shape[-1])
    sides = (U[..., :rank], S[..., :rank], Vh[..., :rank, :])
    head = bytearray(_HEAD.pack(*factor.shape[:2], rank))
    body = [_quantised(side, _FACTORS) for side in sides]
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8), *body])


def _unpacked_param(entry: Tensor, like: Tensor) -> Tensor:
    if not like.is_floating_point():
        return entry.view(like.dtype).view(like.shape)
    (values,) = _dequantised(entry, [like.shape], _PARAMS)
    return values.to(like.dtype)


def _unpacked_part(key: str, entry: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    parsed = Key.parse(key, params)
    if parsed.form == Form.VECTOR:
        return _unpacked_param(entry, params[parsed.name])
    groups, n, rank = _HEAD.unpack(entry[: _HEAD.size].numpy().tobytes())
    sides = [(groups, n, rank), (groups, 1, rank), (groups, rank, n)]
    U, S, Vh = _dequantised(entry[_HEAD.size :], sides, _FACTORS)
    return _nearest_psd(U * S @ Vh).to(params[parsed.name].dtype)


def _nearest_psd(matrices: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((matrices / 2 + matrices.mT / 2).double())
    # As a square, rounded: rounding the product would make small eigenvalues negative.
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).float()
    return root @ root.mT


def _quantised(values: Tensor, bits: int) -> Tensor:
    flat = values.detach().reshape(-1).float()
    scale = flat.abs().max() if len(flat) else flat.new_zeros(())
    ratio = flat.abs() / (scale if scale > 0 else 1)
    codes = (ratio * levels(bits)).ceil().clamp_max(levels(bits)) * flat.sign()
    return torch.cat([to_bytes(scale), pack(codes.to(torch.int16), bits)])


def _dequantised(
    data: Tensor, shapes: Sequence[Sequence[int]], bits: int
) -> list[Tensor]:
    """Return the tensors of these shapes that the data are."""
    tensors = []
    for shape in shapes:
        count = math.prod(shape)
        end = _SCALE + packed_size(count, bits)
        scale = data[:_SCALE].clone().view(torch.float32)
        codes = torch.from_numpy(unpack(data[_SCALE:end].numpy(), bits))
        tensors.append((codes / levels(bits) * scale).view(tuple(shape)))
        data = data[end:]
    return tensors
