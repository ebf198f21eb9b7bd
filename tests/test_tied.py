"""A tied parameter is merged once, under one name."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import FisherClient
from flwr_fisher.curvature import STRUCTURES, FisherOptions, fisher
from flwr_fisher.errors import RoundError, StructureError
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FedFisherOneShot
from flwr_fisher.tangent.head import one_output_copy
from flwr_fisher.testing import LocalGrid


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


def client():
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(5, (12, 3)), torch.randint(5, (12,)))
    return FisherClient(Tied(), DataLoader(data, batch_size=4), device="cpu")


def test_the_merge_reaches_both_places():
    grid = LocalGrid(client().as_client_app(), 2)
    model = Tied()
    arrays = ArrayRecord(shared_state(model))
    result = FedFisherOneShot(fraction_evaluate=0.0).start(grid, arrays)
    merged = result.arrays.to_torch_state_dict()
    assert list(merged) == ["embed.weight"]
    model.load_state_dict(merged, strict=False)
    assert torch.equal(model.head.weight, merged["embed.weight"])


def test_both_names_at_once_are_refused():
    grid = LocalGrid(client().as_client_app(), 2)
    strategy = FedFisherOneShot(fraction_evaluate=0.0)
    with pytest.raises(RoundError, match=r"'head.weight'.*second names.*shared_state"):
        strategy.start(
            grid, ArrayRecord(Tied().state_dict()), train_config=ConfigRecord()
        )


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_statistics_in_eval_mode_are_refused(affine, structure):
    norm = nn.BatchNorm2d(3, affine=affine, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), norm, nn.Flatten())
    with pytest.raises(StructureError, match="track_running_stats=False"):
        fisher(model, [torch.randn(4, 1, 3, 3)], structure=structure)


class Writer(nn.Module):
    """Logits at every position; the weight may be used otherwise than by its layers."""

    def __init__(self, padding=None, use="twice"):
        super().__init__()
        self.embed = nn.Embedding(5, 4, padding_idx=padding)
        self.mix, self.head = nn.Linear(4, 4), nn.Linear(4, 5, bias=use == "bias")
        self.head.weight, self.use = self.embed.weight, use

    def forward(self, x):
        h = self.mix(self.embed(x)).tanh()
        if self.use == "scaled":
            h = h + self.embed.weight.mean(0)
        if self.use == "again":
            h = h + self.embed(x.flip(1))
        return self.head(h)


IDS = torch.tensor([[1, 2, 1], [3, 0, 4], [0, 0, 2], [4, 4, 4], [1, 3, 0]])
NEXT = torch.tensor([[2, 1, -100], [0, 4, 3], [0, 2, 1], [4, 4, -100], [3, 0, 2]])


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("use", ["twice", "bias", "scaled", "again"])
@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_a_tied_weights_diagonal_is_each_examples(padding, use, structure):
    torch.manual_seed(0)
    model = Writer(padding, use).double()
    want = torch.zeros_like(model.embed.weight)
    for x, y in zip(IDS, NEXT, strict=True):
        loss = nn.functional.cross_entropy(model(x[None])[0], y, reduction="sum")
        (g,) = torch.autograd.grad(loss, model.embed.weight)
        want += g.square() / len(IDS)
    options = FisherOptions.full(expectation="empirical")
    for batches in ([(IDS, NEXT)], list(zip(IDS.split(2), NEXT.split(2), strict=True))):
        got = fisher(model, batches, structure, options=options).diagonal()[
            "embed.weight"
        ]
        assert torch.allclose(got, want, 1e-9, 1e-12)


def test_a_head_with_two_names_is_replaced_under_both():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(3, 4)
            self.second = self.first

        def forward(self, x):
            return self.second(x)

    assert one_output_copy(Both(), "first", seed=0)(torch.ones(2, 3)).shape == (2, 1)
