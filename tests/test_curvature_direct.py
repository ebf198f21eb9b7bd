"""Layers by their types, checked on the first batch; everything else is exact, too."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from nets import (
    IMAGES,
    SERIES,
    TOKENS,
    VECTORS,
    SquaredWeight,
    freeze,
    then_tanh,
    with_statistics,
)
from oracles import check_exact, headed, randn, seeded
from torch import nn

from flwr_fisher.curvature import fisher, gradient
from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.estimate.forms import Forms
from flwr_fisher.errors import StructureError


def after_conv(norm, size=2):
    return headed(
        nn.Sequential(nn.Conv2d(2, 4, size, bias=False), with_statistics(norm)),
        IMAGES.shape[1:],
    )


def on_series(norm):
    """Features last, time in the middle."""
    return headed(nn.Sequential(with_statistics(norm), nn.Tanh()), SERIES.shape[1:])


class Lookup(nn.Module):
    """The mean over tokens of a transformed embedding; tokens repeat."""

    def __init__(self, **options):
        super().__init__()
        self.rows, self.head = nn.Embedding(7, 4, **options), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rows(x).tanh().sum(1))


class Times(nn.Module):
    """Multiplies by a parameter, entry by entry: a layer's scale."""

    def __init__(self, *shape):
        super().__init__()
        self.scale = nn.Parameter(1 + randn(3, *shape).square())

    def forward(self, x):
        return (self.scale * x).tanh()


def on(inputs, layer):
    return lambda: headed(layer(), inputs.shape[1:])


CASES = {
    "batch norm": (lambda: after_conv(nn.BatchNorm2d(4)), IMAGES),
    "batch norm, vectors": (
        lambda: nn.Sequential(with_statistics(nn.BatchNorm1d(3)), nn.Linear(3, 3)),
        VECTORS,
    ),
    "group norm": (lambda: after_conv(nn.GroupNorm(2, 4)), IMAGES),
    "layer norm": (lambda: on_series(nn.LayerNorm(SERIES.shape[-1])), SERIES),
    "layer norm, two axes": (lambda: on_series(nn.LayerNorm(SERIES.shape[1:])), SERIES),
    "rms norm": (lambda: on_series(nn.RMSNorm(SERIES.shape[-1])), SERIES),
    "a frozen bias": (
        lambda: freeze(after_conv(nn.BatchNorm2d(4)), "0.1.bias"),
        IMAGES,
    ),
    "embedding": (Lookup, TOKENS),
    "embedding, padded": (lambda: Lookup(padding_idx=2), TOKENS),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_exact_without_jacobians(name):
    make, inputs = CASES[name]
    check_exact(seeded(make), inputs, slow=set())


class ChannelsLast(nn.LayerNorm):
    """As in ConvNeXt: over the channels of images."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.norm(self.norm(x).tanh()))


class Places(nn.Module):
    """An embedding that is looked up once a batch, not once an example."""

    def __init__(self):
        super().__init__()
        self.rows, self.places = nn.Embedding(7, 4), nn.Embedding(TOKENS.shape[1], 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        places = self.places(torch.arange(x.shape[1]))
        return self.head((self.rows(x) + places).tanh().mean(1))


class Doubled(nn.RMSNorm):
    """Computes something else than its class does."""

    def forward(self, x):
        return 2 * super().forward(x)


class Reused(nn.Module):
    """A head that shares its weight with the embedding."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(7, 4)

    def forward(self, x):
        return F.linear(self.rows(x).tanh().mean(1), self.rows.weight)


class Listed(nn.Module):
    """Reaches its parameters by a plain list, which torch.func does not replace."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Parameter(randn(k, 3, 3)) for k in range(2))
        self.every = [self.one, self.two]

    def forward(self, x):
        for each in self.every:
            x = (x @ each).tanh()
        return x


class Routed(nn.Module):
    """A mixture of two experts, each with layers of its own."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in "ab"
        )
        self.scales = nn.ParameterList(1 + randn(k, 3).square() for k in range(2))
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        routed = x[:, 0] < 0
        out = torch.zeros_like(x)
        for k, rows in enumerate((~routed, routed)):
            if rows.any():
                out[rows] = self.experts[k](x[rows]) * self.scales[k]
        return self.head(out)


