"""A run's folder whose files were cut, changed, swapped or are of another run."""

import json
import os
import random
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord
from safetensors.torch import save
from virtual import (
    Watched,
    drop_array,
    fedfisher_with,
    opened,
    same_bits,
    tiny_arrays,
)

from flwr_fisher.errors import CheckpointError
from flwr_fisher.server import journal
from flwr_fisher.server.cohort import Cohort, Identity
from flwr_fisher.server.exchange import ServerState
from flwr_fisher.server.journal import FolderLock, Journal
from flwr_fisher.server.run import Run
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors, tensors_to_arrays

CLIENTS = 3
UPLOADS = "uploads-0002/exchange-1"
# A folder that the version which made the format wrote; every later one reads it.
FORMAT_6 = Path(__file__).parent / "data" / "run-format-6"


class Few(LocalGrid):
    """A grid of which only some partitions are connected."""

    connected: tuple[int, ...] = tuple(range(CLIENTS))

    def get_node_ids(self):
        return [n for n in super().get_node_ids() if self.nodes[n] in self.connected]


def start(where, app=None, **options):
    run = {"num_rounds": options.pop("num_rounds", 2)}
    run |= {k: options.pop(k) for k in ("resume",) if k in options}
    grid = Few(app or Watched(), CLIENTS)
    grid.connected = options.pop("connected", grid.connected)
    strategy = fedfisher_with(fraction_evaluate=0.0, **options)
    return strategy.start(grid, tiny_arrays(), checkpoint_dir=where, **run)


@pytest.fixture(scope="module")
def expected():
    return start(None)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of which the second round has two of three uploads."""
    where = tmp_path_factory.mktemp("stopped") / "run"
    app = Watched()

    def stop(content):
        if len(app.trained) == CLIENTS + 3:
            raise KeyboardInterrupt

    app.tamper = dict.fromkeys(range(CLIENTS), stop)
    with pytest.raises(KeyboardInterrupt):
        start(where, app)
    assert len(list((where / UPLOADS).glob("*.safetensors"))) == 2
    return where


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Another run, of the same model, clients and options."""
    where = tmp_path_factory.mktemp("whole") / "run"
    start(where)
    return where


