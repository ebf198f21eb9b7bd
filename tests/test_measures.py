"""The measures, against what they say they are, computed by hand."""

import copy
import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import rivals_path  # noqa: F401
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from measures import ClientServerBarrier, MeasuredGrid, Personalisation, combine, costs
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)
from virtual import (
    FEATURES,
    Node,
    Watched,
    ask,
    close,
    fail,
    metrics_of,
    node_of,
    quick_app,
    same_bits,
    set_metric,
    tensors_of,
    tiny_app,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.errors import ClientError, ConfigurationError, DataError
from flwr_fisher.randomness import seed_of_clients
from flwr_fisher.strategies import FedFisherOneShot, Scaffold
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors

HALF = {"personalise-fraction": 0.5, "personalise-epochs": 2}

# What is measured is a round's one request, without that for batch norms' statistics.
FEDFISHER = partial(FedFisherOneShot, norm_statistics="average")
STRATEGIES = {
    "FedAvg": FedAvg,
    "FedAdam": FedAdam,
    "ours": partial(FEDFISHER, codec="lossless"),
}


@pytest.fixture(params=STRATEGIES)
def make_strategy(request):
    made = STRATEGIES[request.param]
    return lambda **options: made(**{"fraction_evaluate": 0.0, **options})


def scores(arrays, data):
    """Mean loss and accuracy of a tiny model, the plain way."""
    model = tiny_model()
    tensors = arrays_to_tensors(arrays) if isinstance(arrays, ArrayRecord) else arrays
    model.load_state_dict(dict(tensors), strict=False)
    model.eval()
    x, y = data.tensors
    with torch.no_grad():
        output = model(x)
    right = (output.argmax(1) == y).double().mean()
    return float(F.cross_entropy(output, y)), float(right)


CLIENTS = quick_app()


class Remembers(Watched):
    """Keeps what every client uploaded, and refuses to evaluate where told to."""

    def __init__(self, silent=()):
        super().__init__(CLIENTS)
        self.uploads = {}
        self.silent = set(silent)

    def __call__(self, message, context):
        partition = int(context.node_config["partition-id"])
        kind = message.metadata.message_type
        if kind == "evaluate" and partition in self.silent:
            raise ValueError("no time")
        reply = super().__call__(message, context)
        if kind == "train":
            self.uploads[self.trained[-1]] = {
                k: v
                for k, v in tensors_of(reply).items()
                if not k.startswith("curvature")
            }
        return reply


def run(
    strategy,
    measures,
    app=None,
    clients=4,
    *,
    seed=None,
    num_rounds=2,
    held_out=0,
    **options,
):
    grid = LocalGrid(app or CLIENTS, clients, seed=seed)
    measured = MeasuredGrid(grid, held_out=held_out)
    result = strategy.start(
        measured,
        tiny_arrays(),
        num_rounds=num_rounds,
        evaluate_fn=measures(measured),
        **options,
    )
    return result.evaluate_metrics_serverapp, result


# The barrier


def test_the_barrier_is_what_the_paper_says(make_strategy):
    app, seen = Remembers(), {}

    def measures(grid):
        return combine(seen.__setitem__, ClientServerBarrier(grid))

    found, _ = run(make_strategy(), measures, app)
    assert set(found) == {1, 2}
    for server_round, metrics in found.items():
        own = [scores(app.uploads[server_round, i], tiny_data(i)) for i in range(4)]
        server = [scores(seen[server_round], tiny_data(i)) for i in range(4)]
        expected = {
            "barrier-loss": sum(s[0] - o[0] for o, s in zip(own, server, strict=True)),
            "barrier-error": sum(o[1] - s[1] for o, s in zip(own, server, strict=True)),
            "barrier-local-loss": sum(o[0] for o in own),
            "barrier-local-accuracy": sum(o[1] for o in own),
            "barrier-server-loss": sum(s[0] for s in server),
            "barrier-server-accuracy": sum(s[1] for s in server),
        }
        counts = {"barrier-clients": 4, "barrier-missing": 0}
        assert set(metrics) == {*expected, *counts}
        for key, value in expected.items():
            assert metrics[key] == pytest.approx(value / 4, rel=1e-5, abs=1e-7), key
        assert {k: metrics[k] for k in counts} == counts


@pytest.mark.parametrize(
    "strategy",
    [Scaffold, partial(FEDFISHER, aggregate="sums")],
)
def test_every_training_has_a_barrier(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # some clients keep a state
    app = tiny_client(train_fn=LocalSGD(lr=0.1, momentum=0)).as_client_app()
    found, _ = run(strategy(fraction_evaluate=0.0), ClientServerBarrier, app)
    assert found[1]["barrier-clients"] == 4


@pytest.mark.parametrize("shuffle", [False, True])
def test_one_client_has_no_barrier_to_its_own_model(shuffle):
    def client_fn(context):
        client = tiny_client(2)
        client.problem.trainloader = DataLoader(tiny_data(2, 40), 7, shuffle=shuffle)
        return client

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    found, _ = run(strategy, ClientServerBarrier, make_client_app(client_fn), 1)
    for metrics in found.values():
        assert metrics["barrier-loss"] == metrics["barrier-error"] == 0.0
        assert metrics["barrier-server-loss"] == metrics["barrier-local-loss"]


@pytest.mark.parametrize("name", ["FedAvg", "ours"])
def test_a_measured_run_gives_the_same_model(name):
    def client_fn(context):
        client = tiny_client(int(context.node_config["partition-id"]))
        client.problem.trainloader = DataLoader(
            client.problem.trainloader.dataset, 4, shuffle=True
        )
        return client

    app = make_client_app(client_fn)
    first, second = (STRATEGIES[name](fraction_evaluate=0.0) for _ in range(2))
    plain = first.start(LocalGrid(app, 4), tiny_arrays(), num_rounds=2)
    config = ConfigRecord({"lr": 0.1})
    _, measured = run(second, ClientServerBarrier, app, train_config=config)
    if name == "ours":  # Flower's writes the round into it
        assert dict(config) == {"lr": 0.1}
    same = same_bits if name == "ours" else close  # FedAvg adds in order of arrival
    assert same(plain.arrays, measured.arrays)


def test_clients_that_do_not_evaluate_are_left_out_of_both_means(caplog):
    app = Remembers(silent=[1, 3])
    with caplog.at_level(logging.WARNING, logger="flwr"):
        found, _ = run(FedAvg(fraction_evaluate=0.0), ClientServerBarrier, app)
    own = [scores(app.uploads[1, i], tiny_data(i))[0] for i in (0, 2)]
    assert found[1]["barrier-local-loss"] == pytest.approx(sum(own) / 2, rel=1e-5)
    assert [found[r]["barrier-clients"] for r in found] == [2, 2]
    assert [found[r]["barrier-missing"] for r in found] == [2, 2]
    assert "2 of 4 clients failed to evaluate" in caplog.text
    assert "ValueError: no time" in caplog.text


@pytest.mark.parametrize(
    "tamper",
    [
        fail,
        set_metric("local-loss", float("nan")),
        set_metric("local-loss", [1.0]),
        set_metric("local-loss", None),
        set_metric("num-examples", -1),
    ],
    ids=["failed", "nan", "list", "none", "not aggregated"],
)
def test_clients_that_do_not_score_their_model_are_left_out(tamper):
    app = Remembers()
    app.tamper = {2: tamper}
    strategy = FEDFISHER(fraction_evaluate=0.0)
    found, _ = run(strategy, ClientServerBarrier, app, num_rounds=1)
    assert found[1]["barrier-clients"] == 3
    assert found[1]["barrier-missing"] == 1
    assert 2 not in {partition for _, partition in app.evaluated}


@pytest.mark.parametrize(
    ("measure", "held_out", "text"),
    [
        (ClientServerBarrier, 0, "No client-server barrier in round 2: none of 4"),
        (Personalisation, 2, "No personalisation in round 1: none of 2 held-out"),
    ],
)
def test_nobody_there_costs_a_warning_and_not_the_run(measure, held_out, text, caplog):
    app, strategy = Remembers(silent=range(4)), FedAvg(fraction_evaluate=0.0)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        found, result = run(strategy, measure, app, held_out=held_out)
    assert found == {}
    assert set(result.train_metrics_clientapp) == {1, 2}
    assert text in caplog.text


def test_a_strategy_that_got_another_grid_is_told(caplog):
    grid = LocalGrid(tiny_app(), 2)
    barrier = ClientServerBarrier(MeasuredGrid(grid))
    with caplog.at_level(logging.WARNING, logger="flwr"):
        FedAvg(fraction_evaluate=0.0).start(
            grid, tiny_arrays(), num_rounds=1, evaluate_fn=barrier
        )
    assert "Start the strategy with the MeasuredGrid" in caplog.text


def test_every_says_which_rounds_are_measured():
    app = Watched(CLIENTS)
    found, _ = run(
        FEDFISHER(fraction_train=0.5, fraction_evaluate=0.0),
        lambda grid: ClientServerBarrier(grid, every=2),
        app,
        6,
        num_rounds=4,
    )
    assert set(found) == {2, 4}
    assert all(of["barrier-clients"] == 3 for of in found.values())  # of that round
    assert all(of["barrier-missing"] == 0 for of in found.values())
    assert sorted(app.evaluated) == sorted(t for t in app.trained if t[0] in found)
    asked = {c["server-round"] for c in app.configs if "report-local" in c}
    assert asked == {2, 4}


def test_without_classes_there_is_a_loss_and_no_error():
    def client_fn(context):
        generator = torch.Generator().manual_seed(context.node_id)
        data = TensorDataset(
            torch.randn(8, 2, generator=generator),
            torch.randn(8, 3, generator=generator),
        )
        loader = DataLoader(data, batch_size=4)
        loss = F.mse_loss
        train = LocalSGD(loss_fn=loss)
        return FisherClient(
            nn.Linear(2, 3), loader, train_fn=train, loss_fn=loss,
            likelihood="gaussian", device="cpu",
        )  # fmt: skip

    measured = MeasuredGrid(LocalGrid(make_client_app(client_fn), 4), held_out=2)
    evaluate_fn = combine(ClientServerBarrier(measured), Personalisation(measured))
    arrays = ArrayRecord(nn.Linear(2, 3).state_dict())
    result = FEDFISHER(fraction_evaluate=0.0).start(
        measured, arrays, evaluate_fn=evaluate_fn
    )
    keys = set(result.evaluate_metrics_serverapp[1])
    assert {"barrier-loss", "personalised-loss", "zero-shot-loss"} < keys
    assert not any("accuracy" in key or "error" in key for key in keys)


# Personalisation


def by_hand(arrays, partition, config):
    """A client's reply, from its data's halves, in a plain loop."""
    from flwr_fisher.randomness import derive_seed, seeded

    data = tiny_data(partition)
    n = len(data)
    generator = torch.Generator()
    seed = int(config.get("seed", 0))
    generator.manual_seed(derive_seed("personalise", seed, partition))
    order = torch.randperm(n, generator=generator)
    test = TensorDataset(*data[order[n // 2 :]])
    zero_shot = scores(arrays, test)
    count = round(config["personalise-fraction"] * n)
    x, y = data[order[:count]]
    model = tiny_model()
    model.load_state_dict(arrays_to_tensors(arrays), strict=False)
    optimizer = torch.optim.SGD(model.parameters(), config.get("lr", 0.1), 0.9)
    model.train()
    with seeded(derive_seed(seed, int(config.get("server-round", 0)), partition)):
        for _ in range(config["personalise-epochs"]):
            torch.empty((), dtype=torch.int64).random_()  # a DataLoader's base seed
            for batch in torch.randperm(count).split(4):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    tuned = scores(model.state_dict(), test)
    return {
        "num-examples": len(test),
        "zero-shot-loss": zero_shot[0],
        "zero-shot-accuracy": zero_shot[1],
        "personalised-loss": tuned[0],
        "personalised-accuracy": tuned[1],
    }


@pytest.mark.parametrize(
    "config",
    [
        HALF,
        {"personalise-fraction": 0.25, "personalise-epochs": 3, "lr": 0.5},
        HALF | {"server-round": 4},
    ],
)
@pytest.mark.parametrize("partition", [2, 4])
def test_a_client_personalises_as_by_hand(config, partition):
    arrays = tiny_arrays(3)
    reply = ask(
        tiny_client(partition), arrays, config, partition=partition, kind="evaluate"
    )
    expected = by_hand(arrays, partition, config)
    found = metrics_of(reply)
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4), key
    assert expected["personalised-loss"] != expected["zero-shot-loss"]


def test_the_measure_is_the_plain_mean_over_held_out_clients(make_strategy):
    app, seen = Remembers(), {}

    def measures(grid):
        return combine(seen.__setitem__, Personalisation(grid, epochs=2, every=2))

    found, _ = run(make_strategy(), measures, app, 6, held_out=2)
    assert set(found) == {0, 2}
    held_out = {partition for _, partition in app.evaluated}
    assert len(held_out) == 2
    assert held_out.isdisjoint({partition for _, partition in app.trained})
    for number, metrics in found.items():
        config = HALF | {"server-round": number, "seed": seed_of_clients(0)}
        rows = [by_hand(seen[number], partition, config) for partition in held_out]
        assert metrics["personalised-clients"] == 2
        assert metrics["personalised-missing"] == 0
        for key in rows[0].keys() - {"num-examples"}:
            mean = sum(row[key] for row in rows) / 2
            assert metrics[key] == pytest.approx(mean, rel=1e-4), key


def test_fractions_share_the_test_half_and_have_names_of_their_own():
    def measures(grid):
        return combine(
            Personalisation(grid, fraction=0.25, lr=0.5, name="quarter"),
            Personalisation(grid, fraction=0.5, lr=0.5, name="half"),
        )

    found, _ = run(FedAvg(fraction_evaluate=0.0), measures, held_out=2, num_rounds=1)
    metrics = found[1]
    assert metrics["quarter-loss"] != metrics["half-loss"]
    assert {"zero-shot-loss", "quarter-accuracy", "half-clients"} < set(metrics)


def test_the_halves_do_not_overlap_and_stay_the_same():
    """With features that tell who an example is."""
    x = torch.arange(20.0).unsqueeze(1).repeat(1, FEATURES)
    seen = []

    class Notes(nn.Linear):
        def forward(self, inputs):
            seen.append(inputs[:, 0].tolist())
            return super().forward(inputs * 0)

    def halves(fraction, server_round, seed=0):
        seen.clear()
        data = TensorDataset(x, torch.zeros(20, dtype=torch.long))
        model = Notes(FEATURES, 2)
        client = FisherClient(model, DataLoader(data, 20), device="cpu")
        config = {
            "personalise-fraction": fraction,
            "server-round": server_round,
            "seed": seed,
        }
        arrays = ArrayRecord(model.state_dict())
        ask(client, arrays, config, kind="evaluate")
        return [set(batch) for batch in seen]

    before, tuned, after = halves(0.5, 1)
    assert before == after
    assert len(before) == len(tuned) == 10
    assert before.isdisjoint(tuned)
    again, quarter, _ = halves(0.25, 7)
    assert again == before
    assert len(quarter) == 5
    assert quarter < tuned
    assert halves(0.5, 1, seed=3)[0] != before


def test_the_clients_model_is_the_servers_again_afterwards():
    client = tiny_client(4)
    arrays = tiny_arrays(2)
    client.problem.model.eval()
    ask(client, arrays, HALF, kind="evaluate")
    assert not client.problem.model.training
    sent = arrays_to_tensors(arrays)
    assert all(
        torch.equal(v, sent[k]) for k, v in client.problem.model.state_dict().items()
    )


def test_a_loader_whose_sampler_gives_batches_can_be_split():
    """As those of tasks do."""
    data = tiny_data(4)
    batches = torch.utils.data.BatchSampler(range(len(data)), 4, drop_last=False)
    client = tiny_client(4)
    plain = metrics_of(ask(client, config=HALF, partition=4, kind="evaluate"))
    for loader in (
        DataLoader(data, sampler=batches, batch_size=None),
        DataLoader(data, batch_sampler=batches),
    ):
        client.problem.trainloader = loader
        reply = ask(client, config=HALF, partition=4, kind="evaluate")
        assert metrics_of(reply) == plain


@pytest.mark.parametrize("kind", [list, np.array])
def test_only_the_positions_of_a_clients_sampler_are_split(kind):
    """As where each client samples its own part of one data set."""
    own = kind([9, 3, 12, 7, 1, 14])
    client = tiny_client(4)
    client.problem.trainloader = DataLoader(
        Subset(tiny_data(4), own), 3, sampler=SubsetRandomSampler(range(6))
    )
    wanted = metrics_of(ask(client, config=HALF, partition=4, kind="evaluate"))
    client.problem.trainloader = DataLoader(
        tiny_data(4), 3, sampler=SubsetRandomSampler(own)
    )
    found = metrics_of(ask(client, config=HALF, partition=4, kind="evaluate"))
    assert found == wanted
    assert found["num-examples"] == 3


def test_a_rest_that_the_loader_drops_is_dropped():
    """Of batch norm's batches, one example would be too few."""
    client = tiny_client(1)  # 10 examples, so that 5 are for tuning, in batches of 4
    with pytest.raises(ValueError, match="last batch is of one example"):
        ask(client, config=HALF, kind="evaluate")
    client.problem.trainloader = DataLoader(tiny_data(1), 4, drop_last=True)
    metrics = metrics_of(ask(client, config=HALF, kind="evaluate"))
    assert metrics["personalised-loss"] != metrics["zero-shot-loss"]
    client.problem.trainloader = DataLoader(tiny_data(1), 8, drop_last=True)
    metrics = metrics_of(ask(client, config=HALF, kind="evaluate"))
    assert metrics["personalised-loss"] != metrics["zero-shot-loss"]


class Endless(IterableDataset[Any]):
    def __iter__(self):
        yield from zip(*tiny_data(0).tensors, strict=True)


def of(loader):
    return FisherClient(tiny_model(), loader, device="cpu")


CANNOT = [
    (tiny_client(), HALF | {"personalise-fraction": 0.6}, ConfigurationError, "0.5"),
    (tiny_client(), HALF | {"personalise-fraction": 0.0}, ConfigurationError, "0.5"),
    (tiny_client(), HALF | {"personalise-epochs": 0}, ConfigurationError, "-epochs"),
    (tiny_client(), {"evaluate-on": "test"}, ConfigurationError, "evaluate-on"),
    (of(DataLoader(tiny_data(0, 3))), HALF, DataError, "partition 0 has 3 examples"),
    (tiny_client(train_fn=lambda *_: {}), HALF, ClientError, "a field 'epochs'"),
    (of([tiny_data(0).tensors]), HALF, ClientError, "data of type list"),
    (
        of(DataLoader(Endless(), batch_size=4)),
        HALF,
        ClientError,
        "data of type Endless",
    ),
    (
        of(DataLoader([tiny_data(0).tensors], batch_size=None)),
        HALF,
        ClientError,
        "with a batch_size",
    ),
]


@pytest.mark.parametrize(("client", "config", "error", "text"), CANNOT)
def test_what_a_client_cannot_do_it_says(client, config, error, text):
    with pytest.raises(error, match=text):
        ask(client, config=config, kind="evaluate")


def test_clients_with_too_little_are_counted(caplog):
    def client_fn(context):
        partition = int(context.node_config["partition-id"])
        client = tiny_client(partition)
        few = DataLoader(tiny_data(partition, 3), batch_size=4)
        client.problem.trainloader = (
            few if partition % 2 else client.problem.trainloader
        )
        return client

    app = make_client_app(client_fn)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        found, _ = run(
            FedAvg(fraction_evaluate=0.0), Personalisation, app, 12, held_out=10
        )
    metrics = found[1]
    assert metrics["personalised-clients"] + metrics["personalised-missing"] == 10
    assert metrics["personalised-missing"] >= 4
    assert "has 3 examples" in caplog.text
    assert "partition-1: DataError" in caplog.text
    assert "…" in caplog.text


@pytest.mark.parametrize(
    ("held_out", "options", "culprit"),
    [
        *((1, {"fraction": value}, "fraction") for value in (0.0, 0.51)),
        (1, {"epochs": 0}, "epochs"),
        (1, {"every": 0}, "every"),
        (1, {"lr": -1.0}, "lr"),
        *((wrong, {}, "held_out") for wrong in (-1, 1.0, -0.1)),
        (0, {}, "held_out=20"),
    ],
)
def test_options_are_checked(held_out, options, culprit):
    def make():
        grid = MeasuredGrid(LocalGrid(tiny_app(), 2), held_out=held_out)
        return Personalisation(grid, **options)

    with pytest.raises(ConfigurationError, match=culprit):
        make()


@pytest.mark.parametrize(
    "measure", [ClientServerBarrier, Personalisation, lambda grid: costs(grid, 1)]
)
def test_a_plain_grid_is_told_apart(measure):
    with pytest.raises(ConfigurationError, match=r"measured = MeasuredGrid\(grid\)"):
        measure(LocalGrid(ClientApp(), 2))


# The grid


def held_out(seed=0, clients=10, ids=None, **o):
    grid = LocalGrid(tiny_app(), clients, seed=ids)
    measured = MeasuredGrid(grid, seed=seed, **o)
    shown = {grid.nodes[node] for node in measured.get_node_ids()}
    hidden = [grid.nodes[node] for node in measured.held_out()]
    assert shown == set(range(clients)) - set(hidden)
    assert hidden == sorted(hidden)
    return hidden


def test_who_is_held_out_depends_on_the_seed_and_not_on_node_ids(caplog):
    chosen = held_out(held_out=3)
    assert len(chosen) == 3
    assert all(held_out(held_out=3, ids=i) == chosen for i in range(5))
    assert held_out(held_out=0.3) == chosen
    assert len({tuple(held_out(seed, held_out=3)) for seed in range(8)}) > 4
    assert held_out(held_out=0) == []
    with caplog.at_level(logging.WARNING, logger="flwr"):
        assert len(held_out(held_out=12)) == 10
    assert "All 10 connected nodes are held out" in caplog.text
    mute = MeasuredGrid(LocalGrid(ClientApp(), 4), held_out=1)  # knows no query
    assert len(list(mute.get_node_ids())) == 3


def test_the_choice_is_made_before_the_first_training():
    """Nodes that come late take part, and no one who trained is held out later."""
    grid = LocalGrid(tiny_app(), 8, seed=0)
    nodes = sorted(grid.nodes)
    connected = nodes[:4]
    grid.get_node_ids = lambda: list(connected)
    measured = MeasuredGrid(grid, held_out=0.5)
    assert len(measured.held_out()) == 2
    connected += nodes[4:6]
    hidden = measured.held_out()
    assert len(hidden) == 3
    content = RecordDict({"arrays": tiny_arrays(), "config": ConfigRecord()})
    first = next(iter(measured.get_node_ids()))
    measured.send_and_receive([Message(content, first, "train")])
    connected += nodes[6:]
    assert measured.held_out() == hidden
    assert set(measured.get_node_ids()) == set(nodes) - set(hidden)
    connected.remove(hidden[0])
    assert measured.held_out() == hidden[1:]


class Whole(LocalGrid):
    """A grid that notes what is done to it."""

    def set_run(self, run):
        self.was_set = run

    def get_nodes(self):
        return [Node(node) for node in self.nodes]


def test_everything_else_is_the_grids():
    grid = Whole(tiny_app(), 3)
    measured = MeasuredGrid(grid, held_out=1)
    assert measured.run == grid.run
    measured.set_run(grid.run)
    assert grid.was_set == grid.run
    shown = {node.node_id for node in measured.get_nodes()}
    assert shown == set(measured.get_node_ids())
    assert len(shown) == 2
    message = measured.create_message(RecordDict(), "query", next(iter(shown)), "9")
    assert message.metadata.group_id == "9"
    (reply,) = measured.send_and_receive([message])
    assert set(metrics_of(reply)) == {"partition-id"}
    ids = list(
        measured.push_messages([Message(RecordDict(), node_of(grid, 0), "query")])
    )
    assert len(list(measured.pull_messages(ids))) == 1


@pytest.mark.parametrize("kind", ["train", "train.named"])
def test_messages_are_not_changed(kind):
    grid = LocalGrid(Watched(CLIENTS), 2)
    measured = MeasuredGrid(grid)
    ClientServerBarrier(measured)
    config = ConfigRecord({"server-round": 1})
    content = RecordDict({"arrays": tiny_arrays(), "config": config})
    message = Message(content, node_of(grid, 0), kind)
    before = copy.deepcopy(config)
    for send in (measured.push_messages, measured.send_and_receive):
        list(send([message]))
        assert message.content is content
        assert content.config_records["config"] is config
        assert config == before
        assert message.metadata.message_id


def test_a_message_without_config_gets_one():
    class Asks(ClientApp):
        asked: Any = None

        def __call__(self, message, context):
            self.asked = {k: dict(v) for k, v in message.content.config_records.items()}
            return Message(RecordDict(), reply_to=message)

    app = Asks()
    measured = MeasuredGrid(LocalGrid(app, 1))
    ClientServerBarrier(measured)
    (node,) = measured.get_node_ids()
    for content, expected in [
        (RecordDict(), {"config": {"fisher.report-local": True}}),
        (
            RecordDict({"a": ConfigRecord({"x": 1}), "b": ConfigRecord()}),
            {"a": {"x": 1, "fisher.report-local": True}, "b": {}},
        ),
    ]:
        measured.send_and_receive([Message(content, node, "train")])
        assert app.asked == expected


def test_nothing_is_asked_where_nothing_is_measured():
    app = Watched(CLIENTS)
    measured = MeasuredGrid(LocalGrid(app, 3))
    FedAvg(fraction_evaluate=0.0).start(measured, tiny_arrays(), num_rounds=1)
    assert all(set(config) == {"server-round"} for config in app.configs)


# The client


@pytest.mark.parametrize("structure", [None, "kfac"])
def test_reporting_changes_nothing_else_in_the_reply(structure):
    config = {} if structure is None else {"structure": structure}
    config["expectation"] = "sampled"
    client = tiny_client(3)
    client.problem.trainloader = DataLoader(tiny_data(3), 4, shuffle=True)
    plain, told = (
        ask(client, config=config | {"report-local": wanted})
        for wanted in (False, True)
    )
    assert "local-loss" not in metrics_of(plain)
    assert same_bits(
        *(next(iter(r.content.array_records.values())) for r in (plain, told))
    )
    assert metrics_of(plain).items() < metrics_of(told).items()


# Stopped, and resumed


def test_a_resumed_run_measures_the_same(tmp_path):
    def measures(grid):
        return combine(ClientServerBarrier(grid), Personalisation(grid, every=2))

    def start(app, where=None, **options):
        strategy = FEDFISHER(fraction_evaluate=0.0)
        options |= {"checkpoint_dir": where, "held_out": 2, "num_rounds": 2}
        return run(strategy, measures, app, 6, **options)[0]

    killed = Watched(CLIENTS)

    def kill(content):
        if len(killed.trained) > 7:
            raise KeyboardInterrupt

    killed.tamper = dict.fromkeys(range(6), kill)
    with pytest.raises(KeyboardInterrupt):
        start(killed, tmp_path)
    resumed = Watched(CLIENTS)
    assert start(resumed, tmp_path, resume=True) == start(Watched(CLIENTS))
    assert len(resumed.trained) == 1


def test_a_run_stopped_before_its_measure_is_measured_when_resumed(tmp_path):
    def broken(grid):
        def evaluate_fn(server_round, arrays):
            if server_round == 1:
                raise KeyboardInterrupt

        barrier = ClientServerBarrier(grid)
        return combine(lambda r, a: barrier(r, a) if r == 0 else None, evaluate_fn)

    options = {"num_rounds": 1}
    expected, _ = run(FEDFISHER(), ClientServerBarrier, **options)
    options["checkpoint_dir"] = tmp_path
    with pytest.raises(KeyboardInterrupt):
        run(FEDFISHER(), broken, **options)
    app = Watched(CLIENTS)
    found, _ = run(FEDFISHER(), ClientServerBarrier, app, resume=True, **options)
    assert app.trained == []
    assert found == expected
    assert found[1]["barrier-clients"] == 4


# Together


def test_combine_joins_and_tells_of_names_used_twice(caplog):
    def one(server_round, arrays):
        return MetricRecord({"a": 1, "b": 2.0})

    def two(server_round, arrays):
        return MetricRecord({"b": 3.0, "round": server_round})

    assert combine()(1, tiny_arrays()) is None
    assert combine(None, lambda *_: None)(1, tiny_arrays()) is None
    with caplog.at_level(logging.WARNING, logger="flwr"):
        found = combine(one, None, one)(1, tiny_arrays())
        assert found == MetricRecord({"a": 1, "b": 2.0})
        assert not caplog.text
        found = combine(one, two)(5, tiny_arrays())
    assert found == MetricRecord({"a": 1, "b": 3.0, "round": 5})
    assert "two functions return b" in caplog.text
