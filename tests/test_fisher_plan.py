"""What a Fisher will be of, told before anything is trained."""

import pytest
import torch
from nets import IMAGES, SERIES
from oracles import seeded
from torch import nn

from flwr_fisher.curvature import fisher, fisher_plan
from flwr_fisher.errors import ConfigurationError, StructureError, UnknownNameError


class Mixed(nn.Module):
    """Something of every form."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.grow = nn.LayerNorm(4), nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.odd, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x):
        x = self.grow(x) * self.scale
        x = self.norm(self.attention(x, x, x)[0] + x)
        return self.head(x.mean(1)) * self.odd.sum()


FORMS = {
    "grow.weight": "Kronecker: A 4x4, G 4x4",
    "head.weight": "Kronecker: A 5x5, G 3x3",
    "norm.weight": "diagonal",
}


def test_it_tells_every_parameters_form():
    plan = fisher_plan(seeded(Mixed), SERIES)
    forms = {each.parameters[0]: each.form for each in plan.layers if not each.slow}
    assert forms == FORMS
    assert plan.examples_at_once == len(SERIES)
    assert str(plan).endswith(f"{len(SERIES)} examples at once")


@pytest.mark.parametrize("structure", ["kfac", "diagonal", "ekfac", "block", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_the_fisher_then_is(structure, dtype):
    model, x = seeded(Mixed).to(dtype), SERIES.to(dtype)
    plan = fisher_plan(model, x, structure=structure)
    F = fisher(model, [x], structure=structure)
    assert sum(e.nbytes for e in plan.layers) == sum(t.nbytes for t in F.tensors())
    assert {n for e in plan.layers for n in e.parameters} == F.shapes.keys()


def test_memory_and_mistakes_are_told_as_by_the_fisher():
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(16, 3))
    assert fisher_plan(model, IMAGES, max_batch_bytes=1).examples_at_once == 1
    with pytest.raises(UnknownNameError, match="kfca"):
        fisher_plan(model, IMAGES, structure="kfca")
    with pytest.raises(ConfigurationError, match="max_batch_bytes"):
        fisher_plan(model, IMAGES, max_batch_bytes=0)
    with pytest.raises(StructureError, match="by the statistics of each batch"):
        fisher_plan(
            nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)),
            torch.ones(2, 3),
        )
