"""`TangentFeatures` against per-example autograd of a network with a head by hand."""

import copy
from functools import partial

import pytest
import rivals_path  # noqa: F401
import torch
from nets import (
    IMAGES,
    NETS,
    SERIES,
    VECTORS,
    Tied,
    TiedLinear,
    TwoLayers,
    Unused,
    freeze,
    with_statistics,
)
from oracles import randn, relative, seeded, small_net
from tasks import make_model
from torch import nn

from flwr_fisher.errors import ConfigurationError, StructureError, UnknownNameError
from flwr_fisher.tangent import TangentFeatures
from flwr_fisher.tangent import feature_engine as tangent_engine

ALL = 10**9


def by_hand(features, model, x):
    """Return every feature of every example, one backward pass at a time, float64.

    The new head's weights are taken from the features; the rest is done anew.
    """
    twin = copy.deepcopy(model).double().eval()
    old = twin.get_submodule(features.head)
    new = nn.Linear(old.in_features, 1, bias=old.bias is not None).double()
    drawn = features._network.get_submodule(features.head)
    with torch.no_grad():
        for mine, its in zip(new.parameters(), drawn.parameters(), strict=True):
            mine.copy_(its)
    if features.head:
        twin.set_submodule(features.head, new)
    else:
        twin = new
    parameters = [p for p in twin.parameters() if p.requires_grad]
    rows = []
    for example in x.double() if x.is_floating_point() else x:
        output = twin(example.unsqueeze(0)).squeeze()
        found = torch.autograd.grad(output, parameters, allow_unused=True)
        pairs = zip(parameters, found, strict=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in pairs]
        rows.append(torch.cat([g.flatten() for g in filled]))
    return torch.stack(rows)


def coordinates(features, total):
    """Return the places of the features among all, from the public numbers alone."""
    assert features.num_features <= total
    start, places = 0, []
    for name, p in features._network.named_parameters():
        if not p.requires_grad:
            continue
        if name in features._chosen:
            places.append(features._chosen[name].entries + start)
        start += p.numel()
    assert start == total
    return torch.cat(places)


class OwnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(3, 3), nn.Linear(3, 4)
        self.temperature = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, x):
        return self.head((self.fc(x) * self.temperature).tanh())


class Sorted(TwoLayers):
    """Sorts its examples, as for a packed sequence, and unsorts its outputs."""

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.head(self.fc(x[order]).tanh()[order.argsort()])


class TiedBelow(nn.Module):
    def __init__(self):
        super().__init__()
        self.tied, self.head = TiedLinear(), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.tied(x).tanh())


def conv(*layers, width):
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(width, 3))


def dropout():
    layers = nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)
    return nn.Sequential(*layers)


SHARED = [
    *("linear", "small", "over time", "over time, no bias", "embedding", "layer norm"),
    *("group norm", "attention", "encoder", "slopes", "called twice", "used outside"),
    *("not called", "folded", "time first", "squared", "fewer inputs", "pads itself"),
    *("weight norm", "in place", "frozen weight", "frozen bias", "frozen layer"),
]
CASES = {
    **{name: NETS[name][:2] for name in SHARED},
    "lenet": (
        lambda: make_model("lenet-bias", shape=(1, 8, 8), num_classes=3),
        randn(6, 3, 1, 8, 8),
    ),
    "groups": (lambda: conv(nn.Conv2d(2, 4, 2, groups=2), width=16), IMAGES),
    "dilation": (lambda: conv(nn.Conv2d(2, 3, 2, dilation=2), width=3), IMAGES),
    "padding": (
        lambda: conv(
            nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect"), width=27
        ),
        IMAGES,
    ),
    "conv1d": (lambda: conv(nn.Conv1d(5, 3, 2), width=6), SERIES),
    "batch norm": (
        lambda: conv(nn.Conv2d(2, 4, 2), with_statistics(nn.BatchNorm2d(4)), width=16),
        IMAGES,
    ),
    "dropout": (dropout, VECTORS),
    "own parameter": (OwnParameter, VECTORS),
    "tied below the head": (TiedBelow, VECTORS),
    "sorted": (Sorted, VECTORS[VECTORS[:, 0].argsort()][[0, 4, 2, 3, 1]]),
}


