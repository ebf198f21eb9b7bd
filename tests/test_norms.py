"""Running statistics of batch norms: taken anew in one pass, alone and in a round."""

import copy
import logging
import re
from functools import partial

import pytest
import torch
from clocked import Behaviour, ClockedGrid
from flwr.app import ArrayRecord, MetricRecord
from oracles import randn
from test_pairings import Plain
from test_secure_sums import secure_app
from torch import nn
from torch.utils.data import DataLoader
from virtual import (
    LIFTED,
    Watched,
    app_by_partition,
    ask,
    change_array,
    left_out,
    quick_app,
    same_bits,
    set_array,
    start,
    tensors_of,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import FisherClient, LocalSGD, identify
from flwr_fisher.client.jobs import train as train_job
from flwr_fisher.errors import ConfigurationError, DataError, ParamsError
from flwr_fisher.merge import refresh_norms
from flwr_fisher.merge.batch_norms import moved_norms, norm_shifts, with_shifts
from flwr_fisher.params import shared_state
from flwr_fisher.secure import SecureSums, SecureSumsMod
from flwr_fisher.server.privacy import Privacy
from flwr_fisher.strategies import (
    FAGH,
    TCT,
    FedAvg,
    FedFish,
    FedFisherOneShot,
    Policy,
    Waiting,
)
from flwr_fisher.wire import arrays_to_tensors, tensors_to_arrays

MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"
STATISTICS = (MEAN, VARIANCE)


# One pass


class Twice(nn.Module):
    """One norm, used twice, under two names."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.same = self.norm

    def forward(self, x):
        return self.same(self.fc(self.norm(x)).relu())


def between(norm, *shape):
    """A norm between layers, with dropout, that another norm follows."""
    return nn.Sequential(
        nn.Linear(shape[-1], shape[-1]),
        norm,
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.LazyLinear(3),
        nn.BatchNorm1d(3),
    ), randn(2, 10, *shape)


NETS = {
    "1d": lambda: between(nn.BatchNorm1d(4), 4),
    "2d": lambda: between(nn.BatchNorm2d(2), 2, 3, 4),
    "cumulative": lambda: between(nn.BatchNorm1d(4, momentum=None), 4),
    "slow": lambda: between(nn.BatchNorm1d(4, momentum=0.01), 4),
    "plain": lambda: between(nn.BatchNorm1d(4, affine=False), 4),
    "twice": lambda: (Twice(), randn(3, 10, 3)),
    "alone": lambda: (nn.BatchNorm1d(3), randn(4, 10, 3) + 1e3),
}


def net(name):
    """A net in float64 that has seen a batch, and its data, in batches of four."""
    model, x = NETS[name]()
    model.double()
    with torch.no_grad():
        model(x.double()[:7] * 2 + 1)
    return model, list(x.double().split(4))


def norms(model):
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }


def exact(model, batches):
    """Mean and variance of all inputs of each norm, by hooks and `torch.cat`."""
    model = copy.deepcopy(model).eval()
    seen = {norm: [] for norm in norms(model).values()}
    for norm in seen:
        norm.train()
        norm.register_forward_pre_hook(lambda norm, x: seen[norm].append(x[0]))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    found = {}
    for name, norm in norms(model).items():
        prefix = f"{name}." if name else ""
        flat = torch.cat([x.transpose(0, 1).flatten(1) for x in seen[norm]], dim=1)
        found[prefix + MEAN] = flat.mean(1)
        found[prefix + VARIANCE] = flat.var(1, correction=0)
    return found


def all_of(model):
    """What must stay: tensors but for statistics, modes, hooks."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modules = dict(model.named_modules())
    modes = {name: module.training for name, module in modules.items()}
    hooks = {name: len(module._forward_pre_hooks) for name, module in modules.items()}
    return state, (modes, hooks, torch.get_rng_state().tolist())


def assert_stays(model, before, but=()):
    (state, rest), (then, others) = all_of(model), before
    assert rest == others
    assert {k for k in state if not torch.equal(state[k], then[k])} == set(but)


def assert_refreshed(model, expected):
    state = dict(model.named_buffers(remove_duplicate=False))
    for name, value in expected.items():
        assert torch.allclose(state[name], value, 1e-9, 1e-12), name


@pytest.mark.parametrize("name", NETS)
def test_statistics_are_those_of_one_pass(name):
    model, batches = net(name)
    norms(model).popitem()[1].eval()  # as a client may keep one
    expected, before = exact(model, batches), all_of(model)
    refresh_norms(model, batches)
    assert_refreshed(model, expected)
    assert_stays(model, before, but=expected.keys())


def test_float32_loses_nothing_to_a_large_mean():
    model, (x, *_) = nn.BatchNorm1d(3), [randn(1, 400, 3) + 3e3]
    model(x)
    refresh_norms(model, x.split(50))
    assert torch.allclose(model.running_var, x.double().var(0, correction=0).float())


def test_a_batch_of_one_example_is_left_out():
    model, batches = net("1d")
    expected = exact(model, batches)
    refresh_norms(model, [batches[0], randn(9, 1, 4).double(), *batches[1:]])
    assert_refreshed(model, expected)


def test_batches_of_one_example_are_refused_and_change_nothing():
    model, batches = net("1d")
    before = all_of(model)
    with pytest.raises(DataError, match=r"no batch that.*two examples or more"):
        refresh_norms(model, torch.cat(batches).split(1))
    assert_stays(model, before)


def test_what_is_frozen_or_is_no_batch_norm_is_left_alone():
    def unread():
        raise AssertionError("it was read")
        yield

    frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    frozen[1].requires_grad_(False)
    others = nn.Sequential(
        nn.InstanceNorm1d(3, track_running_stats=True),
        nn.BatchNorm1d(3, track_running_stats=False),
    )
    for model in (frozen, others):
        before = all_of(model)
        refresh_norms(model, unread())
        assert_stays(model, before)
    both = nn.Sequential(*frozen, nn.BatchNorm1d(3))
    x, before = randn(5, 6, 3), all_of(both)
    refresh_norms(both, [x])
    assert_stays(both, before, but=[f"2.{name}" for name in STATISTICS])
    both[1].eval()
    assert torch.allclose(both[2].running_mean, both[1](both[0](x)).mean(0), atol=1e-6)


def test_a_norm_that_is_not_used_keeps_its_statistics():
    class Spare(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    model = Spare(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    before = all_of(model)
    refresh_norms(model, [randn(1, 6, 3)])
    assert_stays(model, before, but=[f"0.{name}" for name in STATISTICS])


def test_it_costs_one_forward_pass():
    model, batches = net("1d")
    passes = []
    model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    refresh_norms(model, batches)
    assert passes == [False] * len(batches)


# Shifts


def test_shifts_of_parts_are_averaged_to_those_of_the_whole():
    model = nn.BatchNorm1d(3).double()
    model(randn(1, 9, 3).double() * 3)
    x = randn(2, 12, 3).double() + 5
    parts = [norm_shifts(model, [part]) for part in (x[:3], x[3:])]
    mean = {k: 0.25 * parts[0][k] + 0.75 * parts[1][k] for k in parts[0]}
    new = with_shifts(dict(model.named_buffers()), mean)
    assert torch.allclose(new[MEAN], x.mean(0))
    assert torch.allclose(new[VARIANCE], x.var(0, correction=0))


@pytest.mark.parametrize(
    ("mean", "square", "message"),
    [
        (0.0, -1.01, "variance below 0"),
        (10.0, 50.0, "variance below 0"),
        (0.0, float("nan"), "NaN or infinity"),
        (float("inf"), 0.0, "NaN or infinity"),
    ],
)
def test_shifts_that_no_inputs_have_are_refused(mean, square, message):
    state = {MEAN: torch.zeros(2), VARIANCE: torch.ones(2)}
    shifts = {MEAN: torch.tensor([0, mean]), VARIANCE: torch.tensor([0, square])}
    with pytest.raises(ParamsError, match=message):
        with_shifts(state, shifts)


def test_inputs_that_are_all_the_same_have_no_variance():
    model = nn.BatchNorm1d(1)
    refresh_norms(model, [torch.full((7, 1), 1e4 / 3)])
    assert 0 <= model.running_var.item() < 1e-3


def test_only_what_a_training_has_moved_is_asked_for():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model[1].eval()
    model(randn(1, 5, 2))
    after = {k: v.clone() for k, v in model.state_dict().items()}
    assert moved_norms(before, after) == ["0."]
    # A sum under masks rounds statistics, which is no training.
    rounded = after | {f"1.{name}": after[f"1.{name}"] + 1e-6 for name in STATISTICS}
    assert moved_norms(before, rounded) == ["0."]
    uncounted = [
        {k: v for k, v in s.items() if COUNT not in k} for s in (before, after)
    ]
    assert moved_norms(*uncounted) == ["0."]
    assert moved_norms(before, after, in_eval=True) == []
    stepped = before | {"1.bias": torch.ones(2)}
    assert moved_norms(before, stepped, in_eval=True) == ["1."]


# A round

AVERAGE, REFRESH = {"norm_statistics": "average"}, {"norm_statistics": "refresh"}
OPTIONS = {"fraction_evaluate": 0.0, "policy": LIFTED, "refine": None}
SUMS = {"structure": "diagonal", "aggregate": "sums"}
STRATEGIES = {
    "kfac": FedFisherOneShot,
    "diagonal sums": partial(FedFisherOneShot, **SUMS),
    "kfac sums": partial(FedFisherOneShot, aggregate="sums"),
    "fedavg": FedAvg,
    "tct, stage 1": partial(TCT, stage1_rounds=1, num_features=20, local_steps=5),
    "fagh": partial(FAGH, lr=0.1),
}


def requests(app):
    """Whom a refresh asked."""
    jobs = zip(app.configs, app.trained, strict=True)
    return [p for config, (_, p) in jobs if config.get("job") == "norm-statistics"]


def pooled(arrays, clients=3, weights=None):
    """The statistics of a model over all clients' data, as they are batched."""
    model = tiny_model().double()
    model.load_state_dict(of_model(arrays))
    own = [exact(model, inputs_of(client)) for client in range(clients)]
    counts = weights or [8.0 + 2 * client for client in range(clients)]
    share = torch.tensor(counts).double() / sum(counts)
    mean = sum(s * each[f"1.{MEAN}"] for s, each in zip(share, own, strict=True))
    square = sum(
        s * (each[f"1.{VARIANCE}"] + each[f"1.{MEAN}"].square())
        for s, each in zip(share, own, strict=True)
    )
    return {f"1.{MEAN}": mean, f"1.{VARIANCE}": square - mean.square()}


def of_model(arrays):
    """What is no other state, as TCT's features are."""
    return {k: v for k, v in arrays_to_tensors(arrays).items() if "/" not in k}


def inputs_of(client):
    return [x.double() for x, _ in DataLoader(tiny_data(client), batch_size=4)]


def assert_refresh_of(averaged, refreshed, tolerance=1e-5, **options):
    """All is the merge's but for statistics, which are those of one pass."""
    expected = pooled(averaged.arrays, **options)
    a, b = (of_model(result.arrays) for result in (averaged, refreshed))
    for name in a:
        wanted = expected.get(name, a[name])
        apart = 0 if name not in expected else tolerance
        assert torch.allclose(b[name].double(), wanted.double(), apart, apart), name
    assert not torch.allclose(a[f"1.{VARIANCE}"], b[f"1.{VARIANCE}"], 1e-2)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_round_ends_with_the_statistics_of_its_model(name, caplog):
    make = partial(STRATEGIES[name], **OPTIONS)
    num_rounds = 3 if "tct" in name else 1
    averaged = start(make(**AVERAGE), num_rounds=num_rounds)
    app, strategy = Watched(), make(**REFRESH)
    with caplog.at_level(logging.INFO, "flwr"):
        refreshed = start(strategy, app, num_rounds=num_rounds)
    assert_refresh_of(averaged, refreshed)
    assert sorted(requests(app)) == [0, 1, 2]
    assert "norm statistics: asking 3 nodes" in caplog.text
    *_, after = caplog.text.split("norm statistics: asking 3 nodes")
    assert "norm statistics: 3 of 3 replies" in after
    assert "_train: " not in after.split("[ROUND")[0]  # nobody trains
    assert type(refreshed.details) is type(averaged.details)
    clients = [[u.client for u in r.uploads] for r in (averaged, refreshed)]
    assert clients[0] == clients[1]
    if num_rounds > 1:  # of the last round, and of what was made of other statistics
        return
    more = refreshed.upload_bytes - averaged.upload_bytes
    assert 8 * 4 < more < 2000  # two arrays and a metric, with their names
    metrics = [r.train_metrics_clientapp[1] for r in (averaged, refreshed)]
    assert dict(metrics[1]) == {**metrics[0], "num-norms-refreshed": 1}


@pytest.mark.parametrize("name", ["kfac sums", "fedavg"])
def test_it_is_a_secure_sum_where_all_is(name, tmp_path):
    made = []
    for place, own in enumerate((AVERAGE, REFRESH)):
        app = secure_app(tmp_path / f"{place}")
        make = partial(STRATEGIES[name], secure=SecureSums(), **OPTIONS)
        made.append(start(make(**own), app, clients=3, num_rounds=1))
    assert_refresh_of(*made, clients=3)
    assert len(made[1].uploads) == 1
    assert made[1].upload_bytes > made[0].upload_bytes


@pytest.mark.parametrize("secure", [None, SecureSums()])
def test_only_norms_that_are_refreshed_are_counted(secure, tmp_path):
    """A module of one's own may have statistics of a batch norm's names."""
    own = nn.Linear(3, 3)
    own.register_buffer(MEAN, torch.zeros(3))
    own.register_buffer(VARIANCE, torch.ones(3))
    model = nn.Sequential(own, nn.BatchNorm1d(3), nn.Linear(3, 3))

    def make(partition):
        loader = DataLoader(tiny_data(partition), 4)
        return FisherClient(copy.deepcopy(model), loader, device="cpu")

    app = app_by_partition(make, mods=[SecureSumsMod(state_dir=tmp_path)])
    options = {"arrays": ArrayRecord(shared_state(model)), "num_rounds": 1}
    result = start(FedAvg(**OPTIONS, **REFRESH, secure=secure), app, **options)
    assert result.train_metrics_clientapp[1]["num-norms-refreshed"] == 1


def test_two_rounds_begin_with_the_refreshed_model():
    first = start(FedAvg(**OPTIONS, **REFRESH))
    second = start(FedAvg(**OPTIONS, **REFRESH), num_rounds=2)
    again = start(FedAvg(**OPTIONS, **AVERAGE), num_rounds=2)
    assert second.train_metrics_clientapp[2] != again.train_metrics_clientapp[2]
    assert second.train_metrics_clientapp[1] == first.train_metrics_clientapp[1]


def test_own_aggregation_of_metrics_hears_of_trainings_alone():
    heard = []

    def mine(contents, key):
        heard.append([content["metrics"]["train_loss"] for content in contents])
        return MetricRecord({"worst": max(heard[-1])})

    made = FedAvg(**OPTIONS, **REFRESH, train_metrics_aggr_fn=mine)
    metrics = start(made, num_rounds=2).train_metrics_clientapp
    assert [metrics[n]["worst"] for n in (1, 2)] == [max(each) for each in heard]
    assert metrics[2]["num-norms-refreshed"] == 1


def in_eval_mode(model, loader, device, config):
    """A loop that keeps batch norms in eval mode."""
    model.train()
    model[1].eval()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return {}


def test_norms_that_clients_keep_in_eval_mode_are_left_alone():
    app = Watched(app_by_partition(lambda i: tiny_client(i, train_fn=in_eval_mode)))
    state = arrays_to_tensors(start(FedFisherOneShot(**OPTIONS), app).arrays)
    assert torch.allclose(state[f"1.{MEAN}"], torch.zeros(4), atol=1e-6)
    assert not requests(app)


def with_frozen_norm():
    """A norm that is a part of what is frozen, one that is trained, one without."""
    norms = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)
    norms[0].requires_grad_(False)
    return nn.Sequential(*norms, nn.Linear(3, 3))


def test_where_no_training_moves_statistics_frozen_norms_keep_theirs():
    def make(partition):
        loader = DataLoader(tiny_data(partition), batch_size=4)
        return FisherClient(with_frozen_norm(), loader, device="cpu")

    arrays, app = shared_state(with_frozen_norm()), app_by_partition(make)
    assert f"0.{MEAN}" in arrays
    assert "0.weight" not in arrays
    strategy = FAGH(**OPTIONS, **REFRESH)
    after = arrays_to_tensors(start(strategy, app, arrays=ArrayRecord(arrays)).arrays)
    for name in (MEAN, VARIANCE):
        assert torch.equal(after[f"0.{name}"], arrays[f"0.{name}"])
        assert not torch.equal(after[f"1.{name}"], arrays[f"1.{name}"])
        assert not torch.equal(after[f"2.{name}"], arrays[f"2.{name}"])


def test_nothing_more_is_asked_without_batch_norm_or_by_other_strategies():
    for make in (FedAvg, FedFish):
        app = Watched()
        start(make(**OPTIONS), app)
        assert not requests(app)

    def without(partition):
        loader = DataLoader(tiny_data(partition), batch_size=4)
        return FisherClient(nn.Linear(3, 3), loader, device="cpu")

    app, arrays = Watched(app_by_partition(without)), shared_state(nn.Linear(3, 3))
    start(FedFisherOneShot(**OPTIONS), app, arrays=ArrayRecord(arrays))
    assert not requests(app)
    assert len(app.trained) == 3


def test_noise_of_clients_is_not_gone_round():
    privacy = Privacy(clipping_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ConfigurationError, match="without noise"):
        FedAvg(privacy=privacy, secure=SecureSums(), **REFRESH)


# Who is there


def warned(caplog):
    return [line for line in caplog.messages if line.startswith("norm statistics")]


def test_where_nobody_is_left_the_mean_stays_and_a_warning_says_so(clock, caplog):
    leave = Behaviour(connected=lambda now: now < 50)
    grid = ClockedGrid(quick_app(), dict.fromkeys(range(3), leave), clock, 3)
    strategy = FedFisherOneShot(**OPTIONS, waiting=Waiting(window=100.0))
    result = strategy.start(grid, tiny_arrays())
    assert same_bits(
        result.arrays, start(FedFisherOneShot(**OPTIONS, **AVERAGE)).arrays
    )
    *_, kept = warned(caplog)
    assert "the model stays that of the step before" in kept
    assert (
        "partition-0, partition-1, partition-2: no reply, it is no longer connected"
        in kept
    )


def test_an_app_that_only_trains_is_asked_once(caplog):
    def plain(**own):
        app = Plain(curvature=True)
        app.query()(identify)
        return app.trained, start(FedFisherOneShot(**OPTIONS, **own), app)

    trained, result = plain()
    assert sorted(trained) == [0, 1, 2]
    *_, kept = warned(caplog)
    assert same_bits(result.arrays, plain(**AVERAGE)[1].arrays)
    alike = (
        "partition-0, partition-1, partition-2: no reply, its ClientApp can only train"
    )
    assert alike in kept


# Who is hostile


def of_refresh(tamper):
    """Spoil what a client tells of norms, and leave its training alone."""

    def spoil(content):
        if any(key.startswith("norms/") for key in content["arrays"]):
            tamper(content)

    return spoil


SPOILED = {
    "variance": (set_array(f"norms/1.{VARIANCE}", [-1.02] * 4), "a variance below 0"),
    "nan": (set_array(f"norms/1.{MEAN}", [float("nan")] * 4), "NaN"),
    "other": (set_array("norms/0.bias", [0.0] * 4), "unexpected key"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_who_tells_what_cannot_be_is_left_out_by_name(how, caplog):
    tamper, reason = SPOILED[how]
    app = Watched(tamper={2: of_refresh(float32(tamper))})
    refreshed = start(FedFisherOneShot(**OPTIONS), app)
    averaged = start(FedFisherOneShot(**OPTIONS, **AVERAGE))
    assert_refresh_of(averaged, refreshed, clients=2)
    (line,) = left_out(caplog)
    assert "partition-2" in line
    assert reason in line


def float32(tamper):
    """Numbers of an attack in the dtype of statistics."""

    def spoil(content):
        tamper(content)
        for key in list(content["arrays"]):
            change_array(key, lambda value: value.astype("float32"))(content)

    return spoil


def test_a_huge_shift_counts_as_much_as_is_usual(caplog):
    def huge(content):
        change_array(f"norms/1.{MEAN}", lambda x: 0 * x + 1e6)(content)
        change_array(f"norms/1.{VARIANCE}", lambda x: 0 * x + 1e12)(content)

    options = {"fraction_evaluate": 0.0, "policy": Policy.strict()}
    honest = start(FedFisherOneShot(**options), clients=4)
    app = Watched(tamper={3: of_refresh(huge)})
    spoiled = start(FedFisherOneShot(**options), app, clients=4)
    a, b = (arrays_to_tensors(result.arrays) for result in (honest, spoiled))
    assert ((a[f"1.{MEAN}"] - b[f"1.{MEAN}"]).abs() < a[f"1.{VARIANCE}"].sqrt()).all()
    assert (b[f"1.{VARIANCE}"] / a[f"1.{VARIANCE}"] < 10).all()
    assert (b[f"1.{VARIANCE}"] / a[f"1.{VARIANCE}"] > 0.1).all()
    assert re.search("limited partition-3: .*norms x ", caplog.text)


# Before a client's Fisher


def lagging(**options):
    """A client whose statistics have hardly moved in its few steps."""
    client = tiny_client(2, **options)
    client.problem.model[1].momentum = 0.01
    return client


def far_off():
    """A start whose statistics are of other weights."""
    state = arrays_to_tensors(tiny_arrays())
    state[f"1.{MEAN}"] -= 60.0
    return tensors_to_arrays(state)


FISHER = {"structure": "diagonal"}


@pytest.mark.parametrize("asks", [FISHER, {"job": "fedfish"}])
def test_a_client_whose_statistics_lag_takes_them_anew(asks, caplog):
    trained = tensors_of(ask(lagging(), far_off()))
    assert trained[f"1.{MEAN}"].mean() < -50
    assert "lag" not in caplog.text
    refreshed = tensors_of(ask(lagging(), far_off(), asks))
    assert "running statistics lag behind the trained model" in caplog.text
    model = tiny_model().double()
    model.load_state_dict(trained)
    expected = exact(model, inputs_of(2))
    for name in trained:
        wanted = expected.get(name, trained[name]).float()
        assert torch.allclose(refreshed[name].float(), wanted, 1e-4, 1e-4), name


def test_an_ordinary_client_is_not_touched(caplog, monkeypatch):
    shuffled = DataLoader(tiny_data(2), batch_size=4, shuffle=True)
    client = tiny_client(2, train_fn=LocalSGD(epochs=3, lr=0.1))
    client.problem.trainloader = shuffled
    torch.manual_seed(5)
    own = tensors_of(ask(client, config=FISHER))
    monkeypatch.setattr(train_job, "catch_up_norms", lambda problem: None)
    torch.manual_seed(5)
    other = tensors_of(ask(client, config=FISHER))
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert "lag" not in caplog.text
