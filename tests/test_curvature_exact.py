"""Every form of layer against loops in float64: exact diagonals, K-FAC's factors."""

from functools import partial

import pytest
import rivals_path  # noqa: F401
import torch
import torch.nn.functional as F
from nets import (
    BEHIND,
    FC,
    FIRST,
    IMAGES,
    IN_BODY,
    NETS,
    SERIES,
    TOKENS,
    VECTORS,
    Net,
    OverTime,
    SquaredWeight,
    TwoLayers,
    Watched,
    freeze,
    mlp,
    quick,
    then_tanh,
    with_statistics,
)
from nngeometry.metrics import FIM
from nngeometry.object import pspace
from oracles import (
    EXACT,
    SMALL_SHAPE,
    check_exact,
    diagonal_fisher,
    flat,
    headed,
    in_double,
    kinds,
    layer_factors,
    randn,
    relative,
    seeded,
    small_net,
)
from tasks import Transformer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.curvature import STRUCTURES, FisherOptions, Inputs, Kronecker, fisher
from flwr_fisher.curvature.estimate import (
    accumulators,
    engine,
    forms,
    jacobians,
    model_sums,
)
from flwr_fisher.curvature.estimate.forms import Forms

conv1d, conv2d, conv3d = (
    partial(partial, layer) for layer in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
)
wide = partial(conv2d, 2, 2, 5, groups=2)
LAYERS = {
    "no bias": (partial(nn.Linear, 4, 3, bias=False), (4,)),
    "one position": (conv2d(2, 3, (4, 5)), (2, 4, 5)),
    "1x1": (conv2d(2, 3, 1, bias=False), (2, 3, 3)),
    "stride": (conv2d(2, 3, 2, stride=(1, 3)), (2, 3, 7)),
    "padding": (conv2d(2, 2, 3, padding=(1, 2)), (2, 3, 3)),
    "same": (conv2d(1, 2, (2, 4), padding="same"), (1, 3, 4)),
    "same, dilated": (conv2d(1, 2, 3, padding="same", dilation=(2, 1)), (1, 4, 3)),
    "valid": (conv2d(2, 2, 3, padding="valid"), (2, 4, 4)),
    "dilation": (conv2d(2, 2, (2, 3), dilation=(3, 2)), (2, 5, 6)),
    "groups": (conv2d(4, 6, 2, groups=2), (4, 3, 3)),
    "wide groups": (conv2d(18, 4, 2, groups=2), (18, 3, 3)),
    "depthwise": (conv2d(3, 6, 2, groups=3, stride=2), (3, 4, 4)),
    "5x5": (wide(padding=2), (2, 4, 3)),
    "5x5, stride": (conv2d(2, 2, 5, 2, 2, groups=2, bias=False), (2, 6, 5)),
    "5x5, dilated": (wide(padding="same", dilation=(2, 1)), (2, 4, 4)),
    "5x5, circular": (wide(padding=2, padding_mode="circular"), (2, 3, 4)),
    "many positions": (conv2d(2, 2, 4, groups=2, bias=False), (2, 12, 13)),
    "circular": (conv2d(1, 2, 3, padding=1, padding_mode="circular"), (1, 3, 4)),
    "reflect": (conv2d(1, 2, 3, padding=1, padding_mode="reflect"), (1, 3, 4)),
    "replicate": (conv2d(1, 2, 3, padding=(2, 1), padding_mode="replicate"), (1, 3, 3)),
    "1-d": (conv1d(2, 3, 3, stride=2, padding=1, dilation=2), (2, 9)),
    "1-d, groups": (conv1d(4, 4, 2, groups=2, padding="same"), (4, 5)),
    "1-d, depthwise": (conv1d(3, 3, 11, 2, 5, groups=3), (3, 8)),
    "3-d": (conv3d(1, 2, (2, 3, 2), (1, 2, 1), (1, 0, 1)), (1, 2, 5, 2)),
    "3-d, depthwise": (conv3d(2, 2, (3, 2, 3), (1, 2, 1), 1, groups=2), (2, 2, 4, 2)),
    "3-d, groups": (
        conv3d(2, 4, 2, groups=2, dilation=(1, 2, 1), bias=False),
        (2, 2, 4, 2),
    ),
}


# torch's own, about speed.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS)
def test_linear_and_convolution_layers(layer, shape):
    model, x = seeded(lambda: headed(layer(), shape)), randn(1, 3, *shape)
    check_exact(model, x, diagonal=set(), slow=set())


# --- other networks -------------------------------------------------------------------


