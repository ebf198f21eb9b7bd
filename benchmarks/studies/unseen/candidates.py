r"""Other curvatures and merges that the default was compared with on validation data.

Each works on a client's :class:`Sample`, what K-FAC is made of: for up to 400 of its
examples the inputs :math:`a` of every linear layer, and for each class :math:`c` the
gradient :math:`g` of its log-probability :math:`\log p_c` in the layer's outputs, times
:math:`\sqrt{p_c}`. So :math:`A = \operatorname{mean} aa^T` and
:math:`G = \operatorname{mean} \sum_c gg^T`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rivals.regmean import regmean
from torch import Tensor, nn

from flwr_fisher.curvature import BlockDiagonal, Kronecker
from flwr_fisher.merge import LocalPosterior, fedfisher

MOST = 400  # examples of a client
Factors = tuple[Tensor, Tensor]  # A and G
Merge = Callable[[Sequence["Client"]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Sample:
    """What the K-FAC of a layer is made of."""

    weight: str
    bias: str
    inputs: Tensor  # [n, in + 1], the last column is of ones
    gradients: Tensor  # [n, classes, out]


@dataclass(frozen=True)
class Client:
    """A client's upload, and a sample of its data's curvature by temperature."""

    upload: LocalPosterior
    samples: Mapping[float, Sequence[Sample]]

    def with_factors(
        self, factors: Callable[[Sample], Factors], temperature: float = 1.0
    ) -> LocalPosterior:
        """Return the upload with a K-FAC of these factors."""
        blocks = []
        for own in self.samples[temperature]:
            shape = self.upload.params[own.weight].shape
            one_group = [factor.unsqueeze(0) for factor in factors(own)]
            blocks.append(Kronecker(own.weight, shape, *one_group, own.bias))
        return LocalPosterior(
            self.upload.params, BlockDiagonal(blocks), self.upload.num_examples
        )


def sample(model: nn.Sequential, x: Tensor, temperature: float = 1.0) -> list[Sample]:
    """Return each linear layer's sample; the outputs are divided by the temperature."""
    found, h = [], x[:MOST]
    for name, layer in model.named_children():
        before, h = h, layer(h)
        if isinstance(layer, nn.Linear):
            found.append((name, before.detach(), h))
    logits = (h / temperature).log_softmax(1)
    roots = logits.detach().exp().sqrt()
    outputs = [output for _, _, output in found]
    by_class = [
        torch.autograd.grad(logits[:, c].sum(), outputs, retain_graph=True)
        for c in range(logits.shape[1])
    ]
    return [
        Sample(
            f"{name}.weight",
            f"{name}.bias",
            torch.cat([inputs, torch.ones(len(inputs), 1)], 1),
            torch.stack(gradients, 1) * roots.unsqueeze(-1),
        )
        for (name, inputs, _), gradients in zip(
            found, zip(*by_class, strict=True), strict=True
        )
    ]


def plain(own: Sample) -> Factors:
    """Return K-FAC's factors."""
    a, g = own.inputs, own.gradients
    return a.mT @ a / len(a), torch.einsum("nco,ncp->op", g, g) / len(g)


def ledoit_wolf(own: Sample, times: float = 1.0) -> Factors:
    r"""Return K-FAC's factors, G drawn to the identity by how badly it is estimated.

    Ledoit & Wolf (2004): by the variance of the mean of :math:`\sum_c gg^T`, divided by
    its squared distance from the multiple of the identity, `times` so much.
    """
    A, G = plain(own)
    each = torch.einsum("nco,ncp->nop", own.gradients, own.gradients)
    target = torch.eye(len(G)) * G.trace() / len(G)
    variance = (each - G).square().sum() / len(each) ** 2
    share = (times * variance / (G - target).square().sum()).clamp(0, 1)
    return A, torch.lerp(G, target, share)


def frobenius_optimal(own: Sample, steps: int = 5) -> Factors:
    r"""Return the factors nearest the layer's Fisher in the Frobenius norm.

    Van Loan & Pitsianis' power iteration, from K-FAC's:
    :math:`A \propto \operatorname{mean} (\sum_c g^T G g)\, aa^T`, and so for G.
    """
    a, g = own.inputs, own.gradients
    A, G = plain(own)
    for _ in range(steps):
        of_g = torch.einsum("nco,op,ncp->n", g, G, g) / G.square().sum().clamp_min(
            1e-30
        )
        A = torch.einsum("n,ni,nj->ij", of_g, a, a) / len(a)
        of_a = torch.einsum("ni,ij,nj->n", a, A, a) / A.square().sum().clamp_min(1e-30)
        G = torch.einsum("n,nco,ncp->op", of_a, g, g) / len(g)
    return A, G


def by_factors(
    factors: Callable[[Sample], Factors], temperature: float = 1.0, **options: float
) -> Merge:
    """Return the default's merge of K-FACs with such factors."""

    def merge(clients: Sequence[Client]) -> Mapping[str, Tensor]:
        uploads = [each.with_factors(factors, temperature) for each in clients]
        return fedfisher(uploads, **options).params

    return merge


def by_options(**options: float) -> Merge:
    """Return the merge of the uploads with these options."""
    return lambda clients: fedfisher([c.upload for c in clients], **options).params


def mean_with_regmean(share: float) -> Merge:
    """Return the default's merge, with a share of RegMean's."""

    def merge(clients: Sequence[Client]) -> Mapping[str, Tensor]:
        uploads = [client.upload for client in clients]
        ours, theirs = fedfisher(uploads).params, regmean(uploads)
        return {k: torch.lerp(v, theirs[k], share) for k, v in ours.items()}

    return merge


TEMPERATURES = (0.6, 1.0, 2.0, 5.0)
OPTIONS = "the default's Fisher"
SAMPLED = "K-FAC of up to 400 examples"
CANDIDATES: dict[str, dict[str, Merge]] = {
    OPTIONS: {
        "default": by_options(),
        "balance 1/2, robust 0": by_options(robust=0),
        "balance 0, robust 0": by_options(robust=0, balance=0),
        "balance 1, robust 0": by_options(robust=0, balance=1),
        "damping .1": by_options(damping=0.1),
        "damping .3": by_options(damping=0.3),
        "damping 1": by_options(damping=1),
        "2 iterations, robust 0": by_options(iterations=2, robust=0),
        "damping .1, robust 0": by_options(damping=0.1, robust=0),
        "shrink .1": by_options(shrink=0.1),
        "1 iteration": by_options(iterations=1),
        "2 iterations": by_options(iterations=2),
        "20 iterations": by_options(iterations=20),
        "with 15 % of RegMean": mean_with_regmean(0.15),
        "with half of RegMean": mean_with_regmean(0.5),
    },
    SAMPLED: {
        "K-FAC": by_factors(plain),
        "G by Ledoit and Wolf": by_factors(ledoit_wolf),
        "twice as much of it": by_factors(partial(ledoit_wolf, times=2)),
        "K-FAC, robust 0": by_factors(plain, robust=0),
        "Frobenius-optimal factors": by_factors(frobenius_optimal),
        "of one step": by_factors(partial(frobenius_optimal, steps=1)),
        "Frobenius-optimal factors, robust 0": by_factors(frobenius_optimal, robust=0),
        **{f"temperature {t:g}": by_factors(plain, t) for t in TEMPERATURES if t != 1},
    },
}
