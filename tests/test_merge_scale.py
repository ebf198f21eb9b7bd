"""A merge of uploads of any scale that floats hold, and solvers that do not solve."""

import math
from dataclasses import replace

import pytest
import torch
from oracles import CURVATURES, Dense, posteriors, random_diagonal, relative

from flwr_fisher.curvature import BlockDiagonal, Diagonal, Kronecker, WeightedSum
from flwr_fisher.curvature.operators.base import conjugate_gradient
from flwr_fisher.curvature.operators.factors import LowRankFactor
from flwr_fisher.errors import ParamsError, StructureError
from flwr_fisher.merge import (
    DiagonalSums,
    LocalPosterior,
    fedavg,
    fedfisher,
    fedfisher_from_sums,
)
from flwr_fisher.strategies.exchanges.kfac_sums import step_of

KINDS = [
    "diagonal",
    "kronecker-groups-bias",
    "blocks",
    "weighted-sum-mixed",
    "low-rank",
]


def low_rank(seed):
    """K-FAC as it comes off the wire: small integers, and lengths."""

    def factor(n, seed):
        generator = torch.Generator().manual_seed(seed)
        directions = torch.randint(-127, 128, (1, n, 2), generator=generator)
        lengths = torch.rand(1, 2, generator=generator).double() / 100
        rest = torch.full((1, 1), 0.1).double().expand(1, n)
        return LowRankFactor(directions.to(torch.int8), lengths, rest)

    shape = torch.Size((4, 3))
    return Kronecker("w", shape, factor(4, 2 * seed), factor(4, 2 * seed + 1), "b")


def make(kind):
    return low_rank if kind == "low-rank" else CURVATURES[kind]


def scaled(curvature, root):
    """Return a curvature times `root` squared, in both factors where there are two."""
    if isinstance(curvature, BlockDiagonal):
        return BlockDiagonal([scaled(child, root) for child in curvature.children])
    if isinstance(curvature, WeightedSum):
        return WeightedSum(
            [scaled(t, root) for t in curvature.terms], curvature.weights
        )
    if isinstance(curvature, Kronecker):
        A, G = (f.scaled(root) for f in (curvature.A_factor, curvature.G_factor))
        return Kronecker(curvature.weight, curvature.weight_shape, A, G, curvature.bias)
    return curvature.scaled(root**2)


def with_scales(clients, *roots):
    return [
        LocalPosterior(c.params, scaled(c.curvature, root), c.num_examples)
        for c, root in zip(clients, roots, strict=True)
    ]


def in_single(clients):
    """Return clients in float32, the integers of low rank as they are."""

    def single(tensor):
        return tensor.float() if tensor.is_floating_point() else tensor

    return [
        LocalPosterior(
            {k: single(v) for k, v in c.params.items()},
            c.curvature.mapped(single),
            c.num_examples,
        )
        for c in clients
    ]


def apart(got, want):
    assert not got.unsolved
    assert not want.unsolved
    pairs = zip(got.params.values(), want.params.values(), strict=True)
    return max(relative(a, b) for a, b in pairs)


# Scales


