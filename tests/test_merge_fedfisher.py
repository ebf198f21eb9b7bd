"""The merge against dense solves, and the cases where it must be exact."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from oracles import (
    CLIENT_CURVATURES,
    Dense,
    as_float32,
    cut,
    flat,
    posteriors,
    randn,
    random_blocks,
    random_dense,
    random_diagonal,
    random_kronecker,
    random_like,
    random_psd,
    relative,
)

from flwr_fisher.curvature import Diagonal, Kronecker, WeightedSum
from flwr_fisher.curvature.operators.lazy import shared_blocks
from flwr_fisher.errors import (
    ConfigurationError,
    ParamsError,
    StructureError,
    UnknownNameError,
)
from flwr_fisher.merge import (
    SOLVERS,
    LocalPosterior,
    MergeResult,
    fedavg,
    fedfisher,
    fisher_merge,
)

ONE = torch.ones(1)
diagonals = CLIENT_CURVATURES["diagonal"]
PLAIN = dict.fromkeys(("anchor", "shrink", "damping", "balance", "robust"), 0.0) | {
    "max_share": 1.0
}
CG = PLAIN | {"solver": "cg"}


def within_a_subspace(seed):
    """Return a well-conditioned matrix whose range all clients share: 5 of 9."""
    basis = torch.linalg.qr(randn(0, 9, 5, dtype=torch.float64)).Q
    inner = random_psd(5, 25, seed)
    sizes = {"w": torch.Size([2, 3]), "b": torch.Size([3])}
    return Dense(sizes, basis @ inner @ basis.mT)


KINDS = CLIENT_CURVATURES
all_kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
# Every solver, with structures that it can solve.
every_solver = pytest.mark.parametrize(
    ("solver", "make"),
    [
        ("pcg", KINDS["kfac"]),
        ("pcg", KINDS["dense"]),
        ("cg", diagonals),
        ("cg", KINDS["kfac"]),
        ("adam", diagonals),  # by its own formula
        ("adam", KINDS["dense"]),
        ("gd", KINDS["kfac"]),
        ("closed-form", diagonals),
    ],
)


def solved_densely(
    clients,
    anchor=0.0,
    shrink=0.0,
    damping=0.0,
    balance=0.0,
    robust=0.0,
    trust=math.inf,
):
    """Return mean + pinv(sum w F_i + lambda I) sum w F_i (theta_i - mean), by layer."""
    total = sum(c.num_examples for c in clients)
    p = [c.num_examples / total for c in clients]
    names = list(clients[0].params)
    merged = {k: sum(a * c.params[k] for a, c in zip(p, clients)) for k in names}  # noqa: B905
    curvatures = [
        c.curvature.regularised(shrink=shrink, damping=damping) for c in clients
    ]
    for parts in shared_blocks(curvatures):
        layer = {name: merged[name] for name in parts[0].shapes}
        F = [part.to_dense() for part in parts]
        away = [flat({k: c.params[k] - layer[k] for k in layer}) for c in clients]
        w = [a / float(f.trace()) ** balance for a, f in zip(p, F, strict=True)]
        rises = torch.stack([x @ f @ x for f, x in zip(F, away, strict=True)])
        doubts = 1 + robust * rises / rises.quantile(0.5)
        w = [a / float(doubt) for a, doubt in zip(w, doubts, strict=True)]
        w = [a / sum(w) for a in w]
        b = torch.stack([a * f @ x for a, f, x in zip(w, F, away, strict=True)]).sum(0)
        H = torch.stack([a * f for a, f in zip(w, F, strict=True)]).sum(0)
        H = H + anchor * H.trace() / len(H) * torch.eye(len(H)).double()
        delta = torch.linalg.pinv(H, hermitian=True, rtol=1e-10) @ b
        spread = sum(a * x.square().sum() for a, x in zip(p, away, strict=True))
        radius = trust * float((len(clients) - 1) * spread) ** 0.5
        delta = delta * min(1.0, radius / float(delta.norm()))
        merged |= {k: layer[k] + step for k, step in cut(delta, layer).items()}
    return merged


def apart(got, want):
    params = got.params if isinstance(got, MergeResult) else got
    assert list(params) == list(want)
    return max(relative(params[k], want[k]) for k in want)


# --- against a dense solve ------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shrink": 1.0},
        {"balance": 1.0},
        {"robust": 0.3, "balance": 0.5},
        {"trust": 0.1},
        {"anchor": 0.2, "shrink": 0.4, "damping": 0.1, "balance": 0.7},
    ],
    ids=str,
)
def test_the_solution_nearest_the_mean_with_every_option(options, make):
    clients = posteriors(make)
    solver = {"solver": "cg", "iterations": 500, "tolerance": 1e-11}
    got = fedfisher(clients, **(PLAIN | options), **solver)
    assert apart(got, solved_densely(clients, **options)) <= 1e-7


@all_kinds
@pytest.mark.parametrize(
    ("solver", "options"),
    [("gd", {"anchor": 0.1}), ("pcg", {"trust": 0.1, "anchor": 0.1})],
)
def test_the_other_solvers_find_it_too(solver, options, make):
    clients = posteriors(make)
    limits = {"iterations": 30000, "tolerance": 1e-8}
    got = fedfisher(clients, solver=solver, **(PLAIN | options), **limits)
    assert apart(got, solved_densely(clients, **options)) <= 1e-6


def test_float32_is_enough_for_the_defaults():
    clients = posteriors(random_blocks, count=4)
    for solver, limits in (("pcg", {}), ("cg", {"iterations": 500})):
        want = fedfisher(clients, solver=solver, **limits).params
        got = fedfisher([as_float32(c) for c in clients], solver=solver)
        assert {v.dtype for v in got.params.values()} == {torch.float32}
        assert apart(got, want) <= 1e-4
        assert got.iterations < 100


# --- exact cases ----------------------------------------------------------------------


def regression(seed, n, bias):
    X = randn(seed, n, 4, dtype=torch.float64)
    if bias:
        X = torch.cat([X, torch.ones(n, 1).double()], dim=1)
    return X, randn(seed + 100, n, 3, dtype=torch.float64)


@pytest.mark.parametrize("sizes", [(20, 30, 50), (2, 3, 4)], ids=["enough", "too-few"])
@pytest.mark.parametrize("bias", [True, False])
def test_least_squares_clients_merge_into_the_pooled_solution(bias, sizes):
    """With Gaussian outputs K-FAC is the exact Fisher, and the product exact.

    Each client only knows its own data, the second time too little of it to be
    determined; merged they are the solution on all data.
    """
    data = [regression(i, n, bias) for i, n in enumerate(sizes)]
    eye = torch.eye(3).double()
    clients = []
    for X, Y in data:
        W = (torch.linalg.pinv(X) @ Y).mT
        parts = {"w": W[:, :4].clone()} | ({"b": W[:, 4].clone()} if bias else {})
        A = X.mT @ X / len(X)
        k = Kronecker(
            "w", torch.Size([3, 4]), A[None], eye[None], "b" if bias else None
        )
        clients.append(LocalPosterior(parts, k, len(X)))
    pooled = torch.cat([X for X, _ in data]), torch.cat([Y for _, Y in data])
    want = torch.linalg.lstsq(*pooled).solution.mT
    merged = fedfisher(clients, iterations=200, tolerance=1e-13, **CG).params
    assert relative(merged["w"], want[:, :4]) <= 1e-9
    if bias:
        assert relative(merged["b"], want[:, 4]) <= 1e-9


# --- the closed form ------------------------------------------------------------------


def test_the_closed_form_is_an_average_entry_by_entry():
    clients = posteriors(diagonals)
    want = {k: torch.zeros_like(v) for k, v in clients[0].params.items()}
    for name, tensor in want.items():
        for at in range(tensor.numel()):
            top, bottom = 0.0, 0.0
            for c in clients:
                f = float(c.curvature.entries[name].reshape(-1)[at])
                top += c.num_examples * f * float(c.params[name].reshape(-1)[at])
                bottom += c.num_examples * f
            tensor.view(-1)[at] = top / bottom
    got = fedfisher(clients, solver="closed-form")
    assert apart(got, want) <= 1e-12
    assert apart(fisher_merge(clients), want) <= 1e-12
    assert got.iterations == 1
    assert got.residuals[0] == 1
    assert got.residuals[1] <= 1e-12
    anchored = fedfisher(clients, solver="closed-form", anchor=0.3, balance=0.5)
    assert apart(anchored, solved_densely(clients, anchor=0.3, balance=0.5)) <= 1e-12


def test_the_closed_form_falls_back_to_the_mean_below_a_relative_floor():
    for unit in (1.0, 1e-12, 1e12):  # of the largest, not absolute
        entries = torch.tensor([1.0, 2e-6, 0.5e-6, 0.0]) * unit
        first = LocalPosterior({"w": torch.zeros(4)}, Diagonal({"w": entries}), 1)
        small = Diagonal({"w": torch.zeros(4)})
        second = LocalPosterior({"w": torch.full((4,), 4.0)}, small, 3)
        merged = fisher_merge([first, second])["w"]
        torch.testing.assert_close(merged, torch.tensor([0.0, 0.0, 3.0, 3.0]))


# --- the paper's Adam -----------------------------------------------------------------


@all_kinds
def test_adam_follows_the_papers_formulas(make):
    clients = posteriors(make)
    weights = [c.num_examples / 60 for c in clients]
    names = list(clients[0].curvature.shapes)
    mean = {k: v for k, v in fedavg(clients).items() if k in names}
    theta = flat({k: mean[k] for k in names})
    m, s = torch.zeros_like(theta), torch.zeros_like(theta)
    diagonal = make is diagonals
    for _ in range(5):
        v = torch.zeros_like(theta)
        for w, c in zip(weights, clients, strict=True):
            away = theta - flat({k: c.params[k] for k in names})
            v += w * c.curvature.to_dense() @ away
        m = v + 0.9 * m
        s = v**2 + 0.99 * s
        theta = theta - 0.03 * m / (s.sqrt() + 0.01 if diagonal else (s + 0.01).sqrt())
    got = fedfisher(clients, solver="adam", iterations=5, lr=0.03)
    assert got.iterations == 5
    assert len(got.residuals) == 6
    assert relative(flat({k: got.params[k] for k in names}), theta) <= 1e-12


def test_the_best_scored_iterate_is_kept():
    clients = posteriors(diagonals)
    scores, seen = iter([0.1, 0.7, 0.7, 0.3, 0.2]), []

    def score(params):
        seen.append(params)
        return next(scores)

    got = fedfisher(clients, solver="adam", iterations=450, score=score)
    assert all(list(params) == list(clients[0].params) for params in seen)
    for params, steps in zip(seen, (100, 200, 300, 400, 450), strict=True):
        plain = fedfisher(clients, solver="adam", iterations=steps).params
        assert all(torch.equal(params[k], plain[k]) for k in plain)
    assert all(torch.equal(got.params[k], seen[1][k]) for k in seen[1])
    assert len(got.residuals) == 451


# --- every solver ---------------------------------------------------------------------


def shortened(solver):
    """Few steps; for CG all that count, since where it stops depends on rounding."""
    if solver in ("pcg", "cg"):
        return {"solver": solver, "iterations": 100, "tolerance": 1e-9}
    return {"solver": solver} | ({} if solver == "closed-form" else {"iterations": 150})


@every_solver
def test_identical_clients_keep_their_model_bit_for_bit(solver, make):
    clients = [as_float32(c) for c in posteriors(make)]
    same = [replace(c, params=clients[0].params) for c in clients]
    for count in (1, 3):
        got = fedfisher(same[:count], **shortened(solver))
        for name, tensor in clients[0].params.items():
            assert torch.equal(got.params[name], tensor)
        assert set(got.residuals) == {0.0}
        assert not got.unsolved


@every_solver
def test_neither_order_nor_a_common_factor_of_weights_matters(solver, make):
    clients = posteriors(make)
    once = fedfisher(clients, **shortened(solver))
    back = fedfisher(clients[::-1], **shortened(solver))
    assert apart(back, once.params) <= 1e-6
    assert back.shares[::-1] == pytest.approx(once.shares)
    tenfold = [replace(c, num_examples=10 * c.num_examples) for c in clients]
    assert apart(fedfisher(tenfold, **shortened(solver)), once.params) <= 1e-6
    other = [replace(c, num_examples=60) for c in clients]
    assert apart(fedfisher(other, **shortened(solver)), once.params) > 1e-3


def test_parameters_are_paired_by_name():
    """A file of tensors sorts them; one client's layer is diagonal."""
    layers = [random_kronecker(i, shape=(1, 4), bias="b") for i in range(2)]
    entries = random_diagonal(5, w=(1, 4), b=(1,)).entries
    params = [random_like(layers[0], seed) for seed in range(3)]
    one, other = (
        fedfisher(
            [
                LocalPosterior(own, F, 10)
                for own, F in zip(params, [*layers, Diagonal(last)], strict=True)
            ]
        )
        for last in (entries, dict(reversed(entries.items())))
    )
    assert one.shares == pytest.approx(other.shares, rel=1e-12)
    assert apart(one, other.params) <= 1e-12


