"""Pictures as one tensor, and data sets of the Hugging Face Hub."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.errors import DataError, extra
from tasks.examples import Examples, Splits

_SIZE = (32, 32)


class _SizesDifferError(Exception):
    """Images have different sizes, although none was given."""


def stack_images(
    samples: Iterable[tuple[Any, int]],
    count: int,
    mode: str,
    size: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    """Return pictures as one tensor, which is filled while they are read.

    Parameters
    ----------
    samples : Iterable[tuple[Image, int]]
        Pillow images with their labels.
    count : int
        How many there are.
    mode : str
        Pillow's name of the colour space, ``"RGB"`` or ``"L"``.
    size : tuple[int, int] | None
        Width and height to resize to. With None the size is kept, and all must have the
        same.

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


def stack_rows(
    name: str, rows: Any, mode: str, size: tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """Stack the images of a ``datasets.Dataset``; its columns are found by type."""
    image, label = image_and_label(name, rows.features)
    samples = ((row[image], row[label]) for row in rows)
    return stack_images(samples, len(rows), mode, size)


def load_hub(name: str, cache_dir: Path | None) -> Splits:
    """Load a data set of the Hugging Face Hub, or one on disk that it can read.

    Its image and label columns are found by their types. If all images have the same
    size, they keep it; otherwise they become 32×32.

    Parameters
    ----------
    name : str
        The Hub's name of it, e.g. ``ylecun/mnist``.
    cache_dir : Path | None
        The folder to search, and to download to; None is the Hub's own cache.

    Returns
    -------
    Splits
        Its splits named ``train`` and ``test``.

    Raises
    ------
    DataError
        If it cannot be loaded, lacks a split, or its columns cannot be told apart.
    """
    with extra("tasks"):
        from flwr_datasets import FederatedDataset

    where = {} if cache_dir is None else {"cache_dir": str(cache_dir)}
    hub = FederatedDataset(dataset=name, partitioners={}, shuffle=False, **where)
    try:
        splits = [hub.load_split(split) for split in ("train", "test")]
    except (ValueError, OSError, RuntimeError) as error:
        raise DataError(
            f"data set 'hf:{name}' cannot be loaded with a train and a test split"
            f" from {cache_dir or 'the default cache'} or the Hub: {error}"
        ) from error
    features = splits[0].features
    image, label = image_and_label(f"hf:{name}", features)
    first = splits[0][0][image]
    mode = "L" if first.mode in ("1", "L") else "RGB"
    try:
        read = [stack_rows(name, split, mode, None) for split in splits]
        if read[0][0].shape[1:] != read[1][0].shape[1:]:
            raise _SizesDifferError
    except _SizesDifferError:
        read = [stack_rows(name, split, mode, _SIZE) for split in splits]
    train, test = map(_images, read)
    names = getattr(features[label], "names", None) or range(int(read[0][1].max()) + 1)
    return Splits(train, test, tuple(map(str, names)))


def image_and_label(name: str, features: Any) -> tuple[str, str]:
    """Find the image column and the label column of a data set.

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


def _images(tensors: tuple[Tensor, Tensor]) -> Examples:
    data, targets = tensors
    half = (0.5,) * data.shape[1]
    return Examples(data, targets, half, half)
