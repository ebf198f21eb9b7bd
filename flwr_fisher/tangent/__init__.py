"""TCT's second stage: a linear regression on tangent features, without Flower."""

from flwr_fisher.tangent.average import tct_average as tct_average
from flwr_fisher.tangent.average import tct_control as tct_control
from flwr_fisher.tangent.features import TangentFeatures as TangentFeatures
from flwr_fisher.tangent.frozen_head import HeadSums as HeadSums
from flwr_fisher.tangent.frozen_head import chosen_ridge as chosen_ridge
from flwr_fisher.tangent.frozen_head import closed_form_head as closed_form_head
from flwr_fisher.tangent.frozen_head import head_sums as head_sums
from flwr_fisher.tangent.frozen_head import lda_head as lda_head
from flwr_fisher.tangent.model import TCTModel as TCTModel
from flwr_fisher.tangent.regression import tct_residual as tct_residual
from flwr_fisher.tangent.regression import tct_steps as tct_steps
from flwr_fisher.tangent.regression import tct_update as tct_update
from flwr_fisher.tangent.spectrum import Spectrum as Spectrum
from flwr_fisher.tangent.spectrum import check_lr as check_lr
from flwr_fisher.tangent.spectrum import gram_spectrum as gram_spectrum
from flwr_fisher.tangent.spectrum import largest_safe_lr as largest_safe_lr
from flwr_fisher.tangent.standardisation import FeatureSums as FeatureSums
from flwr_fisher.tangent.standardisation import feature_sums as feature_sums
from flwr_fisher.tangent.standardisation import standardisation as standardisation
