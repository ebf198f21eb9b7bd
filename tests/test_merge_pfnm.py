"""PFNM: one step against the formulas by brute force, and cases with known answers."""

import math
import sys
from itertools import permutations

import pytest
import torch
from oracles import randn, rng
from test_merge_matching import drawn, plain, rival, same
from torch import Tensor, nn

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.merge import fedavg, pfnm
from flwr_fisher.merge.pfnm import _Units
from flwr_fisher.merge.units import chain_of, renumbered
from flwr_fisher.params import shared_state
from flwr_fisher.randomness import random_stream


def posterior_gain(units: list[list[Tensor]], sigma: float, sigma0: float) -> float:
    """What an assignment changes of the log evidence, but for the process's terms."""
    total = 0.0
    for members in units:
        precision = 1 / sigma0 + len(members) / sigma
        total += float((sum(members) / sigma).square().sum()) / precision
    return total


def test_one_client_more_is_assigned_at_the_largest_gain() -> None:
    """Against all assignments, with every term as the papers have it."""
    sigma, sigma0, gamma, J = 0.7, 1.3, 7.0, 4
    model = _Units(sigma, sigma0, gamma, 0, random_stream(0))
    first, second = randn(0, 3, 5).double(), randn(1, 3, 5).double()
    second[0] = first[1] + 0.1
    prior = torch.zeros(5, dtype=torch.float64)
    total, count = first / sigma, torch.ones(3, dtype=torch.int64)
    _, _, place = model._add(second / sigma, total, count, prior, J)

    def gain(assigned: tuple[int, ...]) -> float:
        units = [[w] for w in first]
        value, fresh = 0.0, 0
        for w, i in zip(second, assigned, strict=True):
            if i < 3:
                units[i] = [first[i], w]
                value += math.log(1 / (J - 1))
            else:
                fresh += 1
                units.append([w])
                value += 2 * math.log(gamma / J) - 2 * math.log(i - 3 + 1)
        return value + posterior_gain(units, sigma, sigma0)

    every = list(permutations(range(6), 3))
    # New units have no order: the cheapest ranks are taken first.
    best = max(every, key=gain)
    assert [min(i, 3) for i in best] == [min(i, 3) for i in place.tolist()]
    assert place[0] == 1


def test_every_term_of_an_assignments_gain_counts() -> None:
    """Against all assignments of two units to three that are there, or to new ones."""
    J, prior = 5, torch.zeros(3, dtype=torch.float64)
    for seed in range(200):
        sigma, sigma0, gamma = (0.5 + 2 * torch.rand(3, generator=rng(seed))).tolist()
        prior[-1] = 0.1 / sigma0
        count = torch.randint(1, 4, (3,), generator=rng(seed + 1))
        total = prior + randn(seed, 3, 3).double() * count.unsqueeze(1) / sigma
        own = randn(seed + 2, 2, 3).double() / sigma
        model = _Units(sigma, sigma0, gamma, 0, random_stream(0))
        place = model._add(own, total.clone(), count.clone(), prior, J)[2]

        def gain(
            assigned: tuple[int, ...], own=own, total=total, count=count,
            sigma=sigma, sigma0=sigma0, gamma=gamma,
        ) -> float:  # fmt: skip
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


@pytest.mark.parametrize("name", ["mlp", "lenet", "cnn-bias"])
def test_permuted_copies_match_exactly(name: str) -> None:
    """With a flat prior the mean of copies is the network, in the first one's order."""
    params = rival(name, 3)
    layers = chain_of(params)
    copies = [renumbered(params, layers, drawn(layers, seed)) for seed in range(2)]
    clients = [plain(params, 30), *(plain(copy, 10) for copy in copies)]
    merged = pfnm(clients, sigma=1e-4, sigma0=1e4, gamma=1e-3)
    assert {k: v.shape for k, v in merged.items()} == {
        k: v.shape for k, v in params.items()
    }
    same(params, merged, 1e-5)


@pytest.mark.parametrize("sigma0", [1.0, 4.0])
def test_the_prior_draws_units_to_zero(sigma0: float) -> None:
    params = rival("mlp", 0)
    merged = pfnm([plain(params, 1)] * 3, gamma=1e-6, sigma0=sigma0)
    share = 3 / (3 + 1 / sigma0)
    torch.testing.assert_close(merged["fc1.weight"], share * params["fc1.weight"])
    bias = share * params["fc1.bias"] + (1 - share) * 0.1
    torch.testing.assert_close(merged["fc1.bias"], bias)


def test_without_biases_the_prior_is_zero_alone() -> None:
    first, second = nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False)
    params = shared_state(nn.Sequential(first, nn.ReLU(), second))
    merged = pfnm([plain(params, 1)] * 3, gamma=1e-6)
    torch.testing.assert_close(merged["0.weight"], 0.75 * params["0.weight"])
    torch.testing.assert_close(merged["2.weight"], params["2.weight"])


def test_a_layer_grows_no_wider_than_the_widest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[_Units.__module__], "_WIDEST", 8)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    clients = [
        plain({k: 10 * randn(seed, *v.shape) for k, v in shared_state(net).items()}, 1)
        for seed in range(2)
    ]
    assert len(pfnm(clients, sigma=1e-3, sigma0=1e3)["0.weight"]) == 8


def test_unlike_units_make_the_network_wider_and_keep_each_client() -> None:
    """Units far apart stay apart, and the outputs are the mean of the clients'."""
    nets = [
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(2)
    ]
    clients = []
    for seed, net in enumerate(nets):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(10 * randn(seed, *parameter.shape))
        clients.append(plain(shared_state(net), 1))
    merged = pfnm(clients, sigma=1e-3, sigma0=1e3, gamma=7.0)
    assert merged["0.weight"].shape == (12, 4)
    assert merged["2.weight"].shape == (3, 12)
    x = randn(9, 5, 4)
    hidden = (x @ merged["0.weight"].mT + merged["0.bias"]).relu()
    mixed = hidden @ merged["2.weight"].mT + merged["2.bias"]
    both = torch.stack([net(x) for net in nets]).mean(0).detach()
    torch.testing.assert_close(mixed, both, rtol=1e-3, atol=1e-2)


def test_one_client_keeps_its_network_but_for_the_prior() -> None:
    params = rival("lenet", 1)
    merged = pfnm([plain(params, 3)], sigma0=1e9)
    same(params, merged, 1e-6)


def test_a_network_without_hidden_layers_is_averaged() -> None:
    clients = [plain(shared_state(nn.Linear(3, 2)), n) for n in (1, 3)]
    same(fedavg(clients), pfnm(clients), 0)


@pytest.mark.parametrize("name", ["sigma", "sigma0", "gamma"])
def test_arguments_are_checked(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        pfnm([plain(rival("mlp", 0), 1)], **{name: 0.0})
    with pytest.raises(ConfigurationError, match="iterations"):
        pfnm([plain(rival("mlp", 0), 1)], iterations=-1)
    pfnm([plain(rival("mlp", seed), 1) for seed in range(2)], iterations=0)
