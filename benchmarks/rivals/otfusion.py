"""OTFusion: averaging neurons that an optimal transport brings together."""

from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flwr_fisher.merge.posterior import LocalPosterior, check_posteriors
from flwr_fisher.params import Params, weighted_mean
from rivals.git_rebasin import Layer, Order, chain_of, inputs_of, renumbered


def otfusion(posteriors: Sequence[LocalPosterior]) -> dict[str, Tensor]:
    r"""Return OTFusion's parameters (Singh & Jaggi, NeurIPS 2020, Algorithm 1).

    Weight-based. From the first layer to the last but one, each client's units are
    transported to those of the client with the most examples, at the Euclidean distance
    of their incoming weights, bias included, whose inputs were transported before;
    then the parameters are averaged by examples. All clients' layers are equally wide
    and all units count the same, so that a transport at the least cost is a permutation
    (Birkhoff), found as a linear assignment.

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        Of networks whose layers follow one another
        (``rivals.git_rebasin.chain_of``); curvatures are not used.

    Raises
    ------
    MissingExtraError
        Without SciPy.
    ParamsError
        If the posteriors cannot be merged.
    StructureError
        If the layers are no chain.
    """
    check_posteriors(posteriors)
    layers = chain_of(posteriors[0].params)
    weights = [posterior.num_examples for posterior in posteriors]
    reference = posteriors[weights.index(max(weights))].params
    there = [
        renumbered(each.params, layers, transport(each.params, reference, layers))
        for each in posteriors
    ]
    return weighted_mean(there, weights)


def transport(
    params: Params, reference: Params, layers: Sequence[Layer]
) -> list[Order]:
    """Return, layer by layer, which unit is transported to each of another network.

    Parameters
    ----------
    params, reference : Mapping[str, Tensor]
        The network, and the one that is the destination.
    layers : Sequence[Layer]
        Both networks'.
    """
    orders: list[Order] = []
    for layer in layers[:-1]:
        there = slice(None) if not orders else inputs_of(orders[-1], layer.repeats)
        rows = _incoming(reference, layer, slice(None))
        cost = torch.cdist(rows, _incoming(params, layer, there))
        orders.append(torch.from_numpy(linear_sum_assignment(cost.numpy())[1]))
    return orders


def _incoming(params: Params, layer: Layer, inputs: Tensor | slice) -> Tensor:
    """Return a row for each unit: its weights on those inputs, and its bias."""
    rows = params[layer.weight].detach().cpu().double()[:, inputs].flatten(1)
    if layer.bias is None:
        return rows
    bias = params[layer.bias].detach().cpu().double()
    return torch.cat([rows, bias.unsqueeze(1)], dim=1)
