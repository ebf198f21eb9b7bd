"""PFNM: hidden units matched by a Bayesian nonparametric model of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flwr_fisher.errors import check_positive, check_whole
from flwr_fisher.merge.posterior import LocalPosterior, check_posteriors
from flwr_fisher.params import Params, weighted_mean
from flwr_fisher.randomness import random_stream
from rivals.git_rebasin import Layer, chain_of, inputs_of

_MEAN_BIAS = 0.1  # the prior's, of the released code
_POPULAR, _WIDEST = 10, 700  # beyond which a unit's clients, and units, do not count


def pfnm(
    posteriors: Sequence[LocalPosterior],
    *,
    sigma: float = 1.0,
    sigma0: float = 1.0,
    gamma: float = 7.0,
    iterations: int = 3,
    seed: int = 0,
) -> dict[str, Tensor]:
    r"""Return PFNM's parameters, whose layers may be wider than the clients'.

    Probabilistic federated neural matching (Yurochkin et al., ICML 2019), layer by
    layer as for convolutions (FedMA; Wang et al., ICLR 2020) in one round: the units of
    all clients are draws around global ones, which a Beta-Bernoulli process made as
    many of as it takes. From the first hidden layer to the last, each client's units
    are assigned to global ones or to new ones, one client after the other and again, by
    the gain of the posterior. A global unit is the mean of its clients' and of the
    prior, a Gaussian around 0 (0.1 for biases). The last layer is averaged by examples;
    inputs that a client does not have count as 0 there.

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        Of networks whose layers follow one another
        (``rivals.git_rebasin.chain_of``); curvatures are not used.
    sigma, sigma0 : float, default 1
        Variances of a client's unit around the global one, and of that around 0: the
        released code's, which the FedFisher paper keeps, as `gamma`.
    gamma : float, default 7
        How many units a client brings that no other has, in the process's mean.
    iterations : int, default 3
        How often each client is matched anew.
    seed : int, default 0
        Of the order in which they are.

    Raises
    ------
    ConfigurationError
        If an argument is out of range.
    MissingExtraError
        Without SciPy.
    ParamsError
        If the posteriors cannot be merged.
    StructureError
        If the layers are no chain.
    """
    for name, value in (("sigma", sigma), ("sigma0", sigma0), ("gamma", gamma)):
        check_positive(name, value)
    check_whole("iterations", iterations, 0)
    check_posteriors(posteriors)
    layers = chain_of(posteriors[0].params)
    weights = [posterior.num_examples for posterior in posteriors]
    units = _Units(sigma, sigma0, gamma, iterations, random_stream(seed, "pfnm"))
    # Every client's parameters, with their inputs where the global ones are.
    clients = [dict(posterior.params) for posterior in posteriors]
    for layer, following in pairwise(layers):
        rows = [_rows(params, layer) for params in clients]
        found, places = units.match(rows, biased=layer.bias is not None)
        for params, own in zip(clients, places, strict=True):
            params |= _as_params(found, layer, params)
            params[following.weight] = _placed(params, following, own, len(found))
    return weighted_mean(clients, weights)


@dataclass(frozen=True)
class _Units:
    """The model of a layer's units: see :func:`pfnm`."""

    sigma: float
    sigma0: float
    gamma: float
    iterations: int
    stream: np.random.Generator

    def match(
        self, rows: Sequence[Tensor], *, biased: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the global units ``[L, D]``, and which each client's are."""
        own = [each / self.sigma for each in rows]
        prior = torch.zeros(rows[0].shape[1], dtype=torch.float64)
        if biased:
            prior[-1] = _MEAN_BIAS / self.sigma0
        total, count = prior + own[0], torch.ones(len(own[0]), dtype=torch.int64)
        places = [torch.arange(len(own[0]))]
        for each in own[1:]:
            total, count, place = self._add(each, total, count, prior, len(own))
            places.append(place)
        for _ in range(self.iterations):
            for j in self.stream.permutation(len(own)).tolist():
                total[places[j]] -= own[j]
                count[places[j]] -= 1
                left = count > 0
                moved = left.cumsum(0) - 1
                places = [moved[place] for place in places]
                total, count, places[j] = self._add(
                    own[j], total[left], count[left], prior, len(own)
                )
        return total / self._precision(count), places

    def _precision(self, count: Tensor) -> Tensor:
        return (1 / self.sigma0 + count / self.sigma).unsqueeze(1)

    def _add(
        self, own: Tensor, total: Tensor, count: Tensor, prior: Tensor, clients: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Assign a client's units to global ones or new ones; return all, and where."""
        precision = self._precision(count).squeeze(1)
        lengths = total.square().sum(1)
        sums = own.square().sum(1, keepdim=True) + lengths + 2 * own @ total.mT
        popular = count.clamp(max=_POPULAR).double()
        known = sums / (precision + 1 / self.sigma) - lengths / precision
        known += (popular / (clients - popular)).log()
        alone = (own + prior).square().sum(1) / (1 / self.sigma0 + 1 / self.sigma)
        alone -= prior.square().sum() * self.sigma0
        most = min(len(own), max(_WIDEST - len(total), 1))
        most = max(most, len(own) - len(total))  # as many places as units
        ranks = torch.arange(1, 1 + most).double()
        new = alone.unsqueeze(1) - 2 * ranks.log() + 2 * math.log(self.gamma / clients)
        gain = torch.cat([known, new], 1)
        place = torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])
        fresh = place >= len(total)
        place[fresh] = len(total) + torch.arange(int(fresh.sum()))
        total = torch.cat([total, prior.expand(int(fresh.sum()), -1)])
        count = torch.cat([count, count.new_zeros(int(fresh.sum()))])
        total[place] += own
        count[place] += 1
        return total, count, place


def _rows(params: Params, layer: Layer) -> Tensor:
    """Return a row for each unit: its weights, and its bias."""
    rows = params[layer.weight].detach().cpu().double().flatten(1)
    if layer.bias is None:
        return rows
    return torch.cat([rows, params[layer.bias].cpu().double().unsqueeze(1)], dim=1)


def _as_params(units: Tensor, layer: Layer, like: Params) -> dict[str, Tensor]:
    """Cut rows back into a weight and a bias."""
    weight = like[layer.weight]
    if layer.bias is None:
        return {layer.weight: units.reshape(-1, *weight.shape[1:]).to(weight)}
    rows, bias = units[:, :-1], units[:, -1]
    return {
        layer.weight: rows.reshape(-1, *weight.shape[1:]).to(weight),
        layer.bias: bias.to(like[layer.bias]),
    }


def _placed(params: Params, layer: Layer, own: Tensor, width: int) -> Tensor:
    """Return a layer's weight with its inputs among the global ones, 0 elsewhere."""
    weight = params[layer.weight]
    shape = len(weight), width * layer.repeats, *weight.shape[2:]
    placed = weight.new_zeros(shape)
    placed[:, inputs_of(own, layer.repeats)] = weight
    return placed
