"""A run that was stopped goes on where it was, and ends as if nothing had happened."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import rivals_path  # noqa: F401
import torch
from flwr.app import ConfigRecord, MetricRecord
from rivals import FedGA
from safetensors import safe_open
from virtual import (
    Watched,
    drop_array,
    fail,
    fedfisher_with,
    kill,
    kill_after,
    killing_app,
    node_of,
    same_bits,
    set_metric,
    tiny_arrays,
)

from flwr_fisher.errors import CheckpointError, ConfigurationError, RoundError
from flwr_fisher.server.journal import Journal
from flwr_fisher.strategies import FAGH, FedFisherOneShot, MergeOptions, Policy
from flwr_fisher.testing import LocalGrid

CLIENTS, ROUNDS = 4, 3
ALL = [(n, p) for n in range(1, ROUNDS + 1) for p in range(CLIENTS)]


def evaluate(server_round, arrays):
    total = float(sum(array.numpy().sum() for array in arrays.values()))
    return MetricRecord({"sum": total / 3, "round": server_round, "list": [0.1, total]})


def start(
    app=None,
    where=None,
    *,
    num_rounds=ROUNDS,
    evaluate_fn=evaluate,
    resume=False,
    reopen=False,
    train_config=None,
    **options,
):
    return fedfisher_with(**options).start(
        LocalGrid(app or Watched(), CLIENTS),
        tiny_arrays(),
        num_rounds=num_rounds,
        train_config=train_config,
        evaluate_fn=evaluate_fn,
        checkpoint_dir=where,
        resume=resume,
        reopen=reopen,
    )


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """The folder of a run of one round."""
    where = tmp_path_factory.mktemp("once")
    start(where=where, num_rounds=1)
    return where


@pytest.fixture(scope="module")
def uninterrupted():
    return start()


def assert_same_result(left, right):
    """Bit for bit."""
    assert same_bits(left.arrays, right.arrays)
    assert left.train_metrics_clientapp == right.train_metrics_clientapp
    assert left.evaluate_metrics_serverapp == right.evaluate_metrics_serverapp
    assert left.evaluate_metrics_clientapp == right.evaluate_metrics_clientapp


ALWAYS = {"run.safetensors", "lock"}


def files(where):
    return {str(p.relative_to(where)) for p in where.rglob("*") if p.is_file()}


# Stopped, and resumed


@pytest.mark.parametrize("asked", [1, CLIENTS, 11])
def test_killed_while_uploads_arrive(tmp_path, uninterrupted, asked, caplog):
    """Or right after a round."""
    app = killing_app(asked)
    with pytest.raises(KeyboardInterrupt):
        start(app, tmp_path)
    accepted = app.trained[:-1]
    server_round = asked // CLIENTS + 1
    folder = tmp_path / f"uploads-{server_round:04d}" / "exchange-1"
    kept = {path.stem for path in folder.glob("*.safetensors")}
    assert kept == {f"partition-{p}" for n, p in accepted if n == server_round}
    again = Watched()
    with caplog.at_level("INFO", logger="flwr"):
        result = start(again, tmp_path, resume=True)
    missing = [f"partition-{p}" for n, p in ALL if n == server_round]
    missing = ", ".join(name for name in missing if name not in kept)
    assert f"train: asking {missing}" in caplog.messages
    assert_same_result(result, uninterrupted)
    assert sorted(again.trained + accepted) == ALL
    names = [[upload.client for upload in r.uploads] for r in (result, uninterrupted)]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("stop", "before"), [(SystemExit, 0), (OSError, 2), (KeyboardInterrupt, 2)]
)
def test_killed_after_the_step_and_before_the_round_is_written(
    tmp_path, uninterrupted, stop, before
):
    def dies(server_round, arrays):
        if server_round == before:
            raise stop
        return evaluate(server_round, arrays)

    with pytest.raises(stop):
        start(where=tmp_path, evaluate_fn=dies)
    again = Watched()
    assert_same_result(start(again, tmp_path, resume=True), uninterrupted)
    assert sorted(again.trained) == ALL[before * CLIENTS :]


def test_a_rejected_reply_is_not_kept(tmp_path):
    """A round that failed for it can be taken up again."""
    bad = {1: drop_array("0.weight"), 2: fail, 3: set_metric("num-examples", 0)}
    with pytest.raises(RoundError):
        start(Watched(tamper=bad), tmp_path)
    first = "uploads-0001/exchange-1/partition-0.safetensors"
    record = "uploads-0001/exchange-1.safetensors"
    assert files(tmp_path) == {*ALWAYS, "round-0000.safetensors", record, first}
    again = Watched()
    start(again, tmp_path, resume=True, num_rounds=1)
    assert sorted(again.trained) == ALL[1:CLIENTS]


@pytest.mark.parametrize("num_rounds", [ROUNDS, 0])
def test_when_all_is_done_the_result_is_returned(
    tmp_path, uninterrupted, num_rounds, caplog
):
    """More rounds may be added; then the last two, and the last uploads, are there."""
    start(where=tmp_path, num_rounds=1)
    with safe_open(tmp_path / "round-0001.safetensors", "pt") as file:
        for key, array in start(num_rounds=1).arrays.items():
            assert torch.equal(file.get_tensor(key), torch.tensor(array.numpy()))
    more = Watched()
    assert_same_result(start(more, tmp_path, resume=True), uninterrupted)
    assert sorted(more.trained) == ALL[CLIENTS:]
    uploads = {
        f"uploads-0003/exchange-1/partition-{p}.safetensors" for p in range(CLIENTS)
    }
    uploads.add("uploads-0003/exchange-1.safetensors")
    rounds = {f"round-{n:04d}.safetensors" for n in (2, 3)}
    assert files(tmp_path) == rounds | uploads | ALWAYS
    again = Watched()

    def never(server_round, arrays):
        raise AssertionError(f"round {server_round} was evaluated again")

    own = {"num_rounds": num_rounds, "evaluate_fn": never}
    caplog.set_level("INFO", logger="flwr")
    assert "reopen=True" not in caplog.text
    result = start(again, tmp_path, resume=True, **own)
    assert "All rounds are finished" in " ".join(caplog.text.split())
    assert_same_result(result, uninterrupted)
    assert not again.trained
    assert not again.evaluated
    assert result.uploads == []


# What is on disk


def gradients_displaced(app, where=None, **options):
    """Do a round of two exchanges."""
    strategy = FedGA(beta=0.5, fraction_evaluate=0.0)
    grid = LocalGrid(app, 3)
    return strategy.start(grid, tiny_arrays(), checkpoint_dir=where, **options)


def test_a_resume_knows_who_answered_the_first_of_two_exchanges(tmp_path):
    """Client 1 failed in the first exchange, and would not if it were asked again."""

    def failing_first():
        app = Watched()

        def tamper(content):
            if [p for _, p in app.trained].count(1) == 1:
                raise ValueError("out of cheese")

        app.tamper[1] = tamper
        return app

    expected, stopped = gradients_displaced(failing_first()), failing_first()
    stopped.tamper |= dict.fromkeys((0, 2), kill_after(4, stopped))
    with pytest.raises(KeyboardInterrupt):
        gradients_displaced(stopped, tmp_path)
    assert (tmp_path / "uploads-0001" / "exchange-2").exists()
    again = Watched()
    result = gradients_displaced(again, tmp_path, resume=True)
    assert {c["job"] for c in again.configs} == {"displaced"}
    assert same_bits(result.arrays, expected.arrays)


def spoil(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_what_a_later_exchange_was_made_of_may_not_get_lost(tmp_path):
    expected = gradients_displaced(Watched(), tmp_path / "whole")
    stopped, where = Watched(), tmp_path / "stopped"
    stopped.tamper = dict.fromkeys((0, 2), kill_after(4, stopped))
    with pytest.raises(KeyboardInterrupt):
        gradients_displaced(stopped, where)
    uploads = where / "uploads-0001"
    spoil(uploads / "exchange-1" / "partition-1.safetensors")
    for _ in range(2):
        app = Watched()
        with pytest.raises(CheckpointError, match=r"partition-1 is damaged.*delete"):
            gradients_displaced(app, where, resume=True)
        assert not app.trained
    shutil.rmtree(uploads)
    result = gradients_displaced(Watched(), where, resume=True)
    assert same_bits(result.arrays, expected.arrays)


@pytest.mark.parametrize("lost", [1, 11])
def test_the_last_of_many_exchanges_is_opened_again(clock, tmp_path, lost, caplog):
    """Who missed the first one cannot join the others, which the log tells."""

    class Loses(LocalGrid):
        """Holds one reply back for good."""

        def pull_messages(self, message_ids):
            replies = list(super().pull_messages(message_ids))
            asked = [p for _, p in app.trained].count(3)
            held = node_of(self, 3) if asked == lost else None
            return [
                r
                for r in replies
                if r.metadata.src_node_id != held or r.metadata.message_type == "query"
            ]

    def run(grid, **options):
        strategy = FedFisherOneShot(
            aggregate="sums",
            merge=MergeOptions(iterations=9),
            norm_statistics="average",
            refine=None,
            fraction_evaluate=0.0,
        )
        options |= {"checkpoint_dir": tmp_path, "timeout": 60}
        return strategy.start(grid, tiny_arrays(), **options)

    app = Watched()
    first = run(Loses(app, 4))
    assert first.train_metrics_clientapp[1]["num-missing"] == 1
    left_out = "1 of the clients asked are not in the last round's model"
    (name,) = first.left_out
    assert f"{left_out} ({name})" in caplog.text
    again = Watched()
    with caplog.at_level("WARNING", logger="flwr"):
        result = run(LocalGrid(again, 4), resume=True, reopen=True)
    metrics = result.train_metrics_clientapp[1]
    if lost == 1:
        assert not again.trained
    else:
        assert again.configs[-1]["iteration"] == 9
        assert again.trained == [(1, 3)]
        assert "num-missing" not in metrics


@pytest.mark.parametrize("again", [{}, {"reopen": True}], ids=["resumed", "reopened"])
@pytest.mark.parametrize("dies", ["when it has asked", "when the state is written"])
def test_a_server_dies_while_a_round_is_opened_again(
    tmp_path, dies, again, monkeypatch
):
    start(Watched(tamper={3: fail}), tmp_path, num_rounds=1)
    options = {"where": tmp_path, "num_rounds": 1, "resume": True}
    app, finish = Watched(), Journal.finish
    if dies == "when it has asked":
        app.tamper[3] = kill
    else:

        def before_it_is_written(self, server_round, *rest):
            if server_round == 1:
                raise KeyboardInterrupt
            finish(self, server_round, *rest)

        monkeypatch.setattr(Journal, "finish", before_it_is_written)
    with pytest.raises(KeyboardInterrupt):
        start(app, reopen=True, **options)
    monkeypatch.undo()
    last = Watched()
    assert same_bits(start(last, **options, **again).arrays, start(num_rounds=1).arrays)
    assert len(last.trained) == (dies == "when it has asked")


def test_a_round_that_cannot_be_opened_again_stays(tmp_path):
    first = start(where=tmp_path, num_rounds=1)
    spoil(tmp_path / "round-0000.safetensors")
    options = {"where": tmp_path, "num_rounds": 1, "resume": True}
    damaged = r"round-0000\.safetensors is damaged.*; resume without reopen=True$"
    with pytest.raises(CheckpointError, match=damaged):
        start(reopen=True, **options)
    assert same_bits(start(**options).arrays, first.arrays)


# What is refused


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"seed": 1}, "with other options: seed: 0 -> 1. Resume it with"),
        ({"min_train_nodes": 3}, "min_train_nodes: 2 -> 3"),
        ({"iterations": 7}, "iterations: '4, 1 in a regression' -> 7"),
        ({"iterations": 4}, "iterations: '4, 1 in a regression' -> 4"),
        ({"solver": "adam", "score": lambda params: 0.0}, "score: False -> True"),
        ({"policy": Policy(max_distance=9.0)}, "max_distance: 1000.0 -> 9.0"),
        ({"train_config": ConfigRecord({"lr": 0.2})}, "train_config.lr: None -> '0.2'"),
    ],
)
def test_another_train_config_is_told(once, options, change):
    """And every option that rounds hang on; those that are the same are not named."""
    app = Watched()
    with pytest.raises(CheckpointError) as caught:
        start(app, once, resume=True, **options)
    assert change in str(caught.value)
    assert not app.trained


def test_another_run_config_is_told_unless_its_key_may_change(tmp_path):
    """Clients read it, too: also of a run that has nothing left to do."""

    def run(config, **options):
        grid = LocalGrid(app := Watched(), CLIENTS, run_config=config)
        strategy = fedfisher_with()
        options |= {"checkpoint_dir": tmp_path, "num_rounds": 1}
        strategy.start(grid, tiny_arrays(), **options)
        return app

    run({"epochs": 400, "out": "a"})  # it need not say what may change later
    run({"epochs": 400, "out": "b"}, resume=True, may_change=["out"])
    for changed, text in (
        ({"epochs": 5}, "run_config.epochs: 400 -> 5"),
        ({}, "run_config.epochs: 400 -> None"),
        ({"epochs": 400, "lr": 0.1}, "run_config.lr: None -> 0.1"),
    ):
        with pytest.raises(CheckpointError, match=text):
            run(changed, resume=True, may_change=["out"])


AN_APP = """
[project]
name = "own"
version = "1.0"
description = ""
license = "Apache-2.0"
[tool.flwr.app]
publisher = "me"
components = {{ serverapp = "own:app", clientapp = "own:app" }}
config = {{ epochs = {epochs}, lr = 0.1 }}
"""


def test_another_default_of_the_app_is_told(tmp_path, monkeypatch):
    """Clients read it, too: trainings of 30 and of 10 epochs were merged."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    installed = tmp_path / "apps" / f"me.own.1.0.{'0' * 8}"
    installed.mkdir(parents=True)

    class OfApp(LocalGrid):
        @property
        def run(self):
            of_app = {"fab_id": "me/own", "fab_version": "1.0", "fab_hash": "0" * 64}
            return replace(super().run, **of_app)

    def run(epochs, **options):
        (installed / "pyproject.toml").write_text(AN_APP.format(epochs=epochs))
        grid = OfApp(Watched(), CLIENTS, run_config={"lr": 0.2})
        options |= {"checkpoint_dir": tmp_path, "num_rounds": 1}
        fedfisher_with().start(grid, tiny_arrays(), **options)

    run(30)
    run(30, resume=True)
    with pytest.raises(CheckpointError, match=r"run_config.epochs: 30 -> 10\b"):
        run(10, resume=True)


