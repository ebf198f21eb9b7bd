"""Matrices whose codes have come and are checked, and that are not made yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flwr_fisher.curvature.operators.factors import (
    DenseFactor,
    LowRankFactor,
    SymmetricFactor,
    gram,
)

_SMALL = 1024  # rows of a matrix that is better made once than held as codes


@dataclass(frozen=True, slots=True)
class WholeMatrices:
    """Matrices that came whole: rows' norms and entries, of which all are checked.

    Parameters
    ----------
    norms : Tensor
        Of the rows of the Cholesky factors, ``[groups, n]``.
    entries : Tensor
        The lower triangles' signed entries, row by row, ``[groups, n (n + 1) / 2]``.
    traces : Sequence[float]
        Of the matrices, one a group, from the norms in float64.
    """

    norms: Tensor
    entries: Tensor
    traces: Sequence[float]

    def diagonal(self) -> Tensor:
        """Return the diagonals, which bound the rest, with room for rounding."""
        return self.norms.square().mul_(1.001)

    def factor(self) -> SymmetricFactor:
        """Return them in float32; a large one's entries stay integers."""
        groups, n = self.norms.shape
        # What is kept is taken before what is let go again: a merge keeps many clients'
        # matrices, and holes between them would double its memory.
        if n <= _SMALL:
            matrices = torch.empty(groups, n, n, device=self.norms.device)
            lower = self._lower(torch.float32)
            gram(directions(lower).mul_(self.norms.unsqueeze(-1)), out=matrices)
            return DenseFactor(matrices)
        ones, none = torch.ones_like(self.norms), torch.zeros_like(self.norms)
        scales = self.norms.clone()
        lower = self._lower(self.entries.dtype)
        scales.div_(_norms_of(lower).squeeze(-1))
        return LowRankFactor(lower, ones, none, scales)

    def _lower(self, dtype: torch.dtype) -> Tensor:
        """Return lower triangles."""
        groups, n = self.norms.shape
        lower = torch.zeros(groups, n, n, dtype=dtype, device=self.norms.device)
        if n <= _SMALL:
            where = _triangle(n, lower.device)
            lower.view(groups, n * n).index_copy_(1, where, self.entries.to(dtype))
            return lower
        for row in range(n):  # an index of all would take several times their memory
            start = row * (row + 1) // 2
            lower[:, row, : row + 1] = self.entries[:, start : start + row + 1]
        return lower


@dataclass(frozen=True, slots=True)
class ColumnMatrices:
    """Matrices that came as leading vectors, of which every byte is checked.

    Parameters
    ----------
    norms : Tensor
        The root of the smaller eigenvalues' mean, and the vectors' lengths,
        ``[groups, 1 + rank]``.
    entries : Tensor
        The vectors' signed entries, ``[groups, rank, n]``.
    traces : Sequence[float]
        Of the matrices, one a group, from the norms in float64; no entry is above.
    """

    norms: Tensor
    entries: Tensor
    traces: Sequence[float]

    def factor(self) -> LowRankFactor:
        """Return them in float32; the entries stay integers."""
        groups, _, n = self.entries.shape
        lengths = self.norms[:, 1:] / _norms_of(self.entries).squeeze(-1)
        rest = self.norms[:, :1].square().expand(groups, n)
        return LowRankFactor(self.entries.mT, lengths, rest)


def directions(entries: Tensor) -> Tensor:
    """Return unit vectors along the last dimension; zero stays zero."""
    return entries / _norms_of(entries)


def _norms_of(entries: Tensor) -> Tensor:
    """Return the lengths along the last dimension in float32, and 1 for zero."""
    norms: Tensor = torch.linalg.vector_norm(entries.float(), dim=-1, keepdim=True)
    return norms.clamp_min(1)


@lru_cache(maxsize=32)
def _triangle(n: int, device: torch.device) -> Tensor:
    """Return where the lower triangle's entries are in a matrix of n rows."""
    rows, columns = torch.tril_indices(n, n, device=device)
    where: Tensor = rows.mul_(n).add_(columns)
    return where
