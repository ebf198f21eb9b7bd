"""What is left out, or drawn at random: within its bound, and unbiased."""

import itertools
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import EXACT, diagonal_fisher, flat, randn, relative, rng, seeded
from torch import nn

from flwr_fisher.curvature import FisherOptions, fisher
from flwr_fisher.curvature.estimate.accumulators import side_by_side
from flwr_fisher.curvature.estimate.layers import Positions, grid_steps, layer_of
from flwr_fisher.curvature.estimate.pieces import worth_keeping

full = FisherOptions.full


def assert_unbiased(draws, want, slack=1e-6):
    """Check the mean of random tensors against a bound from their own spread."""
    values = torch.stack(draws)
    error = values.std(0) / len(values) ** 0.5
    assert ((values.mean(0) - want).abs() <= 4.5 * error + slack).all()


# --- tolerance ------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 9), st.floats(0, 1), st.integers(0, 10**6),
    st.floats(0, 12),
)  # fmt: skip
def test_what_is_dropped_is_within_the_tolerance(k, n, tolerance, seed, spread):
    weights = torch.exp(spread * randn(seed, k, n))
    kept = worth_keeping(weights, tolerance)
    lost = float(weights[~kept].double().sum())
    assert lost <= tolerance * float(weights.double().sum()) * (1 + 1e-9)
    if tolerance == 0:
        assert kept.all()
    if kept.any() and not kept.all():
        assert weights[~kept].max() <= weights[kept].min()


class Rows(nn.Module):
    """Its Fisher is that of its outputs."""

    def __init__(self, classes):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(classes))

    def forward(self, rows):
        return rows + self.shift


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 7), st.integers(1, 40), st.floats(0, 0.3), st.integers(0, 999))
def test_the_share_left_out_of_a_fisher_is_never_exceeded(c, n, tolerance, seed):
    logits, options = 6 * randn(seed, n, c), full(tolerance=tolerance)
    exact = fisher(Rows(c), [logits], "diagonal", options=EXACT)
    close = fisher(Rows(c), [logits], "diagonal", options=options)
    left_out = flat(exact.diagonal()) - flat(close.diagonal())
    assert left_out.min() >= -1e-5 * exact.trace()
    assert left_out.sum() <= (tolerance + 1e-5) * exact.trace()


class Table(nn.Module):
    """Logits by kind of example; of kind k, k + 2 classes have a chance."""

    def __init__(self, kinds):
        super().__init__()
        self.logits = nn.Linear(kinds, kinds + 1, bias=False)
        self.seen = SimpleNamespace(passes=0)
        with torch.no_grad():
            self.logits.weight.copy_(-50.0 * torch.ones(kinds + 1, kinds).tril(-2))

    def forward(self, x):
        outputs = self.logits(x).clone()
        outputs.register_hook(self.count)
        self.count(outputs)
        return outputs

    def count(self, examples):
        self.seen.passes += len(examples)


@pytest.mark.parametrize(
    ("kinds", "batch", "memory"),  # hardly any wait, or all
    [(3, 12, None), (15, 96, None), (15, 12, 2**30)],
)
def test_no_more_passes_than_by_groups_of_alike(kinds, batch, memory):
    """Kind k keeps k + 1 pieces, so there are groups of 1, 2 to 3, 4 to 7 and so on."""
    kind = torch.randperm(96, generator=rng(2)) % kinds
    model, x = Table(kinds), nn.functional.one_hot(kind, kinds).float()
    options = full(tolerance=1e-9)
    found = fisher(
        model, x.split(batch), "diagonal", options=options, max_batch_bytes=memory
    )
    count = (kind + 1).double()
    # Beside the largest of their group: as many as the next power of two, less one.
    most = (2 ** (count.log2().floor() + 1) - 1).sum()
    once = len(x)  # forwards, before a group's own
    of_check = 5 + 1 + 5 * batch
    assert once + count.sum() <= model.seen.passes - of_check <= 2 * once + most
    want = diagonal_fisher(model, x)["logits.weight"]
    assert relative(found.diagonal()["logits.weight"], want) <= 1e-6


# --- few passes, and drawn labels -----------------------------------------------------


class Tokens(nn.Module):
    """Every position's output hangs on every position's input."""

    def __init__(self, outputs):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, outputs)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.last(hidden + 3 * hidden.mean(1, keepdim=True))


def case(tokens, outputs=12):
    flattened = nn.Sequential(nn.Flatten(), nn.Linear(12, outputs))
    model = seeded(lambda: Tokens(outputs)) if tokens else flattened
    return model, randn(0, 3, 4, 3)