def test_the_same_train_config_is_gone_on_with(tmp_path):
    """And NumPy's numbers are kept as any."""
    values = [0.1, 3, "a", True, b"bytes", [1, 2], float("nan"), [b"a", b"b"]]
    own = {f"own-{i}": value for i, value in enumerate(values)}
    options = {"train_config": ConfigRecord(own), "num_rounds": 1}
    options |= {"seed": np.int64(3), "min_train_nodes": np.int64(2)}
    start(where=tmp_path, **options)
    start(where=tmp_path, resume=True, **options)


@pytest.mark.parametrize("where", [None, "kept"])
def test_settings_that_json_lacks_are_refused_by_name(where, tmp_path):
    class Own(FAGH):
        def settings(self):
            return {"layers": {1, 2}}

    app, own = Watched(), Own(fraction_evaluate=0.0)
    folder = where and tmp_path / where
    with pytest.raises(ConfigurationError, match=r"settings\(\) .*'layers' is {1, 2}"):
        own.start(LocalGrid(app, 2), tiny_arrays(), checkpoint_dir=folder)
    assert not app.trained


def test_a_directory_with_a_run_is_refused_without_resume(once):
    before = {name: (once / name).read_bytes() for name in files(once)}
    app = Watched()
    with pytest.raises(CheckpointError, match=r"round 1: pass resume=True") as caught:
        start(app, once)
    assert str(once) in str(caught.value)
    assert not app.trained
    assert before == {name: (once / name).read_bytes() for name in files(once)}
    with pytest.raises(CheckpointError, match=r'^checkpoint_dir is ""'):
        start(where="")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="resume=True needs a checkpoint_dir"):
        start(resume=True)
