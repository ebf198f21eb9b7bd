"""Permuted networks are one; their curvatures go with them."""

from itertools import permutations

import pytest
import rivals_path  # noqa: F401
import torch
from oracles import randn
from rivals.git_rebasin import (
    chain_of,
    match,
    matched,
    renumbered,
    renumbered_posterior,
)
from tasks import make_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.curvature import Diagonal, fisher
from flwr_fisher.merge import LocalPosterior, fedavg, fedfisher
from flwr_fisher.params import shared_state


def net(bias=True):
    """Two convolutions, a flattening, two linear layers."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, bias=bias),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3, bias=bias),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 2 * 2, 9, bias=bias),
        nn.ReLU(),
        nn.Linear(9, 3, bias=bias),
    ).double()


def images(seed=0, n=12):
    return randn(seed, n, 2, 6, 6, dtype=torch.float64)


def drawn(layers, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(one.outputs, generator=generator) for one in layers[:-1]]


def posterior_of(model, structure, n=10):
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(images(1), torch.zeros(12).long()), batch_size=4)
    return LocalPosterior(shared_state(model), fisher(model, loader, structure), n)


def loaded(params, bias=True):
    model = net(bias)
    model.load_state_dict(dict(params))
    return model


def same(left, right, tolerance=1e-12):
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("bias", [True, False])
def test_a_renumbered_network_computes_the_same(bias):
    torch.manual_seed(0)
    model = net(bias)
    params = shared_state(model)
    layers = chain_of(params)
    assert [one.repeats for one in layers] == [1, 1, 4, 1]
    other = renumbered(params, layers, drawn(layers, 1))
    assert not torch.equal(other["0.weight"], params["0.weight"])
    torch.testing.assert_close(loaded(other, bias)(images()), model(images()))


@pytest.mark.parametrize("structure", ["diagonal", "kfac"])
@pytest.mark.parametrize("bias", [True, False])
def test_its_curvature_is_that_of_the_renumbered_network(structure, bias):
    torch.manual_seed(0)
    before = posterior_of(net(bias), structure)
    layers = chain_of(before.params)
    moved = renumbered_posterior(before, layers, drawn(layers, 2))
    direct = posterior_of(loaded(moved.params, bias), structure).curvature
    probe = {k: randn(5, *s, dtype=torch.float64) for k, s in direct.shapes.items()}
    same(direct @ probe, {k: (moved.curvature @ probe)[k] for k in direct.shapes}, 1e-9)


@pytest.mark.parametrize("name", ["mlp", "lenet", "cnn-bias"])
def test_permuted_copies_match_exactly(name):
    params = shared_state(make_model(name, shape=(1, 28, 28), num_classes=10, seed=3))
    layers = chain_of(params)
    for seed in range(3):
        copy = renumbered(params, layers, drawn(layers, seed))
        same(params, renumbered(copy, layers, match(copy, params, layers)), 0)


def test_the_merge_of_permuted_copies_is_the_network():
    torch.manual_seed(0)
    one = posterior_of(net(), "kfac", 30)
    layers = chain_of(one.params)
    clients = [one]
    for seed in range(3):
        copy = renumbered_posterior(one, layers, drawn(layers, seed))
        clients.append(LocalPosterior(copy.params, copy.curvature, 10 + seed))
    assert (fedavg(clients)["0.weight"] - one.params["0.weight"]).abs().max() > 0.01
    same(one.params, fedfisher(matched(clients)).params, 1e-9)


def small(seed):
    torch.manual_seed(seed)
    hidden = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()
    return shared_state(nn.Sequential(*hidden, nn.Linear(4, 2)).double())


def check_nothing_is_nearer(own, other, layers, orders):
    """Of no layer any other order brings a network nearer to another."""

    def likeness(orders):
        there = renumbered(own, layers, orders)
        return sum(float((there[k] * other[k]).sum()) for k in there)

    most = likeness(orders) + 1e-9
    for at, order in enumerate(orders):
        for p in permutations(range(len(order))):
            assert likeness([*orders[:at], torch.tensor(p), *orders[at + 1 :]]) <= most


def test_each_client_is_as_near_to_the_mean_of_the_others_as_can_be():
    """By their examples; where MergeMany ends."""
    for seed in range(4):
        clients = [plain(small(10 * seed + i), n) for i, n in enumerate((5, 20, 60))]
        there = matched(clients)
        layers = chain_of(there[0].params)
        still = [torch.arange(one.outputs) for one in layers[:-1]]
        for i, own in enumerate(there):
            mean = fedavg([p for j, p in enumerate(there) if j != i])
            check_nothing_is_nearer(own.params, mean, layers, still)


def rival(name, seed):
    return shared_state(make_model(name, shape=(1, 28, 28), num_classes=10, seed=seed))


def plain(params, n):
    ones = {k: torch.ones_like(v) for k, v in params.items()}
    return LocalPosterior(params, Diagonal(ones), n)
