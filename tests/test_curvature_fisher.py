"""`fisher` against slow float64 oracles, one small model a case."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import NETS, VECTORS, mlp
from oracles import (
    check_exact,
    diagonal_fisher,
    flat,
    headed,
    in_double,
    kinds,
    randn,
    relative,
    seeded,
)
from torch import nn

from flwr_fisher import curvature
from flwr_fisher.curvature import STRUCTURES

# Every class, so that only rounding separates it from the oracles.
fisher = partial(curvature.fisher, tolerance=0)


# --- layers with a Kronecker form -----------------------------------------------------


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear-no-bias": (lambda: nn.Linear(4, 3, bias=False), (4,)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3), (2, 4, 5)),
    "conv2d-no-bias": (lambda: nn.Conv2d(2, 3, 3, bias=False), (2, 4, 5)),
    "conv2d-one-position": (lambda: nn.Conv2d(2, 3, (4, 5)), (2, 4, 5)),
    "conv2d-1x1": (lambda: nn.Conv2d(2, 3, 1), (2, 3, 3)),
    "stride": (lambda: nn.Conv2d(2, 3, 3, stride=2), (2, 5, 6)),
    "stride-pair": (lambda: nn.Conv2d(2, 3, 2, stride=(1, 3)), (2, 3, 7)),
    "padding": (lambda: nn.Conv2d(2, 2, 3, padding=(1, 2)), (2, 3, 3)),
    "padding-same": (lambda: nn.Conv2d(2, 2, (3, 1), padding="same"), (2, 4, 3)),
    "padding-same-even": (lambda: nn.Conv2d(1, 2, (2, 4), padding="same"), (1, 3, 4)),
    "padding-same-dilated": (
        lambda: nn.Conv2d(1, 2, 3, padding="same", dilation=(2, 1)),
        (1, 4, 3),
    ),
    "padding-valid": (lambda: nn.Conv2d(2, 2, 3, padding="valid"), (2, 4, 4)),
    "dilation": (lambda: nn.Conv2d(2, 2, (2, 3), dilation=(3, 2)), (2, 5, 6)),
    "groups": (lambda: nn.Conv2d(4, 6, 2, groups=2), (4, 3, 3)),
    "groups-no-bias": (lambda: nn.Conv2d(4, 2, 2, groups=2, bias=False), (4, 3, 3)),
    "depthwise": (lambda: nn.Conv2d(3, 6, 2, groups=3, stride=2), (3, 4, 4)),
    "depthwise-no-bias": (lambda: nn.Conv2d(3, 3, 3, groups=3, bias=False), (3, 4, 4)),
    "depthwise-5x5": (lambda: nn.Conv2d(2, 2, 5, groups=2, padding=2), (2, 4, 3)),
    "depthwise-5x5-stride": (
        lambda: nn.Conv2d(2, 2, 5, 2, padding=2, groups=2, bias=False),
        (2, 6, 5),
    ),
    "depthwise-5x5-dilation": (
        lambda: nn.Conv2d(2, 2, 5, groups=2, padding="same", dilation=(2, 1)),
        (2, 4, 4),
    ),
    "depthwise-5x5-circular": (
        lambda: nn.Conv2d(2, 2, 5, groups=2, padding=2, padding_mode="circular"),
        (2, 3, 4),
    ),
    "depthwise-large": (lambda: nn.Conv2d(2, 2, 4, groups=2, bias=False), (2, 12, 13)),
    "two-wide-groups": (lambda: nn.Conv2d(18, 4, 2, groups=2), (18, 3, 3)),
    "circular": (
        lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"),
        (1, 3, 4),
    ),
    "reflect": (
        lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"),
        (1, 3, 4),
    ),
    "replicate": (
        lambda: nn.Conv2d(1, 2, 3, padding=(2, 1), padding_mode="replicate"),
        (1, 3, 3),
    ),
    "circular-same": (
        lambda: nn.Conv2d(1, 2, 3, padding="same", padding_mode="circular"),
        (1, 3, 4),
    ),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), (2, 9)),
    "conv1d-groups": (lambda: nn.Conv1d(4, 4, 2, groups=2, padding="same"), (4, 5)),
    "conv1d-depthwise": (lambda: nn.Conv1d(3, 3, 11, 2, 5, groups=3), (3, 8)),
    "conv1d-circular": (
        lambda: nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"),
        (2, 5),
    ),
    "conv3d": (
        lambda: nn.Conv3d(1, 2, (2, 3, 2), stride=(1, 2, 1), padding=(1, 0, 1)),
        (1, 2, 5, 2),
    ),
    "conv3d-depthwise": (
        lambda: nn.Conv3d(2, 2, (3, 2, 3), groups=2, padding=1, stride=(1, 2, 1)),
        (2, 2, 4, 2),
    ),
    "conv3d-groups": (
        lambda: nn.Conv3d(2, 4, 2, groups=2, dilation=(1, 2, 1), bias=False),
        (2, 2, 4, 2),
    ),
}
# torch's own, about speed.
even_kernel = pytest.mark.filterwarnings("ignore:Using padding='same' with even")


@even_kernel
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_linear_and_convolution_layers(make, shape):
    model, x = seeded(lambda: headed(make(), shape)), randn(1, 3, *shape)
    check_exact(model, x, diagonal=set(), slow=set())


# --- everything else ------------------------------------------------------------------


@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_other_models(net):
    check_exact(seeded(net.make), net.x, diagonal=net.diagonal)


class InPlace(nn.Module):
    """It normalises its inputs in place, and its weight."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x.sub_(1).div_(2)
        with torch.no_grad():
            self.head.weight.clamp_(-0.2, 0.2)
        return self.head((self.layer(x) * self.scale + self.scale**2).tanh())


