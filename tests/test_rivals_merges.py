"""PFNM, OTFusion and FedLPA, by brute force and where the answer is known."""

import math
import sys
from dataclasses import replace
from itertools import permutations

import pytest
import rivals_path  # noqa: F401
import torch
from oracles import randn, rng
from rivals import fedlpa, otfusion, pfnm
from rivals.fedlpa import ADDED, descended
from rivals.otfusion import transport
from rivals.pfnm import _Units
from test_merge_matching import drawn, plain, rival, same, small
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.curvature import BlockDiagonal, Kronecker, fisher
from flwr_fisher.errors import ConfigurationError, ParamsError, StructureError
from flwr_fisher.merge import LocalPosterior, fedavg
from flwr_fisher.merge.matching import chain_of, renumbered
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


@pytest.mark.parametrize("sigma0", [1.0, 4.0])
def test_the_prior_draws_units_to_zero(sigma0):
    params = rival("mlp", 0)
    merged = pfnm([plain(params, 1)] * 3, gamma=1e-6, sigma0=sigma0)
    share = 3 / (3 + 1 / sigma0)
    torch.testing.assert_close(merged["fc1.weight"], share * params["fc1.weight"])
    bias = share * params["fc1.bias"] + (1 - share) * 0.1
    torch.testing.assert_close(merged["fc1.bias"], bias)


def test_unlike_units_make_the_network_wider_and_keep_each_client(monkeypatch):
    """Units far apart stay apart, and the outputs are the mean of the clients'."""
    nets, clients = [], []
    for seed in range(2):
        nets.append(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
        with torch.no_grad():
            for parameter in nets[-1].parameters():
                parameter.copy_(10 * randn(seed, *parameter.shape))
        clients.append(plain(shared_state(nets[-1]), 1))
    merged = pfnm(clients, sigma=1e-3, sigma0=1e3, gamma=7.0)
    assert merged["0.weight"].shape == (12, 4)
    x = randn(9, 5, 4)
    hidden = (x @ merged["0.weight"].mT + merged["0.bias"]).relu()
    mixed = hidden @ merged["2.weight"].mT + merged["2.bias"]
    both = torch.stack([net(x) for net in nets]).mean(0).detach()
    torch.testing.assert_close(mixed, both, rtol=1e-3, atol=1e-2)
    monkeypatch.setattr(sys.modules[_Units.__module__], "_WIDEST", 8)
    assert len(pfnm(clients, sigma=1e-3, sigma0=1e3)["0.weight"]) == 8


def test_a_network_without_hidden_layers_is_averaged():
    clients = [plain(shared_state(nn.Linear(3, 2)), n) for n in (1, 3)]
    same(fedavg(clients), pfnm(clients), 0)


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
        own = fisher(model, loader, structure="kfac", expectation="empirical")
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
    right = torch.inverse(sum(p * A for p, A, B, W in terms))
    M = (left @ Z @ right).requires_grad_()
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


def test_their_fixed_point_is_the_dense_solve():
    posteriors = clients()
    merged = fedlpa(posteriors, steps=10**12)
    matrix, rhs = 0.0, 0.0
    for p, A, B, W in terms_of(posteriors, 1):
        dense = p * torch.kron(B, A)
        matrix, rhs = matrix + dense, rhs + dense @ W.flatten()
    want = torch.linalg.solve(matrix, rhs).reshape(3, 9)
    torch.testing.assert_close(merged["3.weight"], want[:, :-1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged["3.bias"], want[:, -1], rtol=1e-5, atol=1e-6)
    same(posteriors[0].params, fedlpa([posteriors[0]] * 3), 1e-9)
    z = torch.ones(2, dtype=torch.float64)
    assert torch.equal(descended(lambda x: x, z, z, rate=0.1, steps=5), z)


def test_what_has_no_factors_is_averaged():
    posteriors = [
        replace(p, params={**p.params, "scale": torch.full((2,), float(i))})
        for i, p in enumerate(clients())
    ]
    assert torch.equal(fedlpa(posteriors)["scale"], fedavg(posteriors)["scale"])


def test_what_cannot_be_solved_is_refused():
    first, *others = clients()
    for blocks in (
        list(first.curvature.blocks())[k] for k in (slice(1), slice(None, None, -1))
    ):
        odd = replace(first, curvature=BlockDiagonal(blocks))
        with pytest.raises(StructureError, match="same layers"):
            fedlpa([odd, *others])
    with pytest.raises(StructureError, match="kfac"):
        fedlpa([plain({"w": torch.ones(2)}, 1)])
    loud = [replace(p, curvature=p.curvature.scaled(1e4)) for p in (first, *others)]
    with pytest.raises(ParamsError, match=r"'0\.weight'"):
        fedlpa(loud)


@pytest.mark.parametrize(
    ("merge", "argument"),
    [
        *((pfnm, {name: 0.0}) for name in ("sigma", "sigma0", "gamma")),
        (pfnm, {"iterations": -1}),
        (fedlpa, {"steps": -1}),
        (fedlpa, {"added": -0.1}),
    ],
)
def test_arguments_are_checked(merge, argument):
    with pytest.raises(ConfigurationError, match=next(iter(argument))):
        merge([plain(rival("mlp", 0), 1)], **argument)


@pytest.mark.parametrize("merge", [pfnm, otfusion])
def test_clients_that_cannot_be_merged_are_refused(merge):
    one, other = plain(rival("mlp", 0), 1), plain({"fc1.weight": torch.ones(2, 2)}, 1)
    with pytest.raises(ParamsError, match="no posterior"):
        merge([])
    with pytest.raises(ParamsError, match="posterior 1"):
        merge([one, other])
