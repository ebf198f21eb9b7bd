"""A run's folder whose files were cut, changed, swapped or are of another run."""

import os
import random
import shutil
import time
import traceback
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord
from safetensors.torch import save
from virtual import Watched, drop_array, fedfisher_with, opened, same_bits, tiny_arrays

from flwr_fisher.errors import CheckpointError
from flwr_fisher.server import journal
from flwr_fisher.server.cohort import Cohort, Identity
from flwr_fisher.server.exchange import ServerState
from flwr_fisher.server.journal import Journal
from flwr_fisher.server.run import Run
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors, tensors_to_arrays

CLIENTS = 3
EXCHANGE = "uploads-0002/exchange-1.safetensors"
UPLOADS = "uploads-0002/exchange-1"
# A folder that the version which made the format wrote; every later one reads it.
FORMAT_7 = Path(__file__).parent / "data" / "run-format-7"
STATE = arrays_to_tensors(tiny_arrays()).keys()


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


# Files that are damaged, or of another run


WAYS_OUT = {
    "run.safetensors": "begin a new run in another checkpoint_dir",
    "round-0001.safetensors": "delete it to go on after round 0",
    EXCHANGE: "uploads-0002 to do the round again",
}
DAMAGED = [(name, how) for name in WAYS_OUT for how in ("cut in half", "flipped")]
DAMAGED += [("round-0001.safetensors", how) for how in DAMAGE]
DAMAGED += [(name, "another run's") for name in ("round-0001.safetensors", EXCHANGE)]
DAMAGED.append(("round-0001.safetensors", "another round's"))


@pytest.mark.parametrize(("name", "how"), sorted(set(DAMAGED)))
def test_a_damaged_file_is_named_with_the_way_out(run, whole, expected, name, how):
    """And a file of another run; the way out leads out."""
    path = run / name
    others = {"another round's": run / "round-0000.safetensors"}
    others["another run's"] = whole / name
    path.write_bytes(DAMAGE.get(how, bytes)(others.get(how, path).read_bytes()))
    with pytest.raises(CheckpointError, match=WAYS_OUT[name]) as caught:
        start(run, resume=True)
    assert str(path) in str(caught.value)
    if name == "run.safetensors":
        return
    if name == EXCHANGE:
        shutil.rmtree(path.parent)
    else:
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
    one.write_bytes(DAMAGE.get(how, bytes)(others.get(how, one).read_bytes()))
    if how == "deleted":
        one.unlink()
    app = Watched()
    assert same_bits(start(run, app, resume=True).arrays, expected.arrays)
    assert how == "deleted" or f"{one.name} is damaged, or not" in caplog.text
    assert int(one.stem[-1]) in [p for _, p in app.trained]
    assert len(app.trained) == 2


def test_any_change_is_refused_by_name_or_left_out(tmp_path):
    """And no other exception comes of it."""
    run, rng = tmp_path / "run", random.Random(0)
    shutil.copytree(FORMAT_7, run)
    paths = sorted(run.rglob("*.safetensors"))
    for _ in range(200):
        path = rng.choice(paths)
        whole = path.read_bytes()
        at, length = rng.randrange(len(whole)), rng.choice((0, 1, 1, 200))
        new = rng.randbytes(rng.choice((0, 1, 1, 50)))
        spoiled = whole[:at] + new + whole[at + length :]
        path.write_bytes(spoiled)
        changed = Journal(run)
        refused = ""
        try:
            last, tensors, _ = changed.load()
            uploads = list(changed.exchange_journal(2, 1).uploads())
        except CheckpointError as error:
            refused = str(error)
        assert str(path) in refused or (
            (last, tensors.keys() >= STATE) == (1, True)
            and len(uploads) == 2 - (path.parent == run / UPLOADS and spoiled != whole)
        )
        changed.release()
        path.write_bytes(whole)


def test_who_sits_out_is_read_or_named():
    cohort = Cohort(0)
    for record in ({"missed": 7}, {"missed": {"partition-0": 1}}):
        with pytest.raises(CheckpointError, match="the clients that sit out"):
            cohort.recall_absences(record)


def test_without_its_record_nobody_who_has_replied_is_asked_again(run, expected):
    (run / EXCHANGE).unlink()
    app = Watched()
    assert same_bits(start(run, app, resume=True).arrays, expected.arrays)
    assert len(app.trained) == 1


# Other folders


