"""Each client's influence: the merge without it, by hand."""

import pytest
import rivals_path  # noqa: F401
import torch

from flwr_fisher.curvature import Diagonal
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.merge import (
    DiagonalSums,
    LocalPosterior,
    fedfisher,
    fedfisher_from_sums,
    influence,
)


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
