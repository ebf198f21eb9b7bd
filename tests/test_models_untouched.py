"""Whatever takes a model leaves it bit for bit as it was, also where it fails."""

import copy
import random
from contextlib import suppress
from itertools import count, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import FakeQuantize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset

from flwr_fisher.client import LocalSGD, cross_entropy, score
from flwr_fisher.curvature import (
    STRUCTURES,
    fisher,
    fisher_plan,
    gradient,
    gradient_and_hvp,
    hvp,
)
from flwr_fisher.errors import StructureError
from flwr_fisher.params import shared_state
from flwr_fisher.randomness import generator_states, seeded
from flwr_fisher.tangent import TangentFeatures, head_sums

CPU = torch.device("cpu")
X, Y = torch.randn(6, 5), torch.randint(0, 3, (6,))
BAD = torch.full_like(X, float("nan"))


class TwoNames(nn.Module):
    """A module that is held under two names."""

    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([self.enc])
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.blocks[0](x)))


class Twice(TwoNames):
    """A module that is called twice."""

    def forward(self, x):
        return self.head(torch.tanh(self.enc(torch.tanh(self.enc(x)))))


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = (nn.Linear(5, n) for n in (5, 5, 3))
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Convolved(nn.Module):
    """A convolution that is held under two names, behind a batch norm and dropout."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 2)
        self.same = nn.ModuleList([self.conv])
        self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.same[0](x.unsqueeze(1)))).flatten(1))


class Changing(nn.Module):
    """Its forward, in eval mode, too, changes all that a forward can change."""

    def __init__(self):
        super().__init__()
        self.slow = nn.Linear(5, 5).requires_grad_(False)  # a momentum encoder
        self.one, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(5))
        self.last, self.steps, self.all, self.by_name = None, 0, [], {"pairs": []}
        self.draw, self.other = torch.Generator(), np.random.default_rng(1)
        self.old, self.more = np.random.RandomState(1), [torch.Generator()]
        self.sums = torch.zeros(5), [torch.zeros(5)], np.zeros(5)

    def forward(self, x):
        x.detach().clamp_(-1, 1)
        with torch.no_grad():
            self.one.weight.clamp_(-0.1, 0.1)
            self.head.weight.data.clamp_(-0.1, 0.1)
            self.slow.weight.data = 0.9 * self.slow.weight + self.one.weight.detach()
            self.slow.bias.mul_(0.9)
            for each in (self.sums[0], self.sums[1][0], self.sums[2]):
                each += 1
        self.last = self.one(x)
        self.calls += 1
        self.steps += 1
        self.all.append(self.last)
        self.pair = self.last, self.last
        self.by_name["pairs"].append(self.pair)
        drawn = np.random.rand() + self.other.random()  # noqa: NPY002
        drawn += torch.rand((), generator=self.draw) + self.old.rand()
        drawn += torch.rand((), generator=self.more[0])
        self.mean = 0.9 * self.mean + torch.rand(5) * drawn * random.random()
        return self.head(torch.tanh(self.last))


class Merging(nn.Module):
    """Low-rank factors, which are a part of the frozen weight in eval mode."""

    def __init__(self):
        super().__init__()
        self.one, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.one.weight.requires_grad_(False)
        self.low, self.high = (nn.Parameter(torch.rand(2, 5)) for _ in range(2))
        self.merged = False

    def train(self, mode=True):
        if self.merged is mode:
            sign = -1 if mode else 1
            self.one.weight.data += sign * (self.high.T @ self.low).detach()
        self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        y = self.one(x) if self.merged else self.one(x) + x @ self.low.T @ self.high
        return self.head(torch.tanh(y))


class Unmerged(Merging):
    train = nn.Module.train


def test_factors_that_eval_mode_merges_have_their_curvature():
    torch.manual_seed(0)
    model, plain = Merging(), Unmerged()
    plain.load_state_dict(model.state_dict())
    for structure in STRUCTURES:
        got, want = (fisher(m, [X], structure=structure) for m in (model, plain))
        for name, value in want.diagonal().items():
            assert torch.equal(got.diagonal()[name], value)
    model.eval()  # as a loop may leave it
    merged = model.one.weight.clone()
    got, want = (gradient(m, [(X, Y)])[0]["low"] for m in (model, plain))
    torch.testing.assert_close(got, want)
    assert got.abs().max() > 0
    assert model.merged
    assert torch.equal(model.one.weight, merged)


class Checkpointed(TwoNames):
    def forward(self, x):
        return checkpoint(self.head, self.enc(x), use_reentrant=True)


class CheckpointedFirst(TwoNames):
    """Of inputs with a gradient: torch raises no error, and leaves `enc` out."""

    def forward(self, x):
        return self.head(checkpoint(self.enc, x.requires_grad_(), use_reentrant=True))


class Caching(TwoNames):
    """Keeps a weight that it has computed."""

    weight = None

    def forward(self, x):
        self.weight = self.head.weight**2 if self.weight is None else self.weight
        return F.linear(self.enc(x), self.weight)


def made_in_inference_mode():
    with torch.inference_mode():
        return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("function", "make", "text"),
    [
        (fisher, Checkpointed, "pass use_reentrant=False to checkpoint"),
        (gradient, Checkpointed, "pass use_reentrant=False to checkpoint"),
        (fisher, CheckpointedFirst, "pass use_reentrant=False to checkpoint"),
        (gradient, CheckpointedFirst, "pass use_reentrant=False to checkpoint"),
        (gradient_and_hvp, CheckpointedFirst, "pass use_reentrant=False"),
    ],
)
def test_what_torch_refuses_is_said_of_the_model(function, make, text):
    with pytest.raises(StructureError, match=text):
        function(make(), [(X, Y)])


MODELS = {
    make.__name__: make
    for make in (TwoNames, Twice, Tied, Convolved, Changing, Merging)
}


def structures(model, x):
    for structure in (*STRUCTURES, ["kfac", "diagonal"]):
        fisher(model, [(x, Y)], structure=structure)


def nngeometry(model, x):
    with suppress(StructureError):  # of what it does not know
        for structure in STRUCTURES:
            fisher(model, x.split(2), structure=structure, engine="nngeometry")


class Torn:
    """Data that fail after their first batch."""

    def __init__(self, x):
        self.x = x

    def __iter__(self):
        yield self.x[:2]
        raise ZeroDivisionError("the disk is gone")


def broken(model, x):
    """A Fisher whose data fail, or the model from one of its first calls on."""
    for structure, call in product(STRUCTURES, (None, 0, 1, 2)):
        calls = count()

        def fail(*_, call=call, calls=calls):
            if call is not None and next(calls) >= call:
                raise ZeroDivisionError("the model broke")

        own = model.head.register_forward_hook(fail)
        failed = pytest.raises((ZeroDivisionError, RuntimeError, ValueError))
        with failed, torch.set_grad_enabled(call != 1):
            data = Torn(x) if call is None else x.split(2)
            fisher(model, data, structure=structure)
        own.remove()


FUNCTIONS = {
    "fisher": structures,
    "nngeometry": nngeometry,
    "broken": broken,
    "sampled": lambda m, x: fisher(m, [(x, Y)], expectation="sampled"),
    "empirical": lambda m, x: fisher(
        m, [(x, Y)], structure="diagonal", expectation="empirical-batch"
    ),
    "plan": fisher_plan,
    "gradient": lambda m, x: gradient(m, [(x, Y)]),
    "hvp": lambda m, x: (gradient_and_hvp(m, [(x, Y)]), hvp(m, [(x, Y)], 3)),
    "features": lambda m, x: TangentFeatures(m, 12)(x),
    "head": lambda m, x: head_sums(m, [(x, Y)], "head"),
    "score": lambda m, x: score(m, [(x, Y)], CPU, F.cross_entropy),
    "state": lambda m, x: shared_state(m),
}


def facts(model):
    """Return all that a user could see of a model."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {
        "objects": {name: id(p) for name, p in named.items()},
        "kinds": {name: (type(p), p.requires_grad) for name, p in named.items()},
        "grads": {name: (id(p.grad), repr(p.grad)) for name, p in named.items()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "hooks": {
            (name, kind): len(hooks)
            for name, module in model.named_modules()
            for kind, hooks in vars(module).items()
            if kind.endswith("_hooks") and hooks is not None
        },
        "enabled": torch.is_grad_enabled(),
        "own": {n: held(vars(m)) for n, m in model.named_modules()},
        "sums": repr(vars(model).get("sums")),
        "draws": [g.get_state().tolist() for g in drawing(model, torch.Generator)],
        "old": [repr(g.get_state()) for g in drawing(model, np.random.RandomState)],
        "others": [
            repr(g.bit_generator.state) for g in drawing(model, np.random.Generator)
        ],
    }


