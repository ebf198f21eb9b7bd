"""FedBEns: modes of a product of mixtures (Talpini, Savi & Neglia, ICML 2025)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flwr_fisher.curvature import Kronecker
from flwr_fisher.errors import ParamsError, StructureError, check_positive, check_whole
from flwr_fisher.merge.posterior import LocalPosterior, check_posteriors, fedavg
from flwr_fisher.params import Params

TEMPERATURE, VARIANCE = 0.1, 0.1  # the README's, and the script's
STARTS = 3  # trainings a client, the README's
_RATE, _LONGEST = 0.001, 1.0  # Adam's, and of a gradient
_SCORED = 30  # steps from one score to the next
_FAR = 1e3  # nats: what a component counts that is so far behind, no float holds

Matrices = list[Tensor]  # each layer's


def fedbens(
    members: Sequence[Sequence[LocalPosterior]],
    *,
    temperature: float = TEMPERATURE,
    variance: float = VARIANCE,
    steps: int = 300,
    score: Callable[[Params], float] | None = None,
) -> list[dict[str, Tensor]]:
    r"""Return a model for each start, which vote, as the released code finds them.

    (jacopot96/FedBEns, ``main_FedBEns_kron.py``.) Every client trains from the same J
    starts. Its likelihood is a mixture of Laplace approximations, and the posterior
    their product over M clients, each of which holds the prior once:

    .. math:: -\sum_i \log \sum_j N(\theta; \theta_{ij}, \Lambda_{ij}^{-1})
              + (M - 1) \log N(\theta; 0, v I), \qquad
              \Lambda_{ij} = \tfrac{n_i}{T} G_{ij} \otimes A_{ij} + \tfrac1v I.

    Adam descends on it, its rate 0.001 and gradients no longer than 1, from the
    elementwise median over clients of the models of each start. Of the points after
    every 30th step and the last one the best on validation data is taken; components
    that are a thousand nats behind a client's first are looked at at these alone. As
    released, a mixture's components count the same (the option for weights has no
    effect), and the rate that the script gives (0.01) is not used. CIFAR-10 is
    augmented there, which is left to who trains. What no curvature covers is averaged,
    for each start.

    Parameters
    ----------
    members : Sequence[Sequence[LocalPosterior]]
        For each start every client's posterior, with ``structure="kfac"``.
    temperature, variance : float
        T and v.
    steps : int, default 300
        With 0 they are the medians.
    score : Callable[[Mapping[str, Tensor]], float], optional
        Of a model, the higher the better. Without it, the point is taken at which the
        step from the least value ended.

    Raises
    ------
    ConfigurationError
        If an argument is out of range.
    ParamsError
        If the posteriors cannot be merged.
    StructureError
        If layers' curvatures are not Kronecker's, or not the same layers'.
    """
    check_positive("temperature", temperature)
    check_positive("variance", variance)
    check_whole("steps", steps, 0)
    check_posteriors([posterior for member in members for posterior in member])
    if len({len(member) for member in members}) > 1:
        raise ParamsError("FedBEns needs a posterior of every client for each start")
    layers = _layers_of(members[0][0])
    clients = [
        [_Component.of(each, layers, temperature, variance) for each in own]
        for own in zip(*members, strict=True)
    ]
    posterior, found = _Posterior(clients, variance), []
    for index, member in enumerate(members):
        centres = zip(*(mixture[index].centre for mixture in clients), strict=True)
        start = [torch.stack(each).median(0).values for each in centres]
        whole = partial(_whole, layers, fedavg(member))
        found.append(_descended(posterior, start, whole, steps, score))
    return found


def _layers_of(posterior: LocalPosterior) -> list[Kronecker]:
    made = [block.made() for block in posterior.curvature.blocks()]
    layers = [block for block in made if isinstance(block, Kronecker)]
    if not layers or len(layers) < len(made):
        raise StructureError("FedBEns needs the factors of structure='kfac'")
    return layers


def _whole(layers: Sequence[Kronecker], rest: Params, x: Matrices) -> dict[str, Tensor]:
    merged = dict(rest)
    for layer, matrices in zip(layers, x, strict=True):
        merged |= layer.as_params(matrices.detach().clone())
    return merged


@dataclass(frozen=True)
class _Component:
    """A Laplace approximation of one training's: a Gaussian, layer by layer."""

    layers: list[Kronecker]
    centre: Matrices
    ridge: float
    constant: float  # of its log density, but for the same in all

    @classmethod
    def of(
        cls,
        posterior: LocalPosterior,
        like: Sequence[Kronecker],
        temperature: float,
        variance: float,
    ) -> "_Component":
        layers, ridge = _layers_of(posterior), 1 / variance
        if [(x.weight, x.shapes) for x in layers] != [
            (x.weight, x.shapes) for x in like
        ]:
            raise StructureError("FedBEns needs the same layers of every client")
        layers = [x.scaled(posterior.num_examples / temperature) for x in layers]
        # In float64: the sum of a million logarithms, of which differences count.
        logarithms = [_log_det(layer, ridge) for layer in layers]
        centre = [layer.as_matrices(posterior.params) for layer in layers]
        return cls(layers, centre, ridge, sum(logarithms) / 2)

    def at(self, x: Matrices) -> tuple[float, Matrices]:
        """Return the log density and minus its gradient."""
        density, pulls = self.constant, []
        for layer, own, there in zip(self.layers, self.centre, x, strict=True):
            away = there - own
            pulls.append(layer.product(away) + self.ridge * away)
            density -= float((away * pulls[-1]).sum(dtype=torch.float64)) / 2
        return density, pulls


