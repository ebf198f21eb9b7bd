import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    randn,
)
from torch import Tensor

from flwr_fisher.curvature.estimate.columns import SoftmaxColumns
from flwr_fisher.errors import (
    StructureError,
)


def factors_of(logits: Tensor) -> Tensor:
    return torch.stack(list(SoftmaxColumns(logits).all()))


def check_factors(logits: Tensor, tolerance: float) -> None:
    factors = factors_of(logits)
    n, classes = logits.shape
    assert factors.shape == (classes - 1, n, classes)
    assert factors.dtype == logits.dtype
    assert torch.isfinite(factors).all()
    p = logits.double().softmax(1)
    want = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    got = torch.einsum("knc,knd->ncd", factors.double(), factors.double())
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("classes", range(2, 13))
def test_factors_of_random_logits(classes: int) -> None:
    for spread in (0.1, 1, 10, 100, 1e4):
        logits = spread * randn(classes, 6, classes, dtype=torch.float64)
        check_factors(logits, 1e-14)
        check_factors(logits.float(), 1e-6)


values = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 50.0, -50.0, 1e4, -1e4]),
    st.floats(-1e4, 1e4, width=32),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(values, min_size=2, max_size=12))
def test_factors_of_extreme_and_tied_logits(row: list[float]) -> None:
    check_factors(torch.tensor([row]), 1e-6)
    check_factors(torch.tensor([row], dtype=torch.float64), 1e-14)


def test_factors_keep_the_digits_of_unlikely_classes() -> None:
    """In float32 the variance of a class with p = 1e-28 is still right."""
    logits = torch.tensor([[0.0, -23.0, -46.0, -64.0], [0.0, -40.0, -41.0, -64.0]])
    exact = logits.double().softmax(1)
    others = torch.stack(
        [exact[:, [j for j in range(4) if j != k]].sum(1) for k in range(4)], 1
    )
    got = factors_of(logits).double().square().sum(0)
    torch.testing.assert_close(got, exact * others, rtol=1e-4, atol=0)


def test_single_pieces_and_their_sizes_are_those_of_all() -> None:
    logits = 5 * randn(7, 4, 3, 6, dtype=torch.float64)  # examples, positions, classes
    columns = SoftmaxColumns(logits)
    every = torch.stack(list(columns.all()))
    assert every.shape == (15, 4, 3, 6)
    torch.testing.assert_close(columns.weights(), every.square().sum((2, 3)))
    rows, pieces = torch.tensor([2, 0, 3, 3]), torch.tensor([14, 0, 7, 5])
    torch.testing.assert_close(columns.pick(rows, pieces), every[pieces, rows])


def test_a_thousand_classes_take_a_few_times_the_logits() -> None:
    """Once they took its square: 2 GB here."""
    logits = randn(3, 512, 1000)
    with torch.profiler.profile(profile_memory=True) as profiled:
        columns = SoftmaxColumns(logits)
        columns.weights(), next(columns.all())
    largest = max(event.self_cpu_memory_usage for event in profiled.events())
    assert largest <= 4 * logits.nbytes


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2, 1), (0,)])
def test_factors_want_logits(shape: tuple[int, ...]) -> None:
    with pytest.raises(StructureError, match="with at least 2 classes"):
        SoftmaxColumns(torch.zeros(shape))
