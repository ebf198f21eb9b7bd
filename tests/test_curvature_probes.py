"""Gradients and Hessian-vector products against dense Hessians in float64."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from nets import (
    IMAGES,
    NETS,
    SERIES,
    TOKENS,
    VECTORS,
    Attention,
    Encoder,
    First,
    Unused,
    freeze,
    mlp,
    on_images,
    with_statistics,
)
from oracles import (
    cut,
    diagonal_fisher,
    flat,
    headed,
    randn,
    relative,
    rng,
    seeded,
    small_net,
)
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from flwr_fisher.curvature import FisherOptions, fisher, gradient, gradient_and_hvp, hvp
from flwr_fisher.errors import (
    ConfigurationError,
    DataError,
    ParamsError,
    StructureError,
    UnknownNameError,
)

EXACT, SINGLE = 1e-10, 2e-5


class Scaled(nn.Module):
    """Attention by torch's fused kernel, which it differentiates once."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(3, 12), nn.Linear(4, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(seen.squeeze(1).mean(1))


class Normed(nn.Module):
    """Attention and a perceptron, each behind a layer norm."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm, self.attention = nn.LayerNorm(4), Attention()

    def forward(self, x):
        return self.attention(F.gelu(self.norm(self.embedding(x))))


def normed_conv(norm):
    return nn.Sequential(nn.Conv2d(2, 4, 2), with_statistics(norm), nn.Softplus())


SHARED = [
    *("linear", "mlp", "small", "in place", "layer norm", "dropout", "over time"),
    *("embedding", "tied", "attention", "raw parameter", "called twice"),
    *("used outside", "squared", "unused"),
]
MODELS = {
    **{name: NETS[name][:2] for name in SHARED},
    "conv, pooled": (
        on_images(lambda: nn.Conv2d(2, 4, 2), lambda: nn.MaxPool2d(2)),
        IMAGES,
    ),
    "conv1d": (
        lambda: nn.Sequential(headed(nn.Conv1d(5, 2, 2), (5, 3)), nn.Dropout()),
        SERIES,
    ),
    "batch norm": (on_images(lambda: normed_conv(nn.BatchNorm2d(4))), IMAGES),
    "frozen": (lambda: freeze(small_net(), "0.weight", "7.bias"), NETS["small"].x),
    "fused attention": (Scaled, SERIES),
    "gru": (
        lambda: nn.Sequential(First(nn.GRU(3, 3, batch_first=True)), nn.Flatten()),
        SERIES,
    ),
    "unused conv": (lambda: WithSpare(nn.Conv2d(2, 2, 2), Unused()), VECTORS),
}


class WithSpare(nn.Module):
    def __init__(self, spare, model):
        super().__init__()
        self.spare, self.model = spare, model

    def forward(self, x):
        return self.model(x)


def doubled(model, x):
    """Return both in float64, the model in training mode: probes put it in eval."""
    twin = copy.deepcopy(model).double().train()
    return twin, x.double() if x.is_floating_point() else x


def labels_for(x):
    return torch.randint(3, (len(x),), generator=rng(9))


def trained(model):
    return {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}


def at(model, x, y, loss_fn):
    """Return the mean loss over all examples as a function of flat parameters."""
    twin, like = copy.deepcopy(model).eval(), trained(model)

    def value(theta):
        return loss_fn(functional_call(twin, cut(theta, like), (x,)), y)

    return value


def dense(model, x, y, loss_fn=F.cross_entropy):
    """Return gradient and Hessian of the mean loss, ``[d]`` and ``[d, d]``."""
    value, theta = at(model, x, y, loss_fn), flat(trained(model))
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")  # torch's, of its own use of torch.jit
        return torch.func.grad(value)(theta), torch.func.hessian(value)(theta)


def differenced(model, x, y, u):
    """Return Hu by central differences of the gradient.

    For where torch's own Hessian is not implemented, or not right: that of a
    transformer is not symmetric.
    """
    steps = cut(u, trained(model))

    def slope(step):
        twin = copy.deepcopy(model).eval()
        moved = [p for p in twin.parameters() if p.requires_grad]
        with torch.no_grad():
            for p, change in zip(moved, steps.values(), strict=True):
                p.add_(change, alpha=step)
        found = torch.autograd.grad(F.cross_entropy(twin(x), y), moved)
        return torch.cat([v.flatten() for v in found])

    h = 1e-5
    return (slope(h) - slope(-h)) / (2 * h)


def in_batches(x, y, size=2):
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_against_the_dense_hessian(name):
    make, inputs = MODELS[name]
    twin, x = doubled(seeded(make), inputs)
    y = labels_for(x)
    g, H = dense(twin, x, y)
    u = randn(7, len(g), dtype=torch.float64)
    expected = float(at(twin, x, y, F.cross_entropy)(flat_of(twin)))
    vector = cut(u, trained(twin))
    for dtype, bound, probe, want in (
        (torch.float64, EXACT, vector, H @ u),
        (torch.float64, EXACT, "first", H[0]),
        (torch.float32, SINGLE, vector, H @ u),
        (torch.float32, SINGLE, "first", H[0]),
    ):
        model = copy.deepcopy(twin).to(dtype)
        given = in_batches(x.to(dtype) if x.is_floating_point() else x, y)
        found, product, loss = gradient_and_hvp(model, given, probe)
        for result in (found, product):
            assert list(result) == list(trained(model))
            for k, p in trained(model).items():
                assert (result[k].shape, result[k].dtype) == (p.shape, dtype)
        assert relative(flat(found), g) <= bound
        assert float((flat(product) - want).norm()) <= bound * float(H.norm())
        assert loss == pytest.approx(expected, rel=bound)
        alone, same = gradient(model, given)
        assert relative(flat(alone), g) <= bound
        assert same == pytest.approx(loss)
        assert relative(flat(hvp(model, given, probe)), flat(product)) == 0


def flat_of(model):
    return flat(trained(model))


NORMS = {
    "linear": (nn.Linear, nn.BatchNorm1d, VECTORS),
    "convolution": (partial(nn.Conv2d, kernel_size=3), nn.BatchNorm2d, IMAGES),
}


@pytest.mark.parametrize("name", NORMS)
def test_train_mode_normalises_by_batches_and_leaves_frozen_norms(name):
    layer, norm, inputs = NORMS[name]

    def make():
        body = nn.Sequential(layer(inputs.shape[1], 5), norm(5), nn.Tanh(), norm(5))
        return headed(body, inputs.shape[1:])

    model, x = doubled(seeded(make), inputs)
    model[0][3].requires_grad_(False)
    y, u = labels_for(x), randn(7, len(flat_of(model)), dtype=torch.float64)
    twin = copy.deepcopy(model).train()
    twin[0][3].eval()
    leaves = [p for p in twin.parameters() if p.requires_grad]
    batches = in_batches(x, y, len(x) - 2)
    loss = sum(len(b) / len(y) * F.cross_entropy(twin(a), b) for a, b in batches)
    slope = flat_of_all(torch.autograd.grad(loss, leaves, create_graph=True))
    want = flat_of_all(torch.autograd.grad(slope @ u, leaves))
    before = copy.deepcopy(model.state_dict())
    given = {"train_mode": True, "loss_fn": F.cross_entropy}
    g, product, value = gradient_and_hvp(
        model, batches, cut(u, trained(model)), **given
    )
    alone, same = gradient(model, batches, **given)
    assert max(relative(flat(each), slope.detach()) for each in (g, alone)) <= EXACT
    assert relative(flat(product), want) <= EXACT
    assert value == same == pytest.approx(loss.item())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert relative(flat(gradient(model, batches)[0]), slope.detach()) > 0.1


def flat_of_all(tensors):
    return torch.cat([each.flatten() for each in tensors])


def test_train_mode_draws_one_dropout_for_both_derivatives():
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(60, 3)).eval(), randn(3, 1, 60)
    g, product, _ = gradient_and_hvp(
        model,
        [(x, torch.tensor([1]))],
        cut(randn(4, 183), trained(model)),
        train_mode=True,
    )
    assert not model.training
    dropped = g["1.weight"][0] == 0
    assert 15 < dropped.sum() < 45
    assert torch.equal(product["1.weight"][0] == 0, dropped)


class Patches(nn.Module):
    """A small vision transformer."""

    def __init__(self):
        super().__init__()
        self.patch, self.norm = nn.Conv2d(2, 4, 2), nn.LayerNorm(4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(self.norm(self.patch(x).flatten(2).mT)).mean(1))


DIFFERENCED = {
    "transformer": (Normed, TOKENS),
    "encoder": (lambda: nn.Sequential(nn.Linear(3, 4), Encoder()), SERIES),
    "patches": (Patches, IMAGES),
    "lstm": (
        lambda: nn.Sequential(First(nn.LSTM(3, 3, batch_first=True)), nn.Flatten()),
        SERIES,
    ),
}


@pytest.mark.parametrize("name", DIFFERENCED)
def test_against_differences_of_gradients(name):
    make, inputs = DIFFERENCED[name]
    model, x = doubled(seeded(make), inputs)
    y = labels_for(x)
    u = randn(7, flat_of(model).numel(), dtype=torch.float64)
    product = hvp(model, in_batches(x, y), cut(u, trained(model)))
    assert relative(flat(product), differenced(model, x, y, u)) <= 1e-6


@pytest.mark.parametrize(
    "loss_fn",
    [
        F.mse_loss,
        F.l1_loss,
        lambda outputs, _: outputs.mean(),  # linear: its Hessian is the model's alone
        lambda outputs, y: F.nll_loss(F.log_softmax(outputs, 1), y.argmax(1)),
        lambda outputs, y: F.binary_cross_entropy_with_logits(outputs, y.sigmoid()),
    ],
)
@pytest.mark.parametrize("name", ["mlp", "small"])
def test_any_loss(name, loss_fn):
    make, inputs = MODELS[name]
    model, x = doubled(seeded(make), inputs)
    y = randn(4, len(x), 3, dtype=torch.float64)
    g, H = dense(model, x, y, loss_fn)
    u = randn(7, len(g), dtype=torch.float64)
    found, product, _ = gradient_and_hvp(
        model, in_batches(x, y), cut(u, trained(model)), loss_fn=loss_fn
    )
    assert relative(flat(found), g) <= EXACT
    assert float((flat(product) - H @ u).norm()) <= EXACT * max(1, float(H.norm()))


class Cell(nn.Module):
    """A recurrent layer's last output, through a head."""

    def __init__(self, kind, **options):
        super().__init__()
        self.cell, self.head = kind(3, 4, **options), nn.Linear(4, 3)

    def forward(self, x):
        if isinstance(self.cell, nn.RNNCellBase):
            state = None
            for step in x.unbind(1):
                state = self.cell(step, state)
            return self.head(state[0] if isinstance(state, tuple) else state)
        return self.head(self.cell(x)[0][:, -1])


