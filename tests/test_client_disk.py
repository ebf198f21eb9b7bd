"""What a client keeps on its disk: found again, whole, and no more than may be."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import Timeout
from safetensors.torch import save_file

from flwr_fisher.client.disk import ClientDisk
from flwr_fisher.errors import ClientError, ConfigurationError

KB = 1024


def disk(root, key="a", *, client=0, kind="state", **options):
    return ClientDisk(root, kind, client, key, **options)


def kilobytes(count, value=1.0):
    return {"z": torch.full((int(count * KB) // 4,), value)}


def entries(root):
    """The keys of what is kept; a file's name is its name and step, and its key."""
    return sorted({p.name.split(".")[1] for p in root.glob("state/partition-0/*")})


def files(root):
    return sorted(path.name for path in root.rglob("*.*"))


# What is saved is found again


def test_what_is_saved_is_read_again_whole(tmp_path):
    tensors = {
        "strided": torch.arange(12.0).view(3, 4).T,
        "half": torch.randn(3, 4).half(),
        "double": torch.randn(2, 2).double(),
        "labels": torch.arange(3),
        "yes": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
        "none of NumPy's": torch.from_numpy(np.array([], np.float32)),
        "a scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    }
    disk(tmp_path).save("features", tensors, note="said")
    kept = disk(tmp_path).load("features")
    assert kept is not None
    assert kept.note == "said"
    assert list(kept.tensors) == list(tensors)  # their order counts, too
    for name, value in tensors.items():
        assert kept.tensors[name].dtype == value.dtype
        assert torch.equal(kept.tensors[name], value)


def test_entries_names_and_clients_are_apart(tmp_path):
    disk(tmp_path).save("control", kilobytes(1))
    assert disk(tmp_path).load("control", 1) is None
    assert disk(tmp_path).load("other") is None
    for other in ({"key": "b"}, {"client": 1}, {"kind": "uploads"}):
        assert disk(tmp_path, **other).load("control") is None


def test_what_is_not_there_is_made_once(tmp_path):
    calls = []

    def make():
        calls.append(1)
        return kilobytes(1)

    for _ in range(2):
        assert torch.equal(
            disk(tmp_path).made_once("features", make)["z"], kilobytes(1)["z"]
        )
    assert len(calls) == 1


def test_a_step_replaces_all_but_those_that_are_to_stay(tmp_path):
    mine = disk(tmp_path)
    for step in range(1, 5):
        mine.save("control", kilobytes(1), step=step, keep=[step - 1])
    mine.save("tct-control", kilobytes(1))
    kept = ["control-000003", "control-000004", "tct-control-000000"]
    assert files(tmp_path) == [f"{name}.a.safetensors" for name in kept]
    mine.drop("control")
    assert files(tmp_path) == ["tct-control-000000.a.safetensors"]
    mine.drop()
    assert entries(tmp_path) == []


def test_what_is_read_is_a_map_of_the_file(tmp_path):
    disk(tmp_path).save("features", kilobytes(64))
    kept = disk(tmp_path).load("features")
    assert kept is not None
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path) in maps.read_text()
    # The reader's own copy of it: what it does to that reaches no one else, and what
    # others do to the file does not reach it.
    kept.tensors["z"].zero_()
    again = disk(tmp_path).load("features")
    assert again is not None
    disk(tmp_path).save("features", kilobytes(64, 2))
    disk(tmp_path).drop()
    assert bool((again.tensors["z"] == 1).all())


def test_only_its_user_can_read_it(tmp_path):
    disk(tmp_path / "new").save("control", kilobytes(1))
    assert disk(tmp_path / "new").path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "other",
    [
        *({"key": key} for key in ("", "../..", "-1", "FF", "a b", "a" * 33, "0x1")),
        *({"kind": kind} for kind in ("", "..", "a/b", "State")),
    ],
)
def test_what_names_no_folder_is_refused(tmp_path, other):
    with pytest.raises(ConfigurationError):
        disk(tmp_path, **other)


# Damage


