"""FAGH's step against a dense solve, and what could make it infinite."""

import pytest
import torch
from oracles import cut, flat, randn, relative

from flwr_fisher.params import dot
from flwr_fisher.rounds import fagh_step

SHAPES = {"w": torch.Size((3, 2)), "b": torch.Size((4,))}
D = 10


def vector(seed, dtype=torch.float64):
    return cut(
        randn(seed, D, dtype=dtype), {k: torch.empty(s) for k, s in SHAPES.items()}
    )


def spd(seed):
    rows = randn(seed, 2 * D, D, dtype=torch.float64)
    return rows.mT @ rows / D


def times(H, u):
    return cut(H @ flat(u), u)


def unit(u):
    return cut(flat(u) / flat(u).norm(), u)


def dense_direction(G, V, c, rho):
    H = torch.outer(V, V) / c
    return torch.linalg.solve(H + rho * torch.eye(len(V), dtype=V.dtype), G)


def first_step(params, g, v, c, **changes):
    return fagh_step(params, g, v, c, None, **{"lr": 0.1, "rho": 0.5} | changes)


@pytest.mark.parametrize(
    ("rho", "exact"), [(1.0, 1e-12), (0.1, 1e-12), (1e-3, 1e-10), (1e-9, 1e-5)]
)
@pytest.mark.parametrize("seed", range(3))
def test_one_step_is_the_dense_solution(seed, rho, exact):
    params, g, u = vector(seed), vector(10 + seed), unit(vector(20 + seed))
    v = times(spd(seed), u)
    c = float(dot(u, v))
    step = first_step(params, g, v, c, rho=rho)
    want = dense_direction(flat(g), flat(v), c, rho)
    assert not step.fell_back
    assert step.curvature == pytest.approx(c)
    assert relative(flat(step.direction), want) <= exact
    assert relative(flat(step.params), flat(params) - 0.1 * want) <= exact


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.0, 0.0), (0.5, 0.0), (0.0, 0.9)])
def test_moments_are_means_with_their_bias_corrected(betas):
    params, moments, u = vector(0), None, unit(vector(1))
    G, V = (torch.zeros(D, dtype=torch.float64) for _ in range(2))
    for t in range(1, 6):
        g, v = vector(10 + t), times(spd(t), u)
        G = betas[0] * G + (1 - betas[0]) * flat(g)
        V = betas[1] * V + (1 - betas[1]) * flat(v)
        c = float(flat(u) @ V) / (1 - betas[1] ** t)
        want = dense_direction(
            G / (1 - betas[0] ** t), V / (1 - betas[1] ** t), c, rho=0.5
        )
        step = fagh_step(params, g, v, dot(u, v), moments, lr=0.1, rho=0.5, betas=betas)
        assert step.curvature == pytest.approx(c)
        assert relative(flat(step.direction), want) <= 1e-10
        assert relative(flat(step.params), flat(params) - 0.1 * want) <= 1e-10
        params, moments = step.params, step.moments


def test_a_moving_probe_averages_its_curvature_beside_it():
    probes = [unit(vector(s)) for s in (1, 2)]
    products = [times(spd(3), u) for u in probes]
    curvatures = [float(dot(u, v)) for u, v in zip(probes, products, strict=True)]
    g, moments, beta = vector(4), None, 0.99
    for t in (1, 2):
        step = fagh_step(
            vector(0), g, products[t - 1], curvatures[t - 1], moments, lr=1, rho=1
        )
        moments = step.moments
    want = (beta * curvatures[0] + curvatures[1]) / (1 + beta)
    assert step.curvature == pytest.approx(want)


def plain(step, params, g, rho=0.5):
    """Return whether the step fell back to G / rho, all finite."""
    G = flat(g) / rho
    finite = all(
        v.isfinite().all()
        for d in (step.params, step.moments.gradient, step.moments.hvp)
        for v in d.values()
    )
    near = relative(flat(step.params), flat(params) - 0.1 * G) <= 1e-6
    return step.fell_back and finite and near


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_curvature_that_cannot_be_used(dtype):
    params, g = vector(0, dtype), vector(1, dtype)
    v = vector(2, dtype)
    zero = cut(torch.zeros(D, dtype=dtype), v)
    tiny = torch.finfo(dtype).smallest_normal / 16
    assert tiny > 0
    flattest = cut(torch.cat([torch.tensor([tiny]), flat(v)[1:]]).to(dtype), v)
    hazards = [
        (zero, 0.0),  # the row of a pixel that is always black
        (v, -0.1),  # negative curvature
        (v, 0.0),
        (v, 1e-7 * float(flat(v).norm())),  # rounding of float32
        (flattest, float(flat(flattest)[0])),  # V[0] denormal
        (zero, 1.0),
        (zero, -1.0),
    ]
    for row, c in hazards:
        step = first_step(params, g, row, c)
        assert plain(step, params, g), (row, c)
        assert step.curvature == pytest.approx(c)
        assert {v.dtype for v in step.params.values()} == {dtype}


@pytest.mark.parametrize("size", [1e-320, 1e-300, 1e-30, 1e30, 1e300])
def test_a_row_of_any_size_is_finite(size):
    params, g, u = vector(0), vector(1), unit(vector(2))
    v = cut(flat(times(spd(3), u)) * size, u)
    step = first_step(params, g, v, float(dot(u, v)), rho=0.5)
    assert not step.fell_back
    assert all(value.isfinite().all() for value in step.params.values())
    along = flat(times(spd(3), u))
    want = flat(g) / 0.5
    if size >= 1e30:  # infinitely curved along V: no step there
        want = want - along * (along @ want) / (along @ along)
    assert relative(flat(step.direction), want) <= 1e-10


def test_epsilon_is_the_smallest_cosine_between_probe_and_product():
    g = vector(1)
    v = cut(torch.eye(D, dtype=torch.float64)[3] * 7, g)
    assert first_step(vector(0), g, v, 7 * 0.29, epsilon=0.3).fell_back
    assert not first_step(vector(0), g, v, 7 * 0.31, epsilon=0.3).fell_back


def test_buffers_stay_and_order_and_dtypes_too():
    params = {
        "b": randn(0, 4),
        "mean": torch.ones(2),
        "count": torch.tensor(3),
        "w": randn(1, 3, 2).bfloat16(),
    }
    g = {"w": randn(2, 3, 2).bfloat16(), "b": randn(3, 4)}
    step = first_step(params, g, g, 1.0)
    assert list(step.params) == list(params)
    assert {k: v.dtype for k, v in step.params.items()} == {
        k: v.dtype for k, v in params.items()
    }
    assert torch.equal(step.params["mean"], params["mean"])
    assert torch.equal(step.params["count"], params["count"])
    assert step.moments.gradient["w"].dtype == torch.float32
    assert step.moments.hvp["w"].dtype == torch.float32
