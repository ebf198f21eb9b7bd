"""Packed self-attention: its layers seen, its three projections apart."""

import pytest
import torch
from oracles import check_exact, randn, relative, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

from flwr_fisher.curvature import fisher
from flwr_fisher.curvature.estimate.taps import layer_by_layer
from flwr_fisher.tangent import TangentFeatures

N, T, E, HEADS = 4, 5, 6, 2
X = randn(1, N, T, E, dtype=torch.float64)
PADDING = torch.arange(T).expand(N, T) >= torch.tensor([[5], [4], [3], [5]])
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)


def attention(**options):
    made = seeded(lambda: nn.MultiheadAttention(E, HEADS, **options)).double().eval()
    if made.in_proj_bias is not None:  # which begins as zero
        nn.init.normal_(made.in_proj_bias, generator=torch.Generator().manual_seed(2))
    return made


@pytest.mark.parametrize(("batch_first", "bias"), [(True, True), (False, False)])
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": CAUSAL},
        {"attn_mask": CAUSAL, "need_weights": False, "is_causal": True},
        {"attn_mask": randn(5, T, T, dtype=torch.float64)},
        {"attn_mask": randn(6, N * HEADS, T, T, dtype=torch.float64)},
        {"key_padding_mask": PADDING},
        {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "need_weights": False},
        {"key_padding_mask": PADDING.double(), "attn_mask": CAUSAL.double()},
    ],
)
def test_it_computes_what_the_module_computes(batch_first, bias, call):
    module = attention(batch_first=batch_first, bias=bias)
    x = X if batch_first else X.transpose(0, 1)
    want, weights = module(x, x, x, **call)
    seen = []
    with layer_by_layer(module, lambda n, a, b: seen.append((n, a.shape, b.shape))):
        got, got_weights = module(x, x, x, **call)
    assert seen == [("", torch.Size((N, T, E)), torch.Size((N, T, 3 * E)))]
    assert relative(got.detach(), want.detach()) < 1e-12
    assert (got_weights is None) == (weights is None)
    if weights is not None:
        assert relative(got_weights.detach(), weights.detach()) < 1e-12
    assert "forward" not in vars(module)


def test_what_is_no_self_attention_is_left_to_the_module():
    module, other = attention(batch_first=True), X.flip(1)
    seen = []
    calls = ((X, other, other), (X, X, other), (X[0], X[0], X[0]))
    wanted = [module(*call)[0] for call in calls]
    with layer_by_layer(module, lambda name, a, b: seen.append(name)):
        for call, want in zip(calls, wanted, strict=True):
            assert torch.equal(module(*call)[0], want)
    assert not seen


class Encoder(nn.Module):
    """One of PyTorch's own layers, and a classifier of the mean."""

    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoderLayer(E, HEADS, 7, batch_first=True)
        self.head = nn.Linear(E, 3)

    def forward(self, x):
        return self.head(self.body(x).mean(1))


class Unpacked(nn.Module):
    """The same attention with a layer for each projection, as a slow twin."""

    def __init__(self, packed, head):
        super().__init__()
        weights = packed.in_proj_weight.detach().chunk(3)
        biases = packed.in_proj_bias.detach().chunk(3)
        self.parts = nn.ModuleList(nn.Linear(E, E).double() for _ in weights)
        for part, weight, bias in zip(self.parts, weights, biases, strict=True):
            part.weight.data, part.bias.data = weight.clone(), bias.clone()
        self.out, self.head = packed.out_proj, head

    def forward(self, x):
        q, k, v = (p(x).view(len(x), T, HEADS, -1).transpose(1, 2) for p in self.parts)
        scores = (q @ k.mT / (E // HEADS) ** 0.5).softmax(-1)
        seen = (scores @ v).transpose(1, 2).reshape(len(x), T, E)
        return self.head(
            nn.functional.linear(seen, self.out.weight, self.out.bias).mean(1)
        )


class Alone(nn.Module):
    """Attention, of any kind, and a classifier of the mean."""

    def __init__(self, *, need_weights=False, **options):
        super().__init__()
        self.need_weights = need_weights
        self.attention = attention(batch_first=True, **options)
        self.head = nn.Linear(E, 3).double()

    def forward(self, x):
        return self.head(
            self.attention(x, x, x, need_weights=self.need_weights)[0].mean(1)
        )


@pytest.mark.parametrize("how", [{"tolerance": 0}, {}, {"expectation": "sampled"}])
def test_each_projection_has_the_factors_of_a_layer_of_its_own(how):
    model = seeded(Alone)
    twin = Unpacked(model.attention, model.head)
    packed = fisher(model, X.split(2), **how).blocks()
    (packed,) = (b for b in packed if "attention.in_proj_weight" in b.shapes)
    assert list(packed.shapes) == ["attention.in_proj_weight", "attention.in_proj_bias"]
    parts = fisher(twin, X.split(2), **how).blocks()
    for index in range(3):
        (part,) = (b for b in parts if f"parts.{index}.weight" in b.shapes)
        assert relative(packed.A[index], part.A[0]) < 1e-10
        assert relative(packed.G[index], part.G[0]) < 1e-10


def test_an_encoder_layer_is_exact_without_jacobians():
    norms = {f"body.norm{i}.{part}" for i in (1, 2) for part in ("weight", "bias")}
    check_exact(seeded(Encoder), X.float(), diagonal=norms, slow=set())


class Checkpointed(nn.Module):
    """Its attention is computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.whole = Encoder()

    def forward(self, x):
        return checkpoint(self.whole, x, use_reentrant=False)


def test_attention_may_be_checkpointed():
    model = seeded(Checkpointed)
    check_exact(model, X.float(), slow=set())
    assert TangentFeatures(model, 9)(X.float()).shape == (N, 9)


class Crossed(Alone):
    def forward(self, x):
        return self.head(self.attention(x, x.flip(1), x.flip(1))[0].mean(1))


def hooked():
    """Attention takes the last layer's weight, and does not call it."""
    model = Alone(need_weights=True)
    model.attention.out_proj.register_forward_hook(lambda *args: 2 * args[-1])
    return model


@pytest.mark.parametrize(
    "make",
    [
        Crossed,
        hooked,
        lambda: Alone(need_weights=True, add_bias_kv=True),
        lambda: Alone(need_weights=True, add_zero_attn=True),
        lambda: Alone(need_weights=True, kdim=E, vdim=E, bias=False),
    ],
)
def test_other_attention_is_exact_too(make):
    check_exact(seeded(make), X, tolerance=1e-10)


class Doubled(Alone):
    def forward(self, x):
        seen = 2 * self.attention(x, x, x, need_weights=False)[0]
        return self.head(seen.mean(1))


def test_a_forward_of_the_modules_own_is_called():
    model = seeded(Alone)
    plain = model.attention.forward
    model.attention.forward = lambda *x, **how: (2 * plain(*x, **how)[0], None)
    got, want = (fisher(m, [X], structure="diagonal") for m in (model, seeded(Doubled)))
    assert relative(got.to_dense(), want.to_dense()) < 1e-10
