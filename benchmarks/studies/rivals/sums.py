"""K-FAC merged from sums over clients, without a federation around it."""

from torch import Tensor

from flwr_fisher.merge import (
    LocalPosterior,
    MergeOptions,
    balanced,
    fedavg,
    partial_traces,
)
from flwr_fisher.merge.sums_solver import advanced, begin, merged
from flwr_fisher.params import select, subtract, weighted_mean
from flwr_fisher.wire import curvature_to_tensors, tensors_to_curvature


def from_sums(uploads: list[LocalPosterior], **own: float) -> dict[str, Tensor]:
    """Merge as a server does that sees weighted means over the clients alone."""
    options = MergeOptions(**own).for_sums("kfac").filled(uploads[0].params)
    weights = [upload.num_examples for upload in uploads]
    settings = {k: getattr(options, k) for k in ("shrink", "damping", "balance")}
    fishers = [balanced(u.curvature, **settings) for u in uploads]
    average = fedavg(uploads)
    pulls = []
    for F, upload in zip(fishers, uploads, strict=True):
        away = subtract(select(upload.params, F.shapes), select(average, F.shapes))
        pulls.append(F.matvec(away))
    parts = [curvature_to_tensors(partial_traces(F)) for F in fishers]
    traces = tensors_to_curvature(weighted_mean(parts, weights), average)
    layers = begin(traces, weighted_mean(pulls, weights), options.anchor)
    for _ in range(options.iterations):
        direction = {
            k: v.to(average[k]) for layer in layers for k, v in layer.direction.items()
        }
        products = [F.matvec(direction) for F in fishers]
        layers = advanced(traces, layers, weighted_mean(products, weights), options)
    return merged(average, layers).params