DAMAGE = {
    "truncated": lambda data: data[:-7],
    "flipped": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "renamed": lambda data: data.replace(b'"z":', b'"y":'),
    "another note": lambda data: data.replace(b"said", b"sais"),
    "another's": None,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_and_as_good_as_not_there(tmp_path, damage, caplog):
    mine = disk(tmp_path)
    mine.save("features", kilobytes(1), note="said")
    (path,) = mine.path.iterdir()
    if damage is None:
        save_file(kilobytes(1), path)  # another's, without a checksum
    else:
        data = path.read_bytes()
        assert damage(data) != data
        path.write_bytes(damage(data))
    assert mine.load("features") is None
    assert f"Ignoring {path}, which cannot be read" in caplog.text
    made = mine.made_once("features", lambda: kilobytes(1))
    assert torch.equal(made["z"], kilobytes(1)["z"])


@pytest.mark.parametrize("where", ["save_file", "replace", "fsync"])
def test_a_crash_while_writing_leaves_what_was_there(tmp_path, where, monkeypatch):
    mine = disk(tmp_path)
    mine.save("control", kilobytes(1), step=1)

    def crash(*args):
        raise KeyboardInterrupt

    def half(tensors, path, metadata):
        path.write_bytes(b"\x08")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "save_file":
            patch.setattr("flwr_fisher.files.save_file", half)
        elif where == "replace":
            patch.setattr(Path, "replace", crash)
        else:
            patch.setattr(os, "fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            mine.save("control", kilobytes(2), step=2)
    assert mine.load("control", 1) is not None
    assert mine.load("control", 2) is None
    (aside,) = mine.path.glob("*.partial")
    # Somebody else might still be writing it; nobody is after an hour.
    aside.rename(aside := mine.path / "control-000002.a.1.partial")
    mine.save("control", kilobytes(1), step=3)
    assert aside.exists()
    os.utime(aside, (0, 0))
    mine.save("control", kilobytes(1), step=3)
    assert not aside.exists()


def test_a_disk_that_refuses_is_named(tmp_path):
    (tmp_path / "state").write_text("in the way")
    mine = disk(tmp_path)
    assert mine.load("control") is None
    with pytest.raises(ClientError, match=r"cannot write .*state.* another state_dir"):
        mine.save("control", kilobytes(1))


# The limit


def test_the_least_recently_used_goes_first_and_reading_is_use(tmp_path):
    def mine(key):
        return disk(tmp_path, key, limit=35 * KB)

    for key in "abc":
        mine(key).save("control", kilobytes(10))
    assert mine("a").load("control") is not None
    mine("d").save("control", kilobytes(10))
    assert entries(tmp_path) == list("acd")
    assert mine("c").load("control") is not None
    mine("e").save("control", kilobytes(20))
    assert entries(tmp_path) == list("ce")


def test_an_entrys_files_go_together(tmp_path):
    one, other = (disk(tmp_path, key, limit=25 * KB) for key in "ab")
    one.save("features", kilobytes(10))
    other.save("features", kilobytes(5))
    one.save("spectrum", kilobytes(5))
    assert len(files(tmp_path)) == 3
    other.save("spectrum", kilobytes(10))
    assert entries(tmp_path) == ["b"]
    assert len(files(tmp_path)) == 2


def test_small_entries_are_not_without_number_either(tmp_path, monkeypatch):
    monkeypatch.setattr("flwr_fisher.client.disk._MOST", 5)
    for key in range(9):
        disk(tmp_path, f"{key}").save("control", kilobytes(1))
    assert entries(tmp_path) == list("45678")


def test_what_never_fits_is_refused_with_ways_out(tmp_path):
    mine = disk(tmp_path, limit=100)
    mine.check_room(100, "nine features")
    with pytest.raises(ClientError, match="the control of run a: it takes 1024 bytes"):
        mine.save("control", kilobytes(1))
    with pytest.raises(ClientError) as caught:
        mine.check_room(101, "nine features", "ask for fewer, or ")
    for part in ("nine features", "at most 100", "fewer, or", "state_bytes=101"):
        assert part in str(caught.value)


def test_only_our_own_files_are_deleted(tmp_path):
    mine = tmp_path / "state" / "partition-0"
    names = ["notes.txt", "control-1.9.safetensors", "model.safetensors", "1", "a.b"]
    others = [mine / name for name in (*names, "control-000001.G.safetensors")]
    mine.mkdir(parents=True)
    for path in others:
        path.write_bytes(bytes(50 * KB))
    for key in range(1, 9):
        disk(tmp_path, f"{key}", limit=20 * KB).save("control", kilobytes(10))
    assert all(path.exists() for path in others)
    assert not (mine / "control-000000.1.safetensors").exists()


# Others beside


@pytest.mark.parametrize("same", [False, True])
def test_clients_do_not_get_in_each_others_way(tmp_path, same):
    """They make, and delete, entries all the time; two may be one client's."""
    errors = []

    def work(number):
        try:
            for step in range(60 * number, 60 * number + 60):
                client = 0 if same else number
                mine = disk(tmp_path, f"{step % 7}", client=client, limit=10 * KB)
                mine.save("control", kilobytes(1), step=step)
                assert same or mine.load("control", step) is not None
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_what_was_made_is_there_although_others_delete_it_at_once(
    tmp_path, monkeypatch
):
    def deleted(self):
        shutil.rmtree(self.path)

    monkeypatch.setattr(ClientDisk, "_make_room", deleted)
    made = disk(tmp_path).made_once("features", lambda: kilobytes(1))
    assert torch.equal(made["z"], kilobytes(1)["z"])


def test_an_entry_that_another_process_works_on_is_not_deleted_for_room(tmp_path):
    """Its lock was, and a third process could take it, too."""
    first, second = disk(tmp_path, "a"), disk(tmp_path, "b", limit=15 * KB)
    first.save("control", kilobytes(10))
    with first.lock():
        second.save("control", kilobytes(10))
        assert first.load("control") is not None
        with pytest.raises(Timeout):
            first.lock().acquire(timeout=0)
    second.save("control", kilobytes(10))
    assert entries(tmp_path) == ["b"]
    assert second.load("control") is not None
