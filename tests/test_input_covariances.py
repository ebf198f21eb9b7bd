"""The second moments of layers' inputs, against loops and against K-FAC's `A`."""

import nets
import pytest
import torch
from oracles import SMALL_SHAPE, headed, randn, relative, seeded, small_net
from torch import nn

from flwr_fisher.curvature import Kronecker, fisher, input_covariances
from flwr_fisher.errors import ConfigurationError, DataError, StructureError

MODELS = {
    "grouped": (
        lambda: headed(nn.Conv2d(4, 6, 2, groups=2, padding=1), (4, 3, 3)),
        randn(2, 20, 4, 3, 3),
    ),
    "dilated": (
        lambda: headed(nn.Conv1d(2, 3, 2, dilation=2, stride=2), (2, 7)),
        randn(3, 20, 2, 7),
    ),
    **{name: net[:2] for name, net in nets.NETS.items()},
}


@pytest.mark.parametrize("name", MODELS)
def test_they_are_what_kfac_has_of_the_same_layers(name):
    make, inputs = MODELS[name]
    model = seeded(make)
    batches = inputs.split(3)
    found = input_covariances(model, batches)
    kfac = fisher(model, batches, structure="kfac", expectation="sampled")
    wanted = {k.weight: k for k in kfac.blocks() if isinstance(k, Kronecker)}
    assert list(found) == list(wanted)
    for weight, layer in found.items():
        assert (layer.weight, layer.bias) == (weight, wanted[weight].bias)
        assert layer.A.dtype == wanted[weight].A.dtype
        assert relative(layer.A, wanted[weight].A) < 1e-6


def test_the_parts_of_a_batch_do_not_matter():
    model, x = seeded(small_net), randn(7, 50, *SMALL_SHAPE)
    whole = input_covariances(model, [x])
    for parts in (
        input_covariances(model, [x], max_batch_bytes=1),
        input_covariances(model, [x], max_batch_bytes=2000),
        input_covariances(model, [*x.split(7), x[:0]]),
    ):
        assert all(relative(parts[k].A, v.A) < 1e-6 for k, v in whole.items())


@pytest.mark.parametrize(
    ("dtype", "summed"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_sums_are_in_float32_or_better(dtype, summed):
    model, x = nn.Linear(3, 2).to(dtype), randn(9, 600, 3).to(dtype)
    A = input_covariances(model, x.split(2))["weight"].A
    a = torch.cat([x, torch.ones(600, 1)], dim=1).double()
    assert A.dtype == summed
    assert relative(A[0], a.mT @ a / 600) < 1e-6


class Moody(nn.Module):
    """Calls its layer as often as the batch is long."""

    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        for _ in range(1 if len(x) < 6 else 2):
            x = self.fc(x).tanh()
        return self.head(x)


class Folds(Moody):
    def forward(self, x):
        if len(x) < 6:
            return self.head(self.fc(x))
        return self.head(self.fc(x.repeat(2, 1)))[: len(x)]


def test_calls_that_depend_on_the_data_are_left_out_or_named():
    batches = [randn(1, 4, 3), randn(1, 6, 3)]
    assert not input_covariances(Folds(), batches)
    with pytest.raises(StructureError, match="depend on the other examples"):
        input_covariances(Moody(), batches)


def test_mistakes_are_named():
    model = nn.Linear(3, 2)
    with pytest.raises(DataError, match="no examples"):
        input_covariances(model, [])
    with pytest.raises(DataError, match="batches"):
        input_covariances(model, nets.VECTORS)
    with pytest.raises(ConfigurationError, match="max_batch_bytes must be"):
        input_covariances(model, [nets.VECTORS], max_batch_bytes=0)
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        input_covariances(model.requires_grad_(False), [nets.VECTORS])
