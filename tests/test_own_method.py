"""A method of a user's own, from the library's public faces alone: signSGD.

Bernstein et al., *signSGD with Majority Vote* (ICLR 2019): clients send the signs of
their gradients, the server steps against the sign of their sum.
"""

import pytest
import torch
import tutorials
from virtual import Watched, change_array, tiny_app, tiny_arrays, tiny_client

from flwr_fisher.client import register_job
from flwr_fisher.curvature import gradient
from flwr_fisher.errors import ConfigurationError, RoundError
from flwr_fisher.params import trainable_names
from flwr_fisher.strategies import Exchange
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors

OWN = tutorials.load("own_method", "A run")
SignSGD = OWN.SignSGD


def run(app, **start):
    strategy = SignSGD(fraction_evaluate=0.0, lr=0.05)
    return strategy.start(LocalGrid(app, 3), tiny_arrays(), **start)


def test_a_round_is_the_papers():
    result = run(tiny_app(), num_rounds=1)
    expected = arrays_to_tensors(tiny_arrays())
    votes = dict.fromkeys(trainable_names(tiny_client().problem.model), torch.tensor(0))
    for i in range(3):
        problem = tiny_client(i).problem
        loss_fn = torch.nn.functional.cross_entropy
        local, _ = gradient(problem.model, problem.trainloader, loss_fn=loss_fn)
        votes = {key: votes[key] + local[key].sign() for key in votes}
    for key, vote in votes.items():
        expected[key] = expected[key] - 0.05 * vote.sign()
    actual = arrays_to_tensors(result.arrays)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert result.train_metrics_clientapp[1]["voters"] == 3


def test_what_is_no_sign_is_refused_by_name(caplog):
    app = Watched(tiny_app(), {1: change_array("0.bias", lambda a: 2 * a)})
    result = run(app, num_rounds=1)
    assert result.train_metrics_clientapp[1]["voters"] == 2
    assert "left out partition-1" in caplog.text
    assert "'0.bias': must be int8 signs" in caplog.text


def test_a_run_goes_on_where_it_stopped(tmp_path):
    whole = run(tiny_app(), num_rounds=3)
    app = Watched(tiny_app())
    run(app, num_rounds=2, checkpoint_dir=tmp_path)
    goes_on = run(app, num_rounds=3, checkpoint_dir=tmp_path, resume=True)
    assert [server_round for server_round, _ in app.trained].count(1) == 3
    actual, expected = map(arrays_to_tensors, (goes_on.arrays, whole.arrays))
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_a_job_that_nobody_registered_is_told_with_those_that_there_are():
    strategy = SignSGD(fraction_evaluate=0.0)
    strategy.exchanges = lambda server_round: [  # type: ignore[method-assign]
        Exchange({"job": "sings"}, OWN.Signs.from_arrays, strategy.vote)
    ]
    with pytest.raises(RoundError, match=r"'sings'; known: .*signs"):
        strategy.start(LocalGrid(tiny_app(), 3), tiny_arrays(), num_rounds=1)


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(ConfigurationError, match="there is a job 'train' already"):
        register_job("train")(OWN.signs_job)