def drawing(model, kind):
    own = [*vars(model).values(), *vars(model).get("more", [])]
    return [each for each in own if isinstance(each, kind)]


def held(value):
    """Return which objects lists and dicts hold, and those within them."""
    if isinstance(value, dict):
        return {key: held(each) for key, each in value.items()}
    return list(map(held, value)) if isinstance(value, list) else id(value)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_model_is_afterwards_what_it_was(make, function):
    model = make().train()
    model.head.eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before, state = facts(model), {k: v.clone() for k, v in model.state_dict().items()}
    numbers, given = repr(generator_states()), X.clone()
    for x in (X, BAD, X[:, :4]):
        try:
            function(model, x)
        except Exception:
            assert x is not X
        assert facts(model) == before
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name])
        assert repr(generator_states()) == numbers
        assert torch.equal(X, given)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_what_was_taken_before_is_trained_as_ever(make):
    torch.manual_seed(0)
    one, other = make(), make()
    other.load_state_dict(one.state_dict())
    for function in FUNCTIONS.values():
        function(one, X)
    for model in (one, other):
        with seeded(0):
            LocalSGD(epochs=2)(model, [(X, Y)], CPU, {})
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


@pytest.mark.parametrize("examples", [None, 3])
def test_a_loader_shuffles_afterwards_as_ever(examples):
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(X, Y), 2, shuffle=True, generator=own)
    state = own.get_state()
    for structure in ("kfac", "ekfac"):
        fisher(nn.Linear(5, 3), loader, structure=structure, examples=examples)
        assert torch.equal(own.get_state(), state)


