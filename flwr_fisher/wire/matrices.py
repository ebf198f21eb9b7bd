r"""Symmetric positive semi-definite matrices in few bytes.

Such a matrix is a sum of outer products of vectors with themselves, and a client sends
only the vectors: directions, with entries of 16 or 8 bits, and norms in float32. So any
bytes decode to a matrix that is symmetric and positive semi-definite. There are two
choices of vectors:

``WHOLE``
    the rows of the Cholesky factor, half of whose entries are zero. A large matrix
    stays in this form, in a quarter of its memory (half, at 16 bits). A small one is
    computed from it;
``COLUMNS``
    the leading eigenvectors, and one number for all other directions: their mean
    eigenvalue, which keeps the trace. A reader keeps this form, and makes nothing of
    size n × n.

A direction's entries are scaled to its largest, rounded, and read back as a unit
vector. With :math:`\varepsilon = \sqrt n / (2^{b-1} - 1)`, its error is at most
:math:`\varepsilon` in norm. So a matrix that is sent whole has an error of at most
:math:`(2\varepsilon + \varepsilon^2) \sqrt{M_{ii} M_{jj}}` at (i, j), and none on the
diagonal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from flwr_fisher.curvature.operators.base import eigh
from flwr_fisher.curvature.operators.factors import (
    DenseFactor,
    LowRankFactor,
    SymmetricFactor,
)
from flwr_fisher.curvature.structures import Form
from flwr_fisher.errors import WireError
from flwr_fisher.files import to_bytes
from flwr_fisher.params import Params, curvature_dtype
from flwr_fisher.wire.layout import Key, check_shape
from flwr_fisher.wire.quantise import (
    SCALE,
    Bytes,
    Packing,
    Sizes,
    as_scales,
    decode_diagonal,
    entry_of,
    levels,
    pack,
    packed_size,
    read_head,
    unpack,
)

Floats = NDArray[np.float32]
_JITTER = 1e-6  # added to a unit diagonal: a tenth of a step at 16 bits
_MOST_JITTER = 1e-4
_PACKINGS = {
    Form.VECTOR: (Packing.FLOAT,),
    Form.MATRIX: (Packing.WHOLE, Packing.COLUMNS),
}
_SMALL = 1024  # rows up to which a matrix is computed once, not kept as codes
_FEW = 1 << 16  # entries of a vector that is kept as it was read
WHOLE = 512  # rows up to which a matrix is decomposed whole


# --- writing --------------------------------------------------------------------------


def size_of_matrices(packing: Packing, sizes: Sizes, bits: int) -> int:
    """Return the size of matrices with these groups, rows and rank, without a head."""
    groups, n, rank = sizes
    whole = packing == Packing.WHOLE
    norms = groups * (n if whole else rank + 1)
    entries = n * (n + 1) // 2 if whole else n * rank
    return SCALE * norms + packed_size(groups * entries, bits)


def encode_whole(matrices: Tensor, bits: int) -> Tensor:
    """Return the entry of ``[groups, n, n]``, by rows of Cholesky factors."""
    # The rows' norms are the diagonal's roots, so factorise the correlations.
    norms = matrices.diagonal(dim1=-2, dim2=-1).clamp_min(0).double().sqrt()
    unit = torch.where(norms > 0, norms, 1)
    correlations = matrices.to(torch.float64, copy=True)
    correlations.div_(unit.unsqueeze(-1)).div_(unit.unsqueeze(-2))
    codes = _codes(_cholesky(correlations, bits), bits)
    lower = torch.ones_like(codes, dtype=torch.bool).tril_()  # row after row
    body = [to_bytes(norms.float()), pack(codes[lower], bits)]
    return entry_of(Packing.WHOLE, bits, torch.cat(body), (*matrices.shape[:2], 0))


def encode_columns(
    values: Tensor, vectors: Tensor, trace: Tensor, rank: int, bits: int
) -> Tensor:
    """Return the entry of matrices by their leading eigenvectors.

    Parameters
    ----------
    values : Tensor
        ``[groups, r]``, descending and not negative: the largest eigenvalues.
    vectors : Tensor
        ``[groups, n, r]``, their eigenvectors as columns.
    trace : Tensor
        ``[groups]``, the sum of all eigenvalues.
    rank, bits : int
        The number of eigenvectors, and the bits of an entry.
    """
    groups, n = vectors.shape[:2]
    leading = values[:, :rank].to(trace)
    left = (trace - leading.sum(-1)).clamp_min(0)
    # The mean of the smaller values is at most each larger value, up to rounding.
    tail = (left / max(n - rank, 1)).unsqueeze(-1) * (rank < n)
    above = (leading - tail).clamp_min(0).sqrt()
    norms = to_bytes(torch.cat([tail.sqrt(), above], -1).float())
    codes = pack(_codes(vectors[..., :rank].mT, bits).reshape(-1), bits)
    return entry_of(Packing.COLUMNS, bits, torch.cat([norms, codes]), (groups, n, rank))


def within_range(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrices clipped so that they do not overflow `dtype` when rounded."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max) / 4
    top = float(matrices.abs().amax()) if matrices.numel() else 0.0
    return matrices * (limit / top) if top > limit else matrices


def _cholesky(correlations: Tensor, bits: int) -> Tensor:
    """Return lower triangular factors, also of matrices that are singular."""
    # With few examples a matrix is singular. Eigenvectors take ten times as long as a
    # jitter, which is a tenth of the rounding to few bits.
    rounding = min(0.1 / levels(bits), _MOST_JITTER)
    lower: Tensor
    for jitter in (_JITTER, rounding):
        jittered = correlations.clone()
        jittered.diagonal(dim1=-2, dim2=-1).add_(jitter)
        lower, failed = torch.linalg.cholesky_ex(jittered)
        if not failed.any():
            return lower
    values, vectors = eigh(correlations)
    root = values.clamp_min(0).sqrt().unsqueeze(-1) * vectors.mT
    upper: Tensor = torch.linalg.qr(root)[1]
    return upper.mT


def _codes(vectors: Tensor, bits: int) -> Tensor:
    """Return integer codes relative to the largest entry of the last dimension."""
    if not vectors.numel():
        return vectors.to(torch.int16)
    wide = vectors if vectors.itemsize >= 4 else vectors.float()
    largest = wide.abs().amax(-1, keepdim=True)
    scaled = wide / torch.where(largest > 0, largest, 1) * levels(bits)
    return scaled.round_().to(torch.int16)


def leading_vectors(matrices: Tensor, count: int) -> tuple[Tensor, Tensor]:
    r"""Return leading eigenvalues and eigenvectors, approximate for large matrices.

    A matrix of up to 512 rows is decomposed whole. For a larger matrix, the leading
    part is computed by randomised subspace iteration and the Rayleigh-Ritz method
    (Halko, Martinsson & Tropp, "Finding structure with randomness", SIAM Review 2011,
    algorithms 4.4 and 5.3): from the eigenvectors of :math:`Q^\top M Q`, where Q is an
    orthonormal basis of :math:`M^2 \Omega` and :math:`\Omega` has k random columns. No
    value is above the eigenvalue that it approximates. The part of the trace that the k
    vectors leave out is in expectation at most

    .. math:: \sum_{j>r} \lambda_j
              \Big(1 + \frac{r}{p-1} \Big(\frac{\lambda_j}{\lambda_r}\Big)^3\Big)

    for any :math:`r + p = k` with :math:`p \ge 2`: this is theorem 10.5 of that paper.
    Its proof uses that :math:`\Omega` is multiplied by a root of M, and also holds for
    the square of M.

    Parameters
    ----------
    matrices : Tensor
        ``[groups, n, n]``, symmetric positive semi-definite.
    count : int
        k, the number of vectors. All n are returned if that is as quick.

    Returns
    -------
    tuple[Tensor, Tensor]
        ``[groups, k]``, descending and not negative, and orthonormal columns
        ``[groups, n, k]``; the same ones in every call.
    """
    # LAPACK has no decompositions of smaller floats.
    wide = matrices if matrices.itemsize >= 4 else matrices.float()
    n = wide.shape[-1]
    if n <= WHOLE or 2 * count >= n:
        return _descending(*eigh(wide))
    generator = torch.Generator().manual_seed(0)
    shape = len(wide), n, count
    columns = torch.randn(shape, generator=generator, dtype=torch.float32).to(wide)
    basis = torch.linalg.qr(wide @ torch.linalg.qr(wide @ columns).Q).Q
    inner = basis.mT @ (wide @ basis)
    values, rotation = eigh(inner / 2 + inner.mT / 2)
    return _descending(values, basis @ rotation)


def _descending(values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    return values.flip(-1).clamp_min(0), vectors.flip(-1)


# --- reading --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckedPart:
    """A part of a curvature with every byte checked.

    It holds only the received bytes. A few bytes can represent a large matrix, so a
    tensor of the matrix's size is made only when it is used.

    Parameters
    ----------
    shape : tuple[int, ...]
        The part's shape.
    make : Callable[[], Tensor | SymmetricFactor]
        Makes the part, and raises no error.
    traces : Sequence[float]
        The traces of its matrices, one for each group; a vector's sum.
    """

    shape: tuple[int, ...]
    make: Callable[[], Tensor | SymmetricFactor]
    traces: Sequence[float]


def check_part(entry: ArrayLike, params: Params, *, field: str) -> CheckedPart:
    """Check a part of a curvature over `params`.

    The announced shape is checked before anything of that shape is allocated.

    Raises
    ------
    WireError
        It names the wrong entry.
    """
    key = Key.parse(field, params)
    like, dtype = params[key.name], curvature_dtype(params[key.name])
    packing, bits, sizes, body = read_head(entry, field)
    if packing not in _PACKINGS[key.form]:
        raise WireError(f"form {packing.name} for this part", field=field)
    if key.form == Form.VECTOR:
        read = partial(decode_diagonal, body, like.numel(), dtype, field=field)
        values, shape = read().view(like.shape), tuple(like.shape)
        trace = float(values.numpy().sum(dtype=np.float64))
        if like.numel() <= _FEW:
            return CheckedPart(shape, lambda: values, [trace])
        return CheckedPart(shape, lambda: read().view(shape), [trace])
    # The sizes decide how much is allocated, so they come first.
    groups, n, rank = sizes
    check_shape(field, (groups, n, n), params)
    whole = packing == Packing.WHOLE
    if not whole and rank > n:
        raise WireError(f"rank {rank} of a matrix with {n} rows", field=field)
    if len(body) != (expected := size_of_matrices(packing, sizes, bits)):
        raise WireError(f"{len(body)} bytes, expected {expected}", field=field)
    # Any codes stand for directions, so only the norms can be wrong. There is one for
    # each row, or one for the mean eigenvalue of the rest and one for each column.
    end = SCALE * groups * (n if whole else rank + 1)
    norms = as_scales(body[:end], field).reshape(groups, -1)
    squares = np.square(norms, dtype=np.float64)
    if not whole:
        squares[:, 0] *= n
    traces: list[float] = squares.sum(-1).tolist()
    unpacked = _whole if whole else _columns
    decode = partial(unpacked, norms, body[end:], sizes, bits)

    def make() -> SymmetricFactor:
        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        factor = decode()
        return factor if dtype == torch.float32 else factor.mapped(cast)

    # The diagonal bounds the other entries, and the trace the diagonal.
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    if 1.001 * max(traces, default=0.0) > limit:
        top = squares if whole else decode().diagonal().numpy()
        if not (1.001 * top <= limit).all():  # false for NaN
            raise WireError(f"its norms overflow {dtype}", field=field)
    return CheckedPart((groups, n, n), make, traces)


def _whole(norms: Floats, data: Bytes, sizes: Sizes, bits: int) -> SymmetricFactor:
    """Return matrices in float32; large ones keep their directions as integers."""
    groups, n, _ = sizes
    # Allocate what is kept before what is freed: a merge keeps many clients' matrices,
    # and holes between them would double its memory.
    small = n <= _SMALL
    matrices = np.empty((groups * small, n, n), np.float32)
    codes = unpack(data, bits)
    lower = np.zeros((groups, n, n), np.float32 if small else codes.dtype)
    lower[np.broadcast_to(np.tri(n, dtype=np.bool_), lower.shape)] = codes
    rows = norms / _lengths(lower)
    if small:
        lower *= rows[..., np.newaxis]
        half = lower @ lower.swapaxes(1, 2) / 2  # first: the sum may overflow
        whole = np.add(half, half.swapaxes(1, 2), out=matrices)  # exactly symmetric
        return DenseFactor(torch.from_numpy(whole))
    kept, lengths = torch.from_numpy(lower), torch.from_numpy(rows)
    zeros = torch.zeros_like(lengths)
    return LowRankFactor(kept, torch.ones_like(lengths), zeros, lengths)


def _columns(norms: Floats, data: Bytes, sizes: Sizes, bits: int) -> SymmetricFactor:
    """Return matrices in float32 by their directions, kept as integers."""
    groups, n, rank = sizes
    directions = unpack(data, bits).reshape(groups, rank, n)
    lengths = torch.from_numpy(norms[:, 1:] / _lengths(directions))
    rest = torch.from_numpy(norms[:, :1]).square().expand(groups, n)
    return LowRankFactor(torch.from_numpy(directions).mT, lengths, rest)


def _lengths(directions: NDArray[np.number]) -> Floats:
    """Return the lengths along the last dimension in float32, with 1 for zero."""
    squares = np.square(directions, dtype=np.float32).sum(-1)
    lengths: Floats = np.sqrt(np.maximum(squares, 1))
    return lengths