def after_conv(norm, bias=False):
    return headed(
        nn.Sequential(nn.Conv2d(2, 4, 2, bias=bias), with_statistics(norm)),
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


class Tokens(nn.Module):
    """A class token and embeddings of positions, used in one of several ways."""

    def __init__(self, use=lambda p, n: p.expand(n, -1, -1)):
        super().__init__()
        self.use, size = use, SERIES.shape[1]
        self.token = nn.Parameter(randn(0, 1, 1, 3))
        self.places = nn.Parameter(randn(1, 1, size + 1, 3))
        self.mix, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = torch.cat([self.use(self.token, len(x)), x], 1) + self.places
        return self.head(self.mix(x).tanh().mean(1))


ODD_USES = {  # and what is then computed by per-example gradients
    "repeats": (lambda p, n: p.repeat(n, 1, 1), {"token"}),
    "takes the first": (lambda p, n: p[:1].expand(n, -1, -1), {"token"}),
    "takes the mean": (lambda p, n: p.mean(0, True).expand(n, -1, -1), {"token"}),
    "looks at its shape": (lambda p, n: (p * len(p)).expand(n, -1, -1), {"token"}),
}


class Doubled(nn.RMSNorm):
    """Computes something else than its class does."""

    def forward(self, x):
        return 2 * super().forward(x)


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


class ReadAtOne(nn.Module):
    """Its last layer's other tokens act on no output."""

    def __init__(self):
        super().__init__()
        self.fc, self.mix, self.head = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        x = self.fc(x).tanh()
        return self.head(self.mix(x + x.mean(1, True))[:, 0].tanh())


def hooked():
    model = mlp(nn.Linear(3, 3), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    return model


MORE = {
    "batch norm, vectors": quick(
        lambda: mlp(with_statistics(nn.BatchNorm1d(3))), VECTORS, FIRST
    ),
    "layer norm, series": quick(lambda: on_series(nn.LayerNorm(3)), SERIES, IN_BODY),
    "layer norm, two axes": quick(
        lambda: on_series(nn.LayerNorm(SERIES.shape[1:])), SERIES, IN_BODY
    ),
    "rms norm": quick(lambda: on_series(nn.RMSNorm(3)), SERIES, {"0.0.weight"}),
    "a frozen bias": quick(
        lambda: freeze(after_conv(nn.BatchNorm2d(4)), "0.1.bias"),
        IMAGES,
        {"0.1.weight"},
    ),
    "padded": quick(lambda: Lookup(padding_idx=2), TOKENS, {"rows.weight"}),
    "sparse": Net(lambda: Lookup(sparse=True), TOKENS, {"rows.weight"}),
    "channels last": Net(lambda: after_conv(ChannelsLast(4)), IMAGES, BEHIND),
    "norm called twice": Net(Twice, VECTORS, {"norm.weight", "norm.bias"}),
    "positions": Net(
        Places, TOKENS, {"rows.weight", "places.weight"}, slow={"places.weight"}
    ),
    "tokens": quick(Tokens, SERIES, {"token", "places"}),
    **{
        f"tokens, {how}": Net(
            partial(Tokens, use), SERIES, {"token", "places"}, slow=slow
        )
        for how, (use, slow) in ODD_USES.items()
    },
    "read at one token": quick(ReadAtOne, SERIES, set()),
    "doubled": Net(then_tanh(Doubled, 3), VECTORS, {"0.weight"}),
    # The gradient of its weight is far below that of its bias.
    "small inputs": Net(then_tanh(SquaredWeight, 3, 3), VECTORS / 1000, FIRST),
    "tiny inputs": Net(then_tanh(SquaredWeight, 3, 3), VECTORS / 1e7, FIRST),
    "listed": Net(Listed, VECTORS, {"one", "two"}),
    "reversed": Net(Reversed, VECTORS, FC),
    "reversed, one alone": Net(Reversed, VECTORS[:1], FC),
    "one pair": Net(partial(Reversed, pairs=True), VECTORS, FC),
    "hooked": Net(hooked, VECTORS, FIRST),
}


@pytest.mark.parametrize("net", [*NETS.values(), *MORE.values()], ids=[*NETS, *MORE])
def test_other_networks(net):
    slow = net.diagonal if net.slow is None else net.slow
    check_exact(seeded(net.make), net.x, diagonal=net.diagonal, slow=slow)


def test_what_a_forward_does_in_place_is_done_once():
    x = VECTORS.clone()
    check_exact(seeded(InPlace), x)
    assert torch.equal(x, VECTORS)


def test_a_transformer_with_a_label_at_every_position():
    model = seeded(lambda: Transformer(7, 4, width=8, layers=2, heads=2)).double()
    for i, p in enumerate(model.parameters()):  # norms and biases that are no constants
        p.data.add_(randn(i, *p.shape, dtype=torch.float64), alpha=0.3)
    check_exact(model, TOKENS[:3], tolerance=1e-10)


# --- sizes at which another way is taken ----------------------------------------------


@pytest.mark.parametrize(
    ("module", "limits"),
    [
        (forms, {"_AT_ONCE": 20}),
        (accumulators, {"_BLOCK": 2}),
        (accumulators, {"_AT_ONCE": 20}),
        (accumulators, {"_LARGE": 1, "_CACHED": 20}),
        (engine, {"_QUEUE": 1, "_MOST_BUNDLED": 1}),
        (jacobians, {"_ENTRIES_AT_ONCE": 30}),
    ],
)
@pytest.mark.parametrize("name", ["small", "over time", "called twice", "attention"])
def test_large_layers_are_computed_in_parts(monkeypatch, module, limits, name):
    for limit, value in limits.items():
        monkeypatch.setattr(module, limit, value)
    check_exact(seeded(NETS[name].make), NETS[name].x)


def test_a_factor_that_would_be_too_large_is_an_exact_diagonal(monkeypatch):
    monkeypatch.setattr(model_sums, "LARGEST_FACTOR", 10)
    large = {"0.weight", "0.bias", "2.weight", "2.bias"}
    model = seeded(lambda: mlp(nn.Linear(3, 11), nn.Tanh(), nn.Linear(11, 3)))
    check_exact(model, VECTORS, diagonal=large, slow=set())


# --- K-FAC of several positions -------------------------------------------------------


class Pooled(nn.Module):
    """Layers that see every position, and a mean over positions."""

    def __init__(self, *layers):
        super().__init__()
        self.layers, self.head = nn.Sequential(*layers), nn.LazyLinear(3)

    def forward(self, x):
        features = self.layers(x)
        return self.head(features.mean((1,) if features.dim() == 3 else (2, 3)))


def pooled(inputs, *layers):
    model = Pooled(*layers)
    model(inputs)
    return model


def convolutions():
    first = nn.Conv2d(2, 4, (2, 3), padding=1, stride=(2, 1), dilation=(1, 2))
    return pooled(PICTURES, first, nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2))


PICTURES = randn(2, 6, 2, 6, 5)
REDUCE = FisherOptions.full(tolerance=0, weight_sharing="reduce")


@pytest.mark.parametrize(
    ("make", "inputs"), [(OverTime, SERIES), (convolutions, PICTURES)]
)
def test_reduced_factors_are_of_mean_inputs_and_summed_gradients(make, inputs):
    """Eschenhagen et al., NeurIPS 2023."""
    model = seeded(make).double()
    for block in fisher(model, inputs.double().split(3), options=REDUCE).blocks():
        name = block.weight.rpartition(".")[0]
        A, G = layer_factors(model, name, inputs, reduce=True)
        assert relative(block.A, A) < 1e-12, name
        assert relative(block.G, G) < 1e-12, name


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: pooled(SERIES, nn.Linear(3, 4), nn.Linear(4, 2)), SERIES),
        (lambda: pooled(IMAGES, nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 1)), IMAGES),
    ],
    ids=["tokens", "images"],
)
def test_reduce_is_exact_for_a_deep_linear_net_that_averages(make, inputs):
    """Their proposition 3: with a regression's likelihood, up to the last digit."""
    model, inputs = seeded(make).double(), inputs.double()
    take = partial(fisher, model, [inputs], likelihood="gaussian")
    want, reduced, expanded = (
        flat(take(structure, options=options).diagonal())
        for structure, options in (
            ("diagonal", EXACT),
            ("kfac", REDUCE),
            ("kfac", EXACT),
        )
    )
    assert relative(reduced, want) < 1e-12
    assert relative(expanded, want) > 0.1


