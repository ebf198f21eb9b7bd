"""Products with a large feature matrix of any floating dtype and a few columns."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Small enough for a cache, large enough for a matrix product.
_BLOCK_BYTES = 2**23


def block_rows(p: int, dtype: torch.dtype) -> int:
    """Return how many rows of p entries to copy to another dtype at a time."""
    return max(1, _BLOCK_BYTES // (p * dtype.itemsize))


def times(Z: Tensor, right: Tensor) -> Tensor:
    """Return ``Z @ right`` as ``[n, c]`` in float64, multiplied in at least float32."""
    dtype = _wide(Z, right.dtype)
    columns = right.to(dtype).mT
    out = right.new_empty(len(Z), right.shape[1], dtype=torch.float64)
    for block, rows in _blocks(Z, dtype):
        # BLAS is faster with the few columns as rows.
        out[block] = (columns @ rows.mT).mT
    return out


def transposed_times(Z: Tensor, left: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``Z.T @ left`` as ``[p, c]`` in `dtype`, from at least float32."""
    wide = _wide(Z, dtype)
    columns = left.to(wide).mT.contiguous()
    out = left.new_zeros(left.shape[1], Z.shape[1], dtype=wide)
    for block, rows in _blocks(Z, wide):
        # Three times as fast as rows.mT @ left[block].
        out.addmm_(columns[:, block], rows)
    return out.mT.contiguous().to(dtype)


def _blocks(Z: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield Z's rows in `dtype`: all at once where they are in it already."""
    n, p = Z.shape
    rows = n if Z.dtype == dtype else block_rows(p, dtype)
    for start in range(0, n, rows):
        block = slice(start, start + rows)
        yield block, Z[block].to(dtype)


def _wide(Z: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the wider of both dtypes and float32."""
    return torch.promote_types(torch.promote_types(Z.dtype, dtype), torch.float32)