class Packed(Cell):
    """The same of texts of unlike lengths, packed."""

    def forward(self, x):
        lengths = 1 + (x[:, 1:].abs().sum(2) > 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.cell(packed)[1][-1])


CELLS = {
    "GRU": partial(Cell, nn.GRU, batch_first=True),
    "RNN": partial(Cell, nn.RNN, batch_first=True, nonlinearity="relu"),
    "LSTM": partial(Cell, nn.LSTM, batch_first=True),
    "two layers": partial(Cell, nn.GRU, batch_first=True, num_layers=2),
    "LSTMCell": partial(Cell, nn.LSTMCell),
    "GRUCell": partial(Cell, nn.GRUCell),
    "RNNCell": partial(Cell, nn.RNNCell),
    "packed": partial(Packed, nn.GRU, batch_first=True),
}


@pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
def test_what_vmap_cannot_do_is_taken_example_by_example(make):
    model, x = seeded(make), torch.randn(4, 5, 3, generator=rng(0))
    x[1, 3:] = x[2, 2:] = 0
    exact = FisherOptions.full(tolerance=0)
    got = fisher(model, [x], "diagonal", options=exact).diagonal()
    for name, want in diagonal_fisher(model, x).items():
        assert relative(got[name], want) < 1e-5, name


# --- batches, modes and what is left behind -------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "small", "batch norm", "dropout"])
def test_how_examples_are_batched_does_not_matter(name):
    make, inputs = MODELS[name]
    model, x = doubled(seeded(make), inputs)
    y = labels_for(x)
    want = gradient_and_hvp(model, [(x, y)])
    uneven = [(x[:1], y[:1]), (x[1:1], y[1:1]), (x[1:], y[1:])]
    for batches in (in_batches(x, y, 1), uneven):
        got = gradient_and_hvp(model, batches)
        assert got[2] == pytest.approx(want[2])
        for a, b in zip(got[:2], want[:2], strict=True):
            assert relative(flat(a), flat(b)) <= EXACT


