"""What a newcomer gets wrong first is told in words that lead out of it."""

import pytest
import torch
from torch import nn
from virtual import ask, metrics_of, tiny_app, tiny_arrays, tiny_client

from flwr_fisher.curvature import Diagonal, fisher
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    DataError,
    ParamsError,
)
from flwr_fisher.merge import LocalPosterior, merge_fisher
from flwr_fisher.strategies import FedFisherOneShot
from flwr_fisher.testing import LocalGrid


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "train_fn must return a dict of metrics"),
        (0.5, "train_fn must return a dict of metrics"),
        ({"loss": "low"}, "train_fn returned 'loss': 'low'"),
        ({1: 0.5}, "train_fn returned 1"),
    ],
)
def test_what_train_fn_must_return(returned, text):
    client = tiny_client(train_fn=lambda *arguments: returned)
    with pytest.raises(ClientError, match=text):
        ask(client)


def test_a_metric_may_be_a_tensor_of_one_number():
    client = tiny_client(train_fn=lambda *arguments: {"loss": torch.tensor(0.5)})
    assert metrics_of(ask(client))["loss"] == 0.5


def test_initial_arrays_that_are_a_state_dict():
    grid = LocalGrid(tiny_app(), 3)
    with pytest.raises(ConfigurationError, match=r"wrap it, ArrayRecord\(\.\.\.\)"):
        FedFisherOneShot().start(grid, nn.Linear(2, 2).state_dict())


def test_a_keyword_of_start_given_to_the_constructor():
    with pytest.raises(TypeError, match=r"CurvatureStrategy.*'num_rounds'"):
        FedFisherOneShot(num_rounds=3)


def test_an_exception_in_a_client_is_logged_with_its_traceback(caplog):
    def broken(*arguments):
        raise KeyError("partition_id")

    grid = LocalGrid(tiny_client(train_fn=broken).as_client_app(), 3)
    with pytest.raises(Exception, match="partition_id"):
        FedFisherOneShot().start(grid, tiny_arrays())
    assert "in broken" in caplog.text


def test_a_model_where_its_parameters_are_wanted():
    F = Diagonal({"w": torch.ones(2)})
    with pytest.raises(ConfigurationError, match=r"shared_state\(model\)"):
        LocalPosterior(nn.Linear(2, 2), F, 1)
    with pytest.raises(ConfigurationError, match="a Curvature"):
        LocalPosterior({"w": torch.ones(2)}, {"w": torch.ones(2)}, 1)


def test_parameters_that_require_gradients_or_are_not_finite():
    F = Diagonal({"w": torch.ones(2)})
    good = LocalPosterior({"w": nn.Parameter(torch.ones(2))}, F, 1)
    assert not merge_fisher([good, good]).params["w"].requires_grad
    bad = LocalPosterior({"w": torch.tensor([1.0, float("nan")])}, F, 1)
    with pytest.raises(ParamsError, match="posterior 1: 'w' holds NaN"):
        merge_fisher([good, bad])


def test_a_batch_where_a_loader_is_wanted():
    with pytest.raises(DataError, match=r"pass \[inputs\]"):
        fisher(nn.Linear(2, 2), torch.randn(3, 2))