def passes_of(model):
    """Return a list that grows by each backward pass's number of examples."""
    passes = []

    def watch(_, __, outputs):
        outputs = outputs.clone()
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: passes.append(len(gradient)))
        return outputs

    model.register_forward_hook(watch)
    return passes


DRAWN = {
    "one pass": (True, {"max_passes": 1, "tolerance": 0}),
    "three": (True, {"max_passes": 3}),
    "one, of a label": (False, {"max_passes": 1}),
    "three, of a label": (False, {"max_passes": 3, "tolerance": 0}),
    "sampled": (False, {"expectation": "sampled"}),
    "sampled tokens": (True, {"expectation": "sampled"}),
}


@pytest.mark.parametrize(("tokens", "options"), DRAWN.values(), ids=DRAWN)
def test_the_mean_over_seeds_is_exact(tokens, options):
    model, x = case(tokens)
    want = flat(fisher(model, [x], "diagonal", options=EXACT).diagonal())
    many = x.repeat(12, 1, 1)  # of each example, of which each has draws of its own
    take = partial(fisher, model, [many], "diagonal", options=full(**options))
    draws = [flat(take(seed=seed).diagonal()) for seed in range(50)]
    drops = options.get("tolerance", 1e-3) and "max_passes" in options
    assert_unbiased(draws, want, slack=1e-3 * want.sum() if drops else 1e-6)
    assert torch.stack(draws).std() > 0


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_many_outputs_share_one_pass(likelihood):
    model, x = case(tokens=False)
    take = partial(fisher, model, [x], "diagonal", likelihood=likelihood)
    exact = take(options=EXACT).diagonal()
    passes = passes_of(model)
    # One position's own terms are exact, and a plain layer mixes none.
    torch.testing.assert_close(
        take(options=full(max_passes=1, tolerance=0)).diagonal(), exact
    )
    assert len(passes) == 3  # two check the layer


@pytest.mark.parametrize("tolerance", [0, 1e-3])
@pytest.mark.parametrize(("tokens", "max_passes"), [(False, 2), (True, 2), (True, 4)])
def test_no_example_costs_more_passes(tokens, max_passes, tolerance):
    model, x = case(tokens)
    x = x.repeat(10, 1, 1)
    passes = passes_of(model)
    fisher(model, [x], options=full(max_passes=max_passes, tolerance=tolerance))
    most = (max_passes + tokens + 2) * len(x)  # two passes check the layer
    assert sum(passes) <= most
    passes.clear()
    fisher(model, [x], options=EXACT)
    assert sum(passes) > most


@pytest.mark.parametrize(("tokens", "enough"), [(False, 11), (True, 44)])
def test_where_they_are_enough_nothing_is_drawn(tokens, enough):
    model, x = case(tokens)
    want = fisher(model, [x], options=EXACT).to_dense()
    got = fisher(model, [x], options=full(tolerance=0, max_passes=enough)).to_dense()
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "options", [{"max_passes": 2}, {"expectation": "sampled"}, {"max_positions": 2}]
)
def test_a_seed_repeats_it_and_torchs_own_is_left_alone(options):
    model, x = case(tokens=True)
    state = torch.get_rng_state()
    one, again, other = (
        fisher(model, [x], options=full(**options), seed=seed).to_dense()
        for seed in (1, 1, 2)
    )
    assert torch.equal(again, one)
    assert not torch.equal(other, one)
    assert torch.equal(torch.get_rng_state(), state)


# --- positions ------------------------------------------------------------------------


