"""The server's algebra as pure functions, one a paper. Works without Flower."""

from flwr_fisher.merge.fagh import FaghStep, fagh_step
from flwr_fisher.merge.fedexp import FedExpStep, fedexp_step, last_two_mean
from flwr_fisher.merge.fedfish import fedfish_average
from flwr_fisher.merge.fedga import fedga_start
from flwr_fisher.merge.fisher import MergeResult, fisher_merge, merge_fisher
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
from flwr_fisher.merge.sums import (
    DiagonalSums,
    add_sums,
    merge_sums,
    sum_dtype,
    sums_options,
)

__all__ = [
    "OPTIMIZERS",
    "SOLVERS",
    "DiagonalSums",
    "FaghStep",
    "FedExpStep",
    "LocalPosterior",
    "MergeOptions",
    "MergeResult",
    "OptimizerFactory",
    "add_sums",
    "check_score",
    "done_direction",
    "fagh_step",
    "fedavg",
    "fedexp_step",
    "fedfish_average",
    "fedga_start",
    "fisher_merge",
    "giant_direction",
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
    "sum_dtype",
    "sums_options",
]
