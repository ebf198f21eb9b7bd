"""Metrics by round: what is written, and that something is drawn."""

import json
import logging
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from matplotlib.figure import Figure
from matplotlib.image import imread
from safetensors.torch import load_file

from flwr_fisher.merge import MergeResult
from flwr_fisher.report import (
    plot_rounds,
    report_one_shot,
    report_rounds,
    rounds_of,
    save_report,
)
from flwr_fisher.strategies import CurvatureResult

RUN = {
    0: MetricRecord({"accuracy": 0.1, "personalised-accuracy": 0.2}),
    1: MetricRecord({"accuracy": 0.5, "barrier-loss": 0.3, "shares": [0.5, 0.5]}),
    2: MetricRecord(
        {"accuracy": 0.6, "barrier-loss": -0.1, "personalised-accuracy": 1}
    ),
}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures = []
    save = Figure.savefig

    def keep(self, *args, **kwargs):
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def lines(figure, panel):
    """The curves of a panel; a line across it is not one."""
    every = [
        (list(line.get_xdata()), list(line.get_ydata()))
        for line in figure.axes[panel].lines
        if line.get_transform() == figure.axes[panel].transData
    ]
    return every


def test_metrics_by_round_say_where_they_come_from():
    result = Result(
        train_metrics_clientapp={1: MetricRecord({"loss": 2.0})},
        evaluate_metrics_clientapp={2: MetricRecord({"loss": 3.0})},
        evaluate_metrics_serverapp=RUN,
    )
    found = rounds_of(result)
    assert list(found) == [0, 1, 2]
    assert list(found[0]) == ["server"]
    assert found[1]["train"] == {"loss": 2.0}
    assert found[1]["server"]["barrier-loss"] == 0.3
    assert found[2]["evaluate"] == {"loss": 3.0}


def test_they_reach_metrics_json(tmp_path):
    rounds = {n: {"server": dict(RUN[n % 3])} for n in range(11)}
    save_report(tmp_path, {}, config={}, rounds=rounds)
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert list(written["rounds"]) == [str(n) for n in range(11)]
    assert written["rounds"]["1"]["server"] == dict(RUN[1])
    save_report(tmp_path, {}, config={})
    assert "rounds" not in json.loads((tmp_path / "metrics.json").read_text())


def test_any_number_is_written_and_what_is_none_is_named(tmp_path, caplog):
    accuracy = {"a": torch.tensor(0.5), "b": np.float32(0.25), "c": np.arange(2)}
    seconds = {"train": Fraction(3, 2), np.int64(7): 1}
    config = {"seed": np.int64(3), "folder": tmp_path, "names": [tmp_path]}
    measured = {"accuracy": accuracy, "seconds": seconds}
    save_report(tmp_path, {"w": torch.ones(2)}, config=config, **measured)
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["accuracy"] == {"a": 0.5, "b": 0.25, "c": [0, 1]}
    assert written["seconds"] == {"train": 1.5, "7": 1}
    assert (written["seed"], written["config"]) == (3, {"seed": 3})
    assert "config.folder" in caplog.text
    assert "config.names" in caplog.text


def test_an_error_in_a_score_does_not_cost_the_model(tmp_path):
    task = SimpleNamespace(make_model=lambda: 1 / 0, test_loader=list)
    weight = torch.ones(2)
    merged = MergeResult({"w": weight}, [], 0)
    one_shot = CurvatureResult(arrays=ArrayRecord({"w": weight}), details=merged)
    rounds = Result(arrays=ArrayRecord({"w": weight}))
    more = {"method": "FedAvg", "seconds": {}, "config": {}}
    with pytest.raises(ZeroDivisionError):
        report_one_shot(tmp_path / "one", task=task, result=one_shot)
    with pytest.raises(ZeroDivisionError):
        report_rounds(tmp_path / "many", task=task, result=rounds, **more)
    for name in "one", "many":
        assert load_file(tmp_path / name / "model.safetensors")["w"].equal(weight)


def test_one_run_is_drawn(tmp_path, drawn):
    path = tmp_path / "rounds.png"
    plot_rounds(path, {"FedAvg": RUN}, ["accuracy"])
    (figure,) = drawn
    assert lines(figure, 0) == [([0, 1, 2], [10, 50, 60])]
    assert figure.axes[0].get_ylabel() == "test accuracy, %"
    assert not figure.legends
    assert imread(path).shape[1] > 500


def test_several_runs_and_metrics_are_drawn(tmp_path, drawn):
    short = {1: MetricRecord({"barrier-loss": 0.4})}
    plot_rounds(
        tmp_path / "rounds.png",
        {"FedFish": RUN, "FedAvg": short},
        ["barrier-loss", ("personalised-accuracy", "accuracy"), "shares-error"],
    )
    (figure,) = drawn
    assert len(figure.axes) == 2
    assert lines(figure, 0) == [([1, 2], [0.3, -0.1]), ([1], [0.4])]
    first, second, *_ = lines(figure, 1)
    assert first == ([0, 2], [20, 100])
    assert second == ([0, 1, 2], [10, 50, 60])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["FedFish", "FedAvg"]
    inner = figure.axes[1].get_legend()
    names = [text.get_text() for text in inner.get_texts()]
    assert names == ["personalised", "accuracy"]
    assert figure.axes[1].get_ylabel() == "accuracy, %"


def test_a_mark_says_what_begins(tmp_path, drawn):
    marks, path = {1: "stage 2"}, str(tmp_path / "new" / "a.png")
    plot_rounds(path, {"a": RUN}, ["accuracy", "shares"], marks=marks)
    (figure,) = drawn
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["stage 2"]
    upright = [line.get_xdata() for line in axes.lines[1:]]
    assert [list(x) for x in upright] == [[1, 1]]


def test_what_no_run_has_costs_a_warning(tmp_path, drawn, caplog):
    path = tmp_path / "rounds.png"
    with caplog.at_level(logging.WARNING, logger="flwr"):
        plot_rounds(path, {"a": RUN, "b": {}}, ["loss", "accuracy", ("x", "shares")])
        plot_rounds(tmp_path / "none.png", {"a": {}}, ["accuracy"])
    assert len(drawn) == len(drawn[0].axes) == 1
    assert "rounds.png: no run has loss" in caplog.text
    assert "rounds.png: no run has x or shares" in caplog.text
    assert not (tmp_path / "none.png").exists()
