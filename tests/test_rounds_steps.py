"""SCAFFOLD, FedExP, FedGA, GIANT and DONE on problems whose answers are known."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from oracles import cut, flat, randn, relative, rng, seeded
from torch import Tensor, nn

from flwr_fisher.curvature import gradient, hvp
from flwr_fisher.params import subtract, weighted_mean
from flwr_fisher.rounds import (
    done_direction,
    fedexp_step,
    fedga_start,
    giant_direction,
    last_two_mean,
    newton_step,
    scaffold_control,
    scaffold_step,
)

D = 5


@dataclass
class Quadratic:
    """A client with the loss (theta - a)^T A (theta - a) / 2."""

    A: Tensor
    a: Tensor
    weight: float = 1.0

    def gradient(self, params):
        return {"w": self.A @ (params["w"] - self.a)}

    def hvp(self, vector):
        return {"w": self.A @ vector["w"]}


def quadratic(seed, weight=1.0):
    rows = randn(seed, 2 * D, D, dtype=torch.float64)
    A = rows.mT @ rows / (2 * D) + 0.1 * torch.eye(D, dtype=torch.float64)
    return Quadratic(A, randn(100 + seed, D, dtype=torch.float64), weight)


def optimum(clients):
    A = torch.stack([c.weight * c.A for c in clients]).sum(0)
    b = torch.stack([c.weight * (c.A @ c.a) for c in clients]).sum(0)
    return torch.linalg.solve(A, b)


CLIENTS = [quadratic(1, 1.0), quadratic(2, 3.0), quadratic(3, 2.0), quadratic(4, 2.0)]
WEIGHTS = [c.weight for c in CLIENTS]
ZERO = {"w": torch.zeros(D, dtype=torch.float64)}
LR, STEPS = 0.05, 8


def local(client, start, shift=ZERO):
    """Return where a client's gradient steps end; `shift` is c - c_i."""
    w = start["w"]
    for _ in range(STEPS):
        w = w - LR * (client.gradient({"w": w})["w"] + shift["w"])
    return {"w": w}


# --- SCAFFOLD -------------------------------------------------------------------------


def scaffold(clients, cohorts):
    """Run SCAFFOLD, and check that c stays the mean of all clients' c_i."""
    params, c, controls = ZERO, ZERO, [ZERO for _ in clients]
    total = sum(client.weight for client in clients)
    for cohort in cohorts:
        deltas, shifts = [], []
        for i in cohort:
            end = local(clients[i], params, subtract(c, controls[i]))
            deltas.append(subtract(params, end))
            new = scaffold_control(controls[i], c, deltas[-1], steps=STEPS, lr=LR)
            shifts.append(subtract(new, controls[i]))
            controls[i] = new
        weights = [clients[i].weight for i in cohort]
        params, c = scaffold_step(
            params, c, deltas, shifts, weights, participation=sum(weights) / total
        )
        mean = weighted_mean(controls, [client.weight for client in clients])
        assert float((c["w"] - mean["w"]).norm()) <= 1e-9
    return params


def test_scaffold_reaches_the_optimum_and_fedavg_does_not():
    best = optimum(CLIENTS)
    everyone = list(range(len(CLIENTS)))
    assert relative(scaffold(CLIENTS, [everyone] * 300)["w"], best) <= 1e-8
    params = ZERO
    for _ in range(300):
        params = weighted_mean([local(c, params) for c in CLIENTS], WEIGHTS)
    assert relative(params["w"], best) >= 1e-2


def test_scaffold_reaches_it_with_two_clients_a_round():
    generator = rng(0)
    cohorts = [torch.randperm(4, generator=generator)[:2].tolist() for _ in range(800)]
    assert relative(scaffold(CLIENTS, cohorts)["w"], optimum(CLIENTS)) <= 1e-6


def test_a_control_variate_is_the_mean_gradient_along_the_way():
    client, w, seen = quadratic(1), ZERO, []
    own, c = {"w": randn(7, D, dtype=torch.float64)}, {"w": randn(8, D).double()}
    end = local(client, ZERO, subtract(c, own))
    for _ in range(STEPS):
        seen.append(client.gradient(w)["w"])
        w = {"w": w["w"] - LR * (seen[-1] + c["w"] - own["w"])}
    got = scaffold_control(own, c, subtract(ZERO, end), steps=STEPS, lr=LR)
    assert relative(got["w"], torch.stack(seen).mean(0)) <= 1e-12


