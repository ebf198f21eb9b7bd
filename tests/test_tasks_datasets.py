import csv
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import rivals_path  # noqa: F401
import torch
from tasks import DATASETS, Examples, Splits, load_dataset

from flwr_fisher.errors import ConfigurationError, DataError, UnknownNameError

MNIST_DIR = Path(__file__).resolve().parents[2] / "shared" / "data"


def images(n=6, channels=1, side=2):
    data = torch.arange(n * channels * side * side).to(torch.uint8)
    half = (0.5,) * channels
    return Examples(
        data.reshape(n, channels, side, side), torch.arange(n) % 2, half, half
    )


def write_idx(path, array):
    """Write bytes in the format of MNIST's files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    head = bytes([0, 0, 8, array.ndim])
    path.write_bytes(head + sizes + array.to(torch.uint8).numpy().tobytes())


def write_picture(path, pixels):
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(path)


def refuse(*_, **__):
    raise RuntimeError("no network here")


# --- Examples and Splits


def test_bytes_are_scaled_and_normalised():
    data = torch.tensor([[0, 51], [255, 102]], dtype=torch.uint8).reshape(1, 2, 1, 2)
    x, y = Examples(data, torch.tensor([3]), mean=(0.1, 0.5), std=(0.2, 0.25))[[0]]
    expected = torch.tensor([[-0.5, 0.5], [2.0, -0.4]]).reshape(1, 2, 1, 2)
    torch.testing.assert_close(x, expected)
    assert y.tolist() == [3]


def test_a_batch_holds_what_single_reads_give_in_the_order_asked():
    some = images(channels=3)
    x, y = some[[4, 1, 1]]
    for position, index in enumerate((4, 1, 1)):
        single, label = some[index]
        assert torch.equal(x[position], single)
        assert y[position] == label
    assert torch.equal(some[1:3][0], some[[1, 2]][0])


def test_subset_keeps_order_and_copies():
    some = images()
    part = some.subset([5, 0])
    assert torch.equal(part[[0, 1]][0], some[[5, 0]][0])
    part.data.zero_()
    assert some.data[5].any()
    assert len(some.subset([])) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": torch.zeros(6, 2, 2)}, r"\[n, C, H, W\]"),
        ({"data": torch.zeros(6, 1, 2, 2, dtype=torch.float64)}, "float64"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, r"int64 \[5\]"),
        ({"targets": torch.zeros(6)}, "int64"),
        ({"mean": (0.5, 0.5)}, "1 channels"),
        ({"data": torch.zeros(6, 3)}, r"int64 tokens \[n, T \+ 1\]"),
        ({"data": torch.zeros(6, 1).long()}, r"not torch.int64 \[6, 1\]"),
        ({"data": torch.zeros(6, 3).long()}, "0 channels"),
    ],
)
def test_examples_of_the_wrong_form_are_refused(change, message):
    good = images()
    fields = {"data": good.data, "targets": good.targets, "mean": (0.5,), "std": (0.5,)}
    with pytest.raises(DataError, match=message):
        Examples(**{**fields, **change})


def test_data_whose_splits_do_not_fit_are_refused():
    good = images()
    with pytest.raises(DataError, match="test split is empty"):
        Splits(good, good.subset([]), ("a", "b"))
    with pytest.raises(DataError, match="run from 0 to 1, but there"):
        Splits(good, good, ("a",))
    with pytest.raises(DataError, match=r"shape \[1, 3, 3\].*\[1, 2, 2\]"):
        Splits(good, images(side=3), ("a", "b"))


# --- names and directories


def test_digits():
    from sklearn.datasets import load_digits

    data = load_dataset("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.shape == (1, 8, 8)
    assert data.num_classes == 10
    assert load_dataset("digits") is data  # loaded once
    both = torch.cat([data.train.data, data.test.data]).flatten(1) * 16
    found = sorted(map(tuple, both.to(torch.int64).tolist()))
    assert found == sorted(map(tuple, load_digits().data.astype(int).tolist()))
    # Stratified: a tenth of each split, nearly, is each digit.
    assert data.test.targets.bincount().min() >= 34
    x, _ = data.train[list(range(1437))]
    assert abs(float(x.mean())) < 1e-3
    assert abs(float(x.std()) - 1) < 1e-3


@pytest.mark.parametrize("name", ["minst", "imagefolder:", "hf:", "hf"])
def test_unknown_name_lists_the_known(name):
    with pytest.raises(UnknownNameError) as caught:
        load_dataset(name)
    assert all(known in str(caught.value) for known in DATASETS)


def test_relative_data_dir_is_refused():
    with pytest.raises(ConfigurationError, match=r"data-dir.*'some/where'"):
        load_dataset("mnist", "some/where")


# --- torchvision


@pytest.mark.skipif(not MNIST_DIR.is_dir(), reason="MNIST is not in ../shared/data")
def test_mnist():
    data = load_dataset("mnist", MNIST_DIR)
    assert repr(data) == "Splits(60000 + 10000 of shape 1x28x28, 10 classes)"
    assert data.train.data.dtype == torch.uint8
    assert data.test.targets.bincount()[:3].tolist() == [980, 1135, 1032]
    x, _ = data.train[list(range(60000))]
    assert abs(float(x.mean())) < 1e-3
    assert abs(float(x.std()) - 1) < 1e-3


@pytest.mark.parametrize(
    "name", ["mnist", "emnist-letters", "svhn", "cifar10", "gtsrb"]
)
def test_missing_files_without_network_say_what_to_do(name, tmp_path, monkeypatch):
    from torchvision import datasets

    for kind in ("MNIST", "EMNIST", "SVHN", "CIFAR10", "GTSRB"):
        monkeypatch.setattr(getattr(datasets, kind), "download", refuse)
    with pytest.raises(DataError) as caught:
        load_dataset(name, tmp_path / "none")
    message = str(caught.value)
    for part in (repr(name), str(tmp_path / "none"), "no network here", "data-dir"):
        assert part in message


@pytest.mark.parametrize(
    ("name", "folder", "first"),
    [("mnist", "MNIST", "0 - zero"), ("fashionmnist", "FashionMNIST", "T-shirt/top")],
)
def test_files_that_are_there_are_not_downloaded(
    name, folder, first, tmp_path, monkeypatch
):
    from torchvision import datasets

    monkeypatch.setattr(datasets.MNIST, "download", refuse)
    pixels = torch.arange(3 * 28 * 28).reshape(3, 28, 28) % 251
    for prefix in ("train", "t10k"):
        raw = tmp_path / folder / "raw" / prefix
        write_idx(Path(f"{raw}-images-idx3-ubyte"), pixels)
        write_idx(Path(f"{raw}-labels-idx1-ubyte"), torch.tensor([0, 9, 4]))
    data = load_dataset(name, tmp_path)
    assert torch.equal(data.train.data.squeeze(1), pixels.to(torch.uint8))
    assert data.test.targets.tolist() == [0, 9, 4]
    assert data.class_names[0] == first


@pytest.mark.parametrize(
    ("name", "split", "first", "classes"),
    [
        ("emnist-letters", "letters", 1, 26),
        ("emnist-digits", "digits", 0, 10),
        ("emnist", "balanced", 0, 47),
    ],
)
def test_emnist_is_upright_and_labelled_from_zero(
    name, split, first, classes, tmp_path
):
    pixels = torch.arange(2 * 28 * 28).reshape(2, 28, 28) % 251
    for part in ("train", "test"):
        raw = tmp_path / "EMNIST" / "raw" / f"emnist-{split}-{part}"
        write_idx(Path(f"{raw}-images-idx3-ubyte"), pixels)
        write_idx(Path(f"{raw}-labels-idx1-ubyte"), torch.tensor([first, first + 3]))
    data = load_dataset(name, tmp_path)
    assert data.train.targets.tolist() == [0, 3]
    assert data.num_classes == classes
    assert data.class_names[0] == ("a" if split == "letters" else "0")
    assert torch.equal(data.train.data[0, 0], pixels[0].T.to(torch.uint8))


@pytest.mark.parametrize(
    ("name", "labels", "mean"),
    [
        ("cifar10", "labels", (0.4914, 0.4822, 0.4465)),
        ("cifar100", "fine_labels", (0.5071, 0.4865, 0.4409)),
    ],
)
def test_cifar_channels_come_first(name, labels, mean, tmp_path, monkeypatch):
    from torchvision import datasets
    from torchvision.datasets import cifar

    def write(file, content):
        path = tmp_path / known.base_folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(content))

    monkeypatch.setattr(cifar, "check_integrity", lambda *_: True)  # of the real ones
    known = getattr(datasets, name.upper())
    pixels = np.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32).astype(np.uint8)
    for file, _ in known.train_list + known.test_list:
        write(file, {"data": pixels.reshape(2, -1), labels: [1, 0]})
    write(known.meta["filename"], {known.meta["key"]: ["cat", "dog"]})
    data = load_dataset(name, tmp_path)
    assert data.shape == (3, 32, 32)
    assert len(data.train) == 2 * len(known.train_list)
    assert torch.equal(data.test.data, torch.from_numpy(pixels))
    assert data.test.targets.tolist() == [1, 0]
    assert data.class_names == ("cat", "dog")
    assert data.train.mean == mean


def test_svhn_has_numbers_for_names(tmp_path, monkeypatch):
    from scipy.io import savemat
    from torchvision.datasets import svhn

    monkeypatch.setattr(svhn, "check_integrity", lambda *_: True)
    pixels = np.arange(3 * 3 * 32 * 32).reshape(3, 3, 32, 32).astype(np.uint8)
    for split in ("train", "test"):
        labels = np.array([[2], [10], [1]])  # in the files a zero is 10
        content = {"X": pixels.transpose(2, 3, 1, 0), "y": labels}
        savemat(tmp_path / f"{split}_32x32.mat", content)
    data = load_dataset("svhn", tmp_path)
    assert torch.equal(data.train.data, torch.from_numpy(pixels))
    assert data.class_names == tuple("0123456789")
    assert data.test.targets.tolist() == [2, 0, 1]


def test_gtsrb_is_resized(tmp_path):
    base = tmp_path / "gtsrb"
    training, final = base / "GTSRB" / "Training", base / "GTSRB" / "Final_Test"
    for label, side in ((0, 20), (1, 50)):
        colour = torch.full((side, side + 3, 3), 40 * label)
        write_picture(training / f"0000{label}" / "0.ppm", colour)
        write_picture(final / "Images" / f"{label}.ppm", colour)
    with (base / "GT-final_test.csv").open("w") as file:
        rows = csv.writer(file, delimiter=";")
        rows.writerows([("Filename", "ClassId"), ("0.ppm", 0), ("1.ppm", 1)])
    data = load_dataset("gtsrb", tmp_path)
    assert data.shape == (3, 32, 32)
    assert data.train.targets.tolist() == data.test.targets.tolist() == [0, 1]
    assert data.test.data[1].unique().tolist() == [40]


# --- image folders


def write_folders(root, *, sides=(5, 9)):
    for split in ("train", "test"):
        for label, name in enumerate(("ant", "bee")):
            for side in sides:
                pixels = torch.full((side, side), 100 * label)
                write_picture(root / split / name / f"{side}.png", pixels)


@pytest.mark.parametrize("relative", [True, False])
def test_image_folder(tmp_path, relative):
    write_folders(tmp_path / "mine")
    name = "mine" if relative else str(tmp_path / "mine")
    data = load_dataset(f"imagefolder:{name}", tmp_path if relative else None)
    assert repr(data) == "Splits(4 + 4 of shape 3x32x32, 2 classes)"
    assert data.class_names == ("ant", "bee")
    assert data.train.targets.tolist() == [0, 0, 1, 1]
    assert data.train.data[:, 0, 0, 0].tolist() == [0, 0, 100, 100]


@pytest.mark.parametrize(
    ("wrong", "holds"),
    [
        (lambda root: (root / "train").rename(root / "val"), "test.*val"),
        (lambda root: root.rename(root.parent / "elsewhere"), "nothing"),
        (lambda root: (root / "train" / "cow").mkdir(), "cow"),
    ],
)
def test_a_wrong_image_folder_shows_the_layout(tmp_path, wrong, holds):
    root = tmp_path / "mine"
    write_folders(root)
    wrong(root)
    with pytest.raises(DataError, match=holds) as raised:
        load_dataset(f"imagefolder:{root}")
    assert "<dir>/train/<class>/<image files>" in str(raised.value)


def test_image_folder_with_other_classes_in_test(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "test" / "bee").rename(tmp_path / "test" / "wasp")
    with pytest.raises(DataError, match=r"names of classes \(ant, bee.*wasp"):
        load_dataset(f"imagefolder:{tmp_path}")


# --- the Hub, by way of files on disk


def write_hub(root, columns, splits=("train", "test")):
    from datasets import Dataset, Features, disable_progress_bars

    disable_progress_bars()
    values = {key: values for key, (values, _) in columns.items()}
    kinds = Features({key: kind for key, (_, kind) in columns.items()})
    for split in splits:
        rows = Dataset.from_dict(values, features=kinds)
        rows.to_parquet(root / "set" / f"{split}.parquet")
    return f"hf:{root / 'set'}"


def pictures(*sides, channels=1):
    from datasets import Image
    from PIL import Image as Pillow

    shapes = [(n, n + 1) if channels == 1 else (n, n + 1, channels) for n in sides]
    return [Pillow.fromarray(np.full(s, 7, np.uint8)) for s in shapes], Image()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from flwr_datasets import federated_dataset

    # It would report the use to Flower.
    monkeypatch.setattr(federated_dataset, "event", lambda *_, **__: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_hub_images_of_one_size_keep_it(hub):
    from datasets import ClassLabel, Value

    coarse = [1, 0, 1], ClassLabel(names=["a", "b"])
    labels = [1, 0, 1], ClassLabel(names=["no", "yes"])
    columns = {"pic": pictures(6, 6, 6), "text": (["x"] * 3, Value("string"))}
    columns |= {"coarse_label": coarse, "fine_label": labels}
    data = load_dataset(write_hub(hub, columns), hub / "cache")
    assert repr(data) == "Splits(3 + 3 of shape 1x6x7, 2 classes)"
    assert data.class_names == ("no", "yes")
    assert data.train.targets.tolist() == [1, 0, 1]
    assert int(data.test.data.min()) == int(data.test.data.max()) == 7


def test_hub_images_of_different_sizes_are_resized(hub):
    from datasets import Value

    labels = [2, 0], Value("int64")
    columns = {"image": pictures(6, 9, channels=3), "label": labels}
    data = load_dataset(write_hub(hub, columns), hub / "cache")
    assert repr(data) == "Splits(2 + 2 of shape 3x32x32, 3 classes)"
    assert int(data.test.data.min()) == int(data.test.data.max()) == 7


def test_hub_columns_that_are_not_clear_are_named(hub):
    from datasets import ClassLabel

    kind = ClassLabel(names=["a", "b"])
    columns = {"img": pictures(4, 4), "one": ([0, 1], kind), "two": ([0, 1], kind)}
    with pytest.raises(DataError, match="'img', 'one', 'two'"):
        load_dataset(write_hub(hub, columns), hub / "cache")


def test_hub_without_a_test_split(hub):
    from datasets import ClassLabel

    columns = {"img": pictures(4, 4), "label": ([0, 1], ClassLabel(names=["a", "b"]))}
    name = write_hub(hub, columns, splits=("train",))
    with pytest.raises(DataError, match=r"hf:.*'test' is not present"):
        load_dataset(name, hub / "cache")
    with pytest.raises(DataError, match=f"hf:{hub}/nothing"):
        load_dataset(f"hf:{hub}/nothing", hub / "cache")
