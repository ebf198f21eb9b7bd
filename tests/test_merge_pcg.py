"""Preconditioned conjugate gradients: their matrix, and where they lead."""

import weakref

import pytest
import torch
from devices import DEVICES
from oracles import (
    Dense,
    flat,
    posteriors,
    randn,
    random_dense,
    random_kronecker,
    random_psd,
    relative,
)

from flwr_fisher.curvature import BlockDiagonal, Kronecker, WeightedSum
from flwr_fisher.curvature.operators.factors import LowRankFactor
from flwr_fisher.curvature.structures import preconditioner
from flwr_fisher.merge import fedavg, fedfisher
from flwr_fisher.merge.linear_system import LinearSystem
from flwr_fisher.params import unflatten


def low_rank(seed, rank=2, n=13, m=6):
    """Return a layer whose factors are cut to few vectors, of two groups."""
    A, G = (
        LowRankFactor(
            randn(900 + seed + side, 2, size, rank, dtype=torch.float64),
            torch.ones(2, rank, dtype=torch.float64),
            randn(950 + seed + side, 2, size, dtype=torch.float64).square(),
        )
        for side, size in ((0, n), (1, m))
    )
    return Kronecker("w", torch.Size([2 * m, n - 1]), A, G, "b")


def mixed(seed):
    """Return a dense block for some clients, and a layer's for the others."""
    if seed % 2:
        return random_kronecker(seed, bias="b", rank=6)
    return random_dense(seed, 20, w=(4, 3), b=(4,))


