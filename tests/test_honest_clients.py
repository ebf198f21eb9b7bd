"""A hundred honest clients of very unlike sizes get what Flower's FedAvg gives them."""

from functools import cache

import pytest
from unequal import (
    CLIENTS,
    METHODS,
    SIZES,
    Federation,
    FlowersFedAvg,
    furthest,
    holdings,
    metrics_apart,
    without_limits,
)

from flwr_fisher.strategies import FedAvg


@cache
def some_clients():
    return Federation(holdings("digits", alpha=0.1, share=10, clients=30)[::2])


def test_fedavg_is_flowers_in_every_round():
    """Sizes by Zipf's law over three decades, in parameters and in metrics.

    Of each client's examples comes a fifth; benchmarks/honest_clients.py has them all.
    """
    assert (SIZES[0], SIZES[-1], len(SIZES)) == (10_000, 10, 100)
    clients = Federation(holdings("digits", alpha=0.1, share=5))
    ours, our_models = clients.run(FedAvg(min_train_nodes=CLIENTS), 2)
    theirs, their_models = clients.run(
        FlowersFedAvg(our_models, min_train_nodes=CLIENTS), 2
    )
    assert len(our_models) == 3
    assert max(furthest(our_models, their_models)) <= 1e-6
    most, count = metrics_apart(ours, theirs)
    assert most <= 1e-6
    assert count >= 6
    assert not any("num-limited" in m for m in ours.train_metrics_clientapp.values())


@pytest.mark.parametrize("name", METHODS)
def test_no_limit_touches_them(name):
    same, limited = without_limits(some_clients(), name)
    assert same
    assert limited == 0
