r"""The leading eigenvectors of a large matrix, of which only a part is wanted.

A matrix :math:`M` of up to 512 rows is decomposed whole. Of a larger one the wanted
part comes from randomised subspace iteration and the Rayleigh-Ritz method (Halko,
Martinsson & Tropp, "Finding structure with randomness", SIAM Review 2011, algorithms
4.4 and 5.3): from the eigenvectors of :math:`Q^\top M Q`, where Q is an orthonormal
basis of :math:`M^2 \Omega` and :math:`\Omega` has k random columns.

No value is above the eigenvalue that it stands for. What the k vectors leave,
:math:`\operatorname{tr} M - \sum_j \hat\lambda_j`, is known, and in expectation at most

.. math:: \sum_{j>r} \lambda_j
          \Big(1 + \frac{r}{p-1} \Big(\frac{\lambda_j}{\lambda_r}\Big)^3\Big)

for any :math:`r + p = k` with :math:`p \ge 2`: as in theorem 10.5 there, whose proof
uses that :math:`\Omega` is multiplied by a root of M, and holds for its square as well.
"""

import torch
from torch import Tensor

_WHOLE = 512  # rows


def leading_vectors(matrices: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return leading eigenvalues and eigenvectors, those of large matrices roughly.

    Parameters
    ----------
    matrices : Tensor
        ``[groups, n, n]``, symmetric positive semi-definite.
    count : int
        k, how many; all n are returned where that is as quick.

    Returns
    -------
    tuple[Tensor, Tensor]
        ``[groups, k]``, descending and not negative, and orthonormal columns
        ``[groups, n, k]``; the same ones in every call.
    """
    # LAPACK has no decompositions of smaller floats.
    wide = matrices if matrices.itemsize >= 4 else matrices.float()
    n = wide.shape[-1]
    if n <= _WHOLE or 2 * count >= n:
        return _descending(*torch.linalg.eigh(wide))
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(len(wide), n, count, generator=generator).to(wide)
    basis = _orthonormal(wide @ _orthonormal(wide @ columns))
    inner = basis.mT @ (wide @ basis)
    values, rotation = torch.linalg.eigh(inner / 2 + inner.mT / 2)
    return _descending(values, basis @ rotation)


def _descending(values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    return values.flip(-1).clamp_min(0), vectors.flip(-1)


def _orthonormal(columns: Tensor) -> Tensor:
    Q: Tensor = torch.linalg.qr(columns)[0]
    return Q