def _log_det(layer: Kronecker, ridge: float) -> float:
    a, g = (torch.linalg.eigvalsh(x).clamp_min(0).double() for x in (layer.A, layer.G))
    return float((g.unsqueeze(-1) * a.unsqueeze(-2) + ridge).log().sum())


@dataclass(frozen=True)
class _Posterior:
    """The product of the clients' mixtures over all but one of their priors."""

    clients: Sequence[Sequence[_Component]]
    variance: float

    def near(self, x: Matrices) -> list[list[_Component]]:
        """Return the components, without those that are far behind a client's first."""
        densities = [[each.at(x)[0] for each in own] for own in self.clients]
        return [
            [each for each, there in zip(own, found, strict=True) if there > far]
            for own, found in zip(self.clients, densities, strict=True)
            for far in [max(found) - _FAR]
        ]

    def at(
        self, x: Matrices, near: Sequence[Sequence[_Component]]
    ) -> tuple[float, Matrices]:
        """Return minus the log density, and its gradient."""
        prior = (len(near) - 1) / self.variance
        value = -prior * sum(float(v.double().square().sum()) for v in x) / 2
        gradient = [-prior * v for v in x]
        for own in near:
            found = [each.at(x) for each in own]
            densities = torch.tensor([there for there, _ in found], dtype=torch.float64)
            value -= float(densities.logsumexp(0))
            for share, (_, pulls) in zip(densities.softmax(0), found, strict=True):
                for total, pull in zip(gradient, pulls, strict=True):
                    total.add_(pull, alpha=float(share))
        return value, gradient


def _descended(
    posterior: _Posterior,
    start: Matrices,
    whole: Callable[[Matrices], dict[str, Tensor]],
    steps: int,
    score: Callable[[Params], float] | None,
) -> dict[str, Tensor]:
    x = [each.clone().requires_grad_() for each in start]
    adam = torch.optim.Adam(x, lr=_RATE)
    best, highest = whole(x), -math.inf
    for step in range(steps):
        with torch.no_grad():
            if step % _SCORED == 0:
                near = posterior.near(x)
            value, gradient = posterior.at(x, near)
        for each, along in zip(x, gradient, strict=True):
            each.grad = along
        torch.nn.utils.clip_grad_norm_(x, _LONGEST)
        adam.step()
        if score and step % _SCORED and step < steps - 1:
            continue
        there = whole(x)
        reached = score(there) if score else -value
        if reached > highest:
            best, highest = there, reached
    return best
