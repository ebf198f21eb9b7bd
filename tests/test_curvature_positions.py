"""K-FAC from some of a layer's positions: a grid with a random origin, unbiased."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flwr_fisher.curvature import fisher
from flwr_fisher.curvature.estimate.accumulators import side_by_side
from flwr_fisher.curvature.estimate.layers import Positions, grid_steps, layer_of

LAYERS = {
    "tokens": (nn.Linear(3, 4), (2, 11, 3)),
    "two axes of tokens": (nn.Linear(3, 4, bias=False), (2, 5, 3, 3)),
    "one dimension": (nn.Conv1d(2, 4, 3, stride=2, padding=1), (2, 2, 13)),
    "an image": (nn.Conv2d(2, 4, 3, padding=1), (2, 2, 9, 6)),
    "groups": (nn.Conv2d(4, 6, (3, 2), groups=2, bias=False), (2, 4, 7, 8)),
    "dilated": (nn.Conv2d(2, 4, 3, dilation=2, stride=(2, 1)), (2, 2, 12, 9)),
    "padded by itself": (
        nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular"),
        (2, 2, 6, 6),
    ),
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
    assert all(s.start < s.step == t for s, t in zip(grid, steps, strict=True))


@pytest.mark.parametrize("most", [1, 4, 10])
@pytest.mark.parametrize("name", LAYERS)
def test_all_origins_together_are_every_position_once(name, most):
    layer, shape = LAYERS[name]
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    kronecker = layer_of(layer, "weight", "bias" if layer.bias is not None else None)
    outputs = layer(inputs).detach()
    steps = grid_steps(kronecker.positions(inputs.shape), most)

    def moments(grid):
        columns = (
            kronecker.input_columns(inputs, grid),
            kronecker.output_columns(outputs, grid),
        )
        flat = [side_by_side(each) for each in columns]
        return flat[0] @ flat[0].mT, flat[1] @ flat[1].mT

    grids = [
        tuple(slice(o, None, step) for o, step in zip(origins, steps, strict=True))
        for origins in itertools.product(*map(range, steps))
    ]
    for of_grids, whole in zip(
        zip(*map(moments, grids), strict=True), moments(None), strict=True
    ):
        torch.testing.assert_close(torch.stack(of_grids).sum(0), whole)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def images():
    return torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("batch", "tolerance"), [(2, 0.01), (6, 0)])
def test_the_mean_over_seeds_is_that_of_all_positions(batch, tolerance):
    model, loader = net(), images().split(batch)
    take = partial(fisher, model, loader, tolerance=tolerance)
    draws = [take(max_positions=2, seed=seed) for seed in range(34 * batch)]
    every = (take().blocks(), *(draw.blocks() for draw in draws))
    for block, *of_draws in zip(*every, strict=True):
        for factor in ("A", "G"):
            want = getattr(block, factor)
            values = torch.stack([getattr(draw, factor) for draw in of_draws])
            error = values.std(0) / len(values) ** 0.5
            assert ((values.mean(0) - want).abs() <= 4.5 * error + 1e-6).all()
            several = block.weight != "4.weight"
            assert (values.std(0).max() > 1e-3 * want.std()) == several


def test_other_structures_still_see_every_position():
    structures = ["kfac", "diagonal", "block"]
    take = partial(fisher, net(), [images()], structure=structures, tolerance=0)
    some, every = take(max_positions=4), take()
    assert not torch.equal(some[0].blocks()[0].A, every[0].blocks()[0].A)
    assert torch.equal(some[1].to_dense(), every[1].to_dense())
    assert torch.equal(some[2].to_dense(), every[2].to_dense())


def test_enough_positions_are_all_of_them():
    want = fisher(net(), [images()], tolerance=0)
    got = fisher(net(), [images()], tolerance=0, max_positions=64)
    assert torch.equal(got.to_dense(), want.to_dense())