class Reversed(nn.Module):
    """Its layer sees the examples in another order."""

    def __init__(self, pairs=False):
        super().__init__()
        self.fc, self.head, self.pairs = nn.Linear(3, 3), nn.Linear(3, 3), pairs

    def forward(self, x):
        order = torch.arange(len(x) - 1, -1, -1)
        if self.pairs:  # only two examples change their places
            order = torch.cat([order[-2:], order.flip(0)[2:]])
        return self.head(self.fc(x[order]).tanh()[order.argsort()])


class OneExample(nn.Linear):
    """It computes something else for one kind of example."""

    def forward(self, x):
        odd = x[:, :1].eq(x[:, :1].max())
        return super().forward(x) + odd * F.linear(x, self.weight**3)


@pytest.mark.parametrize(
    ("make", "inputs", "others"),
    [
        (lambda: after_conv(ChannelsLast(4)), IMAGES, {"0.1.weight", "0.1.bias"}),
        (lambda: after_conv(ChannelsLast(4), size=1), IMAGES, None),
        (Twice, VECTORS, {"norm.weight", "norm.bias"}),
        (Places, TOKENS, {"places.weight"}),
        (
            lambda: nn.Sequential(Doubled(3), nn.Tanh(), nn.Linear(3, 3)),
            VECTORS,
            {"0.weight"},
        ),
        (Reused, TOKENS, {"rows.weight"}),
        # The gradient of its weight is far below that of its bias.
        (then_tanh(SquaredWeight, 3, 3), VECTORS / 1000, {"0.weight", "0.bias"}),
        (then_tanh(SquaredWeight, 3, 3), VECTORS / 1e7, {"0.weight", "0.bias"}),
        (Listed, VECTORS, {"one", "two"}),
        (on(SERIES, lambda: Times(SERIES.shape[-1])), SERIES, {"0.scale"}),
        (on(IMAGES, Times), IMAGES, {"0.scale"}),
        (Routed, VECTORS, None),
        (Reversed, VECTORS, {"fc.weight", "fc.bias"}),
        (Reversed, VECTORS[:2], {"fc.weight", "fc.bias"}),
        (partial(Reversed, pairs=True), VECTORS, {"fc.weight", "fc.bias"}),
    ],
)
def test_what_is_no_plain_call_is_taken_example_by_example(make, inputs, others):
    model = seeded(make)
    check_exact(model, inputs, slow=others)


def test_all_examples_of_the_first_batch_are_checked():
    model = seeded(then_tanh(OneExample, 3, 3)).double()
    x = torch.cat([VECTORS[:1].expand(40, -1), 2 * VECTORS[:1].abs()]).double()
    for batch in (x, x.flip(0)):
        assert Forms.of(model.eval(), Inputs((batch,))).others == ["0.weight", "0.bias"]
        # Also where memory allows only a few at once.
        assert Forms.of(model, Inputs((batch,)), 1).others == ["0.weight", "0.bias"]


def test_a_layer_that_a_later_batch_calls_otherwise_is_refused():
    x = torch.cat([VECTORS.abs(), -VECTORS.abs()])
    with pytest.raises(StructureError, match=r"'experts.0.0' .* shuffle the loader"):
        fisher(seeded(Routed), x.split(5), structure="diagonal")


def test_no_gradient_is_scaled_by_frequency():
    x, y = TOKENS, torch.arange(len(TOKENS)) % 3
    found = []
    for scaled in (False, True):
        model = seeded(lambda on=scaled: Lookup(scale_grad_by_freq=on))
        found.append(fisher(model, [x], structure="diagonal").diagonal())
        found[-1] |= {f"g {k}": v for k, v in gradient(model, [(x, y)])[0].items()}
        assert model.rows.scale_grad_by_freq == scaled
    torch.testing.assert_close(*found)
