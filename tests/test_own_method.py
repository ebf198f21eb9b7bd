"""A method of a user's own, from the library's public faces alone: signSGD.

Bernstein et al., *signSGD with Majority Vote* (ICLR 2019): clients send the signs of
their gradients, the server steps against the sign of their sum.
"""

import pytest
import torch
import tutorials
from virtual import Watched, change_array, tiny_app, tiny_arrays, tiny_client

from flwr_fisher.client import jobs, register_job
from flwr_fisher.client.jobs import get_job
from flwr_fisher.curvature import gradient
from flwr_fisher.errors import ConfigurationError, UnknownNameError
from flwr_fisher.params import trainable_names
from flwr_fisher.strategies import Exchange, FedFisherOneShot, ServerState, Step
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
    assert run(app, num_rounds=1).train_metrics_clientapp[1]["voters"] == 2
    assert "left out partition-1" in caplog.text
    assert "'0.bias': must be int8 signs" in caplog.text


class Forgetful(SignSGD):
    """A method whose step returns what it should not."""

    def vote(self, state, uploads):
        return self.returned(state)


WRONG = {
    "dict": (lambda s: dict(s.params), r"returned \{[\s\S]*return Step\("),
    "none": (lambda s: None, r"returned None.*must return Step\("),
    "params": (lambda s: Step(dict(s.params)), r"returned Step\([\s\S]*return Step\("),
    "number": (
        lambda s: Step(ServerState(s.params, {"velocity": 0.9})),
        r"the group 'velocity' as 0\.9, not as a dict",
    ),
    "no-tensor": (
        lambda s: Step(ServerState(s.params, {"velocity": {"w": 0.9}})),
        r"the group 'velocity' as \{'w': 0\.9\}, not as a dict of tensors",
    ),
    "groups": (
        lambda s: Step(ServerState(s.params, [])),
        r"returned \[\], but the groups of a state are a dict",
    ),
    "metrics": (
        lambda s: Step(s, {"loss": "low"}),
        r"in the metrics of its Step must return .*'low'",
    ),
    "half-a-model": (
        lambda s: Step(ServerState({"0.weight": s.params["0.weight"]})),
        r"not the model's in 0\.bias, 1\.bias, .* is torch.float32 of .* and absent",
    ),
    "one-key-more": (
        lambda s: Step(ServerState({**s.params, "9.bias": s.params["0.bias"]})),
        r"the model's in 9\.bias: '9\.bias' is absent in the model, and torch\.float32",
    ),
    "another-dtype": (
        lambda s: Step(ServerState({k: v.double() for k, v in s.params.items()})),
        r"is torch\.float32 of .* in the model, and torch\.float64 of",
    ),
    "another-shape": (
        lambda s: Step(ServerState({**s.params, "0.bias": s.params["0.bias"][:-1]})),
        r"the model's in 0\.bias: ",
    ),
    "no-model": (
        lambda s: Step(ServerState({"w": 0.5})),
        r"the params as \{'w': 0\.5\}, not as a dict of tensors",
    ),
}


@pytest.mark.parametrize(("returned", "message"), WRONG.values(), ids=WRONG)
def test_a_step_that_returns_something_else_is_named(returned, message):
    strategy = Forgetful(fraction_evaluate=0.0)
    strategy.returned = returned
    with pytest.raises(ConfigurationError, match=rf"^Forgetful\.vote .*{message}"):
        strategy.start(LocalGrid(tiny_app(), 3), tiny_arrays(), num_rounds=1)


@pytest.mark.parametrize("returned", [None, Exchange({}, dict, dict), [SignSGD]])
def test_exchanges_that_are_no_list_of_exchanges_are_named(returned):
    app, strategy = Watched(), SignSGD(fraction_evaluate=0.0)
    strategy.exchanges = lambda server_round: returned
    with pytest.raises(ConfigurationError, match="must return a list of Exchange"):
        strategy.start(LocalGrid(app, 3), tiny_arrays(), num_rounds=1)
    assert not app.trained


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(ConfigurationError, match="there is already a job 'train'"):
        register_job("train")(OWN.signs_job)


def named(name, file, module):
    """A job that is called `name`, of a file and of the module that it is read as."""
    space = {"__name__": module}
    exec(compile(f"def {name}(problem, request): ...", file, "exec"), space)
    return space[name]


def test_a_job_that_is_read_again_takes_its_place(monkeypatch):
    monkeypatch.setitem(jobs._JOBS, "train", dict(jobs._JOBS["train"]))
    register_job("twice")(named("twice_job", "my_jobs.py", "my_jobs"))
    again = register_job("twice")(named("twice_job", "cell-2", "my_jobs"))
    assert get_job("twice") is again


def test_an_unknown_job_may_be_one_whose_module_is_not_imported():
    with pytest.raises(UnknownNameError, match="whose modules the client app imports"):
        get_job("polish")
    with pytest.raises(UnknownNameError, match=r"unknown job 'gradeint'; .*gradient"):
        get_job("gradeint")


def test_a_derived_strategys_settings_are_those_of_its_classes_too():
    """A run was resumed with other options of the class that it is derived from."""

    class WithLength(FedFisherOneShot):
        def settings(self):
            return {"length": 0.1}

    own = {"strategy": "WithLength", "length": 0.1}
    assert WithLength().options() == {**FedFisherOneShot().options(), **own}
