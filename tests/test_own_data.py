"""Nodes with data of their own: three forms of it, and the apps in both worlds."""

import json
import tomllib

import numpy as np
import pytest
import rivals_path  # noqa: F401
import torch
from flwr.app import Context, RecordDict
from tasks import (
    KINDS,
    NodeTask,
    kind_of,
    load_dataset,
    load_own,
    load_task,
    node_task,
    server_task,
)
from torch import nn
from torch.utils.data import TensorDataset

from apps import APPS, load
from flwr_fisher.errors import ConfigurationError, DataError, UnknownNameError
from flwr_fisher.testing import LocalGrid

CATS = "own:3x4x6:cat,dog"
CONFIG = {
    "dataset": "digits",
    "data-dir": "",
    "model": "logistic",
    "partition": "iid",
    "alpha": 0.1,
    "seed": 0,
}


def arrays(path, x, y):
    np.savez(path, x=x, y=y)
    return path


def pictures(root, *classes, size=(6, 4)):
    """A folder of class folders, each with two pictures of one colour."""
    from PIL import Image

    for i, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for j in range(2):
            color = (10 * i, 20 * j, 30)
            Image.new("RGB", size, color).save(root / name / f"{j}.png")
    return root


# Three forms


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_arrays_are_read(tmp_path, dtype, layout):
    x = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 6)).astype(np.uint8)
    y = np.array([0, 1, 1, 0, 1], np.int32)
    own = x if dtype == np.uint8 else (x / 255).astype(dtype)
    own = own if layout == "channels first" else np.moveaxis(own, 1, -1)
    images = load_own(arrays(tmp_path / "a.npz", own, y), kind_of(CATS))
    batch, targets = images[list(range(5))]
    torch.testing.assert_close(batch, (torch.from_numpy(x) / 255 - 0.5) / 0.5)
    assert targets.tolist() == [0, 1, 1, 0, 1]


def test_grey_images_need_no_channel(tmp_path):
    path = arrays(tmp_path / "a.npz", np.zeros((2, 8, 8), np.uint8), np.array([1, 2]))
    assert load_own(path, kind_of("digits")).data.shape == (2, 1, 8, 8)


def test_class_folders_are_read_by_name_though_one_is_missing(tmp_path):
    kind = kind_of("own:3x4x6:ant,cat,dog")
    images = load_own(pictures(tmp_path / "own", "dog", "cat"), kind)
    assert images.targets.tolist() == [1, 1, 2, 2]
    assert images.data.shape == (4, 3, 4, 6)
    numbered = load_own(pictures(tmp_path / "numbered", "2", "0"), kind)
    assert numbered.targets.tolist() == [0, 0, 2, 2]


def test_pictures_are_made_as_large_as_the_data_sets(tmp_path):
    folder = pictures(tmp_path / "own", "0", size=(40, 30))
    assert load_own(folder, kind_of("mnist")).data.shape == (2, 1, 28, 28)


@pytest.mark.parametrize("splits", [False, True])
def test_a_saved_data_set_is_read(tmp_path, splits):
    from datasets import (
        ClassLabel,
        Dataset,
        DatasetDict,
        Features,
        Image,
        disable_progress_bars,
    )
    from PIL import Image as Pillow

    disable_progress_bars()
    features = Features({"image": Image(), "label": ClassLabel(names=["cat", "dog"])})
    rows = {"image": [Pillow.new("RGB", (6, 4))] * 3, "label": [1, 0, 1]}
    saved = Dataset.from_dict(rows, features)
    kept = DatasetDict(train=saved) if splits else saved
    kept.save_to_disk(str(tmp_path / "saved"))
    images = load_own(tmp_path / "saved", kind_of(CATS))
    assert images.targets.tolist() == [1, 0, 1]
    assert images.data.shape == (3, 3, 4, 6)


