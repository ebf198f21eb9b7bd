"""TCT's regression: the closed form against plain loops, and where rounds end."""

from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import randn, relative, rng

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.rounds import scaffold_control, scaffold_step
from flwr_fisher.tangent import (
    Spectrum,
    check_lr,
    feature_sums,
    gram_spectrum,
    largest_safe_lr,
    spectrum,
    standardisation,
    tct_average,
    tct_control,
    tct_residual,
    tct_steps,
    tct_update,
)

F64 = torch.float64
C = 3


def plain_steps(Z, Y, weight, h, lr, steps):
    """Take gradient steps in float64, as the paper writes them."""
    Z, Y, theta = Z.double(), Y.double(), weight.double()
    shift = torch.zeros_like(theta) if h is None else h.double()
    for _ in range(steps):
        theta = theta - lr * (Z.T @ (Z @ theta - Y) / len(Z) - shift)
    return theta


def targets(seed, n, classes=C):
    labels = torch.randint(classes, (n,), generator=rng(seed))
    return torch.nn.functional.one_hot(labels, classes).double() - 1 / classes


def f64(seed, *shape):
    return randn(seed, *shape, dtype=F64)


# --- the closed form ------------------------------------------------------------------

SHAPES = {
    "wide": lambda s: f64(s, 6, 20),
    "tall": lambda s: f64(s, 20, 6),
    "square": lambda s: f64(s, 7, 7),
    "rank 2": lambda s: f64(s, 9, 2) @ f64(s + 1, 2, 14),
    "duplicated rows": lambda s: f64(s, 4, 9).repeat(3, 1),
    "one example": lambda s: f64(s, 1, 5),
    "one feature": lambda s: f64(s, 5, 1),
    "zeros": lambda s: torch.zeros(4, 5, dtype=F64),
    "some zeros": lambda s: f64(s, 5, 8) * (torch.arange(5) < 3).unsqueeze(1),
    "steep": lambda s: f64(s, 8, 12) * torch.logspace(0, -6, 12, dtype=F64),
}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    seed=st.integers(0, 10**6),
    fraction=st.one_of(
        st.floats(1e-7, 1.99), st.sampled_from([0.5, 1.0, 1.5, 1.9, 1.99])
    ),
    steps=st.integers(1, 200),
    stored=st.sampled_from([torch.float16, torch.float32, F64]),
    dtype=st.sampled_from([torch.float32, F64]),
    corrected=st.booleans(),
)
def test_the_closed_form_is_where_the_steps_end(
    shape, seed, fraction, steps, stored, dtype, corrected
):
    Z = SHAPES[shape](seed).to(stored)
    p, Y = Z.shape[1], targets(seed, len(Z))
    weight = f64(seed + 2, p, C).to(dtype)
    h = f64(seed + 3, p, C).to(dtype) if corrected else None
    spectrum = gram_spectrum(Z)
    lr = fraction / (spectrum.largest or 1.0)
    want = plain_steps(Z, Y, weight, h, lr, steps)
    closed = tct_update(Z, Y, weight, h, spectrum, lr=lr, local_steps=steps)
    looped = tct_steps(Z, Y, weight, h, lr=lr, local_steps=steps)
    # M eta h is part of each sum, also where the steps along h end far below it.
    drift = 0.0 if h is None else lr * steps * float(h.norm())
    scale = float(weight.norm() + want.norm()) + drift
    for got in (closed, looped):
        assert got.dtype == dtype
        assert got.shape == (p, C)
        error = float((got.double() - want).norm())
        assert error <= (1e-12 if dtype == F64 else 5e-5) * scale


