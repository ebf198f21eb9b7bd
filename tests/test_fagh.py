"""FAGH as a strategy: against dense Hessians, and what could go wrong with a row."""

import re
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from oracles import cut, flat, randn, relative, rng, seeded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import (
    Watched,
    app_by_partition,
    ask,
    close,
    same_bits,
    start,
    tiny_arrays,
    tiny_client,
    tiny_model,
)

from flwr_fisher.client import FisherClient
from flwr_fisher.curvature import gradient_and_hvp
from flwr_fisher.curvature.second_order import random_probe
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    ParamsError,
    UnknownNameError,
)
from flwr_fisher.merge import refresh_norms
from flwr_fisher.params import shared_state, weighted_mean
from flwr_fisher.randomness import derive_seed
from flwr_fisher.rounds import fagh_step
from flwr_fisher.strategies import FAGH
from flwr_fisher.wire import arrays_to_tensors
from flwr_fisher.wire.options import SERVER

PROBES = ("first", "random", "momentum", "none")


def net():
    def layers():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    return seeded(layers).double()


def regression():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 3))).double()


def data(partition, black=False):
    n = 5 + 2 * partition
    x = randn(partition, n, 4 if black else 3, dtype=torch.float64)
    if black:
        x[:, 0] = 0
    return TensorDataset(x, torch.randint(3, (n,), generator=rng(partition)))


def app_of(model=net, black=False, loss_fn=F.cross_entropy):
    def make(partition):
        loader = DataLoader(data(partition, black), batch_size=4)
        return FisherClient(model(), loader, loss_fn=loss_fn, device="cpu")

    return app_by_partition(make)


def fagh(**options):
    return FAGH(**{"fraction_evaluate": 0.0, "lr": 0.3, "rho": 0.5, **options})


def run(strategy, app=None, clients=3, arrays=None, **options):
    begin = ArrayRecord(shared_state(net())) if arrays is None else arrays
    return start(strategy, app or app_of(), clients, begin, **options)


# A dense twin

TWIN = net()


def dense_loss(vector, like, held):
    x, y = held.tensors
    return F.cross_entropy(torch.func.functional_call(TWIN, cut(vector, like), (x,)), y)


def dense_rounds(cohorts, probe, betas, lr=0.3, rho=0.5):
    """Return parameters after the rounds, and how often the row was of no use."""
    like = {k: v.detach() for k, v in net().named_parameters()}
    theta = flat(like)
    G, V, c = torch.zeros_like(theta), torch.zeros_like(theta), 0.0
    fallbacks, direction, slope = 0, None, torch.func.grad(dense_loss)
    for t, cohort in enumerate(cohorts, start=1):
        sizes = torch.tensor([float(len(data(i))) for i in cohort]).double()
        g, H = torch.zeros_like(theta), torch.zeros(len(theta), len(theta)).double()
        for i, share in zip(cohort, sizes / sizes.sum(), strict=True):
            about = like, data(i)
            g += share * slope(theta, *about)
            H += share * torch.func.jacrev(slope)(theta, *about)
        if probe == "first":
            u = torch.eye(len(theta)).double()[0]
        elif probe == "random" or direction is None:
            u = flat(random_probe(like, derive_seed(0, "probe")))
        else:
            u = direction / direction.norm()
        v = H @ u
        G, V = betas[0] * G + (1 - betas[0]) * g, betas[1] * V + (1 - betas[1]) * v
        c = betas[1] * c + (1 - betas[1]) * float(u @ v)
        m, r = G / (1 - betas[0] ** t), V / (1 - betas[1] ** t)
        bent = c / (1 - betas[1] ** t)
        useful = bent > 1e-6 * r.norm() and probe != "none"
        fallbacks += probe != "none" and not useful
        dense = torch.outer(r, r) / bent if useful else torch.zeros_like(H)
        direction = torch.linalg.solve(dense + rho * torch.eye(len(theta)).double(), m)
        theta = theta - lr * direction
    return cut(theta, like), fallbacks


