"""Thousands of classes: memory stays within a bound, and every layer has a form."""

import pytest
import torch
from fuzz_wire import Largest
from oracles import diagonal_fisher, relative, seeded
from torch import nn

from flwr_fisher.curvature import Diagonal, fisher
from flwr_fisher.curvature.estimate import accumulators, model_sums

VOCABULARY, WIDTH = 50_000, 16


class Language(nn.Module):
    """Predicts a token at each position, or one for all."""

    def __init__(self, vocabulary=VOCABULARY, *, pooled=False):
        super().__init__()
        self.pooled = pooled
        self.rows, self.mix = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, x):
        logits = self.head(self.mix(self.rows(x)).tanh())
        return logits.mean(1) if self.pooled else logits


def classifier():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1000))


TOKENS = torch.randint(VOCABULARY, (64, 4), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("make", "inputs", "limit"),
    [(Language, TOKENS, 2**25), (classifier, torch.randn(2**12, 64), 2**23)],
    ids=["a vocabulary of 50 000", "1000 classes"],
)
@pytest.mark.parametrize("how", [{"max_passes": 3}, {"expectation": "sampled"}])
def test_memory_stays_within_the_bound(make, inputs, limit, how):
    model = seeded(make)
    logits = inputs.shape[:2].numel() if inputs.dtype == torch.long else len(inputs)
    logits *= list(model.parameters())[-1].nbytes
    with Largest() as made:
        F = fisher(model, [inputs], max_batch_bytes=limit, **how)
    assert made.nbytes <= limit < logits  # in parts: the whole batch's would be larger
    assert sorted(F.shapes) == sorted(dict(model.named_parameters()))


def test_a_factor_that_would_be_too_large_is_an_exact_diagonal(monkeypatch):
    monkeypatch.setattr(model_sums, "LARGEST_FACTOR", 30)
    monkeypatch.setattr(accumulators, "_AT_ONCE", 300)  # in several parts
    model = seeded(lambda: Language(40, pooled=True)).double()
    tokens = TOKENS[:6, :3] % 40
    found = fisher(model, [tokens], structure=["kfac", "ekfac"], tolerance=0)
    want = diagonal_fisher(model, tokens)
    for F in found:
        kinds = {name: type(block) for block in F.blocks() for name in block.shapes}
        assert kinds["head.weight"] is kinds["head.bias"] is Diagonal
        assert kinds["mix.weight"] is not Diagonal
        for name in ("head.weight", "head.bias", "rows.weight"):
            assert relative(F.diagonal()[name], want[name]) < 1e-12, name
