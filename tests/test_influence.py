"""Each client's influence: the merge without it, by hand and in the report."""

import json

import pytest
import rivals_path  # noqa: F401
import torch
from tasks import load_task
from test_report_one_shot import uploads

from flwr_fisher.curvature import Diagonal
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.merge import (
    DiagonalSums,
    LocalPosterior,
    fedfisher,
    fedfisher_from_sums,
    influence,
)
from flwr_fisher.report import report_one_shot
from flwr_fisher.report.influence import influences
from flwr_fisher.strategies import CurvatureResult, Upload
from flwr_fisher.wire import FisherUpload


def client(value, fisher, examples):
    F = Diagonal({"w": torch.tensor([fisher])})
    params = {"w": torch.tensor([value]), "count": torch.tensor(3)}
    return LocalPosterior(params, F, examples)


def test_by_hand():
    """Means weighted by examples times Fishers, 1 x 2, 2 x 1 and 4 x 1."""
    clients = [client(1.0, 2.0, 1), client(4.0, 1.0, 2), client(10.0, 1.0, 4)]
    merged = fedfisher(clients, solver="closed-form")
    full = (2 * 1 + 2 * 4 + 4 * 10) / 8
    without = [(2 * 4 + 4 * 10) / 6, (2 * 1 + 4 * 10) / 6, (2 * 1 + 2 * 4) / 4]
    got = influence(clients, merged, score=lambda params: float(params["w"]))
    assert [each.score for each in got] == pytest.approx(without)
    want = [abs(full - rest) / rest for rest in without]
    assert [each.distance for each in got] == pytest.approx(want)
    assert [each.score for each in influence(clients, merged)] == [None] * 3


def test_the_others_are_merged_with_the_same_options():
    clients = [client(float(i), 1.0 + i, 5) for i in range(4)]
    merged = fedfisher(clients, anchor=0.5, robust=3.0)
    got = influence(clients, merged, score=lambda params: float(params["w"]))
    for index, each in enumerate(got):
        others = clients[:index] + clients[index + 1 :]
        want = fedfisher(others, anchor=0.5, robust=3.0).params["w"]
        assert each.score == float(want)
        assert float(want) != float(fedfisher(others).params["w"])


def test_what_has_no_influence_to_measure():
    one = client(1.0, 1.0, 1)
    with pytest.raises(ConfigurationError, match="at least 2 clients"):
        influence([one], fedfisher([one]))
    params = {"w": torch.ones(1)}
    sums = DiagonalSums.of([LocalPosterior(params, one.curvature, 1)] * 2)
    with pytest.raises(ConfigurationError, match="does not know the clients' parts"):
        influence([one, one], fedfisher_from_sums(sums))


def digits():
    return load_task(
        dataset="digits", model="logistic", partition="iid", num_partitions=3, seed=0
    )


def with_outlier(task):
    """Return uploads of which the second is upside down, and a hundred times large."""
    replies = uploads(task)
    odd = replies[1]
    params = {k: -100 * v for k, v in odd.payload.params.items()}
    payload = FisherUpload(params, odd.payload.curvature)
    replies[1] = Upload(
        odd.node_id, odd.client, odd.num_examples, payload, odd.metrics, 1
    )
    return replies


def test_the_report_has_the_outlier_first(tmp_path, caplog):
    task = digits()
    replies = with_outlier(task)
    merged = fedfisher(
        [u.payload.posterior(u.num_examples) for u in replies], robust=0.0
    )
    before = {k: v.clone() for k, v in merged.params.items()}
    result = CurvatureResult(uploads=replies, details=merged)
    with caplog.at_level("INFO", logger="flwr"):
        scores = report_one_shot(
            tmp_path, task=task, result=result, seconds={}, config={}
        )
    rows = json.loads((tmp_path / "metrics.json").read_text())["influence"]
    assert rows[0]["client"] == "partition-1"
    assert sorted(row["client"] for row in rows) == [f"partition-{i}" for i in range(3)]
    assert rows[0]["distance"] > 1
    assert all(row["distance"] < 1 for row in rows[1:])
    assert rows[0]["accuracy_without"] > scores["fedfisher"]
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    lines = [r.getMessage() for r in caplog.records]
    (first, *others) = [i for i, line in enumerate(lines) if "partition-" in line]
    assert "partition-1" in lines[first]
    assert len(others) == 2
    assert all(torch.equal(before[k], v) for k, v in merged.params.items())


@pytest.mark.parametrize(
    ("options", "count", "reason"),
    [
        ({}, 21, "one merge for each of 21 clients, and the report makes 20 at most"),
        ({}, 1, "there is one client"),
        ({"solver": "adam", "iterations": 2}, 3, "it takes one merge for each client"),
    ],
)
def test_where_it_is_left_out_one_line_says_why(options, count, reason, caplog):
    odd = uploads(digits())[0]
    replies = [odd] * count
    merged = fedfisher(
        [u.payload.posterior(u.num_examples) for u in replies], **options
    )
    with caplog.at_level("INFO", logger="flwr"):
        assert influences(replies, merged, lambda params: 0.0) == []
    assert [r.getMessage() for r in caplog.records if reason in r.getMessage()]
    assert len(caplog.records) == 1