def exact(z, y, start, h, lr, steps):
    """Return the M-th iterate of one weight on one example, with 60 digits."""
    with localcontext() as context:
        context.prec = 60
        a, theta = Decimal(z), Decimal(start)
        phi = (1 - (1 - Decimal(lr) * a * a) ** steps) / (a * a)
        return float(theta - phi * (a * (a * theta - Decimal(y)) - Decimal(h)))


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 499, 500, 100_000])
def test_the_closed_form_keeps_its_digits_at_every_eigenvalue(steps):
    edges = [1e-4 / steps * f for f in (0.999, 1.001)] + [0.4999999, 0.5, 0.5000001]
    grid = [10.0**-k for k in range(0, 25, 2)] + edges
    for x in [*grid, 0.9, 1.0, 1.0000001, 1.5, 1.99, 1.9999999]:
        for lr in (1e-4, 3.0):
            z = (x / lr) ** 0.5
            Z = torch.tensor([[z]], dtype=F64)
            spectrum = gram_spectrum(Z)
            for y, start, h in ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (1.0, 2.0, 0.5)):
                got = tct_update(
                    Z,
                    torch.tensor([[y]], dtype=F64),
                    torch.tensor([[start]], dtype=F64),
                    torch.tensor([[h]], dtype=F64),
                    spectrum,
                    lr=lr,
                    local_steps=steps,
                )
                want = exact(z, y, start, h, lr, steps)
                # What theta moves by at most; M amplifies the rounding of z * z.
                path = min(lr * steps, 2 / z**2) * abs(z * (z * start - y) - h)
                error = (1e-15 * steps + 1e-12) * (start + path)
                assert abs(float(got) - want) <= error, (x, lr, y)


@pytest.mark.parametrize("steps", [1, 2, 3, 500])
def test_what_multiplies_the_correction_keeps_its_digits_too(steps):
    one, zero, lr = torch.ones(1, 1, dtype=F64), torch.zeros(1, 1, dtype=F64), 3.0
    eta = Decimal(lr)
    for x in [10.0**-k for k in range(30)] + [0.999e-4 / steps, 1.001e-4 / steps]:
        # Not Z's own, so that psi stands alone and is not multiplied by lambda.
        spectrum = Spectrum(torch.tensor([x / lr], dtype=F64), one)
        got = tct_update(one, zero, zero, one, spectrum, lr=lr, local_steps=steps)
        with localcontext() as context:
            context.prec = 80
            lam = Decimal(x / lr)
            phi = (1 - (1 - eta * lam) ** steps) / lam
            want = float((phi - eta * steps) / lam + eta * steps)
        assert abs(float(got) - want) <= 1e-9 * (lr * steps) ** 2, x


def test_a_residual_that_is_known_changes_nothing():
    Z, Y, weight, h = f64(0, 5, 8), targets(0, 5), f64(1, 8, C), f64(2, 8, C)
    E, spectrum = tct_residual(Z, Y, weight), gram_spectrum(Z)
    assert relative(E, Z @ weight - Y) <= 1e-14
    for correction in (h, None):
        want = tct_update(Z, Y, weight, correction, spectrum, lr=0.1, local_steps=9)
        got = tct_update(
            Z, Y, weight, correction, spectrum, lr=0.1, local_steps=9, residual=E
        )
        assert relative(got, want) <= 1e-13


def test_features_of_one_kind_and_the_next_are_multiplied_in_blocks(monkeypatch):
    Z, Y = randn(0, 11, 6).half(), targets(0, 11)
    weight, h, known = randn(1, 6, C), randn(2, 6, C), gram_spectrum(Z)
    whole = tct_update(Z, Y, weight, h, known, lr=0.1, local_steps=50)
    sums = feature_sums(Z)
    monkeypatch.setattr(spectrum, "_BLOCK_BYTES", 2 * 6 * 4)
    assert spectrum.block_rows(6, torch.float32) == 2
    cut = tct_update(Z, Y, weight, h, known, lr=0.1, local_steps=50)
    assert relative(cut, whole) <= 1e-6
    assert relative(feature_sums(Z).total, sums.total) <= 1e-14
    assert relative(feature_sums(Z).squares, sums.squares) <= 1e-14


