"""NumPy's numbers as options are the numbers that they are."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.strategies import (
    AFL,
    FAGH,
    TCT,
    Codec,
    FedAvg,
    FedFish,
    FisherOptions,
    Scaffold,
    Waiting,
)

STRATEGIES = {
    FAGH: {"lr": 0.5, "rho": 0.5, "seed": 3},
    FedFish: {"server_lr": 0.5, "power": 0.5, "balance": 1},
    partial(FedFish, server_optimizer="adam"): {"server_lr": 0.5},
    TCT: {"stage1_rounds": 1, "num_features": 20, "local_steps": 5, "lr": 0.5},
    AFL: {"ridge": 0.5},
    Scaffold: {"server_lr": 0.5},
    FedAvg: {"min_train_nodes": 2, "fraction_train": 0.5},
}
OPTIONS = {
    FisherOptions: {"examples": 5, "max_passes": 2, "tolerance": 0.5},
    partial(Codec, "fedavg"): {"budget": 1.5},
    Waiting: {"enough_fraction": 0.5, "enough_replies": 5, "window": None},
}
KINDS = {int: np.int64, float: np.float32, type(None): lambda none: none}


def numpys(numbers):
    return {name: KINDS[type(value)](value) for name, value in numbers.items()}


@pytest.mark.parametrize(("make", "numbers"), OPTIONS.items())
def test_options_of_numpys_numbers_are_the_same_to_the_letter(make, numbers):
    assert repr(make(**numpys(numbers))) == repr(make(**numbers))


@pytest.mark.parametrize(("make", "numbers"), STRATEGIES.items())
def test_a_strategy_of_numpys_numbers_requests_and_keeps_the_same(make, numbers):
    own, plain = make(**numpys(numbers)), make(**numbers)
    assert json.dumps(own.options()) == json.dumps(plain.options())
    for one, other in zip(own.exchanges(2), plain.exchanges(2), strict=True):
        assert one.options == other.options


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor])
def test_a_function_for_an_optimizer_may_give_it_numpys_numbers(kind):
    def options(rate, beta):
        optimizer = partial(torch.optim.Adam, lr=rate, betas=(0.5, beta), foreach=False)
        return FedFish(server_optimizer=optimizer).options()

    plain = options(0.5, 0.75)
    assert options(kind(0.5), 0.75) == plain
    assert options(kind(0.25), 0.75) != plain
    assert options(kind(0.5), 0.875) != plain


def test_numpys_booleans_are_no_numbers():
    for wrong in (True, np.True_):
        with pytest.raises(ConfigurationError, match="examples must be an integer"):
            FisherOptions(examples=wrong)