@every_solver
def test_what_no_curvature_covers_is_averaged(solver, make):
    clients = [
        replace(
            c,
            params={
                "frozen": randn(i, 2),
                **c.params,
                "norm.running_mean": randn(10 + i, 3),
                "norm.num_batches_tracked": torch.tensor(7 * i),
            },
        )
        for i, c in enumerate(posteriors(make))
    ]
    got = fedfisher(clients, **shortened(solver)).params
    assert list(got) == list(clients[0].params)
    for name in ("frozen", "norm.running_mean"):
        want = sum(c.num_examples / 60 * c.params[name] for c in clients)
        torch.testing.assert_close(got[name], want)
    tracked = got["norm.num_batches_tracked"]
    assert tracked.dtype == torch.int64
    assert int(tracked) == round((0 * 10 + 7 * 20 + 14 * 30) / 60)


@every_solver
def test_without_any_curvature_the_mean_stays(solver, make):
    clients = [replace(c, curvature=c.curvature.scaled(0.0)) for c in posteriors(make)]
    got = fedfisher(clients, **shortened(solver))
    mean = fedavg(clients)
    assert all(torch.equal(got.params[k], mean[k]) for k in mean)
    assert set(got.residuals) == {0.0}
    assert got.shares == pytest.approx([10 / 60, 20 / 60, 30 / 60])


