"""TCT whose server sees sums: the model of the plain run, and no client's features."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from virtual import LIFTED, quick_app, tiny_arrays

from flwr_fisher.errors import ConfigurationError, WireError
from flwr_fisher.secure import SecureSums, SecureSumsMod
from flwr_fisher.strategies import TCT, Regression
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors
from flwr_fisher.wire.tct_upload import EigenvalueCounts, about_features

pytestmark = pytest.mark.usefixtures("no_momentum")
SECURE, CLIENTS = SecureSums(), 3


def tct(**options):
    own = {"stage1_rounds": 1, "num_features": 20, "local_steps": 30}
    return TCT(**{**own, "fraction_evaluate": 0.0, "policy": LIFTED, **options})


def run(strategy, app=None, rounds=4, clients=CLIENTS):
    grid = LocalGrid(quick_app(mods=[SecureSumsMod()]) if app is None else app, clients)
    return strategy.start(grid, tiny_arrays(), num_rounds=rounds)


@pytest.mark.parametrize(
    "options", [{}, {"regression": Regression(control_variates=False)}]
)
def test_the_model_is_that_of_plain_sums(options):
    plain = run(tct(lr=0.05, **options))
    secure = run(tct(lr=0.05, secure=SECURE, **options))
    one, two = arrays_to_tensors(plain.arrays), arrays_to_tensors(secure.arrays)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)
    assert secure.train_metrics_clientapp[4]["num-summed"] == CLIENTS
    (upload,) = secure.uploads
    assert upload.client == "the sum over 3 clients"


def test_no_clients_steps_diverge_at_the_rate_that_is_agreed():
    plain = run(tct(), rounds=3).train_metrics_clientapp
    secure = run(tct(secure=SECURE), rounds=3).train_metrics_clientapp
    largest = float(plain[2]["largest-eigenvalue"])
    assert largest * 0.99 < secure[2]["largest-eigenvalue"] < largest * 2 ** (1 / 8)
    assert 0.9 * plain[2]["lr"] < secure[2]["lr"] < 1.01 * plain[2]["lr"]


def test_a_rate_that_is_too_large_for_many_is_refused_before_stage_2():
    with pytest.raises(ConfigurationError, match="one of the sum over 3 clients"):
        run(tct(lr=10.0, secure=SECURE))


def test_some_clients_take_part_in_a_round_and_go_on_later():
    result = run(tct(lr=0.05, fraction_train=0.75, secure=SECURE), rounds=7, clients=4)
    summed = [m.get("num-summed") for m in result.train_metrics_clientapp.values()]
    assert summed == [3, 4, 3, 3, 3, 3, 3]
    losses = [float(m["control-norm"]) for m in last(result, 5)]
    assert all(value > 0 for value in losses)


def last(result, count):
    rounds = result.train_metrics_clientapp
    return [rounds[n] for n in sorted(rounds)[-count:]]


# What travels

ABOUT = about_features("d", "head", 3)


@given(st.lists(st.floats(0, 2.0**39), min_size=1, max_size=20))
def test_summed_bins_tell_eigenvalues_to_an_eighth_of_an_octave(values):
    counts = sum(EigenvalueCounts.of(ABOUT, value).counts for value in values)
    edges = EigenvalueCounts(ABOUT, counts).eigenvalues
    for value, edge in zip(sorted(values), edges, strict=True):
        assert value <= edge * (1 + 1e-12)
        assert edge <= max(value * 2 ** (1 / 8), 2.0**-40) * (1 + 1e-12)


def test_malformed_numbers_of_clients_are_refused():
    counts = EigenvalueCounts.of(ABOUT, 1.0).counts
    # The last would have the server make an edge for each of 2**40 clients.
    for wrong in (0 * counts, counts * 2**40):
        record = EigenvalueCounts(ABOUT, wrong).to_arrays()
        with pytest.raises(WireError, match="not counts of clients"):
            EigenvalueCounts.read(record, {})


@pytest.fixture(scope="module")
def three_rounds(no_momentum):
    return run(tct(lr=0.05), quick_app(), rounds=3)


@pytest.mark.parametrize("stop", [5, 17, 29, 47, 56])
def test_a_killed_server_goes_on_in_either_stage(stop, three_rounds, tmp_path):
    """Of 3 clients: in the first stage's sums, the moments', the rates', a step's."""
    asked = 0

    class Dying(SecureSumsMod):
        def __call__(self, message, context, call_next):
            nonlocal asked
            asked += 1
            if asked == stop:
                raise KeyboardInterrupt
            return super().__call__(message, context, call_next)

    app = quick_app(mods=[Dying()])
    kept = {"checkpoint_dir": tmp_path / "run"}
    grid = LocalGrid(app, CLIENTS)
    with pytest.raises(KeyboardInterrupt):
        tct(lr=0.05, secure=SECURE).start(grid, tiny_arrays(), 3, **kept)
    kept["resume"] = True
    result = tct(lr=0.05, secure=SECURE).start(grid, tiny_arrays(), 3, **kept)
    one, two = (arrays_to_tensors(r.arrays) for r in (three_rounds, result))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)
