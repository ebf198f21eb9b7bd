"""FedLPA against its steps one by one, and against the dense solve they lead to."""

from dataclasses import replace

import pytest
import torch
from oracles import randn
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.curvature import BlockDiagonal, Diagonal, Kronecker, fisher
from flwr_fisher.errors import ConfigurationError, ParamsError, StructureError
from flwr_fisher.merge import LocalPosterior, fedavg, fedlpa
from flwr_fisher.merge.fedlpa import ADDED, descended
from flwr_fisher.params import shared_state


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def clients(bias: bool = True) -> list[LocalPosterior]:
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 2, 3, bias=bias), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
        ).double()
        x, y = randn(seed, 20, 1, 4, 4, dtype=torch.float64), torch.arange(20) % 3
        loader = DataLoader(TensorDataset(x, y), batch_size=5)
        own = fisher(model, loader, structure="kfac", expectation="empirical")
        found.append(LocalPosterior(shared_state(model), own, 10.0 * (seed + 1)))
    return found


def one_by_one(
    posteriors: list[LocalPosterior], at: int, steps: int, added: float, s: int = 1
) -> Tensor:
    """The released loop: the mean squared error's gradient, at a rate of 1."""
    total = sum(p.num_examples for p in posteriors)
    terms = []
    for posterior in posteriors:
        layer = posterior.curvature.blocks()[at].made()
        assert isinstance(layer, Kronecker)
        A = layer.A[0] / s**2 + added * eye(layer.A.shape[-1])
        B = layer.G[0] * s**2 + added * eye(layer.G.shape[-1])
        W = layer.as_matrices(posterior.params)[0]
        terms.append((posterior.num_examples / total, A, B, W))
    Z = sum(p * B @ W @ A for p, A, B, W in terms)
    left = torch.inverse(sum(p * B for p, A, B, W in terms))
    right = torch.inverse(sum(p * A for p, A, B, W in terms))
    M = (left @ Z @ right).requires_grad_()
    for _ in range(steps):
        made = sum(p * B @ M @ A for p, A, B, W in terms)
        (gradient,) = torch.autograd.grad(nn.functional.mse_loss(made, Z), M)
        M = (M - gradient).detach().requires_grad_()
    return M.detach()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 7, 400])
def test_the_steps_are_the_released_ones(steps: int, bias: bool) -> None:
    posteriors = clients(bias)
    merged = fedlpa(posteriors, steps=steps, positions={"0.weight": 4})
    for at, (name, s) in enumerate({"0": 4, "3": 1}.items()):
        want = one_by_one(posteriors, at, steps, ADDED, s)
        got = merged[f"{name}.weight"].flatten(1)
        if f"{name}.bias" in merged:
            got = torch.cat([got, merged[f"{name}.bias"].unsqueeze(1)], 1)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_their_fixed_point_is_the_dense_solve() -> None:
    posteriors = clients()
    merged = fedlpa(posteriors, steps=10**12)
    shares = torch.tensor([p.num_examples for p in posteriors])
    shares = shares / shares.sum()
    matrix, rhs = 0.0, 0.0
    for p, posterior in zip(shares.tolist(), posteriors, strict=True):
        layer = posterior.curvature.blocks()[1].made()
        assert isinstance(layer, Kronecker)
        A = layer.A[0] + ADDED * eye(9)
        B = layer.G[0] + ADDED * eye(3)
        dense = torch.kron(B, A)
        matrix = matrix + p * dense
        rhs = rhs + p * dense @ layer.as_matrices(posterior.params)[0].flatten()
    want = torch.linalg.solve(matrix, rhs).reshape(3, 9)
    torch.testing.assert_close(merged["3.weight"], want[:, :-1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged["3.bias"], want[:, -1], rtol=1e-5, atol=1e-6)


def test_identical_clients_give_their_model() -> None:
    one = clients()[0]
    merged = fedlpa([one, one, one])
    for name, value in one.params.items():
        torch.testing.assert_close(merged[name], value)


def test_what_has_no_factors_is_averaged() -> None:
    posteriors = [
        LocalPosterior(
            {**p.params, "scale": torch.full((2,), float(i))}, p.curvature, 1
        )
        for i, p in enumerate(clients())
    ]
    merged = fedlpa(posteriors)
    assert torch.equal(merged["scale"], fedavg(posteriors)["scale"])


def test_steps_that_diverge_are_named() -> None:
    loud = [
        LocalPosterior(p.params, p.curvature.scaled(1e4), p.num_examples)
        for p in clients()
    ]
    with pytest.raises(ParamsError, match=r"FedLPA's solution for '0\.weight'"):
        fedlpa(loud)


def test_clients_with_other_layers_are_refused() -> None:
    first, *others = clients()
    every = list(first.curvature.blocks())
    for blocks in (every[:1], every[::-1]):
        odd = replace(first, curvature=BlockDiagonal(blocks))
        with pytest.raises(StructureError, match="same layers"):
            fedlpa([odd, *others])


def test_the_released_constant_is_added() -> None:
    assert pytest.approx((1 - 0.999) ** 0.5) == ADDED


def test_who_is_there_takes_no_step() -> None:
    z = torch.ones(2, dtype=torch.float64)
    assert torch.equal(descended(lambda x: x, z, z, rate=0.1, steps=5), z)


def test_diagonals_are_refused() -> None:
    params = {"w": torch.ones(2)}
    with pytest.raises(StructureError, match="kfac"):
        fedlpa([LocalPosterior(params, Diagonal(params), 1)])


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="steps"):
        fedlpa(clients(), steps=-1)
    with pytest.raises(ConfigurationError, match="added"):
        fedlpa(clients(), added=-0.1)
