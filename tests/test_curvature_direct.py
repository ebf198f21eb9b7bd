"""Norms and embeddings: exact diagonals without per-example Jacobians."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from nets import IMAGES, SERIES, TOKENS, VECTORS, freeze, with_statistics
from oracles import check_exact, diagonal_fisher, headed, relative, seeded
from torch import Tensor, nn

from flwr_fisher.curvature import fisher


def after_conv(norm: nn.Module, size: int = 2) -> nn.Module:
    return headed(
        nn.Sequential(nn.Conv2d(2, 4, size, bias=False), with_statistics(norm)),
        IMAGES.shape[1:],
    )


def on_series(norm: nn.Module) -> nn.Module:
    """Features last, time in the middle."""
    return headed(nn.Sequential(with_statistics(norm), nn.Tanh()), SERIES.shape[1:])


class Lookup(nn.Module):
    """The mean over tokens of a transformed embedding; tokens repeat."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(7, 4, **options), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x).tanh().sum(1))


def frozen_bias() -> nn.Module:
    return freeze(after_conv(nn.BatchNorm2d(4)), "0.1.bias")


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "batch norm": (lambda: after_conv(nn.BatchNorm2d(4)), IMAGES),
    "batch norm, vectors": (
        lambda: nn.Sequential(with_statistics(nn.BatchNorm1d(3)), nn.Linear(3, 3)),
        VECTORS,
    ),
    "group norm": (lambda: after_conv(nn.GroupNorm(2, 4)), IMAGES),
    "instance norm": (lambda: after_conv(nn.InstanceNorm2d(4, affine=True)), IMAGES),
    "instance norm, running": (
        lambda: after_conv(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        IMAGES,
    ),
    "layer norm": (lambda: on_series(nn.LayerNorm(SERIES.shape[-1])), SERIES),
    "layer norm, two axes": (lambda: on_series(nn.LayerNorm(SERIES.shape[1:])), SERIES),
    "rms norm": (lambda: on_series(nn.RMSNorm(SERIES.shape[-1])), SERIES),
    "a frozen bias": (frozen_bias, IMAGES),
    "embedding": (Lookup, TOKENS),
    "embedding, padded": (lambda: Lookup(padding_idx=2), TOKENS),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_exact_without_jacobians(name: str) -> None:
    make, inputs = CASES[name]
    check_exact(seeded(make), inputs, slow=set())


class ChannelsLast(nn.LayerNorm):
    """As in ConvNeXt: over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.norm(x).tanh()))


class Places(nn.Module):
    """An embedding that is looked up once a batch, not once an example."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.places = nn.Embedding(7, 4), nn.Embedding(TOKENS.shape[1], 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1]))
        return self.head((self.rows(x) + places).tanh().mean(1))


class Doubled(nn.RMSNorm):
    """Computes something else than its class does."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Reused(nn.Module):
    """A head that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.rows(x).tanh().mean(1), self.rows.weight)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: after_conv(ChannelsLast(4)), IMAGES),
        (lambda: after_conv(ChannelsLast(4), size=1), IMAGES),
        (Twice, VECTORS),
        (Places, TOKENS),
        (lambda: nn.Sequential(Doubled(3), nn.Tanh(), nn.Linear(3, 3)), VECTORS),
        (Reused, TOKENS),
        (lambda: Lookup(scale_grad_by_freq=True), TOKENS),
    ],
)
def test_what_is_no_plain_call_has_its_jacobian(
    make: Callable[[], nn.Module], inputs: Tensor
) -> None:
    model = seeded(make)
    got = fisher(model, [inputs], structure="diagonal", tolerance=0).diagonal()
    for key, want in diagonal_fisher(model, inputs).items():
        if key == "rows.weight" and getattr(model.rows, "scale_grad_by_freq", False):
            continue  # its autograd is no gradient
        assert relative(got[key], want) < 1e-5, key
