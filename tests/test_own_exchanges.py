"""A method of several exchanges, from the library's public faces alone: RegMean++."""

import logging

import pytest
import rivals_path  # noqa: F401
import torch
import tutorials
from rivals import regmean_plus_plus
from torch.utils.data import DataLoader
from virtual import Watched, same_bits, tiny_app, tiny_arrays, tiny_data, tiny_model

from flwr_fisher.testing import LocalGrid

OWN = tutorials.load("own_exchanges", "Three runs")
LAYERS = ["0.weight", "3.weight"]


def method(**options):
    return OWN.RegMeanPlusPlus(
        **{
            "layers": LAYERS,
            "fraction_evaluate": 0.0,
            "norm_statistics": "average",
            **options,
        }
    )


def run(strategy=None, app=None, **start):
    grid = LocalGrid(app or tiny_app(), 4)
    return (strategy or method()).start(grid, tiny_arrays(), num_rounds=1, **start)


def fails(times):
    """A client's way to fail at the requests of these numbers."""
    count = iter(range(100))

    def tamper(content):
        if next(count) in times:
            raise ValueError("no power")

    return tamper


def seen(strategy):
    """What the strategy's first step gets, as soon as it runs."""
    average, uploads = strategy.average, []
    strategy.average = lambda state, own: uploads.extend(own) or average(state, own)
    return uploads


def expected(uploads):
    """RegMean++ of the models that clients have sent, in one function."""
    batches = [list(DataLoader(tiny_data(u.number), batch_size=4)) for u in uploads]
    models = [u.payload.part("params") for u in uploads]
    weights = [u.num_examples for u in uploads]
    return regmean_plus_plus(tiny_model(), models, batches, weights)


def test_it_is_what_one_function_finds_of_all_models_and_data():
    strategy = method()
    uploads = seen(strategy)
    found, right = run(strategy).arrays.to_torch_state_dict(), expected(uploads)
    assert len(uploads) == 4
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_a_client_that_failed_in_the_training_is_not_asked_for_its_layers():
    strategy, app = method(), Watched(tamper={1: fails({0})})
    uploads = seen(strategy)
    result = run(strategy, app)
    assert [partition for _, partition in app.trained].count(1) == 1
    assert [u.number for u in uploads] == [0, 2, 3]
    found = result.arrays.to_torch_state_dict()
    for name, value in expected(uploads).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_the_log_and_the_metrics_name_a_client_that_has_left(caplog):
    grid = LocalGrid(tiny_app(), 4)
    ids, gone = list(grid.get_node_ids()), [n for n, p in grid.nodes.items() if p == 3]
    strategy = method()
    average = strategy.average

    def leaves(state, uploads):
        grid.get_node_ids = lambda: [n for n in ids if n not in gone]
        return average(state, uploads)

    strategy.average = leaves
    with caplog.at_level(logging.WARNING, "flwr"):
        result = strategy.start(grid, tiny_arrays(), num_rounds=1)
    assert "left out partition-3: no reply, it is no longer connected" in caplog.text
    assert result.train_metrics_clientapp[1]["num-missing"] == 1
    assert result.train_metrics_clientapp[1]["clients-merged"] == 3


@pytest.mark.parametrize("layer", LAYERS)
def test_a_run_that_stops_within_a_round_ends_in_the_same_bits(layer, tmp_path):
    whole, app, strategy = run(), Watched(), method()
    solve = strategy.solve

    def stops(weight, state, uploads):
        if weight == layer:
            raise KeyboardInterrupt
        return solve(weight, state, uploads)

    strategy.solve = stops
    with pytest.raises(KeyboardInterrupt):
        run(strategy, app, checkpoint_dir=tmp_path)
    resumed = run(app=app, checkpoint_dir=tmp_path, resume=True)
    assert same_bits(resumed.arrays, whole.arrays)
    assert len(app.trained) == 4 * 3  # nobody has done anything twice
