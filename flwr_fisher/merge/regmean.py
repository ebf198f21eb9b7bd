"""RegMean: merging linear maps by least squares on their inputs (Jin et al. 2023)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_fisher.curvature import Kronecker, WeightedSum
from flwr_fisher.errors import StructureError, check_range
from flwr_fisher.merge.posterior import LocalPosterior, fedavg
from flwr_fisher.params import finite, shares_of


def regmean(
    posteriors: Sequence[LocalPosterior], *, off_diagonal: float = 0.9
) -> dict[str, Tensor]:
    r"""Return the parameters of RegMean's merge.

    For each layer with a Kronecker curvature, and its weight as a matrix ``[out, in]``,
    the result is

    .. math:: W = \Big(\sum_i p_i W_i A_i\Big)\Big(\sum_i p_i A_i\Big)^{+},

    where :math:`A_i` is the second moment of the layer's inputs with its off-diagonal
    entries scaled by `off_diagonal`, and :math:`^+` the pseudoinverse, for which an
    eigenvalue below n times float32's rounding of the largest (n inputs) is zero.
    Everything else is averaged. (In a K-FAC of
    transformers' ``Conv1D``, whose weight is ``[in, out]``, inputs and outputs change
    places, so that :math:`A_i` is of gradients: use ``fedfisher`` for such a model.)

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        Posteriors with ``structure="kfac"``; only the input factors are used.
    off_diagonal : float, default 0.9
        In [0, 1]; the FedFisher paper tries 0.1 and 0.9.

    Raises
    ------
    ConfigurationError
        If `off_diagonal` is out of range.
    ParamsError
        If a layer's solution is not finite.
    StructureError
        If no layer has a Kronecker curvature.
    """
    check_range("off_diagonal", off_diagonal, 0, 1)
    merged = fedavg(posteriors)
    total = WeightedSum(
        [p.curvature.regularised(shrink=1 - off_diagonal) for p in posteriors],
        shares_of([p.num_examples for p in posteriors]),
    )
    pairs = [[(w, k) for w, k in b if isinstance(k, Kronecker)] for b in total.blocks()]
    # One client's layer may have a diagonal, where its data did not explain it.
    layers = [layer for layer in pairs if len(layer) == len(posteriors)]
    if not layers:
        raise StructureError(
            "regmean needs the input factors of K-FAC: use structure='kfac'"
        )
    for layer in layers:
        merged |= _least_squares(layer, posteriors)
    return merged


def _least_squares(
    layer: list[tuple[float, Kronecker]], posteriors: Sequence[LocalPosterior]
) -> dict[str, Tensor]:
    first = layer[0][1]
    gram = torch.stack([w * k.A.double() for w, k in layer]).sum(0)
    products = [
        w * k.as_matrices(posterior.params).double() @ k.A.double()
        for (w, k), posterior in zip(layer, posteriors, strict=True)
    ]
    what = f"RegMean's solution for '{first.weight}'"
    # The rounding errors of a singular matrix's factors must not be inverted.
    least = gram.shape[-1] * torch.finfo(first.A.dtype).eps
    inverse = torch.linalg.pinv(gram, rtol=least, hermitian=True)
    solution = torch.stack(products).sum(0) @ inverse
    return finite(first.as_params(solution.to(first.A.dtype)), what)
