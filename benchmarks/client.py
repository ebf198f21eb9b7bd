"""What a client pays for its Fisher by default, in local epochs.

    python benchmarks/client.py --data-dir DIR   # data as for merges.py

A client with 12 000 MNIST images (`lenet`), one with 4 000 CIFAR-10 images (`cnn`) and
one with as many (`resnet18`) train at batch 64 and take the K-FAC that
`FedFisherOneShot()` asks for; beside it, that of all examples and classes up to the
default tolerance. An epoch is the client's own loop (`LocalSGD`). Medians of runs that
take turns. ResNet-18's epochs are over a part of the images, scaled by their number.

A trained model's Fisher costs less: examples that it is sure of need no backward pass.
So every model is measured after one epoch, and the small ones after ten.
"""

import platform
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.page import blocks, command_line, opening, write_page
from harness.tables import head, row
from harness.timing import medians
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client.training import LocalSGD
from flwr_fisher.curvature import FisherOptions, fisher
from flwr_fisher.tasks import load_dataset, make_model

CPU, BATCH = torch.device("cpu"), 64
WANTED = FisherOptions()
BUDGET = asdict(WANTED)
# Data, model, images, the share of an epoch that is run, and epochs of training.
CLIENTS = {
    "LeNet, 12 000 MNIST images": ("mnist", "lenet", 12_000, 1, (1, 10)),
    "CNN, 4 000 CIFAR-10 images": ("imagefolder:CIFAR10", "cnn", 4_000, 1, (1, 10)),
    "ResNet-18, 4 000 CIFAR-10 images": (
        "imagefolder:CIFAR10",
        "resnet18",
        4_000,
        10,
        (1,),
    ),
}


def images(name: str, data_dir: Path, count: int) -> TensorDataset:
    """Return so many of a data set's training images, of all classes."""
    data = load_dataset(name, data_dir).train
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    return TensorDataset(*data[order[:count].tolist()])


def measure(client: str, data_dir: Path, runs: int) -> list[dict[str, Any]]:
    """Return the epochs that the Fishers of a client take, by how long it trained."""
    name, kind, count, share, epochs = CLIENTS[client]
    data = images(name, data_dir, count)
    torch.manual_seed(0)
    model = make_model(kind, shape=data[0][0].shape, num_classes=10)
    part = TensorDataset(*data[: count // share])
    loader = partial(DataLoader, batch_size=BATCH)
    found, before = [], 0
    for trained in epochs:
        LocalSGD(epochs=trained - before)(model, loader(part, shuffle=True), CPU, {})
        before = trained
        todo = {
            "epoch": partial(LocalSGD(lr=0.0), model, loader(part), CPU, {}),
            "default": partial(fisher, model, loader(data), **BUDGET),
        }
        if share == 1:
            todo["all"] = partial(fisher, model, loader(data))
        took = medians(todo, runs, warm_up=1)
        epoch = share * took.pop("epoch")
        found.append(
            {"trained": trained, "epoch": epoch}
            | {what: each / epoch for what, each in took.items()}
        )
        print(client, found[-1], flush=True)
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a row for each client and how long it trained."""
    lines = head("client", "epochs of training", "default budget", "all examples")
    for client, each in found.items():
        for at in each:
            every = f"{at['all']:.2f}" if "all" in at else ""
            lines.append(row(client, str(at["trained"]), f"{at['default']:.2f}", every))
    return lines


def main() -> None:
    """Write the table and the numbers."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    found = {each: measure(each, options.data_dir, options.runs) for each in CLIENTS}
    threads = torch.get_num_threads()
    where = (
        f"Measured on {platform.machine()}, {threads} threads, torch "
        f"{torch.__version__}; medians of {options.runs} runs. The budget: "
        f"{WANTED.examples} examples, {WANTED.max_passes} passes, "
        f"{WANTED.max_positions} positions. In local epochs:"
    )
    lines = blocks(opening("A client's Fisher", __doc__), where, table(found))
    write_page("client", lines, found)


if __name__ == "__main__":
    main()