# --- the spectrum and the learning rate -----------------------------------------------


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_spectrum_is_the_gram_matrixs(shape):
    Z = SHAPES[shape](5)
    spectrum, n = gram_spectrum(Z), len(Z)
    K, Q = Z @ Z.T / n, spectrum.eigenvectors
    assert relative(Q @ torch.diag(spectrum.eigenvalues) @ Q.T, K) <= 1e-13
    assert relative(Q @ Q.T, torch.eye(n, dtype=F64)) <= 1e-13
    assert (spectrum.eigenvalues >= 0).all()
    hessian = torch.linalg.eigvalsh(Z.T @ Z / n)[-1]
    assert spectrum.largest == pytest.approx(float(hessian), rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("largest", [1e-300, 1e-3, 0.3, 1.0, 7.0, 12345.678, 1e9])
def test_the_largest_safe_rate_is_just_safe(largest):
    lr = largest_safe_lr(largest)
    assert 2 * (1 - 1e-15) <= lr * largest < 2
    check_lr(lr, largest)
    with pytest.raises(ConfigurationError, match="too large"):
        check_lr(2.000001 / largest, largest)


def test_a_rate_that_is_too_large_is_refused_with_one_that_is_not():
    Z, Y, weight = f64(0, 5, 8), targets(0, 5), f64(1, 8, C)
    spectrum = gram_spectrum(Z)
    lr = 2.5 / spectrum.largest
    with pytest.raises(ConfigurationError, match=f"lr {lr:g} is too large") as caught:
        tct_update(Z, Y, weight, None, spectrum, lr=lr, local_steps=500)
    shown = float(str(caught.value).split()[-1])
    assert 1.99 < shown * spectrum.largest < 2
    tct_update(Z, Y, weight, None, spectrum, lr=shown, local_steps=500)
    assert tct_steps(Z, Y, weight, None, lr=lr, local_steps=500).norm() > 1e50
    assert largest_safe_lr(0.0) == float("inf")
    check_lr(1e30, 0.0)


# --- standardisation ------------------------------------------------------------------


def pooled(parts):
    """Return all features' means and standard deviations, from exact sums."""
    means, stds = [], []
    for column in torch.cat(parts).double().T.tolist():
        values = [Fraction(x) for x in column]
        mean = sum(values) / len(values)
        variance = sum((x - mean) ** 2 for x in values) / len(values)
        means.append(float(mean))
        stds.append(float(variance) ** 0.5)
    return torch.tensor(means, dtype=F64), torch.tensor(stds, dtype=F64)


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e3, 2e4])
def test_standardisation_is_that_of_the_pooled_features(offset):
    sizes, spread = [1, 50, 7, 200], torch.tensor([0.01, 1.0, 30.0], dtype=F64)
    parts = [(f64(i, n, 3) + i + offset) * spread for i, n in enumerate(sizes)]
    mean, std = standardisation([feature_sums(part) for part in parts])
    want_mean, want_std = pooled(parts)
    assert ((mean - want_mean) / want_mean).abs().max() <= 1e-12
    # A variance is a difference of squares, so it has the rounding of the larger one.
    error = 1e-12 + 1e-15 * float((want_mean / want_std).square().max())
    assert ((std - want_std) / want_std).abs().max() <= error


def test_a_constant_feature_does_not_count():
    wobble = 1.0 + torch.finfo(torch.float32).eps * (torch.arange(20) % 2)
    columns = [
        torch.full((20,), 0.1),
        torch.zeros(20),
        wobble,
        torch.full((20,), 1e-42) * (torch.arange(20) % 2),
        torch.arange(20.0),
        1e4 + torch.arange(20.0),
    ]
    parts = torch.stack(columns, dim=1).split([3, 17])
    mean, std = standardisation([feature_sums(part) for part in parts])
    assert std[:4].tolist() == [1.0] * 4
    assert torch.allclose(std[4:], torch.arange(20.0).double().std(correction=0))
    Z = (torch.cat(parts) - mean) / std
    assert Z[:, :4].abs().max() <= 1e-7


