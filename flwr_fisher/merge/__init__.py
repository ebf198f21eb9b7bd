"""The server's algebra as pure functions, one a paper. Works without Flower."""

from flwr_fisher.merge.fisher import MergeResult, fisher_merge, merge_fisher
from flwr_fisher.merge.options import SOLVERS, MergeOptions, merge_options
from flwr_fisher.merge.posterior import LocalPosterior, fedavg
from flwr_fisher.merge.regmean import regmean

__all__ = [
    "SOLVERS",
    "LocalPosterior",
    "MergeOptions",
    "MergeResult",
    "fedavg",
    "fisher_merge",
    "merge_fisher",
    "merge_options",
    "regmean",
]