@pytest.mark.parametrize("probe", PROBES)
def test_rounds_are_the_dense_computation(probe):
    app = Watched(app_of())
    result = run(fagh(probe=probe, fraction_train=0.5), app, 6, num_rounds=3)
    cohorts = [[p for n, p in app.trained if n == t] for t in (1, 2, 3)]
    assert {len(cohort) for cohort in cohorts} == {3}
    assert len({tuple(sorted(cohort)) for cohort in cohorts}) > 1
    betas = (0.9, 0.0 if probe == "momentum" else 0.99)
    want, fallbacks = dense_rounds(cohorts, probe, betas)
    got = arrays_to_tensors(result.arrays)
    assert relative(flat(got), flat(want)) < 1e-10
    last = result.train_metrics_clientapp[3]
    assert last["fallbacks"] == fallbacks
    assert last["gradient-norm"] > 0
    told = [result.train_metrics_clientapp[t]["fell-back"] for t in (1, 2, 3)]
    assert sum(told) == fallbacks
    start = flat({k: v.detach() for k, v in net().named_parameters()})
    assert relative(flat(got), start) > 1e-2


def test_the_first_coordinate_is_the_clients_whatever_the_servers_order():
    start = shared_state(net())
    turned = ArrayRecord({k: start[k] for k in reversed(start)})
    got = arrays_to_tensors(run(fagh(), arrays=turned).arrays)
    want = arrays_to_tensors(run(fagh()).arrays)
    assert list(got) == list(turned)
    assert all(torch.equal(got[k], want[k]) for k in want)


# Probes


def test_a_random_probe_has_length_one_and_no_order():
    like = {"a": torch.zeros(3, 5), "b": torch.zeros(2).double(), "c": torch.zeros(())}
    probe = random_probe(like, 3)
    turned = random_probe({k: like[k] for k in reversed(like)}, 3)
    assert float(flat(probe).norm()) == pytest.approx(1)
    assert list(turned) == ["c", "b", "a"]
    for name, value in probe.items():
        assert torch.equal(value, turned[name])
        assert (value.shape, value.dtype) == (like[name].shape, like[name].dtype)
    assert relative(flat(random_probe(like, 4)), flat(probe)) > 0.1


class Ear(ClientApp):
    """Notes what else the server sent, by round."""

    def __init__(self):
        super().__init__()
        self.app = app_of()
        self.heard = {}
        self.asked = {}

    def __call__(self, message, context):
        if message.metadata.message_type == "train":
            config = message.content.config_records["config"]
            tensors = arrays_to_tensors(message.content.array_records["arrays"])
            n = int(config["server-round"])
            self.asked[n] = config["fisher.probe"]
            self.heard[n] = {
                k.removeprefix(f"{SERVER}probe/"): v
                for k, v in tensors.items()
                if k.startswith(SERVER)
            }
        return self.app(message, context)


def test_the_momentum_probe_is_the_last_direction_at_length_one():
    ear, directions = Ear(), {}
    for n in (1, 2):
        directions[n] = run(fagh(probe="momentum"), num_rounds=n).details
    run(fagh(probe="momentum"), ear, num_rounds=3)
    assert ear.asked == {1: "random", 2: "momentum", 3: "momentum"}
    assert ear.heard[1] == {}
    for n, direction in directions.items():
        sent = ear.heard[n + 1]
        assert list(sent) == list(direction)
        want = flat(direction) / flat(direction).norm()
        torch.testing.assert_close(flat(sent), want)


# A row of no use


@pytest.mark.parametrize("probe", ["first", "none"])
def test_a_black_corner_costs_the_row_and_nothing_else(probe):
    start = ArrayRecord(shared_state(regression()))
    app = app_of(regression, black=True)
    result = run(fagh(probe=probe), app, 3, start, num_rounds=3)
    history = result.train_metrics_clientapp
    counted = [0, 0, 0] if probe == "none" else [1, 2, 3]
    assert [history[n]["fallbacks"] for n in (1, 2, 3)] == counted
    assert {history[n]["fell-back"] for n in (1, 2, 3)} == {int(probe == "first")}
    assert all(history[n]["curvature"] == 0 for n in (1, 2, 3))
    assert all(v.isfinite().all() for v in arrays_to_tensors(result.arrays).values())
    bare = run(fagh(probe="none"), app, 3, start, num_rounds=3)
    assert same_bits(result.arrays, bare.arrays)