def test_scaffolds_averages_by_hand():
    params = {"w": torch.tensor([10.0]), "count": torch.tensor(5)}
    deltas = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([5.0])}]
    shifts = [{"w": torch.tensor([2.0])}, {"w": torch.tensor([-2.0])}]
    new, c = scaffold_step(
        params, {"w": torch.tensor([0.5])}, deltas, shifts, [3, 1], participation=0.1
    )
    assert float(new["w"]) == 8.0
    assert float(c["w"]) == pytest.approx(0.5 + 0.1 * 1.0)
    assert list(new) == ["w", "count"]
    assert int(new["count"]) == 5
    new, _ = scaffold_step(params, shifts[0], deltas, shifts, [1, 1], lr=0.5)
    assert float(new["w"]) == 8.5


# --- FedExP ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_fedexp_is_the_papers_for_equal_clients(seed):
    count, epsilon = 3 + 5 * seed, 0.1
    deltas = list(randn(seed, count, 30, dtype=torch.float64))
    mean = torch.stack(deltas).mean(0)
    squares = sum(float(delta.norm() ** 2) for delta in deltas)
    want = max(1.0, squares / (2 * count * (float(mean.norm() ** 2) + epsilon)))
    step = fedexp_step(
        {"w": torch.zeros(30).double()}, [{"w": d} for d in deltas], [7] * count,
        epsilon=epsilon,
    )  # fmt: skip
    assert step.lr == pytest.approx(want)
    assert relative(step.params["w"], -want * mean) <= 1e-12


def test_fedexp_never_steps_less_than_fedavg():
    params, delta = {"w": torch.ones(3)}, {"w": torch.tensor([1.0, 2.0, 3.0])}
    step = fedexp_step(params, [delta, delta], [1, 2], epsilon=0.0)
    assert step.lr == 1
    assert torch.equal(step.params["w"], params["w"] - delta["w"])
    zero = {"w": torch.zeros(3)}
    step = fedexp_step(params, [zero, zero], [1, 1], epsilon=0.0)
    assert step.lr == 1
    assert torch.equal(step.params["w"], params["w"])


def test_the_last_two_iterates():
    last, before = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}
    assert float(last_two_mean(last, before)["w"]) == 2
    assert float(last_two_mean(last, None)["w"]) == 3


# --- FedGA ----------------------------------------------------------------------------


def test_fedgas_starts_have_the_server_for_their_mean():
    params = {"w": randn(1, D, dtype=torch.float64), "count": torch.tensor(7)}
    found = [c.gradient(params) for c in CLIENTS]
    mean = weighted_mean(found, WEIGHTS)
    starts = [fedga_start(params, mean, g, beta=0.3) for g in found]
    assert relative(weighted_mean(starts, WEIGHTS)["w"], params["w"]) <= 1e-12
    for start, g in zip(starts, found, strict=True):
        assert list(start) == ["w", "count"]
        assert relative(start["w"] - params["w"], 0.3 * (g["w"] - mean["w"])) <= 1e-12
    same = fedga_start(params, mean, found[0], beta=0)
    assert torch.equal(same["w"], params["w"])


def test_fedgas_displaced_gradients_descend_the_disagreement_too():
    """For quadratics exactly: the gradient of f + beta/2 sum p_i |g_i - g|^2."""
    beta, total = 0.3, sum(WEIGHTS)

    def objective(w):
        slopes = [c.A @ (w - c.a) for c in CLIENTS]
        shares = [weight / total for weight in WEIGHTS]
        mean = sum(p * g for p, g in zip(shares, slopes, strict=True))
        losses = [(w - c.a) @ c.A @ (w - c.a) / 2 for c in CLIENTS]
        return torch.stack(
            [
                p * (loss + beta / 2 * (g - mean).square().sum())
                for p, loss, g in zip(shares, losses, slopes, strict=True)
            ]
        ).sum()

    w = randn(1, D, dtype=torch.float64).requires_grad_()
    (want,) = torch.autograd.grad(objective(w), w)
    params = {"w": w.detach()}
    found = [c.gradient(params) for c in CLIENTS]
    mean = weighted_mean(found, WEIGHTS)
    displaced = [
        c.gradient(fedga_start(params, mean, g, beta=beta))
        for c, g in zip(CLIENTS, found, strict=True)
    ]
    assert relative(weighted_mean(displaced, WEIGHTS)["w"], want) <= 1e-12


# --- GIANT and DONE -------------------------------------------------------------------


