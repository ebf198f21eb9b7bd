"""SCAFFOLD as a strategy: its optimum, its clients' memory, and what it owes users."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import virtual
from clocked import Behaviour, ClockedGrid
from flwr.app import ArrayRecord
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from virtual import (
    Watched,
    app_by_partition,
    ask,
    close,
    plane,
    same_bits,
    tiny_client,
    tiny_data,
)
from virtual import start as run

from flwr_fisher.client import FisherClient, LocalSGD
from flwr_fisher.errors import ClientError, ConfigurationError, RoundError
from flwr_fisher.params import shared_state
from flwr_fisher.server.membership import Membership
from flwr_fisher.server.round import ExchangeRun
from flwr_fisher.strategies import Policy, Scaffold, Waiting
from flwr_fisher.wire import arrays_to_tensors

pytestmark = pytest.mark.usefixtures("no_momentum")
plain_sgd = partial(LocalSGD, momentum=0.0)


def state_files():
    return sorted(Path("~/.cache/flwr-fisher/state/state").expanduser().rglob("*.*"))


def scaffold(**options):
    return Scaffold(**{"fraction_evaluate": 0.0, **options})


# Identical clients are one, and one is SGD


def by_sgd(rounds, epochs, lr):
    model = virtual.tiny_model()
    data = DataLoader(tiny_data(1), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(rounds * epochs):
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def test_identical_clients_are_sgd():
    train = plain_sgd(lr=0.1, epochs=2)
    app = app_by_partition(lambda _: tiny_client(1, train_fn=train))
    result = run(scaffold(), app, 4, num_rounds=3)
    assert close(result.arrays, ArrayRecord(shared_state(by_sgd(3, 2, 0.1))), 1e-5)


# Unlike clients on a quadratic

# Client i has n_i examples (x, y) of its own line; the mean over examples has its
# optimum elsewhere than the mean of the clients' optima.
QUADRATIC = 4


def holding(partition):
    generator = torch.Generator().manual_seed(partition)
    n = 4 + 3 * partition
    x = torch.randn(n, 2, generator=generator) * torch.tensor([1.0 + partition, 1.0])
    return x, x @ torch.tensor([[3.0 * partition - 4], [(-1.0) ** partition * 3]])


def optimum():
    every = [holding(partition) for partition in range(QUADRATIC)]
    x, y = (torch.cat(part) for part in zip(*every, strict=True))
    return torch.linalg.lstsq(x.double(), y.double()).solution.flatten()


def line_app(lr=0.02, epochs=20, **options):
    def make(partition):
        train = plain_sgd(epochs=epochs, lr=lr, loss_fn=F.mse_loss)
        batches = [holding(partition)]
        return FisherClient(plane(), batches, train_fn=train, device="cpu", **options)

    return app_by_partition(make)


def on_lines(strategy, rounds, app=None):
    start = ArrayRecord(shared_state(plane()))
    result = run(strategy, app or line_app(), QUADRATIC, start, num_rounds=rounds)
    return arrays_to_tensors(result.arrays)["weight"].double().flatten()


def test_it_reaches_the_optimum():
    ours = on_lines(scaffold(fraction_train=0.5), 45, line_app(epochs=10))
    torch.testing.assert_close(ours, optimum(), rtol=0, atol=1e-3)


def steep(partition):
    """One client's loss is ten times as steep as the others' are."""
    generator = torch.Generator().manual_seed(partition)
    x = torch.randn(30, 2, generator=generator) * torch.tensor([1 + partition / 2, 1])
    x = x * (10**0.5 if partition == 3 else 1)
    return x, x @ torch.tensor([[3.0 * partition - 4], [(-1.0) ** partition * 3]])


def test_a_steep_client_moves_no_optimum(monkeypatch):
    """What the policy cuts of its change, it does not keep either."""
    monkeypatch.setattr(sys.modules[__name__], "holding", steep)
    monkeypatch.setattr(sys.modules[__name__], "QUADRATIC", 5)
    strict = scaffold(policy=Policy.strict())
    found = on_lines(strict, 42, line_app(lr=0.01, epochs=8))
    torch.testing.assert_close(found, optimum(), rtol=0, atol=1e-3)


class Changing(LocalSGD):
    """Misses some rounds after the first; its examples become ten times as many."""

    def __call__(self, *args, **options):
        size = sum(len(y) for _, y in args[1].loader)
        turn = args[3]["server-round"]
        if turn > 1 and (turn + size) % 4 == 0:
            raise ValueError("away")
        grown = 10 if turn > 4 and size == 7 else 1
        return {**super().__call__(*args, **options), "num-examples": size * grown}


def test_a_client_keeps_the_weight_of_its_first_round(monkeypatch, caplog):
    """Its state counts with it: with another one, the optimum moved for good."""
    own, policy = {"lr": 0.03, "epochs": 10}, Policy.strict()
    whole = on_lines(scaffold(policy=policy), 20, line_app(**own))
    assert "keeps the weight" not in caplog.text
    changing = partial(Changing, momentum=0.0)
    monkeypatch.setattr(sys.modules[__name__], "plain_sgd", changing)
    found = on_lines(scaffold(policy=policy), 28, line_app(**own))
    torch.testing.assert_close(found, whole, rtol=0, atol=0.02)
    assert caplog.text.count("partition-1 keeps the weight of its first step, 7") == 1


# The control variate


def own_controls():
    """Each client's newest control variate, from its disk."""
    newest = {p.parent.name: p for p in state_files()}
    return {
        int(client.removeprefix("partition-")): load_file(path)
        for client, path in newest.items()
    }


