"""Packing an upload within its budget of bytes.

A budget is a number of bytes; the model and its curvature rarely fit as they are. This
file decides how many bits or columns each tensor has, and :mod:`quantise` and
:mod:`matrices` write them. Read it from :func:`pack_upload` downwards. The bytes are
spent in this order:

1. parameters, in 16 bits if the budget is FedAvg's size or more, otherwise in 8;
2. the entries of diagonals, in 8 bits, and in 16 as far as bytes are left over when all
   matrices are whole;
3. matrices. If all fit whole, in 16 bits or in 8, they are sent whole. Otherwise some
   are sent by columns, which are leading eigenvectors. Columns of all layers compete:
   those come first that have the largest share of their matrix's trace per byte.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from flwr_fisher.curvature.structures import STRUCTURES, Form, Structure
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.log_lines import advance
from flwr_fisher.params import Params, curvature_dtype
from flwr_fisher.wire import matrices, quantise
from flwr_fisher.wire.arrays import (
    LayoutKey,
    chunk_bytes,
    fedavg_bytes,
    layout_key,
    without_values,
)
from flwr_fisher.wire.codec import LOSSLESS, Codec, container_bytes
from flwr_fisher.wire.layout import Key, diagonal_key
from flwr_fisher.wire.quantise import HEAD, SCALE, Packing

_METRICS = 512  # bytes of a reply that are not arrays
# In a budget of 1, parameters of 16 bits take one half, and the curvature the other.
_PARAM_BITS = ((1.0, 16), (0.0, 8))  # the smallest budget, and its bits
_WHOLE_BITS, _FEWEST_BITS, _CUT_BITS = (16, 8), 8, 8
_UNPACKED = 64  # more bits than any dtype has: the tensor's own bytes are sent
_ROUNDING = 5  # bytes of an entry, and digits of its size in the header
_GIVES = 0.25  # share of its bytes that a smaller matrix gives to a larger one
_MORE = 1.25  # how many more leading columns are computed than there is room for

# By matrix: the largest eigenvalues, descending, and their eigenvectors.
Spectra = dict[str, tuple[Tensor, Tensor]]


# --- the budget


def byte_limit(params: Params, codec: Codec) -> int:
    """Return the largest size in bytes of an upload's record.

    For a budget below 1 it leaves room for the reply's metrics, so that the whole reply
    is within the budget.
    """
    assert codec.budget is not None
    metrics = max(0.0, 1 - codec.budget) * _METRICS
    return int(codec.budget * fedavg_bytes(params) - metrics)


def resolve(codec: Codec, params: Params) -> Codec:
    """Return the codec for a model, after a check that its budget is large enough.

    Parameters
    ----------
    codec : Codec
        ``auto`` becomes ``fedavg``, or ``lossless`` if the budget of ``fedavg`` is too
        small.
    params : Mapping[str, Tensor]
        The parameters and buffers to upload; only names, shapes and dtypes matter.

    Raises
    ------
    ConfigurationError
        If the parameters do not fit into the budget together with a curvature of any
        structure. The message has the smallest budget that is enough.
    """
    if codec == LOSSLESS:
        return codec
    needed = _smallest_budget(layout_key(params))
    if codec.budget is None:
        return Codec("fedavg") if needed <= 1 else LOSSLESS
    if needed > codec.budget:
        raise _too_small(needed, codec)
    return codec


def _too_small(needed: float, codec: Codec) -> ConfigurationError:
    return ConfigurationError(
        f"budget must be >= {needed} for this model and a minimal curvature, got "
        f"{codec.budget}: pass codec=Codec(budget={needed}), or codec='lossless'"
    )


@lru_cache
def _smallest_budget(layout: LayoutKey) -> float:
    """Return the smallest budget for any structure's curvature, to three decimals.

    It holds parameters and diagonals at the fewest bits, and of each matrix its trace.
    """
    # Nothing is computed here: tensors on the device "meta" have shapes and no values.
    params = without_values(layout)
    every = (container_bytes(_least_sizes(params, s)) for s in STRUCTURES.values())
    size, fedavg = max(every), fedavg_bytes(params)
    metrics = _METRICS if size < fedavg else 0
    return math.ceil(1e3 * (size + metrics) / (fedavg + metrics)) / 1e3


def _least_sizes(params: Params, structure: Structure) -> dict[str, int]:
    """Return sizes by key that are enough for a structure's curvature.

    Which layers have matrices is not known here, so diagonals count as well. Nor is it
    known which tensors are buffers, which are sent as they are: tensors of at most one
    dimension may be, larger ones count as trained.
    """
    sizes = {k: quantise.size_of_param(v, _FEWEST_BITS) for k, v in params.items()}
    for name, tensor in params.items():
        if not tensor.is_floating_point():
            continue
        # It is a trained parameter with a diagonal, or a buffer with all of its bytes:
        # the larger of the two is enough for both.
        unpacked = quantise.size_of_param(tensor, _UNPACKED) - sizes[name]
        entries = quantise.size_of_diagonal(tensor.numel(), 0)
        least = max(entries, unpacked) if tensor.dim() < 2 else entries
        sizes[diagonal_key(name)] = least
        if tensor.dim() > 1:
            # Only convolutions have groups, at most one per output; each has a trace.
            groups = tensor.shape[0] if tensor.dim() > 2 else 1
            for letter, form in structure.tensors.items():
                if form == Form.MATRIX:
                    sizes[str(Key(structure, name, letter))] = HEAD + SCALE * groups
    return sizes


# --- packing


def pack_upload(
    params: Params, parts: Params, codec: Codec, trained: Collection[str]
) -> dict[str, Tensor]:
    """Pack parameters and their curvature into a codec's budget.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        Parameters and buffers.
    parts : Mapping[str, Tensor]
        The curvature, from :func:`~flwr_fisher.wire.curvature_to_tensors`.
    codec : Codec
        A codec with a budget, as :func:`resolve` returns it.
    trained : Collection[str]
        The parameters that the curvature covers. All others (buffers) are sent as they
        are.

    Returns
    -------
    dict[str, Tensor]
        Bytes by key.

    Raises
    ------
    ConfigurationError
        If not even the fewest bits and columns fit.
    """
    # 1: sort the curvature's tensors by how they travel.
    keys = {key: Key.parse(key, params) for key in parts}
    vectors = {k: v for k, v in parts.items() if keys[k].form == Form.VECTOR}
    to_send = [
        _Matrix(key, value, curvature_dtype(params[keys[key].name]))
        for key, value in parts.items()
        if key not in vectors
    ]
    # 2: decide what each kind gets. 3: write parameters and diagonals, whose sizes are
    # then known. 4: spend all that is left on matrices.
    bits, share, left = _shared_out(params, vectors, to_send, codec, trained)
    entries = {
        key: quantise.encode_param(value, bits if key in trained else _UNPACKED)
        for key, value in params.items()
    }
    for key, value in vectors.items():
        entries[key] = quantise.encode_diagonal(value, int(share * value.numel()))
    return entries | dict(_pack_matrices(to_send, left))


def _shared_out(
    params: Params,
    vectors: Params,
    to_send: "list[_Matrix]",
    codec: Codec,
    trained: Collection[str],
) -> tuple[int, float, int]:
    """Share the bytes out between parameters, diagonals and matrices.

    Returns
    -------
    tuple[int, float, int]
        The parameters' bits; the share of the diagonals' entries that have 16 bits in
        place of 8; and the bytes that are left for matrices.
    """
    assert codec.budget is not None
    limit, left = byte_limit(params, codec), 0
    for budget, bits in _PARAM_BITS:
        if budget > codec.budget:
            continue
        # What everything takes at least: diagonals in 8 bits, and no column.
        sizes = {m.key: m.least for m in to_send}
        for key, value in params.items():
            kept = bits if key in trained else _UNPACKED
            sizes[key] = quantise.size_of_param(value, kept)
        for key, value in vectors.items():
            sizes[key] = quantise.size_of_diagonal(value.numel(), 0)
        if (left := limit - container_bytes(sizes)) < 0:
            continue  # with fewer bits for parameters
        left = max(0, left - chunk_bytes(left) - _ROUNDING * len(vectors))
        # Diagonals get a second byte for an entry only if matrices need no more.
        count = sum(v.numel() for v in vectors.values())
        whole = sum(m.whole(_FEWEST_BITS) for m in to_send)
        share = min(1.0, max(0, left - whole) / count) if count else 0.0
        return bits, share, left - math.ceil(share * count)
    needed = codec.budget - left / fedavg_bytes(params) + 1e-3
    raise _too_small(round(needed, 3), codec)


class _Matrix:
    """Matrices to send under one key, one for each group, and their sizes in bytes.

    `least` is what their entry takes without a column: its head, and for each group one
    number, the mean eigenvalue, which keeps the trace. All further bytes are counted
    beyond it.
    """

    def __init__(self, key: str, value: Tensor, dtype: torch.dtype) -> None:
        self.key, self.value = key, matrices.within_range(value, dtype)
        self.groups, self.n = self.value.shape[:2]
        self.trace = self.value.diagonal(dim1=-2, dim2=-1).double().sum(-1)
        self.trace.clamp_(min=0)
        sizes = (self.groups, self.n, 0)
        least = matrices.size_of_matrices(Packing.COLUMNS, sizes, _CUT_BITS)
        self.least = HEAD + least + 1  # for rounding

    def column(self) -> float:
        """Return the bytes of one more column."""
        return self.groups * (self.n * _CUT_BITS / 8 + SCALE)

    def whole(self, bits: int) -> int:
        """Return the bytes of the whole matrix, beyond `least`."""
        sizes = (self.groups, self.n, self.n)
        size = matrices.size_of_matrices(Packing.WHOLE, sizes, bits)
        return max(0, HEAD + size - self.least)

    def spectrum(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the largest eigenvalues, descending, and their eigenvectors.

        There are at least `count`, or all if that is as quick.
        """
        advance()
        return matrices.leading_vectors(self.value, count)

    def pack_whole(self, bits: int) -> Tensor:
        """Return the entry of the whole matrix."""
        advance()
        return matrices.encode_whole(self.value, bits)

    def pack_cut(self, spectrum: tuple[Tensor, Tensor], rank: int) -> Tensor:
        """Return the entry of the first `rank` columns."""
        advance()
        return matrices.encode_columns(*spectrum, self.trace, rank, _CUT_BITS)