@every_solver
def test_a_client_without_curvature_has_no_say(solver, make):
    clients = posteriors(make, count=2)
    clients[1] = replace(clients[1], curvature=clients[1].curvature.scaled(0.0))
    got = fedfisher(clients, **shortened(solver))
    assert all(torch.isfinite(v).all() for v in got.params.values())
    assert got.shares == pytest.approx([1.0, 0.0])


@every_solver
def test_residuals_and_shares_and_arguments_left_alone(solver, make):
    clients = posteriors(make)
    before = copy.deepcopy(clients)
    got = fedfisher(clients, **(PLAIN | shortened(solver)))
    assert got.residuals[0] == 1
    assert got.residuals[-1] < 0.7
    assert len(got.residuals) == got.iterations + 1
    traces = [c.num_examples * c.curvature.trace() for c in clients]
    assert got.shares == pytest.approx([t / sum(traces) for t in traces])
    got.params.popitem()
    for c, old in zip(clients, before, strict=True):
        assert all(torch.equal(c.params[k], v) for k, v in old.params.items())
        assert torch.equal(c.curvature.to_dense(), old.curvature.to_dense())


def test_residuals_are_those_of_the_iterates():
    clients = posteriors(random_blocks)
    curve = fedfisher(clients, iterations=6, **CG).residuals
    names = list(clients[0].curvature.shapes)

    def residual(params):
        parts = [
            c.num_examples
            * flat(c.curvature.matvec({k: params[k] - c.params[k] for k in names}))
            for c in clients
        ]
        return float(torch.stack(parts).sum(0).norm())

    first = residual(fedavg(clients))
    for steps in range(1, 7):
        got = fedfisher(clients, iterations=steps, **CG)
        assert residual(got.params) / first == pytest.approx(curve[steps], rel=1e-9)
        assert got.residuals == pytest.approx(curve[: steps + 1])


