import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import randn

from flwr_fisher.curvature.estimate.likelihood import LIKELIHOODS
from flwr_fisher.curvature.estimate.pieces import Pieces, SoftmaxVectors, backward_plan
from flwr_fisher.errors import StructureError


def factors_of(logits):
    if logits.dim() < 3:
        logits = logits.unsqueeze(1)
    pieces = Pieces(SoftmaxVectors(logits), logits.shape)
    return torch.stack(list(backward_plan(pieces, 0)[0].all())).squeeze(2)


def check_factors(logits, tolerance):
    factors = factors_of(logits)
    n, classes = logits.shape
    assert factors.shape == (classes - 1, n, classes)
    assert factors.dtype == logits.dtype
    assert torch.isfinite(factors).all()
    p = logits.double().softmax(1)
    want = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    got = torch.einsum("knc,knd->ncd", factors.double(), factors.double())
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


values = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 50.0, -50.0, 1e4, -1e4]),
    st.floats(-1e4, 1e4, width=32),
)


@settings(max_examples=70, deadline=None, derandomize=True)
@given(st.lists(values, min_size=2, max_size=12))
def test_factors_of_extreme_and_tied_logits(row):
    check_factors(torch.tensor([row]), 1e-6)
    check_factors(torch.tensor([row], dtype=torch.float64), 1e-14)


def test_factors_keep_the_digits_of_unlikely_classes():
    """In float32 the variance of a class with p = 1e-28 is still right."""
    logits = torch.tensor([[0.0, -23.0, -46.0, -64.0], [0.0, -40.0, -41.0, -64.0]])
    exact = logits.double().softmax(1)
    others = torch.stack(
        [exact[:, [j for j in range(4) if j != k]].sum(1) for k in range(4)], 1
    )
    got = factors_of(logits).double().square().sum(0)
    torch.testing.assert_close(got, exact * others, rtol=1e-4, atol=0)


def softmax_fisher(logits):
    p = logits.double().softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


@pytest.mark.parametrize("most", [1, 2, 5, 8])
def test_the_likeliest_labels_and_a_draw_are_right_on_average(most):
    row = torch.tensor([3.0, -1.0, 2.0, 0.0, -40.0, 1.0, -2.0, 0.5, -0.5])
    logits = row.expand(20_000, 1, -1)
    generator = torch.Generator().manual_seed(most)
    vectors = SoftmaxVectors(logits, most, generator)
    assert vectors.count == most
    every = torch.arange(most).unsqueeze(1).expand(-1, len(logits))
    pieces = torch.stack([vectors.at(index)[:, 0] for index in every]).double()
    # All but the last are columns: the same in every row, and exact.
    exact, drawn = pieces[:-1, 0], pieces[-1]
    want = softmax_fisher(row)
    left = want - exact.mT @ exact
    drawn_fisher = drawn.unsqueeze(2) * drawn.unsqueeze(1)
    if most < 8:
        assert (pieces[:-1] == pieces[:-1, :1]).all()
        error = drawn_fisher.std(0) / len(drawn) ** 0.5
        assert ((drawn_fisher.mean(0) - left).abs() <= 4.5 * error + 1e-7).all()
        assert drawn_fisher.std(0).max() > 0.001
        # The likeliest have no part in the draw.
        assert not drawn[:, row.topk(most - 1).indices].any()
    else:
        torch.testing.assert_close(drawn_fisher[0], left, rtol=0, atol=1e-7)
    squares = vectors.squares()[:, 0, 0].double()
    torch.testing.assert_close(
        squares, pieces.square().sum(2).mean(1), rtol=0.05, atol=1e-7
    )


def test_a_draw_is_never_of_a_class_without_a_chance():
    row = torch.tensor([0.0, -200.0, -200.0, 0.0, -200.0])
    generator = torch.Generator().manual_seed(0)
    sure = SoftmaxVectors(row.expand(100, 1, -1), 3, generator)
    piece = sure.at(torch.full((100,), 2))
    assert not piece.any()
    assert not sure.squares()[2].any()
    half = SoftmaxVectors(row.expand(100, 1, -1), 1, generator)
    piece = half.at(torch.zeros(100, dtype=torch.long))
    torch.testing.assert_close(
        piece.abs(), torch.tensor([0.5, 0, 0, 0.5, 0]).expand_as(piece)
    )


def test_positions_share_a_pass_with_random_signs():
    logits = randn(5, 1, 4, 3).expand(20_000, -1, -1)
    generator = torch.Generator().manual_seed(0)
    pieces = Pieces(SoftmaxVectors(logits), logits.shape, generator)
    assert pieces.count == 2
    total = torch.zeros(len(logits), 12, 12)
    for piece in backward_plan(pieces, 0)[0].all():
        flat = piece.flatten(1)
        total += flat.unsqueeze(2) * flat.unsqueeze(1)
    want = torch.block_diag(*softmax_fisher(logits[0])).float()
    error = total.std(0) / len(total) ** 0.5
    assert ((total.mean(0) - want).abs() <= 4.5 * error + 1e-6).all()
    # A position's own is exact in every draw; without signs the rest would stay.
    diagonal = torch.arange(12)
    torch.testing.assert_close(
        total[7, diagonal, diagonal], want[diagonal, diagonal], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(pieces.weights()[:, 0].sum(), want.trace())


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2, 1), (0,)])
def test_factors_want_logits(shape):
    with pytest.raises(StructureError, match="with at least 2 classes"):
        LIKELIHOODS["categorical"].pieces(torch.zeros(shape))


CERTAIN = {
    "categorical": (torch.tensor([[25.0, 0.0, 1.0]]), torch.tensor([0])),
    "bernoulli": (torch.tensor([[25.0, -25.0]]), torch.tensor([[1.0, 0.0]])),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_a_certain_score_keeps_its_digits(name):
    likelihood, (outputs, labels) = LIKELIHOODS[name], CERTAIN[name]
    want = outputs.double().requires_grad_()
    loss = torch.nn.functional.softplus(-want * (2 * labels - 1)).sum()
    if name == "categorical":
        loss = (want[:, 1:] - want[:, :1]).exp().sum(1).log1p().sum()
    loss.backward()
    got = likelihood.score(outputs, labels)
    torch.testing.assert_close(got.double(), -want.grad, rtol=1e-6, atol=0)
    drawn = likelihood.sample_score(outputs, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, got)  # with a chance of 1e-11 of another