# --- the numbers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_all_coordinates_are_the_gradient_and_some_are_entries_of_it(name):
    make, x = CASES[name]
    model = seeded(make)
    features = TangentFeatures(copy.deepcopy(model).double(), ALL, seed=3)
    want, total = by_hand(features, model, x), features.num_features
    got = features(x.double() if x.is_floating_point() else x)
    assert got.dtype == torch.float64
    assert want.norm() > 0
    assert relative(got, want) < 1e-10
    assert total == want.shape[1]
    features = TangentFeatures(model, total // 2, seed=4)
    got = features(x)
    assert got.dtype == torch.float32
    assert got.shape == (len(x), total // 2)
    places = coordinates(features, total)
    assert (places.diff() > 0).all()
    assert relative(got, by_hand(features, model, x)[:, places]) < 1e-5


def test_a_log_softmax_behind_the_head_has_no_part():
    body = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)]
    model = seeded(lambda: nn.Sequential(*body))
    wrapped = nn.Sequential(*body, nn.LogSoftmax(dim=1), nn.ReLU(inplace=True))
    features = TangentFeatures(wrapped, ALL)
    assert features.head == "2"
    assert torch.equal(features(VECTORS), TangentFeatures(model, ALL)(VECTORS))


def test_parts_of_a_batch_change_nothing(monkeypatch):
    for make, x in (CASES["embedding"], CASES["small"]):
        features = TangentFeatures(seeded(make).double(), 25)
        x = x.double() if x.is_floating_point() else x
        whole = features(x)
        one_by_one = torch.cat([features(x[i : i + 1]) for i in range(len(x))])
        assert relative(one_by_one, whole) < 1e-12
        monkeypatch.setattr(tangent_engine, "_AT_ONCE", 1)
        monkeypatch.setattr(tangent_engine, "_PRODUCTS", {"cpu": 1})
        parts = TangentFeatures(seeded(make).double(), 25)
        assert relative(parts(x), whole) < 1e-12
        assert parts._engine.chunk == 1
        monkeypatch.undo()


def test_beginning_with_one_example():
    """What is settled on the first batch holds for those that are larger."""
    for name in ("folded", "time first", "batch norm"):
        make, x = CASES[name]
        features = TangentFeatures(seeded(make), ALL)
        features(x[:1])
        assert relative(features(x), by_hand(features, seeded(make), x)) < 1e-5


def test_without_gradients_and_in_inference_mode():
    want = TangentFeatures(seeded(dropout), 20)(VECTORS)
    with torch.no_grad():
        assert torch.equal(TangentFeatures(seeded(dropout), 20)(VECTORS), want)
    with torch.inference_mode():
        x = VECTORS.clone()
        assert torch.equal(TangentFeatures(seeded(dropout), 20)(x), want)
    assert not want.requires_grad
    x = VECTORS.clone().requires_grad_()
    assert not TangentFeatures(seeded(dropout), 20)(x).requires_grad


def test_half_precision_gives_single():
    model = seeded(dropout).bfloat16()
    features = TangentFeatures(model, ALL)
    got = features(VECTORS.bfloat16())
    assert got.dtype == features.dtype == torch.float32
    assert relative(got, by_hand(features, model, VECTORS.bfloat16())) < 0.03


# --- what is drawn --------------------------------------------------------------------


def test_coordinates_are_drawn_evenly():
    model, counts = nn.Linear(39, 2), torch.zeros(40)
    for seed in range(200):
        counts[coordinates(TangentFeatures(model, 10, seed=seed), 40)] += 1
    assert counts.sum() == 2000
    assert counts.min() > 25
    assert counts.max() < 80


def test_the_new_head_is_distributed_as_linear_layers_are():
    model = nn.Sequential(nn.Linear(3, 10_000), nn.ReLU(), nn.Linear(10_000, 2))
    head = TangentFeatures(model, 10)._network.get_submodule("2").requires_grad_(False)
    usual = seeded(lambda: nn.Linear(10_000, 1)).weight.detach()
    assert head.weight.shape == (1, 10_000)
    assert head.bias.shape == (1,)
    assert head.weight.abs().max() <= 0.01
    assert head.bias.abs() <= 0.01
    assert float(head.weight.std() / usual.std()) == pytest.approx(1, abs=0.02)
    assert abs(float(head.weight.mean())) < 2e-4


