"""Small models that are awkward each in its own way, and inputs for them."""

from collections.abc import Callable, Set
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from oracles import SMALL_SHAPE, headed, randn, rng, small_net
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

VECTORS, SERIES = randn(1, 5, 3), randn(2, 4, 5, 3)
IMAGES, TOKENS = randn(3, 4, 2, 3, 3), torch.randint(5, (6, 4), generator=rng(4))


class OverTime(nn.Module):
    """A linear layer on ``[n, T, d]``; the steps' weights break their symmetry."""

    def __init__(self, bias=True):
        super().__init__()
        self.step = nn.Linear(3, 4, bias=bias)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        times = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).reshape(1, -1, 1)
        return self.head((self.step(x).tanh() * times).mean(1))


class Sentence(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Encoder(nn.Module):
    """With time first, so its linear layers' rows are not the batch's examples."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 5, batch_first=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(x.transpose(0, 1))[0])


class RawParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.temperature = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, x):
        return self.fc(x) * self.temperature


class TwoLayers(nn.Module):
    """What others use, each in its own way."""

    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(3, 3), nn.Linear(3, 3)


class CalledTwice(TwoLayers):
    def forward(self, x):
        return self.head(self.fc(self.fc(x).tanh()).tanh())


class Tied(nn.Module):
    """A language model's usual tie: what it reads with is what it writes with."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.middle = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.middle(self.embedding(x).mean(1)).tanh())


class TiedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(3, 3), nn.Linear(3, 3)
        self.up.weight = self.down.weight

    def forward(self, x):
        return self.up(self.down(x).tanh())


class UsedOutside(TwoLayers):
    def forward(self, x):
        return self.head(F.linear(self.fc(x).tanh(), self.fc.weight))


class NotCalled(TwoLayers):
    """A layer whose weight is used, but never through its own forward."""

    def forward(self, x):
        return self.head(F.linear(x, self.fc.weight, self.fc.bias).tanh())


class SquaredWeight(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight**2, self.bias)


class Watched(nn.Linear):
    """A subclass that computes the same."""

    def forward(self, x):
        return super().forward(x) + 0


class FewerInputs(nn.Linear):
    def forward(self, x):
        return super().forward(x[:, :3])


class FewerOutputs(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:, :3]


class ReturnsTuple(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


class PadsItself(nn.Conv2d):
    """As the layers that imitate another framework's padding do."""

    def forward(self, x):
        return F.conv2d(F.pad(x, [1, 0, 1, 0]), self.weight, self.bias)


class First(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class WithoutGradient(CalledTwice):
    def forward(self, x):
        with torch.no_grad():
            hidden = self.fc(x)
        return self.head(hidden)


class Folded(nn.Module):
    """Time is folded into the batch: a layer's rows are not the batch's examples."""

    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        n, steps, size = x.shape
        hidden = self.fc(x.reshape(n * steps, size)).tanh()
        return self.head(hidden.reshape(n, steps, -1).mean(1))


class TimeFirst(Folded):
    def forward(self, x):
        return self.head(self.fc(x.transpose(0, 1)).tanh().mean(0))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.spare = nn.Linear(3, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.fc(x)


def with_statistics(norm):
    """Give a batch norm statistics, and every norm a weight and bias of its own."""
    for i, (name, tensor) in enumerate(norm.state_dict().items()):
        if tensor.is_floating_point():
            value = randn(i, *tensor.shape)
            tensor.copy_(value.exp() if name == "running_var" else value)
    return norm


def freeze(model, *names):
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def mlp(*layers):
    return nn.Sequential(*layers, nn.Linear(3, 3))


# --- all of them ----------------------------------------------------------------------


def then_tanh(layer, *sizes):
    return lambda: mlp(layer(*sizes), nn.Tanh())


def on_images(*layers):
    return lambda: headed(nn.Sequential(*(make() for make in layers)), IMAGES.shape[1:])


def on_normed(norm, *sizes):
    return on_images(lambda: nn.Conv2d(2, 4, 2), lambda: with_statistics(norm(*sizes)))


def frozen(*names):
    return lambda: freeze(then_tanh(nn.Linear, 3, 3)(), *names)


def slopes(count):
    """As many examples as classes; one slope, or one a channel."""
    return nn.Sequential(nn.Linear(3, 4), nn.PReLU(count), nn.Linear(4, len(VECTORS)))


class Net(NamedTuple):
    """A model, inputs, and the parameters that K-FAC gives only a diagonal."""

    make: Callable[[], nn.Module]
    x: Tensor
    diagonal: Set[str] = frozenset()
    slow: Set[str] | None = None  # by each example's gradient; None: all of these


def all_of(net, name):
    return {f"{name}.{key}" for key in net.get_submodule(name).state_dict()}


quick = partial(Net, slow=set())  # nothing by each example's gradient
FC, FIRST, IN_BODY, BEHIND = (
    {f"{name}.weight", f"{name}.bias"} for name in ("fc", "0", "0.0", "0.1")
)
NETS = {
    "linear": Net(lambda: nn.Linear(3, 3), VECTORS),
    "mlp": Net(then_tanh(nn.Linear, 3, 3), VECTORS),
    "small": Net(small_net, randn(5, 5, *SMALL_SHAPE)),
    "over time": Net(OverTime, SERIES),
    "over time, no bias": Net(lambda: OverTime(False), SERIES),
    "one slope": Net(lambda: slopes(1), VECTORS, {"1.weight"}),
    "slopes": Net(lambda: slopes(4), VECTORS, {"1.weight"}),
    "embedding": quick(Sentence, TOKENS, {"embedding.weight"}),
    "layer norm": quick(
        lambda: mlp(with_statistics(nn.LayerNorm(3)), nn.GELU()), VECTORS, FIRST
    ),
    "group norm": quick(on_normed(nn.GroupNorm, 2, 4), IMAGES, BEHIND),
    "batch norm": quick(on_normed(nn.BatchNorm2d, 4), IMAGES, BEHIND),
    "attention": Net(Attention, randn(5, 5, 3, 4), all_of(Attention(), "attention")),
    "encoder": Net(Encoder, randn(7, 3, 2, 4), all_of(Encoder(), "encoder")),
    "raw parameter": Net(RawParameter, VECTORS, {"temperature"}),
    "in place": Net(lambda: mlp(nn.Linear(3, 3), nn.ReLU(inplace=True)), VECTORS),
    "called twice": Net(CalledTwice, VECTORS, FC),
    "tied": Net(Tied, TOKENS, {"embedding.weight"}),
    "tied linear": Net(TiedLinear, VECTORS, {"down.weight", "down.bias", "up.bias"}),
    "used outside": Net(UsedOutside, VECTORS, FC),
    "not called": Net(NotCalled, VECTORS, FC),
    "unused": Net(Unused, VECTORS, {"spare.weight", "spare.bias"}),
    "squared": Net(then_tanh(SquaredWeight, 3, 3), VECTORS, FIRST),
    "watched": Net(then_tanh(Watched, 3, 3), VECTORS),
    "fewer inputs": Net(then_tanh(FewerInputs, 3, 3), randn(6, 5, 4), FIRST),
    "fewer outputs": Net(then_tanh(FewerOutputs, 3, 4), VECTORS, FIRST),
    "a tuple": Net(
        lambda: mlp(First(ReturnsTuple(3, 3)), nn.Tanh()),
        VECTORS,
        {"0.layer.weight", "0.layer.bias"},
    ),
    "pads itself": Net(on_images(lambda: PadsItself(2, 2, 2)), IMAGES, IN_BODY),
    "weight norm": Net(
        lambda: mlp(weight_norm(nn.Linear(3, 3)), nn.Tanh()),
        VECTORS,
        {"0.bias", *(f"0.parametrizations.weight.original{i}" for i in range(2))},
    ),
    "without gradient": Net(WithoutGradient, VECTORS, FC),
    "folded": Net(Folded, SERIES, FC),
    "time first": Net(TimeFirst, SERIES, FC),
    "time first, square": Net(TimeFirst, SERIES[:, :4], FC),
    "frozen bias": Net(frozen("0.bias"), VECTORS),
    "frozen weight": Net(frozen("0.weight"), VECTORS, {"0.bias"}),
    "frozen layer": Net(frozen("0.weight", "0.bias"), VECTORS),
    "frozen head": Net(frozen("2.weight", "2.bias"), VECTORS),
    "dropout": Net(lambda: mlp(nn.Linear(3, 3), nn.Dropout(0.9)), VECTORS),
}


class Mixes(nn.Linear):
    """Each example's outputs depend on the others."""

    def __init__(self, mix):
        super().__init__(3, 3)
        self.mix = mix

    def forward(self, x):
        return super().forward(x + self.mix(super().forward(x)))


MIXES = {
    "all": lambda x: x.mean(0),
    "those-before": lambda x: x.cumsum(0),
    "those-after": lambda x: x.flip(0).cumsum(0).flip(0),
    "the-one-before": lambda x: x.roll(1, 0),
    # No more examples than an expert takes of a batch.
    "the-first-five-only": lambda x: x * (torch.arange(len(x)).unsqueeze(1) < 5),
    "those-before-of-four": lambda x: torch.cat([b.cumsum(0) for b in x.split(4)]),
}
