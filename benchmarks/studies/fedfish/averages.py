"""What averages of one round's uploads are worth, and who decides them."""

from collections.abc import Sequence
from statistics import fmean

import torch
from harness.clients import CPU, World, scores
from torch import Tensor, nn

from flwr_fisher.client.training import score
from flwr_fisher.curvature.losses import cross_entropy
from flwr_fisher.merge import fedavg
from flwr_fisher.params import Params, flatten, scale
from flwr_fisher.rounds import fedfish_average
from flwr_fisher.strategies import Upload

Batch = tuple[Tensor, Tensor]


def same_uploads(uploads: Sequence[Upload], here: World) -> dict[str, float]:
    """Return what averages of one round's uploads are worth, and who decides them.

    Without a server optimiser and without a history: the parameters' mean, FedFish's
    average, and FedFish's of Fishers scaled to the same sum.
    """
    posteriors = [u.payload.posterior(u.num_examples) for u in uploads]
    params = [p.params for p in posteriors]
    weights = [p.num_examples for p in posteriors]
    fishers = [p.curvature.diagonal() for p in posteriors]
    traces = [float(flatten(fisher).double().sum()) for fisher in fishers]
    units = [scale(f, 1 / t if t else 0) for f, t in zip(fishers, traces, strict=True)]
    merged = {
        "mean": fedavg(posteriors),
        "fisher": fedfish_average(params, fishers, weights),
        "unit": fedfish_average(params, units, weights),
    }
    model = here.task.make_model()
    clients = [int(u.client.removeprefix("partition-")) for u in uploads]
    own = [here.clients[client].dataset[:] for client in clients]
    held = [tuple(torch.cat(each) for each in zip(*here.held, strict=True))]
    local = own_scores(model, params, own)
    found = {}
    for name, candidate in merged.items():
        lost = barrier(local, own_scores(model, [candidate] * len(own), own))
        accuracy = scores(model, candidate, held)["accuracy"]
        found[f"merged-{name}-accuracy"] = accuracy
        found |= {f"merged-{name}-{key}": value for key, value in lost.items()}
    return found | dominance(fishers, weights, [loss for loss, _ in local])


def own_scores(
    model: nn.Module, candidates: Sequence[Params], own: Sequence[Batch]
) -> list[tuple[float, float]]:
    """Return loss and accuracy of each client's candidate on its own data."""
    found = []
    for candidate, data in zip(candidates, own, strict=True):
        model.load_state_dict(candidate)
        loss, accuracy, _ = score(model, [data], CPU, cross_entropy)
        found.append((loss, accuracy))
    return found


def barrier(
    local: Sequence[tuple[float, float]], merged: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """Return what clients lose on their own data from their models to the merged."""
    (loss, right), (loss_merged, right_merged) = (
        [fmean(values) for values in zip(*each, strict=True)]
        for each in (local, merged)
    )
    return {"barrier-loss": loss_merged - loss, "barrier-error": right - right_merged}


def dominance(
    fishers: Sequence[Params], weights: Sequence[float], local: Sequence[float]
) -> dict[str, float]:
    """Return how unevenly a cohort's clients share FedFish's average."""
    weighted = torch.stack(
        [w * flatten(f).double() for f, w in zip(fishers, weights, strict=True)]
    )
    total = weighted.sum(dim=0)
    heard = total > 0
    shares = weighted[:, heard] / total[heard]
    counts = torch.tensor(weights, dtype=torch.float64)
    found = {
        "no-fisher": float((~heard).double().mean()),
        "over-half": float((shares.max(dim=0).values > 0.5).double().mean()),
        "over-nine-tenths": float((shares.max(dim=0).values > 0.9).double().mean()),
        "effective-clients": float((1 / shares.square().sum(dim=0)).mean()),
        "effective-clients-fedavg": float(counts.sum() ** 2 / counts.square().sum()),
    }
    traces = weighted.sum(dim=1) / counts
    if traces.std() < 1e-6 * traces.mean():
        return found  # they were balanced
    logs = torch.stack([traces.clamp_min(1e-30).log(), torch.tensor(local).log()])
    return found | {
        "largest-trace": float(traces.max() / traces.sum()),
        "trace-ratio": float(traces.max() / traces.median()),
        "trace-loss-correlation": float(torch.corrcoef(logs)[0, 1]),
    }
