"""The apps of ``apps/``, run in this process as Flower runs them."""

import io
import logging
import re
from contextlib import contextmanager

import pytest

from apps import APPS, defaults, globals_of, run
from flwr_fisher.errors import ConfigurationError, UnknownNameError
from flwr_fisher.tangent import TCTModel
from flwr_fisher.tasks import task_from_run_config
from flwr_fisher.testing import LocalGrid


@pytest.mark.parametrize("app", ["fedfish", "fagh", "tct"])
def test_the_readme_has_every_key_with_its_default(app):
    readme = (APPS / app / "README.md").read_text()
    told = {}
    for keys, values in re.findall(r"^\| (`.*?) \| (.*?) \|", readme, re.M):
        names = re.findall(r"`([\w-]+)`", keys)
        shown = [value.strip("`") for value in values.split(", ")]
        told |= dict(zip(names, shown, strict=True))
    assert told == {k: str(v) or '""' for k, v in defaults(app).items()}


@pytest.mark.parametrize(
    ("app", "options", "error", "culprit"),
    [
        ("fedfisher", {"dataset": "digit"}, UnknownNameError, "known: digits, mnist"),
        ("fedfish", {"held_out": 10}, ConfigurationError, "no client is left"),
        ("fedfish", {"held_out": 0.0}, ConfigurationError, "personalisation"),
        ("fedfish", {"evaluate_every": 0}, ConfigurationError, "every"),
        ("fedfish", {"upload": "product"}, ConfigurationError, "server_optimizer"),
        (
            "fedfish",
            {"codec": "lossless", "budget": 0.5},
            ConfigurationError,
            "'fedavg'",
        ),
        ("fagh", {"method": "newton"}, UnknownNameError, "method 'newton'"),
        ("fagh", {"probe": "last"}, UnknownNameError, "probe 'last'"),
        ("fagh", {"rho": 0.0}, ConfigurationError, "rho"),
        ("fagh", {"evaluate_every": 0}, ConfigurationError, "every"),
        ("tct", {"solver": "newton"}, UnknownNameError, "solver 'newton'"),
        ("tct", {"num_rounds": 11}, ConfigurationError, "no round of stage 2"),
        ("tct", {"num_features": 0}, ConfigurationError, "num_features"),
        ("tct", {"evaluate_every": 0}, ConfigurationError, "every"),
    ],
)
def test_mistakes_are_told_before_any_round(app, options, error, culprit, tmp_path):
    with pytest.raises(error, match=culprit):
        run(app, tmp_path, 10, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("empty_pictures")
def test_fedfisher_takes_secure_sums(tmp_path):
    own = {"aggregate": "secure-sums", "local_epochs": 2, "max_examples": 600}
    metrics, _ = run("fedfisher", tmp_path, 3, **own)
    assert metrics["accuracy"]["fedfisher"] > 0.5


# FedFish


def test_fedfish_learns_and_measures(tmp_path):
    few = {"num_rounds": 4, "clients_per_round": 5, "max_examples": 800}
    metrics, _ = run("fedfish", tmp_path, 8, **few)
    assert {"rounds.png", "labels.png"} <= {p.name for p in tmp_path.iterdir()}
    assert metrics["accuracy"]["fedfish"] > 0.7
    assert metrics["accuracy"]["personalised"] > 0.7
    assert (
        metrics["bytes"]["upload_per_client"] <= metrics["bytes"]["fedavg_per_client"]
    )
    rounds = metrics["rounds"]
    assert [n for n in rounds if "accuracy" in rounds[n].get("server", {})] == [*"024"]
    assert rounds["4"]["server"]["barrier-clients"] == 5
    assert rounds["4"]["server"]["personalised-clients"] == 2
    assert rounds["4"]["train"]["num-replies"] == 5
    assert metrics["config"]["local-epochs"] == 4
    assert metrics["seconds"]["total"] > 0


@pytest.mark.usefixtures("empty_pictures")
def test_all_of_fedfish_can_be_chosen(tmp_path):
    chosen = {"held_out": 0.0, "barrier_every": 0, "personalisation_fraction": 0.0}
    metrics, _ = run(
        "fedfish",
        tmp_path,
        8,
        num_rounds=1,
        clients_per_round=64,
        server_optimizer="adam",
        server_lr=0.01,
        fisher_source="last-epoch",
        upload="product",
        local_epochs=1,
        **chosen,
    )
    assert metrics["rounds"]["1"]["train"]["num-replies"] == 8
    assert set(metrics["rounds"]["1"]["server"]) == {"accuracy", "loss"}
    few, _ = run(
        "fedfish",
        tmp_path,
        8,
        num_rounds=1,
        codec="small",
        held_out=3,
        reduction="mean",
        local_epochs=1,
    )
    assert few["rounds"]["1"]["train"]["num-replies"] == 5
    sizes = few["bytes"]
    assert sizes["upload_per_client"] < 0.55 * sizes["fedavg_per_client"]


# FAGH, and the methods that it is compared with


class WatchedGrid(LocalGrid):
    """Notes which partitions a round's train messages go to."""

    def push_messages(self, messages):
        sent = list(messages)
        for message in sent:
            if message.metadata.message_type.startswith("train"):
                config = next(iter(message.content.config_records.values()))
                cohort = self.cohorts.setdefault(config["server-round"], set())
                cohort.add(self.nodes[message.metadata.dst_node_id])
        return super().push_messages(sent)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cohorts = {}


def fagh(path, **options):
    few = {"clients_per_round": 4, "num_rounds": 1} | options
    return run("fagh", path, 10, WatchedGrid, **few)


def test_fagh_learns_in_fewer_rounds_than_one_local_step(tmp_path):
    def rounds_to(target, method):
        options = {"clients_per_round": 8, "num_rounds": 5, "method": method}
        found, _ = run("fagh", tmp_path, 20, **options)
        reached = [
            int(number)
            for number, told in found["rounds"].items()
            if told["server"]["accuracy"] >= target
        ]
        return min(reached, default=99)

    assert rounds_to(0.75, "fagh") < rounds_to(0.75, "fedavg")
    assert {"metrics.json", "rounds.png", "labels.png", "model.safetensors"} <= {
        p.name for p in tmp_path.iterdir()
    }


@pytest.mark.usefixtures("empty_pictures")
def test_all_methods_run_on_the_same_cohorts_and_tell_their_costs(tmp_path):
    methods = globals_of(APPS / "fagh", "server")["METHODS"]
    readme = (APPS / "fagh/README.md").read_text()
    (told,) = re.findall(r"^\| `method` \|(.*)", readme, re.M)
    assert set(methods) == set(re.findall(r"`(\w+)`", told))
    exchanges = {"fagh": 2, "scaffold": 2}
    rounds, cohorts = {}, {}
    for method in methods:
        options = {"local_epochs": 2, "lr": 0.2, "server_lr": 0.1}
        found, grid = fagh(tmp_path, method=method, **options)
        cohorts[method] = grid.cohorts
        rounds[method] = found["rounds"]
        assert found["accuracy"][method] == found["rounds"]["1"]["server"]["accuracy"]
    starts = {told["0"]["server"]["loss"] for told in rounds.values()}
    assert len(starts) == 1
    assert all(cohort == cohorts["fagh"] for cohort in cohorts.values())
    plain = rounds["fedavg"]["1"]["server"]["uploaded-bytes"]
    for method, told in rounds.items():
        last = told["1"]["server"]
        assert last["gradient-evaluations"] == 2
        factor = exchanges.get(method, 1)
        assert 0.9 * factor * plain < last["uploaded-bytes"] < 1.3 * factor * plain
        assert last["loss"] < told["0"]["server"]["loss"]


# TCT


P = 500  # features
FEW = {"num_rounds": 5, "stage1_rounds": 2, "local_epochs": 1, "num_features": 300}


@contextmanager
def logged():
    """What Flower's log says meanwhile."""
    text, logger = io.StringIO(), logging.getLogger("flwr")
    handler, level = logging.StreamHandler(text), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield text
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory):
    """The folder, metrics and log of a run whose second stage has four rounds."""
    folder, few = tmp_path_factory.mktemp("tct"), {"stage1_rounds": 3, "num_rounds": 7}
    with logged() as log:
        metrics, _ = run("tct", folder, 10, **few, num_features=P, max_examples=700)
    return folder, metrics, log.getvalue()


