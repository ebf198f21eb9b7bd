"""Robust merging, and the cap on one client's share of a layer's curvature."""

import math
from dataclasses import replace

import pytest
import torch
from oracles import CLIENT_CURVATURES, flat, posteriors, randn
from virtual import (
    LIFTED,
    Watched,
    change_array,
    close,
    fedfisher_with,
    quick_app,
    same_bits,
    tiny_arrays,
)

from flwr_fisher.curvature import Diagonal
from flwr_fisher.curvature.operators.lazy import shared_blocks
from flwr_fisher.merge import LocalPosterior, fedfisher, merge_settings
from flwr_fisher.merge.outliers import JUDGES, without_outliers
from flwr_fisher.merge.weights import layer_weights
from flwr_fisher.testing import LocalGrid

KINDS = CLIENT_CURVATURES
all_kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def moved(client, factor):
    return replace(client, params={k: v * factor for k, v in client.params.items()})


def hostile(clients):
    """Return what the first client may send in its place."""
    first = clients[0]
    spiked = first.curvature.scaled(1e30)
    return {
        "large": moved(first, 1e4),
        "larger than floats": moved(first, 1e250),
        "flipped and spiked": replace(moved(first, -20), curvature=spiked),
        "sure of nothing": replace(
            moved(first, 30), curvature=first.curvature.scaled(0.0)
        ),
        "with all examples": replace(moved(first, 30), num_examples=2.0**62),
    }


# --- a client's distance --------------------------------------------------------------


@all_kinds
def test_distances_are_those_of_a_dense_computation(make):
    clients = posteriors(make, 5)
    names = list(clients[0].params)
    stacked = {k: torch.stack([c.params[k] for c in clients]) for k in names}
    centre = {k: values.median(0).values for k, values in stacked.items()}
    layers = []
    for parts in shared_blocks([c.curvature for c in clients]):
        away = [
            flat({k: c.params[k] - centre[k] for k in parts[0].shapes}) for c in clients
        ]
        rises = torch.tensor([[v @ F.to_dense() @ v for v in away] for F in parts])
        rises /= rises.median(1, keepdim=True).values
        seen = [torch.cat([rises[:i, i], rises[i + 1 :, i]]) for i in range(5)]
        layers.append(torch.stack([each.double().quantile(0.5) for each in seen]))
    distances = torch.stack(layers).mean(0).sqrt()
    got = without_outliers(clients, math.inf).distances
    assert torch.allclose(torch.tensor(got).double(), distances / distances.median())


@all_kinds
@pytest.mark.parametrize("attack", hostile(posteriors(KINDS["dense"])))
def test_an_outlier_is_left_out(make, attack):
    clients = posteriors(make, 7)
    other = posteriors(make, 7)[1:]
    attacked = [hostile(clients)[attack], *other]
    most = 3.0 * sorted(c.num_examples for c in attacked)[3]
    assert max(c.num_examples for c in other) <= most
    got = fedfisher(attacked, outlier=3.0)
    assert got.shares[0] == 0.0
    alone = fedfisher(other, outlier=3.0)
    assert got.shares[1:] == alone.shares
    assert all(torch.equal(got.params[k], v) for k, v in alone.params.items())
    # Without it, the same upload leads the merge elsewhere.
    if attack != "sure of nothing":
        plain = fedfisher(attacked) if "floats" not in attack else None
        assert plain is None or not all(
            torch.allclose(plain.params[k], v) for k, v in alone.params.items()
        )


@all_kinds
def test_a_client_cannot_move_its_distance_by_its_own_curvature(make):
    clients = posteriors(make, 5)
    lied = replace(
        clients[0], curvature=clients[0].curvature.scaled(1e12), num_examples=1e18
    )
    before = without_outliers(clients, math.inf).distances
    assert without_outliers([lied, *clients[1:]], math.inf).distances == pytest.approx(
        before, rel=1e-12
    )


def test_buffers_are_measured_too():
    means = [randn(i, 4).double() for i in range(5)]
    means[2] *= 1e6
    clients = [
        replace(client, params={**client.params, "mean": mean})
        for client, mean in zip(posteriors(KINDS["diagonal"], 5), means, strict=True)
    ]
    screened = without_outliers(clients, 3.0)
    assert screened.indices == [0, 1, 3, 4]
    assert list(screened.outliers()) == [2]


# --- where nothing is out of bounds ---------------------------------------------------


@all_kinds
def test_without_outliers_no_bit_changes(make):
    clients = posteriors(make, 6)
    want, got = fedfisher(clients), fedfisher(clients, outlier=1e6)
    assert got.shares == want.shares
    assert got.residuals == want.residuals
    assert all(torch.equal(got.params[k], v) for k, v in want.params.items())


def test_counters_are_no_distance():
    clients = posteriors(KINDS["diagonal"], 5)
    counting = [
        replace(c, params={**c.params, "n": torch.tensor(10**6 if i == 2 else i)})
        for i, c in enumerate(clients)
    ]
    before, after = (without_outliers(c, 3.0).distances for c in (clients, counting))
    assert before == after


def test_many_clients_are_judged_by_some_from_among_all():
    clients = [
        replace(c, curvature=c.curvature.scaled(0.0)) if i < 20 else c
        for i, c in enumerate(posteriors(KINDS["diagonal"], 60))
    ]
    clients[5] = moved(clients[5], 1e4)  # whom the first twenty cannot see
    assert 5 not in without_outliers(clients, 5.0).indices