@pytest.fixture
def run(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def flip(data, place=-5):
    """Change one bit; near the end it is of a tensor, which stays finite."""
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


DAMAGE = {
    "empty": lambda data: b"",
    "cut in half": lambda data: data[: len(data) // 2],
    "another header": lambda data: b"\xff" * 16 + data[16:],
    "flipped": flip,
    "another's": lambda data: save({"0.weight": torch.zeros(4, 3)}),
}


def lines_of(where):
    text = (where / "journal.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def line_of(where, event, server_round):
    """Which line tells of an event of a round, counted from 1; the last one."""
    told = [(line["event"], line.get("round")) for line in lines_of(where)]
    return len(told) - told[::-1].index((event, server_round))


def change_line(where, number, change):
    path = where / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = change(lines[number - 1])
    path.write_bytes(b"".join(lines))


# The journal's lines


EVENTS = {
    "finished": ("finished", 1, "delete the line to go on"),
    "metrics": ("finished", 0, "delete the line to go on"),
    "opened": ("opened", 2, "delete the line to go on"),
    "admitted": ("admitted", 2, "delete the line to go on"),
    "closed": ("closed", 1, "delete the line to go on"),
    "begun": ("begun", None, "begin a new run in another checkpoint_dir"),
}
SPOILED = {
    "cut": lambda line: line[: len(line) // 2] + b"\n",
    "flipped": lambda line: flip(line, len(line) // 3),
    "a number": lambda line: b"7\n",
    "zeros": lambda line: bytes(len(line) - 1) + b"\n",
}


DAMAGED_LINES = [(name, "flipped") for name in EVENTS]
DAMAGED_LINES += [
    (name, spoil)
    for name in ("begun", "admitted")
    for spoil in sorted(SPOILED.keys() - {"flipped"})
]


@pytest.mark.parametrize(("name", "spoil"), DAMAGED_LINES)
def test_a_damaged_file_is_named_with_the_way_out(run, expected, name, spoil):
    """And its line; the way out leads out."""
    event, server_round, way_out = EVENTS[name]
    number = line_of(run, event, server_round)
    change_line(run, number, SPOILED[spoil])
    named = rf"journal\.jsonl, line {number} is"
    with pytest.raises(CheckpointError, match=named) as e:
        start(run, resume=True)
    assert way_out in str(e.value)
    if "delete" in way_out and spoil == "flipped":
        change_line(run, number, lambda line: b"")
        assert same_bits(start(run, resume=True).arrays, expected.arrays)


@pytest.mark.parametrize("number", [1, 5])
def test_a_line_of_another_run_is_named(run, whole, number):
    other = (whole / "journal.jsonl").read_bytes().splitlines(keepends=True)
    change_line(run, number, lambda line: other[number - 1])
    named = 2 if number == 1 else number  # the first line says which run it is
    with pytest.raises(CheckpointError, match=rf"line {named} belongs to another run"):
        start(run, resume=True)


@pytest.mark.parametrize("torn", [b'{"event": "admit', bytes(700), b"\xff\xfe"])
def test_a_line_that_a_crash_cut_off_is_taken_away(run, expected, torn):
    with (run / "journal.jsonl").open("ab") as file:
        file.write(torn)
    app = Watched()
    assert same_bits(start(run, app, resume=True).arrays, expected.arrays)
    assert len(app.trained) == 1
    again = start(run, resume=True, num_rounds=3)
    assert sorted(again.train_metrics_clientapp) == [1, 2, 3]


@pytest.mark.parametrize("lines", range(1, 12))
def test_a_journal_that_ends_anywhere_goes_on_from_there(
    stopped, tmp_path, expected, lines
):
    """As a power cut leaves it, with files that it does not know of yet."""
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    path = run / "journal.jsonl"
    kept = path.read_bytes().splitlines(keepends=True)[:lines]
    path.write_bytes(b"".join(kept))
    states = {n for n in (0, 1) if (run / f"round-{n:04d}.safetensors").exists()}
    known = [line for line in lines_of(run) if line["event"] == "finished"]
    if known or max(states) == 0:
        assert same_bits(start(run, resume=True).arrays, expected.arrays)
    else:
        with pytest.raises(
            CheckpointError, match=r"journal\.jsonl, .* is missing or incomplete"
        ):
            start(run, resume=True)


def test_any_change_is_refused_by_name_or_left_out(tmp_path):
    """And no other exception comes of it."""
    run, rng = tmp_path / "run", random.Random(0)
    shutil.copytree(FORMAT_6, run)
    whole, events = (run / "journal.jsonl").read_bytes(), lines_of(run)
    for _ in range(500):
        start, length = rng.randrange(len(whole)), rng.choice((0, 1, 1, 200))
        new = rng.randbytes(rng.choice((0, 1, 1, 50)))
        changed = whole[:start] + new + whole[start + length :]
        (run / "journal.jsonl").write_bytes(changed)
        read = Journal(run)
        with suppress(CheckpointError):
            assert read.load() in ([0], [0, 1])
            lines = [json.loads(line) for line in changed.split(b"\n")[:-1]]
            assert lines == events[: len(lines)]
        read.release()


def other_keys(event, *path):
    """Rename a key that is deep in an event, as another version may have called it."""
    *outer, last = path
    for name in outer:
        event = event[name]
    event[f"{last}-of-old"] = event.pop(last)


@pytest.mark.parametrize(
    ("event", "server_round", "path"),
    [
        ("begun", None, ["options"]),
        ("finished", 1, ["round"]),
        ("finished", 1, ["metrics"]),
        ("finished", 1, ["absences"]),
        ("finished", 1, ["content"]),
        ("finished", 0, ["run"]),
        ("finished", 1, ["metrics", "train_metrics_clientapp"]),
        ("opened", 2, ["event"]),
        ("opened", 2, ["record"]),
        ("opened", 2, ["record", "wanted"]),
        ("admitted", 2, ["client"]),
        ("admitted", 2, ["client", "partition"]),
        ("admitted", 2, ["metrics"]),
        ("admitted", 2, ["exchange"]),
    ],
)
def test_a_record_of_other_keys_is_named_with_the_way_out(
    run, event, server_round, path
):
    """It is whole, and another version wrote it."""

    def change(line):
        told = json.loads(line)
        del told["digest"]
        other_keys(told, *path)
        return journal._line(told).encode()

    change_line(run, line_of(run, event, server_round), change)
    with pytest.raises(CheckpointError) as caught:
        start(run, resume=True)
    text = str(caught.value)
    assert str(run) in text
    assert re.search("resume with the version|another checkpoint_dir|delete", text)


def test_who_sits_out_is_read_or_named():
    cohort = Cohort(0)
    for record in ({"missed": 7}, {"missed": {"partition-0": 1}}):
        with pytest.raises(CheckpointError, match="the clients that sit out"):
            cohort.recall_absences(record)


def test_what_is_missing_in_a_state_is_named_with_its_group():
    state = ServerState({}, {"counters": {"step": torch.zeros(1)}})
    with pytest.raises(CheckpointError, match=r"'counters' has no 'steps'.*all groups"):
        state.group("counters")["steps"]


def test_without_its_opening_nobody_who_has_replied_is_asked_again(run, expected):
    change_line(run, line_of(run, "opened", 2), lambda line: b"")
    app = Watched()
    assert same_bits(start(run, app, resume=True).arrays, expected.arrays)
    assert len(app.trained) == 1


# Other folders


@pytest.mark.parametrize("name", ["journal.jsonl", "gone", "states"])
def test_a_folder_of_another_format_or_half_a_one_is_refused(run, name):
    file, reason = run / "journal.jsonl", "resume with the version of flwr-fisher that"
    if name == "journal.jsonl":
        text = file.read_text().replace('"format": "6"', '"format": "7"')
        file.write_text(text)
    elif name == "states":
        for state in run.glob("round-*"):
            state.unlink()
        reason = "is missing or incomplete"
    else:
        file.unlink()
        reason = "is missing or incomplete"
    before = sorted(run.rglob("*"))
    for resume in (True, False):
        with pytest.raises(CheckpointError, match=reason) as caught:
            start(run, resume=resume)
        assert str(file) in str(caught.value)
        assert "another checkpoint_dir" in str(caught.value)
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("how", [*DAMAGE, "another round's", "another run's"])
def test_a_file_of_another_run_is_named(run, whole, expected, how):
    """And one that is damaged; the way out leads out."""
    path = run / "round-0001.safetensors"
    others = {"another round's": run / "round-0000.safetensors"}
    others["another run's"] = whole / path.name
    data = others.get(how, path).read_bytes()
    path.write_bytes(DAMAGE.get(how, bytes)(data))
    with pytest.raises(CheckpointError, match="delete it to go on after round 0") as e:
        start(run, resume=True)
    assert str(path) in str(e.value)
    path.unlink()
    assert same_bits(start(run, resume=True).arrays, expected.arrays)


@pytest.mark.parametrize(
    "how", [*DAMAGE, "another client's", "another run's", "deleted"]
)
def test_an_upload_that_is_none_of_this_exchange_is_asked_for_again(
    run, whole, how, expected, caplog
):
    one, two = sorted((run / UPLOADS).glob("*.safetensors"))
    others = {"another client's": two, "another run's": whole / UPLOADS / one.name}
    data = others.get(how, one).read_bytes()
    one.write_bytes(DAMAGE.get(how, bytes)(data))
    if how == "deleted":
        one.unlink()
    app = Watched()
    resumed = start(run, app, resume=True)
    assert same_bits(resumed.arrays, expected.arrays)
    assert f"{one.stem} again" in caplog.text
    assert int(one.stem[-1]) in [p for _, p in app.trained]
    assert len(app.trained) == 2


def test_what_is_not_ours_is_left_alone(run, expected):
    for name in ("uploads-foo", "uploads-", "round-x.safetensors", "notes.txt"):
        (run / name).mkdir()
    (run / UPLOADS / "notes.txt").write_text("mine")
    (run / UPLOADS / "partition-99.safetensors").write_bytes(b"a stranger's")
    assert same_bits(start(run, resume=True).arrays, expected.arrays)
    assert (run / "uploads-foo").is_dir()
    assert (run / UPLOADS / "notes.txt").exists()


def test_what_a_killed_server_did_not_delete_any_more_goes(whole, stopped, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.copy(stopped / "round-0000.safetensors", run)
    shutil.copytree(run / UPLOADS, run / "uploads-0001" / "exchange-1")
    start(run, resume=True)
    left = {path.name for path in run.iterdir()} - {"lock", "journal.jsonl"}
    assert left == {"round-0001.safetensors", "round-0002.safetensors", "uploads-0002"}


def test_what_a_killed_server_left_half_written_goes(run):
    left = [run / "round-0002.77.partial", run / UPLOADS / "partition-1.77.partial"]
    left.append(run / UPLOADS / ".tmpEgrDgE")  # safetensors'
    theirs = [run / "mine.partial", run / "notes" / "round.77.partial"]
    theirs[1].parent.mkdir()
    for path in [*left, *theirs]:
        path.write_bytes(b"half")
    start(run, resume=True)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in theirs)


# The disk


@pytest.mark.parametrize("which", ["files", "lines"])
@pytest.mark.parametrize("calls", range(0, 7, 2))
def test_a_disk_that_refuses_is_named_and_nothing_is_lost(
    tmp_path, expected, which, calls, monkeypatch
):
    """The line that was refused is there in part."""
    place = (journal, "save_record") if which == "files" else (journal.os, "fsync")
    left, real = calls, getattr(*place)

    def full(*args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
            if which == "lines" and (tmp_path / "journal.jsonl").exists():
                file = tmp_path / "journal.jsonl"
                os.truncate(file, file.stat().st_size - 9)
            raise OSError(28, "No space left on device", str(args[0]))
        return real(*args, **kwargs)

    monkeypatch.setattr(*place, full)
    with pytest.raises(
        CheckpointError, match=rf"cannot write {tmp_path}.*No space left.*resume=True"
    ):
        start(tmp_path)
    monkeypatch.undo()
    assert same_bits(start(tmp_path, resume=True).arrays, expected.arrays)


def test_a_line_that_was_not_synced_leaves_nothing_behind_the_next(
    tmp_path, monkeypatch
):
    """The one who wrote it may go on, with a line that is shorter."""
    run = Journal(tmp_path)
    run.begin({})

    def full(number):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fsync", full)
        with pytest.raises(CheckpointError, match="cannot write"):
            run.append("begun", options="long" * 50)
    run.append("begun", options="short")
    run.release()
    opened(tmp_path)
    assert [line["event"] for line in lines_of(tmp_path)] == ["begun", "begun"]


def test_what_is_told_is_on_the_disk_before(tmp_path, monkeypatch):
    """A loss of power leaves no line without its file: each is synced in that order."""
    synced = []
    monkeypatch.setattr(
        journal.os, "fsync", lambda f: synced.append(os.fstat(f).st_ino)
    )
    run = Journal(tmp_path)
    run.begin({})
    exchange = run.exchange_journal(1, 1)
    exchange.open(["partition-0"], 1, 1)
    synced.clear()
    arrays, metrics = ArrayRecord({"w": torch.zeros(2)}), MetricRecord({"loss": 3})
    exchange.save(Identity(1, "", 0), arrays, metrics)
    run.finish(1, {"w": torch.zeros(2)}, {}, {})
    run.release()
    folder, line = tmp_path / exchange.folder, tmp_path / "journal.jsonl"
    order = [folder / "partition-0.safetensors", folder, line]
    order += [tmp_path / "round-0001.safetensors", tmp_path, line]
    assert synced == [path.stat().st_ino for path in order]


def test_an_empty_array_is_kept(tmp_path):
    arrays = tensors_to_arrays({"w": torch.empty(0)})
    Run.begin(arrays, {}, tmp_path, resume=False).release()
    run = Run.begin(arrays, {}, tmp_path, resume=True)
    assert run.state.params["w"].shape == (0,)
    run.release()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    where = tmp_path / "file" / "run"
    with pytest.raises(CheckpointError, match=f"cannot write {where} "):
        start(where)


def test_a_folder_may_be_the_homes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    start(Path("~/run"))
    assert (tmp_path / "run" / "journal.jsonl").exists()


@pytest.mark.parametrize("name", ["医院" * 60, "a" * 300, "../../x", "a/b\\c"])
def test_any_registered_name_is_a_files(tmp_path, name):
    run = Journal(tmp_path)
    run.begin({})
    whose = (Identity(1, name), Identity(2, f"{name}!"))
    for client in whose:
        arrays = ArrayRecord({"w": torch.full((2,), float(client.node))})
        metrics = MetricRecord({"num-examples": 3})
        run.exchange_journal(1, 1).save(client, arrays, metrics)
    run.release()
    exchange = opened(tmp_path).exchange_journal(1, 1)
    for client, arrays, _ in exchange.uploads():
        assert arrays_to_tensors(arrays)["w"][0] == client.node
    assert all(exchange.has(client) for client in whose)
    assert all(tmp_path in path.parents for path in tmp_path.rglob("*.safetensors"))


# Rounds


def test_what_was_missing_is_told_again_when_a_closed_round_is_resumed(tmp_path):
    app = Watched()
    app.tamper = {2: drop_array("3.bias")}
    first = start(tmp_path, app, num_rounds=1)
    (tmp_path / "round-0001.safetensors").unlink()
    resumed = start(tmp_path, Watched(), num_rounds=1, resume=True)
    assert first.train_metrics_clientapp[1]["num-rejected"] == 1
    assert resumed.train_metrics_clientapp == first.train_metrics_clientapp
    assert same_bits(resumed.arrays, first.arrays)


# Who is connected


def test_uploads_of_clients_that_are_gone_count(run, expected):
    """Two are on disk; only the third is connected now."""
    kept = {int(path.stem[-1]) for path in (run / UPLOADS).glob("*.safetensors")}
    (missing,) = set(range(CLIENTS)) - kept
    app = Watched()
    result = start(run, app, connected=(missing,), resume=True)
    assert same_bits(result.arrays, expected.arrays)
    assert app.trained == [(2, missing)]


def test_a_round_with_all_its_uploads_needs_nobody(whole, tmp_path, expected):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (run / "round-0002.safetensors").unlink()
    result = start(run, connected=(), resume=True)
    assert same_bits(result.arrays, expected.arrays)


# Two servers


def test_two_servers_do_not_share_a_folder(tmp_path):
    app = Watched()

    def second(content):
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


def _in_a_child(act):
    """Run it in a process of its own; return what the process is known by."""
    if (pid := os.fork()) == 0:
        try:
            act()
        except CheckpointError:
            os._exit(7)
        os._exit(0)
    return pid


def test_a_lock_ends_with_its_holder(tmp_path, monkeypatch):
    lock = FolderLock(tmp_path)
    monkeypatch.setattr(journal, "PATIENCE", 0.1)
    pid = _in_a_child(lambda: FolderLock(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    lock.release()
    FolderLock(tmp_path).release()


def test_a_holder_that_ends_is_waited_for(tmp_path, caplog):
    """As the ServerApp of a SuperLink that was killed, and started again."""

    def hold():
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


# The format


def test_the_format_is_read_by_every_later_version(tmp_path):
    """Or refused by its number; this one reads what was written when it was made."""
    where = tmp_path / "run"
    shutil.copytree(FORMAT_6, where)
    run = Journal(where)
    assert run.load() == [0, 1]
    run.release()
    assert run.options["strategy"] == "FedFisherOneShot"
    start_of_run = arrays_to_tensors(tiny_arrays())
    for key, value in run.load_state(0).items():
        assert torch.equal(value, start_of_run[key])
    metrics = run.finished[1]["metrics"]["train_metrics_clientapp"]
    assert metrics["num-replies"] == CLIENTS
    exchange = run.exchange_journal(2, 1)
    assert exchange.record is not None
    assert exchange.record.clients == [f"partition-{p}" for p in range(CLIENTS)]
    uploads = list(exchange.uploads())
    weights = {client.partition: dict(m)["num-examples"] for client, _, m in uploads}
    assert weights == {1: 10, 2: 12}
    assert all(arrays_to_tensors(arrays) for _, arrays, _ in uploads)
