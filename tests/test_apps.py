"""The apps of ``apps/``, run in this process as Flower runs them."""

import re

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from apps import APPS, defaults, globals_of, run
from flwr_fisher.errors import ConfigurationError, UnknownNameError
from flwr_fisher.params import shared_state
from flwr_fisher.tangent import TCTModel

QUICK = {"local_epochs": 1, "num_rounds": 1}
TCT = {"num_rounds": 5, "stage1_rounds": 2, "local_epochs": 1, "num_features": 300}


@pytest.mark.parametrize("app", ["fedfisher", "fedfish", "fagh", "tct"])
def test_the_readme_has_every_key_with_its_default(app):
    readme = (APPS / app / "README.md").read_text()
    shown = {}
    for keys, values in re.findall(r"^\| (`.*?) \| (.*?) \|", readme, re.M):
        names = re.findall(r"`([\w-]+)`", keys)
        cells = [value.strip("`") for value in values.split(", ")]
        shown |= dict(zip(names, cells, strict=True))
    assert shown == {k: str(v) or '""' for k, v in defaults(app).items()}


@pytest.mark.parametrize(
    ("app", "options", "error", "culprit"),
    [
        ("fedfisher", {"solver": "newton"}, UnknownNameError, "solver 'newton'"),
        ("fedfish", {"evaluate_every": 0}, ConfigurationError, "every"),
        ("fagh", {"method": "newton"}, UnknownNameError, "method 'newton'"),
        ("fagh", {"rho": 0.0}, ConfigurationError, "rho"),
        ("tct", {"num_rounds": 11}, ConfigurationError, "no round of stage 2"),
        ("tct", {"num_features": 0}, ConfigurationError, "num_features"),
    ],
)
def test_mistakes_are_told_before_any_round(app, options, error, culprit, tmp_path):
    with pytest.raises(error, match=culprit):
        run(app, tmp_path, 10, **options)
    assert not list(tmp_path.iterdir())


def test_the_clients_of_a_simulation_share_the_digits():
    for app in ("fedfisher", "tct"):
        task = globals_of(APPS / app, "client")["load_data"].__globals__
        config = defaults(app) | {"batch-size": 64}
        parts = []
        for client in range(10):
            node = {"partition-id": client, "num-partitions": 10}
            loader = task["load_data"](Context(1, client, node, RecordDict(), config))
            parts.append(np.concatenate([y for _, y in loader]))
        assert sum(map(len, parts)) == 1437
        # Some clients lack some classes.
        assert min(len(set(part)) for part in parts) < 10
        test = task["load_test"](Context(1, 1, {}, RecordDict(), config))
        assert len(test.dataset) == 360


@pytest.mark.usefixtures("empty_pictures")
def test_a_node_and_the_server_have_files_of_their_own(tmp_path):
    task = globals_of(APPS / "fedfish", "client")["load_data"].__globals__
    x = np.zeros((7, 1, 8, 8), dtype=np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(7))
    path = str(tmp_path / "data.npz")
    config = defaults("fedfish") | {"test-path": path}
    context = Context(1, 1, {"data-path": path}, RecordDict(), config)
    for loader in task["load_data"](context), task["load_test"](context):
        assert sorted(loader.dataset.tensors[1].tolist()) == list(range(7))


@pytest.mark.usefixtures("empty_pictures")
@pytest.mark.parametrize("aggregate", ["parts", "secure-sums"])
def test_fedfisher_is_ahead_of_fedavg(aggregate, tmp_path):
    options = {"aggregate": aggregate, "local_epochs": 5, "alpha": 0.5}
    accuracy = run("fedfisher", tmp_path, 3, **options)[0]["accuracy"]
    assert accuracy["fedfisher"] > accuracy["fedavg"] > 0.3


@pytest.mark.usefixtures("empty_pictures")
def test_a_finished_run_is_opened_again_by_its_run_config(tmp_path):
    options = {"checkpoint_dir": str(tmp_path / "run"), **QUICK}
    first, _ = run("fedfisher", tmp_path, 2, **options)
    with pytest.raises(ConfigurationError, match="resume it with reopen=True"):
        run("fedfisher", tmp_path, 2, **options)
    opened, _ = run("fedfisher", tmp_path, 2, reopen=True, **options)
    assert opened["accuracy"] == first["accuracy"]
    assert opened["clients"] == first["clients"]


@pytest.mark.usefixtures("empty_pictures")
def test_all_of_fedfish_can_be_chosen(tmp_path):
    metrics, _ = run(
        "fedfish",
        tmp_path,
        3,
        server_optimizer="adam",
        server_lr=0.01,
        fisher_source="last-epoch",
        fraction_train=1.0,
        **QUICK,
    )
    assert metrics["rounds"]["1"]["train"]["num-replies"] == 3
    assert set(metrics["rounds"]["1"]["server"]) == {"accuracy", "loss"}
    assert metrics["config"]["server-optimizer"] == "adam"


@pytest.mark.usefixtures("empty_pictures")
def test_faghs_rivals_begin_at_the_same_model(tmp_path):
    methods = globals_of(APPS / "fagh", "server")["METHODS"]
    options = {"lr": 0.2, "server_lr": 0.1, **QUICK}
    first, last = set(), {}
    for method in methods:
        rounds = run("fagh", tmp_path, 4, method=method, **options)[0]["rounds"]
        first.add(rounds["0"]["server"]["loss"])
        last[method] = rounds["1"]["server"]["loss"]
    assert len(first) == 1
    assert max(last.values()) < min(first)


def test_tct_has_two_stages_and_a_file_that_predicts(tmp_path):
    metrics, _ = run("tct", tmp_path, 10, evaluate_every=2, **TCT)
    rounds, accuracy = metrics["rounds"], metrics["accuracy"]
    assert [rounds[str(n)]["train"]["stage"] for n in range(1, 6)] == [1, 1, 2, 2, 2]
    assert accuracy["tct"] > accuracy["stage1"] == rounds["2"]["server"]["accuracy"]
    task = globals_of(APPS / "tct", "server")["load_test"].__globals__
    model = TCTModel.load(tmp_path / "model.safetensors", task["Net"]())
    loader = task["load_test"](Context(1, 1, {}, RecordDict(), defaults("tct")))
    images, labels = loader.dataset.tensors
    correct = (model(images).argmax(1) == labels).double().mean()
    assert float(correct) == pytest.approx(accuracy["tct"])
    network = sum(v.nbytes for v in shared_state(task["Net"]()).values())
    assert network < metrics["bytes"]["fedavg_per_client"] < 1.2 * network
    files = {"metrics.json", "model.safetensors", "rounds.png"}
    assert files <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.usefixtures("empty_pictures")
def test_all_of_tct_can_be_chosen(tmp_path):
    metrics, _ = run(
        "tct",
        tmp_path,
        10,
        **TCT,
        fraction_train=0.6,
        control_variates=False,
        standardise=False,
        feature_dtype="float16",
        solver="steps",
        local_steps=20,
        stage2_lr=1e-3,
        head="5",
    )
    rounds = metrics["rounds"]
    assert rounds["3"]["train"]["num-replies"] == 10
    assert rounds["4"]["train"]["num-replies"] == 6
    assert rounds["4"]["train"]["lr"] == 1e-3