class Epochs(Sampler):
    """A sampler that counts its epochs, as accelerate's does."""

    epoch = 0

    def __len__(self):
        return 2

    def __iter__(self):
        self.epoch += 1
        return iter([self.epoch % 3, self.epoch % 2])


class Noise:
    """A transform with generators of its own."""

    def __init__(self):
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)
        self.older = np.random.RandomState(0)

    def __call__(self, x):
        return x + self.numpy.normal() + self.python.random() + self.older.normal()


class Compose:
    """What torchvision's is made of."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for each in self.transforms:
            x = each(x)
        return x


class Noisy(Dataset):
    def __init__(self):
        self.transform = Compose([Noise()])
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return self.transform(X[i]) + torch.randn((), generator=self.generator), Y[i]


@pytest.mark.parametrize(
    "read",
    [
        fisher,
        lambda model, loader: fisher(model, loader, examples=2),
        lambda model, loader: fisher(model, loader, structure="ekfac"),
        gradient,
        lambda model, loader: score(model, loader, CPU, cross_entropy),
    ],
)
def test_a_loader_gives_afterwards_what_it_would_have_given(read):
    def make():
        return DataLoader(Subset(Noisy(), range(3)), 2, sampler=Epochs())

    loader = make()
    read(nn.Linear(5, 3), loader)
    for one, other in zip([*loader, *loader], [*(twin := make()), *twin], strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.filterwarnings("ignore:.*quantization:DeprecationWarning")
def test_ranges_for_quantisation_are_those_of_the_training():
    """In eval mode, torch widens them by each batch."""
    model = nn.Sequential(nn.Linear(5, 4), FakeQuantize(), nn.Linear(4, 3))
    model(X)
    before = copy.deepcopy(model.state_dict())
    found = [fisher(model, batches) for batches in ([100 * X], (100 * X).split(1))]
    assert torch.allclose(found[1].to_dense(), found[0].to_dense(), rtol=1e-4)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("workers", "examples"),
    [({"num_workers": 1}, 2), ({"num_workers": 1, "persistent_workers": True}, None)],
)
def test_workers_begin_with_the_same_order(workers, examples):
    def make():
        generator, data = torch.Generator().manual_seed(0), TensorDataset(X, Y)
        return DataLoader(data, 2, shuffle=True, generator=generator, **workers)

    loader = make()
    fisher(nn.Linear(5, 3), loader, examples=examples)
    for one, other in zip(loader, make(), strict=True):
        assert torch.equal(one[0], other[0])


class Together:
    """Several loaders, one after another."""

    def __init__(self, hold):
        generators = [torch.Generator().manual_seed(i) for i in range(2)]
        data, options = TensorDataset(X, Y), {"shuffle": True, "batch_size": 2}
        self.parts = hold(
            [DataLoader(data, generator=g, **options) for g in generators]
        )

    def __iter__(self):
        parts = self.parts.values() if isinstance(self.parts, dict) else self.parts
        for part in parts:
            yield from part


@pytest.mark.parametrize("hold", [list, tuple, lambda parts: dict(enumerate(parts))])
def test_several_loaders_shuffle_afterwards_as_ever(hold):
    loader = Together(hold)
    fisher(nn.Linear(5, 3), loader)
    for one, other in zip(loader, Together(hold), strict=True):
        assert torch.equal(one[0], other[0])


def test_an_iterator_of_persistent_workers_goes_on():
    data = TensorDataset(X, Y)
    loader = DataLoader(data, 1, num_workers=1, persistent_workers=True)
    begun = iter(loader)
    next(begun)
    fisher(nn.Linear(5, 3), loader)
    assert torch.equal(next(begun)[0], X[1:2])
    assert iter(loader) is begun  # its workers are still there


def in_train_mode(module, grads):
    assert module.training  # as opacus's hooks expect


@pytest.mark.parametrize(
    ("structure", "expectation"),
    [("kfac", "exact"), ("dense", "empirical"), ("diagonal", "empirical-batch")],
)
def test_hooks_on_gradients_are_left_and_change_no_fisher(structure, expectation):
    model, batch = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), (X, Y)

    def diagonal():
        F = fisher(model, [batch], structure=structure, expectation=expectation)
        return F.diagonal()

    wanted = diagonal()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model[2].register_full_backward_hook(lambda module, given, _: (0.5 * given[0],))
    model[1].register_full_backward_pre_hook(in_train_mode)
    for name, value in diagonal().items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=0)
    model(X).sum().backward()
    assert model[0].weight.grad.abs().max() <= 1e-3
