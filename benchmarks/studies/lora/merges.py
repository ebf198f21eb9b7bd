"""The ways to merge adapters: of their factors, or of what they add to a weight."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from harness.clients import Shuffled
from rivals.regmean import regmean
from torch import Tensor, nn

from flwr_fisher.curvature import Kronecker, fisher
from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.params import Params, shared_state, shares_of, weighted_mean
from studies.lora.model import added, base_model

BOTH_MEAN = "FedAvg of both"
BOTH_KFAC = "FedFisher of both"
STACKED = "mean of ΔW (FLoRA)"
MEAN_SVD = "mean of ΔW, cut to the rank"
KFAC_FULL = "FedFisher of ΔW"
KFAC_SVD = "FedFisher of ΔW, cut to the rank"
KFAC_METRIC = "FedFisher of ΔW, cut by the mean Fisher"
ONE_MEAN = "FedAvg of B (FFA-LoRA)"
ONE_KFAC = "FedFisher of B"
ONE_DIAGONAL = "FedFisher of B, diagonal"
ONE_REGMEAN = "RegMean of B"
ONE_FULL = "FedFisher of ΔW"


@dataclass(frozen=True)
class Client:
    """What a client trained, and its images."""

    model: nn.Module
    images: Shuffled

    @property
    def num_examples(self) -> int:
        """How many images it has."""
        return len(self.images.dataset)


def merged(
    clients: Sequence[Client], base: Params, rank: int, *, frozen: bool
) -> dict[str, dict[str, Tensor]]:
    """Return by method what is added to each layer's weight.

    Parameters
    ----------
    clients : Sequence[Client]
        With their models of adapters.
    base : Mapping[str, Tensor]
        The pre-trained parameters.
    rank : int
        The adapters'.
    frozen : bool
        Whether all have the same first factors, which were not trained.
    """
    states = [dict(client.model.state_dict()) for client in clients]
    shares = shares_of([client.num_examples for client in clients])
    factors = [key for key in states[0] if key.endswith((".A.weight", ".B.weight"))]
    states = [{key: state[key] for key in factors} for state in states]
    mean = added(weighted_mean(states, shares))

    def product_of(params: Params) -> dict[str, Tensor]:
        return added({**states[0], **params})

    posteriors = [_posterior(client.model, client) for client in clients]
    kfac = product_of(fedfisher(posteriors).params)
    every = [_posterior(_with_weights(c, base), c) for c in clients]
    full = _beyond(fedfisher(every).params, base)
    if frozen:
        diagonals = [_posterior(c.model, c, "diagonal") for c in clients]
        return {
            ONE_MEAN: mean,
            ONE_KFAC: kfac,
            ONE_DIAGONAL: product_of(fedfisher(diagonals).params),
            ONE_REGMEAN: product_of(regmean(posteriors)),
            ONE_FULL: full,
        }
    products = weighted_mean([added(state) for state in states], shares)
    metric = _mean_factors(every, shares)
    return {
        BOTH_MEAN: mean,
        BOTH_KFAC: kfac,
        STACKED: products,
        MEAN_SVD: {name: cut(matrix, rank) for name, matrix in products.items()},
        KFAC_FULL: full,
        KFAC_SVD: {name: cut(matrix, rank) for name, matrix in full.items()},
        KFAC_METRIC: {
            name: cut(matrix, rank, *metric[name]) for name, matrix in full.items()
        },
    }


def cut(
    matrix: Tensor, rank: int, G: Tensor | None = None, A: Tensor | None = None
) -> Tensor:
    """Return the nearest matrix of a rank, by tr(Dᵀ G D A) of the difference D."""
    left, right = (_roots(each) if each is not None else None for each in (G, A))
    wide = matrix.double()
    if left is not None and right is not None:
        wide = left[0] @ wide @ right[0]
    U, s, V = torch.linalg.svd(wide, full_matrices=False)
    wide = (U[:, :rank] * s[:rank]) @ V[:rank]
    if left is not None and right is not None:
        wide = left[1] @ wide @ right[1]
    return wide.to(matrix.dtype)


def _roots(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a factor's square root, and the inverse of that, both damped a little."""
    values, vectors = torch.linalg.eigh(factor.double())
    roots = (values.clamp(min=0) + 1e-3 * values.mean()).sqrt()
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


def _mean_factors(
    posteriors: Sequence[LocalPosterior], shares: Sequence[float]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return by weight the means of the clients' factors G and A."""
    means: dict[str, tuple[Tensor, Tensor]] = {}
    for posterior, share in zip(posteriors, shares, strict=True):
        for block in posterior.curvature.blocks():
            assert isinstance(block, Kronecker)
            own = share * block.G[0], share * block.A[0]
            if block.weight in means:
                G, A = means[block.weight]
                own = G + own[0], A + own[1]
            means[block.weight] = own
    return means


def _posterior(
    model: nn.Module, client: Client, structure: str = "kfac"
) -> LocalPosterior:
    curvature = fisher(model, client.images, structure=structure)
    return LocalPosterior(shared_state(model), curvature, client.num_examples)


def _with_weights(client: Client, base: Params) -> nn.Module:
    """Return the client's model with its adapters in the weights, which are trained."""
    own = added(client.model.state_dict())
    model = with_added(base, own)
    for name in own:
        model.get_parameter(name).requires_grad_(True)
    return model


def with_added(base: Params, difference: Params) -> nn.Module:
    """Return the pre-trained model with something added to some of its weights."""
    changed = {name: base[name] + each for name, each in difference.items()}
    return base_model({**base, **changed})


def _beyond(weights: Params, base: Params) -> dict[str, Tensor]:
    return {name: each - base[name] for name, each in weights.items()}
