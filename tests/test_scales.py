"""The scale of layers in front of batch norms: taken over from what was sent."""

import copy
import itertools
import logging
from functools import partial

import pytest
import torch
from oracles import randn
from test_pairings import asked
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader
from virtual import (
    Watched,
    ask,
    start,
    tensors_of,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import LocalSGD, fisher_arrays
from flwr_fisher.merge import align_scales
from flwr_fisher.params import shared_state, weighted_mean
from flwr_fisher.server.privacy import Privacy
from flwr_fisher.strategies import FedFisherOneShot
from flwr_fisher.wire import PREFIX, arrays_to_tensors


class Beside(nn.Module):
    """A layer whose output is used beside its norm, too."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        y = self.fc(x)
        return self.head(self.norm(y).relu() + y)


class Shared(nn.Module):
    """A layer that two norms follow."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.second(self.fc(self.first(self.fc(x)).relu()))


def net(*layers):
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


# What is aligned, all its layers that are, an input's shape
ALIGNED = {
    "linear": (lambda: net(nn.Linear(4, 5), nn.BatchNorm1d(5)), ["0"], (4,)),
    "no bias": (
        lambda: net(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)),
        ["0"],
        (2, 5, 5),
    ),
    "grouped": (
        lambda: net(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8)),
        ["0"],
        (4, 5, 5),
    ),
    "depthwise": (
        lambda: net(
            nn.Conv2d(2, 4, 1),
            nn.BatchNorm2d(4),
            nn.Hardswish(),
            nn.Conv2d(4, 4, 3, groups=4),
            nn.BatchNorm2d(4, momentum=None),
        ),
        ["0", "3"],
        (2, 5, 5),
    ),
    "1d": (lambda: net(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)), ["0"], (2, 6)),
    "3d": (
        lambda: net(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4, affine=False)),
        ["0"],
        (2, 3, 3, 3),
    ),
    "synchronised": (lambda: net(nn.Linear(4, 5), nn.SyncBatchNorm(5)), ["0"], (4,)),
    "a bias that is frozen": (
        lambda: frozen(net(nn.Linear(4, 5), nn.BatchNorm1d(5)), "0.bias"),
        [],
        (4,),
    ),
    "frozen": (
        lambda: frozen(net(nn.Linear(4, 5), nn.BatchNorm1d(5)), "0.weight", "0.bias"),
        [],
        (4,),
    ),
    "parametrised": (
        lambda: net(weight_norm(nn.Linear(4, 5)), nn.BatchNorm1d(5)),
        [],
        (4,),
    ),
    "transposed": (
        lambda: net(nn.ConvTranspose1d(2, 4, 3), nn.BatchNorm1d(4)),
        [],
        (2, 6),
    ),
    "something between": (
        lambda: net(nn.Linear(4, 5), nn.ReLU(), nn.BatchNorm1d(5)),
        [],
        (4,),
    ),
    "over time": (lambda: net(nn.Linear(4, 4), nn.BatchNorm1d(4)), [], (4, 4)),
    "no statistics": (
        lambda: net(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False)),
        [],
        (4,),
    ),
    "other norms": (lambda: net(nn.Linear(4, 6), nn.GroupNorm(2, 6)), [], (4,)),
    "used beside": (Beside, [], (4,)),
    "two norms": (Shared, [], (4,)),
}


def frozen(model, *names):
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def trained(make, shape, seed=0, dtype=torch.float64):
    """A model at scales of its own, as it was before, and inputs."""
    torch.manual_seed(0)
    model, x = make(), randn(seed, 16, *shape).double()
    model.to(torch.float64)(x)  # lazy layers
    start = {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            rows = torch.rand(len(parameter), generator=generator, dtype=torch.float64)
            shape = [-1, *(1 for _ in parameter.shape[1:])]
            parameter.mul_((0.2 + 3 * rows).reshape(shape))
    for _ in range(20):
        model(x)
    return model.to(dtype), {k: v.to(dtype) for k, v in start.items()}, x.to(dtype)


@pytest.mark.parametrize("name", ALIGNED)
def test_outputs_stay_and_variances_are_those_that_were_sent(name):
    make, expected, shape = ALIGNED[name]
    model, start, x = trained(make, shape)
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    wanted = copy.deepcopy(model).eval()(x)
    assert align_scales(model, [x], start) == expected
    torch.testing.assert_close(copy.deepcopy(model).eval()(x), wanted)
    assert all(module.training for module in model.modules())
    own, names = model.state_dict(), list(model._modules)
    for layer, norm in itertools.pairwise(names):
        if layer in expected:
            assert torch.equal(own[f"{norm}.running_var"], start[f"{norm}.running_var"])
            assert not torch.equal(own[f"{layer}.weight"], before[f"{layer}.weight"])
    if not expected:
        assert all(torch.equal(own[key], value) for key, value in before.items())


def test_clients_that_differ_in_scale_alone_are_merged_as_one():
    make, _, shape = ALIGNED["depthwise"]
    clients, x = [], randn(0, 16, *shape).double()
    for seed in range(3):
        model, start, _ = trained(make, shape)
        # One function, at other scales: as one client, after another's scale.
        other = {k: v.clone() for k, v in start.items()}
        scale = 0.1 + torch.rand(4, generator=torch.Generator().manual_seed(seed))
        other["1.running_var"] = scale.double()
        align_scales(model, [x], other)
        clients.append(model)
    wanted = clients[0].eval()(x)
    for model in clients:
        torch.testing.assert_close(model.eval()(x), wanted)
    merged = copy.deepcopy(clients[0]).eval()

    def mean():
        merged.load_state_dict(
            weighted_mean([shared_state(m) for m in clients], [1.0] * 3), strict=False
        )
        return merged(x)

    assert (mean() - wanted).abs().max() > 0.01 * wanted.abs().max()
    for model in clients:
        align_scales(model, [x], start)
    torch.testing.assert_close(mean(), wanted)


def test_a_channel_that_is_hardly_used_is_not_blown_up():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3)).eval()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    model[1].running_var.copy_(torch.tensor([1.0, 1.0, 0.0]))
    x = randn(0, 4, 3)
    wanted = model(x)
    assert align_scales(model, [x], start) == ["0"]
    factors = model[0].weight.norm(dim=1) / start["0.weight"].norm(dim=1)
    torch.testing.assert_close(factors, torch.tensor([1.0, 1.0, 10.0]))
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
    assert model[1].running_var[2] < 1


