"""K-FAC against loops over positions, and against nngeometry."""

from functools import partial

import pytest
import torch
from oracles import SMALL_SHAPE, headed, randn, relative, seeded, small_net
from torch import nn

from flwr_fisher import curvature
from flwr_fisher.curvature import STRUCTURES
from flwr_fisher.curvature.estimate import accumulators
from flwr_fisher.curvature.estimate.accumulators import SecondMoment
from flwr_fisher.errors import StructureError

# Every class, so that only rounding separates it from the oracles.
fisher = partial(curvature.fisher, tolerance=0)

TOLERANCE = 1e-5


# --- nngeometry -----------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_nngeometry_engine_returns_the_same_curvature(structure):
    for make, shape in ((small_net, SMALL_SHAPE), (lambda: nn.Linear(3, 3), (3,))):
        model, x = seeded(make), randn(1, 7, *shape)
        batches = [(x[:3], None), (x[3:6], None), (x[6:], None)]
        ours = fisher(model, batches, structure=structure)
        theirs = fisher(model, batches, structure=structure, engine="nngeometry")
        assert type(ours) is type(theirs)
        assert ours.shapes == theirs.shapes
        assert list(ours.shapes) == list(theirs.shapes)
        # Where eigenvalues are nearly equal, rounding (and so the processor) decides
        # which vectors an eigendecomposition returns.
        tolerance = 10 * TOLERANCE if structure == "ekfac" else TOLERANCE
        for name, entries in ours.diagonal().items():
            assert relative(theirs.diagonal()[name], entries) <= tolerance, name
        assert relative(theirs.to_dense(), ours.to_dense()) <= tolerance
        assert not any(p.requires_grad for p in theirs.diagonal().values())


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv2d(2, 2, 2, groups=2), "wrong for grouped convolutions"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), "only zero padding"),
        (nn.Conv2d(2, 2, 3, padding="same"), "only zero padding"),
        (nn.BatchNorm2d(2), "BatchNorm2d is not supported"),
        (nn.Conv2d(2, 2, 2).requires_grad_(False), "frozen parameters"),
        (nn.ConvTranspose2d(2, 2, 2), "ConvTranspose2d is not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_nngeometry_engine_refuses_what_it_gets_wrong(layer, reason):
    model = headed(layer, (2, 4, 4))
    with pytest.raises(
        StructureError, match=rf"layer '0' through nngeometry: .*{reason}"
    ):
        fisher(model, [randn(0, 3, 2, 4, 4)], engine="nngeometry")


@pytest.mark.parametrize("size", [1, 4, 5, 8, 9, 70])
def test_half_of_a_second_moment_is_all_of_it(monkeypatch, size):
    monkeypatch.setattr(accumulators, "_BLOCK", 4)
    columns = randn(0, 2, size, 3).double()
    moment = SecondMoment(2, size, columns)
    moment.add(columns, 2.0)
    moment.add_products(columns @ columns.mT)
    got = moment.mean(6)
    torch.testing.assert_close(got, columns @ columns.mT / 2, rtol=1e-12, atol=1e-12)
    assert got.data_ptr() == moment.total.data_ptr()
