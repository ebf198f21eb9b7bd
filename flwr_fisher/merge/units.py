"""Hidden units, which may be numbered in any order without changing a network."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from flwr_fisher.curvature import BlockDiagonal, Curvature
from flwr_fisher.curvature.operators.layer import LayerCurvature
from flwr_fisher.curvature.operators.plain import Diagonal
from flwr_fisher.errors import StructureError
from flwr_fisher.merge.posterior import LocalPosterior
from flwr_fisher.params import Params, layout_of

Order = Tensor  # of integers: which old unit is at each new place


@dataclass(frozen=True)
class Layer:
    """A layer in a chain, whose inputs are the outputs of the one before.

    Parameters
    ----------
    weight : str
        The weight's name; ``[out, in, *kernel]``.
    bias : str | None
        The bias's name, if there is one.
    outputs : int
        How many units it has.
    repeats : int
        How many inputs belong to each unit of the layer before, one after another: the
        positions of a channel where it was flattened, else 1.
    """

    weight: str
    bias: str | None
    outputs: int
    repeats: int = 1


def chain_of(params: Params) -> list[Layer]:
    """Return the layers of a network in which one follows another, first to last.

    It knows parameters alone, in their order: a network with branches whose layers are
    equally wide, such as a residual one without normalisation, passes for a chain.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        Weights ``[out, in, *kernel]`` in the order of the layers, and biases ``[out]``
        named as they are, ``x.weight`` and ``x.bias``.

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
    layout = layout_of(params)
    layers: list[Layer] = []
    for name, value in layout.items():
        if value.dim() >= 2:
            layers.append(_after(layers[-1] if layers else None, name, value))
        elif (
            layers
            and name == _bias_of(layers[-1])
            and len(value) == len(layout[layers[-1].weight])
        ):
            layers[-1] = replace(layers[-1], bias=name)
        else:
            raise StructureError(
                f"'{name}' of shape {tuple(value.shape)} is no weight or bias of a "
                "layer in a chain: units can be renumbered where layers follow one "
                "another, without normalisation between them"
            )
    return layers


def _bias_of(layer: Layer) -> str:
    return layer.weight.removesuffix("weight") + "bias"


def _after(before: Layer | None, name: str, weight: Tensor) -> Layer:
    outputs, inputs = weight.shape[:2]
    if before is None:
        return Layer(name, None, outputs)
    repeats, rest = divmod(inputs, before.outputs)
    if rest or not repeats or (repeats > 1 and weight.dim() > 2):
        raise StructureError(
            f"'{name}' has {inputs} inputs and does not follow '{before.weight}' with "
            f"its {before.outputs} outputs: units can be renumbered where layers "
            "follow one another"
        )
    return Layer(name, None, outputs, repeats)


def renumbered(
    params: Params, layers: Sequence[Layer], orders: Sequence[Order]
) -> dict[str, Tensor]:
    """Return a network with its units in another order, which computes the same.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        The network's parameters.
    layers : Sequence[Layer]
        :func:`chain_of` them.
    orders : Sequence[Tensor]
        For each layer but the last, which of its units is at each new place.
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
    """Return a posterior over the network with its hidden units in another order.

    Raises
    ------
    StructureError
        If its curvature is neither diagonal nor one of layers (K-FAC, E-KFAC).
    """
    places = {layer.weight: own for layer, *own in _places(layers, orders)}
    blocks = list[Curvature]()
    for block in (block.made() for block in posterior.curvature.blocks()):
        if isinstance(block, Diagonal):
            blocks.append(Diagonal(renumbered(block.entries, layers, orders)))
        elif isinstance(block, LayerCurvature) and block.groups == 1:
            blocks.append(block.renumbered(*places[block.weight]))
        else:
            raise StructureError(
                f"units cannot be renumbered in {block.kind} of {list(block.shapes)}: "
                "take structure='kfac', 'ekfac' or 'diagonal'"
            )
    params = renumbered(posterior.params, layers, orders)
    return LocalPosterior(params, BlockDiagonal(blocks), posterior.num_examples)


def inputs_of(order: Order, repeats: int) -> Order:
    """Return the order of a layer's inputs where its former layer's units have one.

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
