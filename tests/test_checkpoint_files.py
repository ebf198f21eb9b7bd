"""Files of a checkpoint that were cut, changed, swapped or are of another run."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from safetensors.torch import save_file
from virtual import (
    Watched,
    drop_array,
    opened,
    same_bits,
    tiny_app,
    tiny_arrays,
)

from flwr_fisher.errors import CheckpointError
from flwr_fisher.server import lock as lock_module
from flwr_fisher.server import named_files
from flwr_fisher.server.checkpoint import CheckpointDir
from flwr_fisher.server.identity import Identity
from flwr_fisher.server.lock import FolderLock
from flwr_fisher.strategies import CurvatureResult, FedFisherOneShot
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors

CLIENTS = 3
UPLOADS = "uploads-0002/exchange-1"
# A folder that version 0.1 of this library wrote; every later one reads it.
FORMAT_5 = Path(__file__).parent / "data" / "checkpoint-format-5"


def start(where: Path | None, app: Any = None, **options: Any) -> CurvatureResult:
    run = {"num_rounds": options.pop("num_rounds", 2)}
    for name in ("resume", "reopen", "train_config"):
        if name in options:
            run[name] = options.pop(name)
    strategy = FedFisherOneShot(fraction_evaluate=0.0, **options)
    grid = LocalGrid(app or Watched(), CLIENTS)
    return strategy.start(grid, tiny_arrays(), checkpoint_dir=where, **run)


@pytest.fixture(scope="module")
def expected() -> CurvatureResult:
    return start(None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of which the second round has two of three uploads."""
    where = tmp_path / "run"
    app = Watched()

    def stop(content: Any) -> None:
        if len(app.trained) == CLIENTS + 3:
            raise KeyboardInterrupt

    app.tamper = dict.fromkeys(range(CLIENTS), stop)
    with pytest.raises(KeyboardInterrupt):
        start(where, app)
    assert len(list((where / UPLOADS).glob("*.safetensors"))) == 2
    return where