# What is wrong is named


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (
            np.zeros((2, 4, 4)),
            [0, 1],
            r"shape \[4, 4\], but the data set's images have \[3, 4",
        ),
        (np.zeros((2, 3, 4, 6)), [0, 2], "labels run from 0 to 2, but there are 2 cla"),
        (np.zeros((2, 3, 4, 6)), [-1, 0], "labels run from -1 to 0"),
        (np.zeros((2, 3, 4, 6)), [0], "y must be an integer for each of the 2 x"),
        (np.zeros((2, 3, 4, 6)), [0.5, 1.0], "y must be an integer for each"),
        (np.full((2, 3, 4, 6), 7.0), [0, 1], r"floats in 0…1, not float64 from 7 to 7"),
        (np.full((2, 3, 4, 6), np.nan), [0, 1], "floats in 0…1, not float64 from nan"),
        (np.zeros((2, 3, 4, 6), np.int64), [0, 1], "uint8 in 0…255, or floats in 0…1"),
        (np.zeros((0, 3, 4, 6)), np.zeros(0, np.int64), "has no examples"),
        (np.array([{}, {}], object), [0, 1], "is no .npz file with arrays x and y"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, x, y, reason):
    path = arrays(tmp_path / "a.npz", x, np.array(y))
    with pytest.raises(DataError, match=reason) as caught:
        load_own(path, kind_of(CATS))
    assert str(path) in str(caught.value)


def test_other_files_and_folders_are_named(tmp_path):
    kind = kind_of(CATS)
    with pytest.raises(DataError, match=r"does not exist: it should be a folder"):
        load_own(tmp_path / "gone", kind)
    with pytest.raises(ConfigurationError, match="must be absolute, not 'here'"):
        load_own("here", kind)
    with pytest.raises(DataError, match="has no folders"):
        load_own(tmp_path, kind)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"notes.txt is no \.npz file"):
        load_own(tmp_path / "notes.txt", kind)
    np.savez(tmp_path / "other.npz", images=np.zeros(3))
    with pytest.raises(DataError, match=r"other.npz is no \.npz file with arrays x"):
        load_own(tmp_path / "other.npz", kind)
    pictures(tmp_path / "birds", "cat", "owl")
    with pytest.raises(DataError, match=r"names of classes \(cat, dog\), but 'owl' is"):
        load_own(tmp_path / "birds", kind)
    pictures(tmp_path / "split" / "train", "cat")
    with pytest.raises(DataError, match=r"'train' is none; is .*train meant"):
        load_own(tmp_path / "split", kind)
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="is not a folder of classes"):
        load_own(tmp_path / "empty", kind)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mnits", "dataset of nodes with data of their own 'mnits'; known: digits"),
        ("own:3x4:2", "unknown dataset of nodes with data of their own"),
        ("own:3x4x0:2", "sizes and classes must be at least 1"),
        ("own:3x4x4:0", "sizes and classes must be at least 1"),
        ("own:3x4x4:a,,b", "names must not be empty, or there twice"),
        ("own:3x4x4:a,a", "names must not be empty, or there twice"),
        ("language", "unknown dataset of nodes with data of their own 'language'"),
    ],
)
def test_a_kind_that_is_none_is_named(name, reason):
    with pytest.raises(ConfigurationError, match=reason):
        kind_of(name)


def test_the_kind_of_digits_is_what_is_there():
    digits, kind = load_dataset("digits"), KINDS["digits"]
    assert (digits.shape, digits.class_names) == (kind.shape, kind.class_names)


# A node's task


def test_a_simulated_nodes_task_is_its_share():
    share = {"partition-id": 1, "num-partitions": 3}
    data, task = (
        node_task(CONFIG, share),
        load_task(
            dataset="digits", model="logistic", partition="iid", num_partitions=3
        ),
    )
    drawn = []
    for loader in (data.train_loader(100), task.train_loader(1, 100)):
        torch.manual_seed(0)
        drawn.append(torch.cat([x for x, _ in loader]))
    assert torch.equal(*drawn)
    weights = zip(data.model.parameters(), task.make_model().parameters(), strict=True)
    assert all(torch.equal(own, other) for own, other in weights)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({}, r"this node has no data: start it with --node-config \"data-path='/wh"),
        ({"data-path": "/x", "partition-id": 0}, "leave one of them out of --node-con"),
    ],
)
def test_a_node_has_one_kind_of_data(node, reason):
    with pytest.raises(ConfigurationError, match=reason):
        node_task(CONFIG, node)