# --- what the Fisher means ------------------------------------------------------------


def test_it_is_nngeometrys():
    """Where that is right: no groups, numbers for paddings, nothing frozen."""
    model, x = seeded(small_net), randn(1, 7, *SMALL_SHAPE)
    # Its own generator, so that the loader draws nothing from torch's.
    loader = DataLoader(
        TensorDataset(x), batch_size=3, shuffle=False, generator=torch.Generator()
    )

    def theirs(kind):
        return FIM(model, loader, kind, "classif_logits", device="cpu")

    diagonal = fisher(model, loader, "diagonal", options=EXACT).diagonal()
    assert relative(flat(diagonal), theirs(pspace.PMatDiag).get_diag()) <= 1e-5
    factors = theirs(pspace.PMatKFAC).data
    for block in fisher(model, loader, options=EXACT).blocks():
        A, G = factors[block.weight.rpartition(".")[0]]  # each scaled in its own way
        assert relative(torch.kron(block.G[0], block.A[0]), torch.kron(G, A)) <= 1e-5


@pytest.mark.parametrize("name", ["small", "attention", "batch norm"])
def test_a_small_step_costs_half_its_square_in_kl(name):
    model, x = in_double(seeded(NETS[name].make), NETS[name].x)
    before = model(x).log_softmax(1).detach()
    diagonal = fisher(model, [x], "diagonal", options=EXACT).diagonal()
    for key, entries in diagonal.items():
        at, parameter = int(entries.argmax()), model.get_parameter(key)
        step = torch.zeros_like(parameter).flatten()
        step[at] = 1e-4
        with torch.no_grad():
            parameter.add_(step.view_as(parameter))
            after = model(x).log_softmax(1)
            parameter.sub_(step.view_as(parameter))
        kl = F.kl_div(after, before, reduction="batchmean", log_target=True)
        assert float(entries.max()) * 1e-8 == pytest.approx(2 * float(kl), rel=2e-3)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_is_not_the_empirical_fisher(structure):
    model, x = seeded(lambda: nn.Linear(3, 3)), VECTORS
    bare = fisher(model, [x], structure).to_dense()
    for label in (0, 2):
        other = fisher(model, [(x, torch.full((5,), label))], structure)
        assert torch.equal(other.to_dense(), bare)