def flip(path: Path, place: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FILES = {
    "round": ("round-0001.safetensors", "delete it to go on after round 0"),
    "run": ("run.json", "begin anew in another checkpoint_dir; the last model is in"),
    "history": ("history.jsonl", "move the file away to go on: only the metrics"),
    "exchange": (f"{UPLOADS}/exchange.json", "delete it to have the exchange's"),
}


@pytest.mark.parametrize("damage", [cut, flip], ids=["cut", "flipped"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_with_the_way_out(
    run: Path, name: str, damage: Callable[[Path], None]
) -> None:
    path, way_out = run / FILES[name][0], FILES[name][1]
    if name == "history" and damage is flip:
        flip(path, 60)
    else:
        damage(path)
    with pytest.raises(CheckpointError) as caught:
        start(run, resume=True)
    assert str(path) in str(caught.value)
    assert way_out in str(caught.value)


@pytest.mark.parametrize("name", ["round", "history", "exchange"])
def test_the_way_out_leads_out(run: Path, name: str, expected: CurvatureResult) -> None:
    path = run / FILES[name][0]
    cut(path)
    with pytest.raises(CheckpointError):
        start(run, resume=True)
    path.unlink()
    assert same_bits(start(run, resume=True).arrays, expected.arrays)


@pytest.mark.parametrize("name", ["round", "run", "history", "exchange"])
def test_a_file_of_another_run_is_named(run: Path, tmp_path: Path, name: str) -> None:
    other = tmp_path / "other"
    start(other, num_rounds=2)
    path = FILES[name][0]
    shutil.copy(other / path, run / path)
    if name == "run":  # then all others are another run's
        path = "round-0001.safetensors"
    with pytest.raises(CheckpointError, match="of another run") as caught:
        start(run, resume=True)
    assert str(run / path) in str(caught.value)


def test_a_round_in_anothers_place_is_named(run: Path) -> None:
    shutil.copy(run / "round-0000.safetensors", run / "round-0001.safetensors")
    with pytest.raises(CheckpointError, match=r"is a copy of round-0000\.safetensors"):
        start(run, resume=True)


@pytest.mark.parametrize("how", ["another run's", "another client's", "flipped"])
def test_an_upload_that_is_none_of_this_exchange_is_asked_for_again(
    run: Path,
    tmp_path: Path,
    how: str,
    expected: CurvatureResult,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = sorted((run / UPLOADS).glob("*.safetensors"))
    if how == "another run's":
        start(tmp_path / "other", num_rounds=2)
        shutil.copy(tmp_path / "other" / UPLOADS / one.name, one)
    elif how == "another client's":
        shutil.copy(two, one)
    else:
        flip(one)
    app = Watched()
    resumed = start(run, app, resume=True)
    assert same_bits(resumed.arrays, expected.arrays)
    assert f"{one.stem} is asked again" in caplog.text
    assert int(one.stem[-1]) in [p for _, p in app.trained]


@pytest.mark.parametrize("which", ["save_record", "save_text"])
def test_a_disk_that_refuses_is_named_and_nothing_is_lost(
    tmp_path: Path, expected: CurvatureResult, which: str, monkeypatch: Any
) -> None:
    calls = {"left": 2}
    real = getattr(named_files, which)

    def full(path: Path, *args: Any, **kwargs: Any) -> None:
        calls["left"] -= 1
        if calls["left"] < 0:
            raise OSError(28, "No space left on device", str(path))
        real(path, *args, **kwargs)

    monkeypatch.setattr(named_files, which, full)
    with pytest.raises(
        CheckpointError, match=rf"cannot write {tmp_path}.*No space left.*resume=True"
    ):
        start(tmp_path)
    monkeypatch.undo()
    assert same_bits(start(tmp_path, resume=True).arrays, expected.arrays)


def test_numpys_numbers_are_kept_as_any(tmp_path: Path) -> None:
    strategy = FedFisherOneShot(seed=np.int64(3), min_train_nodes=np.int64(2))
    for resume in (False, True):
        strategy.start(
            LocalGrid(Watched(), 2), tiny_arrays(), checkpoint_dir=tmp_path,
            resume=resume,
        )  # fmt: skip


def test_a_folder_may_be_the_homes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    start(Path("~/run"))
    assert (tmp_path / "run" / "run.json").exists()


def test_what_is_not_ours_is_left_alone(run: Path, expected: CurvatureResult) -> None:
    for name in ("uploads-foo", "uploads-", "round-x.safetensors", "notes.txt"):
        (run / name).mkdir()
    (run / UPLOADS / "notes.txt").write_text("mine")
    assert same_bits(start(run, resume=True).arrays, expected.arrays)
    assert (run / "uploads-foo").is_dir()


def test_the_metrics_of_all_rounds_are_there_though_rounds_are_pruned(
    tmp_path: Path,
) -> None:
    start(tmp_path, num_rounds=3)
    result = start(tmp_path, resume=True, num_rounds=5)
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3, 4, 5]
    assert len(list(tmp_path.glob("round-*"))) == 2
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3, 4, 5]


def test_a_line_that_a_crash_cut_off_is_taken_away(
    run: Path, expected: CurvatureResult
) -> None:
    with (run / "history.jsonl").open("a") as file:
        file.write('{"run": "0123", "rou')
    result = start(run, resume=True)
    assert same_bits(result.arrays, expected.arrays)
    again = start(run, resume=True, num_rounds=3)
    assert sorted(again.train_metrics_clientapp) == [1, 2, 3]


# Options


def test_another_train_config_is_told(run: Path) -> None:
    config = ConfigRecord({"lr": 0.2})
    with pytest.raises(CheckpointError, match=r"train_config\.lr: None -> 0\.2"):
        start(run, resume=True, train_config=config)


@pytest.mark.parametrize("value", [0.1, 3, "a", True, b"bytes", [1, 2]])
def test_the_same_train_config_is_gone_on_with(tmp_path: Path, value: Any) -> None:
    config = ConfigRecord({"own": value})
    start(tmp_path, num_rounds=1, train_config=config)
    start(tmp_path, num_rounds=1, train_config=config, resume=True)


# Two servers


@pytest.mark.parametrize("value", [float("nan"), [b"a", b"b"], [1.5, 2.5], "x"])
def test_any_config_compares(tmp_path: Path, value: Any) -> None:
    config = ConfigRecord({"note": value})
    start(tmp_path, num_rounds=1, train_config=config)
    start(tmp_path, num_rounds=1, train_config=config, resume=True)


def test_without_its_exchange_record_nobody_on_disk_is_asked_again(
    run: Path, expected: CurvatureResult
) -> None:
    (run / UPLOADS / "exchange.json").unlink()
    app = Watched()
    resumed = start(run, app, resume=True)
    assert len(app.trained) == 1
    assert same_bits(resumed.arrays, expected.arrays)


def test_the_run_json_of_another_run_is_told_as_such(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    start(other, num_rounds=1)
    shutil.copy(other / "run.json", run / "run.json")
    with pytest.raises(CheckpointError, match=r"run\.json is of another run than"):
        start(run, resume=True)


def test_an_upload_of_no_format_is_set_aside(
    run: Path, expected: CurvatureResult
) -> None:
    path = next((run / UPLOADS).glob("*.safetensors"))
    save_file({"w": torch.zeros(2)}, path)
    app = Watched()
    assert same_bits(start(run, app, resume=True).arrays, expected.arrays)
    assert len(app.trained) == 2


def test_what_a_killed_server_left_half_written_goes(run: Path) -> None:
    left = [run / "round-0002.77.partial", run / UPLOADS / "partition-1.77.partial"]
    theirs = [run / "mine.partial", run / "notes" / "round.77.partial"]
    theirs[1].parent.mkdir()
    for path in [*left, *theirs]:
        path.write_bytes(b"half")
    start(run, resume=True)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in theirs)


@pytest.mark.parametrize("name", ["医院" * 60, "a" * 300, "../../x", "a/b\\c"])
def test_any_registered_name_is_a_files(tmp_path: Path, name: str) -> None:
    disk = CheckpointDir(tmp_path)
    disk.begin({})
    folder = "uploads-0001/exchange-1"
    whose = (Identity(1, name), Identity(2, f"{name}!"))
    for client in whose:
        arrays = ArrayRecord({"w": torch.zeros(2)})
        disk.save_upload(folder, client, arrays, MetricRecord({"num-examples": 3}))
        assert disk.has_upload(folder, client.name)
    assert {client.name for client, _, _ in disk.load_uploads(folder)} == {
        client.name for client in whose
    }
    disk.set_aside(folder, name, "out of cheese")
    assert disk.load_set_aside(folder) == {name: "out of cheese"}
    assert all(tmp_path in path.parents for path in tmp_path.rglob("*.safetensors"))


def test_a_damaged_note_is_named(run: Path) -> None:
    disk = CheckpointDir(run)
    disk.load_options()
    disk.set_aside(UPLOADS, "partition-0", "out of cheese")
    disk.release()
    (note,) = run.rglob("set-aside/*.json")
    note.write_bytes(note.read_bytes().replace(b"cheese", b"\xff\xfeeese"))
    with pytest.raises(CheckpointError, match=r"set-aside.* is damaged.*delete it"):
        start(run, resume=True)


def test_what_was_missing_is_told_again_when_a_closed_round_is_resumed(
    tmp_path: Path,
) -> None:
    app = Watched()
    app.tamper = {2: drop_array("3.bias")}
    first = start(tmp_path, app, num_rounds=1)
    (tmp_path / "round-0001.safetensors").unlink()
    resumed = start(tmp_path, Watched(), num_rounds=1, resume=True)
    assert first.train_metrics_clientapp[1]["num-rejected"] == 1
    assert resumed.train_metrics_clientapp == first.train_metrics_clientapp
    assert same_bits(resumed.arrays, first.arrays)


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    app = Watched()

    def second(content: Any) -> None:
        with pytest.raises(CheckpointError) as caught:
            start(tmp_path, resume=True)
        text = str(caught.value)
        assert f"process {os.getpid()} on " in text
        assert str(tmp_path) in text
        assert "pass another checkpoint_dir" in text

    app.tamper = {0: second}
    result = start(tmp_path, app, num_rounds=1)
    assert len(result.uploads) == CLIENTS
    start(tmp_path, resume=True)


def _in_a_child(act: Callable[[], object]) -> int:
    """Run it in a process of its own; return what the process is known by."""
    if (pid := os.fork()) == 0:
        try:
            act()
        except CheckpointError:
            os._exit(7)
        os._exit(0)
    return pid


def test_a_lock_ends_with_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = FolderLock(tmp_path)
    monkeypatch.setattr(lock_module, "PATIENCE", 0.1)
    pid = _in_a_child(lambda: FolderLock(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    lock.release()
    FolderLock(tmp_path).release()


def test_a_holder_that_ends_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the ServerApp of a SuperLink that was killed, and started again."""

    def hold() -> None:
        lock = FolderLock(tmp_path)
        (tmp_path / "held").touch()
        time.sleep(1)
        lock.release()

    pid = _in_a_child(hold)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    FolderLock(tmp_path).release()
    os.waitpid(pid, 0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"in use by another run (process {pid} on " in said
    assert said.endswith("waiting 60 s for it to end")


# Who is connected


def test_uploads_of_clients_that_are_gone_count(
    run: Path, expected: CurvatureResult, caplog: pytest.LogCaptureFixture
) -> None:
    """Two are on disk; only the third is connected now."""
    kept = {path.stem for path in (run / UPLOADS).glob("*.safetensors")}
    (missing,) = {f"partition-{p}" for p in range(CLIENTS)} - kept

    class Alone(LocalGrid):
        def get_node_ids(self) -> Any:
            return [n for n, p in self.nodes.items() if f"partition-{p}" == missing]

    app = Watched()
    strategy = FedFisherOneShot(fraction_evaluate=0.0)
    result = strategy.start(
        Alone(app, CLIENTS),
        tiny_arrays(),
        num_rounds=2,
        checkpoint_dir=run,
        resume=True,
    )
    assert same_bits(result.arrays, expected.arrays)
    assert app.trained == [(2, int(missing[-1]))]


def test_a_round_with_all_its_uploads_needs_nobody(
    tmp_path: Path, expected: CurvatureResult
) -> None:
    start(tmp_path, num_rounds=2)
    (tmp_path / "round-0002.safetensors").unlink()

    class Empty(LocalGrid):
        def get_node_ids(self) -> Any:
            return []

    strategy = FedFisherOneShot(fraction_evaluate=0.0)
    result = strategy.start(
        Empty(tiny_app(), CLIENTS),
        tiny_arrays(),
        num_rounds=2,
        checkpoint_dir=tmp_path,
        resume=True,
    )
    assert same_bits(result.arrays, expected.arrays)


# The format


def test_the_format_is_read_by_every_later_version(tmp_path: Path) -> None:
    """Or refused by its number; this one reads what was written when it was made."""
    where = tmp_path / "run"
    shutil.copytree(FORMAT_5, where)
    disk = opened(where)
    assert disk.load_options()["strategy"] == "FedFisherOneShot"
    assert disk.rounds() == [0, 1]
    start_of_run = arrays_to_tensors(tiny_arrays())
    for key, value in disk.load_round(0).tensors.items():
        assert torch.equal(value, start_of_run[key])
    history = disk.load_history(1)
    assert history[1]["train_metrics_clientapp"]["num-replies"] == CLIENTS
    record = disk.load_exchange(UPLOADS)
    assert record is not None
    assert record.clients == [f"partition-{p}" for p in range(CLIENTS)]
    uploads = list(disk.load_uploads(UPLOADS))
    assert [client.name for client, *_ in uploads] == ["partition-0", "partition-1"]
    assert [metrics["num-examples"] for *_, metrics in uploads] == [8, 10]
    like = disk.load_round(1).tensors
    (exchange,) = FedFisherOneShot().exchanges(1)
    for _, arrays, _ in uploads:
        exchange.read(arrays, like)