LAYERS = {
    "kfac": lambda seed: random_kronecker(seed, bias="b", rank=6),
    "groups": lambda seed: random_kronecker(seed, shape=(6, 4), groups=2, rank=6),
    "singular": lambda seed: random_kronecker(seed, rank=1),
    "low-rank": low_rank,
}
KINDS = LAYERS | {
    "dense": lambda seed: random_dense(seed, 3, w=(4, 3)),
    "mixed": mixed,
    "unlike groups": lambda seed: random_kronecker(seed, groups=1 + seed % 2, rank=6),
    "two layers": lambda seed: BlockDiagonal(
        [random_kronecker(seed, "w"), random_kronecker(seed + 1, "v", bias="b")]
    ),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def system(make, count=3):
    """Return a block's sum over clients, with a mean eigenvalue of 1."""
    terms = [make(i + 1) for i in range(count)]
    total = WeightedSum(terms, [0.2 * (i + 1) for i in range(count)])
    return total.scaled(total.numel() / total.trace())


def matrix_of(product, curvature):
    """Return the dense matrix of a linear map, column by column."""
    columns = []
    for index in range(curvature.numel()):
        one = torch.zeros(curvature.numel(), dtype=torch.float64)
        one[index] = 1
        columns.append(flat(product(unflatten(one, curvature.shapes))))
    return torch.stack(columns, 1)


def partial_traces(dense, outputs, inputs):
    """Return the traces over outputs and over inputs, from the matrix itself."""
    four = dense.reshape(outputs, inputs, outputs, inputs)
    return torch.einsum("iaib->ab", four), torch.einsum("iaja->ij", four)


@pytest.mark.parametrize("ridge", [0.01, 0.5])
@layers
def test_it_is_the_inverse_of_the_product_of_partial_traces(make, ridge):
    """Against the same in dense matrices, group by group."""
    total = system(make)
    got = matrix_of(preconditioner(total, ridge), total)
    first = total.terms[0]
    groups, outputs, inputs = first.matrix_shape
    rows = unflatten(torch.arange(total.numel()), total.shapes)
    want = torch.zeros_like(got)
    dense = total.to_dense()
    for places in first.as_matrices(rows).reshape(groups, -1):
        A, G = partial_traces(dense[places][:, places], outputs, inputs)
        mean = float(A.trace()) / (outputs * inputs)
        A, G = A / A.trace() * inputs * mean**0.5, G / G.trace() * outputs * mean**0.5
        A += ridge**0.5 * torch.eye(inputs, dtype=A.dtype)
        G += ridge**0.5 * torch.eye(outputs, dtype=G.dtype)
        want[places.unsqueeze(1), places] = torch.linalg.inv(torch.kron(G, A))
    assert relative(got, want) <= 1e-10


def test_one_layers_product_needs_few_iterations():
    """Clients that see the same inputs sum to a product, but for the ridge."""
    A, shape = random_psd(30, 60, 1).unsqueeze(0), torch.Size([20, 30])

    def same_inputs(seed):
        return Kronecker("w", shape, A, random_psd(20, 40, seed + 1).unsqueeze(0))

    options = {"anchor": 0.01, "tolerance": 1e-6, "iterations": 500}
    clients = posteriors(same_inputs, count=5)
    plain = fedfisher(clients, solver="cg", **options).iterations
    assert 3 * fedfisher(clients, **options).iterations < plain


@kinds
@pytest.mark.parametrize(
    "options",
    [
        {"shrink": 0.0, "damping": 0.0, "balance": 0.0},
        {"shrink": 0.4, "damping": 0.2, "balance": 0.7},
    ],
    ids=["plain", "regularised"],
)
def test_all_solvers_agree_in_the_end(make, options):
    clients = posteriors(make)
    limits = {"anchor": 0.05, "iterations": 3000, "tolerance": 1e-10, "robust": 0.5}
    limits |= options
    pcg = fedfisher(clients, solver="pcg", **limits)
    cg = fedfisher(clients, solver="cg", **limits)
    dense = fedfisher(
        [
            type(c)(c.params, _densely(c.curvature, options), c.num_examples)
            for c in clients
        ],
        solver="cg",
        **(limits | {"shrink": 0.0, "damping": 0.0}),
    )
    for other in (cg, dense):
        for key, value in pcg.params.items():
            assert relative(value, other.params[key]) <= 1e-5


def _densely(curvature, options):
    blocks = [
        Dense(block.shapes, block.to_dense())
        for part in curvature.blocks()
        for block in part.regularised(
            shrink=options["shrink"], damping=options["damping"]
        ).blocks()
    ]
    return BlockDiagonal(blocks)


@pytest.mark.parametrize("solver", ["pcg", "cg"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_solved_in_single(dtype, solver):
    """The same numbers, of a layer whose sums in half precision would stand still."""
    clients = posteriors(lambda seed: random_kronecker(seed, shape=(20, 300), rank=60))
    single, half = [], []
    for c in clients:
        params = {k: v.to(dtype) for k, v in c.params.items()}
        half.append(type(c)(params, c.curvature.to(dtype=dtype), c.num_examples))
        wide = {k: v.float() for k, v in params.items()}
        same = half[-1].curvature.to(dtype=torch.float32)
        single.append(type(c)(wide, same, c.num_examples))
    got, want = (fedfisher(each, solver=solver) for each in (half, single))
    assert not got.unsolved
    mean = fedavg(single)["w"]
    assert relative(got.params["w"].float() - mean, want.params["w"] - mean) <= 0.02


def test_no_more_than_one_layers_system_is_held(monkeypatch):
    made, held = [], []
    original = LinearSystem.anchored

    def anchored(*args):
        held.append(sum(system() is not None for system in made))
        system = original(*args)
        made.append(weakref.ref(system))
        return system

    def normalised(self):
        made.append(weakref.ref(self))
        return self

    monkeypatch.setattr(LinearSystem, "anchored", anchored)
    monkeypatch.setattr(LinearSystem, "normalised", normalised)
    fedfisher(posteriors(KINDS["two layers"]))
    assert held == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("solver", ["pcg", "cg", "adam"])
def test_it_merges_where_it_is_told_to(solver, device):
    clients = posteriors(KINDS["two layers"])
    seen = set()
    original = LinearSystem.matvec

    def matvec(self, vector):
        seen.update(value.device.type for value in vector.values())
        return original(self, vector)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearSystem, "matvec", matvec)
        got = fedfisher(clients, solver=solver, iterations=4, device=device).params
    want = fedfisher(clients, solver=solver, iterations=4).params
    assert seen == {device}
    for key, value in want.items():
        assert got[key].device.type == "cpu"
        assert relative(got[key], value) <= 1e-6
