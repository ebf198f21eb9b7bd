"""Packing an upload within its budget of bytes.

The budget goes first to the parameters, then to the entries of diagonals, then to
matrices. A matrix that does not fit whole is sent by columns: eigenvectors of a
Kronecker factor or a dense matrix, or vectors of E-KFAC's bases. Columns of all layers
are sent in the order of their share of their matrix's trace per byte. If a large matrix
lacks only a few bytes, smaller ones are cut instead.

Long: one calculation distributes the bytes, from the limit to the last column.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, FlwrFisherError, printable
from flwr_fisher.params import Params
from flwr_fisher.progress import advance
from flwr_fisher.wire import matrices, quantise
from flwr_fisher.wire.codec import LOSSLESS, Codec
from flwr_fisher.wire.container import container_bytes
from flwr_fisher.wire.layout import PREFIX, Part, parse_key
from flwr_fisher.wire.quantise import HEAD, SCALE, Form
from flwr_fisher.wire.size import (
    Layout,
    chunk_bytes,
    fedavg_bytes,
    layout_key,
    without_values,
)

_METRICS = 512  # bytes of a reply that are not arrays
_PARAM_BITS = ((1.0, 16), (0.35, 8), (0.0, 4))  # the smallest budget, and its bits
_WHOLE_BITS, _CUT_BITS = (16, 8), 8
_OWN = 64  # more bits than any dtype has: the tensor's own bytes are sent
_ROUNDING = 5  # bytes of an entry, and digits of its size in the header
_GIVES = 0.25  # share of its bytes that a smaller matrix gives to a larger one
_MORE = 1.25  # how many more leading columns are computed than there is room for


class PackingError(FlwrFisherError, RuntimeError):
    """A tensor cannot be packed, for example because eigh does not converge."""


@contextmanager
def _packing(key: str) -> Iterator[None]:
    """Name the tensor that is being packed in any error of the ``with`` block."""
    try:
        yield
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}", 200)
        raise PackingError(f"'{key}' cannot be packed: {reason}") from error


# By matrix: the columns' largest shares of the trace, descending, and these columns.
Spectra = Mapping[str, tuple[Tensor, Tensor]]


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
        f"budget must be >= {needed} for this model's parameters and a minimal "
        f"curvature, got {codec.budget}: pass codec=Codec(budget={needed}), or "
        "codec='lossless'"
    )


@lru_cache
def _smallest_budget(layout: Layout) -> float:
    """Return the smallest budget for any structure's curvature, to three decimals.

    It holds parameters and diagonals at the fewest bits, and of each factor its trace.
    """
    params = without_values(layout)
    size, plain = container_bytes(_least_sizes(params)), fedavg_bytes(params)
    metrics = _METRICS if size < plain else 0
    return math.ceil(1e3 * (size + metrics) / (plain + metrics)) / 1e3


def _least_sizes(params: Params) -> dict[str, int]:
    """Return sizes by key that are enough for any structure's curvature.

    Buffers are sent as they are, but which tensors are buffers is not known here:
    tensors of at most one dimension may be, larger ones count as trained.
    """
    _, bits = _PARAM_BITS[-1]
    sizes = {key: quantise.size_of_param(v, bits) for key, v in params.items()}
    for key, tensor in params.items():
        if not tensor.is_floating_point():
            continue
        own = quantise.size_of_param(tensor, _OWN)
        buffer = own - sizes[key] if tensor.dim() < 2 else 0
        # Only convolutions have groups: at most one per output, each with its trace.
        groups = tensor.shape[0] if tensor.dim() > 2 else 3
        count = tensor.numel() + (tensor.shape[0] if tensor.dim() > 1 else 0)
        diagonal = quantise.size_of_diagonal(count, 8, 0)
        sizes[f"{PREFIX}diagonal/{key}/S"] = max(diagonal, buffer)  # the longest key
        if tensor.dim() > 1:
            for letter in "AG":
                sizes[f"{PREFIX}ekfac/{key}/{letter}"] = HEAD + SCALE * groups
    return sizes


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
    PackingError
        If packing fails. It names the tensor.
    """
    parts = _sort_columns(parts)
    kinds = {key: parse_key(key, params) for key in parts}
    diagonals = {
        key: v
        for key, v in parts.items()
        if kinds[key][0] in (Part.DIAGONAL, Part.MOMENTS)
    }
    to_send = [
        _Matrix(
            key,
            v,
            parts[f"{key[:-1]}S"] if kinds[key][0] == Part.BASIS else None,
            params[kinds[key][1][0]].dtype,
        )
        for key, v in parts.items()
        if key not in diagonals
    ]
    of_param, bits, share, left = _bits(params, diagonals, to_send, codec, trained)
    entries = {}
    for key, value in params.items():
        with _packing(key):
            own = of_param if key in trained else _OWN
            entries[key] = quantise.encode_param(value, own)
    for key, value in diagonals.items():
        with _packing(key):
            wide = int(share * value.numel())
            entries[key] = quantise.encode_diagonal(value, bits, wide)
    return entries | dict(_pack_matrices(to_send, left))


