"""A user's own images: from folders of files, or from the Hugging Face Hub."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.errors import DataError
from flwr_fisher.extras import extra
from flwr_fisher.tasks.images import ImageData, Images

_SIZE = (32, 32)


class _SizesDifferError(Exception):
    """Images of a set that is read in its own size do not share one."""


def stack_images(
    samples: Iterable[tuple[Any, int]],
    count: int,
    mode: str,
    size: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    """Write pictures into one tensor as they are read.

    Parameters
    ----------
    samples : Iterable[tuple[Image, int]]
        Pillow images with their labels.
    count : int
        How many there are.
    mode : str
        Pillow's name of the colour space, ``"RGB"`` or ``"L"``.
    size : tuple[int, int] | None
        Width and height to resize to; None keeps the size that all must then share.

    Returns
    -------
    tuple[Tensor, Tensor]
        Pixels, uint8 ``[count, C, H, W]``, and labels, int64 ``[count]``.
    """
    with extra("tasks"):
        from torchvision.transforms.functional import pil_to_tensor

    data, targets = torch.empty(0), torch.empty(count, dtype=torch.int64)
    for i, (picture, label) in enumerate(samples):
        if size is not None and picture.size != size:
            picture = picture.resize(size)
        pixels = pil_to_tensor(picture.convert(mode))
        if i == 0:
            data = torch.empty((count, *pixels.shape), dtype=torch.uint8)
        if pixels.shape != data.shape[1:]:
            raise _SizesDifferError
        data[i], targets[i] = pixels, label
    return data, targets


def name_classes(names: Sequence[Any] | None, targets: Tensor) -> tuple[str, ...]:
    """Name classes by their numbers where they have no names.

    Parameters
    ----------
    names : Sequence[Any] | None
        The classes' names, if there are any.
    targets : Tensor
        Labels in which the last class occurs.

    Returns
    -------
    tuple[str, ...]
        One name a class.
    """
    return tuple(map(str, names or range(int(targets.max()) + 1)))


def load_image_folder(root: Path) -> ImageData:
    """Read ``train/<class>/…`` and ``test/<class>/…`` as 32×32 colour images.

    Parameters
    ----------
    root : Path
        The directory that holds ``train`` and ``test``.

    Returns
    -------
    ImageData
        The images; classes are numbered in the order of their folders' names.

    Raises
    ------
    DataError
        If a folder is missing, a class is empty, or the splits' classes differ.
    """
    train, test = (_open_split(root, split) for split in ("train", "test"))
    if train.classes != test.classes:
        only = sorted(set(train.classes) ^ set(test.classes))
        raise DataError(
            f"train and test in {root} must hold the same classes;"
            f" in only one of them: {', '.join(only)}"
        )
    first, second = (
        _images(stack_images(raw, len(raw), "RGB", _SIZE)) for raw in (train, test)
    )
    return ImageData(first, second, tuple(train.classes))


def _open_split(root: Path, split: str) -> Any:
    if not (root / split).is_dir():
        raise DataError(f"the image folder {root / split} is missing; {_layout(root)}")
    try:
        return open_folder(root / split)
    except DataError as error:
        raise DataError(f"{error}; {_layout(root)}") from error


def open_folder(folder: Path) -> Any:
    """Open a folder of class folders, as torchvision's ``ImageFolder``.

    Parameters
    ----------
    folder : Path
        The folder.

    Raises
    ------
    DataError
        If it has no class folders, or one of them no image.
    """
    with extra("tasks"):
        from torchvision.datasets import ImageFolder
    try:
        return ImageFolder(folder)
    except FileNotFoundError as error:
        raise DataError(f"{folder} is not a folder of classes: {error}") from error


def _layout(root: Path) -> str:
    """Return what a folder of images is to hold, and what it does."""
    holds = f"there is no {root}"
    if root.is_dir():
        names = sorted(path.name for path in root.iterdir()) or ["nothing"]
        holds = f"{root} holds {', '.join(names[:8])}" + " …" * (len(names) > 8)
    return (
        "imagefolder:<dir> reads <dir>/train/<class>/<image files> and "
        f"<dir>/test/<class>/<image files>, the same classes in both, and {holds}"
    )


def load_hub(name: str, cache_dir: Path | None) -> ImageData:
    """Read a data set of the Hugging Face Hub, or one on disk that it can read.

    Its image and label columns are found by their types. Images keep their size
    where all share one; else they become 32×32.

    Parameters
    ----------
    name : str
        The Hub's name of it, e.g. ``ylecun/mnist``.
    cache_dir : Path | None
        Where to look for it and to put it; None is the Hub's own cache.

    Returns
    -------
    ImageData
        Its splits named ``train`` and ``test``.

    Raises
    ------
    DataError
        If it cannot be loaded, lacks a split, or its columns cannot be told apart.
    """
    train, test = _hub_splits(name, cache_dir)
    image, label = image_and_label(f"hf:{name}", train.features)
    mode = "L" if train[0][image].mode in ("1", "L") else "RGB"

    def read(split: Any, size: tuple[int, int] | None) -> Images:
        samples = ((row[image], row[label]) for row in split)
        return _images(stack_images(samples, len(split), mode, size))

    try:
        pair = read(train, None), read(test, train[0][image].size)
    except _SizesDifferError:
        pair = read(train, _SIZE), read(test, _SIZE)
    names = getattr(train.features[label], "names", None)
    return ImageData(*pair, name_classes(names, pair[0].targets))


def _hub_splits(name: str, cache_dir: Path | None) -> tuple[Any, Any]:
    with extra("tasks"):
        from flwr_datasets import FederatedDataset

    where = {} if cache_dir is None else {"cache_dir": str(cache_dir)}
    hub = FederatedDataset(dataset=name, partitioners={}, shuffle=False, **where)
    try:
        return hub.load_split("train"), hub.load_split("test")
    except (ValueError, OSError, RuntimeError) as error:
        raise DataError(
            f"data set 'hf:{name}' cannot be loaded with a train and a test split"
            f" from {cache_dir or 'the default cache'} or the Hub: {error}"
        ) from error


def image_and_label(name: str, features: Any) -> tuple[str, str]:
    """Find the image column and the label column of a data set.

    Parameters
    ----------
    name : str
        Of the data set, for an error.
    features : Features
        Its columns' types by name.

    Raises
    ------
    DataError
        If there is not one of each.
    """
    with extra("tasks"):
        from datasets import ClassLabel, Image, Value

    images = [key for key, kind in features.items() if isinstance(kind, Image)]
    labels = [key for key, kind in features.items() if isinstance(kind, ClassLabel)]
    if not labels:
        whole = [k for k, v in features.items() if isinstance(v, Value)]
        labels = [key for key in whole if features[key].dtype.startswith("int")]
    # CIFAR-100 has coarse and fine labels.
    usual = [key for key in labels if key in ("label", "labels", "fine_label")]
    labels = usual or labels
    if len(images) != 1 or len(labels) != 1:
        raise DataError(
            f"data set '{name}' must have one image and one label column;"
            f" it has {', '.join(map(repr, features))}"
        )
    return images[0], labels[0]


def _images(tensors: tuple[Tensor, Tensor]) -> Images:
    data, targets = tensors
    half = (0.5,) * data.shape[1]
    return Images(data, targets, half, half)