LAYERS = {
    "tokens": (nn.Linear(3, 4), (2, 11, 3)),
    "two axes of tokens": (nn.Linear(3, 4, bias=False), (2, 5, 3, 3)),
    "one dimension": (nn.Conv1d(2, 4, 3, stride=2, padding=1), (2, 2, 13)),
    "groups": (nn.Conv2d(4, 6, (3, 2), groups=2, bias=False), (2, 4, 7, 8)),
    "dilated": (nn.Conv2d(2, 4, 3, dilation=2, stride=(2, 1)), (2, 2, 12, 9)),
    "same": (nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular"), (2, 2, 9, 6)),
    "three dimensions": (nn.Conv3d(1, 2, 2), (2, 1, 4, 5, 4)),
}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 100))
@settings(max_examples=200, deadline=None)
def test_a_grid_leaves_about_so_many(sizes, most):
    steps = grid_steps(sizes, most)
    kept = [-(-size // step) for size, step in zip(sizes, steps, strict=True)]
    assert math.prod(kept) <= most
    assert all(1 <= step <= size for size, step in zip(sizes, steps, strict=True))
    if math.prod(sizes) <= most:
        assert steps == [1] * len(sizes)
    else:  # no axis could have a smaller step
        wider = [
            math.prod(kept) // kept[axis] * -(-sizes[axis] // (steps[axis] - 1))
            for axis in range(len(sizes))
            if steps[axis] > 1
        ]
        assert min(wider) > most / 4
    grid, weight = Positions(most, seed=0).of_inputs(sizes)
    assert weight == math.prod(steps)
    _, weight = Positions(most, seed=0).of_gradients(sizes)
    assert weight == math.prod(grid_steps(sizes, 2 * most))
    assert all(s.start < s.step == t for s, t in zip(grid, steps, strict=True))


@pytest.mark.parametrize("most", [1, 4, 10])
@pytest.mark.parametrize("name", LAYERS)
def test_all_origins_together_are_every_position_once(name, most):
    layer, shape = LAYERS[name]
    inputs = randn(0, *shape)
    kronecker = layer_of(layer, "weight", "bias" if layer.bias is not None else None)
    outputs = layer(inputs).detach()
    steps = grid_steps(kronecker.positions(inputs.shape), most)

    def moments(grid):
        columns = (
            kronecker.input_columns(inputs, grid),
            kronecker.output_columns(outputs, grid),
        )
        flattened = [side_by_side(each) for each in columns]
        return [each @ each.mT for each in flattened]

    grids = [
        tuple(slice(o, None, step) for o, step in zip(origins, steps, strict=True))
        for origins in itertools.product(*map(range, steps))
    ]
    for of_grids, whole in zip(
        zip(*map(moments, grids), strict=True), moments(None), strict=True
    ):
        torch.testing.assert_close(torch.stack(of_grids).sum(0), whole)


def net():
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(3, 4, 3, stride=2),
            nn.Flatten(),
            nn.Linear(36, 3),
        )
    )


IMAGES = randn(1, 6, 1, 8, 8)


@pytest.mark.parametrize(("batch", "tolerance"), [(2, 0.01), (6, 0)])
def test_the_mean_over_seeds_is_that_of_all_positions(batch, tolerance):
    take = partial(fisher, net(), IMAGES.repeat(4, 1, 1, 1).split(batch))
    few = full(tolerance=tolerance, max_positions=2)
    draws = [take(options=few, seed=seed).blocks() for seed in range(9 * batch)]
    for block, *of_draws in zip(
        take(options=full(tolerance=tolerance)).blocks(), *draws, strict=True
    ):
        for factor in ("A", "G"):
            want = getattr(block, factor)
            values = [getattr(draw, factor) for draw in of_draws]
            assert_unbiased(values, want)
            several = block.weight != "4.weight"
            assert (torch.stack(values).std(0).max() > 1e-3 * want.std()) == several


@pytest.mark.parametrize(
    ("structure", "options"),
    [
        ("kfac", {"max_positions": 64}),  # as many as there are
        ("kfac", {"max_positions": 4, "weight_sharing": "reduce"}),
        ("diagonal", {"max_positions": 4}),
    ],
)
def test_where_every_position_counts(structure, options):
    bounded = full(tolerance=0, **options)
    want = fisher(
        net(), [IMAGES], structure, options=replace(bounded, max_positions=None)
    )
    got = fisher(net(), [IMAGES], structure, options=bounded)
    assert torch.equal(got.to_dense(), want.to_dense())


# --- examples -------------------------------------------------------------------------


COUNT, SOME = 60, 11
LABELS = torch.arange(COUNT) // 20  # sorted
X = randn(5, COUNT, 4) + 2 * LABELS.unsqueeze(1)
SORTED = list(zip(X.split(7), LABELS.split(7), strict=True))
LINEAR = seeded(lambda: nn.Linear(4, 3))


@pytest.mark.parametrize("expectation", ["exact", "empirical"])
def test_a_fisher_of_some_examples_is_unbiased_for_a_sorted_loader(expectation):
    take = partial(fisher, LINEAR, SORTED, "diagonal", num_examples=COUNT)
    options = partial(full, expectation=expectation, tolerance=0)
    every = flat(take(options=options()).diagonal())
    some = options(examples=SOME)
    draws = [flat(take(options=some, seed=s).diagonal()) for s in range(60)]
    assert_unbiased(draws, every)
    first = fisher(LINEAR, SORTED, "diagonal", options=some)
    with pytest.raises(AssertionError):
        assert_unbiased([flat(first.diagonal()), *draws[:1]] * 30, every)
    assert torch.equal(flat(take(options=some, seed=3).diagonal()), draws[3])