def test_the_digest_is_not_of_the_values():
    first, second = seeded(small_net, 1), seeded(small_net, 2).double()
    digests = {TangentFeatures(m, 30, seed=5).digest for m in (first, second)}
    assert len(digests) == 1
    assert TangentFeatures(first, 30, seed=5, head="7").digest in digests


def test_the_digest_is_of_all_else():
    model = seeded(small_net)
    wider = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
    renamed = nn.Sequential(nn.Identity(), *wider)
    partly = freeze(copy.deepcopy(wider), "0.bias")
    found = [
        TangentFeatures(model, 30),
        TangentFeatures(model, 30, seed=1),
        TangentFeatures(model, 31),
        TangentFeatures(model, 30, head="5"),
        TangentFeatures(wider, ALL),
        TangentFeatures(renamed, ALL),
        TangentFeatures(partly, ALL),
    ]
    assert len({features.digest for features in found}) == len(found)
    # More features than there are make no difference.
    assert TangentFeatures(wider, 10**6).digest == TangentFeatures(wider, ALL).digest


# --- what is left alone ---------------------------------------------------------------


def test_values_are_those_at_construction():
    model = seeded(dropout)
    features = TangentFeatures(model, 20)
    want = features(VECTORS)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert torch.equal(features(VECTORS), want)
    assert not torch.equal(TangentFeatures(model, 20)(VECTORS), want)


# --- the head -------------------------------------------------------------------------


class OutOfOrder(nn.Module):
    """Its last linear layer in definition is not the last that is called."""

    def __init__(self, width=3):
        super().__init__()
        self.head, self.fc = nn.Linear(width, 4), nn.Linear(3, width)

    def forward(self, x):
        return self.head(self.fc(x).tanh())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(x) + self.fc(-x)


def test_the_head_is_found_or_named():
    found = TangentFeatures(small_net(), 10)
    assert (found.head, found.num_classes, found.seed) == ("7", 3, 0)
    named = TangentFeatures(OutOfOrder(), 10, head="head")
    assert (named.head, named.num_classes) == ("head", 4)
    named(VECTORS)
    lonely = TangentFeatures(nn.Linear(3, 4), ALL)
    assert (lonely.head, lonely.num_classes, lonely.num_features) == ("", 4, 4)


def test_a_head_in_the_middle_is_the_end():
    """A named head need not be last; what follows it does not matter."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(0)))
    assert torch.equal(TangentFeatures(model, ALL, head="0")(VECTORS)[:, :3], VECTORS)


def on(x, make, **options):
    return lambda: TangentFeatures(make(), 10, **options)(x)


REFUSED = [
    (on(IMAGES, lambda: nn.Conv2d(1, 2, 3)), StructureError, r"nn\.Linear"),
    (on(VECTORS, small_net, head="fc"), UnknownNameError, "'fc'; known: 5, 7"),
    (on(VECTORS, small_net, head="0"), UnknownNameError, "head '0'; known: 5, 7"),
    (on(VECTORS, Tied), StructureError, "'head' shares .* 'embedding'"),
    (on(VECTORS, OutOfOrder), StructureError, "'head' is called after 'fc'"),
    (on(VECTORS, lambda: OutOfOrder(1)), StructureError, "'head' is called after 'fc'"),
    (on(VECTORS, OutOfOrder, head="fc"), StructureError, "fails after its head 'fc'"),
    (on(randn(0, 2, 1, 9, 9), small_net), RuntimeError, "mat1 and mat2"),
    (on(VECTORS, Twice), StructureError, "'fc' is called 2 times"),
    (on(VECTORS, Unused), StructureError, "'spare' is called 0 times"),
    *(
        (partial(TangentFeatures, small_net(), n), ConfigurationError, "num_features")
        for n in (0, -1, float("nan"))
    ),
    # Examples that are not independent, outputs that are not one an example
    (on(VECTORS, lambda: Centred()), StructureError, "other examples"),
    (on(VECTORS[:1], lambda: Centred()), StructureError, "other examples"),
    (on(SERIES, lambda: OverTimeHead()), StructureError, r"\(4, 5, 1\) for 4"),
]


@pytest.mark.parametrize(("call", "error", "culprit"), REFUSED)
def test_what_has_no_features_is_named(call, error, culprit):
    with pytest.raises(error, match=culprit):
        call()


# --- examples -------------------------------------------------------------------------


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x - x.mean(0))


class OverTimeHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(x).mean(1)
