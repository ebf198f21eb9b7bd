"""Steps of many rounds from uploads that are finite, and far out."""

import math
from functools import partial

import pytest
import torch

from flwr_fisher.curvature import InputCovariance, Kronecker
from flwr_fisher.errors import ConfigurationError, ParamsError
from flwr_fisher.merge import LocalPosterior, regmean
from flwr_fisher.params import norm
from flwr_fisher.rounds import (
    Preconditioner,
    done_direction,
    fagh_step,
    fedexp_step,
    fedfish_average,
    fedga_start,
    fedpm_mix,
    giant_direction,
    make_optimizer,
    newton_step,
    scaffold_control,
    scaffold_step,
    server_step,
)
from flwr_fisher.rounds.updates import with_averages
from flwr_fisher.tangent import (
    FeatureMoments,
    combine_moments,
    standardisation,
    tct_average,
    tct_control,
)

END = 3e38  # near float32's


def w(*entries, dtype=torch.float32):
    return {"w": torch.tensor(entries, dtype=dtype)}


# What exact arithmetic has a result for


def fagh(size, dtype=torch.float32):
    gradient, product = (w(a * size, size, dtype=dtype) for a in (1.0, 2.0))
    start = w(0.0, 0.0, dtype=dtype)
    return fagh_step(start, gradient, product, size, None, t=1, lr=1.0, rho=1.0)


def test_fagh_with_gradients_of_1e30():
    got, want = fagh(1e30), fagh(1e30, torch.float64)
    assert torch.allclose(got.params["w"].double(), want.params["w"], rtol=1e-5)
    kept = [got.params, got.direction, got.moments.gradient, got.moments.hvp]
    assert all(group["w"].isfinite().all() for group in kept)
    for group in kept:
        assert math.isfinite(float(norm(group)))


def test_fedexp_with_updates_whose_squares_overflow():
    def step(size):
        pairs = (size, 2 * size), (size, -2 * size)
        deltas = [w(*pair, dtype=torch.float64) for pair in pairs]
        start = w(0.0, 0.0, dtype=torch.float64)
        return fedexp_step(start, deltas, [1, 1], epsilon=0.0).lr

    assert step(1.0) == 2.5
    assert step(1e200) == pytest.approx(2.5)


def test_fedfish_with_a_fisher_of_1e30():
    deltas, fishers = [w(1.0, 4.0), w(3.0, 8.0)], [w(1e30, 1.0), w(1.0, 1e-40)]
    got = fedfish_average(deltas, fishers, [1, 3])["w"]
    assert torch.allclose(got, torch.tensor([1.0, 4.0]))
    both = fedfish_average(deltas, [w(1e30, 1e-30), w(1e30, 1e-30)], [1, 3])["w"]
    assert torch.allclose(both, torch.tensor([2.5, 7.0]))
    far = fedfish_average([w(1e30, 1.0), w(-1e30, 1.0)], fishers, [1, 1])
    assert float(norm(far)) == pytest.approx(1e30)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_input_moments_of_any_scale(size):
    """Of FedPM and of RegMean."""
    eye = torch.eye(2).unsqueeze(0)
    A = [(eye + 0.5 * i) for i in range(2)]
    models = [{"w": torch.tensor([[1.0, i + 2.0]])} for i in range(2)]

    def mixed(scale):
        layers = [{"w": InputCovariance("w", None, scale * a)} for a in A]
        return fedpm_mix(models, layers, [1, 1]).params["w"]

    def merged(scale):
        G = torch.ones(1, 1, 1)
        shape = torch.Size((1, 2))
        clients = [
            LocalPosterior(model, Kronecker("w", shape, scale * a, G), 1)
            for model, a in zip(models, A, strict=True)
        ]
        return regmean(clients)["w"]

    for method in (mixed, merged):
        assert torch.allclose(method(size), method(1.0), rtol=1e-5)


def test_tct_with_a_mean_far_out():
    """As long as float64 holds the sum of squares."""

    def part(mean, count):
        values = (torch.tensor([v], dtype=torch.float64) for v in (mean, 1.0))
        return FeatureMoments(*values, count)

    moments = combine_moments([part(0.0, 10), part(1e140, 30_000)])
    assert all(value.isfinite().all() for value in standardisation(moments))
    with pytest.raises(
        ParamsError, match=r"feature 0 .* client 1 has a mean of 1e\+300"
    ):
        combine_moments([part(0.0, 10), part(1e300, 30_000), part(1.0, 10)])


