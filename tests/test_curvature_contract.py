"""What `fisher` refuses."""

from functools import partial

import pytest
import torch
from nets import VECTORS, CalledTwice
from torch import nn

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