@pytest.mark.parametrize("name", ["small", "attention", "called twice", "batch norm"])
def test_batching_does_not_matter(name):
    model, x = seeded(NETS[name].make), NETS[name].x
    for structure in STRUCTURES:
        whole = fisher(model, [x], structure)
        for batches in (x.split(1), x.split(2), [x[:1], x[1:]], [x[:0], x, x[:0]]):
            parts = fisher(model, list(batches), structure)
            assert kinds(parts) == kinds(whole)
            assert relative(parts.to_dense(), whole.to_dense()) <= 2e-6


class Confident(nn.Sequential):
    """Logits scaled by 50: most probabilities are 0 or 1 to float32."""

    def forward(self, x):
        return 50 * super().forward(x)


def test_a_confident_model_in_float32_keeps_its_digits():
    model = seeded(lambda: Confident(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)))
    x = 3 * randn(1, 20, 4)
    top = model(x).softmax(1).max(1).values
    assert (top > 1 - 1e-6).any()
    assert (top < 0.99).any()
    for inputs in (x, x[top > 1 - 1e-6]):  # also where the uncertain ones do not rule
        got = fisher(model, [inputs], "diagonal", options=EXACT).diagonal()
        for name, entries in diagonal_fisher(model, inputs).items():
            torch.testing.assert_close(
                got[name].double(), entries, rtol=1e-4, atol=1e-30
            )


def test_a_model_that_is_certain_of_everything_has_no_curvature():
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([500.0, 0.0, 0.0]))
    for structure in STRUCTURES:
        assert not fisher(model, [randn(0, 5, 2)], structure).to_dense().any()


# --- the check of the first batch -----------------------------------------------------


class OneExample(nn.Linear):
    """It computes something else for one kind of example."""

    def forward(self, x):
        odd = x[:, :1] > 1.5 * VECTORS[0, 0].abs()
        return super().forward(x) + odd * F.linear(x, self.weight**3)


def test_all_examples_of_the_first_batch_are_checked():
    model = seeded(then_tanh(OneExample, 3, 3)).double().eval()
    x = torch.cat([VECTORS[:1].expand(40, -1), 2 * VECTORS[:1].abs()]).double()
    for batch in (x, x.flip(0)):
        assert Forms.of(model, Inputs((batch,))).others == ["0.weight", "0.bias"]
        # Also where memory allows only a few at once.
        assert Forms.of(model, Inputs((batch,)), 1).others == ["0.weight", "0.bias"]


@pytest.mark.parametrize("bias", [True, False])
def test_a_first_batch_of_zeros_shows_nothing_by_itself(bias):
    model = seeded(then_tanh(SquaredWeight, 3, 3, bias)).double().eval()
    own = {"0.weight", "0.bias"} if bias else {"0.weight"}
    assert set(Forms.of(model, Inputs((torch.zeros(5, 3).double(),))).others) == own
    # Nor does it show that a layer is another than its type says.
    plain = seeded(then_tanh(nn.Linear, 3, 3, bias)).double().eval()
    assert not Forms.of(plain, Inputs((torch.zeros(5, 3).double(),))).others


