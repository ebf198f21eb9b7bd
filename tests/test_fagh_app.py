"""The app ``apps/fagh``, run in this process as Flower runs it."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from apps import globals_of
from flwr_fisher.errors import ConfigurationError, UnknownNameError
from flwr_fisher.testing import LocalGrid

APP = Path(__file__).parents[1] / "apps" / "fagh"
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
SERVER = globals_of(APP, "server")
CLIENT = globals_of(APP, "client")


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


def run(path, clients=10, **options):
    path.mkdir(exist_ok=True)
    named = {key.replace("_", "-"): value for key, value in options.items()}
    config = DEFAULTS["config"] | {"output-dir": str(path)}
    config |= {"state-dir": str(path / "state"), "clients-per-round": 4} | named
    assert config.keys() == DEFAULTS["config"].keys()
    grid = WatchedGrid(CLIENT["app"], clients, run_config=config)
    SERVER["app"](grid, Context(1, 1, {}, RecordDict(), config))
    return json.loads((path / "metrics.json").read_text()), grid.cohorts


def test_by_default_it_learns_in_fewer_rounds_than_one_local_step(tmp_path):
    def rounds_to(target, method):
        found, _ = run(tmp_path, 50, method=method, clients_per_round=20, num_rounds=20)
        reached = [
            int(number)
            for number, told in found["rounds"].items()
            if told["server"]["accuracy"] >= target
        ]
        return min(reached)

    assert rounds_to(0.85, "fagh") < rounds_to(0.85, "fedavg")
    assert {"metrics.json", "rounds.png", "labels.png", "model.safetensors"} <= {
        p.name for p in tmp_path.iterdir()
    }


def test_all_methods_run_on_the_same_cohorts_and_tell_their_costs(tmp_path):
    assert set(SERVER["METHODS"]) == {
        *("fagh", "scaffold", "fedexp", "fedga", "fedpm"),
        *("giant", "done", "fedavg", "fedprox"),
    }
    gradients = {"fagh": 2, "fedga": 4, "fedpm": 4, "giant": 7, "done": 5}
    exchanges = {"fagh": 2, "scaffold": 2, "fedga": 2, "giant": 2, "done": 2}
    exchanges["fedpm"] = 5  # one, but with a matrix of 65 by 65 beside 650 weights
    rounds, cohorts = {}, {}
    for method in SERVER["METHODS"]:
        options = {"local_epochs": 2, "lr": 0.2, "server_lr": 0.1, "iterations": 3}
        found, cohorts[method] = run(tmp_path, method=method, num_rounds=2, **options)
        rounds[method] = found["rounds"]
        assert found["accuracy"][method] == found["rounds"]["2"]["server"]["accuracy"]
    starts = {told["0"]["server"]["loss"] for told in rounds.values()}
    assert len(starts) == 1
    assert all(cohort == cohorts["fagh"] for cohort in cohorts.values())
    plain = rounds["fedavg"]["2"]["server"]["uploaded-bytes"]
    for method, told in rounds.items():
        last = told["2"]["server"]
        assert last["gradient-evaluations"] == 2 * gradients.get(method, 2)
        factor = exchanges.get(method, 1)
        assert 0.9 * factor * plain < last["uploaded-bytes"] < 1.3 * factor * plain
        assert last["loss"] < told["0"]["server"]["loss"]


def test_a_run_repeats_whatever_the_node_ids(tmp_path):
    for method in ("fagh", "fedprox"):
        first, second = (
            run(tmp_path, method=method, num_rounds=2)[0]["rounds"] for _ in "ab"
        )
        assert first == second


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"method": "newton"}, UnknownNameError, "unknown method 'newton'; known: fa"),
        ({"probe": "last"}, UnknownNameError, "unknown probe 'last'"),
        ({"rho": 0.0}, ConfigurationError, "rho must be > 0"),
        ({"evaluate_every": 0}, ConfigurationError, "every must be >= 1"),
    ],
)
def test_mistakes_are_told_before_any_round(tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        run(tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_the_readme_has_every_key_with_its_default():
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", (APP / "README.md").read_text(), re.M)
    told = {}
    for keys, defaults in rows:
        names = re.findall(r"`([\w-]+)`", keys)
        values = [value.strip("`") for value in defaults.split(", ")]
        told |= dict(zip(names, values, strict=True))
    assert told == {k: str(v) or '""' for k, v in DEFAULTS["config"].items()}
