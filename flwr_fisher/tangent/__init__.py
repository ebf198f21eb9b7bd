"""TCT's second stage: a linear regression on tangent features, without Flower."""

from flwr_fisher.tangent.average import tct_average, tct_control
from flwr_fisher.tangent.features import TangentFeatures
from flwr_fisher.tangent.frozen_head import (
    HeadSums,
    chosen_ridge,
    closed_form_head,
    head_sums,
    lda_head,
)
from flwr_fisher.tangent.model import TCTModel
from flwr_fisher.tangent.regression import tct_residual, tct_steps, tct_update
from flwr_fisher.tangent.spectrum import (
    Spectrum,
    check_lr,
    gram_spectrum,
    largest_safe_lr,
)
from flwr_fisher.tangent.standardisation import (
    FeatureSums,
    feature_sums,
    standardisation,
)

__all__ = [
    "FeatureSums",
    "HeadSums",
    "Spectrum",
    "TCTModel",
    "TangentFeatures",
    "check_lr",
    "chosen_ridge",
    "closed_form_head",
    "feature_sums",
    "gram_spectrum",
    "head_sums",
    "largest_safe_lr",
    "lda_head",
    "standardisation",
    "tct_average",
    "tct_control",
    "tct_residual",
    "tct_steps",
    "tct_update",
]
