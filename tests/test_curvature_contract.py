"""What `fisher` leaves alone, and what it refuses."""

from functools import partial

import pytest
import torch
from nets import VECTORS, CalledTwice
from oracles import SMALL_SHAPE, randn, seeded, small_net
from torch import Tensor, nn

from flwr_fisher import curvature
from flwr_fisher.curvature import ENGINES, EXPECTATIONS, LIKELIHOODS, STRUCTURES
from flwr_fisher.errors import (
    ConfigurationError,
    DataError,
    StructureError,
    UnknownNameError,
)

# Every class, so that only rounding separates it from the oracles.
fisher = partial(curvature.fisher, tolerance=0)

# --- the model is left as it was ------------------------------------------------------


class Fragile(nn.Module):
    """A model of every kind of parameter that fails in its third forward pass."""

    def __init__(self, limit=None):
        super().__init__()
        self.net = small_net()
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(3))
        self.net[0].requires_grad_(False)
        self.limit, self.calls = limit, 0

    def forward(self, x):
        self.calls += 1
        if self.limit is not None and self.calls > self.limit:
            raise ZeroDivisionError("the model broke")
        return self.dropout(self.norm(self.net(x))) * self.scale


def snapshot(model):
    hooks = {
        f"{name}.{kind}": len(getattr(module, kind))
        for name, module in model.named_modules()
        for kind in vars(module)
        if kind.endswith("_hooks") and getattr(module, kind) is not None
    }
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": hooks,
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "ids": {k: id(v) for k, v in model.state_dict(keep_vars=True).items()},
        "grads": {
            k: None if p.grad is None else (id(p.grad), p.grad.clone())
            for k, p in model.named_parameters()
        },
        "requires": {k: p.requires_grad for k, p in model.named_parameters()},
        "random": torch.get_rng_state(),
        "enabled": torch.is_grad_enabled(),
    }


def same(left, right):
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            same(left[k], right[k]) for k in left
        )
    if isinstance(left, tuple):
        return all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def prepared(limit=None):
    """Return a model in mixed modes, with some gradients and a user's hook."""
    model = seeded(lambda: Fragile(limit)).train()
    model.net[2].eval()
    model.net[7].weight.grad = torch.full_like(model.net[7].weight, 3.0)
    model.net[5].register_forward_hook(lambda module, args, output: None)
    return model


class Breaks:
    """A loader that fails after its first batch."""

    def __iter__(self):
        yield randn(1, 2, *SMALL_SHAPE)
        raise ZeroDivisionError("the disk is gone")


@pytest.mark.parametrize(
    ("broken", "enabled"),
    [
        *[(None, True), (None, False), ("loader", True)],
        *[(0, False), (1, True), (2, False), (3, True)],
    ],
)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_model_is_left_as_it_was(structure, broken, enabled):
    """Also where the loader breaks, or the model in one of its calls."""
    x = randn(1, 6, *SMALL_SHAPE)
    model = prepared(broken if isinstance(broken, int) else None)
    loader = Breaks() if broken == "loader" else x.split(2)
    with torch.set_grad_enabled(enabled):
        before, data = snapshot(model), x.clone()
        if broken is None:
            fisher(model, loader, structure=structure)
        else:
            with pytest.raises(ZeroDivisionError):
                fisher(model, loader, structure=structure)
        assert same(snapshot(model), before)
        assert torch.equal(x, data)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_nngeometry_engine_leaves_the_model_as_it_was(structure):
    model, x = seeded(small_net).train(), randn(1, 5, *SMALL_SHAPE)
    model[2].eval()
    before = snapshot(model)
    fisher(model, x.split(2), structure=structure, engine="nngeometry")
    assert same(snapshot(model), before)


# --- errors ---------------------------------------------------------------------------


LINEAR = nn.Linear(3, 3)


class Sometimes(CalledTwice):
    def forward(self, x):
        x = self.fc(x)
        return self.head(self.fc(x) if len(x) == 1 else x)


