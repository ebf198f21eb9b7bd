"""Matching hidden units before merging: Git Re-Basin (Ainsworth et al., ICLR 2023).

The order of hidden units does not change what a network computes. Clients that started
from different models have their units in different orders, so the mean of their
parameters is of no use. A permutation of each client's units brings them to one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flwr_fisher.curvature import BlockDiagonal, Curvature, Kronecker
from flwr_fisher.curvature.operators.base import Diagonal
from flwr_fisher.errors import StructureError
from flwr_fisher.merge.posterior import LocalPosterior, check_posteriors
from flwr_fisher.params import Params, bias_of, weighted_mean

Order = Tensor  # of integers: the old number of each new unit


@dataclass(frozen=True)
class Layer:
    """A layer in a chain: its inputs are the outputs of the layer before it.

    Parameters
    ----------
    weight : str
        The weight's name; ``[out, in, *kernel]``.
    bias : str | None
        The bias's name, if there is one.
    outputs : int
        How many units the layer has.
    repeats : int
        How many consecutive inputs belong to each unit of the layer before. If channels
        were flattened, this is the number of a channel's positions; otherwise 1.
    """

    weight: str
    bias: str | None
    outputs: int
    repeats: int = 1


def chain_of(params: Params) -> list[Layer]:
    """Return the layers of a network that is a chain, from first to last.

    It sees only the parameters, in their order. So it does not notice branches between
    layers of equal width, as in a residual network without normalisation.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        Weights ``[out, in, *kernel]`` in the order of the layers, and biases ``[out]``,
        with the names ``x.weight`` and ``x.bias``.

    Raises
    ------
    StructureError
        If a layer's inputs are not the outputs of the one before, or there are other
        parameters or buffers than weights and biases.

    Examples
    --------
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    >>> for layer in chain_of(net.state_dict()):
    ...     print(layer)
    Layer(weight='0.weight', bias='0.bias', outputs=2, repeats=1)
    Layer(weight='2.weight', bias='2.bias', outputs=3, repeats=4)
    """
    layers: list[Layer] = []
    for name, value in params.items():
        if value.dim() >= 2:
            layers.append(_after(layers[-1] if layers else None, name, value))
        elif layers and name == bias_of(layers[-1].weight, params):
            layers[-1] = replace(layers[-1], bias=name)
        else:
            raise StructureError(
                f"'{name}' of shape {tuple(value.shape)} is not the weight or bias of "
                "a layer in a chain: units can be matched only in networks whose "
                "layers follow one another, without normalisation between them"
            )
    return layers


def _after(before: Layer | None, name: str, weight: Tensor) -> Layer:
    outputs, inputs = weight.shape[:2]
    if before is None:
        return Layer(name, None, outputs)
    repeats, rest = divmod(inputs, before.outputs)
    if rest or not repeats or (repeats > 1 and weight.dim() > 2):
        raise StructureError(
            f"'{name}' has {inputs} inputs, but '{before.weight}' before it has "
            f"{before.outputs} outputs: units can be matched only in networks whose "
            "layers follow one another"
        )
    return Layer(name, None, outputs, repeats)


def renumbered(
    params: Params, layers: Sequence[Layer], orders: Sequence[Order]
) -> dict[str, Tensor]:
    """Return the same network with its hidden units in another order.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        The network's parameters.
    layers : Sequence[Layer]
        The result of :func:`chain_of` for the parameters.
    orders : Sequence[Tensor]
        For each layer but the last, the old number of the unit at each new position.
    """
    new = dict(params)
    for layer, outputs, inputs in _places(layers, orders):
        if inputs is not None and layer.weight in new:
            new[layer.weight] = new[layer.weight][:, inputs]
        if outputs is not None:
            for name in (layer.weight, layer.bias):
                if name in new:
                    new[name] = new[name][outputs]
    return new


def renumbered_posterior(
    posterior: LocalPosterior, layers: Sequence[Layer], orders: Sequence[Order]
) -> LocalPosterior:
    """Return the posterior of the network with its hidden units in another order.

    Raises
    ------
    StructureError
        If its curvature is neither diagonal nor K-FAC.
    """
    places = {layer.weight: own for layer, *own in _places(layers, orders)}
    blocks = list[Curvature]()
    for block in (block.made() for block in posterior.curvature.blocks()):
        if isinstance(block, Diagonal):
            blocks.append(Diagonal(renumbered(block.entries, layers, orders)))
        elif isinstance(block, Kronecker) and block.groups == 1:
            blocks.append(_renumbered_layer(block, *places[block.weight]))
        else:
            raise StructureError(
                f"units cannot be matched in {block.kind} of {list(block.shapes)}: use "
                "structure='kfac' or 'diagonal'"
            )
    params = renumbered(posterior.params, layers, orders)
    return LocalPosterior(params, BlockDiagonal(blocks), posterior.num_examples)


def _renumbered_layer(
    block: Kronecker, outputs: Order | None, inputs: Order | None
) -> Kronecker:
    """Return a layer's K-FAC with the rows and columns of its factors moved."""
    _, rows, columns = block.matrix_shape
    left = torch.arange(rows) if outputs is None else outputs
    right = torch.arange(columns)  # the bias stays last
    if inputs is not None:
        kernel = block.weight_shape[2:].numel()
        moved = inputs.unsqueeze(1) * kernel + torch.arange(kernel)
        right[: moved.numel()] = moved.flatten()
    A, G = block.A[:, right][:, :, right], block.G[:, left][:, :, left]
    return block.with_factors(A, G)


