"""FedPM as a strategy: a round by hand, odd models, and what it owes users."""

import re
from functools import partial

import nets
import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord
from oracles import randn, seeded
from test_strategy_contract import Row
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import (
    Watched,
    ask,
    change_array,
    left_out,
    same_bits,
    set_array,
    tensors_of,
    tiny_app,
    tiny_client,
    tiny_data,
)
from virtual import start as started

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.errors import ClientError, ConfigurationError
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FedPM
from flwr_fisher.wire import PREFIX, arrays_to_tensors

ROW = Row(FedPM, {"damping": 0.5})
TASK = {"job": "fedpm", "damping": 0.5}
plain_sgd = partial(LocalSGD, lr=0.1, momentum=0.0)


def run(app=None, clients=3, *, start=None, **own):
    keys = ("num_rounds", "checkpoint_dir", "resume", "train_config")
    begin = {k: own.pop(k) for k in keys if k in own}
    return started(ROW(**own), app, clients, start, **begin)


@pytest.mark.parametrize("clients", [1, 3])
def test_identical_clients_get_their_model(clients):
    few = {"min_train_nodes": 1, "min_available_nodes": 1}
    result = run(tiny_app([1] * clients), clients, **few)
    alone = tensors_of(ask(tiny_client(1), config=TASK))
    merged = arrays_to_tensors(result.arrays)
    assert list(merged) == [key for key in alone if not key.startswith(PREFIX)]
    assert all(torch.equal(value, alone[key]) for key, value in merged.items())
    assert result.train_metrics_clientapp[1]["mixing-norm"] < 1e-6


# Bad replies

A = f"{PREFIX}kfac/3.weight/A"


def drop_a_layer(content):
    del content.array_records["arrays"][A]


def negative(array):
    array = array.copy()
    array[0, 1, 1] = -1
    return array


def asymmetric(array):
    array = array.copy()
    array[0, 1, 2] += 1
    return array


BAD_REPLIES = {
    "a layer less": (drop_a_layer, PREFIX),
    "a layer more": (set_array(f"{PREFIX}kfac/1.weight/A", [[[1.0]]]), PREFIX),
    "asymmetric": (change_array(A, asymmetric), A),
    "doubles": (change_array(A, lambda a: a.astype("float64")), A),
    "negative": (change_array(A, negative), A),
}


@pytest.mark.parametrize("case", BAD_REPLIES)
def test_a_bad_reply_is_named_and_tolerated(case, caplog):
    tamper, field = BAD_REPLIES[case]
    result = run(Watched(tamper={2: tamper}), 4)
    assert result.train_metrics_clientapp[1]["num-rejected"] == 1
    said = "\n".join(left_out(caplog))
    assert re.search(f"partition-2: node .*'{re.escape(field)}", said)
    assert same_bits(result.arrays, run(tiny_app([0, 1, 3])).arrays)


def test_what_is_no_second_moment_is_left_out_and_costs_no_layer_its_mixing(caplog):
    odd = change_array(A, lambda a: (100 * a.max() + 0 * a).astype("float32"))

    def indefinite(content):
        odd(content)
        change_array(A, lambda a: a * (1 - 0.9 * torch.eye(5).numpy()))(content)

    metrics = run(Watched(tamper={2: indefinite}), 4).train_metrics_clientapp[1]
    assert (metrics["num-rejected"], metrics["num-averaged-layers"]) == (1, 0)
    assert "left out partition-2: node" in caplog.text
    assert f"'{A}': has a negative eigenvalue" in caplog.text
    assert run().train_metrics_clientapp[1]["num-averaged-layers"] == 0


# Rounds by hand

EPOCHS, LR, DAMPING, MIXING = 2, 0.3, 0.2, 1e-3


def net():
    return seeded(
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    )


def net_app(make=net, **options):
    def client_fn(context):
        held = int(context.node_config["partition-id"])
        loader = DataLoader(tiny_data(held), batch_size=4)
        train = plain_sgd(epochs=EPOCHS, lr=LR)
        return FisherClient(make(), loader, train_fn=train, device="cpu", **options)

    return make_client_app(client_fn)


def inputs_of(model, x):
    """The inputs of the two layers, in float64."""
    a = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()
    return [a, model[1](model[0](x)).detach().double()]


