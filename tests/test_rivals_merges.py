"""PFNM, OTFusion and FedLPA, by brute force and where the answer is known."""

import math
from dataclasses import replace
from itertools import permutations

import pytest
import rivals_path  # noqa: F401
import torch
from oracles import randn, rng
from rivals import fedlpa, otfusion, pfnm
from rivals.fedlpa import ADDED
from rivals.git_rebasin import chain_of, renumbered
from rivals.otfusion import transport
from rivals.pfnm import _Units
from test_rivals_git_rebasin import drawn, plain, rival, same, small
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.curvature import FisherOptions, Kronecker, fisher
from flwr_fisher.merge import LocalPosterior, fedavg
from flwr_fisher.params import shared_state
from flwr_fisher.randomness import random_stream

# PFNM


def test_every_term_of_an_assignments_gain_counts():
    """Against all assignments of two units to three that are there, or to new ones."""
    J, prior = 5, torch.zeros(3, dtype=torch.float64)
    for seed in range(100):
        sigma, sigma0, gamma = (0.5 + 2 * torch.rand(3, generator=rng(seed))).tolist()
        prior[-1] = 0.1 / sigma0
        count = torch.randint(1, 4, (3,), generator=rng(seed + 1))
        total = prior + randn(seed, 3, 3).double() * count.unsqueeze(1) / sigma
        own = randn(seed + 2, 2, 3).double() / sigma
        model = _Units(sigma, sigma0, gamma, 0, random_stream(0))
        place = model._add(own, total.clone(), count.clone(), prior, J)[2]

        def gain(
            assigned, own=own, total=total, count=count,
            sigma=sigma, sigma0=sigma0, gamma=gamma) :  # fmt: skip
            value = 0.0
            for w, i in zip(own, assigned, strict=True):
                before, members = prior, 0
                if i < 3:
                    before, members = total[i], int(count[i])
                    value += math.log(members / (J - members))
                else:
                    value += 2 * math.log(gamma / J) - 2 * math.log(i - 2)
                precision = 1 / sigma0 + members / sigma
                value += float((before + w).square().sum()) / (precision + 1 / sigma)
                value -= float(before.square().sum()) / precision
            return value

        best = max(permutations(range(5), 2), key=gain)
        assert [min(i, 3) for i in best] == place.clamp(max=3).tolist(), seed


@pytest.mark.parametrize(
    ("merge", "name"), [(pfnm, "mlp"), (pfnm, "cnn-bias"), (otfusion, "lenet")]
)
def test_permuted_copies_match_exactly(merge, name):
    """With a flat prior the mean of copies is the network, in the first one's order."""
    params = rival(name, 3)
    layers = chain_of(params)
    copies = [renumbered(params, layers, drawn(layers, seed)) for seed in range(2)]
    clients = [plain(params, 30), *(plain(copy, 10) for copy in copies)]
    flat = {"sigma": 1e-4, "sigma0": 1e4, "gamma": 1e-3} if merge is pfnm else {}
    same(params, merge(clients, **flat), 1e-5)


# OTFusion


def test_each_layers_transport_is_the_cheapest_of_all_permutations():
    """To the client with the most examples, on inputs that were transported before."""
    clients = [plain(small(s), n) for s, n in ((0, 10), (1, 30))]
    one, other = (client.params for client in clients)
    layers, inputs = chain_of(one), torch.arange(3)
    orders = transport(one, other, layers)
    for name, order in zip(("0", "2"), orders, strict=True):
        rows, columns = (
            torch.cat([p[f"{name}.weight"], p[f"{name}.bias"].unsqueeze(1)], 1)
            for p in (other, one)
        )
        columns = torch.cat([columns[:, inputs], columns[:, -1:]], 1)

        def cost(places, rows=rows, columns=columns):
            return float((rows - columns[list(places)]).norm(dim=1).sum())

        assert tuple(order.tolist()) == min(permutations(range(len(rows))), key=cost)
        inputs = order
    there = replace(clients[0], params=renumbered(one, layers, orders))
    same(fedavg([there, clients[1]]), otfusion(clients))


# FedLPA


def eye(n):
    return torch.eye(n, dtype=torch.float64)


def clients(bias=True):
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 2, 3, bias=bias), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
        ).double()
        x, y = randn(seed, 20, 1, 4, 4, dtype=torch.float64), torch.arange(20) % 3
        loader = DataLoader(TensorDataset(x, y), batch_size=5)
        options = FisherOptions.full(expectation="empirical")
        own = fisher(model, loader, structure="kfac", options=options)
        found.append(LocalPosterior(shared_state(model), own, 10.0 * (seed + 1)))
    return found


def terms_of(posteriors, at, s=1):
    """Return each client's share, factors with what is added, and weights."""
    total = sum(p.num_examples for p in posteriors)
    for posterior in posteriors:
        layer = posterior.curvature.blocks()[at].made()
        assert isinstance(layer, Kronecker)
        A = layer.A[0] / s**2 + ADDED * eye(layer.A.shape[-1])
        B = layer.G[0] * s**2 + ADDED * eye(layer.G.shape[-1])
        W = layer.as_matrices(posterior.params)[0]
        yield posterior.num_examples / total, A, B, W


def one_by_one(posteriors, at, steps, s):
    """The released loop: the mean squared error's gradient, at a rate of 1."""
    terms = list(terms_of(posteriors, at, s))
    Z = sum(p * B @ W @ A for p, A, B, W in terms)
    left = torch.inverse(sum(p * B for p, A, B, W in terms))
    M = (left @ Z @ torch.inverse(sum(p * A for p, A, B, W in terms))).requires_grad_()
    for _ in range(steps):
        made = sum(p * B @ M @ A for p, A, B, W in terms)
        (gradient,) = torch.autograd.grad(nn.functional.mse_loss(made, Z), M)
        M = (M - gradient).detach().requires_grad_()
    return M.detach()


@pytest.mark.parametrize(("steps", "bias"), [(0, False), (1, True), (200, True)])
def test_the_steps_are_the_released_ones(steps, bias):
    assert pytest.approx((1 - 0.999) ** 0.5) == ADDED
    posteriors = clients(bias)
    merged = fedlpa(posteriors, steps=steps, positions={"0.weight": 4})
    for at, (name, s) in enumerate({"0": 4, "3": 1}.items()):
        want = one_by_one(posteriors, at, steps, s)
        got = merged[f"{name}.weight"].flatten(1)
        if f"{name}.bias" in merged:
            got = torch.cat([got, merged[f"{name}.bias"].unsqueeze(1)], 1)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
