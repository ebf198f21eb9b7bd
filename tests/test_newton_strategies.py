"""GIANT and DONE against dense Newton steps; what all that send derivatives owe."""

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord
from oracles import randn, relative
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import (
    Watched,
    ask,
    change_array,
    close,
    drop_array,
    fail,
    left_out,
    node_of,
    quick_app,
    same_bits,
    set_array,
    set_metric,
    start,
    tiny_arrays,
    tiny_client,
)

from flwr_fisher.client import FisherClient, make_client_app
from flwr_fisher.errors import (
    ClientError,
    UnknownNameError,
)
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import (
    DONE,
    FAGH,
    GIANT,
)
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import SERVER, arrays_to_tensors

NAN = float("nan")
CLIENTS = 3


def row(kind, **own):
    return lambda **options: kind(**{"fraction_evaluate": 0.0, **own, **options})


NEWTON = {
    "giant": row(GIANT, lr=0.5, iterations=3),
    "done": row(DONE, lr=0.5, iterations=3, alpha=0.1),
}
STRATEGIES = {
    f"fagh-{probe}": row(FAGH, lr=0.3, rho=0.5, probe=probe)
    for probe in ("first", "random", "momentum", "none")
} | NEWTON


@pytest.fixture(params=STRATEGIES)
def make(request):
    return STRATEGIES[request.param]


@pytest.fixture(params=NEWTON)
def newton(request):
    return NEWTON[request.param]


run = partial(start, num_rounds=2)


@cache
def plain(make, *holdings):
    """What good clients give, without anything special."""
    return run(make(), quick_app(list(holdings) or [0, 1, 2]))


# A quadratic: y = x w, mean squared error, 4 weights


def plane():
    model = nn.Linear(4, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


def half(partition, same):
    n = 60 if same else 60 + 20 * partition
    x = randn(0 if same else partition, n, 4, dtype=torch.float64)
    return x, randn(10 + partition, n, 1, dtype=torch.float64)


def plane_app(same):
    def client_fn(context):
        held = TensorDataset(*half(int(context.node_config["partition-id"]), same))
        loader = DataLoader(held, batch_size=32)
        return FisherClient(plane(), loader, loss_fn=F.mse_loss, device="cpu")

    return make_client_app(client_fn)


EXACT = {
    "giant": row(GIANT, iterations=20),
    "done": row(DONE, iterations=30, alpha=0.4),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("lost", [None, 1])
def test_one_round_is_the_mean_of_dense_newton_steps(name, lost):
    app = Watched(plane_app(same=False), {} if lost is None else {lost: fail})
    start = ArrayRecord(shared_state(plane()))
    result = run(EXACT[name](), app, 4, start, num_rounds=1)
    held = {i: half(i, same=False) for i in range(4) if i != lost}
    total = sum(len(x) for x, _ in held.values())
    g = sum(-2 * x.mT @ y for x, y in held.values()) / total
    steps = [
        len(x) / total * torch.linalg.solve(2 * x.mT @ x / len(x), g)
        for x, _ in held.values()
    ]
    got = arrays_to_tensors(result.arrays)["weight"].flatten()
    assert relative(got, -sum(steps).flatten()) < 1e-5
    assert relative(result.details["weight"], sum(steps).mT) < 1e-5
    norm = result.train_metrics_clientapp[1]["gradient-norm"]
    assert norm == pytest.approx(float(g.norm()))


def test_done_is_its_iterations():
    app, start = plane_app(same=True), ArrayRecord(shared_state(plane()))
    result = run(DONE(alpha=0.1, iterations=2, lr=0.5), app, 3, start, num_rounds=1)
    x, _ = half(0, same=True)
    y = sum(half(i, same=True)[1] for i in range(3)) / 3
    g, H = -2 * x.mT @ y / len(x), 2 * x.mT @ x / len(x)
    want = -0.5 * (0.1 * g + 0.1 * (g - H @ (0.1 * g)))
    got = arrays_to_tensors(result.arrays)["weight"].flatten()
    assert relative(got, want.flatten()) < 1e-12


# Two exchanges


class Ear(Watched):
    """Notes tasks, and what the server sent beside the model."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def __call__(self, message, context):
        if message.metadata.message_type == "train":
            config = message.content.config_records["config"]
            keys = message.content.array_records["arrays"]
            sent = [k for k in keys if k.startswith(SERVER)]
            partition = int(context.node_config["partition-id"])
            self.heard.append((str(config["fisher.job"]), partition, sent))
        return super().__call__(message, context)


def test_the_same_clients_get_the_mean_gradient(newton):
    ear = Ear()
    run(newton(fraction_train=0.5), ear, 6, num_rounds=1)
    asked = {
        task: sorted(p for t, p, _ in ear.heard if t == task)
        for task in ("gradient", "direction")
    }
    assert len(asked["gradient"]) == 3
    assert asked["gradient"] == asked["direction"]
    trained = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
    for task, _, sent in ear.heard:
        expected = [f"{SERVER}gradient/{name}" for name in trained]
        assert sent == (expected if task == "direction" else [])
    asks = [c for c in ear.configs if c["job"] == "direction"]
    assert {c["iterations"] for c in asks} == {3}
    assert {c["solver"] for c in asks} <= {"giant", "done"}


def test_a_client_that_fails_once_is_asked_again(newton):
    def fail_gradient(content):
        if any(k.startswith("gradient/") for k in content.array_records["arrays"]):
            raise ValueError("out of cheese")

    app = Watched(tamper={1: fail_gradient})
    result = run(newton(), app, num_rounds=1)
    assert len(result.uploads) == CLIENTS
    assert not close(result.arrays, run(newton(), num_rounds=1).arrays, 1e-4)


# What every strategy that sends derivatives owes


def first_of(names, then):
    """Spoil the first array there is under one of the names."""

    def tamper(content):
        keys = content.array_records["arrays"]
        then(next(k for k in keys if k.split("/")[0] in names))(content)

    return tamper


def vectors(change):
    names = ("hvp", "gradient", "direction")
    return first_of(names, lambda key: change_array(key, change))


def parameters_key(content):
    set_array("3.bias", [1.0, 1.0, 1.0])(content)


def drop_a_parameter(content):
    for key in [k for k in content.array_records["arrays"] if "/3.bias" in k]:
        drop_array(key)(content)


BAD_REPLIES = {
    "NaN": (vectors(lambda a: a * NAN), "0.weight': holds NaN or infinity"),
    "shape": (vectors(lambda a: a.T), "0.weight': shape (3, 4)"),
    "dtype": (vectors(lambda a: a.astype("float64")), "0.weight': dtype torch.float64"),
    "key": (set_array("hessian/0.weight", [1.0]), "'hessian/0.weight': unexpected"),
    "parameters": (parameters_key, "'3.bias': unexpected key"),
    "fewer": (drop_a_parameter, "covers other parameters than most"),
    "weight": (set_metric("num-examples", NAN), "'num-examples': the weight"),
    "error": (fail, "ValueError: out of cheese"),
}


@pytest.mark.parametrize("kind", ["fagh-first", "giant", "done"])
@pytest.mark.parametrize("case", BAD_REPLIES)
def test_a_bad_reply_is_left_out_by_name(kind, case, caplog):
    make, (tamper, text) = STRATEGIES[kind], BAD_REPLIES[case]
    grid = LocalGrid(Watched(quick_app([0, 1, 7, 2]), {2: tamper}), 4)
    result = make().start(grid, tiny_arrays(), num_rounds=2)
    assert same_bits(result.arrays, plain(make).arrays)
    metrics = result.train_metrics_clientapp[1]
    exchanges = len(make().exchanges(1))
    assert (metrics["num-replies"], metrics["num-rejected"]) == (3, exchanges)
    said = left_out(caplog)
    assert said
    for line in said:
        assert f"left out partition-2: node {node_of(grid, 2)}: " in line
        assert text in line


def test_a_product_without_its_gradient_is_left_out(caplog):
    app = Watched(tamper={1: drop_array("gradient/3.bias")})
    run(STRATEGIES["fagh-first"](), app)
    assert "left out partition-1" in caplog.text
    assert "'gradient/3.bias': missing" in caplog.text


def test_buffers_stay(make):
    before = arrays_to_tensors(tiny_arrays())
    after = arrays_to_tensors(run(make()).arrays)
    assert list(before) == list(after)
    for name, value in before.items():
        is_buffer = "running" in name or "num_batches" in name
        assert torch.equal(value, after[name]) == is_buffer, name


def test_frozen_parameters_stay(make):
    def client_fn(context):
        client = tiny_client(int(context.node_config["partition-id"]))
        client.problem.model[0].requires_grad_(False)
        return client

    result = run(make(), make_client_app(client_fn))
    before, after = arrays_to_tensors(tiny_arrays()), arrays_to_tensors(result.arrays)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved == ["1.weight", "1.bias", "3.weight", "3.bias"]


# Arguments, and a server that asks for what cannot be


def test_a_client_names_what_it_was_not_sent():
    with pytest.raises(ClientError, match="the server sent no 'gradient'"):
        ask(tiny_client(), config={"job": "direction"})
    with pytest.raises(UnknownNameError, match="unknown solver 'lu'; known: giant, d"):
        ask(tiny_client(), config={"job": "direction", "solver": "lu"})
    part = ArrayRecord(
        {
            **arrays_to_tensors(tiny_arrays()),
            f"{SERVER}gradient/0.weight": torch.ones(2),
        }
    )
    with pytest.raises(ClientError, match="that the server sent lacks the keys"):
        ask(tiny_client(), part, {"job": "direction"})
