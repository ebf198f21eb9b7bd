"""Parameters that all examples share: exact diagonals from a copy an example."""

from collections.abc import Callable

import pytest
import torch
from nets import IMAGES, SERIES, VECTORS
from oracles import check_exact, diagonal_fisher, headed, randn, seeded
from torch import Tensor, nn

from flwr_fisher.curvature import fisher
from flwr_fisher.curvature.estimate.forms import Trial, shared_parameters

STEPS, FEATURES = SERIES.shape[1:]


class Tokens(nn.Module):
    """As in a vision transformer: a class token in front, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(randn(1, 1, 1, FEATURES))
        self.places = nn.Parameter(randn(2, 1, STEPS + 3, FEATURES))  # more than taken
        self.mix, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        x = x + self.places[:, : x.shape[1]]
        return self.head(self.mix(x).tanh().sum(1))


class Times(nn.Module):
    """Multiplies by a parameter, entry by entry: a layer's scale."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + randn(3, *shape).square())

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).tanh()


class Projected(nn.Module):
    """A matrix that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(randn(4, FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.matrix).tanh()


def on(inputs: Tensor, layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: headed(layer(), inputs.shape[1:])


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "class token and positions": (Tokens, SERIES),
    "a scale of vectors": (on(VECTORS, lambda: Times(3)), VECTORS),
    "a scale of tokens": (on(SERIES, lambda: Times(FEATURES)), SERIES),
    "a scale of images' channels": (on(IMAGES, lambda: Times(2, 1, 1)), IMAGES),
    "a scale of pixels": (on(IMAGES, lambda: Times(3)), IMAGES),
    "one number for all": (on(IMAGES, Times), IMAGES),
    "a matrix": (on(SERIES, Projected), SERIES),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_exact_without_jacobians(name: str) -> None:
    make, inputs = CASES[name]
    check_exact(seeded(make), inputs, slow=set())


class Mixed(Times):
    """Gives each example another one's share of the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.expand(len(x), FEATURES) if self.scale.dim() == 1 else None
        return (x * (self.scale if scale is None else scale).flip(0)).tanh()


class Unused(Times):
    """Has a parameter that nothing hangs on."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class Summation(Times):
    """Sees all of the parameter at once."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.sum()


class First(Times):
    """Reads the first copy alone, as a kernel may that does not look at shapes."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale.flatten()[:FEATURES]).tanh()


@pytest.mark.parametrize("layer", [Mixed, Unused, Summation, First])
def test_what_takes_no_copies_has_its_jacobian(layer: Callable[..., nn.Module]) -> None:
    model = seeded(on(VECTORS, lambda: layer(FEATURES))).double()
    inputs = VECTORS.double()
    assert not shared_parameters(Trial(model, inputs, {}), ["0.scale"])
    got = fisher(model, [inputs], structure="diagonal", tolerance=0).diagonal()
    for key, want in diagonal_fisher(model, inputs).items():
        torch.testing.assert_close(got[key], want, msg=key)
