"""The eigenvalues of a client's Gram matrix, and the learning rates that they allow."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, check_positive

# small enough for a cache, large enough for a matrix product
_BLOCK_BYTES = 2**23


def block_rows(p: int, dtype: torch.dtype) -> int:
    """Return how many rows of p entries to convert to another dtype at a time."""
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
    """Yield blocks of Z's rows in `dtype`, or all rows at once if Z has that dtype."""
    n, p = Z.shape
    rows = n if Z.dtype == dtype else block_rows(p, dtype)
    for start in range(0, n, rows):
        block = slice(start, start + rows)
        yield block, Z[block].to(dtype)


def _wide(Z: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the widest of both dtypes and float32."""
    return torch.promote_types(torch.promote_types(Z.dtype, dtype), torch.float32)


_COLUMNS, _ROWS = 2048, 256


@dataclass(frozen=True)
class Spectrum:
    r"""The eigendecomposition of :math:`K = Z Z^\top / n`.

    Parameters
    ----------
    eigenvalues : Tensor
        ``[n]`` float64, ascending, none negative.
    eigenvectors : Tensor
        ``[n, n]`` float64, one a column.
    """

    eigenvalues: Tensor
    eigenvectors: Tensor

    @property
    def largest(self) -> float:
        r"""The largest eigenvalue, :math:`\lambda_\max`."""
        return float(self.eigenvalues.max())


def gram_spectrum(Z: Tensor) -> Spectrum:
    r"""Return the spectrum of :math:`K = Z Z^\top / n`.

    Its eigenvalues are those of the regression's Hessian :math:`Z^\top Z / n`, so that
    gradient steps converge below a rate of :math:`2 / \lambda_\max`. K is summed and
    decomposed in float64, over blocks of columns. An error in K is amplified by up to
    :math:`\eta M`, so float32 would lose more digits here than in the rest of a round.

    Parameters
    ----------
    Z : Tensor
        ``[n, p]``, of any floating dtype, also memory-mapped. The computation takes
        about :math:`32 n^2` further bytes, and time as :math:`n^2 p + 10 n^3`.

    Examples
    --------
    >>> gram_spectrum(torch.tensor([[2.0, 0.0], [0.0, 4.0]])).eigenvalues
    tensor([2., 8.], dtype=torch.float64)
    """
    n, p = Z.shape
    K = torch.zeros(n, n, dtype=torch.float64, device=Z.device)
    for start in range(0, p, _COLUMNS):
        block = Z[:, start : start + _COLUMNS].double()
        # K is symmetric, and eigh reads its lower triangle only.
        for first in range(0, n, _ROWS):
            last = min(first + _ROWS, n)
            K[first:last, :last].addmm_(block[first:last], block[:last].mT)
    eigenvalues, eigenvectors = torch.linalg.eigh(K.div_(n), UPLO="L")
    return Spectrum(eigenvalues.clamp_(min=0), eigenvectors)


def largest_safe_lr(largest_eigenvalue: float) -> float:
    r"""Return the largest learning rate below :math:`2 / \lambda_\max`; infinity for 0.

    With :math:`2 / \lambda_\max` or more, gradient steps on the regression diverge.
    With :math:`1 / \lambda_\max` they are the fastest along the steepest direction.

    Parameters
    ----------
    largest_eigenvalue : float
        :math:`\lambda_\max`, at least 0.

    Raises
    ------
    ConfigurationError
        If it is negative or not finite.

    Examples
    --------
    >>> largest_safe_lr(4.0)
    0.49999999999999994
    """
    check_positive("the largest eigenvalue", largest_eigenvalue, or_zero=True)
    lr = math.inf if largest_eigenvalue == 0 else 2 / largest_eigenvalue
    while lr * largest_eigenvalue >= 2:
        lr = math.nextafter(lr, 0)
    return lr


def check_lr(lr: float, largest_eigenvalue: float) -> None:
    r"""Raise :class:`ConfigurationError` unless :math:`0 < \eta < 2 / \lambda_\max`.

    Parameters
    ----------
    lr : float
        :math:`\eta`.
    largest_eigenvalue : float
        :math:`\lambda_\max`, as of :attr:`Spectrum.largest`.

    Examples
    --------
    >>> check_lr(0.5, 6.0)
    Traceback (most recent call last):
    flwr_fisher.errors.ConfigurationError: lr 0.5 is too large for these features: ...
    """
    check_positive("lr", lr)
    if lr > (safe := largest_safe_lr(largest_eigenvalue)):
        raise ConfigurationError(
            f"lr {lr:g} is too large for these features: their largest eigenvalue is "
            f"{largest_eigenvalue:.6g}, so steps diverge. The largest safe lr is {safe}"
        )


# Of a spectrum: K, its eigenvectors and eigh's work take 32 n^2 bytes, here 13 GB.
MOST_EXAMPLES = 20_000
_VECTORS, _ITERATIONS = 8, 60


def largest_gram_eigenvalue(Z: Tensor) -> float:
    r"""Return :math:`\lambda_\max` of :math:`Z Z^\top / n`, rounded up.

    It takes subspace iteration from a fixed start, and does not compute the matrix. The
    Ritz value of the steepest direction is at most :math:`\lambda_\max`. So the norm of
    its residual is added, which bounds the distance to an eigenvalue.

    Parameters
    ----------
    Z : Tensor
        ``[n, p]``, of any floating dtype, also memory-mapped.

    Examples
    --------
    >>> round(largest_gram_eigenvalue(torch.tensor([[2.0, 0.0], [0.0, 4.0]])), 6)
    8.0
    """
    n = len(Z)
    generator, shape = torch.Generator().manual_seed(0), (n, min(n, _VECTORS))
    start = torch.randn(shape, generator=generator, dtype=torch.float32)
    basis = torch.linalg.qr(start.double().to(Z.device)).Q
    for _ in range(_ITERATIONS):
        moved = times(Z, transposed_times(Z, basis, torch.float32)) / n
        small = basis.mT @ moved
        values, vectors = torch.linalg.eigh((small + small.mT) / 2)
        residual = (moved - values[-1] * basis) @ vectors[:, -1]
        basis = torch.linalg.qr(moved).Q
    return float(values[-1] + residual.norm())
