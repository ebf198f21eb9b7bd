"""The features on a client's disk: found again, whole, and no more than may be."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from virtual import tiny_data

from flwr_fisher.client.feature_cache import FeatureCache, content_key
from flwr_fisher.client.jobs.tct_features import Examples, read_examples
from flwr_fisher.errors import ClientError, DataError

KB = 1024


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path, partition=3)


def kilobytes(count: float, value: float = 1.0) -> dict[str, Tensor]:
    return {"z": torch.full((int(count * KB) // 4,), value)}


def only_file(cache: FeatureCache) -> Path:
    (path,) = cache.path.iterdir()
    return path


def files(cache: FeatureCache) -> list[str]:
    return sorted(path.name for path in cache.path.iterdir())


# What is stored is found again


def test_what_is_stored_is_read_again_whole(cache: FeatureCache) -> None:
    tensors = {
        "half": torch.randn(3, 4).half(),
        "single": torch.randn(5),
        "double": torch.randn(2, 2).double(),
        "labels": torch.arange(3),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }
    stored = cache.store("key", "features", tensors)
    again = FeatureCache(cache.path.parents[1], 3).load("key", "features")
    for found in (stored, again):
        assert found is not None
        assert found.keys() == tensors.keys()
        for name, value in tensors.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)


def test_keys_names_and_partitions_are_apart(cache: FeatureCache) -> None:
    cache.store("key", "features", kilobytes(1))
    assert cache.load("key", "spectrum") is None
    assert cache.load("other", "features") is None
    assert FeatureCache(cache.path.parents[1], 4).load("key", "features") is None


def test_a_strided_tensor_is_stored_as_its_values(cache: FeatureCache) -> None:
    wide = torch.arange(12.0).view(3, 4)
    found = cache.store("key", "features", {"z": wide.T})["z"]
    assert torch.equal(found, wide.T)


def test_what_is_read_is_a_map_of_the_file(cache: FeatureCache) -> None:
    cache.store("key", "features", kilobytes(64))
    found = cache.load("key", "features")
    assert found is not None
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(cache.path) in maps.read_text()
    # The reader's own copy of it: what it does to that reaches no one else.
    found["z"].zero_()
    again = cache.load("key", "features")
    assert again is not None
    assert bool((again["z"] == 1).all())


def test_a_file_that_is_replaced_or_deleted_stays_with_who_reads_it(
    cache: FeatureCache,
) -> None:
    first = cache.store("key", "features", kilobytes(64, 1))["z"]
    second = cache.store("key", "features", kilobytes(64, 2))["z"]
    cache.drop("key")
    assert cache.load("key", "features") is None
    assert bool((first == 1).all())
    assert bool((second == 2).all())


# Damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def garble_the_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(b"\xff" * 200 + data[200:])


def reshape_in_the_header(path: Path) -> None:
    data = path.read_bytes()
    assert b'"shape":[256]' in data
    path.write_bytes(data.replace(b'"shape":[256]', b'"shape":[2,128]'[:13]))


def rename_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"z":', b'"y":'))


def swap_two_entries(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-8:-4] = struct.pack("<f", 5.0)
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def anothers(path: Path) -> None:
    save_file({"z": torch.ones(256)}, path)  # no checksum


DAMAGE = [
    truncate,
    flip_a_byte,
    garble_the_header,
    reshape_in_the_header,
    rename_in_the_header,
    swap_two_entries,
    empty,
    anothers,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen_named_and_gone(
    cache: FeatureCache,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache.store("key", "features", kilobytes(1))
    path = only_file(cache)
    damage(path)
    assert cache.load("key", "features") is None
    assert f"{path} is damaged, and is made again" in caplog.text
    assert not path.exists()
    assert torch.equal(
        cache.store("key", "features", kilobytes(1))["z"], kilobytes(1)["z"]
    )


@pytest.mark.parametrize("where", ["save_file", "replace", "fsync"])
def test_a_crash_while_writing_leaves_what_was_there(
    cache: FeatureCache, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store("old", "features", kilobytes(1))

    def crash(*args: Any) -> None:
        raise KeyboardInterrupt

    def half(tensors: Any, path: Path, metadata: Any) -> None:
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
            cache.store("new", "features", kilobytes(2))
    assert cache.load("old", "features") is not None
    assert cache.load("new", "features") is None
    (aside,) = cache.path.glob("*.partial")
    found = cache.store("new", "features", kilobytes(2))["z"]
    assert torch.equal(found, kilobytes(2)["z"])
    # Somebody else might still be writing it; nobody is after an hour.
    aside.write_bytes(b"left")
    cache.store("more", "features", kilobytes(1))
    assert aside.exists()
    os.utime(aside, (0, 0))
    cache.store("more", "features", kilobytes(1))
    assert not aside.exists()


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "features").write_text("in the way")
    cache = FeatureCache(tmp_path, 0)
    assert cache.load("key", "features") is None
    with pytest.raises(ClientError, match=r"cannot keep .*features.*state_dir="):
        cache.store("key", "features", kilobytes(1))


# The bound


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, 0, max_bytes=35 * KB)
    for key in "abc":
        cache.store(key, "features", kilobytes(10))
    assert cache.load("a", "features") is not None
    cache.store("d", "features", kilobytes(10))
    assert [name[0] for name in files(cache)] == ["a", "c", "d"]
    assert cache.load("c", "features") is not None
    cache.store("e", "features", kilobytes(20))
    assert [name[0] for name in files(cache)] == ["c", "e"]


def test_an_entrys_files_go_together(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, 0, max_bytes=25 * KB)
    cache.store("a", "features", kilobytes(10))
    cache.store("b", "features", kilobytes(5))
    cache.store("a", "spectrum", kilobytes(5))
    assert len(files(cache)) == 3
    cache.store("b", "spectrum", kilobytes(10))
    assert files(cache) == ["b.features.safetensors", "b.spectrum.safetensors"]


def test_what_is_larger_than_the_bound_stays_alone(tmp_path: Path) -> None:
    """While features are standardised, those as they were need room as well."""
    cache = FeatureCache(tmp_path, 0, max_bytes=15 * KB)
    cache.store("a", "features", kilobytes(10))
    cache.store("b", "features", kilobytes(20))
    assert files(cache) == ["b.features.safetensors"]
    assert cache.load("b", "features") is not None


def test_other_clients_have_bounds_of_their_own(tmp_path: Path) -> None:
    caches = [FeatureCache(tmp_path, i, max_bytes=15 * KB) for i in range(3)]
    for cache in caches:
        cache.store("a", "features", kilobytes(10))
    assert all(cache.load("a", "features") is not None for cache in caches)


def test_what_never_fits_is_refused_with_ways_out(cache: FeatureCache) -> None:
    cache.check_room(4 * 2**30, "features")
    with pytest.raises(ClientError) as caught:
        cache.check_room(4 * 2**30 + 1, "9 features of 2 examples")
    said = str(caught.value)
    assert "9 features of 2 examples take 4294967297 bytes" in said
    assert "bounded to 4294967296" in said
    for way in ("num_features", "float16", "FisherClient(cache_bytes=4294967297)"):
        assert way in said


# Keys


def test_a_key_depends_on_every_part() -> None:
    one = {"w": torch.zeros(2), "b": torch.zeros(1)}
    keys = [
        content_key("a", one),
        content_key("b", one),
        content_key("a", "a", one),
        content_key("aa", one),
        content_key("a", one, one),
        content_key("a", one | {"b": torch.full((1,), -0.0)}),
        content_key("a", one | {"b": torch.zeros(1, 1)}),
        content_key("a", one | {"b": torch.zeros(1).half()}),
        content_key("a", {"w": one["w"], "c": one["b"]}),
        content_key("a", {"w": one["w"]}),
        content_key("a", {}),
        content_key("a"),
        content_key("a", ""),
    ]
    assert len(set(keys)) == len(keys)
    assert content_key("a", one) == content_key("a", {k: v + 0 for k, v in one.items()})
    assert content_key("a", {"w": torch.ones(2, dtype=torch.bfloat16)})


# Examples


def examples(loader: Any, partition: int = 0) -> Examples:
    return read_examples(loader, partition)


def test_examples_are_the_same_in_whatever_order_and_batches_they_come() -> None:
    data = tiny_data(3)
    plain = examples(DataLoader(data, batch_size=4))
    for options in (
        {"batch_size": 5, "shuffle": True},
        {"batch_size": 1},
        {
            "batch_size": 4,
            "shuffle": True,
            "generator": torch.Generator().manual_seed(7),
        },
    ):
        other = examples(DataLoader(data, **options))
        assert other.digest == plain.digest
        assert torch.equal(other.inputs, plain.inputs)
        assert torch.equal(other.labels, plain.labels)
    pairs = {(*x.tolist(), int(y)) for x, y in data}
    again = zip(plain.inputs.tolist(), plain.labels.tolist(), strict=True)
    assert {(*x, y) for x, y in again} == pairs


def test_other_examples_have_another_digest() -> None:
    data = tiny_data(3)
    x, y = data.tensors
    relabelled, moved = y.clone(), x.clone()
    relabelled[0] = (relabelled[0] + 1) % 3
    moved[2, 1] += 1e-6
    sets = [
        TensorDataset(x, y),
        TensorDataset(x, relabelled),
        TensorDataset(moved, y),
        TensorDataset(x[1:], y[1:]),
        TensorDataset(torch.cat([x, x[:1]]), torch.cat([y, y[:1]])),
        TensorDataset(x.double(), y),
        TensorDataset(x, y.int()),
    ]
    digests = {examples(DataLoader(d, batch_size=4)).digest for d in sets}
    assert len(digests) == len(sets)


def test_a_loader_that_augments_gives_the_same_every_time() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + torch.randn(3), y

    loader = DataLoader(Noisy(*tiny_data(1).tensors), batch_size=4, shuffle=True)
    torch.manual_seed(1)
    first = examples(loader)
    torch.manual_seed(2)
    assert examples(loader).digest == first.digest
    assert examples(loader, partition=1).digest != first.digest


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0, 3]),
        torch.tensor([-1, 0]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([[0], [1]]),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels: Tensor) -> None:
    found = examples([(torch.randn(2, 3), labels)])
    with pytest.raises(DataError, match=r"integers \[n\] from 0 to 2; got torch"):
        found.check_classes(3)


def test_a_loader_without_batches_is_named() -> None:
    loader = DataLoader(tiny_data(0, 3), batch_size=4, drop_last=True)
    with pytest.raises(DataError, match="loader of partition 5 gives no batch"):
        examples(loader, 5)
