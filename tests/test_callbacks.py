"""Callbacks: when they are called, the best model, and early stopping."""

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord
from safetensors import safe_open
from safetensors.torch import load_file
from virtual import quick_app, same_bits, tiny_arrays

from flwr_fisher.callbacks import BestModel, EarlyStopping
from flwr_fisher.errors import CallbackError, ConfigurationError
from flwr_fisher.strategies import FedFisherOneShot, Refinement
from flwr_fisher.testing import LocalGrid


class Told:
    """Remembers what it is told; may fail, or end the run."""

    def __init__(self, fails=0, ends=0):
        self.fails, self.ends = fails, ends
        self.rounds = []
        self.arrays = {}
        self.history = {}

    def on_round_end(self, server_round, arrays, history):
        self.rounds.append(server_round)
        self.arrays[server_round], self.history = arrays, history
        if server_round == self.fails:
            raise ValueError("out of cheese")
        return server_round == self.ends


def run(*callbacks, scores="", refine=None, **options):
    """`scores` has a digit for each round from 0: the server's accuracy."""

    def evaluate(server_round, arrays):
        if not scores:
            return None
        return MetricRecord({"accuracy": int(scores[server_round]) / 10})

    options = {"num_rounds": 4, "callbacks": callbacks, **options}
    strategy = FedFisherOneShot(refine=refine)
    grid = LocalGrid(quick_app(), 3)
    return strategy.start(grid, tiny_arrays(), evaluate_fn=evaluate, **options)


def history_of(name, values):
    return {number: {name: value} for number, value in values.items()}


# When they are called, and with what


def test_they_are_told_of_each_round_with_all_metrics():
    told = Told()
    result = run(told, scores="01234")
    assert told.rounds == [1, 2, 3, 4]
    assert same_bits(told.arrays[4], result.arrays)
    assert not same_bits(told.arrays[1], result.arrays)
    assert sorted(told.history) == [0, 1, 2, 3, 4]
    assert told.history[0] == {"server/accuracy": 0.0}
    last = told.history[4]
    assert last["server/accuracy"] == 0.4
    assert last["train/num-replies"] == 3
    assert last["evaluate/accuracy"] == result.evaluate_metrics_clientapp[4]["accuracy"]


def test_one_that_says_so_ends_the_run(caplog):
    caplog.set_level("INFO", "flwr")
    other = Told()
    assert sorted(run(Told(ends=2), other).train_metrics_clientapp) == [1, 2]
    assert other.rounds == [1, 2]
    assert "[ROUND 2] Told ended the run" in caplog.text


def test_one_that_fails_loses_nothing(tmp_path):
    other = Told()
    with pytest.raises(
        CallbackError, match=r"Told\.on_round_end failed after round 2: Val"
    ):
        run(Told(fails=2), other, checkpoint_dir=tmp_path)
    assert other.rounds == [1, 2]
    again = Told()
    resumed = run(again, checkpoint_dir=tmp_path, resume=True)
    assert again.rounds == [2, 3, 4]
    assert same_bits(resumed.arrays, run().arrays)


def test_a_resumed_run_tells_of_its_last_round_and_knows_all_before(tmp_path):
    run(num_rounds=2, checkpoint_dir=tmp_path, scores="0123")
    told = Told()
    run(told, num_rounds=3, checkpoint_dir=tmp_path, resume=True, scores="0123")
    assert told.rounds == [2, 3]
    accuracies = [told.history[n]["server/accuracy"] for n in range(4)]
    assert accuracies == [0.0, 0.1, 0.2, 0.3]


def test_a_longer_run_forgets_the_scores_of_the_refined_model(tmp_path):
    """It takes that model back, so no later one is compared with it."""
    options = {"refine": Refinement(head=True), "checkpoint_dir": tmp_path}
    options |= {"scores": "019234", "resume": True}
    stop, told = EarlyStopping(patience=2), Told()
    assert run(stop, num_rounds=2, **options).unrefined is not None
    run(stop, told, num_rounds=5, **options)
    assert told.rounds == [2, 3, 4, 5]
    assert {name.split("/")[0] for name in told.history[2]} == {"train"}


