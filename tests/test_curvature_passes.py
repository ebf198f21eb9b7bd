"""A bounded number of backward passes: unbiased over classes and positions."""

from functools import partial

import pytest
import torch
from torch import nn

from flwr_fisher.curvature import fisher

DRAWS, COPIES = 50, 5  # of each example, of which each has draws of its own


class Tokens(nn.Module):
    """Every position's output hangs on every position's input."""

    def __init__(self, outputs):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, outputs)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.last(hidden + 3 * hidden.mean(1, keepdim=True))


def example(tokens, outputs=12):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 3)
    if tokens:
        return Tokens(outputs), x
    return nn.Sequential(nn.Flatten(), nn.Linear(12, outputs)), x


def counted(model):
    """Return a list that grows by each backward pass's number of examples."""
    passes = []

    def watch(_, __, outputs):
        outputs = outputs.clone()
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: passes.append(len(gradient)))
        return outputs

    model.register_forward_hook(watch)
    return passes


@pytest.mark.parametrize("tolerance", [0, 1e-3])
@pytest.mark.parametrize("max_passes", [1, 3])
@pytest.mark.parametrize("tokens", [False, True])
def test_the_mean_over_seeds_is_exact(tokens, max_passes, tolerance):
    model, x = example(tokens)
    want = fisher(model, [x], tolerance=0).diagonal()
    many = x.repeat(COPIES, 1, 1)
    take = partial(fisher, model, [many], max_passes=max_passes, tolerance=tolerance)
    draws = [take(seed=seed).diagonal() for seed in range(DRAWS)]
    for name, exact in want.items():
        values = torch.stack([draw[name] for draw in draws])
        error = values.std(0) / DRAWS**0.5
        slack = tolerance * exact.sum() + 1e-6
        assert ((values.mean(0) - exact).abs() <= 4.5 * error + slack).all()
        assert values.std() > 0


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_many_outputs_share_one_pass(likelihood):
    model, x = example(tokens=False)
    exact = fisher(model, [x], likelihood=likelihood, tolerance=0).diagonal()
    passes = counted(model)
    take = partial(fisher, model, [x], likelihood=likelihood, max_passes=1)
    draws = [take(tolerance=0, seed=seed).diagonal() for seed in range(3)]
    assert len(passes) == 3 * len(draws)  # two check the layer
    for draw in draws:
        # One position's own terms are exact, and a plain layer mixes none.
        torch.testing.assert_close(draw, exact)


@pytest.mark.parametrize("tolerance", [0, 1e-3])
@pytest.mark.parametrize(("tokens", "max_passes"), [(False, 2), (True, 2), (True, 4)])
def test_no_example_costs_more_passes(tokens, max_passes, tolerance):
    model, x = example(tokens)
    x = x.repeat(10, 1, 1)
    passes = counted(model)
    fisher(model, [x], max_passes=max_passes, tolerance=tolerance)
    most = (max_passes + tokens + 2) * len(x)  # two passes check the layer
    assert sum(passes) <= most
    passes.clear()
    fisher(model, [x], tolerance=0)
    assert sum(passes) > most


@pytest.mark.parametrize(("tokens", "enough"), [(False, 11), (True, 44)])
def test_where_they_are_enough_nothing_is_drawn(tokens, enough):
    model, x = example(tokens)
    want = fisher(model, [x], tolerance=0).to_dense()
    got = fisher(model, [x], tolerance=0, max_passes=enough).to_dense()
    assert torch.equal(got, want)


def test_a_seed_repeats_it():
    model, x = example(tokens=True)
    take = partial(fisher, model, [x], max_passes=2)
    assert torch.equal(take(seed=1).to_dense(), take(seed=1).to_dense())
    assert not torch.equal(take(seed=1).to_dense(), take(seed=2).to_dense())