def test_nothing_to_descend_is_no_error():
    strategy = fagh(probe="momentum")
    start = ArrayRecord(shared_state(net()))
    result = run(
        strategy,
        app_of(loss_fn=lambda outputs, labels: outputs.sum() * 0),
        3,
        start,
        num_rounds=3,
    )
    assert close(result.arrays, start, 0)
    assert result.train_metrics_clientapp[3]["fallbacks"] == 3
    assert result.train_metrics_clientapp[3]["gradient-norm"] == 0


# In train mode


@pytest.mark.parametrize("probe", ["first", "none"])
def test_train_mode_steps_by_the_batches_statistics_and_measures_the_models(probe):
    got = arrays_to_tensors(start(fagh(probe=probe, train_mode=True)).arrays)
    sizes, slopes, rows = [], [], []
    for partition in range(3):
        problem = tiny_client(partition).problem
        found = gradient_and_hvp(problem.model, problem.trainloader, train_mode=True)
        slopes.append(found[0])
        rows.append({k: v * (probe == "first") for k, v in found[1].items()})
        sizes.append(float(len(problem.trainloader.dataset)))
    slope, row = (weighted_mean(each, sizes) for each in (slopes, rows))
    before = arrays_to_tensors(tiny_arrays())
    want = fagh_step(before, slope, row, flat(row)[0], None, lr=0.3, rho=0.5).params
    trained = {k: v for k, v in want.items() if k in slope}
    assert relative(flat({k: got[k] for k in trained}), flat(trained)) < 1e-5
    model = tiny_model()
    model.load_state_dict(got)
    refresh_norms(model, chain(*(tiny_client(p).problem.trainloader for p in range(3))))
    for name in ("1.running_mean", "1.running_var"):
        measured = model.get_buffer(name)
        assert relative(got[name], measured) < 1e-5
        assert relative(before[name], measured) > 0.1


def test_train_mode_has_no_statistics_to_average():
    with pytest.raises(ConfigurationError, match="needs norm_statistics='refresh'"):
        FAGH(train_mode=True, norm_statistics="average")


# Arguments, and a server that asks for what cannot be


def test_an_unknown_probe_lists_the_known():
    known = "unknown probe 'second'; known: first, random, momentum, none"
    with pytest.raises(UnknownNameError, match=known):
        FAGH(probe="second")
    with pytest.raises(UnknownNameError, match="unknown probe 'second'"):
        ask(tiny_client(), config={"job": "probe", "probe": "second"})


def with_probe(change):
    start = arrays_to_tensors(tiny_arrays())
    trained = {k: v for k, v in start.items() if "running" not in k and "num" not in k}
    probe = change({k: torch.ones_like(v) for k, v in trained.items()})
    return ArrayRecord({**start, **{f"{SERVER}probe/{k}": v for k, v in probe.items()}})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda probe: {}, "the server sent no 'probe'"),
        (lambda probe: dict([*probe.items()][1:]), "lacks the keys ['0.weight']"),
        (lambda probe: probe | {"9": torch.ones(4)}, "the unexpected keys ['9']"),
        (lambda probe: probe | {"3.bias": torch.ones(4)}, "'3.bias' has shape (4,)"),
    ],
)
def test_a_probe_that_does_not_fit_is_an_error_that_says_so(change, text):
    config = {"job": "probe", "probe": "momentum"}
    with pytest.raises((ClientError, ParamsError), match=re.escape(text)):
        ask(tiny_client(), with_probe(change), config)
    ask(tiny_client(), with_probe(lambda probe: probe), config)
