"""RegMean++: RegMean on what the merged network feeds its layers (Nguyen et al.)."""

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from flwr_fisher.curvature import InputCovariance, input_covariances
from flwr_fisher.errors import ConfigurationError, StructureError, check_range
from flwr_fisher.merge import LocalPosterior, regmean
from flwr_fisher.params import Params, weighted_mean

Batches = Sequence[Any]  # of a client, read once for each layer


def regmean_plus_plus(
    model: nn.Module,
    clients: Sequence[Params],
    batches: Sequence[Batches],
    weights: Sequence[float],
    *,
    off_diagonal: float = 0.95,
) -> dict[str, torch.Tensor]:
    r"""Return RegMean++'s parameters (Nguyen et al., TMLR 2026, arXiv 2508.03121).

    From the first layer to the last,

    .. math:: W_l = \Big(\sum_i p_i W_{l,i} A_{l,i}\Big)\Big(\sum_i p_i A_{l,i}\Big)^+

    as in RegMean, but :math:`A_{l,i}` is the second moment of what the *merged* layers
    before make of client i's examples; in RegMean it is of what the client's own make.
    So it cannot be had of one upload: each layer is an exchange, in which clients get
    the layers that are merged and send one matrix, or a server that has examples of
    all clients' kinds does it alone. Everything else is averaged.

    The released code (nthehai01/RegMean-plusplus, and fusion_bench) merges blocks of a
    transformer: within a block it takes the inputs that the client's own layers make.
    Here each layer is a block. It counts all models alike; here they have the clients'
    weights, as RegMean has. It inverts; here a singular matrix is no error.

    Parameters
    ----------
    model : nn.Module
        Any network of this kind, left as it was.
    clients : Sequence[Mapping[str, Tensor]]
        The clients' parameters and buffers.
    batches : Sequence[Sequence]
        Each client's, ``(inputs, labels)`` or ``inputs``; labels are not used. The
        paper takes 256 examples of each.
    weights : Sequence[float]
        The clients', such as their numbers of examples.
    off_diagonal : float, default 0.95
        Scales the off-diagonal entries of every :math:`A_{l,i}`, in [0, 1]; the default
        is fusion_bench's.

    Raises
    ------
    ConfigurationError
        If there are not as many clients' batches and weights as parameters, or
        `off_diagonal` is out of range.
    StructureError
        If no layer is explained by its inputs.
    """
    check_range("off_diagonal", off_diagonal, 0, 1)
    if not len(clients) == len(batches) == len(weights):
        raise ConfigurationError(
            f"{len(clients)} clients' parameters, {len(batches)} clients' batches and "
            f"{len(weights)} weights: give one of each for every client"
        )
    merged, network = weighted_mean(clients, weights), copy.deepcopy(model)
    layers = list(_in_order(network, batches[0]))
    if not layers:
        raise StructureError("RegMean++ needs a layer that its inputs explain")
    for layer in layers:
        network.load_state_dict(merged, strict=False)
        own = []
        for params, mine, weight in zip(clients, batches, weights, strict=True):
            inputs = input_covariances(network, mine, layers=[layer.weight])
            curvature = inputs[layer.weight].as_kfac(params)
            own.append(LocalPosterior(params, curvature, weight))
        solved = regmean(own, off_diagonal=off_diagonal)
        merged |= {n: solved[n] for n in (layer.weight, layer.bias) if n}
    return merged


def _in_order(model: nn.Module, batches: Batches) -> Iterator[InputCovariance]:
    """Yield the layers that their inputs explain, in the order of their calls."""
    called: list[str] = []
    found = input_covariances(model, batches[:1])

    def note(weight: str, *_: Any) -> None:
        called.append(weight)

    handles = [
        module.register_forward_pre_hook(partial(note, f"{name}.weight"))
        for name, module in model.named_modules()
        if f"{name}.weight".removeprefix(".") in found
    ]
    input_covariances(model, batches[:1])
    for handle in handles:
        handle.remove()
    for weight in dict.fromkeys(name.removeprefix(".") for name in called):
        yield found[weight]
