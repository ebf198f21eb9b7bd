"""A bound on memory changes nothing, and half precision loses only its rounding."""

import pytest
import torch
from fuzz_wire import Largest
from oracles import EXACT, randn, relative, rng, seeded
from torch import nn

from flwr_fisher.client.jobs.fedfish import LastEpochSquares
from flwr_fisher.curvature import STRUCTURES, FisherOptions, fisher

full = FisherOptions.full
EMPIRICAL = full(expectation="empirical")
every_structure = pytest.mark.parametrize("structure", STRUCTURES)


def net():
    """Return one that is sure of some examples, which take fewer passes."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)
        )
    )
    model[-1].weight.data.mul_(200)
    return model


IMAGES, LABELS = randn(1, 30, 1, 4, 4), torch.arange(30) % 4


# --- memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [full(tolerance=1e-6), EXACT, EMPIRICAL])
@every_structure
def test_a_bound_on_memory_changes_nothing(structure, options):
    free, some, tight = (
        fisher(net(), [(IMAGES, LABELS)], structure, options=options, max_batch_bytes=m)
        for m in (None, 2000, 1)
    )
    assert relative(some.to_dense(), free.to_dense()) <= 1e-5
    assert relative(tight.to_dense(), free.to_dense()) <= 1e-5


VOCABULARY, WIDTH = 50_000, 16


class Language(nn.Module):
    """Predicts a token at each position."""

    def __init__(self):
        super().__init__()
        self.rows, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        return self.head(self.mix(self.rows(x)).tanh())


TOKENS = torch.randint(VOCABULARY, (64, 4), generator=rng(0))


@pytest.mark.parametrize("how", [{"max_passes": 3}, {"expectation": "sampled"}])
def test_memory_stays_within_the_bound(how):
    model, limit = seeded(Language), 2**25
    logits = TOKENS.numel() * VOCABULARY * 4
    with Largest() as made:
        F = fisher(model, [TOKENS], options=full(**how), max_batch_bytes=limit)
    assert made.nbytes <= limit < logits  # in parts: the whole batch's would be larger
    assert sorted(F.shapes) == sorted(dict(model.named_parameters()))


# --- precision ------------------------------------------------------------------------


def many_batches(dtype):
    """A layer of each kind, over one position and several, and inputs of one sign."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv1d(1, 2, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.LayerNorm(8),
            nn.Linear(8, 3),
        )
    )
    inputs = torch.rand(100, 1, 6, generator=rng(1)).to(dtype).split(1)
    labels = (torch.tensor([i % 3]) for i in range(100))
    return model.to(dtype).eval(), list(zip(inputs, labels, strict=True))


def check_half(found, want, dtype):
    # A half has no number as small as a confident model's squared gradients.
    assert {tensor.dtype for tensor in found.tensors()} == {torch.float32}
    assert relative(found.to_dense(), want.to_dense()) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.bfloat16, full()), (torch.float16, EMPIRICAL)]
)
@every_structure
def test_many_batches_in_half_precision_lose_only_its_rounding(
    structure, dtype, options
):
    model, batches = many_batches(dtype)
    found = fisher(model, batches, structure, options=options)
    x, y = (torch.cat(each) for each in zip(*batches, strict=True))
    want = fisher(model.double(), [(x.double(), y)], structure, options=options)
    check_half(found, want, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_squared_gradients_in_half_precision(dtype):
    model, batches = many_batches(dtype)
    options = full(expectation="empirical-batch")
    found = fisher(model, batches, "diagonal", options=options)
    squares = LastEpochSquares(model, epochs=1)
    for x, y in batches:
        model.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()
        squares(1, 1)
    of_training = squares.curvature()
    wide = [(x.double(), y) for x, y in batches]
    want = fisher(model.double(), wide, "diagonal", options=options)
    check_half(found, want, dtype)
    check_half(of_training, want, dtype)


@pytest.mark.parametrize("options", [full(), EXACT, EMPIRICAL])
@every_structure
def test_autocast_is_accepted_and_sums_in_the_parameters_dtype(structure, options):
    model, batches = net(), [(IMAGES, LABELS)]
    model[-1].weight.data.div_(200)  # the rounding of large logits is no small change
    want = fisher(model, batches, structure, options=options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fisher(model, batches, structure, options=options)
    assert {tensor.dtype for tensor in got.tensors()} == {torch.float32}
    assert relative(got.to_dense(), want.to_dense()) <= 0.01