def test_a_quick_try_takes_some_of_a_nodes_own_data(tmp_path):
    y = np.repeat(np.arange(4), [20, 2, 20, 20])
    path = arrays(tmp_path / "a.npz", np.zeros((62, 8, 8)), y)
    config = CONFIG | {"max-examples": 14}
    (batch,) = node_task(config, {"data-path": str(path)}).train_loader(99)
    assert batch[1].bincount().tolist() == [4, 2, 4, 4]


def test_a_data_set_and_a_module_of_ones_own():
    x, y = torch.arange(10.0)[:, None], torch.arange(10) % 2
    loader = NodeTask(TensorDataset(x, y), nn.Linear(1, 2)).train_loader(4)
    assert sorted(torch.cat([batch[0] for batch in loader]).flatten().tolist()) == list(
        range(10)
    )


def test_the_server_scores_on_what_it_has(tmp_path):
    path = arrays(tmp_path / "t.npz", np.zeros((4, 3, 4, 6)), np.array([0, 1, 1, 0]))
    task = server_task({**CONFIG, "dataset": CATS, "test-path": str(path)}, 7)
    assert task.num_partitions == 0
    ((x, _),) = task.test_loader()
    assert task.make_model()(x).shape == (4, 2)
    with pytest.raises(UnknownNameError, match="own:3x4x6:cat,dog"):
        server_task({**CONFIG, "dataset": CATS, "test-path": ""}, 7)


# The apps, in both worlds

FEW = {
    "fedfisher": {"local-epochs": 2},
    "fedfish": {"num-rounds": 1, "barrier-every": 0, "held-out": 0.0}
    | {"personalisation-fraction": 0.0, "local-epochs": 1},
    "fagh": {"num-rounds": 1},
    "tct": {"num-rounds": 3, "stage1-rounds": 1, "num-features": 50}
    | {"local-epochs": 1, "local-steps": 5},
}


@pytest.mark.usefixtures("empty_pictures")
@pytest.mark.parametrize("app", sorted(FEW))
def test_an_app_gives_the_same_with_the_same_data_on_nodes(app, tmp_path):
    """In a simulation, and on nodes that find their share on their own disk."""
    pyproject = tomllib.loads((APPS / app / "pyproject.toml").read_text())
    config = pyproject["tool"]["flwr"]["app"]["config"] | FEW[app]
    config |= {"model": "logistic", "partition": "iid"}
    task = load_task(
        dataset="digits", model="logistic", partition="iid", num_partitions=3
    )

    def run(where, own):
        where.mkdir()
        sided = config | {"output-dir": str(where)}
        if "state-dir" in config:
            sided |= {"state-dir": str(where / "state")}
        if own:
            sided |= {"test-path": str(where / "test.npz")}
            test = task.data.test
            arrays(where / "test.npz", test.data.numpy(), test.targets.numpy())
        grid = LocalGrid(load(APPS / app, "client"), 3, run_config=sided, seed=0)
        if own:
            nodes = dict(grid.nodes)
            for node, i in nodes.items():
                share, path = task.train_images(i), where / f"{i}.npz"
                arrays(path, share.data.numpy(), share.targets.numpy())
                del grid._contexts[node].node_config["partition-id"]
                del grid._contexts[node].node_config["num-partitions"]
                grid._contexts[node].node_config["data-path"] = str(path)
        load(APPS / app, "server")(grid, Context(1, 1, {}, RecordDict(), sided))
        metrics = json.loads((where / "metrics.json").read_text())
        return metrics

    simulated = run(tmp_path / "simulation", own=False)["accuracy"]
    real = run(tmp_path / "nodes", own=True)["accuracy"]
    assert (tmp_path / "simulation" / "labels.png").exists()
    assert not (tmp_path / "nodes" / "labels.png").exists()
    assert simulated.keys() == real.keys()
    # Node ids take the place of partitions in the clients' seeds.
    assert real == pytest.approx(simulated, abs=0.1)
    assert simulated[app] > 0.3
