"""MaTS and FedBEns, where the answer is known and against slow twins."""

import math
from dataclasses import replace

import pytest
import rivals_path  # noqa: F401
import torch
from oracles import randn
from rivals import fedbens, mats, task_arithmetic
from test_merge_matching import plain, same
from torch.distributions import MultivariateNormal

from flwr_fisher.curvature import BlockDiagonal, Dense, Diagonal, Kronecker
from flwr_fisher.errors import ConfigurationError, ParamsError, StructureError
from flwr_fisher.merge import LocalPosterior, fedavg

SHAPE = torch.Size((2, 3))


def factor(seed, n):
    root = randn(seed, n, n + 1, dtype=torch.float64)
    return (root @ root.mT / n).unsqueeze(0)


def client(seed, examples=10.0, at=1.0):
    """Return a layer of two outputs and three inputs, and what has no curvature."""
    W = at * randn(seed, 2, 3, dtype=torch.float64)
    F = Kronecker("w", SHAPE, factor(seed + 1, 3), factor(seed + 2, 2))
    return LocalPosterior({"w": W, "scale": W[0]}, F, examples)


def weighted(parts):
    """Return the solution of the sum of (precision, centre), densely."""
    total = sum(P for P, _ in parts)
    return torch.linalg.solve(total, sum(P @ w for P, w in parts))


# MaTS


def test_linear_regression_is_pooled_least_squares():
    """Its Fisher is a Kronecker product, exactly; every client's data counts alike."""
    data, fits = [], []
    for seed in range(3):
        x, y = (
            randn(seed + k, 20, n, dtype=torch.float64) for k, n in ((0, 3), (9, 2))
        )
        data.append((x, y))
        W = torch.linalg.lstsq(x, y).solution.T
        A = (x.T @ x / 20).unsqueeze(0)
        F = Kronecker("w", SHAPE, A, torch.eye(2, dtype=torch.float64).unsqueeze(0))
        fits.append(LocalPosterior({"w": W}, F, seed + 1.0))
    x, y = map(torch.cat, zip(*data, strict=True))
    want = torch.linalg.lstsq(x, y).solution.T
    torch.testing.assert_close(mats(fits)["w"], want, rtol=1e-4, atol=1e-5)


def test_the_fixed_point_is_the_dense_solve_from_any_start():
    clients = [client(seed, examples) for seed, examples in ((0, 1.0), (10, 50.0))]
    want = weighted(
        [(p.curvature.to_dense(), p.params["w"].flatten()) for p in clients]
    )
    for start in (None, {"w": randn(5, 2, 3, dtype=torch.float64)}):
        merged = mats(clients, start=start)
        torch.testing.assert_close(merged["w"].flatten(), want, rtol=1e-4, atol=1e-4)
        mean = (clients[0].params["scale"] + clients[1].params["scale"]) / 2
        torch.testing.assert_close(merged["scale"], mean)
    first = clients[0].params
    same({"w": first["w"]}, {"w": mats(clients[:1])["w"]}, 0)
    begun = mats(clients, start=first, iterations=0)
    torch.testing.assert_close(begun["w"], first["w"])


def test_few_iterations_are_those_of_conjugate_gradients():
    """The first goes down the residual, as far as the quadratic says."""
    clients = [client(0), client(10)]
    x = randn(5, 2, 3, dtype=torch.float64).flatten()
    terms = [(p.curvature.to_dense(), p.params["w"].flatten()) for p in clients]
    r = sum(P @ (w - x) for P, w in terms)
    along = sum(P @ r for P, _ in terms)
    want = x + (r @ r) / (r @ along) * r
    merged = mats(clients, start={"w": x.reshape(2, 3)}, iterations=1)
    torch.testing.assert_close(merged["w"].flatten(), want)


def test_other_fishers_are_merged_too():
    dense, diagonal = torch.diag(torch.tensor([1.0, 3.0])), torch.tensor([1.0, 3.0])
    fits = [torch.zeros(2), torch.tensor([4.0, 8.0])]
    for kinds in (
        [Dense({"w": torch.Size((2,))}, k * dense) for k in (1, 3)],
        [Diagonal({"w": k * diagonal}) for k in (1, 3)],
    ):
        pairs = zip(fits, kinds, strict=True)
        merged = mats([LocalPosterior({"w": w}, F, 1) for w, F in pairs])
        torch.testing.assert_close(merged["w"], torch.tensor([3.0, 6.0]))


def test_task_vectors_of_equal_shares_are_the_mean():
    models = [client(seed).params for seed in (0, 10, 20)]
    merged = task_arithmetic(models, client(30).params, 1 / 3)
    mean = fedavg([client(seed) for seed in (0, 10, 20)])
    torch.testing.assert_close(merged["w"], mean["w"])


# FedBEns


def precision(posterior, T, v):
    dense = posterior.curvature.to_dense()
    return posterior.num_examples / T * dense + torch.eye(6, dtype=torch.float64) / v