def test_a_run_that_was_ended_early_can_be_refined_as_its_warning_says(
    tmp_path, caplog
):
    for kept in ({}, {"checkpoint_dir": tmp_path}):
        ended = run(Told(ends=2), refine=Refinement(head=True), **kept)
        assert ended.unrefined is None
        assert "the model is not refined" in caplog.text
        told_how = "start(..., num_rounds=2, resume=True, reopen=True)" in caplog.text
        assert told_how is bool(kept)
    again = {"num_rounds": 2, "resume": True, "reopen": True, **kept}
    refined = run(Told(ends=2), refine=Refinement(head=True), **again)
    assert same_bits(refined.unrefined, ended.arrays)


def test_what_is_none_is_refused_before_anything_begins():
    for other in (print, EarlyStopping):
        with pytest.raises(ConfigurationError, match="is no callback: pass objects"):
            run(other)  # type: ignore[arg-type]


# The best model, and an early end


def test_the_best_rounds_model_is_kept(tmp_path):
    """The first of equals."""
    told, path = Told(), tmp_path / "models" / "best.safetensors"
    run(told, BestModel(path), scores="90377")
    kept = load_file(path)
    expected = told.arrays[3].to_torch_state_dict()
    assert all(torch.equal(kept[name], value) for name, value in expected.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"round": "3", "metric": "server/accuracy"}


def test_rounding_makes_no_round_the_best():
    scores = {4: 0.8652631578947368, 6: 0.865263157894737, 7: 0.8652}
    history = {n: {"evaluate/accuracy": score} for n, score in scores.items()}
    assert EarlyStopping("evaluate/accuracy", patience=3).on_round_end(7, None, history)


def test_a_crash_before_the_best_model_was_written_is_made_good(tmp_path):
    path = tmp_path / "best.safetensors"
    options = {"checkpoint_dir": tmp_path / "run", "scores": "01900"}
    run(num_rounds=2, **options)
    run(BestModel(path), resume=True, **options)
    with safe_open(path, "pt") as file:
        assert file.metadata()["round"] == "2"


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ({1: 0.1, 2: 0.2, 3: 0.3}, False),
        ({1: 0.3, 2: 0.2}, False),
        ({1: 0.3, 2: 0.2, 3: 0.3}, True),
        ({1: float("nan"), 2: float("nan"), 3: float("nan")}, True),
        ({1: 0.1, 2: float("nan"), 3: 0.2}, False),
    ],
)
def test_patience_ends(values, ends):
    stop = EarlyStopping("server/accuracy", patience=2)
    history = history_of("server/accuracy", values)
    assert stop.on_round_end(max(values), ArrayRecord(), history) is ends


def test_a_metric_that_is_not_there_is_named():
    with pytest.raises(
        CallbackError, match=r"no round .* 'server/accurac'. The metrics are: "
    ):
        run(BestModel("unused", "server/accurac", "max"), scores="01234")
    for values, what in (({1: [1.0]}, "is a list"), ({0: float("nan"), 1: 0.3}, "NaN")):
        stop, history = EarlyStopping("train/x", "max"), history_of("train/x", values)
        with pytest.raises(ConfigurationError, match=f"'train/x' .*{what}"):
            stop.on_round_end(1, ArrayRecord(), history)
    for name in ("accuracy", "evaluation/accuracy", 0.5):
        with pytest.raises(ConfigurationError, match="is not the name of a metric"):
            EarlyStopping(name)
    with pytest.raises(ConfigurationError, match="unknown mode 'up'"):
        EarlyStopping(mode="up")


@pytest.mark.parametrize(
    "name", ["evaluate/loss", "train/train_loss", "server/val-MSE"]
)
def test_a_loss_is_better_if_it_is_smaller(name, tmp_path):
    stop, best = EarlyStopping(name, patience=2), BestModel(tmp_path / "best", name)
    falling = {1: 0.9, 2: 0.5, 3: 0.4, 4: 0.3}
    assert not stop.on_round_end(4, ArrayRecord(), history_of(name, falling))
    for number in falling:
        so_far = {n: falling[n] for n in range(1, number + 1)}
        best.on_round_end(number, tiny_arrays(), history_of(name, so_far))
    with safe_open(tmp_path / "best", "pt") as file:
        assert file.metadata()["round"] == "4"


@pytest.mark.parametrize("name", ["evaluate/brier", "server/loss_accuracy"])
def test_a_name_that_does_not_say_what_is_better_is_refused(name):
    with pytest.raises(ConfigurationError, match='pass mode="max" or mode="min"'):
        EarlyStopping(name)
    EarlyStopping(name, mode="min")