# What has none, or none that the dtype holds: the message names the quantity


def swelling(vector):
    return {"w": 1e15 * vector["w"]}


LAST = torch.full((1, 1, 1), 1.7e308, dtype=torch.float64)
TEN = {"w": torch.full((1, 1), 10.0).double()}
LARGE = LocalPosterior(TEN, Kronecker("w", torch.Size((1, 1)), LAST, LAST), 1)
ADAM, SGD = make_optimizer("adam", 0.1), make_optimizer("sgd", 1.0)
first_fagh = partial(fagh_step, probe_dot=0.0, moments=None, t=1, lr=1.0)
one = partial(torch.full, (1, 1))
TCT = {"lr": 1e-300, "local_steps": 1}
NOT_FINITE = [
    (partial(first_fagh, w(0.0), w(END), w(0.0), rho=1e-3), "of FAGH's step: 'w'"),
    (partial(first_fagh, w(-END), w(END), w(0.0), rho=1.0), "model after FAGH's"),
    (
        lambda: giant_direction(lambda v: {"w": 1e-30 * v["w"]}, w(1e30)),
        "GIANT's .*'w'",
    ),
    (lambda: done_direction(swelling, w(1e10), alpha=1.0), "DONE's d.*alpha=1.*: 'w'"),
    (lambda: newton_step(w(-END), [w(END)], [1]), "plus -1 times the step: 'w'"),
    (lambda: fedga_start(w(0.0), w(END), w(0.0), beta=10.0), "plus -10 times .*'w'"),
    (lambda: scaffold_step(w(-END), w(0.0), [w(END)], [w(0.0)], [1]), "plus -1 t.*'w'"),
    (
        lambda: scaffold_step(w(0.0), w(END), [w(0.0)], [w(END)], [1]),
        "control .*'w'",
    ),
    (
        lambda: scaffold_control(w(0.0), w(0.0), w(1e30), steps=1, lr=1e-20),
        "the client's control variate: 'w'",
    ),
    (lambda: fedexp_step(w(-END), [w(END)], [1]), "plus -1 times the step: 'w'"),
    (
        lambda: with_averages(w(1.0), w(1e300, dtype=torch.float64), [w(1.0)], [1]),
        "the new model: 'w'",
    ),
    (
        lambda: server_step(w(1.0), w(1e30), {}, ADAM),
        "state: 'w/exp_avg_sq'",
    ),
    (lambda: server_step(w(-END), w(END), {}, SGD), "server optimizer's step: 'w'"),
    (
        lambda: tct_average(one(1.0), one(1.0), [one(END)], [1], **TCT),
        "the new average: 'control'",
    ),
    (
        lambda: tct_control(one(1.0), one(1.0), one(1.0), one(END), **TCT),
        "the client's control variate with lr=1e-300: 'control'",
    ),
    (lambda: regmean([LARGE]), "RegMean's solution for 'w': 'w'"),
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
    return fagh_step(
        params, g, hvp, c, moments, **{"t": 1, "lr": 0.1, "rho": 1} | changes
    )


def scaffold(params=A, control=A, delta=A, shift=A, **more):
    return scaffold_step(params, control, [delta], [shift], [1], **more)


def fedfish(deltas=(A, A, A), fishers=(A, A, A)):
    return fedfish_average(deltas, fishers, [5.0, 1.0, 3.0])


def moments(*entries):
    return {"w": InputCovariance("w", None, torch.diag(torch.tensor(entries))[None])}


def halved():
    kept = fagh_first().moments
    del kept.hvp["w"]
    return kept


ROW = {"w": torch.ones(1, 2)}
OUT_OF_RANGE = [
    (fagh_first, "t", (0,)),
    (fagh_first, "lr", (-1.0, NAN)),
    (fagh_first, "rho", (0.0, INF, NAN)),
    (fagh_first, "betas", ((1.0, 0.9), (0.9, -0.1), (0.9,))),
    (fagh_first, "epsilon", (-1e-9, 2.0)),
    (scaffold, "participation", (0.0, 1.1, NAN)),
    (scaffold, "lr", (-1,)),
    (partial(scaffold_control, A, A, A, lr=1), "steps", (0,)),
    (partial(scaffold_control, A, A, A, steps=1), "lr", (0,)),
    (partial(fedexp_step, A, [A], [1]), "epsilon", (-1,)),
    (partial(fedga_start, A, A, A), "beta", (-1,)),
    (partial(giant_direction, dict, A), "iterations", (0,)),
    (partial(giant_direction, dict, A), "tolerance", (-1,)),
    (partial(done_direction, dict, A, alpha=1), "iterations", (0,)),
    (partial(done_direction, dict, A), "alpha", (0, -1, NAN)),
    (partial(newton_step, A, [A], [1]), "lr", (-1,)),
    (partial(Preconditioner.of, {}), "damping", (0.0, -1.0, NAN, INF)),
    (partial(fedpm_mix, [{}], [{}], [1]), "damping", (0.0, -1.0, NAN, INF)),
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
    (lambda: fagh_first(c=NAN), "probe_dot"),
    (lambda: fagh_first(t=2), "got no moments"),
    (lambda: fagh_first(moments=fagh_first().moments), "got moments"),
    (lambda: fagh_first(V, V, V, t=2, moments=fagh_first().moments), "moments"),
    (lambda: fagh_first(t=2, moments=halved()), r"moments .*\['w'\]"),
    *(
        (partial(scaffold, **{k: V}), "v|w")
        for k in ("params", "control", "delta", "shift")
    ),
    (lambda: fedexp_step(A, [A, UNUSABLE], [1, 1]), "client 1: 'w'"),
    (lambda: fedexp_step(A, [V], [1]), "'v'"),
    *(
        (partial(fedexp_step, A, [A], own), "weights")
        for own in ([], [1, 2], [0], [-1])
    ),
    (lambda: fedga_start(A, A, w(1.0), beta=1), "'w'"),
    (lambda: fedga_start(V, A, A, beta=1), "'w'"),
    (lambda: giant_direction(lambda v: {"v": v["w"]}, A), "'v'|'w'"),
    (lambda: done_direction(lambda v: {"v": v["w"]}, A, alpha=1), "'v'|'w'"),
    (lambda: newton_step(A, [V], [1]), "'v'"),
    (lambda: Preconditioner.of(moments(INF, INF), damping=0.1), "'w'"),
    (lambda: fedpm_mix([], [], []), "0 sets of params"),
    (lambda: fedpm_mix([ROW], [moments(1, 1)], [0]), "weights"),
    (lambda: fedpm_mix([ROW] * 2, [moments(1, 1), {}], [1, 1]), "different layers"),
    (lambda: fedpm_mix([ROW, {}], [moments(1, 1)] * 2, [1, 1]), "'w'"),
    *(
        (
            partial(fedfish, fishers=[*[A] * at, wrong, *[A] * (2 - at)]),
            f"client {at}'s Fisher.*'w'",
        )
        for at, wrong in (
            (1, w(1.0, -1e-9)),
            (2, UNUSABLE),
            (0, w(1.0, INF)),
            (2, {}),
            (1, w(1.0)),
        )
    ),
    (lambda: fedfish(deltas=[A, {}, A]), r"client 1 .*\['w'\]"),
    (lambda: fedfish(fishers=[{**A, **V}] * 3), "client 0's Fisher.*'v'"),
    (lambda: fedfish(fishers=[A, A]), "2 Fishers and 3"),
    (lambda: fedfish_average([], [], []), "0 sets of params"),
    (lambda: fedfish(deltas=[A, UNUSABLE, A]), "client 1: 'w'"),
    (
        lambda: fedfish(
            [{"n": torch.tensor(i)} for i in range(3)], [{"n": torch.tensor(1.0)}] * 3
        ),
        "client 0's Fisher covers 'n'",
    ),
]


@pytest.mark.parametrize(("call", "culprit"), REFUSED)
def test_what_does_not_fit_is_named(call, culprit):
    with pytest.raises(ParamsError, match=culprit):
        call()


def test_a_damping_that_inverts_nothing_is_named():
    with pytest.raises(ConfigurationError, match="'w': raise"):
        Preconditioner.of(moments(1.0, -1e-3), damping=1e-9)


def test_fedpm_averages_what_float64_cannot_hold():
    models = [{"w": 1e10 * torch.tensor([[1.0, i]]).double()} for i in range(2)]
    layers = [
        {"w": InputCovariance("w", None, a * torch.eye(2).unsqueeze(0).double())}
        for a in (1e305, 1.0)
    ]
    mixture = fedpm_mix(models, layers, [1, 1])
    assert mixture.averaged == ["w"]
    assert torch.equal(mixture.params["w"], 1e10 * torch.tensor([[1.0, 0.5]]).double())
