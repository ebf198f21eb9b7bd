"""Which columns of an upload's matrices are sent, within the bytes that are left.

A column is an eigenvector of a Kronecker factor or a dense matrix, or a vector of
E-KFAC's bases. Columns are sent in the order of their share of their matrix's trace per
byte, whatever layer they belong to. A matrix that would take as many bytes whole is
sent whole.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flwr_fisher.params import Params
from flwr_fisher.progress import advance
from flwr_fisher.wire import matrix_codes, packing
from flwr_fisher.wire.leading_vectors import leading_vectors
from flwr_fisher.wire.packing import Form

FEWEST_BITS = 2
_WHOLE_BITS, _CUT_BITS = 8, 6
_FIRST, _MORE = 64, 32  # columns: to guess how many to send; beyond the guess

# By matrix: the largest parts of the trace that columns have, descending, and these
# columns.
Spectra = Mapping[str, tuple[Tensor, Tensor]]


class Matrix:
    """A matrix to send (a factor, a dense matrix, or a basis of E-KFAC), and its sizes.

    Parameters
    ----------
    key : str
        Its key in the upload.
    value : Tensor
        ``[groups, n, n]`` or ``[n, n]``.
    energies : Tensor | None
        Of a basis: the sum of the moments that belong to each column, ``[groups, n]``,
        descending.

    Attributes
    ----------
    least : int
        The bytes of its entry without a column.
    """

    def __init__(self, key: str, value: Tensor, energies: Tensor | None) -> None:
        self.key, self.is_basis = key, energies is not None
        self.value = value if value.dim() == 3 else value.unsqueeze(0)
        self.groups, self.n = self.value.shape[:2]
        self._energies = energies
        self.least = packing.HEAD + self._cut(0, FEWEST_BITS) + 1  # for rounding

    def _cut(self, rank: int, bits: int) -> int:
        if self.is_basis:
            return matrix_codes.size_of_basis(self.groups, self.n, rank, bits)
        return matrix_codes.size_of_columns(self.groups, self.n, rank, bits)

    def column(self, bits: int) -> float:
        """Return the bytes of one more column."""
        norm = 0 if self.is_basis else 4
        return self.groups * (self.n * bits / 8 + norm)

    def whole(self, bits: int) -> int:
        """Return the bytes of the whole matrix, beyond `least`."""
        if self.is_basis:
            return packing.HEAD + self._cut(self.n, bits) - self.least
        size = matrix_codes.size_of_whole(self.groups, self.n, bits)
        return packing.HEAD + size - self.least

    def trace(self) -> Tensor:
        """Return what the parts of all columns add up to, ``[groups]`` in float64."""
        if self._energies is not None:
            return self._energies.double().sum(-1)
        return self.value.diagonal(dim1=-2, dim2=-1).double().sum(-1).clamp_min(0)

    def spectrum(self, count: int) -> tuple[Tensor, Tensor]:
        """Return each column's part of the trace, descending, and the columns.

        There are at least `count`, and all where that is as quick.
        """
        advance()
        if self._energies is not None:
            return self._energies, self.value
        return leading_vectors(self.value, count)

    def pack_whole(self, bits: int) -> Tensor:
        """Return the entry of the whole matrix."""
        advance()
        if self.is_basis:
            return self.pack_cut(self.spectrum(self.n), self.n, bits)
        codes = matrix_codes.encode_whole(self.value, bits)
        return packing.pack_matrices(Form.WHOLE, bits, self.value, 0, codes)

    def pack_cut(self, spectrum: tuple[Tensor, Tensor], rank: int, bits: int) -> Tensor:
        """Return the entry of the first `rank` columns."""
        advance()
        if self.is_basis:
            form, codes = Form.BASIS, matrix_codes.encode_basis(self.value, rank, bits)
        else:
            form, codes = (
                Form.COLUMNS,
                matrix_codes.encode_columns(*spectrum, self.trace(), rank, bits),
            )
        return packing.pack_matrices(form, bits, self.value, rank, codes)


def pack_matrices(
    matrices: list[Matrix], left: int, factor_bits: int | None
) -> dict[str, Tensor]:
    """Pack matrices, whole or by their leading columns, into the bytes that are left.

    Parameters
    ----------
    matrices : list[Matrix]
        The matrices; their `least` bytes are spent already.
    left : int
        How many bytes are left.
    factor_bits : int | None
        Bits of a matrix's entry. By default 8 where all fit whole, else 6.

    Returns
    -------
    dict[str, Tensor]
        Bytes by key.
    """
    for bits in [factor_bits] if factor_bits else [_WHOLE_BITS, _CUT_BITS]:
        if sum(max(0, m.whole(bits)) for m in matrices) <= left:
            return {m.key: m.pack_whole(bits) for m in matrices}
    spectra, ranks = _chosen(matrices, left, bits)
    return {
        m.key: m.pack_cut(spectra[m.key], ranks[m.key], bits)
        if m.key in ranks
        else m.pack_whole(bits)
        for m in matrices
    }


def _chosen(
    matrices: list[Matrix], left: float, bits: int
) -> tuple[Spectra, dict[str, int]]:
    """Return leading columns of each matrix, and how many of them to send.

    Few columns are found first, and the other columns' parts are guessed from these;
    then as many as it takes of the matrices of which more are to be sent.
    """
    spectra = {m.key: m.spectrum(_FIRST) for m in matrices}
    while True:
        ranks = _ranks(matrices, spectra, left, bits)
        short = [
            m for m in matrices if ranks.get(m.key, 0) > spectra[m.key][0].shape[-1]
        ]
        if not short:
            return spectra, ranks
        for matrix in short:
            count = ranks[matrix.key] + _MORE
            spectra[matrix.key] = matrix.spectrum(count)


def _ranks(
    matrices: list[Matrix], spectra: Spectra, left: float, bits: int
) -> dict[str, int]:
    """Return how many columns to send of each matrix, without those to send whole.

    Sending a matrix whole frees bytes for the other matrices' columns, so that another
    one may then be sent whole, too.
    """
    todo = list(matrices)
    while True:
        ranks = _greedy(todo, spectra, left, bits)
        whole = [m for m in todo if ranks[m.key] * m.column(bits) >= m.whole(bits)]
        if not whole:
            return ranks
        left -= sum(max(0, m.whole(bits)) for m in whole)
        todo = [m for m in todo if m not in whole]


def _greedy(
    matrices: list[Matrix], spectra: Spectra, left: float, bits: int
) -> dict[str, int]:
    """Return how many columns of each matrix to send if none is sent whole."""
    if not matrices:
        return {}
    shares = []
    for matrix in matrices:
        total = matrix.trace().unsqueeze(-1)
        values = _with_guesses(spectra[matrix.key][0].double(), total, matrix.n)
        shares.append(torch.where(total > 0, values / total, 0).mean(0).cpu())
    columns = torch.tensor([m.column(bits) for m in matrices], dtype=torch.float64)
    lengths = torch.tensor([len(share) for share in shares])
    owner = torch.arange(len(matrices)).repeat_interleave(lengths)
    cost = columns[owner]
    gain = torch.cat(shares) / cost
    order = torch.argsort(gain, descending=True, stable=True)
    order = order[gain[order] > 0]
    bought = order[cost[order].cumsum(0) <= left]
    counts = torch.bincount(owner[bought], minlength=len(matrices))
    return {m.key: int(n) for m, n in zip(matrices, counts, strict=True)}


def _with_guesses(known: Tensor, total: Tensor, n: int) -> Tensor:
    r"""Return all n parts: the known ones, ``[groups, k]``, and guesses of the others.

    Known ones are taken to fall on as :math:`j^{-s}`, with s such that all add up to
    the total.
    """
    count = known.shape[-1]
    if count == n:
        return known
    ratio = torch.arange(count + 1, n + 1).to(known).log() - math.log(count)
    left = total - known.sum(-1, keepdim=True)
    low, high = torch.zeros_like(left), torch.full_like(left, 64.0)
    for _ in range(40):  # halvings
        slope = (low + high) / 2
        above = known[:, -1:] * (-slope * ratio).exp().sum(-1, keepdim=True) > left
        low, high = torch.where(above, slope, low), torch.where(above, high, slope)
    return torch.cat([known, known[:, -1:] * (-low * ratio).exp()], -1)


def sort_columns(parts: Params) -> dict[str, Tensor]:
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


def _permute(matrices: Tensor, columns: Tensor) -> Tensor:
    """Return ``[groups, m, n]`` with each group's columns in another order."""
    index = columns.unsqueeze(-2).expand(matrices.shape)
    return matrices.gather(-1, index)


def column_energies(key: str, parts: Params) -> Tensor:
    """Return the sum of the moments that belong to each column of a basis."""
    moments = parts[f"{key[:-1]}S"]
    return moments.sum(-2 if key.endswith("A") else -1)