def _pack_matrices(to_send: list[_Matrix], left: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices' entries, within the bytes left beyond their `least`."""
    # The simple cases: all of them fit whole.
    for bits in _WHOLE_BITS:
        if sum(m.whole(bits) for m in to_send) <= left:
            yield from ((m.key, m.pack_whole(bits)) for m in to_send)
            return
    # Then some are cut to their leading columns. Computing these takes long for large
    # matrices, which stay whole if small ones can free the bytes that they lack.
    cut = _to_cut(to_send, left)
    as_whole = [m for m in to_send if m not in cut]
    left -= sum(m.whole(_FEWEST_BITS) for m in as_whole)
    yield from ((m.key, m.pack_whole(_FEWEST_BITS)) for m in as_whole)
    # All others compete by columns. A matrix whose columns would take more bytes than
    # all of it is sent whole. That frees bytes for the other matrices' columns, so that
    # another one may then be sent whole, too: share out again until nothing changes.
    # The columns that are computed first are a guess; `_ranks` computes more if needed.
    room = int(_MORE * _even_rank(cut, left)) + 1
    spectra, to_send = {m.key: m.spectrum(room) for m in cut}, cut
    while to_send:
        ranks = _ranks(to_send, spectra, left)
        as_whole = [
            m for m in to_send if ranks[m.key] * m.column() >= m.whole(_FEWEST_BITS)
        ]
        if not as_whole:
            break
        left -= sum(m.whole(_FEWEST_BITS) for m in as_whole)
        yield from ((m.key, m.pack_whole(_FEWEST_BITS)) for m in as_whole)
        to_send = [m for m in to_send if m not in as_whole]
    yield from ((m.key, m.pack_cut(spectra[m.key], ranks[m.key])) for m in to_send)


def _to_cut(to_send: list[_Matrix], left: int) -> list[_Matrix]:
    """Return the matrices to cut: the smallest that can free the missing bytes.

    Decomposing a large matrix takes long. Where there is one, a matrix is cut only if
    the smaller ones together lack more than a quarter of their bytes.
    """
    if not any(m.n > matrices.WHOLE for m in to_send):
        return to_send
    missing = sum(m.whole(_FEWEST_BITS) for m in to_send) - left
    smallest = _by_size(to_send)
    freed = accumulate(_GIVES * m.whole(_FEWEST_BITS) for m in smallest)
    return smallest[: 1 + sum(size < missing for size in freed)]


def _by_size(to_send: list[_Matrix]) -> list[_Matrix]:
    return sorted(to_send, key=lambda m: m.n)


def _even_rank(to_send: list[_Matrix], left: float) -> float:
    """Return how many columns each matrix has if all have as many or are whole.

    This is a first guess: how fast their spectra fall is not known yet.
    """
    # From the smallest on: where an even share is more bytes than a matrix needs, it is
    # whole, and leaves its rest to the others.
    smallest = _by_size(to_send)
    for i, matrix in enumerate(smallest):
        rank = left / max(1, sum(m.column() for m in smallest[i:]))
        if rank * matrix.column() < matrix.whole(_FEWEST_BITS):
            return rank
        left -= matrix.whole(_FEWEST_BITS)
    return max((m.n for m in to_send), default=0)


def _ranks(to_send: list[_Matrix], spectra: Spectra, left: float) -> dict[str, int]:
    """Return how many columns of each matrix to send; compute more if needed.

    If all known columns of a matrix are to be sent, and not so many that the matrix is
    better sent whole, twice as many are computed, and the bytes are divided again.
    """
    while True:
        ranks = _greedy(to_send, spectra, left)
        short = []
        for matrix in to_send:
            rank, known = ranks[matrix.key], spectra[matrix.key][0].shape[-1]
            enough = rank * matrix.column() >= matrix.whole(_FEWEST_BITS)
            if rank == known < matrix.n and not enough:
                short.append(matrix)
        if not short:
            return ranks
        for matrix in short:
            known = spectra[matrix.key][0].shape[-1]
            spectra[matrix.key] = matrix.spectrum(2 * known)


def _greedy(
    to_send: list[_Matrix], spectra: Mapping[str, tuple[Tensor, Tensor]], left: float
) -> dict[str, int]:
    """Return how many of the known columns of each matrix to send."""
    # All layers' columns compete in one list. A column's gain is its share of its
    # matrix's trace (of several groups, the mean share), divided by its bytes. So
    # layers of any scale count alike, and a matrix of zeros gets nothing.
    shares = []
    for matrix in to_send:
        trace = matrix.trace.unsqueeze(-1)
        values = spectra[matrix.key][0].double()
        shares.append(torch.where(trace > 0, values / trace, 0).mean(0).cpu())
    columns = torch.tensor([m.column() for m in to_send], dtype=torch.float64)
    lengths = torch.tensor([len(share) for share in shares])
    owner = torch.arange(len(to_send)).repeat_interleave(lengths)
    cost = columns[owner]
    gain = torch.cat(shares) / cost
    # The largest gains first. Within a matrix the shares fall, so its columns are taken
    # from the first one on.
    order = torch.argsort(gain, descending=True, stable=True)
    order = order[gain[order] > 0]
    # The first of them that are affordable together. The list ends at the first one
    # that is not, so no later column of a matrix is sent without the one before.
    bought = order[cost[order].cumsum(0) <= left]
    counts = torch.bincount(owner[bought], minlength=len(to_send))
    return {m.key: int(n) for m, n in zip(to_send, counts, strict=True)}
