"""Means and deviations of features over all clients, who upload no features."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.errors import DataError, ParamsError
from flwr_fisher.tangent.spectrum import block_rows, check_features


@dataclass(frozen=True)
class FeatureMoments:
    r"""A number of examples, with each feature's mean and sum of squared deviations.

    Parameters
    ----------
    mean : Tensor
        ``[p]`` float64.
    m2 : Tensor
        ``[p]`` float64, :math:`\sum_j (z_j - \bar z)^2`.
    count : int
        n, the number of examples.

    Raises
    ------
    ParamsError
        If shapes differ, a value is not finite, or `m2` or `count` is out of range.
    """

    mean: Tensor
    m2: Tensor
    count: int

    def __post_init__(self) -> None:
        if self.mean.dim() != 1 or self.mean.shape != self.m2.shape:
            raise ParamsError(
                f"mean {tuple(self.mean.shape)} and m2 {tuple(self.m2.shape)} must "
                "both be [p]"
            )
        if not 1 <= self.count < math.inf:
            raise ParamsError(f"moments need at least one example, got {self.count}")
        finite = self.mean.isfinite().all() and self.m2.isfinite().all()
        if not finite or bool((self.m2 < 0).any()):
            raise ParamsError("moments hold NaN, infinity or a negative m2")


def feature_moments(Z: Tensor) -> FeatureMoments:
    r"""Return the moments of a client's features.

    They are summed in float64 over blocks of rows, each relative to its own mean. So no
    digits are lost if the mean is far above the deviation.

    Parameters
    ----------
    Z : Tensor
        ``[n, p]``, of any floating dtype, also memory-mapped.

    Raises
    ------
    DataError
        If there is no example or feature, or a value is not finite.

    Examples
    --------
    >>> feature_moments(torch.tensor([[1.0], [3.0]]))
    FeatureMoments(mean=tensor([2.], dtype=torch.float64),
                   m2=tensor([2.], dtype=torch.float64), count=2)
    """
    check_features(Z)
    blocks = torch.split(Z, block_rows(Z.shape[1], torch.float64))
    return combine_moments([_moments(rows.double()) for rows in blocks])


def combine_moments(moments: Sequence[FeatureMoments]) -> FeatureMoments:
    r"""Return the moments of all clients' features together.

    .. math:: \bar z = \sum_i \frac{n_i}{N} \bar z_i, \qquad
              M_2 = \sum_i \big( M_{2,i} + n_i (\bar z_i - \bar z)^2 \big)

    (Chan, Golub & LeVeque 1983). So no large squares are subtracted from each other.

    Parameters
    ----------
    moments : Sequence[FeatureMoments]
        The moments of each client.

    Raises
    ------
    ParamsError
        If there are none, their numbers of features differ, or a sum of squared
        deviations is too large for float64.

    Examples
    --------
    >>> one, two = (feature_moments(torch.tensor([[z]])) for z in (1.0, 3.0))
    >>> combine_moments([one, two]).m2
    tensor([2.], dtype=torch.float64)
    """
    if not moments:
        raise ParamsError("there are no moments to combine: pass one client's or more")
    sizes = sorted({len(part.mean) for part in moments})
    if len(sizes) > 1:
        raise ParamsError(f"moments have different numbers of features: {sizes}")
    total = sum(part.count for part in moments)
    origin = moments[0].mean
    mean = origin.clone()
    for part in moments[1:]:
        mean.add_(part.mean - origin, alpha=part.count / total)
    m2 = torch.zeros_like(mean)
    for part in moments:
        m2 += part.m2 + part.count * (part.mean - mean).square()
    if not m2.isfinite().all():
        _refuse(moments, int((~m2.isfinite()).nonzero()[0]))
    return FeatureMoments(mean, m2, total)


def _refuse(moments: Sequence[FeatureMoments], feature: int) -> None:
    """Raise an error that names the client with a feature too large to square."""
    sizes = [abs(float(part.mean[feature])) for part in moments]
    spreads = [float(part.m2[feature]) for part in moments]
    index = max(range(len(sizes)), key=lambda i: (sizes[i], spreads[i]))
    raise ParamsError(
        f"the squared deviations of feature {feature} overflow float64: client "
        f"{index} has a mean of {moments[index].mean[feature]:g}"
    )


def standardisation(moments: FeatureMoments) -> tuple[Tensor, Tensor]:
    r"""Return the mean and standard deviation for standardising features.

    The deviation is that of the population, :math:`\sqrt{M_2 / N}`. A constant feature
    gets the standard deviation 1: minus its mean it is zero, and has no effect. A
    feature counts as constant if it varies by no more than the rounding of float32, in
    which features are computed.

    Parameters
    ----------
    moments : FeatureMoments
        The moments of all clients together.

    Returns
    -------
    mean, std : Tensor
        ``[p]`` float64, each `std` positive.

    Examples
    --------
    >>> Z = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    >>> standardisation(feature_moments(Z))
    (tensor([2., 5.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
    """
    single = torch.finfo(torch.float32)
    std = (moments.m2 / moments.count).sqrt()
    constant = std <= (single.eps * moments.mean.abs()).clamp(min=single.tiny)
    return moments.mean, std.masked_fill(constant, 1.0)


def _moments(rows: Tensor) -> FeatureMoments:
    if not rows.isfinite().all():
        raise DataError("the features hold NaN or infinity")
    mean = rows.mean(0)
    return FeatureMoments(mean, (rows - mean).square().sum(0), len(rows))