class Tripled(nn.Embedding):
    """Computes something else than its class does."""

    def forward(self, x):
        return 3 * super().forward(x)


class OfBytes(nn.Module):
    """Images in bytes, with a layer without a bias."""

    def __init__(self, layer):
        super().__init__()
        self.net = then_tanh(layer, 3, 3, False)()

    def forward(self, x):
        return self.net(x / 255)


def of_padding(layer):
    rows = layer(7, 4, padding_idx=0)
    return nn.Sequential(rows, nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


def scaled_by_a_hook(*options):
    layer = nn.Linear(*options)
    layer.register_forward_hook(lambda module, args, output: output * 3)
    return layer


BLACK, NO_WORDS = torch.zeros(4, 3, dtype=torch.uint8), torch.zeros(4, 2).long()


@pytest.mark.parametrize(
    ("make", "layer", "blank", "others"),
    [
        (OfBytes, SquaredWeight, BLACK, ["net.0.weight"]),
        (OfBytes, scaled_by_a_hook, BLACK, ["net.0.weight"]),
        (OfBytes, Watched, BLACK, []),
        (of_padding, Tripled, NO_WORDS, ["0.weight"]),
        (of_padding, nn.Embedding, NO_WORDS, []),
    ],
)
def test_what_has_no_gradient_is_tried_by_itself(make, layer, blank, others):
    model = seeded(partial(make, layer)).eval()
    assert Forms.of(model, Inputs((blank,))).others == others


class Silence(TwoLayers):
    """Fails on anything that is not a loudness, or not a mask."""

    def forward(self, x, mask):
        x, mask = self.fc(x.sqrt()).tanh(), torch.tensor([1, 0])[mask.long()]
        return self.head(x * mask.unsqueeze(1))


def test_the_first_batch_is_taken_as_it_is():
    blank = torch.zeros(4, 3), torch.zeros(4)
    assert not Forms.of(Silence().eval(), Inputs(blank)).others


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift, self.head = nn.Parameter(randn(0, 1, 3)), nn.Linear(3, 3)

    def forward(self, x):
        return self.head((x + self.shift).tanh())


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_row_that_is_added_to_an_examples_parts(parts):
    class Parts(Shifted):
        def forward(self, x):
            return self.head((x + self.shift).tanh().mean(1))

    x = randn(1, 5, parts, 3)
    check_exact(seeded(Parts), x, diagonal={"shift"}, slow={"shift"})


def test_a_gradient_that_is_only_rounding_shows_nothing():
    """A bias before a norm of its own channel."""
    model = seeded(lambda: after_conv(nn.GroupNorm(4, 4), bias=True))
    assert not Forms.of(model.eval(), Inputs((IMAGES,))).others


def test_a_compiled_model_has_the_fisher_of_its_module():
    model, x = seeded(small_net), randn(1, 5, *SMALL_SHAPE)
    want, got = fisher(model, [x]), fisher(torch.compile(model, backend="eager"), [x])
    assert all(isinstance(block, Kronecker) for block in got.blocks())
    assert got.trace() == want.trace()


class RankOne(nn.Module):
    """A low-rank adapter whose second factor is 0, as adapters begin."""

    def __init__(self):
        super().__init__()
        self.A = nn.Parameter(randn(0, 1, 3))
        self.B, self.head = nn.Parameter(torch.zeros(1, 3)), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(x) + x @ self.A.T @ self.B


def test_an_adapter_of_rank_one_has_its_diagonal():
    check_exact(seeded(RankOne), VECTORS, diagonal={"A", "B"}, slow={"A", "B"})


class Shortened(nn.Module):
    """It shortens the rows that it looks up, in its table itself."""

    def __init__(self, table):
        super().__init__()
        self.table, self.head = table(7, 4, max_norm=0.5), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.table(x).reshape(len(x), -1, 4).tanh().mean(1))


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_parameters_that_a_forward_pass_changes_are_as_before(table):
    model = seeded(partial(Shortened, table))
    before = model.table.weight.detach().clone()
    fisher(model, [TOKENS])
    assert torch.equal(model.table.weight, before)
    model(TOKENS)
    assert not torch.equal(model.table.weight, before)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_scripted_model_has_the_diagonal_of_its_module():
    model = seeded(Shifted)
    found = fisher(torch.jit.script(model), [VECTORS], options=EXACT).diagonal()
    for name, entries in diagonal_fisher(model, VECTORS).items():
        assert relative(found[name], entries) < 1e-5
