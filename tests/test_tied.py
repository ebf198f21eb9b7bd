"""A tied parameter is merged once, under one name."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import FisherClient
from flwr_fisher.curvature import STRUCTURES, fisher
from flwr_fisher.errors import RoundError, StructureError
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FedFisherOneShot
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
    with pytest.raises(StructureError, match="layer '1' normalises by the batch"):
        fisher(model, [torch.randn(4, 1, 3, 3)], structure=structure)
