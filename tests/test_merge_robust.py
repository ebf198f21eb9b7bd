"""The cap on one client's share of a layer's curvature."""

import pytest

from flwr_fisher.merge import MergeOptions
from flwr_fisher.merge.linear_system import layer_weights


def options(**given):
    return MergeOptions(**{"balance": 0.0, "robust": 0.0, **given}).filled()


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


def test_who_alone_is_sure_of_anything_moves_nothing():
    weights = layer_weights([1, 1, 1], [0.0, 0.0, 1.0], [0.0] * 3, options())
    assert weights == [0.5, 0.5, 0.0]