def _bits(
    params: Params,
    diagonals: Params,
    to_send: "list[_Matrix]",
    codec: Codec,
    trained: Collection[str],
) -> tuple[int, int, float, int]:
    """Return the parameters' bits, and the result of :func:`_diagonal_bits`."""
    assert codec.budget is not None
    limit = byte_limit(params, codec)
    for budget, of_param in _PARAM_BITS:
        if budget > codec.budget:
            continue
        sizes = {m.key: m.least for m in to_send}
        for key, value in params.items():
            bits = of_param if key in trained else _OWN
            sizes[key] = quantise.size_of_param(value, bits)
        for key, value in diagonals.items():
            sizes[key] = quantise.size_of_diagonal(value.numel(), 8, 0)
        if (left := limit - container_bytes(sizes)) >= 0:
            left -= chunk_bytes(left)
            matrices = sum(m.whole(_WHOLE_BITS[-1]) for m in to_send)
            return of_param, *_diagonal_bits(diagonals, left, matrices)
    needed = codec.budget - left / fedavg_bytes(params) + 1e-3
    raise _too_small(round(needed, 3), codec)


def _diagonal_bits(
    diagonals: Params, left: int, matrices: int
) -> tuple[int, float, int]:
    """Return the diagonals' bits, the share of values with them, and the bytes left.

    The other values have half as many bits. First, values get 8 bits in place of 4. If
    more bytes are left than `matrices` take, values then get 16 in place of 8.
    """
    count = sum(v.numel() for v in diagonals.values())
    left -= _ROUNDING * len(diagonals)
    if not count or left < count / 2:
        share = max(0.0, 2 * left / count) if count else 0.0
        return 8, share, 0 if count else left
    left -= -(-count // 2)
    share = min(1.0, max(0, left - matrices) / count)
    return 16, share, left - math.ceil(share * count)


class _Matrix:
    """A matrix to send (a factor, a dense one, or a basis), and its sizes in bytes.

    `least` is what its entry takes without a column.
    """

    def __init__(
        self, key: str, value: Tensor, moments: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.key, self.form = key, Form.COLUMNS
        self.value = value if value.dim() == 3 else value.unsqueeze(0)
        self.groups, self.n = self.value.shape[:2]
        if moments is None:
            self.value = matrices.within_range(self.value, dtype)
            self.total = self.value.diagonal(dim1=-2, dim2=-1).double().sum(-1)
            self.total.clamp_(min=0)
        else:
            self.form = Form.BASIS
            self.energies = moments.sum(-2 if key.endswith("A") else -1)
            self.total = self.energies.double().sum(-1)
        self.least = HEAD + self._cut(0, _CUT_BITS) + 1  # for rounding

    def _cut(self, rank: int, bits: int) -> int:
        sizes = (self.groups, self.n, rank)
        return matrices.size_of_matrices(self.form, sizes, bits)

    def is_large(self) -> bool:
        """Return whether its columns take long to compute."""
        return self.form != Form.BASIS and self.n > matrices.WHOLE

    def column(self) -> float:
        """Return the bytes of one more column."""
        norm = 0 if self.form == Form.BASIS else SCALE
        return self.groups * (self.n * _CUT_BITS / 8 + norm)

    def whole(self, bits: int) -> int:
        """Return the bytes of the whole matrix, beyond `least`."""
        form = Form.BASIS if self.form == Form.BASIS else Form.WHOLE
        sizes = (self.groups, self.n, self.n)
        size = matrices.size_of_matrices(form, sizes, bits)
        return max(0, HEAD + size - self.least)

    def spectrum(self, count: int) -> tuple[Tensor, Tensor]:
        """Return each column's share of the trace, descending, and the columns.

        There are at least `count` columns, or all if that is as quick.
        """
        advance()
        with _packing(self.key):
            if self.form == Form.BASIS:
                return self.energies, self.value
            return matrices.leading_vectors(self.value, count)

    def pack_whole(self, bits: int) -> Tensor:
        """Return the entry of the whole matrix."""
        advance()
        with _packing(self.key):
            if self.form == Form.BASIS:
                return matrices.encode_basis(self.value, self.n, bits)
            return matrices.encode_whole(self.value, bits)

    def pack_cut(self, spectrum: tuple[Tensor, Tensor], rank: int) -> Tensor:
        """Return the entry of the first `rank` columns."""
        advance()
        with _packing(self.key):
            if self.form == Form.BASIS:
                return matrices.encode_basis(self.value, rank, _CUT_BITS)
            return matrices.encode_columns(*spectrum, self.total, rank, _CUT_BITS)


def _pack_matrices(to_send: list[_Matrix], left: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices' entries, within the bytes left beyond their `least`.

    Sending a matrix whole frees bytes for the other matrices' columns, so that another
    one may then be sent whole, too.
    """
    for bits in _WHOLE_BITS:
        if sum(m.whole(bits) for m in to_send) <= left:
            yield from ((m.key, m.pack_whole(bits)) for m in to_send)
            return
    whole = _WHOLE_BITS[-1]
    cut = _to_cut(to_send, left)
    as_whole = [m for m in to_send if m not in cut]
    left -= sum(m.whole(whole) for m in as_whole)
    yield from ((m.key, m.pack_whole(whole)) for m in as_whole)
    room = int(_MORE * _even_rank(cut, left)) + 1
    spectra, to_send = {m.key: m.spectrum(room) for m in cut}, cut
    while to_send:
        ranks = _ranks(to_send, spectra, left)
        as_whole = [m for m in to_send if ranks[m.key] * m.column() >= m.whole(whole)]
        if not as_whole:
            break
        left -= sum(m.whole(whole) for m in as_whole)
        yield from ((m.key, m.pack_whole(whole)) for m in as_whole)
        to_send = [m for m in to_send if m not in as_whole]
    yield from ((m.key, m.pack_cut(spectra[m.key], ranks[m.key])) for m in to_send)


def _to_cut(to_send: list[_Matrix], left: int) -> list[_Matrix]:
    """Return the matrices to cut: the smallest that can free the missing bytes.

    Decomposing a large matrix takes long. Where there is one, a matrix is cut only if
    the smaller ones together lack more than a quarter of their bytes.
    """
    if not any(m.is_large() for m in to_send):
        return to_send
    missing = sum(m.whole(_WHOLE_BITS[-1]) for m in to_send) - left
    smallest = _by_size(to_send)
    sizes = (_GIVES * m.whole(_WHOLE_BITS[-1]) for m in smallest)
    given = list(accumulate(sizes))
    return smallest[: 1 + sum(size < missing for size in given)]


def _by_size(to_send: list[_Matrix]) -> list[_Matrix]:
    return sorted(to_send, key=lambda m: m.n)


def _even_rank(to_send: list[_Matrix], left: float) -> float:
    """Return how many columns each matrix has if all have as many or are whole.

    How fast their spectra fall is not known yet.
    """
    smallest = _by_size(to_send)
    for i, matrix in enumerate(smallest):
        rank = left / max(1, sum(m.column() for m in smallest[i:]))
        if rank * matrix.column() < matrix.whole(_WHOLE_BITS[-1]):
            return rank
        left -= matrix.whole(_WHOLE_BITS[-1])
    return max((m.n for m in to_send), default=0)


def _ranks(
    to_send: list[_Matrix], spectra: dict[str, tuple[Tensor, Tensor]], left: float
) -> dict[str, int]:
    """Return how many columns of each matrix to send; compute more if needed.

    If all known columns of a matrix are to be sent, and not so many that the matrix is
    better sent whole, twice as many are computed, and the bytes are divided again.
    """
    while True:
        ranks = _greedy(to_send, spectra, left)
        short = []
        for matrix in to_send:
            rank, known = ranks[matrix.key], spectra[matrix.key][0].shape[-1]
            enough = rank * matrix.column() >= matrix.whole(_WHOLE_BITS[-1])
            if rank == known < matrix.n and not enough:
                short.append(matrix)
        if not short:
            return ranks
        for matrix in short:
            known = spectra[matrix.key][0].shape[-1]
            spectra[matrix.key] = matrix.spectrum(2 * known)


def _greedy(to_send: list[_Matrix], spectra: Spectra, left: float) -> dict[str, int]:
    """Return how many of the known columns of each matrix to send."""
    shares = []
    for matrix in to_send:
        total = matrix.total.unsqueeze(-1)
        values = spectra[matrix.key][0].double()
        shares.append(torch.where(total > 0, values / total, 0).mean(0).cpu())
    columns = torch.tensor([m.column() for m in to_send], dtype=torch.float64)
    lengths = torch.tensor([len(share) for share in shares])
    owner = torch.arange(len(to_send)).repeat_interleave(lengths)
    cost = columns[owner]
    gain = torch.cat(shares) / cost
    order = torch.argsort(gain, descending=True, stable=True)
    order = order[gain[order] > 0]
    bought = order[cost[order].cumsum(0) <= left]
    counts = torch.bincount(owner[bought], minlength=len(to_send))
    return {m.key: int(n) for m, n in zip(to_send, counts, strict=True)}


def _sort_columns(parts: Params) -> dict[str, Tensor]:
    """Return a curvature's parts with E-KFAC's columns by descending moments."""
    ordered = dict(parts)
    for key, moments in parts.items():
        if not key.endswith("/S"):
            continue
        layer = key.removesuffix("S")
        columns = moments.sum(-2).argsort(-1, descending=True)
        rows = moments.sum(-1).argsort(-1, descending=True)
        ordered[f"{layer}A"] = _permute(parts[f"{layer}A"], columns)
        ordered[f"{layer}G"] = _permute(parts[f"{layer}G"], rows)
        ordered[key] = _permute(_permute(moments, columns).mT, rows).mT
    return ordered


def _permute(columns: Tensor, order: Tensor) -> Tensor:
    """Return ``[groups, m, n]`` with each group's columns in another order."""
    index = order.unsqueeze(-2).expand(columns.shape)
    return columns.gather(-1, index)
