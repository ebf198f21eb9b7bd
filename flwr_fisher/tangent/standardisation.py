"""Means and deviations of features over all clients, who upload no features."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.tangent.spectrum import block_rows


@dataclass(frozen=True)
class FeatureSums:
    r"""A number of examples, with the sums of their features and of the squares.

    If they are added up over clients, the result is the sums of the pooled data.

    Parameters
    ----------
    total : Tensor
        ``[p]`` float64, :math:`\sum_j z_j`.
    squares : Tensor
        ``[p]`` float64, :math:`\sum_j z_j^2`.
    count : float
        n, the number of examples.
    """

    total: Tensor
    squares: Tensor
    count: float


def feature_sums(Z: Tensor) -> FeatureSums:
    r"""Return the sums of a client's features, in float64.

    Parameters
    ----------
    Z : Tensor
        ``[n, p]``, of any floating dtype, also memory-mapped.

    Examples
    --------
    >>> feature_sums(torch.tensor([[1.0], [3.0]]))
    FeatureSums(total=tensor([4.], dtype=torch.float64),
                squares=tensor([10.], dtype=torch.float64), count=2)
    """
    total = torch.zeros(Z.shape[1], dtype=torch.float64, device=Z.device)
    squares = torch.zeros_like(total)
    for rows in torch.split(Z, block_rows(Z.shape[1], torch.float64)):
        wide = rows.double()
        total += wide.sum(0)
        squares += wide.square().sum(0)
    return FeatureSums(total, squares, len(Z))


def standardisation(clients: Sequence[FeatureSums]) -> tuple[Tensor, Tensor]:
    r"""Return the mean and standard deviation over all clients' features.

    .. math:: \mu = \frac1N \sum_i \sum_j z_{ij}, \qquad
              \sigma^2 = \frac1N \sum_i \sum_j z_{ij}^2 - \mu^2

    The difference loses digits where the mean is far above the deviation. In float64
    these are fewer than features lack, which are computed in float32. A constant
    feature gets the standard deviation 1: minus its mean it is zero, and has no effect.
    A feature counts as constant if it varies by no more than the rounding of float32.

    Parameters
    ----------
    clients : Sequence[FeatureSums]
        The sums of each client, at least one.

    Returns
    -------
    mean, std : Tensor
        ``[p]`` float64, each `std` positive.

    Examples
    --------
    >>> one, two = (feature_sums(torch.tensor([[z, 5.0]])) for z in (1.0, 3.0))
    >>> standardisation([one, two])
    (tensor([2., 5.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
    """
    count = sum(sums.count for sums in clients)
    mean = torch.stack([sums.total for sums in clients]).sum(0) / count
    square = torch.stack([sums.squares for sums in clients]).sum(0) / count
    std = (square - mean.square()).clamp_min(0).sqrt()
    single = torch.finfo(torch.float32)
    constant = std <= (single.eps * mean.abs()).clamp(min=single.tiny)
    return mean, std.masked_fill(constant, 1.0)
