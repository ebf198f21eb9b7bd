"""Steps of many rounds from uploads that are finite, and far out."""

import math
from functools import partial

import pytest
import torch

from flwr_fisher.errors import ConfigurationError, ParamsError
from flwr_fisher.params import norm
from flwr_fisher.rounds import (
    fagh_step,
    fedfish_average,
    make_optimizer,
    scaffold_control,
    scaffold_step,
    server_step,
)
from flwr_fisher.tangent import tct_average, tct_control

END = 3e38  # near float32's


def w(*entries, dtype=torch.float32):
    return {"w": torch.tensor(entries, dtype=dtype)}


# What exact arithmetic has a result for


def fagh(size, dtype=torch.float32):
    gradient, product = (w(a * size, size, dtype=dtype) for a in (1.0, 2.0))
    start = w(0.0, 0.0, dtype=dtype)
    return fagh_step(start, gradient, product, size, None, lr=1.0, rho=1.0)


def test_fagh_with_gradients_of_1e30():
    got, want = fagh(1e30), fagh(1e30, torch.float64)
    assert torch.allclose(got.params["w"].double(), want.params["w"], rtol=1e-5)
    kept = [got.params, got.direction, got.moments.gradient, got.moments.hvp]
    assert all(group["w"].isfinite().all() for group in kept)
    for group in kept:
        assert math.isfinite(float(norm(group)))


def test_fedfish_with_a_fisher_of_1e30():
    deltas, fishers = [w(1.0, 4.0), w(3.0, 8.0)], [w(1e30, 1.0), w(1.0, 1e-40)]
    got = fedfish_average(deltas, fishers, [1, 3])["w"]
    assert torch.allclose(got, torch.tensor([1.0, 4.0]))
    both = fedfish_average(deltas, [w(1e30, 1e-30), w(1e30, 1e-30)], [1, 3])["w"]
    assert torch.allclose(both, torch.tensor([2.5, 7.0]))
    far = fedfish_average([w(1e30, 1.0), w(-1e30, 1.0)], fishers, [1, 1])
    assert float(norm(far)) == pytest.approx(1e30)


# What has none, or none that the dtype holds: the message names the quantity


ADAM, SGD = make_optimizer("adam", 0.1), make_optimizer("sgd", 1.0)
first_fagh = partial(fagh_step, probe_dot=0.0, moments=None, lr=1.0)
one = partial(torch.full, (1, 1))
TCT = {"lr": 1e-300, "local_steps": 1}
NOT_FINITE = [
    (partial(first_fagh, w(0.0), w(END), w(0.0), rho=1e-3), "of FAGH's step: 'w'"),
    (partial(first_fagh, w(-END), w(END), w(0.0), rho=1.0), "model after FAGH's"),
    (lambda: scaffold_step(w(0.0), w(END), [w(0.0)], [w(END)], [1]), "control .*'w'"),
    (
        lambda: scaffold_control(w(0.0), w(0.0), w(1e30), steps=1, lr=1e-20),
        "the client's control variate: 'w'",
    ),
    (lambda: server_step(w(1.0), w(1e30), {}, ADAM), "state: 'w/exp_avg_sq'"),
    (lambda: server_step(w(-END), w(END), {}, SGD), "server optimizer's step: 'w'"),
    (
        lambda: tct_average(one(1.0), one(1.0), [one(END)], [1], **TCT),
        "the new average: 'control'",
    ),
    (
        lambda: tct_control(one(1.0), one(1.0), one(1.0), one(END), **TCT),
        "the client's control variate with lr=1e-300: 'control'",
    ),
]


@pytest.mark.parametrize(("call", "message"), NOT_FINITE)
def test_what_is_not_finite_is_named(call, message):
    with pytest.raises(ParamsError, match=message):
        call()


# What does not fit, or is out of range

A, V = w(1.0, 2.0), {"v": torch.ones(2)}
NAN, INF = math.nan, math.inf
UNUSABLE = w(math.nan, 1.0)


def fagh_first(params=A, g=A, hvp=A, c=1.0, moments=None, **changes):
    return fagh_step(params, g, hvp, c, moments, **{"lr": 0.1, "rho": 1} | changes)


def scaffold(params=A, control=A, delta=A, shift=A, **more):
    return scaffold_step(params, control, [delta], [shift], [1], **more)


def fedfish(deltas=(A, A, A), fishers=(A, A, A)):
    return fedfish_average(deltas, fishers, [5.0, 1.0, 3.0])


def halved():
    kept = fagh_first().moments
    del kept.hvp["w"]
    return kept


OUT_OF_RANGE = [
    (fagh_first, "lr", (-1.0,)),
    (fagh_first, "rho", (0.0, INF)),
    (fagh_first, "betas", ((1.0, 0.9),)),
    (fagh_first, "epsilon", (2.0,)),
    (scaffold, "participation", (0.0, 1.1)),
    (scaffold, "lr", (-1,)),
    (partial(scaffold_control, A, A, A, lr=1), "steps", (0,)),
    (partial(scaffold_control, A, A, A, steps=1), "lr", (0,)),
]


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [(c, n, v) for c, n, values in OUT_OF_RANGE for v in values],
)
def test_a_number_out_of_range_is_named(call, name, value):
    with pytest.raises(ConfigurationError, match=f"^{name} must be"):
        call(**{name: value})


REFUSED = [
    (lambda: fagh_first(hvp={}), r"hvp .*\['w'\]"),
    (lambda: fagh_first(params={}), "'w'"),
    (lambda: fagh_first(g=UNUSABLE), "'w' holds NaN"),
    (lambda: fagh_first(hvp=UNUSABLE), "'w' holds NaN"),
    (lambda: fagh_first(c=NAN), "the probe: 'curvature' holds NaN"),
    (lambda: fagh_first(V, V, V, moments=fagh_first().moments), "moments"),
    (lambda: fagh_first(moments=halved()), r"moments .*\['w'\]"),
    *(
        (partial(scaffold, **{k: V}), "v|w")
        for k in ("params", "control", "delta", "shift")
    ),
    *(
        (
            partial(fedfish, fishers=[*[A] * at, wrong, *[A] * (2 - at)]),
            f"client {at}'s Fisher.*'w'",
        )
        for at, wrong in ((2, {}), (1, w(1.0)))
    ),
    (lambda: fedfish(deltas=[A, {}, A]), r"client 1 .*\['w'\]"),
    (lambda: fedfish(fishers=[{**A, **V}] * 3), "client 0's Fisher.*'v'"),
    (lambda: fedfish_average([], [], []), "0 sets of params"),
]


@pytest.mark.parametrize(("call", "culprit"), REFUSED)
def test_what_does_not_fit_is_named(call, culprit):
    with pytest.raises(ParamsError, match=culprit):
        call()
