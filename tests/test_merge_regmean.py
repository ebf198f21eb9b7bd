"""RegMean against dense least squares."""

import pytest
import torch
from oracles import (
    posteriors,
    randn,
    random_blocks,
    random_diagonal,
    random_kronecker,
    relative,
)

from flwr_fisher.curvature import BlockDiagonal, Diagonal
from flwr_fisher.errors import StructureError
from flwr_fisher.merge import LocalPosterior, fedavg, regmean


def root(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.mT


def least_squares(clients, layer, off_diagonal):
    """Return each group's W of least sum p_i |(W - W_i) A_i^(1/2)|^2, of least norm."""
    total = sum(c.num_examples for c in clients)
    blocks = [c.curvature.blocks()[layer] for c in clients]
    first = blocks[0]
    out = first.weight_shape[0] // first.A.shape[0]
    found = []
    for g in range(first.A.shape[0]):
        rows, targets = [], []
        for client, block in zip(clients, blocks, strict=True):
            here = slice(g * out, (g + 1) * out)
            W = client.params[block.weight][here].reshape(out, -1)
            if block.bias is not None:
                W = torch.cat([W, client.params[block.bias][here].unsqueeze(1)], dim=1)
            A = block.A[g].clone()
            for i in range(len(A)):
                for j in range(len(A)):
                    A[i, j] *= 1.0 if i == j else off_diagonal
            half = (client.num_examples / total) ** 0.5 * root(A)
            rows.append(half)
            targets.append(half @ W.mT)
        system, wanted = torch.cat(rows), torch.cat(targets)
        found.append((torch.linalg.pinv(system, rtol=1e-7) @ wanted).mT)
    return found


@pytest.mark.parametrize("off_diagonal", [1.0, 0.9, 0.1, 0.0])
@pytest.mark.parametrize(
    ("shape", "bias", "groups"),
    [
        ((4, 6), None, 1),
        ((4, 6), "b", 1),
        ((4, 2, 2, 3), "b", 1),
        ((6, 2, 2), None, 3),
        ((6, 1, 3), "b", 2),
    ],
)
def test_regmean_is_least_squares_on_the_inputs(shape, bias, groups, off_diagonal):
    clients = posteriors(
        lambda seed: random_kronecker(seed, shape=shape, bias=bias, groups=groups)
    )
    want = least_squares(clients, 0, off_diagonal)
    got = regmean(clients, off_diagonal=off_diagonal)
    assert list(got) == list(clients[0].params)
    inputs = torch.Size(shape[1:]).numel()
    weight = torch.cat([W[:, :inputs] for W in want]).reshape(shape)
    assert relative(got["w"], weight) <= 1e-8
    if bias is not None:
        assert relative(got["b"], torch.cat([W[:, -1] for W in want])) <= 1e-8


def test_whole_models_layer_by_layer_and_the_rest_averaged():
    clients = posteriors(random_blocks)
    for i, client in enumerate(clients):
        client.params["buffer"] = randn(i, 2)
    got, mean = regmean(clients), fedavg(clients)
    conv = torch.cat(least_squares(clients, 0, 0.9)).reshape(4, 2, 2)
    (fc,) = least_squares(clients, 1, 0.9)
    assert relative(got["conv.weight"], conv) <= 1e-8
    assert relative(got["fc.weight"], fc[:, :-1]) <= 1e-8
    assert relative(got["fc.bias"], fc[:, -1]) <= 1e-8
    for name in ("norm.weight", "norm.bias", "buffer"):
        assert torch.equal(got[name], mean[name])


def test_a_layer_of_which_one_client_has_a_diagonal_is_averaged():
    clients, other = posteriors(random_blocks), posteriors(random_blocks)[0]
    conv, fc, norm = other.curvature.children
    odd = BlockDiagonal([conv, Diagonal(fc.diagonal()), norm])
    clients[0] = LocalPosterior(other.params, odd, other.num_examples)
    got = regmean(clients)
    assert torch.equal(got["fc.weight"], fedavg(clients)["fc.weight"])
    assert torch.equal(
        got["conv.weight"], regmean(posteriors(random_blocks))["conv.weight"]
    )


def test_identical_clients_keep_their_model():
    clients = posteriors(random_blocks)
    for client in clients[1:]:
        client.params.update(clients[0].params)
    got = regmean(clients)
    assert max(relative(got[k], v) for k, v in clients[0].params.items()) <= 1e-10


def test_float32s_rounding_of_singular_factors_is_not_inverted():
    clients = posteriors(lambda s: random_kronecker(s, shape=(5, 200), rank=20))
    single = []
    for c in clients:
        params = {"w": c.params["w"].float()}
        small = c.curvature.to(dtype=torch.float32)
        single.append(LocalPosterior(params, small, c.num_examples))
    want = regmean(clients, off_diagonal=1.0)["w"]
    assert relative(regmean(single, off_diagonal=1.0)["w"], want) <= 1e-3


def test_regmean_needs_input_factors_and_clients():
    for make in (
        lambda seed: random_diagonal(seed, w=(2, 3)),
        lambda seed: BlockDiagonal([random_diagonal(seed, w=(2, 3))]),
    ):
        with pytest.raises(StructureError, match="use structure='kfac'"):
            regmean(posteriors(make))
