"""One-shot merging of the clients' posteriors into one model, without Flower."""

from flwr_fisher.merge.batch_norms import refresh_norms
from flwr_fisher.merge.fedfisher import MergeResult, fedfisher, fisher_merge
from flwr_fisher.merge.options import SOLVERS, MergeOptions
from flwr_fisher.merge.posterior import LocalPosterior, fedavg
from flwr_fisher.merge.sums import (
    DiagonalSums,
    balanced,
    fedfisher_from_sums,
    partial_traces,
)

__all__ = [
    "SOLVERS",
    "DiagonalSums",
    "LocalPosterior",
    "MergeOptions",
    "MergeResult",
    "balanced",
    "fedavg",
    "fedfisher",
    "fedfisher_from_sums",
    "fisher_merge",
    "partial_traces",
    "refresh_norms",
]
