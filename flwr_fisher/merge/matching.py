"""Matching hidden units before merging: Git Re-Basin (Ainsworth et al., ICLR 2023).

Clients that did not start from one model number their units in different orders, and
their mean computes nothing. It is undone by permutations, which cost nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_fisher.extras import extra
from flwr_fisher.merge.posterior import LocalPosterior, check_posteriors
from flwr_fisher.merge.units import (
    Layer,
    Order,
    chain_of,
    inputs_of,
    renumbered,
    renumbered_posterior,
)
from flwr_fisher.params import Params, weighted_mean

RENUMBERED = ("kfac", "ekfac", "diagonal")  # structures that go with their units
_MOST = 100  # rounds over all layers, or all clients; a handful is usual


def matched(posteriors: Sequence[LocalPosterior]) -> list[LocalPosterior]:
    r"""Return clients' posteriors with their hidden units in one order.

    MergeMany (Algorithm 3): each client in turn is matched to the mean of the others,
    by their examples, until none moves. They begin with the order of the client with
    the most examples. Clients that started from one model and trained for a short time
    mostly stay as they are.

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        Of networks whose layers follow one another
        (``flwr_fisher.merge.units.chain_of``), with a diagonal curvature or one of
        layers.

    Raises
    ------
    MissingExtraError
        Without SciPy.
    ParamsError
        If the posteriors cannot be merged.
    StructureError
        If the layers are no chain, or the curvature cannot be renumbered.
    """
    check_posteriors(posteriors)
    layers = chain_of(posteriors[0].params)
    weights = [posterior.num_examples for posterior in posteriors]
    first = posteriors[weights.index(max(weights))].params
    orders = [match(each.params, first, layers) for each in posteriors]

    def own(client: int) -> dict[str, Tensor]:
        return renumbered(posteriors[client].params, layers, orders[client])

    for _ in range(_MOST if len(posteriors) > 2 else 0):
        moved = False
        for client, posterior in enumerate(posteriors):
            others = [i for i in range(len(posteriors)) if i != client]
            mean = weighted_mean([own(i) for i in others], [weights[i] for i in others])
            new = match(posterior.params, mean, layers, orders[client])
            moved |= not all(map(torch.equal, new, orders[client]))
            orders[client] = new
        if not moved:
            break
    return [
        renumbered_posterior(posterior, layers, order)
        for posterior, order in zip(posteriors, orders, strict=True)
    ]


def check_matching(params: Params) -> None:
    """Raise what :func:`matched` would raise of networks with such parameters."""
    with extra("matching"):
        import scipy.optimize  # noqa: F401
    chain_of(params)


def match(
    params: Params,
    reference: Params,
    layers: Sequence[Layer],
    orders: Sequence[Order] = (),
) -> list[Order]:
    r"""Return the order of a network's units in which it is nearest to another.

    Weight matching (Algorithm 1): it maximises :math:`\sum_l \langle W_l^{ref}, P_l
    W_l P_{l-1}^\top \rangle` layer by layer, each a linear assignment of a unit's
    incoming and outgoing weights, until none moves.

    Parameters
    ----------
    params, reference : Mapping[str, Tensor]
        The network, and the one to match.
    layers : Sequence[Layer]
        Both networks' (``flwr_fisher.merge.units.chain_of``).
    orders : Sequence[Tensor]
        Where to begin; by default as they are.

    Returns
    -------
    list[Tensor]
        For each layer but the last, which unit is at each place.

    Examples
    --------
    >>> own = {"a.weight": torch.eye(2), "b.weight": torch.tensor([[1.0, 2.0]])}
    >>> other = {"a.weight": torch.eye(2)[[1, 0]], "b.weight": torch.tensor([[2.0, 1]])}
    >>> match(own, other, chain_of(own))
    [tensor([1, 0])]
    """
    with extra("matching"):
        from scipy.optimize import linear_sum_assignment

    hidden = range(len(layers) - 1)
    found = list(orders) or [torch.arange(layers[i].outputs) for i in hidden]
    for _ in range(_MOST):
        moved = False
        for at in hidden:
            gain = _similarity(params, reference, layers, found, at)
            new = torch.from_numpy(
                linear_sum_assignment(gain.numpy(), maximize=True)[1]
            )
            moved |= not torch.equal(new, found[at])
            found[at] = new
        if not moved:
            break
    return found


def _similarity(
    params: Params,
    reference: Params,
    layers: Sequence[Layer],
    orders: Sequence[Order],
    at: int,
) -> Tensor:
    """Return by how much a unit (column) fits a place of the reference (row)."""
    layer, following = layers[at], layers[at + 1]
    rows, columns = _matrix(reference, layer.weight), _matrix(params, layer.weight)
    if at:
        columns = columns[:, inputs_of(orders[at - 1], layer.repeats)]
    gain = rows.flatten(1) @ columns.flatten(1).mT
    if layer.bias is not None:
        biases = (_matrix(each, layer.bias) for each in (reference, params))
        gain += torch.outer(*biases)
    after, before = (_matrix(each, following.weight) for each in (reference, params))
    if at + 1 < len(orders):
        before = before[orders[at + 1]]
    ours, theirs = (_by_unit(each, following.repeats) for each in (after, before))
    return gain + ours @ theirs.mT


def _matrix(params: Params, name: str) -> Tensor:
    return params[name].detach().cpu().double()


def _by_unit(weight: Tensor, repeats: int) -> Tensor:
    """Return the weights of the next layer by the unit that they read."""
    by_input = weight.transpose(0, 1)
    return by_input.reshape(by_input.shape[0] // repeats, -1)