def test_a_zero_vector_has_a_zero_product():
    make, x = MODELS["small"]
    model = seeded(make)
    zero = {k: torch.zeros_like(v) for k, v in trained(model).items()}
    assert not flat(hvp(model, in_batches(x, labels_for(x)), zero)).any()


def test_half_precision_is_summed_in_single():
    model = nn.Linear(3, 3).bfloat16()
    x = VECTORS.bfloat16().repeat(200, 1)
    got, _ = gradient(model, in_batches(x, labels_for(VECTORS).repeat(200), 5))
    want, _ = gradient(model, [(VECTORS.bfloat16(), labels_for(VECTORS))])
    assert got["weight"].dtype == torch.bfloat16
    assert relative(flat(got), flat(want)) <= 1e-2


# --- refusals -------------------------------------------------------------------------


LINEAR, BATCH = nn.Linear(3, 3), (VECTORS, labels_for(VECTORS))
PER_EXAMPLE = {"loss_fn": lambda o, y: F.cross_entropy(o, y, reduction="none")}
OF_THE_BATCH = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
DETACHED = {"loss_fn": lambda o, y: o.detach().mean()}
NUMBER = {"loss_fn": lambda o, y: 1.0}
FROZEN = freeze(nn.Linear(3, 3), "weight", "bias")


