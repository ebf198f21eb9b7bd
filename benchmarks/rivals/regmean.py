"""RegMean, and RegMean++ on what the merged network feeds its layers."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.curvature import Kronecker
from flwr_fisher.errors import ConfigurationError, StructureError, check_range
from flwr_fisher.merge import LocalPosterior, fedavg
from flwr_fisher.params import Params, finite, shares_of, weighted_mean
from rivals.layer_inputs import layer_inputs

Batches = Sequence[Any]  # of a client, read once for each layer


def regmean(
    posteriors: Sequence[LocalPosterior], *, off_diagonal: float = 0.9
) -> dict[str, Tensor]:
    r"""Return the parameters of RegMean's merge (Jin et al., ICLR 2023).

    For each layer with a K-FAC, and its weight as a matrix ``[out, in]``,

    .. math:: W = \Big(\sum_i p_i W_i A_i\Big)\Big(\sum_i p_i A_i\Big)^{+},

    where :math:`A_i` is the second moment of the layer's inputs with its off-diagonal
    entries scaled by `off_diagonal`, and :math:`^+` the pseudoinverse, for which an
    eigenvalue below n times float32's rounding of the largest (n inputs) is zero.
    Everything else is averaged.

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        Posteriors with ``structure="kfac"``; only the input factors are used.
    off_diagonal : float, default 0.9
        In [0, 1]; the FedFisher paper tries 0.1 and 0.9.

    Raises
    ------
    ConfigurationError
        If `off_diagonal` is out of range.
    StructureError
        If no layer has a Kronecker curvature of every client.
    """
    check_range("off_diagonal", off_diagonal, 0, 1)
    shares = shares_of([posterior.num_examples for posterior in posteriors])
    merged = fedavg(posteriors)
    by_client = [
        {k.weight: k for k in p.curvature.blocks() if isinstance(k, Kronecker)}
        for p in posteriors
    ]
    common = [name for name in by_client[0] if all(name in own for own in by_client)]
    if not common:
        raise StructureError("regmean needs the input factors of K-FAC")
    for name in common:
        layers = [own[name] for own in by_client]
        moments = [
            share * _shrunk(layer.A.double(), off_diagonal)
            for share, layer in zip(shares, layers, strict=True)
        ]
        products = [
            layer.as_matrices(posterior.params).double() @ A
            for layer, posterior, A in zip(layers, posteriors, moments, strict=True)
        ]
        gram, A = torch.stack(moments).sum(0), layers[0].A
        # The rounding errors of a singular matrix's factors must not be inverted.
        least = gram.shape[-1] * torch.finfo(A.dtype).eps
        inverse = torch.linalg.pinv(gram, rtol=least, hermitian=True)
        solution = (torch.stack(products).sum(0) @ inverse).to(A.dtype)
        merged |= finite(layers[0].as_params(solution), f"RegMean's '{name}'")
    return merged


def _shrunk(A: Tensor, off_diagonal: float) -> Tensor:
    diagonal = torch.diag_embed(A.diagonal(dim1=-2, dim2=-1))
    return off_diagonal * A + (1 - off_diagonal) * diagonal


def regmean_plus_plus(
    model: nn.Module,
    clients: Sequence[Params],
    batches: Sequence[Batches],
    weights: Sequence[float],
    *,
    off_diagonal: float = 0.95,
) -> dict[str, Tensor]:
    r"""Return RegMean++'s parameters (Nguyen et al., TMLR 2026, arXiv 2508.03121).

    As RegMean, from the first layer to the last, but :math:`A_i` is the second moment
    of what the *merged* layers before make of client i's examples; in RegMean it is of
    what the client's own make. So it cannot be had of one upload: each layer is an
    exchange, in which clients get the layers that are merged and send one matrix, or a
    server that has examples of all clients' kinds does it alone.

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
        As for :func:`regmean`; the default is fusion_bench's.

    Raises
    ------
    ConfigurationError
        If there are not as many clients' batches and weights as parameters.
    StructureError
        If the model has no linear layer or convolution.
    """
    if not len(clients) == len(batches) == len(weights):
        raise ConfigurationError(
            f"{len(clients)} clients' parameters, {len(batches)} clients' batches and "
            f"{len(weights)} weights: give one of each for every client"
        )
    merged, network = weighted_mean(clients, weights), copy.deepcopy(model)
    layers = layer_inputs(network, batches[0][:1])  # in the order of their calls
    if not layers:
        raise StructureError("RegMean++ needs a linear layer or a convolution")
    for name, layer in layers.items():
        network.load_state_dict(merged, strict=False)
        posteriors = [
            LocalPosterior(params, layer_inputs(network, mine, [name])[name], weight)
            for params, mine, weight in zip(clients, batches, weights, strict=True)
        ]
        solved = regmean(posteriors, off_diagonal=off_diagonal)
        merged |= {n: solved[n] for n in (layer.weight, layer.bias) if n}
    return merged
