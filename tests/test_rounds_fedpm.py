"""FedPM's direction and mixture, against Kronecker products and least squares."""

import pytest
import torch
from oracles import randn, random_psd, relative

from flwr_fisher.curvature import InputCovariance
from flwr_fisher.params import weighted_mean
from flwr_fisher.rounds import Preconditioner, fedpm_mix

OUT, IN, FILTERS, GROUPS = 3, 4, 6, 2
SHAPES = {
    "fc.weight": (OUT, IN),
    "fc.bias": (OUT,),
    "conv.weight": (FILTERS, 2, 2, 1),
    "norm.weight": (5,),
}


def layers_of(seed, rank=9, dtype=torch.float64):
    """A linear layer with a bias, and a convolution of two groups without."""
    fc = random_psd(IN + 1, rank, seed)[None]
    conv = torch.stack([random_psd(4, rank, seed + 50 + g) for g in range(GROUPS)])
    return {
        "fc.weight": InputCovariance("fc.weight", "fc.bias", fc.to(dtype)),
        "conv.weight": InputCovariance("conv.weight", None, conv.to(dtype)),
    }


def params_of(seed, dtype=torch.float64):
    return {
        name: randn(100 * seed + i, *shape).to(dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def blocks_of(params):
    """Each layer's matrices, written out: (name, group, outputs by inputs)."""
    fc = torch.cat([params["fc.weight"], params["fc.bias"][:, None]], dim=1)
    conv = params["conv.weight"].reshape(GROUPS, FILTERS // GROUPS, 4)
    return [
        ("fc.weight", 0, fc.double()),
        *(("conv.weight", g, conv[g].double()) for g in range(GROUPS)),
    ]


def assert_close(got, blocks, tolerance):
    for (_, _, found), wanted in zip(blocks_of(got), blocks, strict=True):
        assert relative(found, wanted) < tolerance


# The direction


def dense_direction(G, A, damping):
    """Solve with the Kronecker product, written out over the flattened matrix."""
    delta = damping * A.trace() / len(A)
    damped = A.double() + delta * torch.eye(len(A), dtype=torch.float64)
    system = torch.kron(torch.eye(len(G), dtype=torch.float64), damped)
    return torch.linalg.solve(system, G.flatten()).reshape(G.shape)


@pytest.mark.parametrize("rank", [2, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_direction_solves_the_dense_system(dtype, rank):
    gradient, layers = params_of(1, dtype), layers_of(2, rank, dtype)
    found = Preconditioner.of(layers, damping=0.1).direction(gradient)
    expected = [
        dense_direction(G, layers[name].A[group], 0.1)
        for name, group, G in blocks_of(gradient)
    ]
    assert_close(found, expected, 1e-12 if dtype == torch.float64 else 1e-6)
    assert list(found) == list(gradient)
    assert all(found[k].dtype == dtype for k in found)
    assert found["norm.weight"] is gradient["norm.weight"]


def test_inputs_that_are_all_zero_keep_their_gradient():
    gradient = {"w": torch.ones(2, 3)}
    layers = {"w": InputCovariance("w", None, torch.zeros(1, 3, 3))}
    found = Preconditioner.of(layers, damping=0.1).direction(gradient)
    assert torch.equal(found["w"], gradient["w"])


def test_a_layer_without_a_gradient_is_left_out():
    preconditioner = Preconditioner.of(layers_of(1), damping=0.1)
    norm = {"norm.weight": torch.ones(5)}
    assert preconditioner.direction(norm) == norm


# The mixture


def root(A):
    values, vectors = torch.linalg.eigh(A.double())
    return vectors * values.clamp_min(0).sqrt() @ vectors.mT


def least_squares(blocks, moments, shares, damping):
    """Minimise sum_i p_i |(W - W_i) A_i^(1/2)|^2 + delta |W - mean|^2, row on row."""
    mean = sum(p * W for p, W in zip(shares, blocks, strict=True))
    total = sum(p * A.double() for p, A in zip(shares, moments, strict=True))
    delta = damping * total.trace() / len(total)
    rows, wanted = [], []
    for p, W, A in zip(shares, blocks, moments, strict=True):
        rows.append(p**0.5 * root(A))
        wanted.append(rows[-1] @ W.mT)
    rows.append(delta**0.5 * torch.eye(len(total), dtype=torch.float64))
    wanted.append(rows[-1] @ mean.mT)
    solved = torch.linalg.lstsq(torch.cat(rows), torch.cat(wanted), driver="gelsd")
    return solved.solution.mT


WEIGHTS = [10, 30, 20]
SHARES = [w / 60 for w in WEIGHTS]


@pytest.mark.parametrize("rank", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_mixture_is_the_least_squares_fit(dtype, rank):
    trained = [params_of(seed, dtype) for seed in (1, 2, 3)]
    moments = [layers_of(seed, rank, dtype) for seed in (4, 5, 6)]
    found = fedpm_mix(trained, moments, WEIGHTS, damping=1e-3)
    expected = [
        least_squares(
            [matrices for _, _, matrices in each],
            [layers[each[0][0]].A[each[0][1]] for layers in moments],
            SHARES,
            1e-3,
        )
        for each in zip(*map(blocks_of, trained), strict=True)
    ]
    assert_close(found.params, expected, 1e-10 if dtype == torch.float64 else 1e-4)
    assert list(found.params) == list(trained[0])
    assert all(v.dtype == dtype for v in found.params.values())
    mean = weighted_mean(trained, WEIGHTS)
    assert torch.equal(found.params["norm.weight"], mean["norm.weight"])
    assert found.averaged == []
    assert list(found.correction) == ["fc.weight", "fc.bias", "conv.weight"]
    for key, value in found.correction.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(
            mean[key] + value, found.params[key].double(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("rank", [1, 9])
def test_float32_rounding_does_not_fill_the_null_space(rank):
    """Inputs that are nearly copies: what A cannot tell apart stays near the mean."""
    base = [randn(seed, 50, rank) for seed in (1, 2)]
    spread = randn(3, rank, 40)
    data = [100 * each @ spread for each in base]
    moments = [
        {"w": InputCovariance("w", None, (x.mT @ x / len(x))[None])} for x in data
    ]
    trained = [{"w": randn(seed, 2, 40)} for seed in (4, 5)]
    found = fedpm_mix(trained, moments, [1, 1])
    null = torch.linalg.svd(spread)[2][rank:]
    mean = weighted_mean(trained, [1, 1])["w"]
    assert relative(found.params["w"] @ null.mT, mean @ null.mT) < 0.02
    assert found.averaged == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_identical_clients_get_their_model_bit_for_bit(dtype):
    mine = params_of(1, dtype) | {"steps": torch.tensor(7)}
    for moments in (layers_of(2), layers_of(2, rank=1)):
        found = fedpm_mix([mine] * 3, [moments] * 3, [1, 3, 7]).params
        assert all(torch.equal(found[k], v) for k, v in mine.items())
        assert all(found[k].dtype == v.dtype for k, v in mine.items())


def test_much_damping_is_fedavg():
    trained = [params_of(seed) for seed in (1, 2, 3)]
    found = fedpm_mix(trained, [layers_of(s) for s in (4, 5, 6)], WEIGHTS, damping=1e9)
    for key, value in weighted_mean(trained, WEIGHTS).items():
        torch.testing.assert_close(found.params[key], value)


def test_what_is_no_second_moment_is_averaged_and_named():
    trained = [params_of(seed) for seed in (1, 2)]
    moments = [layers_of(seed) for seed in (4, 5)]
    A = moments[1]["fc.weight"].A
    moments[1]["fc.weight"] = InputCovariance("fc.weight", "fc.bias", A - 50 * A.mT)
    found = fedpm_mix(trained, moments, [1, 1])
    mean = weighted_mean(trained, [1, 1])
    assert found.averaged == ["fc.weight"]
    assert torch.equal(found.params["fc.weight"], mean["fc.weight"])
    assert torch.equal(found.params["fc.bias"], mean["fc.bias"])
    assert relative(found.params["conv.weight"], mean["conv.weight"]) > 0.1
