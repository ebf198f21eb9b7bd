"""MaTS and FedBEns, where the answer is known and against slow twins."""

import math

import pytest
import rivals_path  # noqa: F401
import torch
from oracles import randn
from rivals import fedbens, mats
from torch.distributions import MultivariateNormal

from flwr_fisher.curvature import Kronecker
from flwr_fisher.merge import LocalPosterior, fedavg

SHAPE = torch.Size((2, 3))


def factor(seed, n):
    root = randn(seed, n, n + 1, dtype=torch.float64)
    return (root @ root.mT / n).unsqueeze(0)


def client(seed, examples=10.0, at=1.0):
    """Return a layer of two outputs and three inputs, and what has no curvature."""
    W = at * randn(seed, 2, 3, dtype=torch.float64)
    F = Kronecker("w", SHAPE, factor(seed + 1, 3), factor(seed + 2, 2))
    return LocalPosterior({"w": W, "scale": W[0]}, F, examples)


# MaTS


def test_linear_regression_is_pooled_least_squares():
    """Its Fisher is a Kronecker product, exactly; every client's data counts alike."""
    data, fits = [], []
    for seed in range(3):
        x, y = (
            randn(seed + k, 20, n, dtype=torch.float64) for k, n in ((0, 3), (9, 2))
        )
        data.append((x, y))
        W = torch.linalg.lstsq(x, y).solution.T
        A = (x.T @ x / 20).unsqueeze(0)
        F = Kronecker("w", SHAPE, A, torch.eye(2, dtype=torch.float64).unsqueeze(0))
        fits.append(LocalPosterior({"w": W}, F, seed + 1.0))
    x, y = map(torch.cat, zip(*data, strict=True))
    want = torch.linalg.lstsq(x, y).solution.T
    torch.testing.assert_close(mats(fits)["w"], want, rtol=1e-4, atol=1e-5)


# FedBEns


def precision(posterior, T, v):
    dense = posterior.curvature.to_dense()
    return posterior.num_examples / T * dense + torch.eye(6, dtype=torch.float64) / v


def one_by_one(members, steps, T, v):
    """The released loop, by automatic differentiation of dense normal densities."""
    eye = torch.eye(6, dtype=torch.float64)
    prior = MultivariateNormal(torch.zeros(6, dtype=torch.float64), v * eye)
    clients = [
        [
            MultivariateNormal(p.params["w"].flatten(), None, precision(p, T, v))
            for p in own
        ]
        for own in zip(*members, strict=True)
    ]
    ends = []
    for member in members:
        start = torch.stack([p.params["w"].flatten() for p in member]).median(0).values
        x = start.clone().requires_grad_()
        adam, least, best = torch.optim.Adam([x], lr=0.001), math.inf, None
        for _ in range(steps):
            adam.zero_grad()
            terms = [torch.stack([q.log_prob(x) for q in own]) for own in clients]
            loss = -sum(each.logsumexp(0) for each in terms)
            loss = loss + (len(clients) - 1) * prior.log_prob(x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([x], 1.0)
            adam.step()
            if loss < least:
                least, best = loss.item(), x.detach().clone()
        ends.append(best)
    return ends


@pytest.mark.parametrize("apart", [0.1, 100.0])
def test_the_steps_are_the_released_ones(apart):
    """Where components overlap, and where all but one of a client's are far behind."""
    T, v = 5.0, 0.1
    members = [
        [client(100 * start + 10 * i, 5.0 + i, apart) for i in range(3)]
        for start in range(2)
    ]
    want = one_by_one(members, 40, T, v)
    got = fedbens(members, temperature=T, variance=v, steps=40)
    for model, x, member in zip(got, want, members, strict=True):
        torch.testing.assert_close(model["w"].flatten(), x, rtol=1e-9, atol=1e-9)
        assert torch.equal(model["scale"], fedavg(member)["scale"])


# Both
