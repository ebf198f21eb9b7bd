r"""Differential privacy of sums over clients: clipped contributions, Gaussian noise.

It protects each client: the sums with and without its contribution are almost
indistinguishable. A contribution's Euclidean norm is at most C. The noise of a sum has
the standard deviation z C, where z is the noise multiplier: the Gaussian mechanism
(Dwork & Roth 2014). If nobody may see a sum without noise, each client adds a share.

Noise is drawn as float64, and rounded with the contribution to units of fixed point, at
most :math:`10^{-7}` of it. The accountant assumes that it is continuous. A proof that
includes rounding needs discrete Gaussians (Kairouz, Liu & Steinke 2021).
"""

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING

import numpy as np
import torch
from torch import Tensor

from flwr_fisher.errors import check_positive, check_whole, extra
from flwr_fisher.options import Options, option

_BEYOND = 10.0  # standard deviations at which noise is cut, once in 1e23 draws


class Privacy(Options):
    r"""The differential privacy of a strategy's sums.

    Every client counts once, whatever its number of examples. All of its data are
    protected together.

    Raises
    ------
    ConfigurationError
        If a value is out of range.

    Examples
    --------
    >>> privacy = Privacy(noise_multiplier=1.0, clipping_norm=0.5)
    >>> round(privacy.share(100), 3)
    0.071
    >>> round(privacy.epsilon(releases=1, delta=1e-5), 1)
    4.7
    """

    noise_multiplier: float = option(
        MISSING,
        "z, the standard deviation of a sum's noise in multiples of `clipping_norm`.",
        above=0,
    )
    clipping_norm: float = option(
        MISSING,
        "C, the largest Euclidean norm that a client's change of the model may have; a "
        "longer change is shortened.",
        above=0,
    )
    honest: float = option(
        0.5,
        "h, the share of the clients whose noise counts: they are still connected at "
        "the end, and do not work together with the server. With secure sums, each of "
        r"M clients adds noise of variance :math:`z^2 C^2 / \lceil h M \rceil`. If all "
        "are honest, a sum has :math:`1/h` times the variance that it needs. A round "
        "that ends with fewer clients fails, and no one sees its sum.",
        above=0,
        high=1,
    )

    def fewest(self, clients: int) -> int:
        """Return how many of the sampled clients a sum must have at least."""
        return math.ceil(round(self.honest * clients, 9))  # 0.55 * 100 is above 55

    def share(self, clients: int) -> float:
        """Return the standard deviation of each client's share of the noise."""
        spread = self.noise_multiplier * self.clipping_norm
        return spread / math.sqrt(self.fewest(clients))

    def epsilon(self, releases: int, delta: float) -> float:
        r"""Return :math:`\varepsilon` of several sums, by Opacus's RDP accountant.

        Parameters
        ----------
        releases : int
            How many rounds a client takes part in. Sampling of clients does not reduce
            :math:`\varepsilon`, because the server knows which clients it asked.
        delta : float
            :math:`\delta`, less than one over the number of clients.

        Raises
        ------
        MissingExtraError
            If Opacus is not installed: ``pip install "flwr-fisher[privacy]"``.
        """
        check_whole("releases", releases, 1)
        check_positive("delta", delta)
        with extra("privacy"):
            from opacus.accountants import RDPAccountant
        accountant = RDPAccountant()
        accountant.history = [(self.noise_multiplier, 1.0, releases)]
        return float(accountant.get_epsilon(delta))


def with_noise(tensors: Mapping[str, Tensor], deviation: float) -> dict[str, Tensor]:
    """Return tensors in float64 with Gaussian noise from the system's randomness."""
    return {
        name: value.double() + deviation * _gaussian(value.numel()).reshape(value.shape)
        for name, value in tensors.items()
    }


def exponent_for(most: float, deviation: float) -> int:
    """Return an e, independent of the data: noisy entries are below ``2**e``."""
    return math.frexp(most + _BEYOND * deviation)[1]


def _gaussian(count: int) -> Tensor:
    """Return standard normal numbers from the system's randomness."""
    words = np.frombuffer(os.urandom(8 * count), np.uint64)
    units = (words >> np.uint64(11)).astype(np.float64) + 0.5
    normal: Tensor = torch.special.ndtri(torch.from_numpy(units * 2.0**-53))
    return normal.clamp(-_BEYOND, _BEYOND)