@pytest.mark.parametrize("solver", ["pcg", "cg"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_common_scale_does_not_matter(kind, solver):
    """Down to products of 1e-36, and up to 1e60: as without, in float32."""
    clients = posteriors(make(kind))
    want = fedfisher(in_single(clients), solver=solver)
    two_factors = kind in ("kronecker-groups-bias", "low-rank")
    for root in (1e-18, 1e18, *([1e-25, 1e25] if two_factors else [])):
        got = fedfisher(in_single(with_scales(clients, *[root] * 3)), solver=solver)
        assert apart(got, want) <= 1e-5, root
        assert got.shares == pytest.approx(want.shares, rel=1e-5)
        if solver == "pcg":  # of a few iterations, in which rounding does not grow
            assert got.residuals == pytest.approx(want.residuals, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_clients_scale_is_as_in_exact_arithmetic(kind):
    """Which here is float64's: its range holds what float32's does not."""
    clients, options = posteriors(make(kind)), {"balance": 0.5, "max_share": 1.0}
    for root in (1e-18, 1e-11, 1e18):
        moved = with_scales(clients, 1.0, root, 1.0)
        got = fedfisher(in_single(moved), **options)
        assert apart(got, fedfisher(moved, **options)) <= 1e-3, root


def test_two_identities_of_1e30_take_over_as_far_as_they_weigh():
    """The case that gave NaN: finite, and the product of the factors is 1e60."""
    shape = torch.Size((3, 3))

    def client(value, size):
        eye = size * torch.eye(3).unsqueeze(0)
        F = Kronecker("w", shape, eye, eye)
        return LocalPosterior({"w": torch.full((3, 3), value)}, F, 10)

    clients = [client(1.0, 1e30), client(0.0, 1.0), client(0.25, 1.0)]
    plain = {"anchor": 0.0, "robust": 0.0, "balance": 0.0, "max_share": 1.0}
    for solver in ("pcg", "cg", "gd"):
        merged = fedfisher(clients, solver=solver, **plain)
        assert torch.allclose(merged.params["w"], torch.ones(3, 3), atol=1e-6)
        assert merged.shares == pytest.approx([1.0, 0.0, 0.0])
        assert not merged.unsolved
    # Steps of 0.01 and a momentum of 0.9, of which the other two take no notice.
    adam = fedfisher(clients, solver="adam", iterations=500)
    assert torch.allclose(adam.params["w"], torch.ones(3, 3), atol=0.01)


@pytest.mark.parametrize("size", [1e-15, 1e15, 1e30])
@pytest.mark.parametrize("trust", [1.0, 1e9])
def test_parameters_of_any_scale(size, trust):
    clients = posteriors(make("kronecker-bias"))
    want = fedfisher(in_single(clients), trust=trust)
    moved = [
        LocalPosterior(
            {k: size * v for k, v in c.params.items()}, c.curvature, c.num_examples
        )
        for c in clients
    ]
    got = fedfisher(in_single(moved), trust=trust)
    back = {k: v.double() / size for k, v in got.params.items()}
    assert max(relative(back[k], want.params[k]) for k in back) <= 1e-5
    assert not got.unsolved


def test_steps_longer_than_any_float():
    """Two clients 4e38 apart in float32, which ends at 3.4e38."""
    one = Diagonal({"w": torch.ones(2)})
    clients = [
        LocalPosterior({"w": torch.tensor([sign * 3e38, 1.0])}, one, 1)
        for sign in (1, -1, 1)
    ]
    merged = fedfisher(clients, robust=0.0, max_share=1.0)
    assert merged.params["w"].isfinite().all()
    assert merged.params["w"][0] == pytest.approx(1e38)


# Sums


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_sums_of_any_scale(factor):
    clients = in_single(posteriors(make("diagonal")))
    want = fedfisher_from_sums(DiagonalSums.of(clients))
    moved = [replace(c, curvature=c.curvature.scaled(factor)) for c in clients]
    assert apart(fedfisher_from_sums(DiagonalSums.of(moved)), want) <= 1e-5


def test_sums_at_the_end_of_float32():
    params = {"w": torch.ones(2)}
    one = LocalPosterior(params, Diagonal({"w": torch.full((2,), 3e38)}), 9)
    merged = fedfisher_from_sums(DiagonalSums.of([one, one]))
    assert torch.equal(merged.params["w"], torch.ones(2))
    with pytest.raises(ParamsError, match="the clients' sums: 'w' holds"):
        DiagonalSums.of([replace(one, params={"w": torch.full((2,), 9.0)})])


# Solvers that do not solve


def unsolvable():
    """One layer whose curvature is none: symmetric, and not semi-definite."""
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    fine = random_diagonal(1, v=(3,)).to(dtype=torch.float32)
    return [
        LocalPosterior(
            {"w": torch.tensor([i, -2.0 * i]), "v": torch.full((3,), float(i))},
            BlockDiagonal([Dense({"w": torch.Size((2,))}, (i + 1) * swap), fine]),
            10,
        )
        for i in range(3)
    ]


@pytest.mark.parametrize("solver", ["pcg", "cg", "gd"])
def test_what_is_not_solved_is_the_mean_and_named(solver):
    clients = unsolvable()
    merged = fedfisher(clients, solver=solver, iterations=400)
    assert merged.unsolved == ["w"]
    assert torch.equal(merged.params["w"], fedavg(clients)["w"])
    assert all(map(math.isfinite, merged.residuals))
    # The other layer is merged as if it were alone.
    alone = [
        LocalPosterior({"v": c.params["v"]}, c.curvature.blocks()[1], c.num_examples)
        for c in clients
    ]
    want = fedfisher(alone, solver=solver, iterations=400)
    assert torch.equal(merged.params["v"], want.params["v"])
    assert not want.unsolved


def test_adam_leaves_out_what_does_not_end_finite():
    """Its steps know no curvature: only what grows beyond all bounds is left out."""
    clients = unsolvable()
    clients = [
        LocalPosterior(
            c.params,
            BlockDiagonal([c.curvature.blocks()[0] * 3e7, c.curvature.blocks()[1]]),
            c.num_examples,
        )
        for c in clients
    ]
    merged = fedfisher(clients, solver="adam", lr=1e37, iterations=30)
    assert "w" in merged.unsolved
    assert all(value.isfinite().all() for value in merged.params.values())
    assert all(map(math.isfinite, merged.residuals))


def test_conjugate_gradients_stop_before_what_is_no_number():
    b = {"w": torch.tensor([1.0, 2.0])}
    calls = []

    def fails_later(vector):
        calls.append(vector)
        bad = float("nan") if len(calls) > 1 else 1.0
        return {"w": bad * torch.tensor([1.0, 3.0]) * vector["w"]}

    found = conjugate_gradient(fails_later, b, iterations=9, tolerance=0.0)
    solution, norms = found.read()
    assert len(calls) == 2
    assert len(norms) == 2
    assert solution["w"].isfinite().all()


def test_a_solution_that_is_no_number_is_an_error():
    """`solve` of a sum, by conjugate gradients: NaN is not converged."""
    bad = Dense({"w": torch.Size((2,))}, torch.full((2, 2), float("nan")))
    with pytest.raises(StructureError, match="conjugate gradients"):
        (bad + bad).solve({"w": torch.ones(2)})


def test_what_is_not_solved_is_logged_and_counted(caplog):
    step = step_of(fedfisher(unsolvable(), iterations=400), {})
    assert step.metrics["solver-fallbacks"] == 1
    assert "failed for w:" in caplog.text
