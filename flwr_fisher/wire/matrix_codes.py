r"""Symmetric positive semi-definite matrices in few bytes.

Such a matrix is a sum of outer products of vectors with themselves, and only the
vectors travel: as directions, whose entries are codes of a few bits, and norms in
float32. So the decoded matrix, too, is symmetric and positive semi-definite, whatever
the codes are. There are two choices of vectors:

``whole``
    the rows of the Cholesky factor, half of whose entries are zero; a large matrix
    stays that factor, in a quarter of its memory, and a small one is made of it;
``columns``
    the leading eigenvectors, and one number for all other directions: their mean
    eigenvalue, so that the trace is kept. They are read back as they travel, and
    nothing of the size n × n is made.

A direction's entries are scaled to its largest, rounded to ``2**bits - 1`` levels, and
read back as a unit vector. With :math:`\varepsilon = \sqrt n / (2^{b-1} - 1)` it is off
by at most :math:`\varepsilon` in norm, so a matrix sent whole by at most
:math:`(2\varepsilon + \varepsilon^2) \sqrt{M_{ii} M_{jj}}` at (i, j), and not at all on
the diagonal.
"""

import numpy as np
import torch
from torch import Tensor

from flwr_fisher.curvature.operators.factors import (
    LowRankFactor,
    SymmetricFactor,
)
from flwr_fisher.errors import WireError
from flwr_fisher.wire.bits import (
    as_bytes,
    largest_level,
    pack,
    packed_size,
    unpack_codes,
)
from flwr_fisher.wire.checks import are_finite_and_not_negative
from flwr_fisher.wire.coded_matrices import ColumnMatrices, WholeMatrices, directions

_JITTER = 1e-6  # of a unit diagonal; a tenth of a step at 16 bits
_FLOAT = 4  # bytes


