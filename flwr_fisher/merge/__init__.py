"""The server's algebra as pure functions, one a paper. Works without Flower."""

from flwr_fisher.merge.fedfish import fedfish_average
from flwr_fisher.merge.fisher import MergeResult, fisher_merge, merge_fisher
from flwr_fisher.merge.options import (
    SOLVERS,
    MergeOptions,
    check_score,
    merge_options,
)
from flwr_fisher.merge.posterior import LocalPosterior, fedavg
from flwr_fisher.merge.regmean import regmean
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
    "LocalPosterior",
    "MergeOptions",
    "MergeResult",
    "OptimizerFactory",
    "add_sums",
    "check_score",
    "fedavg",
    "fedfish_average",
    "fisher_merge",
    "make_optimizer",
    "merge_fisher",
    "merge_options",
    "merge_sums",
    "regmean",
    "server_step",
    "sum_dtype",
    "sums_options",
]
