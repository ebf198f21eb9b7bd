"""Data sets by name: digits, torchvision's, folders, the Hub's, and a text."""

import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, DataError, UnknownNameError
from flwr_fisher.tasks.images import ImageData, Images
from flwr_fisher.tasks.language import load_language
from flwr_fisher.tasks.sources import (
    load_hub,
    load_image_folder,
    name_classes,
    stack_images,
)
from flwr_fisher.tasks.texts import TextData

DEFAULT_DATA_DIR = Path("~/.cache/flwr-fisher")

# torchvision's class; the constructor's argument that tells train from test, or
# EMNIST's variant; the published mean and standard deviation of each channel.
_HALF = ((0.5,), (0.5,))
_HALF_RGB = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_SVHN = ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))
_Source = tuple[str, str, tuple[tuple[float, ...], tuple[float, ...]]]
_TORCHVISION: dict[str, _Source] = {
    "mnist": ("MNIST", "train", ((0.1307,), (0.3081,))),
    "fashionmnist": ("FashionMNIST", "train", ((0.2860,), (0.3530,))),
    "emnist": ("EMNIST", "balanced", _HALF),
    "emnist-balanced": ("EMNIST", "balanced", _HALF),
    "emnist-digits": ("EMNIST", "digits", _HALF),
    "emnist-letters": ("EMNIST", "letters", _HALF),
    "svhn": ("SVHN", "split", _SVHN),
    "cifar10": ("CIFAR10", "train", _CIFAR10),
    "cifar100": ("CIFAR100", "train", _CIFAR100),
    "gtsrb": ("GTSRB", "split", _HALF_RGB),
}

DATASETS = ("digits", *_TORCHVISION, "imagefolder:<dir>", "hf:<name>", "language")
"""The names that :func:`load_dataset` knows."""


def load_dataset(name: str, data_dir: str | Path | None = None) -> ImageData | TextData:
    """Load a data set into memory; a process loads each one once.

    The result is shared by all who ask for it: do not change its tensors in place.

    Parameters
    ----------
    name : str
        One of :data:`DATASETS`. ``imagefolder:<dir>`` reads ``train/<class>/`` and
        ``test/<class>/`` below a directory (a relative one is looked up in
        `data_dir`) as 32×32 colour images; ``hf:<name>`` reads a data set of the
        Hugging Face Hub, or a directory in its format, with a train and a test split.
        ``language`` is a text, Python's language reference, which needs no file: its
        examples are sequences of characters from some eighty documents.
    data_dir : str | Path | None
        Where the files are or will be put; an absolute path (``~`` is expanded),
        because a Flower app runs in a copied folder. By default
        ``~/.cache/flwr-fisher``, and for ``hf:`` the Hub's own cache. Files that are
        there are used as they are and never downloaded again.

    Returns
    -------
    ImageData | TextData
        Training and test examples: images with their classes, or sequences.

    Raises
    ------
    UnknownNameError
        If the name is not known.
    ConfigurationError
        If `data_dir` is relative.
    DataError
        If the files are missing and cannot be downloaded, or are not as expected.

    Examples
    --------
    >>> load_dataset("digits")
    ImageData(1437 + 360 images, 1x8x8, 10 classes)
    """
    root = None if data_dir is None else Path(data_dir).expanduser()
    if root is not None and not root.is_absolute():
        raise ConfigurationError(
            f"data-dir must be an absolute path, not {os.fspath(root)!r}: a Flower app"
            " runs in a copied folder, where a relative path leads elsewhere"
        )
    return _load(name, root)


# Two names are the most that one process normally uses; more would only hold memory.
@lru_cache(maxsize=4)
def _load(name: str, given: Path | None) -> ImageData | TextData:
    root = given or DEFAULT_DATA_DIR.expanduser()
    kind, _, rest = name.partition(":")
    if name == "digits":
        return _load_digits()
    if name == "language":
        return load_language()
    if name in _TORCHVISION:
        return _load_torchvision(name, root)
    if kind == "imagefolder" and rest:
        return load_image_folder(root / Path(rest).expanduser())
    if kind == "hf" and rest:
        return load_hub(rest, given)
    raise UnknownNameError("dataset", name, DATASETS)


def _load_digits() -> ImageData:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    pixels = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    splits = train_test_split(
        range(len(labels)), test_size=0.2, random_state=0, stratify=bunch.target
    )
    # Mean and standard deviation of the training split.
    train, test = (
        Images(pixels[index], labels[index], (0.3054,), (0.3761,)) for index in splits
    )
    return ImageData(train, test, tuple(map(str, bunch.target_names)))


def _load_torchvision(name: str, root: Path) -> ImageData:
    class_name, option, (mean, std) = _TORCHVISION[name]
    # EMNIST's letters are labelled from 1, with a placeholder for class 0.
    skip = int(option == "letters")
    raws = [_open(name, root, train) for train in (True, False)]
    train, test = (
        Images(data, targets - skip, mean, std)
        for data, targets in (_tensors(class_name, raw) for raw in raws)
    )
    # SVHN and GTSRB have no names.
    names = getattr(raws[0], "classes", ())[skip:]
    return ImageData(train, test, name_classes(names, train.targets))


def _open(name: str, root: Path, train: bool) -> Any:
    from torchvision import datasets

    class_name, option, _ = _TORCHVISION[name]
    arguments: dict[str, Any] = {"train": train}
    if option == "split":
        arguments = {"split": "train" if train else "test"}
    elif option != "train":
        arguments["split"] = option

    make = partial(getattr(datasets, class_name), root, **arguments)
    return _open_or_download(make, name, root)


def _open_or_download(make: Callable[..., Any], name: str, root: Path) -> Any:
    try:
        return make(download=False)
    except (RuntimeError, OSError):
        pass  # torchvision's ways of saying that files are missing
    try:
        root.mkdir(parents=True, exist_ok=True)
        return make(download=True)
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"data set {name!r} is not in {root} and cannot be downloaded ({error});"
            " put torchvision's files there, or set data-dir to where they are"
        ) from error


def _tensors(class_name: str, raw: Any) -> tuple[Tensor, Tensor]:
    """Read images as uint8 [n, C, H, W] and labels as int64 [n]."""
    if class_name == "GTSRB":  # files of different sizes
        return stack_images(raw, len(raw), "RGB", (32, 32))
    data = torch.as_tensor(raw.data)
    targets = torch.as_tensor(raw.labels if class_name == "SVHN" else raw.targets)
    if class_name == "EMNIST":  # stored with rows and columns swapped
        data = data.transpose(1, 2)
    if data.ndim == 3:
        data = data.unsqueeze(1)
    elif class_name != "SVHN":
        data = data.permute(0, 3, 1, 2)
    return data.contiguous(), targets.to(torch.int64)