class Loss(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


MISTAKES = {
    "no batch": (LINEAR, [], {}, DataError, "no examples"),
    "no example": (LINEAR, [(VECTORS[:0], BATCH[1][:0])], {}, DataError, "no examples"),
    "no labels": (LINEAR, [VECTORS], {}, DataError, "label"),
    "one alone": (LINEAR, [(VECTORS,)], {}, DataError, "label"),
    "too few labels": (LINEAR, [(VECTORS, BATCH[1][:2])], {}, DataError, "label"),
    "none for labels": (LINEAR, [(VECTORS, None)], {}, DataError, "label"),
    "a mapping": (LINEAR, [{"x": VECTORS}], {}, DataError, "'x'"),
    "loss by example": (LINEAR, [BATCH], PER_EXAMPLE, ConfigurationError, r"\(5,\)"),
    "a number": (LINEAR, [BATCH], NUMBER, ConfigurationError, "loss_fn .*float"),
    "frozen": (FROZEN, [BATCH], {}, ConfigurationError, "no trainable parameter"),
    "centred": (Centred(3, 3), [BATCH], {}, StructureError, "other examples"),
    "a loss": (Loss(3, 3), [BATCH], {}, StructureError, "for 5 examples"),
    "statistics": (mlp(OF_THE_BATCH), [BATCH], {}, StructureError, "fails on fewer"),
    "no gradient": (LINEAR, [BATCH], DETACHED, StructureError, "no trainable"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    model, batches, options, error, culprit = MISTAKES[name]
    for take in (gradient, gradient_and_hvp):
        with pytest.raises(error, match=culprit):
            take(model, batches, **options)


@pytest.mark.parametrize(
    ("probe", "error", "culprit"),
    [
        ({"weight": torch.ones(3, 3)}, ParamsError, r"\['bias'\]"),
        (
            {"weight": torch.ones(3, 2), "bias": torch.ones(3)},
            ParamsError,
            r"'weight'.*\(3, 2\).*\(3, 3\)",
        ),
        ("last", UnknownNameError, "'last'; known: first"),
    ],
)
def test_a_probe_that_does_not_fit(probe, error, culprit):
    with pytest.raises(error, match=culprit):
        hvp(LINEAR, [BATCH], probe)
