"""What a run that ends with an error leaves: the rounds that it merged."""

import pytest
import torch
import tutorials
from flwr.app import MetricRecord
from virtual import Watched, fail, quick_app, same_bits, tiny_arrays

from flwr_fisher import merge
from flwr_fisher.errors import CheckpointError, RoundError
from flwr_fisher.server.door import Door
from flwr_fisher.server.round import ExchangeRun
from flwr_fisher.server.run import Run
from flwr_fisher.strategies import (
    Exchange,
    FedFisherOneShot,
    Policy,
    Refinement,
    Waiting,
    fedfisher,
)
from flwr_fisher.strategies.exchanges import refinement
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import tensors_to_arrays

OWN = tutorials.load("own_exchanges", "Three runs")


def run(strategy, app=None, **options):
    grid = LocalGrid(app or quick_app(), 3)
    return strategy.start(grid, tiny_arrays(), **{"num_rounds": 2, **options})


def fails_after(server_round):
    def evaluate(number, arrays):
        if number == server_round:
            raise OSError("no space left")
        return MetricRecord({"accuracy": 0.5})

    return evaluate


@pytest.mark.parametrize("server_round", [1, 2])
def test_it_has_the_model_where_the_servers_evaluation_fails(server_round, caplog):
    strategy = FedFisherOneShot(refine=None)
    with pytest.raises(OSError, match="no space left"):
        run(strategy, evaluate_fn=fails_after(server_round))
    whole = run(FedFisherOneShot(refine=None), num_rounds=server_round)
    assert same_bits(strategy.partial_result.arrays, whole.arrays)
    assert len(strategy.partial_result.uploads) == 3
    assert "partial_result has the merged model, and the 3 uploads" in caplog.text


@pytest.mark.parametrize("finished", [0, 1])
def test_it_has_whole_rounds_alone(finished):
    def own():
        layers = ["0.weight", "3.weight"]
        return OWN.RegMeanPlusPlus(layers=layers, norm_statistics="average")

    count = iter(range(100))

    def dies(content):  # two of three clients, in a later round's second exchange
        if next(count) >= 9 * finished + 4:
            raise OSError("no power")

    strategy = own()
    with pytest.raises(RoundError):
        run(strategy, Watched(tamper=dict.fromkeys(range(3), dies)))
    merged = run(own(), num_rounds=1).arrays if finished else tiny_arrays()
    assert same_bits(strategy.partial_result.arrays, merged)
    assert len(strategy.partial_result.uploads) == 1  # of the exchange that failed
    run(strategy, num_rounds=1)
    assert strategy.partial_result is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError])
def test_it_has_the_merge_if_the_run_ends_in_what_is_optional(error, server_patch):
    def fails(*args):
        raise error("of a test")

    server_patch.setattr(refinement, "_solve_head", fails)
    strategy, options = FedFisherOneShot(), {"num_rounds": 1}
    with pytest.raises(error, match="of a test"):
        run(strategy, **options)
    merged = run(FedFisherOneShot(refine=None), **options)
    assert same_bits(strategy.partial_result.arrays, merged.arrays)


@pytest.mark.parametrize("on_failed_round", ["skip", "raise"])
def test_a_round_more_that_fails_leaves_the_refined_model(tmp_path, on_failed_round):
    def own():
        waiting = Waiting(on_failed_round=on_failed_round)
        return FedFisherOneShot(refine=Refinement(head=True), waiting=waiting)

    first = run(own(), num_rounds=1, checkpoint_dir=tmp_path)
    app = Watched(tamper=dict.fromkeys(range(3), fail))
    strategy = own()
    try:
        arrays = run(strategy, app, checkpoint_dir=tmp_path, resume=True).arrays
    except RoundError:
        assert on_failed_round == "raise"
        arrays = strategy.partial_result.arrays
    assert same_bits(arrays, first.arrays)
    assert not same_bits(arrays, first.unrefined)


@pytest.mark.parametrize(
    ("owner", "function"),
    [
        (Policy, "references"),
        (Policy, "limit"),
        (Exchange, "take"),
        (fedfisher, "merge_posteriors"),
        (Door, "metrics"),
        (ExchangeRun, "close"),
        (Run, "take_step"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyError, KeyboardInterrupt])
def test_whatever_fails_after_the_door_leaves_the_uploads(
    owner, function, error, server_patch
):
    def fails(*args, **options):
        raise error("of a test")

    server_patch.setattr(owner, function, fails)
    options = {"norm_statistics": "average", "refine": None}
    strategy = FedFisherOneShot(**options)
    with pytest.raises(error, match="of a test"):
        run(strategy, num_rounds=1)
    server_patch.undo()
    uploads = strategy.partial_result.uploads
    by_hand = merge.fedfisher([u.payload.posterior(u.num_examples) for u in uploads])
    want = run(FedFisherOneShot(**options), num_rounds=1).arrays
    assert same_bits(tensors_to_arrays(by_hand.params), want)