# --- errors ---------------------------------------------------------------------------


def alone(*names, n=1, **params):
    return LocalPosterior(params, Diagonal(dict.fromkeys(names, ONE)), n)


MISTAKES = [
    (
        lambda: fedfisher([alone("w", w=ONE)], lr=0.01),
        ConfigurationError,
        "solver='pcg' does not use lr: leave it out",
    ),
    (lambda: fedfisher([]), ParamsError, "no posterior"),
    (
        lambda: fedfisher([alone("w", w=ONE)], score=lambda _: 0.0),
        ConfigurationError,
        "score .*'pcg'",
    ),
    (
        lambda: fisher_merge(posteriors(random_kronecker)),
        StructureError,
        "not diagonal, and only",
    ),
    (
        lambda: fedfisher(posteriors(diagonals), solver="newton"),
        UnknownNameError,
        f"'newton'; known: {', '.join(SOLVERS)}",
    ),
    (lambda: alone("w", w=ONE, n=0), ConfigurationError, "num_examples"),
    (lambda: alone("w", w=ONE[None]), ParamsError, r"'w' as \(1,\).* have \(1, 1\)"),
    (
        lambda: fedfisher([alone("w", "b", w=ONE, b=ONE), alone("w", w=ONE, b=ONE)]),
        StructureError,
        r"curvature 1 .*\['b'\]",
    ),
]


