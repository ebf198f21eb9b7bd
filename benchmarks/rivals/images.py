"""Images that are made, kept, and shown to networks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.errors import ConfigurationError

_PADDING = 4  # pixels that an image is moved by at most


@dataclass(frozen=True)
class Normalised:
    """What networks are shown of images in [0, 1]: ``(x - mean) / std``, by channel.

    Parameters
    ----------
    shape : tuple[int, int, int]
        Channels, height and width; both sides multiples of 4.
    mean, std : tuple[float, ...]
        One number a channel.

    Raises
    ------
    ConfigurationError
        If the shape is none that the generator makes, or there is not one mean and one
        deviation a channel.

    Examples
    --------
    >>> Normalised((1, 28, 28), (0.5,), (0.25,))(torch.ones(2, 1, 28, 28)).unique()
    tensor([2.])
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        sides = self.shape[1:]
        if len(self.shape) != 3 or any(side % 4 or side < 4 for side in sides):
            raise ConfigurationError(
                f"images are [channels, height, width] with sides that are multiples "
                f"of 4, not {self.shape}"
            )
        if {len(self.mean), len(self.std)} != {self.shape[0]} or min(self.std) <= 0:
            raise ConfigurationError(
                f"{self.shape[0]} channels need as many means and deviations above 0, "
                f"not {self.mean} and {self.std}"
            )

    def __call__(self, images: Tensor) -> Tensor:
        """Return images as networks take them."""
        mean, std = (self._like(images, values) for values in (self.mean, self.std))
        return (images - mean) / std

    @staticmethod
    def _like(images: Tensor, values: tuple[float, ...]) -> Tensor:
        made = torch.tensor(values, dtype=images.dtype).reshape(-1, 1, 1)
        return made.to(images.device, non_blocking=True)  # or the host would wait


def generator_of(shape: tuple[int, int, int], latent: int, width: int) -> nn.Module:
    """Return the generator of DENSE: latent codes to images in [0, 1]."""
    channels, height, sides = shape[0], shape[1] // 4, shape[2] // 4
    return nn.Sequential(
        nn.Linear(latent, 2 * width * height * sides),
        nn.Unflatten(1, (2 * width, height, sides)),
        nn.BatchNorm2d(2 * width),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, channels, 3, padding=1),
        nn.Sigmoid(),
    )


def reset(generator: nn.Module) -> None:
    """Draw a generator's weights anew, as before each batch of images."""
    for module in generator.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.normal_(module.weight, 0.0, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
            nn.init.zeros_(module.bias)


def augmented(images: Tensor) -> Tensor:
    """Move each image by up to 4 pixels, and flip half of them; differentiable."""
    n, channels, height, width = images.shape
    padded = F.pad(images, [_PADDING] * 4)
    places = torch.randint(2 * _PADDING + 1, (n, 2)).to(images.device)
    rows = places[:, :1] + torch.arange(height, device=images.device)
    columns = places[:, 1:] + torch.arange(width, device=images.device)
    chosen = rows[:, None, :, None].expand(-1, channels, -1, padded.shape[3])
    moved = padded.gather(2, chosen)
    chosen = columns[:, None, None, :].expand(-1, channels, height, -1)
    moved = moved.gather(3, chosen)
    flipped = (torch.rand(n, 1, 1, 1) < 0.5).to(images.device)
    return torch.where(flipped, moved.flip(-1), moved)


@dataclass
class Pool:
    """All images that were made so far, and the classes that they were made for."""

    images: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    def add(self, images: Tensor, labels: Tensor) -> None:
        """Keep a batch."""
        self.images.append(images)
        self.labels.append(labels)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all of them once, augmented, in a random order."""
        images, labels = augmented(torch.cat(self.images)), torch.cat(self.labels)
        order = torch.randperm(len(labels)).to(images.device)
        for chosen in torch.split(order, size):
            yield images[chosen], labels[chosen]