# --- rounds ---------------------------------------------------------------------------


@dataclass
class Federation:
    """Clients of unequal size and labels, whose pooled regression has a residual."""

    seed: int = 0
    sizes: tuple[int, ...] = (20, 7, 13, 40)
    p: int = 8
    lr: float = field(init=False)
    steps: int = 40

    def __post_init__(self):
        self.Z = [f64(self.seed + i, n, self.p) + 0.3 for i, n in enumerate(self.sizes)]
        for i, Z in enumerate(self.Z):
            Z[:, 0] = Z[:, 1]  # so that least squares has many solutions
            Z[:, 2:4] *= 1 + i
        # Each client holds two of three classes.
        self.Y = [targets(i, n, 2) + 1 / 2 - 1 / C for i, n in enumerate(self.sizes)]
        rest = [torch.full((n, 1), -1 / C, dtype=F64) for n in self.sizes]
        pairs = zip(self.Y, rest, range(len(rest)), strict=True)
        self.Y = [torch.cat([y, r], dim=1).roll(i, 1) for y, r, i in pairs]
        self.spectra = [gram_spectrum(Z) for Z in self.Z]
        self.lr = 0.5 / max(s.largest for s in self.spectra)
        self.zero = torch.zeros(self.p, C, dtype=F64)

    def best(self, weights=None):
        """Return the minimum-norm least squares of all, each client's mean weighted."""
        weights = weights or [float(n) for n in self.sizes]
        roots = [(w / n) ** 0.5 for w, n in zip(weights, self.sizes, strict=True)]
        Z = torch.cat([r * z for r, z in zip(roots, self.Z, strict=True)])
        Y = torch.cat([r * y for r, y in zip(roots, self.Y, strict=True)])
        return torch.linalg.lstsq(Z, Y, driver="gelsd").solution

    def local(self, i, weight, h):
        options = {"lr": self.lr, "local_steps": self.steps}
        return tct_update(self.Z[i], self.Y[i], weight, h, self.spectra[i], **options)

    def train(self, cohorts, *, control=True, weights=None):
        """Run rounds of TCT, and check that c stays the mean of all c_i."""
        weights = weights or [float(n) for n in self.sizes]
        weight, c, own = self.zero, self.zero, [self.zero for _ in self.sizes]
        options = {"lr": self.lr, "local_steps": self.steps}
        for cohort in cohorts:
            ends = [
                self.local(i, weight, own[i] - c if control else None) for i in cohort
            ]
            for i, end in zip(cohort, ends, strict=True):
                own[i] = tct_control(own[i], c, weight, end, **options)
            shares = [weights[i] for i in cohort]
            part = sum(shares) / sum(weights)
            weight, c = tct_average(
                weight, c, ends, shares, participation=part, **options
            )
            if control:
                mean = sum(w * x for w, x in zip(weights, own, strict=True))
                assert (c - mean / sum(weights)).norm() <= 1e-10 * (1 + c.norm())
        return weight


EVERYONE = [[0, 1, 2, 3]] * 200


def pairs(rounds):
    generator = rng(1)
    return [torch.randperm(4, generator=generator)[:2].tolist() for _ in range(rounds)]


def test_rounds_end_at_the_pooled_minimum_norm_least_squares():
    clients = Federation()
    best = clients.best()
    pinv = torch.linalg.pinv(torch.cat(clients.Z)) @ torch.cat(clients.Y)
    assert relative(best, pinv) <= 1e-10
    assert relative(clients.train(EVERYONE), best) <= 1e-9
    assert relative(clients.train(EVERYONE, control=False), best) >= 0.05


def test_rounds_end_there_with_absent_clients_too():
    clients = Federation()
    best, cohorts = clients.best(), pairs(400)
    assert relative(clients.train(cohorts), best) <= 1e-9


