"""FENS: an ensemble of clients whose votes a small network weighs (Allouah et al.)."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.curvature.data import batches_of
from flwr_fisher.errors import ConfigurationError, check_positive, check_whole
from flwr_fisher.params import Params
from flwr_fisher.randomness import seeded

BETAS, ADAPTIVITY = (0.9, 0.99), 1e-3  # FedAdam's, as the released script has them


def fens(
    logits: Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    units: int = 2,
    rounds: int = 500,
    batch_size: int = 128,
    lr: float = 1.0,
    server_lr: float = 1e-3,
    seed: int = 0,
) -> nn.Sequential:
    r"""Train FENS's aggregator (Allouah et al., NeurIPS 2024, arXiv 2411.07182).

    The clients' M networks stay what they are, and every client holds all of them. A
    network of one hidden layer, :math:`W_2\,\mathrm{relu}(W_1 z + b_1) + b_2`, is
    trained to make a class of their logits z, by FedAdam: in each round every client
    takes one step of SGD on a batch of its own, and the server steps by the mean change
    :math:`\Delta` of its parameters,

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) \Delta, \quad
              v \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2, \quad
              \theta \leftarrow \theta + \eta\, m / (\sqrt v + \tau).

    So it is no one-shot method: `rounds` exchanges follow the one of models, if small
    ones, and the result is M + 1 networks. Defaults are the released script's for
    CIFAR-10 (sacs-epfl/fens, ``scripts/train_aggregator.sh``), where M is 20. Clients
    count by the examples of a step. The code packs the networks into 8 bits, and logs
    the best round on the test set; here they are as they are, and the last round is it.

    Parameters
    ----------
    logits : Sequence[Tensor]
        Each client's, ``[n_i, M, C]``, of examples that its network was not trained on:
        the paper holds a tenth of them back.
    labels : Sequence[Tensor]
        Their classes, ``[n_i]``.
    units : int, default 2
        Hidden units for each of the M networks.
    rounds, batch_size : int
        How often clients take a step, and on how many examples at most.
    lr, server_lr : float
        The clients' rate, and the server's :math:`\eta`.
    seed : int, default 0
        Of the aggregator's first weights and of the batches.

    Returns
    -------
    nn.Sequential
        From logits ``[n, M, C]`` to ``[n, C]``.

    Raises
    ------
    ConfigurationError
        If there are no clients, one has no examples, or a number is out of range.
    """
    for name, value in (
        ("units", units),
        ("rounds", rounds),
        ("batch_size", batch_size),
    ):
        check_whole(name, value, 1)
    for name, rate in (("lr", lr), ("server_lr", server_lr)):
        check_positive(name, rate)
    if not logits or not all(len(own) for own in logits):
        raise ConfigurationError("FENS needs clients that all have examples")
    _, members, classes = logits[0].shape
    with seeded(seed):
        aggregator = nn.Sequential(
            nn.Flatten(),
            nn.Linear(members * classes, members * units),
            nn.ReLU(),
            nn.Linear(members * units, classes),
        )
        parameters = list(aggregator.parameters())
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
        clients = list(zip(logits, labels, strict=True))
        for _ in range(rounds):
            gradients = _mean_gradient(aggregator, parameters, clients, batch_size)
            for p, (m, v), g in zip(parameters, moments, gradients, strict=True):
                _step(p, m, v, -lr * g, server_lr)
    return aggregator


def _mean_gradient(
    aggregator: nn.Module,
    parameters: Sequence[Tensor],
    clients: Sequence[tuple[Tensor, Tensor]],
    batch_size: int,
) -> tuple[Tensor, ...]:
    """Return the mean over clients: with one step each it is that of all examples."""
    chosen = [torch.randperm(len(y))[:batch_size] for _, y in clients]
    pairs = list(zip(clients, chosen, strict=True))
    z = torch.cat([own[rows] for (own, _), rows in pairs])
    y = torch.cat([own[rows] for (_, own), rows in pairs])
    return torch.autograd.grad(F.cross_entropy(aggregator(z), y), list(parameters))


@torch.no_grad()
def _step(p: Tensor, m: Tensor, v: Tensor, change: Tensor, rate: float) -> None:
    """Take FedAdam's step, in place."""
    m.lerp_(change, 1 - BETAS[0])
    v.lerp_(change.square(), 1 - BETAS[1])
    p.add_(rate * m / (v.sqrt() + ADAPTIVITY))


def logits_of(
    model: nn.Module, members: Sequence[Params], loader: Iterable[Any]
) -> tuple[Tensor, Tensor]:
    """Return what all networks say of a client's examples, ``[n, M, C]``, and labels.

    Parameters
    ----------
    model : nn.Module
        Left as it was.
    members : Sequence[Mapping[str, Tensor]]
        The networks' parameters and buffers.
    loader : Iterable
        Batches ``(inputs, labels)``.
    """
    networks = [copy.deepcopy(model) for _ in members]
    for network, params in zip(networks, members, strict=True):
        network.load_state_dict(dict(params), strict=False)
    found: list[Tensor] = []
    labels: list[Tensor] = []
    device = next(model.parameters()).device
    with torch.no_grad():
        for batch in batches_of(loader, model, device, labelled=True):
            said = [batch.inputs(network.eval()) for network in networks]
            found.append(torch.stack(said, dim=1))
            labels.append(batch.labels)
    return torch.cat(found), torch.cat(labels)
