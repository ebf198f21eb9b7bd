"""The steepest direction of a regression that has too many examples for a spectrum."""

import torch
from torch import Tensor

from flwr_fisher.tangent.products import times, transposed_times
from flwr_fisher.tangent.spectrum import check_features

# Of a spectrum: K, its eigenvectors and eigh's work take 32 n^2 bytes, here 13 GB.
MOST_EXAMPLES = 20_000
_VECTORS, _ITERATIONS = 8, 60


def largest_gram_eigenvalue(Z: Tensor) -> float:
    r"""Return :math:`\lambda_\max` of :math:`Z Z^\top / n`, rounded up.

    The matrix is not formed: subspace iteration from a fixed start. The Ritz value of
    the steepest direction is at most :math:`\lambda_\max`, so the norm of its residual,
    which bounds how far an eigenvalue is from it, is added.

    Parameters
    ----------
    Z : Tensor
        ``[n, p]``, of any floating dtype, also memory-mapped.

    Raises
    ------
    DataError
        If there is no example or feature.

    Examples
    --------
    >>> round(largest_gram_eigenvalue(torch.tensor([[2.0, 0.0], [0.0, 4.0]])), 6)
    8.0
    """
    check_features(Z)
    n = len(Z)
    start = torch.randn(n, min(n, _VECTORS), generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(start.double().to(Z.device)).Q
    for _ in range(_ITERATIONS):
        moved = times(Z, transposed_times(Z, basis, torch.float32)) / n
        small = basis.mT @ moved
        values, vectors = torch.linalg.eigh((small + small.mT) / 2)
        residual = (moved - values[-1] * basis) @ vectors[:, -1]
        basis = torch.linalg.qr(moved).Q
    return float(values[-1] + residual.norm())
