"""How a generator makes a batch of images that fit a loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flwr_fisher.errors import check_positive, check_whole
from rivals.images import reset


@dataclass(frozen=True)
class Synthesis:
    """A generator's training for one batch of images.

    Parameters
    ----------
    steps : int, default 30
        Of Adam, on the generator and its codes.
    count : int, default 256
        Images in a batch.
    lr : float, default 1e-3
        Adam's.
    latent, width : int, default 256 and 64
        The codes' length, and the generator's channels.
    clip : float, optional
        The most that the generator's gradient may measure.

    Raises
    ------
    ConfigurationError
        If a number is out of range.
    """

    steps: int = 30
    count: int = 256
    lr: float = 1e-3
    latent: int = 256
    width: int = 64
    clip: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "latent", "width"):
            check_whole(name, getattr(self, name), 1)
        check_whole("count", self.count, 2)  # batch norm's least
        check_positive("lr", self.lr)
        if self.clip is not None:
            check_positive("clip", self.clip)


def synthesised(
    generator: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    num_classes: int,
    how: Synthesis,
) -> tuple[Tensor, Tensor]:
    """Train a generator from scratch; return its best batch, and the classes.

    Parameters
    ----------
    generator : nn.Module
        From codes to images; its weights are drawn anew.
    loss : Callable
        Of images and the classes that they are to be.
    num_classes : int
        From which classes are drawn.
    how : Synthesis
        The training.
    """
    reset(generator)
    generator.train()
    device = next(generator.parameters()).device
    codes = torch.randn(how.count, how.latent).to(device).requires_grad_()
    labels = torch.randint(num_classes, (how.count,)).to(device)
    optimizer = torch.optim.Adam(
        [*generator.parameters(), codes], how.lr, betas=(0.5, 0.999)
    )
    best, lowest = torch.empty(0), float("inf")
    for _ in range(how.steps):
        images = generator(codes)
        value = loss(images, labels)
        height = float(value.detach())
        if height < lowest or not len(best):
            best, lowest = images.detach(), height
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        if how.clip is not None:
            nn.utils.clip_grad_norm_(generator.parameters(), how.clip)
        optimizer.step()
    return best, labels
