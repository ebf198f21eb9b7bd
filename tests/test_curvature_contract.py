"""What `fisher` refuses, with the culprit's name."""

import pytest
import torch
from nets import VECTORS, CalledTwice
from oracles import seeded
from torch import nn

from flwr_fisher.curvature import LIKELIHOODS, STRUCTURES, FisherOptions, fisher
from flwr_fisher.curvature.estimate.options import EXPECTATIONS
from flwr_fisher.errors import (
    ConfigurationError,
    DataError,
    ParamsError,
    StructureError,
    UnknownNameError,
)

every_structure = pytest.mark.parametrize("structure", STRUCTURES)
LINEAR = nn.Linear(3, 3)
ONE, UNEVEN = [VECTORS], VECTORS.split([4, 1])


class Sometimes(CalledTwice):
    def forward(self, x):
        if len(x) == 1:
            self.fc(x)
        return self.head(self.fc(x))


class Folds(CalledTwice):
    def forward(self, x):
        rows = x.repeat(2, 1) if len(x) == 1 else x
        return self.head(self.fc(rows))[: len(x)]


class Then(nn.Module):
    """A layer, and a function of its inputs and outputs."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.layer, self.function = layer or nn.Linear(3, 3), function

    def forward(self, x):
        return self.function(x, self.layer(x))


class Keeps(nn.Module):
    """It returns more with each call."""

    def __init__(self):
        super().__init__()
        self.layer, self.state = nn.Linear(3, 3), 0.0

    def forward(self, x):
        self.state = self.state + self.layer(x)[:1]
        return self.layer(x) + self.state


def elsewhere():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))


def known(names):
    return f"known: {', '.join(names)}"


REDUCE = FisherOptions(weight_sharing="reduce")
BY_BATCH = FisherOptions(expectation="empirical-batch")
MISTAKES = {
    "structure": (UnknownNameError, known(STRUCTURES), {"structure": "kfca"}),
    "likelihood": (UnknownNameError, known(LIKELIHOODS), {"likelihood": "poisson"}),
    "options": (ConfigurationError, "options must be", {"options": {"examples": 3}}),
    "bytes": (ConfigurationError, "max_batch_bytes", {"max_batch_bytes": 0}),
    "number": (ConfigurationError, "num_examples", {"num_examples": 0}),
    "positions": (
        ConfigurationError,
        "weight_sharing='reduce' is for 'kfac'",
        {"structure": "diagonal", "options": REDUCE},
    ),
    "by batch": (
        ConfigurationError,
        "needs structure='diagonal'",
        {"options": BY_BATCH},
    ),
    "devices": (ConfigurationError, "'cpu', 'meta'", {"model": elsewhere()}),
    "lazy": (ParamsError, "'0.weight'", {"model": nn.Sequential(nn.LazyLinear(3))}),
    "called twice": (
        StructureError,
        r"'fc' was called .* \[1, 1\] rows",
        {"model": Sometimes(), "loader": UNEVEN},
    ),
    "folded": (
        StructureError,
        r"'fc' was called .* \[2\] rows.*shuffle the loader",
        {"model": Folds(), "loader": UNEVEN},
    ),
}


@pytest.mark.parametrize(("error", "culprit", "how"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(error, culprit, how):
    with pytest.raises(error, match=culprit):
        fisher(**{"model": LINEAR, "loader": ONE, **how})


def test_an_expectation_must_be_known():
    with pytest.raises(UnknownNameError, match=known(EXPECTATIONS)):
        FisherOptions(expectation="kfca")


WITHOUT_A_FISHER = {
    "joined rows": (Then(lambda x, y: y.flatten()), r"\(15,\) for 5 examples"),
    "fewer rows": (Then(lambda x, y: y[:1]), r"\(1, 3\) for 5 examples"),
    "one output": (nn.Linear(3, 1), r"logits .*\(5, 1\).*'bernoulli' for one"),
    "detached": (Then(lambda x, y: y.detach()), "no trainable parameter"),
    "classes": (Then(lambda x, y: y.argmax(1)), "no trainable parameter"),
    "of the batch": (Then(lambda x, y: y - y.mean(0)), "examples of its batch"),
    "between examples": (Then(lambda x, y: y @ y.T), "examples of its batch"),
    "a state": (Keeps(), "former calls"),
    "complex": (Then(abs, nn.Linear(3, 3, dtype=torch.cfloat)), "'layer.weight' has"),
    "a tuple": (Then(lambda x, y: (y, x)), "a tuple of 2"),
}


@pytest.mark.parametrize("name", WITHOUT_A_FISHER)
@every_structure
def test_a_model_without_a_fisher_is_refused(name, structure):
    model, why = WITHOUT_A_FISHER[name]
    with pytest.raises(StructureError, match=why):
        fisher(model, ONE, structure)


@every_structure
def test_without_examples_or_parameters_there_is_no_fisher(structure):
    with pytest.raises(DataError, match="no examples"):
        fisher(LINEAR, [VECTORS[:0]], structure)
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        fisher(nn.ReLU(), ONE, structure)


@every_structure
def test_an_example_that_the_model_squeezes_counts(structure):
    layer = seeded(lambda: nn.Linear(3, 1))
    squeezed = Then(lambda x, y: y.squeeze(), layer)
    want, got = (
        fisher(model, UNEVEN, structure, likelihood="gaussian").diagonal()
        for model in (layer, squeezed)
    )
    for a, b in zip(want.values(), got.values(), strict=True):
        torch.testing.assert_close(a, b)