def test_what_a_forward_does_in_place_is_done_once():
    x, model = randn(1, 5, 3), seeded(InPlace)
    check_exact(model, x)
    assert torch.equal(x, randn(1, 5, 3))


def test_a_users_hook_that_changes_an_output_is_taken_into_account():
    model = seeded(lambda: mlp(nn.Linear(3, 3), nn.Tanh()))
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    check_exact(model, VECTORS)


@st.composite
def nets(draw):
    """Draw a small net of linear or convolution layers, and inputs for it."""
    size = st.integers(1, 4)
    activations = st.sampled_from([nn.ReLU(), nn.Tanh(), nn.SiLU(), nn.Identity()])
    classes, n, seed = draw(st.integers(2, 5)), draw(size), draw(st.integers(0, 999))
    shape: tuple[int, ...]
    layers = []
    if draw(st.booleans()):
        groups, kernel = draw(st.integers(1, 2)), draw(st.integers(1, 3))
        shape = (groups * draw(st.integers(1, 2)), draw(size) + 2, draw(size) + 2)
        conv = nn.Conv2d(
            shape[0],
            groups * draw(st.integers(1, 2)),
            kernel,
            stride=draw(st.integers(1, 2)),
            padding=draw(st.integers(0, 2)),
            groups=groups,
            bias=draw(st.booleans()),
        )
        layers = [conv, draw(activations), nn.Flatten()]
        width = int(nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1])
    else:
        width = draw(size)
        shape = (width,)
        for _ in range(draw(st.integers(0, 2))):
            out = draw(size)
            layers += [nn.Linear(width, out, draw(st.booleans())), draw(activations)]
            width = out
    model = nn.Sequential(*layers, nn.Linear(width, classes, draw(st.booleans())))
    for i, parameter in enumerate(model.parameters()):
        parameter.data = randn(seed + i, *parameter.shape)
    return model, randn(seed, n, *shape)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(nets())
def test_random_nets(drawn):
    check_exact(*drawn)


# --- what the Fisher means ------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "attention", "batch norm"])
def test_a_small_step_costs_half_its_square_in_kl(name):
    model, x = in_double(seeded(NETS[name].make), NETS[name].x)
    F_dense = fisher(model, [x], structure="dense")
    v = {
        k: 1e-4 * randn(i, *shape, dtype=torch.float64)
        for i, (k, shape) in enumerate(F_dense.shapes.items())
    }
    before = F.log_softmax(model(x), dim=1)
    with torch.no_grad():
        for key, step in v.items():
            model.get_parameter(key).add_(step)
    after = F.log_softmax(model(x), dim=1)
    kl = F.kl_div(after, before, reduction="batchmean", log_target=True).detach()
    vFv = flat(F_dense.matvec(v)) @ flat(v)
    assert float(vFv) == pytest.approx(2 * float(kl), rel=2e-3)


def test_it_is_not_the_empirical_fisher():
    model, x = seeded(lambda: nn.Linear(3, 3)), VECTORS
    zeros, twos = torch.zeros(5).long(), torch.full((5,), 2)
    for structure in STRUCTURES:
        bare = fisher(model, [x], structure=structure).to_dense()
        for batch in ((x, zeros), [x, twos], (x,), [x]):
            other = fisher(model, [batch], structure=structure).to_dense()
            assert torch.equal(other, bare)


@pytest.mark.parametrize("name", ["small", "attention", "called twice", "batch norm"])
def test_batching_does_not_matter(name):
    model, x = seeded(NETS[name].make), NETS[name].x
    every = fisher(model, [x], structure=list(STRUCTURES))
    for batches in (x.split(1), x.split(2), [x[:1], x[1:]], [x[:0], x, x[:0]]):
        found = fisher(model, list(batches), structure=list(STRUCTURES))
        for parts, whole in zip(found, every, strict=True):
            assert kinds(parts) == kinds(whole)
            assert relative(parts.to_dense(), whole.to_dense()) <= 2e-6


class Confident(nn.Module):
    """Logits scaled by 50: most probabilities are 0 or 1 to float32."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, x):
        return 50 * self.net(x)


@pytest.mark.parametrize("structure", ["diagonal", "dense"])
def test_a_confident_model_in_float32_keeps_its_digits(structure):
    model, x = seeded(Confident), 3 * randn(1, 20, 4)
    top = model(x).softmax(1).max(1).values
    assert (top > 1 - 1e-6).any()
    assert (top < 0.99).any()
    for inputs in (x, x[top > 1 - 1e-6]):  # also where the uncertain ones do not rule
        want = diagonal_fisher(model, inputs)
        got = fisher(model, [inputs], structure=structure).diagonal()
        for name, entries in want.items():
            torch.testing.assert_close(
                got[name].double(), entries, rtol=1e-4, atol=1e-30
            )
