r"""FedFisher's sums of diagonals, from contributions with a bounded norm.

Differential privacy bounds how much one client can change a sum. Each client counts
once, and contributes :math:`u_i = (\hat\Delta_i, \hat F_i, \hat v_i) / \sqrt 3`, a
vector of norm 1 at most, of

.. math:: \hat\Delta_i = \mathrm{clip}_1((\theta_i - \theta) / C), \quad
          \hat F_i = F_i / \|F_i\|, \quad
          \hat v_i = \mathrm{clip}_1(\hat F_i \odot \hat\Delta_i / \kappa) .

The merge needs only the means of the contributions, in multiples of C and
:math:`\kappa`. Fishers are divided by their norms, because no clipping norm would fit
all of their scales.
"""

import math

from torch import Tensor

from flwr_fisher.errors import ParamsError
from flwr_fisher.merge.sums import DiagonalSums
from flwr_fisher.params import Params, clipped, double, norm, scale, select, subtract
from flwr_fisher.server.privacy import Privacy, with_noise

VECTORS = ("displacement", "fisher", "product")
# About the ratio of a product's norm to its displacement's; measured:
# benchmarks/results/privacy.md
_PRODUCT = 0.05
_PARTS = math.sqrt(len(VECTORS))


def contribution(
    start: Params, params: Params, fisher: Params, clipping_norm: float
) -> dict[str, dict[str, Tensor]]:
    """Return a client's three vectors by name; together they have norm 1 at most.

    Parameters
    ----------
    start, params : Mapping[str, Tensor]
        The parameters before and after training.
    fisher : Mapping[str, Tensor]
        The Fisher's diagonal, over the parameters that were trained.
    clipping_norm : float
        C.

    Raises
    ------
    ParamsError
        If a value is not finite.
    """
    own = subtract(select(params, fisher), select(start, fisher))
    step = clipped(scale(own, 1 / clipping_norm), 1.0)
    wide = double(fisher)
    length = float(norm(wide))
    curvature = clipped(scale(wide, 1 / length if length else 0.0), 1.0)
    product = {name: curvature[name] * step[name] / _PRODUCT for name in step}
    parts = (step, curvature, clipped(product, 1.0))
    return {
        name: {k: (v / _PARTS).to(params[k].dtype) for k, v in part.items()}
        for name, part in zip(VECTORS, parts, strict=True)
    }


def private_sums(mean: Params, start: Params, clipping_norm: float) -> DiagonalSums:
    """Return the sums that the mean of the contributions stands for.

    Parameters
    ----------
    mean : Mapping[str, Tensor]
        The contributions' mean, with noise, by ``<vector>/<parameter>``.
    start : Mapping[str, Tensor]
        The parameters from which clients started. Parameters and buffers without a
        Fisher stay as they are.
    clipping_norm : float
        C.

    Raises
    ------
    ParamsError
        If a vector is missing.
    """
    step, fisher, product = (
        {
            key.removeprefix(f"{name}/"): value.double() * _PARTS
            for key, value in mean.items()
            if key.startswith(f"{name}/")
        }
        for name in VECTORS
    )
    if not step.keys() == fisher.keys() == product.keys():
        raise ParamsError(f"expected {VECTORS} over the same parameters")
    params = dict(start)
    for name, value in step.items():
        params[name] = start[name].double() + clipping_norm * value
    entries = {name: value.clamp_min(0) for name, value in fisher.items()}
    unit = clipping_norm * _PRODUCT
    products = {
        name: entry * start[name].double() + unit * product[name]
        for name, entry in entries.items()
    }
    return DiagonalSums(params, entries, products)


def noised(mean: Params, privacy: Privacy, clients: int) -> dict[str, Tensor]:
    """Return the mean of contributions of norm 1 at most, with a sum's noise."""
    return with_noise(mean, privacy.noise_multiplier / clients)
