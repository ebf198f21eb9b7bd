"""Curvatures of one layer, stacked: each with the others' numbers beside its own."""

import pytest
import torch
from oracles import flat, random_diagonal, random_kronecker, random_like, relative
from test_merge_pcg import low_rank

from flwr_fisher.curvature import WeightedSum
from flwr_fisher.curvature.operators import stacked
from flwr_fisher.curvature.operators.stacked import StackedSum, stacks
from flwr_fisher.curvature.structures import preconditioner
from flwr_fisher.params import by_part, side_by_side


def two_forms(i):
    layer = low_rank(i)
    return layer.with_factors(layer.A, layer.G_factor) if i % 2 else layer


KINDS = {
    "diagonal": lambda i: random_diagonal(i, w=(2, 3), b=(2,)),
    "scalar": lambda i: random_diagonal(i, s=()),
    "kfac": lambda i: random_kronecker(i, bias="b"),
    "groups": lambda i: random_kronecker(i, shape=(6, 2, 2), groups=3),
    "low rank": lambda i: low_rank(i, rank=i),
    "two forms": two_forms,
}


@pytest.mark.parametrize("most", [1 << 19, 1, 800])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_has_each_ones_products_and_the_sum_of_all(kind, most, monkeypatch):
    monkeypatch.setattr(stacked, "_AT_ONCE", most)
    weights = [0.3, 2.0, 0.0, 1.0, 0.1, 0.7]
    terms = [KINDS[kind](i).regularised(shrink=0.3, damping=0.2) for i in range(6)]
    every = list(stacks(terms))
    assert sorted(i for members, _ in every for i in members) == [*range(6)]
    if most > 1 << 10:
        assert len(every) == 1 + (kind == "two forms")
    sums = []
    for members, stack in every:
        count = len(members)
        own = [random_like(terms[i], i) for i in members]
        vector = {k: side_by_side([v[k] for v in own]) for k in own[0]}
        rows = torch.cat(by_part(stack.matvec(vector), count), 1)
        for i, v, row in zip(members, own, rows, strict=True):
            assert relative(row, flat(terms[i].matvec(v))) <= 1e-12
        traces = [terms[i].trace() for i in members]
        assert stack.traces(count).tolist() == pytest.approx(traces, rel=1e-12)
        shares = torch.tensor([weights[i] for i in members], dtype=torch.float64)
        sums.append(StackedSum(stack, shares, terms[0].shapes))
    got, want = WeightedSum(sums, [1.0] * len(sums)), WeightedSum(terms, weights)
    assert relative(got.to_dense(), want.to_dense()) <= 1e-12
    assert relative(flat(got.diagonal()), flat(want.diagonal())) <= 1e-12
    assert (2 * got).trace() == pytest.approx(2 * want.trace())
    inverses = [preconditioner(F, 0.1)(random_like(want, 9)) for F in (got, want)]
    assert relative(*map(flat, inverses)) <= 1e-9
