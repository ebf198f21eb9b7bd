"""Rivals of many rounds, on the public interface: each where the answer is known."""

import pytest
import rivals_path  # noqa: F401
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord
from oracles import randn, relative, seeded
from rivals import DONE, GIANT, FedExP, FedGA, FedPM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import app_by_partition, half_square, plane, start, tiny_data

from flwr_fisher.client import FisherClient, LocalSGD
from flwr_fisher.params import shared_state
from flwr_fisher.wire import arrays_to_tensors


def run(strategy, make, data, train=None, rounds=1, **options):
    """Return the result of clients that have these data, in batches of 4."""

    def client_of(partition):
        loader = DataLoader(TensorDataset(*data[partition]), batch_size=4)
        return FisherClient(make(), loader, train_fn=train, device="cpu", **options)

    app, begin = app_by_partition(client_of), ArrayRecord(shared_state(make()))
    return start(strategy, app, len(data), begin, num_rounds=rounds)


def net():
    return seeded(
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    )


def tensors(count=3):
    return [tiny_data(i).tensors for i in range(count)]


# GIANT and DONE


def linear():
    model = nn.Linear(4, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


@pytest.mark.parametrize(
    "strategy",
    [
        GIANT(iterations=20, fraction_evaluate=0.0),
        DONE(iterations=30, alpha=0.4, fraction_evaluate=0.0),
    ],
)
def test_one_round_is_the_mean_of_dense_newton_steps(strategy):
    data = [
        (randn(i, 60 + 20 * i, 4).double(), randn(10 + i, 60 + 20 * i, 1).double())
        for i in range(3)
    ]
    result = run(strategy, linear, data, loss_fn=F.mse_loss)
    total = sum(len(x) for x, _ in data)
    g = sum(-2 * x.mT @ y for x, y in data) / total
    step = sum(
        len(x) / total * torch.linalg.solve(2 * x.mT @ x / len(x), g) for x, _ in data
    )
    assert relative(arrays_to_tensors(result.arrays)["weight"], -step.mT) < 1e-5
    norm = result.train_metrics_clientapp[1]["gradient-norm"]
    assert norm == pytest.approx(float(g.norm()))


# FedExP

# y = w x with the loss (w x - y)^2 / 2, one step of rate 1 from w = (0, 0): a client
# with the one example (x, 1) ends at w = x, and Delta = -x. Client 0 has one example,
# client 1 has x = (1, 2) twice: p = 1/3, 2/3. x = (1, 0): mean Delta = -(1, 4/3), its
# square 25/9; the mean of squares is 1/3 + 2/3 · 5 = 11/3, less than 2 · 25/9.
# x = (1, -4): mean Delta = -(1, 0); the mean of squares is 17/3 + 10/3 = 9.


@pytest.mark.parametrize(
    ("first", "epsilon", "lr", "mean"),
    [([1, 0], 1e-3, 1.0, [1, 4 / 3]), ([1, -4], 0.5, 3.0, [1, 0])],
)
def test_a_round_of_fedexp_is_what_a_pencil_gives(first, epsilon, lr, mean):
    xs = [torch.tensor([first]).float(), torch.tensor([[1.0, 2.0]] * 2)]
    data = [(x, torch.ones(len(x), 1)) for x in xs]
    train = LocalSGD(lr=1.0, momentum=0.0, loss_fn=half_square)
    result = run(FedExP(epsilon=epsilon, fraction_evaluate=0.0), plane, data, train)
    got = arrays_to_tensors(result.arrays)["weight"]
    torch.testing.assert_close(got, lr * torch.tensor([mean]))
    assert result.train_metrics_clientapp[1]["server-lr"] == pytest.approx(lr)


# FedGA


def slopes(params, x, y):
    model = net()
    model.load_state_dict(params)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
    return dict(zip(names, found, strict=True))


def fedga_by_hand(rounds, beta):
    theta, data = shared_state(net()), tensors()
    shares = [len(y) / sum(len(y) for _, y in data) for _, y in data]
    for _ in range(rounds):
        own = [slopes(theta, x, y) for x, y in data]
        pairs = list(zip(shares, own, strict=True))
        mean = {k: sum(p * g[k] for p, g in pairs) for k in theta}
        new = {k: torch.zeros_like(v) for k, v in theta.items()}
        for share, g, (x, y) in zip(shares, own, data, strict=True):
            local = {k: v - beta * (mean[k] - g[k]) for k, v in theta.items()}
            for rows in torch.arange(len(y)).split(4):
                step = slopes(local, x[rows], y[rows])
                local = {k: v - 0.1 * step[k] for k, v in local.items()}
            new = {k: v + share * local[k] for k, v in new.items()}
        theta = new
    return theta


def test_rounds_of_fedga_are_the_loop_written_out():
    strategy = FedGA(beta=0.5, fraction_evaluate=0.0)
    result = run(strategy, net, tensors(), LocalSGD(lr=0.1, momentum=0.0), rounds=2)
    expected, plain = fedga_by_hand(2, 0.5), fedga_by_hand(2, 0.0)
    for key, value in arrays_to_tensors(result.arrays).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
        assert (plain[key] - value).abs().max() > 1e-3


# FedPM

LR, DAMPING, MIXING = 0.3, 0.2, 1e-3


def moments_of(model, x):
    a = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()
    inputs = [a, model[1](model[0](x)).detach().double()]
    return [a.mT @ a / len(a) for a in inputs]


def damped(M, share):
    return M + share * M.trace() / len(M) * torch.eye(len(M), dtype=torch.float64)


def matrices_of(model):
    first = torch.cat([model[0].weight, model[0].bias[:, None]], dim=1)
    return [first.detach().double(), model[2].weight.detach().double()]


def put(model, matrices):
    with torch.no_grad():
        model[0].weight.copy_(matrices[0][:, :-1])
        model[0].bias.copy_(matrices[0][:, -1])
        model[2].weight.copy_(matrices[1])
    return model


def fedpm_client_by_hand(model, x, y):
    inverses = [torch.linalg.inv(damped(M, DAMPING)) for M in moments_of(model, x)]
    for rows in torch.arange(len(y)).split(4):
        model.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        first = torch.cat([model[0].weight.grad, model[0].bias.grad[:, None]], 1)
        slopes = [first.double(), model[2].weight.grad.double()]
        steps = zip(matrices_of(model), slopes, inverses, strict=True)
        put(model, [W - LR * G @ inverse for W, G, inverse in steps])
    return model


def fedpm_by_hand(rounds):
    server, data = net(), tensors()
    shares = [len(y) / sum(len(y) for _, y in data) for _, y in data]
    for _ in range(rounds):
        begin = matrices_of(server)
        models = [fedpm_client_by_hand(put(net(), begin), x, y) for x, y in data]
        found = [moments_of(m, x) for m, (x, _) in zip(models, data, strict=True)]
        mixed = []
        for layer in range(2):
            Ws = [matrices_of(model)[layer] for model in models]
            Ms = [moments[layer] for moments in found]
            W = sum(p * W for p, W in zip(shares, Ws, strict=True))
            M = sum(p * M for p, M in zip(shares, Ms, strict=True))
            off = sum(p * (V - W) @ N for p, V, N in zip(shares, Ws, Ms, strict=True))
            mixed.append(W + off @ torch.linalg.inv(damped(M, MIXING)))
        server = put(net(), mixed)
    return server


def test_rounds_of_fedpm_are_the_loop_written_out():
    strategy = FedPM(damping=DAMPING, mixing_damping=MIXING, fraction_evaluate=0.0)
    result = run(strategy, net, tensors(), LocalSGD(lr=LR, momentum=0.0), rounds=2)
    expected = fedpm_by_hand(2).state_dict()
    for key, value in arrays_to_tensors(result.arrays).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    assert result.train_metrics_clientapp[2]["mixing-norm"] > 1e-3