@pytest.mark.parametrize("name", ["format", "version 0.3", "gone", "states"])
def test_a_folder_of_another_format_or_half_a_one_is_refused(run, name):
    file, reason = run / "run.safetensors", "is missing, beside .*round-0"
    if name == "states":
        for state in run.glob("round-*"):
            state.unlink()
        file, reason = run / "round-0000.safetensors", "or a later one, is missing"
    elif name == "format":
        other = Journal(run)
        other.load()
        other.write(file, {"format": 8, "options": other.options})
        other.release()
        reason = "has format 8, not 7: resume with the version of flwr-fisher that"
    else:
        file.unlink()
        if name == "version 0.3":
            for path in [*run.glob("round-*"), *run.glob("uploads-*/*.safetensors")]:
                path.unlink()
            (run / "journal.jsonl").touch()
            reason = r"missing, beside .*journal\.jsonl"
    before = sorted(run.rglob("*"))
    for resume in (True, False):
        with pytest.raises(CheckpointError, match=reason) as caught:
            start(run, resume=resume)
        assert str(file) in str(caught.value)
        assert "another checkpoint_dir" in str(caught.value)
    assert sorted(run.rglob("*")) == before


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
    left = {path.name for path in run.iterdir()} - {"lock", "run.safetensors"}
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


@pytest.mark.parametrize("calls", range(0, 9, 2))
def test_a_disk_that_refuses_is_named_and_nothing_is_lost(
    tmp_path, expected, calls, monkeypatch
):
    left, real = calls, journal.save_record

    def full(*args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device", str(args[0]))
        return real(*args, **kwargs)

    monkeypatch.setattr(journal, "save_record", full)
    with pytest.raises(
        CheckpointError, match=rf"cannot write {tmp_path}.*No space left.*resume=True"
    ):
        start(tmp_path)
    monkeypatch.undo()
    assert same_bits(start(tmp_path, resume=True).arrays, expected.arrays)


def test_an_empty_array_is_kept(tmp_path):
    arrays = tensors_to_arrays({"w": torch.empty(0)})
    Run.begin(
        ServerState.first(arrays, {}), {}, tmp_path, resume=False
    ).journal.release()
    run = Run.begin(ServerState.first(arrays, {}), {}, tmp_path, resume=True)
    assert run.state.params["w"].shape == (0,)
    run.journal.release()


@pytest.mark.parametrize("name", ["医院" * 60, "a" * 300, "../../x", "a/b\\c"])
def test_any_registered_name_is_a_files(tmp_path, name):
    run = Journal(tmp_path)
    run.begin({})
    for client in (Identity(1, name), Identity(2, f"{name}!")):
        arrays = ArrayRecord({"w": torch.full((2,), float(client.node))})
        metrics = MetricRecord({"num-examples": 3})
        run.exchange_journal(1, 1).save(client, arrays, metrics)
    run.finish(0, {}, {}, {})
    run.release()
    for client, arrays, _ in opened(tmp_path).exchange_journal(1, 1).uploads():
        assert arrays_to_tensors(arrays)["w"][0] == client.node
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
    assert same_bits(start(run, connected=(), resume=True).arrays, expected.arrays)


# Two servers


def test_two_servers_do_not_share_a_folder(tmp_path, monkeypatch):
    app = Watched()
    monkeypatch.setattr(journal, "PATIENCE", 0.1)

    def second(content):
        with pytest.raises(CheckpointError, match="pass another checkpoint_dir") as e:
            start(tmp_path, resume=True)
        told = "".join(traceback.format_exception(e.value))
        assert f"{tmp_path} is in use by another server" in told
        assert "Timeout" not in told

    app.tamper = {0: second}
    assert len(start(tmp_path, app, num_rounds=1).uploads) == CLIENTS
    start(tmp_path, resume=True)


def test_a_server_that_ends_is_waited_for(tmp_path, caplog):
    """As the ServerApp of a SuperLink that was killed, and started again."""
    if (pid := os.fork()) == 0:
        server = Journal(tmp_path)
        (tmp_path / "held").touch()
        time.sleep(1)
        server.release()
        os._exit(0)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    Journal(tmp_path).release()
    os.waitpid(pid, 0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("in use by another server: waiting 60 s for it to end")


# The format


def test_the_format_is_read_by_every_later_version(tmp_path):
    """Or refused by its number; this one reads what was written when it was made."""
    where = tmp_path / "run"
    shutil.copytree(FORMAT_7, where)
    run = Journal(where)
    last, tensors, record = run.load()
    run.release()
    assert (last, run.options["strategy"]) == (1, "FedFisherOneShot")
    assert tensors.keys() >= STATE
    assert record["history"]["train_metrics_clientapp"]["1"]["num-replies"] == CLIENTS
    exchange = run.exchange_journal(2, 1)
    assert exchange.record.clients == [f"partition-{p}" for p in range(CLIENTS)]
    uploads = list(exchange.uploads())
    weights = {client.partition: dict(m)["num-examples"] for client, _, m in uploads}
    assert weights == {1: 10, 2: 12}
    assert all(arrays_to_tensors(arrays) for _, arrays, _ in uploads)
