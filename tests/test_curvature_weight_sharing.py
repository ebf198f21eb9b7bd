"""K-FAC over shared weights, expand and reduce (Eschenhagen et al., NeurIPS 2023)."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from nets import SERIES, OverTime
from oracles import in_double, randn, relative, seeded
from torch import nn

from flwr_fisher import curvature
from flwr_fisher.curvature import BlockDiagonal, Kronecker

fisher = partial(curvature.fisher, tolerance=0)
TOKENS = randn(1, 6, 5, 3)
IMAGES = randn(2, 6, 2, 6, 5)


class Pooled(nn.Module):
    """Layers that see every position, and a mean over positions."""

    def __init__(self, *layers):
        super().__init__()
        self.layers, self.head = nn.Sequential(*layers), nn.LazyLinear(3)

    def forward(self, x):
        features = self.layers(x)
        axes = (1,) if features.dim() == 3 else (2, 3)
        return self.head(features.mean(axes))


def pooled(inputs, *layers):
    model = Pooled(*layers)
    model(inputs)
    return model


def tokens():
    return pooled(TOKENS, nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))


def convolutions():
    first = nn.Conv2d(2, 4, (2, 3), padding=1, stride=(2, 1), dilation=(1, 2))
    return pooled(IMAGES, first, nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2))


def columns(layer, a, g):
    """Return an example's inputs and gradients ``[groups, size, T]``."""
    if isinstance(layer, nn.Conv2d):
        kernel, groups = layer.kernel_size, layer.groups
        a = F.unfold(
            a.unsqueeze(0), kernel, layer.dilation, layer.padding, layer.stride
        )[0]
        a, g = a.reshape(groups, -1, a.shape[-1]), g.reshape(groups, -1, a.shape[-1])
    else:
        a, g = (x.reshape(-1, x.shape[-1]).mT.unsqueeze(0) for x in (a, g))
    if layer.bias is not None:
        a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
    return a, g


def factors(model, name, inputs, reduce):
    """Return A and G by loops over examples, classes and positions."""
    model, inputs = in_double(model, inputs)
    layer = model.get_submodule(name)
    seen = []
    layer.register_forward_hook(lambda _, args, out: seen.append((args[0][0], out)))
    A = G = torch.zeros(())
    for x in inputs:
        log_p = F.log_softmax(model(x.unsqueeze(0)), 1)[0]
        a, output = seen.pop()
        for value in log_p:
            (g,) = torch.autograd.grad(value, output, retain_graph=True)
            p = value.detach().exp() / len(inputs)
            a_t, g_t = columns(layer, a.detach(), g[0])
            if reduce:
                a_t, g_t = a_t.mean(-1, keepdim=True), g_t.sum(-1, keepdim=True)
            for t in range(a_t.shape[-1]):
                column = a_t[..., t]
                A = A + p * torch.einsum("gi,gj->gij", column, column)
                column = g_t[..., t]
                outer = torch.einsum("gi,gj->gij", column, column)
                G = G + p * outer / a_t.shape[-1]
    return A, G


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("make", "inputs"), [(tokens, TOKENS), (convolutions, IMAGES)])
def test_the_factors_are_those_of_the_definition(make, inputs, sharing):
    model = seeded(make).double()
    found = fisher(model, inputs.double().split(4), weight_sharing=sharing)
    assert isinstance(found, BlockDiagonal)
    blocks = [block for block in found.blocks() if isinstance(block, Kronecker)]
    assert len(blocks) == 3
    for block in blocks:
        name = block.weight.rpartition(".")[0]
        A, G = factors(model, name, inputs, sharing == "reduce")
        assert relative(block.A, A) < 1e-12, block.weight
        assert relative(block.G, G) < 1e-12, block.weight


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: pooled(TOKENS, nn.Linear(3, 4), nn.Linear(4, 2)), TOKENS),
        (lambda: pooled(IMAGES, nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 1)), IMAGES),
    ],
    ids=["tokens", "images"],
)
def test_reduce_is_exact_for_a_deep_linear_net_that_averages(make, inputs):
    """Their proposition 3: with a regression's likelihood, up to the last digit."""
    model, inputs = seeded(make).double(), inputs.double()
    take = partial(fisher, model, [inputs], likelihood="gaussian")
    want = take(structure="block").to_dense()
    assert relative(take(weight_sharing="reduce").to_dense(), want) < 1e-12
    assert relative(take().to_dense(), want) > 0.1


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_without_positions_they_are_the_same(sharing):
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    x = randn(3, 8, 3)
    got = fisher(model, [x], weight_sharing=sharing)
    torch.testing.assert_close(got.to_dense(), fisher(model, [x]).to_dense())


def test_ekfac_has_them_too():
    model, x = seeded(OverTime).double(), SERIES.double()
    kfac, ekfac = fisher(
        model, [x], structure=("kfac", "ekfac"), weight_sharing="reduce"
    )
    expanded = fisher(model, [x])
    assert relative(kfac.to_dense(), expanded.to_dense()) > 0.01
    exact = fisher(model, [x], structure="block").to_dense()
    error = relative(ekfac.to_dense(), exact)
    assert error < relative(kfac.to_dense(), exact)
