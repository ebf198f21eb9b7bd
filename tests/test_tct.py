"""TCT as a strategy: two stages, their optimum, and what survives a crash."""

import logging
from dataclasses import fields
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import virtual
from flwr.app import ArrayRecord, MetricRecord
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import (
    CLASSES,
    Remembering,
    Watched,
    app_by_partition,
    change_array,
    close,
    drop_array,
    left_out,
    same_bits,
    set_array,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import FisherClient, LocalSGD
from flwr_fisher.client.jobs import tct_features as client_tangent
from flwr_fisher.client.jobs.tct_features import read_examples
from flwr_fisher.errors import CheckpointError, ConfigurationError, RoundError
from flwr_fisher.params import shared_state
from flwr_fisher.randomness import derive_seed
from flwr_fisher.strategies import TCT, FedAvg, Policy, Regression, Scaffold
from flwr_fisher.tangent import (
    TangentFeatures,
    TCTModel,
    feature_sums,
    gram_spectrum,
    standardisation,
    tct_average,
    tct_control,
    tct_update,
)
from flwr_fisher.tangent.spectrum import largest_gram_eigenvalue
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors
from flwr_fisher.wire.arrays import description_text
from flwr_fisher.wire.tct_upload import about_features

pytestmark = pytest.mark.usefixtures("no_momentum")
CLIENTS, STAGE1, ROUNDS = 3, 2, 5


def tct(**options):
    own = {"stage1_rounds": STAGE1, "num_features": 20}
    own |= {"local_steps": 30, "fraction_evaluate": 0.0}
    names = {field.name for field in fields(Regression)} & options.keys()
    regression = Regression(**{name: options.pop(name) for name in names})
    return TCT(regression=regression, **{**own, **options})


def client_app(change=None, anew=False, **options):
    def make(partition):
        client = tiny_client(partition, **options)
        return (change and change(partition, client)) or client

    app = app_by_partition(make)
    return app if change or options or anew else Remembering(app, virtual.tiny)


def run(strategy, app=None, clients=CLIENTS, num_rounds=ROUNDS, **options):
    grid = LocalGrid(client_app() if app is None else app, clients)
    return strategy.start(grid, tiny_arrays(), num_rounds=num_rounds, **options)


@cache
def plain(num_rounds=ROUNDS, **options):
    """What good clients give, without anything special."""
    return run(tct(**options), num_rounds=num_rounds)


class Problem:
    """The regression as the clients have it, made by hand from a run's network."""

    def __init__(self, arrays, clients=range(CLIENTS), standardised=None, **options):
        network = tiny_model()
        tensors = arrays_to_tensors(arrays)
        own = {k: v for k, v in tensors.items() if not k.startswith("tct/")}
        network.load_state_dict(own)
        num_features = options.get("num_features", 20)
        features = TangentFeatures(
            network, num_features, seed=derive_seed(options.get("seed", 0), "features")
        )
        raw, self.Y, self.n = {}, {}, {}
        for i in clients:
            batches = read_examples(tiny_client(i).problem.trainloader, network, i)
            labels = torch.cat([batch.labels for batch in batches])
            raw[i] = features(inputs_of(batches))
            self.Y[i] = torch.eye(CLASSES).double()[labels] - 1 / CLASSES
            self.n[i] = len(labels)
        everyone = clients if standardised is None else standardised
        sums = [feature_sums(raw[i]) for i in everyone]
        self.mean, self.std = (t.float() for t in standardisation(sums))
        self.Z = {i: (z - self.mean) / self.std for i, z in raw.items()}
        self.spectra = {i: gram_spectrum(z) for i, z in self.Z.items()}
        self.largest = max(s.largest for s in self.spectra.values())


def inputs_of(batches):
    return torch.cat([batch.inputs.args[0] for batch in batches])


def weight_of(result):
    return arrays_to_tensors(result.arrays)["tct/weight"]


def metric(result, name):
    rounds = result.train_metrics_clientapp
    return [rounds[r][name] for r in sorted(rounds) if name in rounds[r]]


# The result


def test_the_result_is_a_model_that_predicts():
    for seed in (0, 4):
        result = plain(seed=seed)
        tensors = arrays_to_tensors(result.arrays)
        assert TCTModel.is_in(tensors)
        model = TCTModel.from_tensors(tiny_model(), tensors)
        by_hand = Problem(result.arrays, seed=seed)
        for i in range(CLIENTS):
            loader = tiny_client(i).problem.trainloader
            inputs = inputs_of(read_examples(loader, model, i))
            expected = by_hand.Z[i] @ tensors["tct/weight"]
            torch.testing.assert_close(model(inputs), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tensors["tct/mean"], by_hand.mean)
        torch.testing.assert_close(tensors["tct/std"], by_hand.std)
        assert int(tensors["tct/seed"]) == derive_seed(seed, "features")
        assert bytes(tensors["tct/head"].tolist()) == b"3"
    assert same_bits(plain(head="3").arrays, plain(seed=0).arrays)


def assert_has_network_of(result, arrays):
    network = arrays_to_tensors(result.arrays)
    for key, value in arrays_to_tensors(arrays).items():
        assert torch.equal(network[key], value), key


def test_the_networks_of_stage_1_and_of_the_result_are_one():
    """Whichever strategy trained it; pre-trained weights need no stage 1."""
    for make, own in ((FedAvg, plain()), (Scaffold, None)):
        stage1 = make(fraction_evaluate=0.0).start(
            LocalGrid(client_app(), CLIENTS), tiny_arrays(), num_rounds=STAGE1
        )
        app = Watched(client_app())
        if own is None:
            grid = LocalGrid(app, CLIENTS)
            own = tct(stage1_rounds=0).start(grid, stage1.arrays, num_rounds=3)
        assert_has_network_of(own, stage1.arrays)
    jobs = [config["job"] for config in app.configs]
    expected = ("tct-features", "tct-spectrum", "tct-step", "tct-step")
    assert jobs == [job for job in expected for _ in range(CLIENTS)]


def test_metrics_show_the_stages(caplog):
    caplog.set_level(logging.INFO)
    result = run(tct())
    assert metric(result, "stage") == [1, 1, 2, 2, 2]
    assert metric(result, "num-rejected") == [0] * ROUNDS
    lr = metric(result, "lr")
    assert len(set(lr)) == 1
    assert len(lr) == 3
    by_hand = Problem(result.arrays)
    assert metric(result, "largest-eigenvalue") == [pytest.approx(by_hand.largest)]
    loss = [
        sum(
            float((by_hand.Z[i].double() @ w.double() - by_hand.Y[i]).square().sum())
            for i in by_hand.Z
        )
        / (2 * sum(by_hand.n.values()))
        for w in (torch.zeros(20, CLASSES), weight_of(plain(num_rounds=4)))
    ]
    assert metric(result, "train_loss")[2:] == pytest.approx(loss)
    assert f"stage 2 begins with lr {lr[0]:g}" in caplog.text


# Stage 2 against the functions that it is made of


def by_functions(problem, rounds, *, lr, steps):
    """SCAFFOLD's algorithm, over who takes part in each round; all weigh in at once."""
    rates = {"lr": lr, "local_steps": steps}
    weight = torch.zeros(len(problem.mean), CLASSES)
    control = torch.zeros_like(weight)
    own = {i: torch.zeros_like(weight) for i in problem.Z}
    everyone = sum(problem.n.values())
    for cohort in rounds:
        locals_ = []
        for i in cohort:
            h = own[i] - control
            Z, Y, spectrum = problem.Z[i], problem.Y[i], problem.spectra[i]
            locals_.append(tct_update(Z, Y, weight, h, spectrum, **rates))
            own[i] = tct_control(own[i], control, weight, locals_[-1], **rates)
        counts = [problem.n[i] for i in cohort]
        weight, control = tct_average(
            weight, control, locals_, counts, participation=sum(counts) / everyone,
            **rates,
        )  # fmt: skip
    return weight, control


def test_a_round_is_the_functions_by_hand():
    result = plain(num_rounds=STAGE1 + 1 + 3)
    problem = Problem(result.arrays)
    (lr,) = set(metric(result, "lr"))
    weight, control = by_functions(problem, [range(CLIENTS)] * 3, lr=lr, steps=30)
    torch.testing.assert_close(weight_of(result), weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(result.details, control, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("control_variates", [True, False])
def test_steps_one_by_one_end_where_the_closed_form_does(control_variates):
    both = [
        plain(solver=solver, control_variates=control_variates, lr=0.05)
        for solver in ("closed-form", "steps")
    ]
    assert close(both[0].arrays, both[1].arrays, 1e-4)
    assert metric(both[0], "train_loss") == pytest.approx(metric(both[1], "train_loss"))


def test_one_step_without_control_variates_is_gradient_descent():
    result = plain(local_steps=1, control_variates=False)
    assert result.details is None
    assert not metric(result, "control-norm")
    assert not list(Path("~").expanduser().rglob("tct-control*"))
    problem = Problem(result.arrays)
    (lr,) = set(metric(result, "lr"))
    weight = torch.zeros(20, CLASSES).double()
    total = sum(problem.n.values())
    for _ in range(2):
        slopes = [z.double().mT @ (z.double() @ weight - problem.Y[i])
                  for i, z in problem.Z.items()]  # fmt: skip
        weight = weight - lr * sum(slopes) / total
    torch.testing.assert_close(weight_of(result).double(), weight, rtol=1e-4, atol=1e-6)


def test_features_may_stay_as_they_are():
    tensors = arrays_to_tensors(plain(standardise=False).arrays)
    assert bool((tensors["tct/mean"] == 0).all())
    assert bool((tensors["tct/std"] == 1).all())
    assert tensors["tct/weight"].norm() > 0


def test_half_precision_is_about_the_same():
    whole, half = plain(), plain(feature_dtype="float16")
    assert not same_bits(whole.arrays, half.arrays)
    torch.testing.assert_close(weight_of(half), weight_of(whole), rtol=0.1, atol=3e-3)


# Who takes part


def test_absent_clients_are_scaffolds_by_hand():
    app = Watched(client_app())
    strategy = tct(fraction_train=0.5, seed=1)
    result = run(strategy, app, clients=4, num_rounds=STAGE1 + 1 + 5)
    asked = {r: sorted(p for q, p in app.trained if q == r) for r in range(1, 9)}
    assert len(asked[1]) == len(asked[4]) == 2
    assert asked[3] == [0, 0, 1, 1, 2, 2, 3, 3]  # all, and twice
    assert set(metric(result, "num-lost-states")) == {0}
    cohorts = [asked[r] for r in range(STAGE1 + 2, STAGE1 + 7)]
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    problem = Problem(result.arrays, range(4), seed=1)
    weights = [sum(problem.n[i] for i in cohort) for cohort in cohorts]
    # What is known of absent clients' weights is their mean until they were seen.
    assert len(set(weights)) > 1
    (lr,) = set(metric(result, "lr"))
    weight, control = members_by_hand(problem, cohorts, lr=lr)
    torch.testing.assert_close(weight_of(result), weight, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(result.details, control, rtol=1e-3, atol=1e-5)


def members_by_hand(problem, cohorts, *, lr):
    """The server's c is the clients' c_i, by what is known of all clients' weight."""
    rates = {"lr": lr, "local_steps": 30}
    weight = torch.zeros(20, CLASSES)
    own = {}
    control = torch.zeros_like(weight)
    for cohort in cohorts:
        locals_ = {}
        for i in cohort:
            mine = own.get(i, torch.zeros_like(weight))
            Z, Y, spectrum = problem.Z[i], problem.Y[i], problem.spectra[i]
            locals_[i] = tct_update(Z, Y, weight, mine - control, spectrum, **rates)
            own[i] = tct_control(mine, control, weight, locals_[i], **rates)
        share = sum(problem.n[i] for i in cohort)
        weight = sum(problem.n[i] / share * local for i, local in locals_.items())
        total = sum(problem.n[i] for i in own) * 4 / len(own)
        control = sum(problem.n[i] / total * c for i, c in own.items())
    return weight, control


def test_a_lost_state_starts_from_zero_is_logged_and_counted(tmp_path, caplog):
    where = tmp_path / "run"
    run(tct(), num_rounds=4, checkpoint_dir=where)
    states = sorted(Path("~").expanduser().rglob("tct-control-*"))
    assert len(states) == CLIENTS
    states[1].unlink()
    states[2].write_bytes(states[2].read_bytes()[:-4])
    result = run(tct(), num_rounds=5, checkpoint_dir=where, resume=True)
    assert metric(result, "num-lost-states") == [0, 2]
    assert "start with a new one: partition-1, partition-2" in caplog.text
    assert caplog.text.count("starting with a new one") == 2


def absent_at_convexifying(app, partition=2):
    def fails(content):
        if app.trained[-1][0] == STAGE1 + 1:
            raise ValueError("out of cheese")

    app.tamper = {partition: fails}
    return app


def test_who_failed_while_features_were_standardised_joins_later():
    result = run(tct(lr=0.01), absent_at_convexifying(Watched(client_app())))
    assert metric(result, "num-replies") == [3, 3, 2, 3, 3]
    # Both exchanges of the convexifying round asked it.
    assert metric(result, "num-rejected") == [0, 0, 2, 0, 0]
    problem = Problem(result.arrays, standardised=[0, 1])
    tensors = arrays_to_tensors(result.arrays)
    torch.testing.assert_close(tensors["tct/mean"], problem.mean)
    (lr,) = set(metric(result, "lr"))
    weight, _ = by_functions(problem, [range(CLIENTS)] * 2, lr=lr, steps=30)
    torch.testing.assert_close(tensors["tct/weight"], weight, rtol=1e-3, atol=1e-5)


def test_a_first_batch_may_have_examples_without_a_label():
    def unlabelled(partition, client):
        x, y = tiny_data(partition).tensors
        labels = y.where(torch.arange(len(y)) != 1, -100)
        data = TensorDataset(x, labels)
        client.problem.trainloader = DataLoader(data, batch_size=4)

    result = run(tct(), client_app(unlabelled))
    assert metric(result, "num-rejected") == [0] * ROUNDS


def test_one_whose_features_are_too_large_for_the_rate_stays_out_by_name(caplog):
    """It was not there when the rate was settled."""

    def larger(partition, client):
        if partition == 2:
            x, y = tiny_data(partition).tensors
            data = TensorDataset(x * 50.0, y)
            client.problem.trainloader = DataLoader(data, batch_size=4)

    result = run(tct(), absent_at_convexifying(Watched(client_app(larger))))
    assert metric(result, "num-rejected")[3:] == [1, 1]
    assert "left out partition-2" in caplog.text
    assert "too large for these features" in caplog.text


def steep(partition):
    """Two features of 20 examples; one client's are ten times as steep."""
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(partition))
    y = (x @ torch.tensor([1.0, (-1.0) ** partition]) + 0.3 * partition > 0.6).long()
    return (x * 10**0.5 if partition == 4 else x), y


def test_a_steep_client_moves_no_optimum():
    """By the strict policy it was refused its own largest eigenvalue, and stayed out.

    Where the agreed rate is too large for it, it takes shorter steps, and more.
    """
    model = nn.Sequential(nn.Linear(2, 2, bias=False))

    own = {"train_fn": LocalSGD(lr=0.1, momentum=0.0), "device": "cpu"}
    app = app_by_partition(lambda i: FisherClient(model, [steep(i)], **own))
    options = {"stage1_rounds": 0, "num_features": 2, "local_steps": 3}
    strategy, grid = tct(policy=Policy.strict(), **options), LocalGrid(app, 5)
    result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=19)
    assert metric(result, "num-rejected") == [0] * 19
    tensors = arrays_to_tensors(result.arrays)
    x, y = (torch.cat(parts) for parts in zip(*map(steep, range(5)), strict=True))
    Z = ((x - tensors["tct/mean"]) / tensors["tct/std"]).double()
    targets = torch.eye(2, dtype=torch.float64)[y] - 1 / 2
    optimum = torch.linalg.lstsq(Z, targets).solution
    torch.testing.assert_close(
        tensors["tct/weight"].double(), optimum, rtol=0, atol=1e-3
    )


# Stage 1


def test_clients_evaluate_the_network_and_then_the_regression():
    app = Watched(client_app())
    result = run(tct(fraction_evaluate=1.0), app)
    assert sorted(r for r, _ in app.evaluated) == sorted([1, 2, 3, 4, 5] * CLIENTS)
    scores = result.evaluate_metrics_clientapp
    assert sorted(scores) == [1, 2, 3, 4, 5]
    model = TCTModel.from_tensors(tiny_model(), arrays_to_tensors(result.arrays))
    right = total = 0
    for i in range(CLIENTS):
        x, y = tiny_data(i).tensors
        right, total = right + int((model(x).argmax(1) == y).sum()), total + len(y)
    assert scores[ROUNDS]["accuracy"] == pytest.approx(right / total)


def test_the_server_evaluates_the_network_and_then_the_model():
    seen = {}

    def evaluate(server_round, arrays):
        seen[server_round] = TCTModel.is_in(arrays_to_tensors(arrays))
        return MetricRecord({"round": server_round})

    result = run(tct(), evaluate_fn=evaluate)
    assert seen == {0: False, 1: False, 2: False, 3: True, 4: True, 5: True}
    assert sorted(result.evaluate_metrics_serverapp) == sorted(seen)


# Arguments


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stage1_rounds": -1}, r"^stage1_rounds must be >= 0"),
        ({"num_features": 0}, r"^num_features must be >= 1"),
        ({"local_steps": 0}, r"^local_steps must be >= 1"),
        ({"lr": 0.0}, r"^lr must be > 0"),
        ({"lr": float("nan")}, r"^lr must be > 0"),
        ({"solver": "cg"}, r"unknown solver 'cg'; known: closed-form, steps"),
        ({"feature_dtype": "int8"}, r"unknown feature_dtype 'int8'"),
        ({"fraction_train": 2.0}, r"^fraction_train must be in"),
        ({"weighted_by_key": "trust"}, r"^TCT needs weighted_by_key='num-examples'"),
    ],
)
def test_bad_arguments_are_named(options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        tct(**options)


@pytest.mark.parametrize("num_rounds", [1, 3])
def test_too_few_rounds_for_a_stage_2_are_refused(num_rounds):
    app = Watched(client_app())
    with pytest.raises(ConfigurationError, match=r"leaves no round of stage 2.*=4"):
        run(tct(), app, num_rounds=num_rounds)
    assert not app.trained


def test_a_tct_model_is_nothing_to_start_from():
    result = plain()
    grid = LocalGrid(client_app(), CLIENTS)
    with pytest.raises(RoundError, match=r"sent 'tct/weight' .*shared_state"):
        tct().start(grid, result.arrays, num_rounds=5)


# The learning rate


def test_a_rate_that_is_too_large_is_refused_before_stage_2(tmp_path):
    by_client = {i: s.largest for i, s in Problem(plain().arrays).spectra.items()}
    order = sorted(by_client, key=by_client.__getitem__)
    flattest, steepest = by_client[order[0]], by_client[order[-1]]
    lr = 2 / ((flattest + by_client[order[1]]) / 2)
    app = Watched(client_app())
    with pytest.raises(ConfigurationError) as caught:
        run(tct(lr=lr), app, checkpoint_dir=tmp_path / "run")
    said = str(caught.value)
    assert f": lr {lr:g} is too large" in said
    assert all(f"partition-{i}" in said for i in order[1:])
    assert f"partition-{order[0]}" not in said
    safe = float(said.split("largest safe lr is ")[1].split(" ")[0])
    assert 0 < 2 / steepest - safe < 1e-3 * safe
    assert max(server_round for server_round, _ in app.trained) == STAGE1 + 1
    # Nothing is lost: the safe one goes on from there, and nobody is asked again.
    again = Watched(client_app())
    resumed = run(tct(lr=safe), again, checkpoint_dir=tmp_path / "run", resume=True)
    assert min(server_round for server_round, _ in again.trained) == STAGE1 + 2
    assert same_bits(resumed.arrays, plain(lr=safe).arrays)


def test_a_rate_too_large_for_one_of_three_is_told(caplog):
    by_client = {i: s.largest for i, s in Problem(plain().arrays).spectra.items()}
    order = sorted(by_client, key=by_client.__getitem__)
    lr = 2 / ((by_client[order[-1]] + by_client[order[-2]]) / 2)
    assert set(metric(run(tct(lr=lr), num_rounds=STAGE1 + 2), "lr")) == {lr}
    assert f"too large for partition-{order[-1]}, by the eigenvalues" in caplog.text


def test_the_default_is_the_papers_or_what_is_safe():
    result = plain()
    largest = Problem(result.arrays).largest
    assert 1 / largest < 5 / 20
    assert metric(result, "lr")[0] == pytest.approx(1 / largest)
    # Features that hardly vary have small eigenvalues.
    flat = run(tct(standardise=False, stage1_rounds=0), num_rounds=2)
    small = metric(flat, "largest-eigenvalue")[0]
    assert metric(flat, "lr")[0] == pytest.approx(min(5 / 20, 1 / small))


@pytest.mark.parametrize(
    ("strategy", "client", "reason"),
    [
        ({"head": "fc9"}, {}, r"partition-0, .*linear layer for head 'fc9'"),
        ({"head": "1"}, {}, r"linear layer for head '1'; known: 0, 3"),
        ({}, {"likelihood": "gaussian"}, r"needs classes.*'gaussian'"),
        ({}, {"state_bytes": 500}, r"20 features of 12 .*Regression\(.*float16"),
        ({}, {"state_dir": Path(__file__)}, r"cannot write .*test_tct.*state_dir="),
    ],
)
def test_what_stage_2_cannot_do_ends_the_run_by_name(strategy, client, reason):
    app = Watched(client_app(**client))
    with pytest.raises(RoundError, match=reason):
        run(tct(**strategy), app)
    rounds = {server_round for server_round, _ in app.trained}
    assert rounds == ({1, 2, 3} if "state_dir" in client else {1})


def test_once_stage_2_has_begun_the_rate_stays(tmp_path):
    """And other options are refused."""
    where = {"checkpoint_dir": tmp_path / "run"}
    run(tct(lr=0.02), num_rounds=4, **where)
    for options, said in (
        ({"lr": 0.01}, r"began with lr=0.02, not 0.01"),
        ({"local_steps": 7}, "local_steps: 30 -> 7"),
        ({"num_features": 7}, "num_features: 20 -> 7"),
        ({"solver": "steps"}, "solver: 'closed-form' -> 'steps'"),
        ({"stage1_rounds": 1}, "stage1_rounds: 2 -> 1"),
    ):
        with pytest.raises(CheckpointError, match=said):
            run(tct(**options), resume=True, **where)
    assert same_bits(run(tct(), resume=True, **where).arrays, plain(lr=0.02).arrays)


# Too many examples, and other networks


def test_too_many_examples_are_refused_by_name_in_the_first_round(few):
    app = Watched(client_app(anew=True))
    with pytest.raises(RoundError, match=r"partition-2: .* 12 examples.*'steps'"):
        run(tct(min_train_nodes=3), app)
    assert {server_round for server_round, _ in app.trained} == {1}
    with pytest.raises(RoundError, match=r"partition-2: .* 12 examples.*'steps'"):
        run(tct(stage1_rounds=0, min_train_nodes=3), num_rounds=2)


def test_steps_need_no_spectrum(few):
    stepped = run(tct(solver="steps", lr=0.05))
    assert close(stepped.arrays, plain(solver="steps", lr=0.05).arrays, 1e-5)
    largest = [metric(r, "largest-eigenvalue") for r in (stepped, plain(lr=0.05))]
    assert largest[0] == pytest.approx(largest[1])


@pytest.fixture
def few(monkeypatch, tmp_path):
    """Let ten examples be as many as there may be for a spectrum, from now on."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("HOME", str(tmp_path))
        plain(solver="steps", lr=0.05)
        plain(lr=0.05)
    monkeypatch.setattr(client_tangent, "MOST_EXAMPLES", 10)


@pytest.mark.parametrize("shape", [(40, 7), (7, 40), (1, 5), (5, 1), (300, 20)])
def test_the_largest_eigenvalue_needs_no_matrix(shape):
    Z = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    exact = gram_spectrum(Z).largest
    assert exact * (1 - 1e-6) <= largest_gram_eigenvalue(Z) <= exact * 1.05


def other_network(partition, client):
    """Partition 1 has one layer frozen, so its features are of other parameters."""
    if partition == 1:
        client.problem.model[1].requires_grad_(False)
    return None


def other_client(partition, client, **config):
    """Partition 1 obeys another config than the server's."""
    if partition == 1:
        fit = client.fit

        def other(message, context):
            message.content.config_records["config"].update(config)
            return fit(message, context)

        client.fit = other
    return None


@pytest.mark.parametrize(
    "change",
    [
        partial(other_client, **{"fisher.features-seed": 9}),
        partial(other_client, **{"fisher.num-features": 19}),
        other_network,
    ],
)
def test_a_client_whose_features_are_others_is_refused_by_name(change, caplog):
    assert metric(run(tct(), client_app(change)), "num-rejected") == [0, 0, 2, 1, 1]
    left = left_out(caplog)
    assert all("left out partition-1: node" in m for m in left)
    assert "'tct/': has other features (p, seed, head, network)" in left[0]
    assert "build the same model on every client" in caplog.text


def text(**changed):
    return description_text(about_features("d", "3", CLASSES) | changed).numpy()


FEATURES_JOB, SPECTRUM, STEP = "tct-features", "tct-spectrum", "tct-step"
BAD = [  # what the declarations of the parts do not cover is in test_wire_schema
    (FEATURES_JOB, drop_array("tct/squares"), "tct/squares': missing"),
    (FEATURES_JOB, set_array("tct/sum", [0.0] * 21), "length 21, expected 1 to 20"),
    (FEATURES_JOB, set_array("tct/format", text(classes=10**9)), "1000000000 classes"),
    (FEATURES_JOB, set_array("tct/format", text(digest=1)), "names no features"),
    (SPECTRUM, set_array("tct/largest-eigenvalue", -1.0), "'tct/largest-eigenvalue': "),
    (STEP, change_array("tct/weight", lambda a: a.T), "tct/weight': shape"),
    (STEP, change_array("tct/weight", lambda a: a.astype("f8")), "tct/weight': dtype"),
    (STEP, set_array("tct/weight", [0.0] * 10**5), "tct/weight': shape (100000,)"),
]


@pytest.mark.parametrize(("job", "tamper", "field"), BAD)
def test_a_bad_upload_is_named_and_tolerated(job, tamper, field, caplog):
    app, last = Watched(client_app()), 1 + (job == STEP)

    def sometimes(content):
        if app.configs[-1].get("job") == job:
            tamper(content)

    app.tamper = {2: sometimes}
    result = run(tct(lr=0.01, stage1_rounds=0), app, num_rounds=2)
    assert metric(result, "num-rejected")[last - 1] == 1
    assert field in caplog.text


# What every strategy owes its users


# Features on disk


@pytest.fixture
def counted(monkeypatch):
    """How many examples' features were computed, call by call."""
    calls = []

    class Counting(TangentFeatures):
        def __call__(self, x):
            calls.append(len(x))
            return super().__call__(x)

    monkeypatch.setattr(client_tangent, "TangentFeatures", Counting)
    return calls


TRIED = 2 * 2 * CLIENTS  # two examples, in each round of the first stage


def cached():
    return sorted(Path("~/.cache/flwr-fisher/state/features").expanduser().rglob("*.*"))


def test_features_are_computed_once_a_client_and_run(counted, tmp_path):
    run(tct(), num_rounds=6, checkpoint_dir=tmp_path / "run")
    assert sum(counted) == 8 + 10 + 12 + TRIED
    run(tct(), num_rounds=9, checkpoint_dir=tmp_path / "run", resume=True)
    assert sum(counted) == 8 + 10 + 12 + TRIED
    names = [path.name.split("-")[0] for path in cached()]
    assert names == ["features", "spectrum"] * CLIENTS


def test_another_run_computes_its_own(counted):
    """No key knows what a model's code does."""
    first, second = (run(tct(), client_app(anew=True)) for _ in range(2))
    assert sum(counted) == 2 * (8 + 10 + 12 + TRIED)
    assert same_bits(first.arrays, second.arrays)


def test_no_step_reads_a_clients_data():
    readings, told = [], {}

    class Noted(DataLoader):
        def __iter__(self):
            readings.append(self)
            return super().__iter__()

    def noted(partition, client):
        batches = Noted(virtual.tiny_data(partition), batch_size=4)
        return FisherClient(tiny_model(), batches, train_fn=LocalSGD(momentum=0.0))

    def tell(server_round, arrays):
        told[server_round] = len(readings)

    result = run(tct(), client_app(noted), num_rounds=6, evaluate_fn=tell)
    assert told[STAGE1] < told[STAGE1 + 1] == told[6]
    assert [upload.num_examples for upload in result.uploads] == [8, 10, 12]


@pytest.mark.parametrize(
    ("name", "how"),
    [("features", "truncated"), ("spectrum", "flipped"), ("features", "gone")],
)
def test_a_corrupt_file_is_named_and_made_again(name, how, tmp_path, caplog):
    where = tmp_path / "run"
    run(tct(), num_rounds=4, checkpoint_dir=where)
    (path,) = [p for p in cached() if "partition-1" in str(p) and name in p.name]
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        changed = b"" if how == "truncated" else bytes([data[-9] ^ 4]) + data[-8:]
        path.write_bytes(data[:-9] + changed)
    resumed = run(tct(), checkpoint_dir=where, resume=True)
    assert (f"Ignoring {path}, which cannot be read" in caplog.text) == (how != "gone")
    assert path.exists()
    assert same_bits(resumed.arrays, plain().arrays)


# Stopped, and resumed


def whole_run(app, where=None, **options):
    strategy = tct(fraction_train=0.75, fraction_evaluate=0.5)
    return run(strategy, app, 4, num_rounds=6, checkpoint_dir=where, **options)


@cache
def uninterrupted():
    return whole_run(Watched(client_app()))


ASKED = [3, 3, 8, 3, 3, 3]  # requests to train, by round


@pytest.mark.parametrize("asked", [2, 8, 12, 22])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, asked):
    """Stopped anywhere, once a client had saved and was not yet heard of."""
    expected, app = uninterrupted(), Watched(client_app())
    app.tamper = dict.fromkeys(range(4), virtual.kill_after(asked, app))
    with pytest.raises(KeyboardInterrupt):
        whole_run(app, tmp_path / "run")
    again = Watched(client_app())
    resumed = whole_run(again, tmp_path / "run", resume=True)
    assert same_bits(resumed.arrays, expected.arrays)
    assert resumed.train_metrics_clientapp == expected.train_metrics_clientapp
    assert resumed.evaluate_metrics_clientapp == expected.evaluate_metrics_clientapp
    assert torch.equal(resumed.details, expected.details)
    assert len(again.trained) == sum(ASKED) - asked
