"""RegMean, RegMean++, FedCGS, GH-LDA and FENS, where the answer is known."""

import math

import pytest
import rivals_path  # noqa: F401
import torch
import torch.nn.functional as F
from oracles import randn, relative, seeded
from rivals import fedcgs, fens, gh_lda, regmean, regmean_plus_plus
from torch import nn

from flwr_fisher.curvature import fisher
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import shared_state
from flwr_fisher.tangent.frozen_head import HeadSums, head_sums

# RegMean and RegMean++


@pytest.mark.parametrize("off_diagonal", [1.0, 0.3])
def test_regmean_is_least_squares_on_the_inputs(off_diagonal):
    """Off the diagonal, independent inputs of the same second moments add to it."""
    models = [seeded(lambda: nn.Linear(4, 3).double(), seed) for seed in range(3)]
    params = [shared_state(m) for m in models]
    x = [randn(5 + i, 30, 4, dtype=torch.float64) for i in range(3)]
    own = [
        LocalPosterior(p, fisher(m, [each], structure="kfac"), weight)
        for m, p, each, weight in zip(models, params, x, (7, 2, 5), strict=True)
    ]
    merged = regmean(own, off_diagonal=off_diagonal)
    inputs = [F.pad(each, (0, 1), value=1.0) for each in x]
    rows = [
        torch.cat(
            [
                off_diagonal**0.5 * a,
                ((1 - off_diagonal) * a.square().sum(0)).sqrt().diag(),
            ]
        )
        for a in inputs
    ]
    Ws = [torch.cat([p["weight"], p["bias"].unsqueeze(1)], 1) for p in params]
    scales = [math.sqrt(weight / 30) for weight in (7, 2, 5)]
    system = torch.cat([s * a for s, a in zip(scales, rows, strict=True)])
    wanted = torch.cat([s * a @ W.mT for s, a, W in zip(scales, rows, Ws, strict=True)])
    solution = torch.linalg.lstsq(system, wanted).solution.mT
    assert relative(merged["weight"], solution[:, :4]) < 1e-9
    assert relative(merged["bias"], solution[:, 4]) < 1e-9


def net(seed, bias=True):
    return seeded(lambda: chain(bias), seed).double()


def chain(bias):
    conv = nn.Conv2d(1, 2, 3, bias=bias)
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(8, 3, bias=bias))


def given(count=40, bias=True):
    models = [net(seed, bias) for seed in range(3)]
    x = [randn(9 + i, count, 1, 4, 4, dtype=torch.float64) for i in range(3)]
    return models, [shared_state(m) for m in models], [[each] for each in x]


@pytest.mark.parametrize("bias", [True, False])
def test_each_layer_is_merged_on_what_the_merged_ones_before_make(bias):
    """By hand: RegMean on the images, then least squares on the merged features."""
    models, params, batches = given(bias=bias)
    weights = [10, 30, 20]
    merged = regmean_plus_plus(models[0], params, batches, weights, off_diagonal=1.0)
    layer = models[0][0]
    columns = [F.unfold(x[0], 3).mT.reshape(-1, 9) for x in batches]
    flat = [p["0.weight"].flatten(1) for p in params]
    biases = [p["0.bias"] if bias else None for p in params]
    first = least_squares(columns, flat, biases, weights, positions=4)
    assert relative(merged["0.weight"].flatten(1), first[:, :9]) < 1e-9
    with torch.no_grad():
        layer.weight.copy_(first[:, :9].reshape(layer.weight.shape))
        if bias:
            layer.bias.copy_(first[:, 9])
        features = [models[0][:3](x[0]) for x in batches]
    flat = [p["3.weight"] for p in params]
    biases = [p["3.bias"] if bias else None for p in params]
    last = least_squares(features, flat, biases, weights)
    assert relative(merged["3.weight"], last[:, :8]) < 1e-9
    if bias:
        assert relative(merged["0.bias"], first[:, 9]) < 1e-9
        assert relative(merged["3.bias"], last[:, 8]) < 1e-9


def least_squares(inputs, weights, biases, shares, positions=1):
    """Return the map that is nearest to all clients' on their own inputs."""
    rows, wanted = [], []
    for x, W, b, share in zip(inputs, weights, biases, shares, strict=True):
        if b is not None:
            x, W = F.pad(x, (0, 1), value=1.0), torch.cat([W, b.unsqueeze(1)], 1)
        scale = math.sqrt(share * positions / len(x))
        rows.append(scale * x)
        wanted.append(scale * x @ W.mT)
    return torch.linalg.lstsq(torch.cat(rows), torch.cat(wanted)).solution.mT


# FedCGS and GH-LDA


def sums_of(x, y, classes):
    head = nn.Sequential(nn.Linear(x.shape[1], classes)).double()
    return head_sums(head, [(x, y)], "0")


@pytest.mark.parametrize("head", [fedcgs, gh_lda])
def test_a_gaussian_head_is_that_of_the_pooled_data_whatever_the_split(head):
    """Against means and covariances of single examples; clients have one class each."""
    x, y = randn(0, 60, 4, dtype=torch.float64), torch.arange(60) % 3
    x += randn(1, 3, 4, dtype=torch.float64)[y]
    y[:9] = 0  # classes are not of one size
    means = torch.stack([x[y == c].mean(0) for c in range(3)])
    if head is fedcgs:
        S = torch.cov(x.mT)
    else:
        off = x - means[y]
        S = sum(torch.outer(each, each) for each in off) / (60 - 3)
        S = 0.95 * S + (0.05 * S.trace() / 4 + 1e-6) * torch.eye(4)
    wanted = torch.linalg.solve(S, means.mT).mT
    prior = torch.tensor([float((y == c).sum()) / 60 for c in range(3)]).log()
    split = HeadSums.total([sums_of(x[y == c], y[y == c], 3) for c in range(3)])
    weight, bias = head(split)
    assert relative(weight, wanted) < 1e-9
    quadratic = torch.stack([m @ w for m, w in zip(means, wanted, strict=True)])
    assert relative(bias, prior - quadratic / 2) < 1e-6


# FENS


def test_a_round_of_fens_is_fedadams_step_by_what_clients_took_theirs_on():
    z, y = randn(0, 12, 2, 3), torch.arange(12) % 3
    own = [(z[:2], y[:2]), (z[2:], y[2:])]
    start, after = (
        fens([own[0][0], own[1][0]], [own[0][1], own[1][1]], batch_size=10, **how)
        for how in ({"rounds": 1, "server_lr": 1e-12}, {"rounds": 1, "lr": 0.5})
    )
    changes = []
    for inputs, labels in own:
        loss = F.cross_entropy(start(inputs), labels)
        grads = torch.autograd.grad(loss, list(start.parameters()))
        changes.append([-0.5 * g for g in grads])
    pairs = zip(start.parameters(), after.parameters(), *changes, strict=True)
    for before, now, one, other in pairs:
        change = (2 * one + 10 * other) / 12
        m, v = 0.1 * change, 0.01 * change**2
        torch.testing.assert_close(now, before + 1e-3 * m / (v.sqrt() + 1e-3))