def test_a_channel_that_is_far_above_the_others_comes_down():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3)).eval()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    model[1].running_var.copy_(torch.tensor([1.0, 1.0, 1e4]))
    x = randn(0, 4, 3)
    assert align_scales(model, [x], start) == ["0"]
    assert torch.equal(model[1].running_var, start["1.running_var"])
    factors = model[0].weight.norm(dim=1) / start["0.weight"].norm(dim=1)
    torch.testing.assert_close(factors, torch.tensor([1.0, 1.0, 1e-2]))


def test_what_is_used_elsewhere_alone_keeps_its_scale(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Beside())
    model, start, x = trained(lambda: model, (4,))
    with caplog.at_level(logging.INFO):
        assert align_scales(model, [x], start) == ["0"]
    assert "2.fc" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_works_in_any_precision(dtype):
    make, expected, shape = ALIGNED["depthwise"]
    model, start, x = trained(make, shape, dtype=dtype)
    assert align_scales(model, [x], start) == expected
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_a_compiled_model_is_aligned():
    make, expected, shape = ALIGNED["linear"]
    model, start, x = trained(make, shape)
    plain = copy.deepcopy(model)
    model.compile(backend="eager")
    model(x), plain(x)
    assert align_scales(model, [x], start) == expected
    align_scales(plain, [x], start)
    torch.testing.assert_close(model[0].weight, plain[0].weight)


def test_norms_of_which_nothing_was_sent_and_empty_loaders_are_left_alone():
    model, start, x = trained(*ALIGNED["linear"][::2])
    assert align_scales(model, [x], {}) == []
    assert align_scales(model, [], start) == []


# Before a client's Fisher

FISHER, ALIGN = {"structure": "kfac"}, {"align-scales": 1}
SENT = "1.running_var"
PRIVATE = {
    "structure": "diagonal",
    "aggregate": "sums",
    "privacy": Privacy(clipping_norm=1.0, noise_multiplier=1.0),
}


def test_a_client_uploads_the_scale_that_was_sent():
    make = partial(tiny_client, 2, train_fn=LocalSGD(lr=0.5))
    own, aligned = (
        tensors_of(ask(make(), config=FISHER | also)) for also in ({}, ALIGN)
    )
    sent = arrays_to_tensors(tiny_arrays())
    assert not torch.allclose(own[SENT], sent[SENT], 1e-3)
    torch.testing.assert_close(aligned[SENT], sent[SENT])
    x, _ = tiny_data(2).tensors
    outputs = []
    for state in (own, aligned):
        model = tiny_model().eval()
        model.load_state_dict({k: state[k] for k in model.state_dict()})
        outputs.append(model(x))
    torch.testing.assert_close(*outputs)
    keys = [k for k in own if k.startswith(PREFIX)]  # the uploaded model's Fisher
    assert any(not torch.allclose(own[k], aligned[k]) for k in keys)


def test_nothing_is_asked_for_under_noise():
    for options, wanted in (({}, True), (PRIVATE, False)):
        app = Watched()
        start(FedFisherOneShot(fraction_evaluate=0.0, **options), app)
        assert ["align-scales" in config for config in app.configs][:3] == [wanted] * 3


def test_a_model_of_ones_own_is_afterwards_what_it_was():
    model, loader = tiny_model(), DataLoader(tiny_data(2), batch_size=4)
    message, context = asked(**FISHER, **ALIGN)
    LocalSGD(lr=0.5)(model, loader, torch.device("cpu"), {})
    before = {k: v.clone() for k, v in model.state_dict().items()}
    uploaded = arrays_to_tensors(fisher_arrays(message, context, model, loader))
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert not torch.equal(uploaded[SENT], before[SENT])
    torch.testing.assert_close(uploaded[SENT], arrays_to_tensors(tiny_arrays())[SENT])
