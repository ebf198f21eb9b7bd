"""A residual network small enough for a core."""

from torch import Tensor, nn


class Residual(nn.Module):
    """Two 3×3 convolutions with group norm; a 1×1 one beside them for a new shape."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(8, outputs),
        )
        alike = inputs == outputs and stride == 1
        self.beside = nn.Identity() if alike else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return (self.path(x) + self.beside(x)).relu()


def small_resnet(width: int = 16) -> nn.Module:
    """Return a network of 7 convolutions for 3×32×32 images of ten classes.

    The first of its three stages has `width` channels, a multiple of 8.
    """
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )
