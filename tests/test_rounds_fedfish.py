"""FedFish's average against a loop over single entries."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import randn, rng

from flwr_fisher.params import weighted_mean
from flwr_fisher.rounds import fedfish_average, fedfish_quotient

WEIGHTS = [5.0, 1.0, 3.0]


def entry_by_entry(deltas, fishers, weights):
    """Return sum w F D / sum w F in Python's floats; FedAvg's where all F are equal."""
    out = {}
    for key, first in deltas[0].items():
        value = torch.empty(first.numel(), dtype=torch.float64)
        for j in range(first.numel()):
            d = [float(delta[key].reshape(-1)[j]) for delta in deltas]
            f = [float(fisher[key].reshape(-1)[j]) for fisher in fishers]
            if len({x for x, w in zip(f, weights, strict=True) if w}) == 1:
                f = [1.0] * len(f)
            terms = [w * x for w, x in zip(weights, f, strict=True)]
            products = [t * y for t, y in zip(terms, d, strict=True)]
            value[j] = math.fsum(products) / math.fsum(terms)
        out[key] = value.reshape(first.shape)
    return out


def clients(seed=0, count=3, zeros=0.3, dtype=torch.float32):
    """Make updates, and Fishers some of whose entries are zero."""
    shapes = {"w": (3, 4), "b": (3,), "s": ()}
    deltas, fishers = [], []
    for i in range(count):
        g = rng(1000 * seed + i)
        deltas.append(
            {k: torch.randn(s, generator=g).to(dtype) for k, s in shapes.items()}
        )
        fishers.append(
            {
                k: (
                    torch.randn(s, generator=g).square()
                    * (torch.rand(s, generator=g) >= zeros)
                ).to(dtype)
                for k, s in shapes.items()
            }
        )
    return deltas, fishers


def assert_close(got, want, rtol=1e-6):
    assert list(got) == list(want)
    for key, value in want.items():
        torch.testing.assert_close(
            got[key].double(), value.double(), rtol=rtol, atol=1e-12
        )


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 5),
    shape=st.lists(st.integers(0, 4), max_size=3),
    zeros=st.sampled_from([0.0, 0.5, 1.0]),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_any_zeros(count, shape, zeros, exponent, seed):
    g = rng(seed)
    deltas = [
        {"w": torch.randn(shape, generator=g, dtype=torch.float64)}
        for _ in range(count)
    ]
    fishers = [
        {
            "w": torch.rand(shape, generator=g, dtype=torch.float64)
            * (torch.rand(shape, generator=g) >= zeros)
            * 10.0**exponent
        }
        for _ in range(count)
    ]
    weights = [1.0 + i for i in range(count)]
    got = fedfish_average(deltas, fishers, weights)["w"]
    want = entry_by_entry(deltas, fishers, weights)["w"]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    stacked = torch.stack([delta["w"] for delta in deltas])
    assert (got <= stacked.amax(0) + 1e-12).all()
    assert (got >= stacked.amin(0) - 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e-38, 7e30])
def test_equal_fishers_give_fedavg_bit_for_bit(dtype, value):
    for seed in range(3):
        deltas, fishers = clients(seed, count=7, dtype=dtype)
        weights = [float(w) for w in torch.rand(7, generator=rng(seed)) + 0.01]
        same = [{k: torch.full_like(v, value) for k, v in f.items()} for f in fishers]
        want = weighted_mean(deltas, weights)
        got = fedfish_average(deltas, same, weights)
        for key in want:
            assert got[key].dtype == dtype
            assert torch.equal(got[key], want[key])


def test_a_client_without_weight_is_not_heard():
    deltas, fishers = clients(0)
    want = fedfish_average(deltas[:2], fishers[:2], WEIGHTS[:2])
    fishers[2] = {k: torch.full_like(v, 1e38) for k, v in fishers[2].items()}
    got = fedfish_average(deltas, fishers, [*WEIGHTS[:2], 0.0])
    assert all(torch.equal(got[k], want[k]) for k in want)
    # Nor is one whose share is too small for a float.
    got = fedfish_average(deltas, fishers, [5e300, 1e300, 1e-100])
    assert_close(got, want)


def test_buffers_without_a_fisher_are_averaged_in_their_place():
    deltas, fishers = clients(0)
    for i in range(3):
        deltas[i] = {"mean": randn(i, 2), **deltas[i], "count": torch.tensor(i + 7)}
    got = fedfish_average(deltas, fishers, WEIGHTS)
    want = weighted_mean(deltas, WEIGHTS)
    assert list(got) == ["mean", "w", "b", "s", "count"]
    assert torch.equal(got["mean"], want["mean"])
    assert torch.equal(got["count"], want["count"])
    assert not torch.equal(got["w"], want["w"])
    bare = [{} for _ in deltas]
    assert all(
        torch.equal(fedfish_average(deltas, bare, WEIGHTS)[k], want[k]) for k in want
    )


def test_a_quotient_of_sums_keeps_the_mean_where_there_is_no_fisher():
    mean = {"w": torch.full((3,), 0.5)}
    fisher = {"w": torch.tensor([-1e-9, 0.0, 4.0])}  # rounding may go below 0
    found = fedfish_quotient({"w": torch.tensor([1.0, 1.0, 6.0])}, fisher, mean)
    assert found["w"].tolist() == [0.5, 0.5, 1.5]
