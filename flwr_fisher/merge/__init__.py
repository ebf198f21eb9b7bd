"""One-shot merging of the clients' posteriors into one model, without Flower."""

from flwr_fisher.merge.fedfisher import fedfisher, fisher_merge
from flwr_fisher.merge.influence import Influence, influence
from flwr_fisher.merge.layer_sums import balanced, partial_traces
from flwr_fisher.merge.matching import matched
from flwr_fisher.merge.options import (
    SOLVERS,
    MergeOptions,
    MergeSettings,
    merge_settings,
)
from flwr_fisher.merge.posterior import LocalPosterior, fedavg
from flwr_fisher.merge.refresh import refresh_norms
from flwr_fisher.merge.solve import MergeResult
from flwr_fisher.merge.sums import DiagonalSums, fedfisher_from_sums, sums_settings

__all__ = [
    "SOLVERS",
    "DiagonalSums",
    "Influence",
    "LocalPosterior",
    "MergeOptions",
    "MergeResult",
    "MergeSettings",
    "balanced",
    "fedavg",
    "fedfisher",
    "fedfisher_from_sums",
    "fisher_merge",
    "influence",
    "matched",
    "merge_settings",
    "partial_traces",
    "refresh_norms",
    "sums_settings",
]