@pytest.mark.parametrize(("call", "error", "culprit"), MISTAKES)
def test_a_mistake_is_named(call, error, culprit):
    with pytest.raises(error, match=culprit):
        call()


def test_clients_must_have_one_layout():
    first, second, third = posteriors(diagonals)
    extra = replace(third, params=third.params | {"extra": torch.zeros(1)})
    for merge in (fedfisher, fisher_merge, fedavg):
        with pytest.raises(ParamsError, match=r"posterior 2 .*'extra'"):
            merge([first, second, extra])
        with pytest.raises(ParamsError, match=r"posterior 1 .*'extra'"):
            merge([extra, second])


@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf])
@pytest.mark.parametrize(
    ("make", "tensor"),
    [
        (diagonals, lambda F: F.entries["w"]),
        (random_kronecker, lambda F: F.A[0]),
        (random_kronecker, lambda F: F.G[0]),
        (KINDS["dense"], lambda F: F.matrix),
    ],
    ids=["diagonal", "A", "G", "dense"],
)
def test_a_curvature_that_is_none_is_refused(make, tensor, value):
    first, second, third = posteriors(make)
    tensor(second.curvature)[1, 1] = value
    text = "negative on a diagonal" if value < 0 else "holds NaN or infinity"
    lazy = replace(second, curvature=WeightedSum([second.curvature], [1.0]))
    for wrong in (second, lazy):
        with pytest.raises(ParamsError, match=f"posterior 1:.*'w'.*{text}"):
            fedfisher([first, wrong, third])


def test_a_negative_pair_of_factors_does_not_hide_its_signs():
    first, second, _ = posteriors(random_kronecker)
    k = second.curvature
    both = Kronecker(k.weight, k.weight_shape, -k.A, -k.G)
    assert torch.equal(both.to_dense(), k.to_dense())
    with pytest.raises(ParamsError, match=r"posterior 1:.*'w'.*negative"):
        fedfisher([first, replace(second, curvature=both)])


def test_clients_with_other_structures_still_merge():
    """One client's K-FAC and another's diagonal of the same layer."""
    shapes = {"w": (4, 3), "b": (4,)}
    makes = [
        lambda seed: random_kronecker(seed, bias="b"),
        lambda seed: random_diagonal(seed, **shapes),
        lambda seed: random_dense(seed, 3, **shapes),
    ]
    clients = [posteriors(make, count=1, seed=i)[0] for i, make in enumerate(makes)]
    got = fedfisher(clients, iterations=300, tolerance=1e-11, **CG)
    assert apart(got, solved_densely(clients)) <= 1e-7


# --- the solvers by themselves --------------------------------------------------------


def test_gradient_descent_takes_the_lemmas_steps():
    clients = posteriors(within_a_subspace)
    parts = [c.num_examples / 60 * c.curvature.to_dense() for c in clients]
    F = torch.stack(parts).sum(0)
    b = sum(f @ flat(c.params) for f, c in zip(parts, clients, strict=True))
    theta, step = flat(fedavg(clients)), 1 / torch.linalg.eigvalsh(F)[-1]
    for _ in range(5):
        theta = theta - step * (F @ theta - b)
    got = fedfisher(clients, solver="gd", iterations=5)
    assert got.iterations == 5
    assert relative(flat(got.params), theta) <= 1e-4  # as exact as the eigenvalue


@pytest.mark.parametrize("solver", ["pcg", "cg"])
def test_a_diagonals_small_entries_count_and_its_zeros_stay_at_the_mean(solver):
    entries = torch.tensor([1.0, 1e-8, 0.0]), torch.tensor([1.0, 3e-8, 0.0])
    clients = [
        LocalPosterior({"w": torch.full((3,), float(i))}, Diagonal({"w": own}), 1)
        for i, own in enumerate(entries)
    ]
    merged = fedfisher(clients, **{**PLAIN, "solver": solver, "max_share": 1.0})
    torch.testing.assert_close(merged.params["w"], torch.tensor([0.5, 0.75, 0.5]))
    assert not merged.unsolved


def test_gradient_descent_ends_at_the_tolerance():
    diagonals = torch.tensor([0.5, 1.0]), torch.tensor([1.0, 0.5])
    clients = [
        LocalPosterior({"w": torch.full((2,), float(i))}, Diagonal({"w": own}), 1)
        for i, own in enumerate(diagonals)
    ]
    got = fedfisher(clients, solver="gd", iterations=2000, tolerance=1e-2)
    assert 0 < got.iterations < 2000
    assert got.residuals[-1] <= 1e-2 < got.residuals[-2]