def size_of_whole(groups: int, n: int, bits: int) -> int:
    """Return the bytes that ``[groups, n, n]`` takes whole."""
    return groups * n * _FLOAT + packed_size(groups * n * (n + 1) // 2, bits)


def encode_whole(matrices: Tensor, bits: int) -> Tensor:
    """Encode ``[groups, n, n]`` by the rows of the Cholesky factors."""
    # The rows' norms are the roots of the diagonal, so factorise the correlations.
    norms = matrices.diagonal(dim1=-2, dim2=-1).clamp_min(0).double().sqrt()
    unit = torch.where(norms > 0, norms, 1)
    correlations = matrices.double() / unit.unsqueeze(-1) / unit.unsqueeze(-2)
    n = matrices.shape[-1]
    rows, columns = torch.tril_indices(n, n, device=matrices.device)
    codes = _codes(_cholesky(correlations), bits)[..., rows, columns]
    return torch.cat([as_bytes(norms.float()), pack(codes.reshape(-1), bits)])


def check_whole(
    data: Tensor, groups: int, n: int, bits: int, *, field: str
) -> WholeMatrices:
    """Check what :func:`encode_whole` made, without the matrices.

    Raises
    ------
    WireError
        If a norm or a code is none that :func:`encode_whole` writes.
    """
    norms, rest = _norms(data, (groups, n), field)
    count = n * (n + 1) // 2
    entries = _unpack(rest, groups * count, bits, field).view(groups, count)
    traces = norms.double().square_().sum(-1).tolist()
    whole = WholeMatrices(norms, entries, traces)
    if not are_finite_and_not_negative(whole.diagonal()):
        raise WireError("its norms overflow", field=field)
    return whole


def decode_whole(
    data: Tensor, groups: int, n: int, bits: int, *, field: str
) -> SymmetricFactor:
    """Undo :func:`encode_whole`; in float32, but a large one's codes stay integers."""
    return check_whole(data, groups, n, bits, field=field).factor()


def size_of_columns(groups: int, n: int, rank: int, bits: int) -> int:
    """Return the bytes that ``[groups, n, n]`` takes with `rank` eigenvectors each."""
    return groups * (rank + 1) * _FLOAT + size_of_basis(groups, n, rank, bits)


def encode_columns(
    values: Tensor, vectors: Tensor, trace: Tensor, rank: int, bits: int
) -> Tensor:
    """Encode matrices by their leading eigenvectors.

    Parameters
    ----------
    values : Tensor
        ``[groups, r]``, descending and not negative: the largest eigenvalues.
    vectors : Tensor
        ``[groups, n, r]``, their eigenvectors as columns.
    trace : Tensor
        ``[groups]``, the sum of all eigenvalues.
    rank, bits : int
        How many of them, and the bits of an entry.
    """
    n, leading = vectors.shape[-2], values[:, :rank].to(trace)
    left = (trace - leading.sum(-1)).clamp_min(0)
    # The mean of the smaller values is at most each larger value, up to rounding.
    tail = (left / max(n - rank, 1)).unsqueeze(-1) * (rank < n)
    above = (leading - tail).clamp_min(0).sqrt()
    norms = torch.cat([tail.sqrt(), above], -1)
    return torch.cat([as_bytes(norms.float()), encode_basis(vectors, rank, bits)])


def check_columns(
    data: Tensor, groups: int, n: int, rank: int, bits: int, *, field: str
) -> ColumnMatrices:
    """Check what :func:`encode_columns` made, without the matrices.

    Raises
    ------
    WireError
        If a norm or a code is none that :func:`encode_columns` writes.
    """
    norms, codes = _norms(data, (groups, rank + 1), field)
    entries = _unpack(codes, groups * n * rank, bits, field).view(groups, rank, n)
    squares = norms.double().square_()
    squares[:, 0] *= n
    cut = ColumnMatrices(norms, entries, squares.sum(-1).tolist())
    # But for rounding; most often that is enough to know.
    large = 1.001 * max(cut.traces, default=0.0) > torch.finfo(torch.float32).max
    if large and not are_finite_and_not_negative(cut.factor().diagonal()):
        raise WireError("its norms overflow", field=field)
    return cut


def decode_columns(
    data: Tensor, groups: int, n: int, rank: int, bits: int, *, field: str
) -> LowRankFactor:
    """Undo :func:`encode_columns`; in float32, but the codes stay integers."""
    return check_columns(data, groups, n, rank, bits, field=field).factor()


def size_of_basis(groups: int, n: int, rank: int, bits: int) -> int:
    """Return the bytes that the first `rank` of `n` unit vectors take."""
    return packed_size(groups * n * rank, bits)


def encode_basis(vectors: Tensor, rank: int, bits: int) -> Tensor:
    """Encode the first `rank` columns of ``[groups, n, n]``, which are unit vectors."""
    columns = vectors[..., :rank].mT
    return pack(_codes(columns, bits).reshape(-1), bits)


def check_basis(
    data: Tensor, groups: int, n: int, rank: int, bits: int, *, field: str
) -> Tensor:
    """Return :func:`encode_basis`'s signed entries, ``[groups, rank, n]``, checked."""
    return _unpack(data, groups * n * rank, bits, field).view(groups, rank, n)


def basis_of(entries: Tensor) -> Tensor:
    """Return the unit vectors that entries stand for, float32 ``[groups, n, rank]``."""
    return directions(entries).mT.contiguous()


def decode_basis(
    data: Tensor, groups: int, n: int, rank: int, bits: int, *, field: str
) -> Tensor:
    """Undo :func:`encode_basis`; float32 ``[groups, n, rank]``."""
    return basis_of(check_basis(data, groups, n, rank, bits, field=field))


def _cholesky(correlations: Tensor) -> Tensor:
    """Return lower triangular factors, also of matrices that are singular."""
    eye = torch.eye(correlations.shape[-1], dtype=torch.float64)
    jittered = correlations + _JITTER * eye.to(correlations.device)
    lower: Tensor
    lower, failed = torch.linalg.cholesky_ex(jittered)
    if not failed.any():
        return lower
    values, vectors = torch.linalg.eigh(correlations)
    root = values.clamp_min(0).sqrt().unsqueeze(-1) * vectors.mT
    upper: Tensor = torch.linalg.qr(root)[1]
    return upper.mT


def _codes(vectors: Tensor, bits: int) -> Tensor:
    """Return the entries as codes, relative to each vector's largest entry."""
    centre = largest_level(bits)
    if not vectors.numel():
        return vectors.to(torch.int32)
    if vectors.dtype.itemsize < _FLOAT:  # too imprecise for codes of 16 bits
        vectors = vectors.float()
    largest = vectors.abs().amax(-1, keepdim=True)
    scaled = vectors / torch.where(largest > 0, largest, 1) * centre
    return scaled.round_().to(torch.int32) + centre


def _check_size(data: Tensor, count: int, bits: int, field: str) -> None:
    if len(data) != (expected := packed_size(count, bits)):
        raise WireError(f"{len(data)} bytes of codes, expected {expected}", field=field)


def _unpack(data: Tensor, count: int, bits: int, field: str) -> Tensor:
    """Return the vectors' signed entries; each vector's scale is lost."""
    _check_size(data, count, bits, field)
    centre = largest_level(bits)
    entries = torch.empty(count, dtype=_signed(bits), device=data.device)
    codes = unpack_codes(data, bits, count, 2 * centre, field=field)
    if data.device.type == "cpu":  # NumPy does little ones in a fraction of the time
        np.subtract(codes.numpy(), centre, out=entries.numpy(), casting="unsafe")
        return entries
    return entries.copy_(codes.sub_(centre))


def _signed(bits: int) -> torch.dtype:
    """Return the smallest dtype that holds signed entries."""
    return torch.int8 if bits <= 8 else torch.int16


def _norms(data: Tensor, shape: tuple[int, int], field: str) -> tuple[Tensor, Tensor]:
    """Return the norms at the beginning of the data, and the rest of the data."""
    size = shape[0] * shape[1] * _FLOAT
    if len(data) < size:
        raise WireError(f"{len(data)} bytes, and {size} of norms", field=field)
    norms = data[:size].clone().view(torch.float32).view(shape)
    if not are_finite_and_not_negative(norms):
        raise WireError("holds a norm that is negative or not finite", field=field)
    return norms, data[size:]