def moments_of(model, x):
    return [a.mT @ a / len(a) for a in inputs_of(model, x)]


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


def trained_by_hand(model, x, y):
    inverses = [torch.linalg.inv(damped(M, DAMPING)) for M in moments_of(model, x)]
    for _ in range(EPOCHS):
        for rows in torch.arange(len(y)).split(4):
            model.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            first = torch.cat([model[0].weight.grad, model[0].bias.grad[:, None]], 1)
            slopes = [first.double(), model[2].weight.grad.double()]
            steps = zip(matrices_of(model), slopes, inverses, strict=True)
            put(model, [W - LR * G @ inverse for W, G, inverse in steps])
    return model


def rounds_by_hand(rounds):
    server, data = net(), [tiny_data(i).tensors for i in range(3)]
    shares = [len(y) / sum(len(y) for _, y in data) for _, y in data]
    for _ in range(rounds):
        start = matrices_of(server)
        models = [trained_by_hand(put(net(), start), x, y) for x, y in data]
        found = [moments_of(m, x) for m, (x, _) in zip(models, data, strict=True)]
        mixed = []
        for layer in range(2):
            Ws = [matrices_of(model)[layer] for model in models]
            Ms = [moments[layer] for moments in found]
            W = sum(p * W for p, W in zip(shares, Ws, strict=True))
            M = sum(p * M for p, M in zip(shares, Ms, strict=True))
            off = sum(
                p * (Wi - W) @ Mi for p, Wi, Mi in zip(shares, Ws, Ms, strict=True)
            )
            mixed.append(W + off @ torch.linalg.inv(damped(M, MIXING)))
        server = put(net(), mixed)
    return server


def test_rounds_are_the_loop_written_out():
    start = ArrayRecord(shared_state(net()))
    options = {"damping": DAMPING, "mixing_damping": MIXING}
    result = run(net_app(), start=start, num_rounds=3, **options)
    expected = rounds_by_hand(3).state_dict()
    for key, value in arrays_to_tensors(result.arrays).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    assert result.train_metrics_clientapp[3]["mixing-norm"] > 1e-3


def test_a_learning_rate_of_the_servers_is_taken():
    start, config = ArrayRecord(shared_state(net())), {"lr": 0.0}
    reply = tensors_of(ask(net_client(), start, TASK | config))
    assert all(torch.equal(reply[k], v) for k, v in net().state_dict().items())


def net_client(make=net, **options):
    options.setdefault("train_fn", plain_sgd(epochs=EPOCHS))
    loader = DataLoader(tiny_data(4), batch_size=4)
    return FisherClient(make(), loader, device="cpu", **options)


def test_momentum_is_the_loops():
    """Much damping makes it SGD with a smaller rate, momentum and all."""
    sgd = LocalSGD(epochs=EPOCHS, lr=0.1, momentum=0.8)
    big = 1e8
    A = moments_of(net(), tiny_data(4).tensors[0])[1]
    rate = float(0.1 * big * A.trace() / len(A))
    start = ArrayRecord(shared_state(net()))
    frozen = partial(nets.freeze, net(), "0.weight", "0.bias")
    plain = tensors_of(ask(net_client(frozen, train_fn=sgd), _only(start, "2.weight")))
    ours = tensors_of(
        ask(
            net_client(frozen, train_fn=sgd),
            _only(start, "2.weight"),
            {"job": "fedpm", "damping": big, "lr": rate},
        )
    )
    torch.testing.assert_close(
        ours["2.weight"], plain["2.weight"], rtol=1e-4, atol=1e-5
    )


def _only(record, *keys):
    return ArrayRecord({key: record[key] for key in keys})


def test_training_begins_with_the_randomness_of_fedavgs():
    """Shuffled batches are those that the job `train` would see."""
    orders = []
    for config in ({}, TASK):
        seen = []

        def loss(outputs, y, seen=seen):
            seen.append(y.clone())
            return F.cross_entropy(outputs, y)

        client = net_client(train_fn=plain_sgd(loss_fn=loss))
        client.problem.trainloader = DataLoader(tiny_data(4), 4, shuffle=True)
        ask(client, ArrayRecord(shared_state(net())), config)
        orders.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*orders, strict=True))


# Odd models: parameters without an A take plain steps, and are averaged

