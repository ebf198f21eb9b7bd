"""A method whose clients remember, from the library's public faces alone: FedDyn."""

from pathlib import Path

import pytest
import test_scaffold as lines
import test_secure_sums as sums
import torch
import tutorials
import virtual
from safetensors.torch import load_file
from virtual import Watched, tiny_app, tiny_arrays, tiny_client

from flwr_fisher.client import ClientState, Request
from flwr_fisher.errors import ClientError, ConfigurationError, ParamsError
from flwr_fisher.params import trainable_names
from flwr_fisher.secure import SecureSums
from flwr_fisher.strategies import Exchange, Membership
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import Additive

pytestmark = pytest.mark.usefixtures("no_momentum")
OWN = tutorials.load("own_state", "Two runs")


def feddyn(**options):
    trained = trainable_names(options.pop("model", virtual.tiny_model()))
    return OWN.FedDyn(**{"trained": trained, "fraction_evaluate": 0.0, **options})


def run(app=None, clients=3, **start):
    return feddyn().start(LocalGrid(app or tiny_app(), clients), tiny_arrays(), **start)


def test_it_reaches_the_optimum_of_all_data():
    options = {"fraction_train": 0.5}
    found = lines.on_lines(feddyn(model=virtual.plane(), alpha=4.0, **options), 65)
    torch.testing.assert_close(found, lines.optimum(), rtol=0, atol=1e-4)


def test_h_is_the_mean_of_what_clients_keep():
    method = feddyn(fraction_train=0.4, seed=3)
    renew, steps = method.renew, []
    method.renew = lambda *given: steps.append(renew(*given)) or steps[-1]
    method.start(LocalGrid(tiny_app(), 5), tiny_arrays(), num_rounds=4)
    kept = {p.parent.name: p for p in sorted(Path.home().rglob("feddyn-*"))}
    weights = {name: 8 + 2 * int(name.removeprefix("partition-")) for name in kept}
    total = sum(weights.values()) * 5 / len(kept)
    own = {name: load_file(path) for name, path in kept.items()}
    for key, value in steps[-1].state.group("h").items():
        mean = sum(weights[name] * g[key] for name, g in own.items()) / total
        torch.testing.assert_close(value, mean, rtol=1e-4, atol=1e-6)


def test_arguments_that_do_not_fit_are_named_before_any_client_trains():
    with pytest.raises(ConfigurationError, match=r"^alpha must be > 0"):
        feddyn(alpha=0)
    app = Watched(tiny_app())
    with pytest.raises(ConfigurationError, match=r"trained has \['head'\], which the"):
        OWN.FedDyn(trained=["head"]).start(LocalGrid(app, 3), tiny_arrays())
    assert not app.trained


def test_a_lost_state_is_counted_and_told(tmp_path, caplog):
    run(num_rounds=1, checkpoint_dir=tmp_path)
    next(Path.home().rglob("partition-1/feddyn-*")).unlink()
    result = run(num_rounds=2, checkpoint_dir=tmp_path, resume=True)
    assert result.train_metrics_clientapp[2]["num-lost-states"] == 1
    assert "The state 'feddyn' of step 1 is not in" in caplog.text
    assert "start with a new one: partition-1" in caplog.text


def test_a_state_is_refused_by_name():
    problem, like = tiny_client().problem, {"w": torch.ones(2)}
    request = Request({}, {"": {"run": torch.tensor(7), "steps": torch.tensor(0)}})
    with pytest.raises(ConfigurationError, match="letters and hyphens, got 'my/state'"):
        ClientState.of(problem, request, "my/state", like).save(like)
    state = ClientState.of(problem, request, "mine", like)
    with pytest.raises(ParamsError, match=r"the state 'mine': 'w' has shape \(3,\)"):
        state.save({"w": torch.ones(3)})
    with pytest.raises(ParamsError, match=r"the state 'mine': 'w' has shape \(3,\)"):
        state.load({"w": torch.ones(3)})
    with pytest.raises(ClientError, match=r"nothing for 'run'.* `send` what Member"):
        ClientState.of(problem, Request({}), "mine", like)


def test_a_personal_part_begins_as_it_is_told(tmp_path):
    problem, like = tiny_client(state_dir=tmp_path).problem, {"w": torch.ones(2)}
    membership = Membership(7)
    for step, kept in enumerate([2.0, 3.0]):
        request = Request({}, {"": membership.sent()})
        state = ClientState.of(problem, request, "mine", like)
        tensors, lost = state.load(like)
        assert not lost
        assert tensors["w"].tolist() == ([1, 1] if step == 0 else [2, 2])
        tensors["w"] *= 0  # what it began with is not changed
        assert like["w"].tolist() == [1, 1]
        state.save({"w": torch.full((2,), kept)})
        membership = Membership(7, step + 1, 1, {0: step + 1}, {0: 1.0})


def test_what_the_server_did_not_take_is_not_kept(tmp_path):
    problem, like = tiny_client(state_dir=tmp_path).problem, {"w": torch.ones(2)}
    membership, found = Membership(7), []
    for step, (saved, part) in enumerate([(4.0, 0.25), (3.0, 0.5), (0.0, 1.0)]):
        request = Request({}, {"": membership.sent()})
        state = ClientState.of(problem, request, "mine", like)
        found += [state.load()[0]["w"].tolist() for _ in range(2)]  # it is asked again
        state.save({"w": torch.full((2,), saved)})
        parts = {0: part} if part < 1 else {}
        membership = Membership(7, step + 1, 1, {0: step + 1}, {0: 1.0}, parts)
    assert found == [[kept] * 2 for kept in (0.0, 0.0, 1.0, 1.0, 2.0, 2.0)]


def test_a_membership_that_was_not_carried_on_is_named():
    with pytest.raises(ConfigurationError, match=r"\['run', 'steps'\], and has .*Step"):
        Membership.from_tensors({})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"run": "mine"}, "'run' of an Exchange is the library's own"),
        ({"seed": 3}, "'seed' of an Exchange is the library's own"),
    ],
)
def test_an_option_that_cannot_travel_is_named(option, message):
    with pytest.raises(ConfigurationError, match=message):
        Exchange(option, Additive.reader("params"), OWN.FedDyn.renew)


def test_it_takes_secure_sums(tmp_path):
    app = sums.secure_app(tmp_path)
    plain = sums.merged(feddyn(), app, rounds=2)
    secure = sums.merged(feddyn(secure=SecureSums()), app, rounds=2)
    assert sums.distance(plain, secure) < 1e-4
