"""The app ``apps/tct``, run in this process as Flower runs it."""

import json
import logging
import re
import tomllib
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from apps import load
from flwr_fisher.errors import ConfigurationError, UnknownNameError
from flwr_fisher.tangent import TCTModel
from flwr_fisher.tasks import task_from_run_config
from flwr_fisher.testing import LocalGrid

APP = Path(__file__).parents[1] / "apps" / "tct"
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
FEW = {"num_rounds": 5, "stage1_rounds": 2, "local_epochs": 1, "num_features": 300}


def run(path, clients=10, **options):
    named = {key.replace("_", "-"): value for key, value in options.items()}
    config = DEFAULTS["config"] | {"output-dir": str(path)}
    config |= {"state-dir": str(path / "state")} | named
    assert config.keys() == DEFAULTS["config"].keys()
    client, server = (load(APP, side) for side in ("client", "server"))
    grid = LocalGrid(client, clients, run_config=config)
    server(grid, Context(1, 1, {}, RecordDict(), config))
    metrics = json.loads((path / "metrics.json").read_text())
    return metrics


def test_by_default_the_second_stage_wins(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="flwr"):
        metrics = run(tmp_path, stage1_rounds=5, num_rounds=10)
    accuracy, rounds = metrics["accuracy"], metrics["rounds"]
    assert accuracy["tct"] > accuracy["stage1"] + 0.04
    assert accuracy["stage1"] == rounds["5"]["server"]["accuracy"]
    assert accuracy["tct"] == rounds["10"]["server"]["accuracy"]
    stages = [rounds[str(n)]["train"]["stage"] for n in range(1, 11)]
    assert stages == [1] * 5 + [2] * 5
    assert "server" not in rounds["6"]
    assert rounds["10"]["train"]["train_loss"] < rounds["7"]["train"]["train_loss"]
    pictures = {"rounds.png", "labels.png"}
    assert {"metrics.json", "model.safetensors", *pictures} <= {
        p.name for p in tmp_path.iterdir()
    }
    for text in ("stage 1, round 5 of 5", "stage 2", "kB a client"):
        assert text in caplog.text


def test_its_file_is_a_model_that_predicts(tmp_path):
    metrics = run(tmp_path, **FEW)
    task = task_from_run_config(metrics["config"], 10)
    model = TCTModel.load(tmp_path / "model.safetensors", task.make_model())
    images, labels = next(iter(task.test_loader(10_000)))
    correct = (model(images).argmax(1) == labels).double().mean()
    assert float(correct) == pytest.approx(metrics["accuracy"]["tct"])
    sizes, p = metrics["bytes"], 300
    weights = sum(v.numel() for v in task.make_model().state_dict().values())
    assert 4 * 10 * p < sizes["upload_per_client"] < 4 * 10 * p + 5000
    assert 4 * weights < sizes["fedavg_per_client"] < 4 * weights + 5000


def test_everything_can_be_chosen(tmp_path):
    by_default = run(tmp_path, **FEW)
    slow = run(tmp_path, **FEW, solver="steps")
    assert slow["accuracy"]["tct"] == pytest.approx(
        by_default["accuracy"]["tct"], abs=0.02
    )
    metrics = run(
        tmp_path,
        **FEW,
        clients_per_round=6,
        control_variates=False,
        standardise=False,
        feature_dtype="float16",
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
    assert metrics["accuracy"]["tct"] != by_default["accuracy"]["tct"]


def test_a_run_repeats(tmp_path):
    models = []
    for name in "ab":
        (tmp_path / name).mkdir()
        metrics = run(tmp_path / name, **FEW)
        task = task_from_run_config(metrics["config"], 10)
        path = tmp_path / name / "model.safetensors"
        models.append(TCTModel.load(path, task.make_model()).to_tensors())
    assert all(torch.equal(v, models[1][k]) for k, v in models[0].items())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"solver": "newton"}, UnknownNameError, "unknown solver 'newton'"),
        ({"num_rounds": 11}, ConfigurationError, "leaves no round of stage 2"),
        ({"num_features": 0}, ConfigurationError, "num_features must be >= 1"),
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