def by_giant(client, g):
    return giant_direction(client.hvp, g, iterations=D, tolerance=0.0)


def by_done(client, g):
    values = torch.linalg.eigvalsh(client.A)
    alpha = 2 / float(values[0] + values[-1])
    return done_direction(client.hvp, g, alpha=alpha, iterations=300)


SOLVE = pytest.mark.parametrize("solve", [by_giant, by_done])


@SOLVE
def test_one_round_on_equal_hessians_is_newtons_step(solve):
    A = CLIENTS[0].A
    clients = [Quadratic(A, c.a, c.weight) for c in CLIENTS]
    params = {"w": randn(1, D, dtype=torch.float64), "count": torch.tensor(7)}
    g = weighted_mean([c.gradient(params) for c in clients], WEIGHTS)
    directions = [solve(c, g) for c in clients]
    got = newton_step(params, directions, WEIGHTS)
    assert relative(got["w"], optimum(clients)) <= 1e-8
    assert int(got["count"]) == 7
    half = newton_step(params, directions, WEIGHTS, lr=0.5)
    assert relative(half["w"], (params["w"] + got["w"]) / 2) <= 1e-12


@SOLVE
def test_on_different_hessians_it_is_their_harmonic_mean(solve):
    params = {"w": randn(1, D, dtype=torch.float64)}
    g = weighted_mean([c.gradient(params) for c in CLIENTS], WEIGHTS)
    got = newton_step(params, [solve(c, g) for c in CLIENTS], WEIGHTS)
    inverses = [c.weight * torch.linalg.inv(c.A) for c in CLIENTS]
    want = params["w"] - torch.stack(inverses).sum(0) @ g["w"] / sum(WEIGHTS)
    assert relative(got["w"], want) <= 1e-8


def test_a_models_own_newton_step():
    """With the library's Hessian-vector products, on a regularised classifier."""
    model = seeded(lambda: nn.Linear(3, 3)).double()
    x, y = randn(1, 20, 3, dtype=torch.float64), torch.arange(20) % 3
    like = {k: p.detach() for k, p in model.named_parameters()}

    def loss(theta):
        w = cut(theta, like)
        outputs = F.linear(x, w["weight"], w["bias"])
        return F.cross_entropy(outputs, y) + 0.05 * theta.square().sum()

    def loss_fn(outputs, labels):
        squares = [p.square().sum() for p in model.parameters()]
        return F.cross_entropy(outputs, labels) + 0.05 * torch.stack(squares).sum()

    H = torch.autograd.functional.hessian(loss, flat(like))
    slope = torch.func.grad(loss)(flat(like))
    batches = list(zip(x.split(7), y.split(7), strict=True))
    g, _ = gradient(model, batches, loss_fn=loss_fn)
    assert relative(flat(g), slope) <= 1e-12
    want = torch.linalg.solve(H, slope)

    def product(vector):
        return hvp(model, batches, vector, loss_fn=loss_fn)

    cg = giant_direction(product, g, iterations=12, tolerance=1e-12)
    assert relative(flat(cg), want) <= 1e-9
    richardson = done_direction(product, g, alpha=1.0, iterations=160)
    assert relative(flat(richardson), want) <= 1e-6


def test_giant_without_positive_curvature_still_descends():
    g = {"w": randn(2, D, dtype=torch.float64)}
    concave = Quadratic(-torch.eye(D, dtype=torch.float64), g["w"])
    assert torch.equal(giant_direction(concave.hvp, g)["w"], g["w"])
    saddle = Quadratic(torch.diag(torch.tensor([3.0, 2, 1, 1, -0.1])).double(), g["w"])
    for count in range(1, 8):
        found = giant_direction(saddle.hvp, g, iterations=count)["w"]
        assert float(found @ g["w"]) > 0
    zero = {"w": torch.zeros(D)}
    assert not giant_direction(concave.hvp, zero)["w"].any()


@pytest.mark.parametrize("size", [1e-7, 1e7])
def test_giants_tolerance_is_relative_to_the_gradient(size):
    client, g = quadratic(1), {"w": randn(2, D, dtype=torch.float64)}
    want = giant_direction(client.hvp, g, iterations=2 * D)["w"]
    assert relative(client.A @ want, g["w"]) <= 1e-6
    got = giant_direction(client.hvp, {"w": size * g["w"]}, iterations=2 * D)["w"]
    assert relative(got, size * want) <= 1e-9