def assert_mean_of(control, clients):
    """Those who never took part count with nothing, and the others' mean weight."""
    found = own_controls()
    weights = {i: 8 + 2 * i for i in found}
    total = sum(weights.values()) * clients / len(found)
    for key, value in control.items():
        mean = sum(weights[i] * c[key].double() for i, c in found.items()) / total
        torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6)


def test_c_stays_the_mean_of_the_clients_own():
    counts = []
    for rounds in range(1, 8):
        where = Path("~/checkpoints").expanduser()
        strategy = scaffold(fraction_train=0.4, seed=3)
        result = run(
            strategy, None, 5, num_rounds=rounds, checkpoint_dir=where, resume=True
        )
        counts.append(len(own_controls()))
        assert_mean_of(result.details, 5)
    assert counts[0] == 2
    assert counts[-1] == 5


def test_c_stays_their_mean_where_replies_are_left_out():
    """A client whose reply was not used goes on from where the server heard of it."""
    app = Watched()

    def sometimes(content):
        if app.trained.count((2, 1)) == 1 and app.trained[-1] == (2, 1):
            raise ValueError("lost on the way")

    app.tamper = {1: sometimes}
    result = run(scaffold(), app, 3, num_rounds=3)
    assert result.train_metrics_clientapp[2]["num-rejected"] == 1
    assert result.train_metrics_clientapp[3]["num-lost-states"] == 0
    assert_mean_of(result.details, 3)


def test_a_lost_state_starts_from_zero_is_logged_and_counted(caplog):
    where = Path("~/checkpoints").expanduser()
    run(scaffold(), num_rounds=2, checkpoint_dir=where)
    assert "from zero" not in caplog.text
    gone, damaged, _ = (p for p in state_files() if "000002" in p.name)
    gone.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-3])
    result = run(scaffold(), num_rounds=3, checkpoint_dir=where, resume=True)
    assert result.train_metrics_clientapp[2]["num-lost-states"] == 0
    assert result.train_metrics_clientapp[3]["num-lost-states"] == 2
    assert caplog.text.count("starting with a new one") == 2
    assert f"Ignoring {damaged}, which cannot be read" in caplog.text
    assert "with a new one: partition-0, partition-1" in caplog.text


# Stopped, and resumed


def test_a_round_that_failed_is_repeated_from_where_it_began(tmp_path):
    clients, app = 4, Watched()

    def start(app, where=None, **options):
        own = {"num_rounds": 4, "checkpoint_dir": where, **options}
        return run(scaffold(fraction_train=0.75), app, clients, **own)

    def late(content):
        if app.trained[-1][0] == 3:
            raise ValueError("too late")

    app.tamper = dict.fromkeys(range(clients), late)
    for resume in (False, True):
        with pytest.raises(RoundError):
            start(app, tmp_path / "run", resume=resume)
    resumed, whole = start(Watched(), tmp_path / "run", resume=True), start(Watched())
    assert same_bits(resumed.arrays, whole.arrays)
    assert resumed.train_metrics_clientapp == whole.train_metrics_clientapp
    assert all(torch.equal(whole.details[k], v) for k, v in resumed.details.items())


# What a client must be


@pytest.mark.parametrize(
    ("train_fn", "config", "reason"),
    [
        (lambda *args: {}, {}, r"needs train_fn=LocalSGD"),
        (LocalSGD(momentum=0.9), {}, r"LocalSGD\(momentum=0\), not 0.9"),
        (LocalSGD(optimizer=torch.optim.Adam), {}, r"LocalSGD\(optimizer=None\)"),
        (LocalSGD(momentum=0.0), {"lr": 0.0}, r"lr must be > 0 and finite, got 0"),
    ],
)
def test_what_a_client_must_be(train_fn, config, reason):
    with pytest.raises((ClientError, ConfigurationError), match=reason):
        ask(tiny_client(0, train_fn=train_fn), config={"job": "scaffold"} | config)


# Who has taken part


def test_a_membership_survives_its_tensors_with_large_node_ids():
    big, begins = 2**64 - 5, Membership.new()
    known = replace(begins, steps=2, last_steps={big: 1, 0: 2}, weights={big: 2, 0: 3})
    assert Membership.from_tensors(known.to_tensors()) == known
    assert "client-weights" not in known.sent()


# In a collection window


def killed(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("dies", ["step", "close"])
def test_after_a_crash_as_many_are_connected(dies, clock, tmp_path, monkeypatch):
    def control(**kept):
        every = {p: Behaviour(seconds=lambda times, p=p: 1.0 + p) for p in range(5)}
        grid = ClockedGrid(virtual.tiny_app(), every, clock, 5)
        strategy = scaffold(waiting=Waiting(window=900, enough_replies=2))
        result = strategy.start(grid, virtual.tiny_arrays(), 1, **kept)
        return result.train_metrics_clientapp[1]["control-norm"]

    with monkeypatch.context() as patch:
        patch.setattr(ExchangeRun, dies, killed)
        with pytest.raises(KeyboardInterrupt):
            control(checkpoint_dir=tmp_path)
    assert control(checkpoint_dir=tmp_path, resume=True) == pytest.approx(control())
