"""The methods: how each is made, what a round costs, and what is tried."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

from flwr.serverapp.strategy import FedAvg, FedProx, Strategy
from harness.repeatable import Repeatable
from rivals import DONE, GIANT, FedExP, FedGA, FedPM

from flwr_fisher.strategies import FAGH, Scaffold

FRACTION = 0.4
EPOCHS, ITERATIONS = 5, 10
Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Method:
    """A row of the table of methods."""

    make: Callable[..., Strategy]  # of options, a seed, and FedAvg's two fractions
    epochs: int  # local ones, of a client that trains
    evaluations: int  # a client's, of gradients, in a round
    grids: Mapping[str, tuple[Options, ...]] = field(hash=False)  # tried, by part


RATES = {
    "mlr": (0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    "lenet": (0.05, 0.1, 0.2),
    "cifar": (0.1, 0.2, 0.4),
    "cnn": (0.05, 0.1, 0.2),
}
FEWER = RATES | {"mlr": (0.02, 0.05, 0.2), "lenet": (0.1, 0.3)}
# On LeNet one step a round wants a larger rate, and SCAFFOLD diverges with such.
LARGER = RATES | {"lenet": (0.1, 0.2, 0.4), "cifar": (0.4, 0.8, 1.6)}
SMALLER = RATES | {
    "lenet": (0.01, 0.02, 0.05),
    "cifar": (0.02, 0.05, 0.1),
    "cnn": (0.02, 0.05, 0.1),
}
# FAGH's are lr / rho, its step against no curvature; rho itself hardly matters.
STEPS = {
    "mlr": (0.1, 0.2, 0.5),
    "lenet": (0.2, 0.5),
    "cifar": (0.5, 1.0, 2.0),
    "cnn": (0.05, 0.1, 0.2),
}


def _or_one(values: Sequence[float], one: float) -> dict[str, Sequence[float]]:
    """Return a second hyperparameter's values: one where rates alone are tried."""
    return dict.fromkeys(RATES, values) | dict.fromkeys(("cifar", "cnn"), (one,))


def _grids(**values: Any) -> dict[str, tuple[Options, ...]]:
    """Return every part's grid; values are for all parts, or by part."""
    by_part = {
        part: {k: v[part] if isinstance(v, dict) else v for k, v in values.items()}
        for part in RATES
    }
    return {part: _grid(**chosen) for part, chosen in by_part.items()}


def _grid(**values: Sequence[Any]) -> tuple[Options, ...]:
    pairs = [[(key, value) for value in tried] for key, tried in values.items()]
    return tuple(product(*pairs))


# Each batch normalised by itself bounds the gradients.
IN_TRAIN_MODE = STEPS | {"cnn": (0.1, 0.2, 0.5)}
RHO = 0.1


def _fagh(*, step: float, beta1: float, probe: str, **kwargs: Any) -> FAGH:
    beta2 = 0.0 if probe == "momentum" else 0.99  # FAGH's defaults
    return FAGH(lr=step * RHO, rho=RHO, betas=(beta1, beta2), probe=probe, **kwargs)


def _fedavg(*, seed: int, **kwargs: Any) -> Repeatable:
    return Repeatable(FedAvg(**kwargs), seed=seed)


def _fedprox(*, mu: float, seed: int, **kwargs: Any) -> Repeatable:
    return Repeatable(FedProx(proximal_mu=mu, **kwargs), seed=seed)


# Preconditioned steps are on another scale than the gradient's. On LeNet they diverge
# with 0.1 and a damping of 0.1, and with 0.3 and one of 1.
_PRECONDITIONED = {
    "mlr": _grid(client_lr=(1.0, 2.0, 4.0), damping=(0.1, 1.0)),
    "lenet": _grid(client_lr=(0.1, 0.2), damping=(1.0,))
    + _grid(client_lr=(0.03,), damping=(0.1,)),
}
_BETAS = _or_one((0.5, 0.9), 0.9)
_STEPS = _grids(step=STEPS, beta1=_BETAS)
METHODS = {
    "FAGH, first": Method(partial(_fagh, probe="first"), 1, 2, _STEPS),
    # And a forward pass, for the norms' statistics, which is not counted.
    "FAGH, train mode": Method(
        partial(_fagh, probe="first", train_mode=True),
        1,
        2,
        _grids(step=IN_TRAIN_MODE, beta1=_BETAS),
    ),
    "FAGH, random": Method(partial(_fagh, probe="random"), 1, 2, _STEPS),
    "FAGH, momentum": Method(partial(_fagh, probe="momentum"), 1, 2, _STEPS),
    "momentum alone": Method(partial(_fagh, probe="none"), 1, 1, _STEPS),
    "FedAvg, E = 1": Method(_fedavg, 1, 1, _grids(client_lr=LARGER)),
    f"FedAvg, E = {EPOCHS}": Method(_fedavg, EPOCHS, EPOCHS, _grids(client_lr=RATES)),
    "FedProx": Method(
        _fedprox, EPOCHS, EPOCHS, _grids(client_lr=FEWER, mu=(0.01, 0.1))
    ),
    "SCAFFOLD": Method(Scaffold, EPOCHS, EPOCHS, _grids(client_lr=SMALLER)),
    "FedExP": Method(
        partial(FedExP, average_last_two=True),
        EPOCHS,
        EPOCHS,
        _grids(client_lr=FEWER, epsilon=_or_one((0.001, 0.1), 0.1)),
    ),
    "FedGA": Method(
        FedGA,
        EPOCHS,
        2 + EPOCHS,
        _grids(client_lr=FEWER, beta=_or_one((0.02, 0.2), 0.02)),
    ),
    # Each pass for the inputs' second moments counts as one, though none goes back.
    "FedPM": Method(FedPM, EPOCHS, 2 + EPOCHS, _PRECONDITIONED),
    "GIANT": Method(
        partial(GIANT, iterations=ITERATIONS),
        1,
        1 + 2 * ITERATIONS,
        _grids(lr=(0.003, 0.01, 0.02, 0.03, 0.05, 0.1)),
    ),
    "DONE": Method(
        partial(DONE, iterations=ITERATIONS),
        1,
        1 + 2 * (ITERATIONS - 1),
        _grids(lr=(0.3, 1.0, 3.0), alpha=(0.01, 0.05)),
    ),
}
OURS = [name for name in METHODS if name.startswith("FAGH")]


def make_strategy(method: str, options: Mapping[str, Any], seed: int) -> Strategy:
    """Return the method's strategy; all sample the same cohorts."""
    # The clients' learning rate is no strategy's: see how a client trains.
    given = {key: value for key, value in options.items() if key != "client_lr"}
    sampled = {"fraction_train": FRACTION, "fraction_evaluate": 0.0}
    return METHODS[method].make(seed=seed, **given, **sampled)