def test_tcts_second_stage_wins(two_stages):
    folder, metrics, log = two_stages
    accuracy, rounds = metrics["accuracy"], metrics["rounds"]
    assert accuracy["tct"] > accuracy["stage1"] + 0.04
    assert accuracy["stage1"] == rounds["3"]["server"]["accuracy"]
    assert accuracy["tct"] == rounds["7"]["server"]["accuracy"]
    stages = [rounds[str(n)]["train"]["stage"] for n in range(1, 8)]
    assert stages == [1] * 3 + [2] * 4
    assert "server" not in rounds["4"]
    assert rounds["7"]["train"]["train_loss"] < rounds["5"]["train"]["train_loss"]
    pictures = {"rounds.png", "labels.png"}
    assert {"metrics.json", "model.safetensors", *pictures} <= {
        p.name for p in folder.iterdir()
    }
    for text in ("stage 1, round 3 of 3", "stage 2", "kB a client"):
        assert text in log


def test_tcts_file_is_a_model_that_predicts(two_stages):
    folder, metrics, _ = two_stages
    task = task_from_run_config(metrics["config"], 10)
    model = TCTModel.load(folder / "model.safetensors", task.make_model())
    images, labels = next(iter(task.test_loader(10_000)))
    correct = (model(images).argmax(1) == labels).double().mean()
    assert float(correct) == pytest.approx(metrics["accuracy"]["tct"])
    sizes = metrics["bytes"]
    weights = sum(v.numel() for v in task.make_model().state_dict().values())
    assert 4 * 10 * P < sizes["upload_per_client"] < 4 * 10 * P + 5000
    assert 4 * weights < sizes["fedavg_per_client"] < 4 * weights + 5000


@pytest.mark.usefixtures("empty_pictures")
def test_all_of_tct_can_be_chosen(tmp_path):
    metrics, _ = run(
        "tct",
        tmp_path,
        10,
        **FEW,
        clients_per_round=6,
        control_variates=False,
        standardise=False,
        feature_dtype="float16",
        solver="steps",
        local_steps=20,
        stage2_lr=1e-3,
        head="fc3",
        evaluate_every=3,
    )
    rounds = metrics["rounds"]
    scored = [n for n, told in rounds.items() if "accuracy" in told.get("server", {})]
    assert scored == ["0", "2", "5"]
    assert rounds["3"]["train"]["num-replies"] == 10
    assert rounds["4"]["train"]["num-replies"] == 6
    assert rounds["4"]["train"]["lr"] == 1e-3
