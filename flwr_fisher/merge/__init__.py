"""The server's algebra as pure functions, one a paper. Works without Flower."""

from flwr_fisher.merge.fagh import FaghStep, fagh_step
from flwr_fisher.merge.fedexp import FedExpStep, fedexp_step, last_two_mean
from flwr_fisher.merge.fedfish import fedfish_average
from flwr_fisher.merge.fedga import fedga_start
from flwr_fisher.merge.fisher import MergeResult, fisher_merge, merge_fisher
from flwr_fisher.merge.moments import (
    FeatureMoments,
    combine_moments,
    feature_moments,
    standardisation,
)
from flwr_fisher.merge.newton import done_direction, giant_direction, newton_step
from flwr_fisher.merge.options import (
    SOLVERS,
    MergeOptions,
    check_score,
    merge_options,
)
from flwr_fisher.merge.posterior import LocalPosterior, fedavg
from flwr_fisher.merge.regmean import regmean
from flwr_fisher.merge.scaffold import scaffold_control, scaffold_step
from flwr_fisher.merge.server_optimizer import (
    OPTIMIZERS,
    OptimizerFactory,
    make_optimizer,
    server_step,
)
from flwr_fisher.merge.spectrum import (
    Spectrum,
    check_lr,
    gram_spectrum,
    largest_safe_lr,
)
from flwr_fisher.merge.sums import (
    DiagonalSums,
    add_sums,
    merge_sums,
    sum_dtype,
    sums_options,
)
from flwr_fisher.merge.tct import tct_residual, tct_steps, tct_update
from flwr_fisher.merge.tct_average import tct_average, tct_control

__all__ = [
    "OPTIMIZERS",
    "SOLVERS",
    "DiagonalSums",
    "FaghStep",
    "FeatureMoments",
    "FedExpStep",
    "LocalPosterior",
    "MergeOptions",
    "MergeResult",
    "OptimizerFactory",
    "Spectrum",
    "add_sums",
    "check_lr",
    "check_score",
    "combine_moments",
    "done_direction",
    "fagh_step",
    "feature_moments",
    "fedavg",
    "fedexp_step",
    "fedfish_average",
    "fedga_start",
    "fisher_merge",
    "giant_direction",
    "gram_spectrum",
    "largest_safe_lr",
    "last_two_mean",
    "make_optimizer",
    "merge_fisher",
    "merge_options",
    "merge_sums",
    "newton_step",
    "regmean",
    "scaffold_control",
    "scaffold_step",
    "server_step",
    "standardisation",
    "sum_dtype",
    "sums_options",
    "tct_average",
    "tct_control",
    "tct_residual",
    "tct_steps",
    "tct_update",
]
