"""FisherMerge's average of models by diagonal Fishers (Matena & Raffel 2022)."""

from collections.abc import Sequence

from torch import Tensor

from flwr_fisher.merge.fedfisher import fedfisher
from flwr_fisher.merge.posterior import LocalPosterior


def fisher_merge(posteriors: Sequence[LocalPosterior]) -> dict[str, Tensor]:
    r"""Return FisherMerge's average (Matena & Raffel 2022), for diagonal curvatures.

    Elementwise :math:`\sum_i p_i F_i \theta_i / \sum_i p_i F_i`, and FedAvg's mean
    where the denominator is below 1e-6 of its tensors' largest.
    """
    return fedfisher(posteriors, solver="closed-form").params
