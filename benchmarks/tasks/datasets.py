"""Data sets by name: digits, torchvision's, folders, the Hub's, and a text."""

import os
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, DataError, UnknownNameError, extra
from tasks.examples import Examples, Splits
from tasks.kinds import KINDS
from tasks.language import load_language

DEFAULT_DATA_DIR = Path("~/.cache/flwr-fisher")

# torchvision's class, and its constructor's arguments beside the split
_TORCHVISION: dict[str, tuple[str, dict[str, str]]] = {
    "mnist": ("MNIST", {}),
    "fashionmnist": ("FashionMNIST", {}),
    "emnist": ("EMNIST", {"split": "balanced"}),
    "emnist-balanced": ("EMNIST", {"split": "balanced"}),
    "emnist-digits": ("EMNIST", {"split": "digits"}),
    "emnist-letters": ("EMNIST", {"split": "letters"}),
    "svhn": ("SVHN", {}),
    "cifar10": ("CIFAR10", {}),
    "cifar100": ("CIFAR100", {}),
    "gtsrb": ("GTSRB", {}),
}

DATASETS = ("digits", *_TORCHVISION, "imagefolder:<dir>", "language")
"""The names that :func:`load_dataset` knows."""


def load_dataset(name: str, data_dir: str | Path | None = None) -> Splits:
    """Load a data set into memory, once in a process.

    All callers share the result: do not change its tensors in place.

    Parameters
    ----------
    name : str
        One of :data:`DATASETS`. ``imagefolder:<dir>`` reads ``train/<class>/`` and
        ``test/<class>/`` below a directory (a relative one is looked up in
        `data_dir`) as 32×32 colour images.
        ``language`` is a text, Python's language reference, which needs no file: its
        examples are sequences of characters from some eighty documents.
    data_dir : str | Path | None
        The folder of the files, an absolute path (``~`` is expanded), because a Flower
        app runs in a copied folder. Downloads go there, too. Default:
        ``~/.cache/flwr-fisher``. Existing files are used as they are.

    Returns
    -------
    Splits
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
    Splits(1437 + 360 of shape 1x8x8, 10 classes)
    """
    root = None if data_dir is None else Path(data_dir).expanduser()
    if root is not None and not root.is_absolute():
        raise ConfigurationError(
            f"data-dir must be an absolute path, not {os.fspath(root)!r}, because a "
            "Flower app runs in a copied folder"
        )
    return _load(name, root)


# One process normally uses two names at most; more would waste memory.
@lru_cache(maxsize=4)
def _load(name: str, given: Path | None) -> Splits:
    root = given or DEFAULT_DATA_DIR.expanduser()
    kind, _, rest = name.partition(":")
    if name == "digits":
        return _load_digits()
    if name == "language":
        return load_language()
    if name in _TORCHVISION:
        return _load_torchvision(name, root)
    if kind == "imagefolder" and rest:
        return _load_image_folder(root / Path(rest).expanduser())
    raise UnknownNameError("dataset", name, DATASETS)


def _load_digits() -> Splits:
    with extra("tasks"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

    bunch = load_digits()
    pixels = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    splits = train_test_split(
        range(len(labels)), test_size=0.2, random_state=0, stratify=bunch.target
    )
    kind = KINDS["digits"]
    train, test = (
        Examples(pixels[index], labels[index], kind.mean, kind.std) for index in splits
    )
    return Splits(train, test, tuple(map(str, bunch.target_names)))


def _load_torchvision(name: str, root: Path) -> Splits:
    kind = KINDS[name]
    # EMNIST's letters are labelled from 1, with a placeholder for class 0.
    skip = int(name == "emnist-letters")
    raws = [_open(name, root, train) for train in (True, False)]
    train, test = (
        Examples(data, targets - skip, kind.mean, kind.std)
        for data, targets in map(_tensors, raws)
    )
    names = getattr(raws[0], "classes", ())[skip:] or range(kind.num_classes)
    return Splits(train, test, tuple(map(str, names)))


def _load_image_folder(root: Path) -> Splits:
    """Read ``train/<class>/…`` and ``test/<class>/…`` as 32×32 colour images."""
    with extra("tasks"):
        from torchvision.datasets import ImageFolder

    try:
        raws = [ImageFolder(root / split) for split in ("train", "test")]
    except FileNotFoundError as error:
        raise DataError(f"{root} is no folder of train and test: {error}") from error
    if raws[0].classes != raws[1].classes:
        raise DataError(f"{root}: train and test have different classes")
    half = (0.5,) * 3
    train, test = (Examples(*_stacked(raw), half, half) for raw in raws)
    return Splits(train, test, tuple(raws[0].classes))


def _stacked(raw: Any) -> tuple[Tensor, Tensor]:
    """Return Pillow's images as uint8 ``[n, 3, 32, 32]``, and labels."""
    from torchvision.transforms.functional import pil_to_tensor

    data = torch.empty((len(raw), 3, 32, 32), dtype=torch.uint8)
    targets = torch.empty(len(raw), dtype=torch.int64)
    for index, (picture, label) in enumerate(raw):
        small = picture if picture.size == (32, 32) else picture.resize((32, 32))
        data[index], targets[index] = pil_to_tensor(small.convert("RGB")), label
    return data, targets


def _open(name: str, root: Path, train: bool) -> Any:
    """Return torchvision's data set; download it if it is missing."""
    with extra("tasks"):
        from torchvision import datasets

    class_name, options = _TORCHVISION[name]
    split: dict[str, Any] = {"train": train}
    if class_name in ("SVHN", "GTSRB"):
        split = {"split": "train" if train else "test"}
    make = partial(getattr(datasets, class_name), root, **split, **options)
    try:
        return make(download=False)
    except (RuntimeError, OSError):
        pass  # torchvision's errors for missing files
    try:
        root.mkdir(parents=True, exist_ok=True)
        return make(download=True)
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"data set {name!r} is not in {root} and cannot be downloaded ({error});"
            " put torchvision's files there, or set data-dir to where they are"
        ) from error


def _tensors(raw: Any) -> tuple[Tensor, Tensor]:
    """Read images as uint8 [n, C, H, W] and labels as int64 [n]."""
    class_name = type(raw).__name__
    if class_name == "GTSRB":  # files of different sizes
        return _stacked(raw)
    data = torch.as_tensor(raw.data)
    targets = torch.as_tensor(raw.labels if class_name == "SVHN" else raw.targets)
    if class_name == "EMNIST":  # stored with rows and columns swapped
        data = data.transpose(1, 2)
    if data.ndim == 3:
        data = data.unsqueeze(1)
    elif class_name != "SVHN":
        data = data.permute(0, 3, 1, 2)
    return data.contiguous(), targets.to(torch.int64)
