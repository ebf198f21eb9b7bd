"""A node's or user's own data on disk, in one of three forms."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, DataError, extra
from tasks.examples import Examples, Splits
from tasks.kinds import Kind
from tasks.pictures import stack_images, stack_rows

_FORMS = (
    "a folder with a folder of images for each class, an .npz file with arrays x and "
    "y, or a folder that `datasets.Dataset.save_to_disk` wrote"
)
_MODES = {1: "L", 3: "RGB"}


def load_own(path: str | Path, kind: Kind) -> Examples:
    """Read images with their labels, in whichever form they have.

    - A folder with a folder of images for each class, whose name is the class or its
      number. A class may be missing. Images are resized to the kind's size.
    - An ``.npz`` file with an array ``x``, ``[n, C, H, W]``, ``[n, H, W, C]`` or, with
      one channel, ``[n, H, W]``: uint8, or floats in 0…1; and ``y``, integer labels
      ``[n]``.
    - A Hugging Face data set that was saved to disk, as ``flwr-datasets create`` does.
      If it has splits, the one named ``train`` is read.

    Parameters
    ----------
    path : str | Path
        An absolute path (``~`` is expanded), since a Flower app runs in another folder.
    kind : Kind
        The common properties of all nodes' images.

    Returns
    -------
    examples : Examples
        The examples in their stored order, normalised as the kind says.

    Raises
    ------
    ConfigurationError
        If the path is relative.
    DataError
        It names the file or folder, and says what is wrong.
    MissingExtraError
        If reading needs the extra ``tasks``, and it is not installed.
    """
    where = Path(path).expanduser()
    if not where.is_absolute():
        raise ConfigurationError(
            f"the path of a node's data must be absolute, not '{path}', because a "
            "Flower app runs in a copied folder"
        )
    if not where.exists():
        raise DataError(f"{where} does not exist: it should be {_FORMS}")
    if where.is_file():
        data, targets = _read_arrays(where, kind)
    elif any((where / name).exists() for name in ("state.json", "dataset_dict.json")):
        data, targets = _read_saved(where, kind)
    else:
        data, targets = _read_folders(where, kind)
    if not len(targets):
        raise DataError(f"{where} has no examples")
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= len(kind.class_names):
        raise DataError(
            f"{where}: labels run from {low} to {high}, but there are "
            f"{len(kind.class_names)} classes"
        )
    return Examples(data, targets, kind.mean, kind.std)


def load_image_folder(root: Path) -> Splits:
    """Read ``train/<class>/…`` and ``test/<class>/…`` as 32×32 colour images.

    Classes are the folders of ``train``, in the order of their names.

    Raises
    ------
    DataError
        If a split or a class is missing or empty, or ``test`` has another class.
    """
    train = root / "train"
    folders = [e.name for e in train.iterdir() if e.is_dir()] if train.is_dir() else []
    kind = Kind((3, 32, 32), tuple(sorted(folders)), (0.5,) * 3, (0.5,) * 3)
    try:
        first, second = (load_own(root / split, kind) for split in ("train", "test"))
    except DataError as error:
        holds = sorted(e.name for e in root.iterdir()) if root.is_dir() else "nothing"
        raise DataError(
            f"{error}: imagefolder:<dir> reads <dir>/train/<class>/<image files> and "
            "<dir>/test/<class>/<image files>, with the same classes in both, but "
            f"{root} holds {holds}"
        ) from error
    return Splits(first, second, kind.class_names)


def _read_arrays(path: Path, kind: Kind) -> tuple[Tensor, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["x"], arrays["y"]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} is no .npz file with arrays x and y: {error}"
        ) from error
    if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
        raise DataError(
            f"{path}: y must be an integer for each of the {len(x)} x, not "
            f"{y.dtype} {list(y.shape)}"
        )
    return _images(path, x, kind), torch.from_numpy(y.astype(np.int64))


def _images(path: Path, x: Any, kind: Kind) -> Tensor:
    """Return pixels as uint8, or as float32 in 0…1, channels first."""
    channels, *sides = kind.shape
    if x.shape[1:] == (*sides, channels) != kind.shape:
        x = np.moveaxis(x, -1, 1)
    elif channels == 1 and x.shape[1:] == tuple(sides):
        x = x[:, None]
    if x.shape[1:] != kind.shape:
        raise DataError(
            f"{path}: an image in x has the shape {list(x.shape[1:])}, but the data "
            f"set's images have {list(kind.shape)}"
        )
    if x.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(x))
    # NaN is in no range
    if x.dtype.kind != "f" or not (x.size == 0 or (x.min() >= 0 and x.max() <= 1)):
        raise DataError(
            f"{path}: x must be uint8 in 0…255, or floats in 0…1, not {x.dtype}"
            + (f" from {x.min():g} to {x.max():g}" if x.size else "")
        )
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))


def _read_folders(path: Path, kind: Kind) -> tuple[Tensor, Tensor]:
    folders = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    names = {name: i for i, name in enumerate(kind.class_names)}
    numbers = {str(i): i for i in range(len(names))}
    if odd := [name for name in folders if name not in names | numbers]:
        hint = f"; is {path / 'train'} meant?" if "train" in odd else ""
        raise DataError(
            f"{path}: folders must have the names of classes "
            f"({', '.join(kind.class_names)}), but '{odd[0]}' is none{hint}"
        )
    if not folders:
        raise DataError(f"{path} has no folders: it should be {_FORMS}")
    with extra("tasks"):
        from torchvision.datasets import ImageFolder
    try:
        raw = ImageFolder(path)
    except FileNotFoundError as error:  # a class without an image
        raise DataError(f"{path} is not a folder of classes: {error}") from error
    labels = [(numbers | names)[name] for name in raw.classes]
    samples = ((picture, labels[label]) for picture, label in raw)
    return stack_images(samples, len(raw), *_form(kind))


def _read_saved(path: Path, kind: Kind) -> tuple[Tensor, Tensor]:
    with extra("tasks"):
        from datasets import Dataset, load_from_disk
    try:
        saved = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a data set: {error}") from error
    if not isinstance(saved, Dataset):
        if "train" not in saved:
            raise DataError(f"{path} has no split 'train', only {', '.join(saved)}")
        saved = saved["train"]
    return stack_rows(str(path), saved, *_form(kind))


def _form(kind: Kind) -> tuple[str, tuple[int, int]]:
    """Return Pillow's name of the colour space, width and height."""
    channels, height, width = kind.shape
    if channels not in _MODES:
        raise DataError(
            f"image files have one or three channels, but the data set's images have "
            f"{channels}: pass them as an .npz file"
        )
    return _MODES[channels], (width, height)
