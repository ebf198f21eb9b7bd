"""SCAFFOLD on problems whose answers are known."""

from dataclasses import dataclass

import pytest
import torch
from oracles import randn, relative, rng
from torch import Tensor

from flwr_fisher.params import subtract, weighted_mean
from flwr_fisher.rounds import scaffold_control, scaffold_step

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