def inputs_of(order: Order, repeats: int) -> Order:
    """Return the order of a layer's inputs, given the order of the layer before it.

    Examples
    --------
    >>> inputs_of(torch.tensor([1, 0]), 3)
    tensor([3, 4, 5, 0, 1, 2])
    """
    return (order.unsqueeze(1) * repeats + torch.arange(repeats)).flatten()


def _places(
    layers: Sequence[Layer], orders: Sequence[Order]
) -> list[tuple[Layer, Order | None, Order | None]]:
    """Return each layer with the order of its outputs and of its inputs."""
    before: Order | None = None
    places = []
    for layer, order in zip_longest(layers, orders):
        inputs = None if before is None else inputs_of(before, layer.repeats)
        places.append((layer, order, inputs))
        before = order
    return places


RENUMBERED = ("kfac", "diagonal")  # structures that can be permuted
_MOST = 100  # rounds over all layers, or all clients; five are usual


def matched(posteriors: Sequence[LocalPosterior]) -> list[LocalPosterior]:
    r"""Return the clients' posteriors with all hidden units in the same order.

    MergeMany (Algorithm 3): each client in turn is matched to the mean of the others,
    weighted by examples, until no client changes. The first order is that of the client
    with the most examples. Clients that started from one model and trained for a short
    time mostly stay as they are.

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        Posteriors of networks whose layers follow one another
        (``rivals.git_rebasin.chain_of``), with a diagonal curvature or one with
        layers.

    Raises
    ------
    MissingExtraError
        If SciPy is not installed.
    ParamsError
        If the posteriors cannot be merged.
    StructureError
        If the layers are not a chain, or the curvature cannot be renumbered.
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


def match(
    params: Params,
    reference: Params,
    layers: Sequence[Layer],
    orders: Sequence[Order] = (),
) -> list[Order]:
    r"""Return the order of a network's units that brings it nearest to another network.

    Weight matching (Algorithm 1): it maximises
    :math:`\sum_l \langle W_l^{ref}, P_l W_l P_{l-1}^\top \rangle` layer by layer, until
    no unit changes. Each layer is a linear assignment of the units by their incoming
    and outgoing weights.

    Parameters
    ----------
    params, reference : Mapping[str, Tensor]
        The network, and the network that it is matched to.
    layers : Sequence[Layer]
        The layers of both networks (``rivals.git_rebasin.chain_of``).
    orders : Sequence[Tensor]
        The order to begin with; by default that of the parameters.

    Returns
    -------
    list[Tensor]
        For each layer but the last, the number of the unit at each position.

    Examples
    --------
    >>> own = {"a.weight": torch.eye(2), "b.weight": torch.tensor([[1.0, 2.0]])}
    >>> other = {"a.weight": torch.eye(2)[[1, 0]], "b.weight": torch.tensor([[2.0, 1]])}
    >>> match(own, other, chain_of(own))
    [tensor([1, 0])]
    """
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
    """Return how well a unit (column) fits a unit of the reference (row)."""
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
    """Return the next layer's weights, grouped by the unit that they read."""
    by_input = weight.transpose(0, 1)
    return by_input.reshape(by_input.shape[0] // repeats, -1)