MODELS = {
    "a convolution of two groups": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
        ),
        randn(1, 24, 2, 3, 3),
        {"0.weight", "3.weight"},
    ),
    "batch norm": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 2, bias=False),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 3, bias=False),
        ),
        randn(2, 24, 2, 5),
        {"0.weight", "4.weight"},
    ),
    "tied": (nets.Tied, torch.randint(5, (24, 4)), {"middle.weight"}),
    "tied linear": (
        lambda: nn.Sequential(nets.TiedLinear(), nn.Linear(3, 3)),
        randn(3, 24, 3),
        {"1.weight"},
    ),
    "folded": (nets.Folded, randn(4, 24, 5, 3), {"head.weight"}),
    "frozen": (
        lambda: nets.freeze(net(), "0.weight", "0.bias"),
        randn(5, 24, 3),
        {"2.weight"},
    ),
    "a frozen bias": (
        lambda: nets.freeze(net(), "0.bias"),
        randn(6, 24, 3),
        {"0.weight", "2.weight"},
    ),
    "embedding": (nets.Sentence, torch.randint(5, (24, 4)), {"head.weight"}),
}


def odd_client(name, partition):
    make, inputs, _ = MODELS[name]
    mine = slice(8 * partition, 8 * partition + 8)
    labels = torch.arange(24).remainder(3)[mine]
    loader = DataLoader(TensorDataset(inputs[mine], labels), batch_size=4)
    train = plain_sgd(lr=0.05)
    return FisherClient(seeded(make), loader, train_fn=train, device="cpu")


@pytest.mark.parametrize("name", MODELS)
def test_odd_models(name):
    app = make_client_app(
        lambda context: odd_client(name, int(context.node_config["partition-id"]))
    )
    start = ArrayRecord(shared_state(seeded(MODELS[name][0])))
    result = run(app, start=start, num_rounds=2)
    assert result.train_metrics_clientapp[2]["num-rejected"] == 0
    assert set(result.uploads[0].payload.covariances) == MODELS[name][2]
    before = result.uploads[0].payload.params
    assert list(result.arrays) == list(start) == list(before)
    moved = arrays_to_tensors(result.arrays)
    assert all(
        not torch.equal(v, moved[k]) for k, v in arrays_to_tensors(start).items()
    )
    total = sum(u.num_examples for u in result.uploads)
    for key in moved.keys() - result.details.keys():
        mean = sum(
            u.num_examples / total * u.payload.params[key].double()
            for u in result.uploads
        )
        torch.testing.assert_close(moved[key].double(), mean, rtol=1e-6, atol=1e-6)


def test_what_has_no_second_moment_takes_plain_steps():
    def model():
        return seeded(lambda: nn.Sequential(nets.RawParameter()))

    loader = [tiny_data(4, 6).tensors]
    client = FisherClient(model(), loader, train_fn=plain_sgd(), device="cpu")
    reply = tensors_of(ask(client, ArrayRecord(shared_state(model())), TASK))
    twin = model()
    F.cross_entropy(twin(loader[0][0]), loader[0][1]).backward()
    named = dict(twin.named_parameters())
    step = {k: named[k].detach() - reply[k] for k in named}
    torch.testing.assert_close(step["0.temperature"], 0.1 * named["0.temperature"].grad)
    assert not torch.allclose(step["0.fc.weight"], 0.1 * named["0.fc.weight"].grad)


# What a client must be


@pytest.mark.parametrize(
    ("make", "train_fn", "config", "error", "reason"),
    [
        (net, lambda *args: {}, {}, ClientError, r"needs train_fn=LocalSGD"),
        (net, None, {"damping": 0.0}, ConfigurationError, "damping must be > 0"),
        (
            lambda: nets.mlp(nn.Linear(3, 3), nn.ReLU()),
            None,
            {"lr": 1e38},
            ClientError,
            "left NaN or infinity in .0.weight",
        ),
        (
            lambda: nets.mlp(nets.SquaredWeight(3, 3))[:1],
            None,
            {},
            ClientError,
            "this model has none: use FedAvg",
        ),
    ],
)
def test_what_a_client_must_be(make, train_fn, config, error, reason):
    start = ArrayRecord(shared_state(make()))
    client = net_client(make, train_fn=train_fn or plain_sgd(epochs=EPOCHS))
    with pytest.raises(error, match=reason):
        ask(client, start, TASK | config)


# Stopped, and resumed