class Folds(CalledTwice):
    def forward(self, x):
        rows = x.repeat(2, 1) if len(x) == 1 else x
        return self.head(self.fc(rows))[: len(x)]


def ended(*tail):
    return nn.Sequential(nn.Linear(3, 3), *tail)


UNEVEN = VECTORS.split([4, 1])
ONE = [VECTORS]
Y = torch.arange(5) % 3


def of(error, culprit, model=LINEAR, loader=ONE, **options):
    return error, culprit, model, loader, options


OPTIONS = [
    *({name: 0} for name in ("num_samples", "max_passes", "max_batch_bytes")),
    *({"tolerance": -0.1}, {"tolerance": 1.5}, {"max_positions": 0}),
    {"weight_sharing": "flatten"},
    {"max_passes": 2, "expectation": "sampled"},
    {"max_passes": 2, "engine": "nngeometry"},
    {"max_positions": 4, "structure": "diagonal"},
    {"max_positions": 4, "engine": "nngeometry"},
    {"max_positions": 4, "weight_sharing": "reduce"},
    {"weight_sharing": "reduce", "structure": "diagonal"},
    {"weight_sharing": "reduce", "engine": "nngeometry"},
    {"engine": "nngeometry", "expectation": "sampled"},
]
KNOWN = {
    "structure": STRUCTURES,
    "expectation": EXPECTATIONS,
    "engine": ENGINES,
    "likelihood": LIKELIHOODS,
}
SHAPE, WIDE = StructureError, [torch.ones(2, 300)]
MISTAKES = [
    *(
        of(
            UnknownNameError,
            f"{what} 'kfca'; known: {', '.join(known)}",
            **{what: "kfca"},
        )
        for what, known in KNOWN.items()
    ),
    # The first option of several is the one that is named.
    *(of(ConfigurationError, next(iter(wrong)), **wrong) for wrong in OPTIONS),
    of(ConfigurationError, "device=meta", device="meta"),
    of(
        ConfigurationError,
        "structure='diagonal'",
        loader=[(VECTORS, Y)],
        expectation="empirical-batch",
    ),
    of(DataError, "mapping of 'x'.*batch_fn", loader=[{"x": VECTORS}]),
    of(DataError, "an empty list", loader=[[]]),
    of(DataError, "inputs are a str", loader=[("x", 1)]),
    of(DataError, "a str", loader=["text"]),
    of(DataError, "reads .*twic", loader=iter(ONE), structure="ekfac"),
    of(SHAPE, r"\(15,\)", ended(nn.Flatten(0))),
    of(SHAPE, r"\(5, 3, 1\)", ended(nn.Unflatten(1, (3, 1)))),
    of(SHAPE, "GB", nn.Linear(300, 300), WIDE, structure="dense"),
    of(SHAPE, "GB", nn.Linear(300, 300), WIDE, structure="block"),
    of(SHAPE, "'fc' was called .* 2 times", Sometimes(), UNEVEN),
    of(SHAPE, "'fc' had .* 2 rows for", Folds(), UNEVEN),
]


@pytest.mark.parametrize(("error", "culprit", "model", "loader", "options"), MISTAKES)
def test_a_mistake_is_named(error, culprit, model, loader, options):
    with pytest.raises(error, match=culprit):
        fisher(model, loader, **options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_refuses_the_same(structure, engine):
    how = {"structure": structure, "engine": engine}
    with pytest.raises(DataError, match="no examples"):
        fisher(LINEAR, [VECTORS[:0]], **how)
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        fisher(nn.ReLU(), ONE, **how)
    if engine == "auto":
        with pytest.raises(StructureError, match=r"logits .*\(5, 1\)"):
            fisher(ended(nn.Linear(3, 1)), ONE, **how)


def test_the_models_device_may_be_named():
    for device in ("cpu", torch.device("cpu", 0)):
        fisher(LINEAR, ONE, device=device)