def test_equal_weights_solve_another_problem():
    clients = Federation()
    equal = [1.0] * len(clients.sizes)
    weight = clients.train(EVERYONE, weights=equal)
    assert relative(weight, clients.best(equal)) <= 1e-9
    assert relative(weight, clients.best()) >= 0.05


def test_the_average_is_scaffolds():
    weight, c, own = f64(0, 4, C), f64(1, 4, C), [f64(i, 4, C) for i in (2, 3)]
    ends, weights = [f64(4, 4, C), f64(5, 4, C)], [3.0, 1.0]
    deltas = [{"w": weight - end} for end in ends]
    shifts = []
    for before, delta in zip(own, deltas, strict=True):
        after = scaffold_control({"w": before}, {"w": c}, delta, steps=7, lr=0.1)
        shifts.append({"w": after["w"] - before})
    want, control = scaffold_step(
        {"w": weight}, {"w": c}, deltas, shifts, weights, participation=0.3
    )
    got = tct_average(
        weight, c, ends, weights, participation=0.3, lr=0.1, local_steps=7
    )
    assert relative(got[0], want["w"]) <= 1e-14
    assert relative(got[1], control["w"]) <= 1e-14
    alone = tct_control(own[0], c, weight, ends[0], lr=0.1, local_steps=7)
    assert relative(alone - own[0], shifts[0]["w"]) <= 1e-14


def test_averages_of_float32_are_taken_in_float64():
    weight, c = randn(0, 50, C), randn(1, 50, C)
    ends = [weight + 1e-3 * randn(i, 50, C) for i in range(2, 9)]
    options = {"lr": 1e-3, "local_steps": 100}
    new, control = tct_average(weight, c, ends, [1.0] * 7, **options)
    assert new.dtype == control.dtype == torch.float32
    exact_new, exact_control = tct_average(
        weight.double(), c.double(), [e.double() for e in ends], [1.0] * 7, **options
    )
    assert torch.equal(new, exact_new.float())
    assert torch.equal(control, exact_control.float())
    same, _ = tct_average(weight, c, [ends[0]] * 3, [5, 1, 7], **options)
    assert torch.equal(same, ends[0])
    assert tct_control(c, c, weight, ends[0].double(), **options).dtype == c.dtype


# --- refusals -------------------------------------------------------------------------


Z0, Y0, W0 = f64(0, 5, 8), targets(0, 5), f64(1, 8, C)
S0 = gram_spectrum(Z0)
NAN, INF = float("nan"), float("inf")


def steps(Z=Z0, Y=Y0, weight=W0, h=None, **more):
    return tct_steps(Z, Y, weight, h, **{"lr": 0.1, "local_steps": 2} | more)


def update(Z=Z0, Y=Y0, weight=W0, h=None, **more):
    return tct_update(Z, Y, weight, h, S0, **{"lr": 0.1, "local_steps": 2} | more)


def average(c=W0, ends=(W0,), weights=(1,), **more):
    return tct_average(W0, c, ends, weights, **{"lr": 0.1, "local_steps": 2} | more)


REFUSED = [
    *(
        (partial(call, **wrong), culprit)
        for call in (update, steps)
        for wrong, culprit in (
            ({"local_steps": 0}, "local_steps must be >= 1"),
            *(({"lr": lr}, "lr must be > 0") for lr in (0.0, NAN, INF)),
        )
    ),
    (lambda: average(participation=2), "participation"),
    (lambda: tct_control(W0, W0, W0, W0, local_steps=2, lr=0.0), "lr must be > 0"),
    (lambda: largest_safe_lr(-1.0), "largest eigenvalue"),
]


@pytest.mark.parametrize(("call", "culprit"), REFUSED)
def test_what_cannot_be_is_named(call, culprit):
    with pytest.raises(ConfigurationError, match=culprit):
        call()
