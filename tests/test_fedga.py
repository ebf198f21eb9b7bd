"""FedGA as a strategy: against a loop written out, and what it owes users."""

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from torch import nn
from torch.utils.data import DataLoader
from virtual import (
    LIFTED,
    Watched,
    ask,
    change_array,
    metrics_of,
    start,
    tensors_of,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.errors import ClientError
from flwr_fisher.params import shared_state, trainable_names, weighted_mean
from flwr_fisher.randomness import seed_of_clients
from flwr_fisher.server.exchange import ServerState, Upload
from flwr_fisher.strategies import FedGA
from flwr_fisher.wire import Additive, arrays_to_tensors


def run(app=None, clients=3, **own):
    return start(FedGA(**{"fraction_evaluate": 0.0, "beta": 0.3, **own}), app, clients)


# Against a loop


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def net_app():
    def client_fn(context):
        held = int(context.node_config["partition-id"])
        loader = DataLoader(tiny_data(held), batch_size=4)
        train = LocalSGD(epochs=2, lr=0.1, momentum=0.0)
        return FisherClient(net(), loader, train_fn=train, device="cpu")

    return make_client_app(client_fn)


def slopes(params, x, y):
    model = net()
    model.load_state_dict(params)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
    return dict(zip(names, found, strict=True))


def by_hand(rounds, beta):
    theta = {k: v.clone() for k, v in net().state_dict().items()}
    data = [tiny_data(i).tensors for i in range(3)]
    total = sum(len(y) for _, y in data)
    for _ in range(rounds):
        own = [slopes(theta, x, y) for x, y in data]
        mean = {
            k: sum(len(y) / total * g[k] for (_, y), g in zip(data, own, strict=True))
            for k in theta
        }
        new = {k: torch.zeros_like(v) for k, v in theta.items()}
        for (x, y), g in zip(data, own, strict=True):
            local = {k: v - beta * (mean[k] - g[k]) for k, v in theta.items()}
            for _ in range(2):
                for at in range(0, len(y), 4):
                    step = slopes(local, x[at : at + 4], y[at : at + 4])
                    local = {k: v - 0.1 * step[k] for k, v in local.items()}
            new = {k: v + len(y) / total * local[k] for k, v in new.items()}
        theta = new
    return theta


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_rounds_are_the_loop_written_out(beta):
    begin, strategy = (
        ArrayRecord(shared_state(net())),
        FedGA(beta=beta, fraction_evaluate=0.0),
    )
    result = start(strategy, net_app(), 3, begin, num_rounds=3)
    expected = by_hand(3, beta)
    for key, value in arrays_to_tensors(result.arrays).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
    if beta:
        plain = by_hand(3, 0.0)
        assert any((plain[k] - v).abs().max() > 1e-3 for k, v in expected.items())


def test_beta_zero_is_fedavg_also_for_clients_that_shuffle():
    def client_fn(context):
        held = int(context.node_config["partition-id"])
        client = tiny_client(held)
        client.problem.trainloader = DataLoader(
            tiny_data(held), batch_size=4, shuffle=True
        )
        return client

    result = run(make_client_app(client_fn), beta=0.0, policy=LIFTED)
    mine = [
        client_fn(Context(1, 1, {"partition-id": i}, RecordDict(), {}))
        for i in range(3)
    ]
    config = {"server-round": 1, "seed": seed_of_clients(0)}
    replies = [
        tensors_of(ask(client, config=config, partition=i))
        for i, client in enumerate(mine)
    ]
    mean = weighted_mean(replies, [8, 10, 12])
    got = arrays_to_tensors(result.arrays)
    assert all(torch.equal(got[key], value) for key, value in mean.items())


# Replies


@pytest.mark.parametrize("exchange", [1, 2])
def test_a_bad_reply_in_either_exchange_is_named_and_tolerated(exchange, caplog):
    app = Watched()
    bad = change_array(
        "gradient/0.weight" if exchange == 1 else "0.weight", lambda a: a * float("nan")
    )

    def tamper(content):
        if app.trained.count((1, 2)) == exchange:
            bad(content)

    app.tamper = {2: tamper}
    metrics = run(app, 4).train_metrics_clientapp[1]
    assert metrics["num-gradients"] == (3 if exchange == 1 else 4)
    assert metrics["num-replies"] == (4 if exchange == 1 else 3)
    assert caplog.text.count("left out partition-2") == 1
    assert "0.weight'" in caplog.text


def test_all_gradients_of_a_secure_sum_are_counted():
    first, _ = FedGA().exchanges(1)
    summed = Additive({"gradient": {"w": torch.ones(1)}})
    upload = Upload(0, "a", 8, summed, MetricRecord(), num_bytes=0, members=[1, 2, 3])
    step = first.take(ServerState({"w": torch.ones(1)}), [upload])
    assert step.metrics["num-gradients"] == 3


def test_a_mean_gradient_that_does_not_come_is_named():
    with pytest.raises(ClientError, match="the server sent no 'gradient'"):
        ask(tiny_client(), config={"job": "displaced"})


def test_any_loop_will_do():
    def mine(model, *args):
        return None

    sent = {
        f"server/gradient/{key}": value
        for key, value in tiny_arrays().items()
        if key in trainable_names(tiny_model())
    }
    arrays = ArrayRecord({**tiny_arrays(), **sent})
    reply = ask(tiny_client(train_fn=mine), arrays, {"job": "displaced"})
    assert metrics_of(reply)["num-examples"] == 8
