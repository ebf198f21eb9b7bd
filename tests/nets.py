"""Small models that are awkward each in its own way, and inputs for them."""

from typing import Any

import torch
import torch.nn.functional as F
from oracles import randn, rng
from torch import Tensor, nn

VECTORS, SERIES = randn(1, 5, 3), randn(2, 4, 5, 3)
IMAGES, TOKENS = randn(3, 4, 2, 3, 3), torch.randint(5, (6, 4), generator=rng(4))


class OverTime(nn.Module):
    """A linear layer on ``[n, T, d]``; the steps' weights break their symmetry."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.step = nn.Linear(3, 4, bias=bias)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).reshape(1, -1, 1)
        return self.head((self.step(x).tanh() * times).mean(1))


class Sentence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Encoder(nn.Module):
    """With time first, so its linear layers' rows are not the batch's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 5, batch_first=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.transpose(0, 1))[0])


class RawParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.temperature = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.temperature


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(self.fc(x).tanh()).tanh())


class Tied(nn.Module):
    """A language model's usual tie: what it reads with is what it writes with."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.middle = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(x).mean(1)).tanh())


class TiedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(3, 3), nn.Linear(3, 3)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x).tanh())


class UsedOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(self.fc(x).tanh(), self.fc.weight))


class NotCalled(nn.Module):
    """A layer whose weight is used, but never through its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.fc.weight, self.fc.bias).tanh())


class SquaredWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight**2, self.bias)


class FewerInputs(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :3])


class FewerOutputs(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :3]


class ReturnsTuple(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class PadsItself(nn.Conv2d):
    """As the layers that imitate another framework's padding do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, [1, 0, 1, 0]), self.weight, self.bias)


class First(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)[0]
        return output


class ByKeyword(CalledTwice):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(input=x).tanh())


class WithoutGradient(CalledTwice):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.fc(x)
        return self.head(hidden)


class Folded(nn.Module):
    """Time is folded into the batch: a layer's rows are not the batch's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, steps, size = x.shape
        hidden = self.fc(x.reshape(n * steps, size)).tanh()
        return self.head(hidden.reshape(n, steps, -1).mean(1))


class TimeFirst(Folded):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(x.transpose(0, 1)).tanh().mean(0))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.spare = nn.Linear(3, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def with_statistics(norm: nn.Module) -> nn.Module:
    """Give a batch norm statistics, and every norm a weight and bias of its own."""
    for i, (name, tensor) in enumerate(norm.state_dict().items()):
        if tensor.is_floating_point():
            value = randn(i, *tensor.shape)
            tensor.copy_(value.exp() if name == "running_var" else value)
    return norm


def freeze(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Linear(3, 3))
