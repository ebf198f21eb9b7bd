"""Norms, embeddings and parameters of all examples: exact without Jacobians."""

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
from oracles import check_exact, diagonal_fisher, headed, randn, relative, seeded
from torch import nn

from flwr_fisher.curvature import fisher, fisher_plan, gradient
from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.estimate.forms import FormTrial, shared_parameters
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


STEPS, FEATURES = SERIES.shape[1:]


class Tokens(nn.Module):
    """As in a vision transformer: a class token in front, and positions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(randn(1, 1, 1, FEATURES))
        self.places = nn.Parameter(randn(2, 1, STEPS + 3, FEATURES))  # more than taken
        self.mix, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)

    def forward(self, x):
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        x = x + self.places[:, : x.shape[1]]
        return self.head(self.mix(x).tanh().sum(1))


class Times(nn.Module):
    """Multiplies by a parameter, entry by entry: a layer's scale."""

    def __init__(self, *shape):
        super().__init__()
        self.scale = nn.Parameter(1 + randn(3, *shape).square())

    def forward(self, x):
        return (self.scale * x).tanh()


class Projected(nn.Module):
    """A matrix that is no layer's."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(randn(4, FEATURES, FEATURES))

    def forward(self, x):
        return (x @ self.matrix).tanh()


def on(inputs, layer):
    return lambda: headed(layer(), inputs.shape[1:])


CASES = {
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
    "a frozen bias": (
        lambda: freeze(after_conv(nn.BatchNorm2d(4)), "0.1.bias"),
        IMAGES,
    ),
    "embedding": (Lookup, TOKENS),
    "embedding, padded": (lambda: Lookup(padding_idx=2), TOKENS),
    "class token and positions": (Tokens, SERIES),
    "a scale of vectors": (on(VECTORS, lambda: Times(3)), VECTORS),
    "a scale of tokens": (on(SERIES, lambda: Times(FEATURES)), SERIES),
    "a scale of images' channels": (on(IMAGES, lambda: Times(2, 1, 1)), IMAGES),
    "a scale of pixels": (on(IMAGES, lambda: Times(3)), IMAGES),
    "one number for all": (on(IMAGES, Times), IMAGES),
    "a matrix": (on(SERIES, Projected), SERIES),
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


class Flipped(Times):
    """Gives each example another one's share of the parameter."""

    def forward(self, x):
        scale = self.scale.expand(len(x), FEATURES) if self.scale.dim() == 1 else None
        return (x * (self.scale if scale is None else scale).flip(0)).tanh()


class Ignored(Times):
    """Has a parameter that nothing hangs on."""

    def forward(self, x):
        return x.tanh()


class Summation(Times):
    """Sees all of the parameter at once."""

    def forward(self, x):
        return x * self.scale.sum()


class FirstCopy(Times):
    """Reads the first copy alone, as a kernel may that does not look at shapes."""

    def forward(self, x):
        return (x * self.scale.flatten()[:FEATURES]).tanh()


COPIES = (Flipped, Ignored, Summation, FirstCopy)


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


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: after_conv(ChannelsLast(4)), IMAGES),
        (lambda: after_conv(ChannelsLast(4), size=1), IMAGES),
        (Twice, VECTORS),
        (Places, TOKENS),
        (lambda: nn.Sequential(Doubled(3), nn.Tanh(), nn.Linear(3, 3)), VECTORS),
        (Reused, TOKENS),
        # The gradient of its weight is far below that of its bias.
        (then_tanh(SquaredWeight, 3, 3), VECTORS / 1000),
        (then_tanh(SquaredWeight, 3, 3), VECTORS / 1e7),
        (Listed, VECTORS),
        *((on(VECTORS, partial(layer, 3)), VECTORS) for layer in COPIES),
    ],
)
def test_what_is_no_plain_call_has_its_jacobian(make, inputs):
    model = seeded(make)
    if "0.scale" in dict(model.named_parameters()):
        assert not shared_parameters(
            FormTrial(model, Inputs((inputs,)), {}), ["0.scale"]
        )
    got = fisher(model, [inputs], structure="diagonal", tolerance=0).diagonal()
    for key, want in diagonal_fisher(model, inputs).items():
        assert relative(got[key], want) < 1e-5, key


def test_layers_that_are_called_with_some_of_the_examples_are_exact():
    model, x = seeded(Routed), torch.cat([VECTORS.abs(), -VECTORS.abs()])[:8]
    # It is tried on the first five, which one expert has.
    structures, batches = ("kfac", "ekfac", "block", "diagonal"), x.split(6)
    found = fisher(model, batches, structure=structures, tolerance=0)
    for key, want in diagonal_fisher(model, x).items():
        for structure, curvature in zip(structures, found, strict=True):
            if structure in ("block", "diagonal") or not key.startswith("head"):
                assert relative(curvature.diagonal()[key], want) < 1e-5
    with pytest.raises(StructureError, match=r"mixture of experts.*read again"):
        fisher(model, iter(batches))


def test_no_gradient_is_scaled_by_frequency():
    x, y = TOKENS, torch.arange(len(TOKENS)) % 3
    found = []
    for scaled in (False, True):
        model = seeded(lambda on=scaled: Lookup(scale_grad_by_freq=on))
        found.append(fisher(model, [x], structure="diagonal").diagonal())
        found[-1] |= {f"g {k}": v for k, v in gradient(model, [(x, y)])[0].items()}
        assert model.rows.scale_grad_by_freq == scaled
    torch.testing.assert_close(*found)


class Conv1D(nn.Module):
    """transformers': a linear layer whose weight is ``[in, out]``."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = (
            nn.Parameter(torch.randn(nx, nf)),
            nn.Parameter(torch.randn(nf)),
        )

    def forward(self, x):
        out = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return out.view(*x.shape[:-1], self.nf)


class OfConv1D(nn.Module):
    """Tokens through two such layers, one of them square."""

    def __init__(self, kind):
        super().__init__()
        self.one, self.two, self.head = kind(4, 3), kind(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))).mean(1))


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal", "block"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_linear_layer_by_its_rows_has_the_curvature_of_the_other(structure, sharing):
    if sharing == "reduce" and structure not in ("kfac", "ekfac"):
        pytest.skip("K-FAC's")
    model = seeded(partial(OfConv1D, Conv1D))
    twin = OfConv1D(lambda out, size: nn.Linear(size, out))
    ours = ("one.weight", "two.weight")
    state = model.state_dict().items()
    twin.load_state_dict({k: v.mT if k in ours else v for k, v in state})
    x = torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(0))
    options = {"structure": structure, "tolerance": 0, "weight_sharing": sharing}
    got, want = (fisher(m, [x], **options) for m in (model, twin))
    assert not fisher_plan(model, x, structure=structure).layers[0].slow
    if structure in ("kfac", "ekfac"):
        blocks = {b.weight: b for b in got.blocks() if hasattr(b, "weight")}
        assert {"one.weight", "two.weight", "head.weight"} <= blocks.keys()
    for name, value in got.diagonal().items():
        other = want.diagonal()[name]
        other = other.mT if name in ours else other
        if structure == "ekfac":  # in a basis without the bias, of the same trace
            continue
        if name.endswith("weight") or structure in ("diagonal", "block"):
            assert relative(value, other) < 1e-4, name
    exact = diagonal_fisher(model, x)
    for name in ("one.bias", "two.bias"):
        assert relative(got.diagonal()[name], exact[name]) < 1e-5
    if structure != "kfac":
        for name in ours:
            assert relative(got.diagonal()[name].sum(), exact[name].sum()) < 1e-4