def test_of_an_even_number_the_median_is_between_two():
    """The centre is 2, and the distances 2, 1, 1 and 7 of it have the median 1.5."""
    clients = [
        LocalPosterior({"w": torch.tensor([x])}, Diagonal({"w": torch.ones(1)}), 1)
        for x in (0.0, 1.0, 3.0, 9.0)
    ]
    found = without_outliers(clients, math.inf).distances
    assert found == pytest.approx([d / 1.5 for d in (2, 1, 1, 7)])


@pytest.mark.parametrize("count", [1, 2])
def test_two_have_no_majority(count):
    clients = posteriors(KINDS["kfac"], 3)[:count]
    clients[0] = moved(clients[0], 1e3)
    want, got = fedfisher(clients), fedfisher(clients, outlier=1.0)
    assert all(torch.equal(got.params[k], v) for k, v in want.params.items())


@pytest.mark.parametrize("count", [5, 3 * JUDGES + 1])
def test_the_order_of_clients_does_not_matter(count):
    clients = posteriors(KINDS["diagonal"], count)
    clients[0] = moved(clients[0], 1e3)
    got = without_outliers(clients, 5.0)
    turned = without_outliers(clients[::-1], 5.0)
    assert 0 not in got.indices
    assert sorted(count - 1 - index for index in turned.indices) == got.indices
    if count <= JUDGES:
        assert turned.distances[::-1] == pytest.approx(got.distances, rel=1e-12)


# --- examples -------------------------------------------------------------------------


def test_examples_count_up_to_a_multiple_of_the_median():
    clients = posteriors(KINDS["diagonal"], 5)  # of 10, 20, … 50 examples
    clients[1] = replace(clients[1], num_examples=2.0**62)
    screened = without_outliers(clients, 100.0)
    assert [p.num_examples for p in screened.posteriors] == [10, 4000, 30, 40, 50]


# --- the cap --------------------------------------------------------------------------


def options(**given):
    return merge_settings(**{"balance": 0.0, "robust": 0.0, **given})


@pytest.mark.parametrize("max_share", [0.5, 0.6, 0.9])
@pytest.mark.parametrize("spike", [1e3, 1e30, 1e300])
def test_no_client_holds_more_than_its_share(max_share, spike):
    traces = [1.0, 2.0, spike, 4.0]
    weights = layer_weights(
        [3, 1, 2, 2], traces, [0.0] * 4, options(max_share=max_share)
    )
    held = [w * t for w, t in zip(weights, traces, strict=True)]
    assert held[2] / sum(held) == pytest.approx(max_share, rel=1e-12)
    assert sum(weights) == pytest.approx(1.0)
    assert weights[0] / weights[1] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("examples", "traces"),
    [
        ([1, 1, 1], [1.0, 1.0, 2.0]),  # at its share, not above
        ([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]),
        ([1, 9], [1.0, 1e6]),  # no majority of two
        ([1, 1, 1], [0.0, 0.0, 0.0]),
    ],
)
def test_the_cap_leaves_others_bit_for_bit(examples, traces):
    rises = [0.3, 0.2, 0.5, 0.1][: len(examples)]
    free = layer_weights(examples, traces, rises, options(max_share=1.0))
    assert layer_weights(examples, traces, rises, options()) == free


@pytest.mark.parametrize("spike", [10.0, 1e30])
def test_an_outlier_in_curvature_counts_as_a_multiple_of_the_median(spike):
    traces = [1.0, 2.0, spike, 3.0, 1.0]
    weights = layer_weights([1] * 5, traces, [0.0] * 5, options(outlier=1.5))
    held = [w * t for w, t in zip(weights, traces, strict=True)]
    assert held[2] / held[1] == pytest.approx(1.5, rel=1e-12)
    assert held[3] / held[1] == 1.5
    assert weights[0] == weights[1] == weights[4]
    # Where most are sure of everything, the median says nothing.
    sure = [0.0, 0.0, 0.0, 1.0, 2.0]
    free, robust = options(max_share=1.0), options(max_share=1.0, outlier=1.5)
    assert layer_weights([1] * 5, sure, [0.0] * 5, robust) == layer_weights(
        [1] * 5, sure, [0.0] * 5, free
    )


def test_who_alone_is_sure_of_anything_moves_nothing():
    weights = layer_weights([1, 1, 1], [0.0, 0.0, 1.0], [0.0] * 3, options())
    assert weights == [0.5, 0.5, 0.0]


# --- the strategy ---------------------------------------------------------------------


def test_the_strategy_leaves_out_an_outlier_and_logs_who(caplog):
    clients = quick_app()

    def run(tamper, **options):
        caplog.clear()
        app = Watched(clients, {3: tamper})
        strategy = fedfisher_with(
            codec="lossless", fraction_evaluate=0.0, policy=LIFTED, **options
        )
        with caplog.at_level("INFO", logger="flwr"):
            result = strategy.start(
                LocalGrid(app, 5, seed=1), tiny_arrays(), num_rounds=1
            )
        return result.arrays, result.details.shares, caplog.text

    away = change_array("3.weight", lambda values: -50.0 * values)
    honest, shares, text = run(away, outlier=4.0)
    assert "leaving partition-3 out of the merge: its model is " in text
    assert "'num-outliers': 1" in text
    assert [share == 0.0 for share in shares] == [False] * 3 + [True, False]
    # What it sent makes no difference any more.
    further = change_array("3.weight", lambda values: -60.0 * values)
    assert same_bits(run(further, outlier=4.0)[0], honest)
    plain, shares, text = run(away)
    assert "out of the merge" not in text
    assert min(shares) > 0
    assert not close(plain, honest, 1e-3)
