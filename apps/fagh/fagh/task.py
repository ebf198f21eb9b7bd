"""The model and the data of this app: change this file for your own."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Loader = DataLoader[tuple[Tensor, ...]]


class Net(nn.Sequential):
    """Multinomial logistic regression on images of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


def load_data(context: Context) -> Loader:
    """Return a client's batches: of its own file, or of its share in a simulation."""
    node, config = context.node_config, context.run_config
    if "data-path" in node:
        data = load_file(str(node["data-path"]))
    else:
        place = int(node["partition-id"]), int(node["num-partitions"])
        data = share(*place, float(config["alpha"]), int(config["seed"]))
    return DataLoader(data, int(config["batch-size"]), shuffle=True)


def load_test(context: Context) -> Loader:
    """Return the server's test batches: of its file, or of the test split."""
    path = str(context.run_config["test-path"])
    return DataLoader(load_file(path) if path else tensors(digits()["test"]), 512)


def title(context: Context, loader: Loader, clients: int) -> str:
    """Return the report's title: the data, how they are split, and the test images."""
    config, count = context.run_config, sum(len(labels) for _, labels in loader)
    data = Path(str(config["test-path"])).name
    if not data:
        split = f"by Dirichlet({config['alpha']})"
        data = f"scikit-learn's digits, {clients} clients {split}"
    return f"{data}; {count} test images"


def load_file(path: str) -> TensorDataset:
    """Read an .npz file with images ``x`` and labels ``y``."""
    with np.load(path) as arrays:
        return TensorDataset(torch.tensor(arrays["x"]), torch.tensor(arrays["y"]))


@cache
def digits() -> Any:
    """Return scikit-learn's digits, split into ``train`` and ``test``."""
    from datasets import Dataset, disable_progress_bars  # only simulations need them
    from sklearn.datasets import load_digits

    disable_progress_bars()
    images, labels = load_digits(return_X_y=True)
    columns = {"image": images.reshape(-1, 1, 8, 8) / 16, "label": labels}
    return Dataset.from_dict(columns).train_test_split(test_size=0.2, seed=0)


@cache
def share(partition: int, count: int, alpha: float, seed: int) -> TensorDataset:
    """Return a client's images of the training split; each class is split at random."""
    from flwr_datasets.partitioner import DirichletPartitioner

    made = DirichletPartitioner(count, "label", alpha, min_partition_size=2, seed=seed)
    made.dataset = digits()["train"]
    return tensors(made.load_partition(partition))


def tensors(rows: Any) -> TensorDataset:
    """Return rows of a data set as images and labels."""
    columns = rows.with_format("torch")[:]
    return TensorDataset(columns["image"], columns["label"])
