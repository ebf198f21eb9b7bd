"""Labelled images in memory: the one form in which every data set reaches a task."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.errors import DataError
from flwr_fisher.tasks.examples import Examples, Splits, check_classes


@dataclass(frozen=True, eq=False)
class Images(Examples):
    """Images and their labels, normalised when they are read.

    The pixels stay as they were stored (bytes take a quarter of the memory of floats)
    and become ``(x - mean) / std`` in float32 on access, a whole batch at a time.

    Parameters
    ----------
    data : Tensor
        Pixels, ``[n, C, H, W]``: uint8 in 0…255, or float32 in 0…1.
    targets : Tensor
        Class indices, int64, ``[n]``.
    mean : tuple[float, ...]
        Mean of each channel, on the scale 0…1.
    std : tuple[float, ...]
        Standard deviation of each channel, on the scale 0…1.

    Raises
    ------
    DataError
        If a tensor has another shape or dtype, or a channel lacks its constants.

    Examples
    --------
    >>> data = torch.tensor([0, 255, 51], dtype=torch.uint8).reshape(3, 1, 1, 1)
    >>> images = Images(data, torch.tensor([0, 1, 0]), mean=(0.5,), std=(0.5,))
    >>> x, y = images[[0, 1]]
    >>> x.flatten().tolist(), y.tolist()
    ([-1.0, 1.0], [0, 1])
    >>> len(images.subset([2]))
    1
    """

    data: Tensor
    targets: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        data = self.data
        if data.ndim != 4 or data.dtype not in (torch.uint8, torch.float32):
            raise DataError(
                "images must be a uint8 or float32 tensor [n, C, H, W],"
                f" not {data.dtype} {list(data.shape)}"
            )
        check_classes(data, "images", self.targets, "labels")
        if not len(self.mean) == len(self.std) == data.shape[1]:
            raise DataError(
                f"{data.shape[1]} channels need as many means and standard deviations,"
                f" not {len(self.mean)} and {len(self.std)}"
            )

    @property
    def classes(self) -> Tensor:
        """What a partition tells examples apart by: their labels, ``[n]``."""
        return self.targets

    def __getitem__(self, index: int | slice | list[int]) -> tuple[Tensor, Tensor]:
        """Return one normalised example, or a batch where `index` names several.

        Parameters
        ----------
        index : int | slice | list[int]
            Which examples.

        Returns
        -------
        tuple[Tensor, Tensor]
            Float32 ``[C, H, W]`` and an int64 scalar for an int; else
            ``[b, C, H, W]`` and ``[b]``.
        """
        x = self.data[index]
        if x.dtype == torch.uint8:
            x = x.to(torch.float32) / 255
        mean = x.new_tensor(self.mean).reshape(-1, 1, 1)
        std = x.new_tensor(self.std).reshape(-1, 1, 1)
        return (x - mean) / std, self.targets[index]


@dataclass(frozen=True, eq=False, repr=False)
class ImageData(Splits[Images]):
    """A data set for image classification, split into training and test examples.

    Parameters
    ----------
    train : Images
        The examples that are shared out among the clients.
    test : Images
        The examples on which a model is scored.
    class_names : tuple[str, ...]
        One name a class; the position is the label.

    Raises
    ------
    DataError
        If a split is empty, the splits differ in shape, or a label has no class.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test.data.shape[1:] != self.train.data.shape[1:]:
            raise DataError(
                f"test images have the shape {list(self.test.data.shape[1:])},"
                f" training images {list(self.train.data.shape[1:])}"
            )

    @property
    def num_outputs(self) -> int:
        """The number of a model's outputs: one a class."""
        return self.num_classes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image: channels, height, width."""
        return tuple(self.train.data.shape[1:])

    def _numbered(self, examples: Images) -> list[tuple[str, Tensor, int, str]]:
        return [("labels", examples.targets, self.num_classes, "classes")]

    def __repr__(self) -> str:
        # Generated, it would print every label.
        shape = "x".join(map(str, self.shape))
        return (
            f"ImageData({len(self.train)} + {len(self.test)} images, {shape},"
            f" {self.num_classes} classes)"
        )
