"""The app ``apps/fedfish``, run in this process as Flower runs it."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from apps import load
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.testing import LocalGrid

APP = Path(__file__).parents[1] / "apps" / "fedfish"
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]


def run(path, clients=8, **options):
    named = {key.replace("_", "-"): value for key, value in options.items()}
    config = DEFAULTS["config"] | named | {"output-dir": str(path)}
    assert config.keys() == DEFAULTS["config"].keys()
    client, server = (load(APP, side) for side in ("client", "server"))
    grid = LocalGrid(client, clients, run_config=config)
    server(grid, Context(1, 1, {}, RecordDict(), config))
    metrics = json.loads((path / "metrics.json").read_text())
    return metrics


def test_by_default_it_learns_and_measures(tmp_path):
    metrics = run(tmp_path, num_rounds=4, clients_per_round=5)
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


def test_everything_can_be_chosen(tmp_path):
    chosen = {"held_out": 0.0, "barrier_every": 0, "personalisation_fraction": 0.0}
    metrics = run(
        tmp_path,
        num_rounds=1,
        clients_per_round=64,
        server_optimizer="adam",
        server_lr=0.01,
        fisher_source="last-epoch",
        upload="product",
        **chosen,
    )
    assert metrics["rounds"]["1"]["train"]["num-replies"] == 8
    assert set(metrics["rounds"]["1"]["server"]) == {"accuracy", "loss"}
    few = run(tmp_path, num_rounds=1, codec="small", held_out=3, reduction="mean")
    assert few["rounds"]["1"]["train"]["num-replies"] == 5
    sizes = few["bytes"]
    assert sizes["upload_per_client"] < 0.55 * sizes["fedavg_per_client"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"held_out": 8}, "no client is left to train"),
        ({"held_out": 0.0}, "personalisation is of clients that never train"),
        ({"evaluate_every": 0}, "every must be >= 1"),
        ({"upload": "product"}, "needs an adaptive server_optimizer"),
        ({"codec": "lossless", "budget": 0.5}, "name 'fedavg'"),
    ],
)
def test_mistakes_are_told_before_any_training(tmp_path, options, text):
    with pytest.raises(ConfigurationError, match=text):
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