def one_by_one(members, steps, T, v):
    """The released loop, by automatic differentiation of dense normal densities."""
    eye = torch.eye(6, dtype=torch.float64)
    prior = MultivariateNormal(torch.zeros(6, dtype=torch.float64), v * eye)
    clients = [
        [
            MultivariateNormal(p.params["w"].flatten(), None, precision(p, T, v))
            for p in own
        ]
        for own in zip(*members, strict=True)
    ]
    ends = []
    for member in members:
        start = torch.stack([p.params["w"].flatten() for p in member]).median(0).values
        x = start.clone().requires_grad_()
        adam, least, best = torch.optim.Adam([x], lr=0.001), math.inf, None
        for _ in range(steps):
            adam.zero_grad()
            terms = [torch.stack([q.log_prob(x) for q in own]) for own in clients]
            loss = -sum(each.logsumexp(0) for each in terms)
            loss = loss + (len(clients) - 1) * prior.log_prob(x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([x], 1.0)
            adam.step()
            if loss < least:
                least, best = loss.item(), x.detach().clone()
        ends.append(best)
    return ends


@pytest.mark.parametrize("apart", [0.1, 100.0])
def test_the_steps_are_the_released_ones(apart):
    """Where components overlap, and where all but one of a client's are far behind."""
    T, v = 5.0, 0.1
    members = [
        [client(100 * start + 10 * i, 5.0 + i, apart) for i in range(3)]
        for start in range(2)
    ]
    want = one_by_one(members, 40, T, v)
    got = fedbens(members, temperature=T, variance=v, steps=40)
    for model, x, member in zip(got, want, members, strict=True):
        torch.testing.assert_close(model["w"].flatten(), x, rtol=1e-9, atol=1e-9)
        assert torch.equal(model["scale"], fedavg(member)["scale"])


def test_one_start_ends_at_the_products_mode():
    """Gaussians' product over all but one prior is Gaussian: its mode is known."""
    clients = [client(10 * i, 5.0 + i, 0.02) for i in range(3)]
    parts = [(precision(p, 0.1, 0.1), p.params["w"].flatten()) for p in clients]
    flat = torch.eye(6, dtype=torch.float64) / 0.1
    want = weighted([*parts, (-2 * flat, torch.zeros(6, dtype=torch.float64))])
    (found,) = fedbens([clients], steps=200)
    torch.testing.assert_close(found["w"].flatten(), want, rtol=0, atol=1e-4)


def test_starts_that_ended_alike_are_one():
    clients = [client(10 * i, 5.0 + i) for i in range(2)]
    (alone,) = fedbens([clients], steps=20)
    for model in fedbens([clients, clients], steps=20):
        torch.testing.assert_close(model["w"], alone["w"])


def test_the_score_is_asked_every_thirty_steps():
    clients, seen = [client(10 * i, 5.0 + i) for i in range(2)], []

    def score(params):
        seen.append(params["w"])
        return -abs(len(seen) - 2)

    (best,) = fedbens([clients], steps=70, score=score)
    assert len(seen) == 4  # after the steps 1, 31, 61 and 70
    assert torch.equal(best["w"], seen[1])
    (start,) = fedbens([clients], steps=0)
    assert torch.equal(start["w"], torch.minimum(*(p.params["w"] for p in clients)))


# Both


def test_what_cannot_be_merged_is_refused():
    one, other = client(0), client(1)
    odd = replace(other, curvature=Kronecker("w", SHAPE, factor(0, 3), factor(0, 2)))
    with pytest.raises(ParamsError, match="no posterior"):
        mats([])
    with pytest.raises(ParamsError, match="no posterior"):
        fedbens([])
    with pytest.raises(ParamsError, match="each start"):
        fedbens([[one, odd], [one]])
    with pytest.raises(StructureError, match="kfac"):
        fedbens([[plain({"w": torch.ones(2)}, 1)]])
    whole = Kronecker("w", SHAPE, factor(0, 3), factor(0, 2))
    grouped = Kronecker("v", torch.Size((2, 3)), factor(0, 3), factor(0, 2))
    wider = {"w": one.params["w"], "v": one.params["w"]}
    two = LocalPosterior(wider, BlockDiagonal([whole, grouped]), 1)
    with pytest.raises(StructureError, match="same layers"):
        fedbens([[two, replace(two, curvature=whole)]])
    with pytest.raises(StructureError, match="same layers"):
        fedbens([[two, replace(two, curvature=BlockDiagonal([grouped, whole]))]])


@pytest.mark.parametrize(
    ("merge", "argument"),
    [
        (mats, {"iterations": -1}),
        (fedbens, {"steps": -1}),
        (fedbens, {"temperature": 0.0}),
        (fedbens, {"variance": -1.0}),
    ],
)
def test_arguments_are_checked(merge, argument):
    own = client(0)
    with pytest.raises(ConfigurationError, match=next(iter(argument))):
        merge([own] if merge is mats else [[own]], **argument)
