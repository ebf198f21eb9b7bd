"""The papers' small models, built from a name, a shape and a seed."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod

import torch
from torch import nn

from flwr_fisher.errors import ConfigurationError, check_known, extra
from tasks.transformer import Transformer

Shape = tuple[int, ...]
Pair = tuple[int, int]


def make_model(
    name: str, *, shape: Shape, num_classes: int, seed: int = 0
) -> nn.Module:
    """Build a model; its initial weights depend only on the arguments.

    - ``logistic``: multinomial logistic regression on the pixels.
    - ``mlp``: two hidden layers of 200, ReLU.
    - ``lenet``: FedFisher's LeNet, without biases: 5×5 convolutions to 6 and 16
      channels, each followed by ReLU and 2×2 max pooling, then 120, 84, classes.
    - ``cnn``: FedFisher's CNN, without biases: the same with 32 and 64 channels, then
      512, 128, classes.
    - ``lenet-bias``, ``cnn-bias``: the same two with biases.
    - ``resnet18``: torchvision's, with a 3×3 first convolution of stride 1 and no
      first pooling, as is usual for small images. Batch norm.
    - ``resnet18-gn``: the same with group norm of 32 groups, the default of Wu and
      He (2018), for clients whose batch statistics would not agree.
    - ``transformer``: the :class:`~tasks.Transformer` for sequences, two
      layers of width 64 with four heads.

    The convolutions of ``lenet`` and ``cnn`` are unpadded; below 20 pixels, where
    they would not fit twice, they are padded by 2.

    Parameters
    ----------
    name : str
        One of :data:`MODELS`.
    shape : tuple[int, ...]
        Channels, height and width of an image, or the length of a sequence.
    num_classes : int
        The number of outputs; for sequences, the number of different tokens.
    seed : int
        Seed of the initial weights. The global generator is left as it was.

    Returns
    -------
    nn.Module
        A model from ``[b, C, H, W]`` to logits ``[b, num_classes]``, or from tokens
        ``[b, T]`` to ``[b, T, num_classes]``, on the CPU. Each convolution and linear
        layer is called once in a forward pass.

    Raises
    ------
    UnknownNameError
        If the name is not known.
    ConfigurationError
        If the model is not for such examples, the images are too small for it, or
        there is no class.

    Examples
    --------
    >>> model = make_model("lenet", shape=(1, 28, 28), num_classes=10)
    >>> sum(p.numel() for p in model.parameters())
    44190
    """
    check_known("model", name, MODELS)
    _check_kind(name, shape)
    if num_classes < 1 or shape[0] < 1:
        raise ConfigurationError(
            f"model {name!r} needs at least one class and one channel or token, not "
            f"{num_classes} classes of examples {shape}"
        )
    smallest = _SMALLEST.get(name, 1)
    if min(shape[1:], default=smallest) < smallest:
        raise ConfigurationError(
            f"images {shape} are too small for model {name!r}, which needs {smallest} "
            "pixels a side: use 'mlp'"
        )
    # Only the CPU's generator: `torch.manual_seed` would also seed every GPU.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return _BUILDERS[name](shape, num_classes)


def _check_kind(name: str, shape: Shape) -> None:
    """Raise an error unless the model takes examples with so many dimensions."""
    kinds = {1: "sequences of tokens (T,)", 3: "images (C, H, W)"}
    wanted = 1 if name in _FOR_SEQUENCES else 3
    if len(shape) != wanted:
        others = [m for m in MODELS if (m in _FOR_SEQUENCES) == (len(shape) == 1)]
        raise ConfigurationError(
            f"model {name!r} is for {kinds[wanted]}, not for examples of shape {shape}:"
            f" use one of {', '.join(others)}"
        )


def _logistic(shape: Shape, num_classes: int) -> nn.Module:
    linear = nn.Linear(prod(shape), num_classes)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc=linear))


def _mlp(shape: Shape, num_classes: int) -> nn.Module:
    sizes = (prod(shape), 200, 200, num_classes)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), **_dense(sizes, bias=True)))


def _dense(sizes: tuple[int, ...], bias: bool) -> dict[str, nn.Module]:
    """Linear layers ``fc1``, ``fc2``, … with ReLU between them."""
    layers: dict[str, nn.Module] = {}
    for i, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        if i > 1:
            layers[f"fc_relu{i - 1}"] = nn.ReLU()
        layers[f"fc{i}"] = nn.Linear(inputs, outputs, bias=bias)
    return layers


def _convolutional(
    convolutions: Pair, hidden: Pair, shape: Shape, num_classes: int, *, bias: bool
) -> nn.Module:
    """Build a network of LeNet's form."""
    channels, height, width = shape
    padding = 2 if min(height, width) < 20 else 0
    layers: dict[str, nn.Module] = {}
    for i, outputs in enumerate(convolutions, start=1):
        conv = nn.Conv2d(channels, outputs, 5, padding=padding, bias=bias)
        layers |= {f"conv{i}": conv, f"relu{i}": nn.ReLU()}
        layers[f"pool{i}"] = nn.MaxPool2d(2)
        channels = outputs
        # A 5×5 kernel removes 4 - 2·padding pixels, and pooling halves the rest.
        height, width = ((side - 4 + 2 * padding) // 2 for side in (height, width))
    sizes = (channels * height * width, *hidden, num_classes)
    layers |= {"flatten": nn.Flatten(), **_dense(sizes, bias)}
    return nn.Sequential(OrderedDict(layers))


def _resnet18(
    norm: Callable[[int], nn.Module], shape: Shape, num_classes: int
) -> nn.Module:
    """Build a ResNet-18 for small images."""
    with extra("tasks"):
        from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=num_classes, norm_layer=norm)
    stem = nn.Conv2d(shape[0], 64, 3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.conv1, model.maxpool = stem, nn.Identity()
    return model


def _transformer(shape: Shape, num_classes: int) -> nn.Module:
    return Transformer(num_classes, shape[0])


_BUILDERS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "logistic": _logistic,
    "mlp": _mlp,
    "lenet": partial(_convolutional, (6, 16), (120, 84), bias=False),
    "lenet-bias": partial(_convolutional, (6, 16), (120, 84), bias=True),
    "cnn": partial(_convolutional, (32, 64), (512, 128), bias=False),
    "cnn-bias": partial(_convolutional, (32, 64), (512, 128), bias=True),
    "resnet18": partial(_resnet18, nn.BatchNorm2d),
    "resnet18-gn": partial(_resnet18, partial(nn.GroupNorm, 32)),
    "transformer": _transformer,
}

_FOR_SEQUENCES = {"transformer"}

# Two poolings leave a quarter of each side.
_SMALLEST = dict.fromkeys(("lenet", "lenet-bias", "cnn", "cnn-bias"), 4)

MODELS = tuple(_BUILDERS)
"""The names that :func:`make_model` knows."""
