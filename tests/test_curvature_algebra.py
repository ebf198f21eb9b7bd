"""The algebra of curvatures, each against its dense matrix."""

import math
from functools import reduce
from operator import add

import pytest
import torch
from devices import ACCELERATOR
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    CURVATURES,
    dense,
    flat,
    random_blocks,
    random_dense,
    random_diagonal,
    random_kronecker,
    random_like,
    random_psd,
    relative,
)

from flwr_fisher.curvature import BlockDiagonal, Diagonal, Kronecker, WeightedSum
from flwr_fisher.curvature.operators.lazy import shared_blocks
from flwr_fisher.errors import ConfigurationError, StructureError
from flwr_fisher.params import unflatten

kinds = st.sampled_from(sorted(CURVATURES))
dtypes = st.sampled_from([torch.float32, torch.float64])
seeds = st.integers(0, 30)
every_kind = pytest.mark.parametrize("kind", CURVATURES)


def quick(test):
    return settings(max_examples=60, deadline=None, derandomize=True)(test)


def operator(kind, seed, dtype):
    return CURVATURES[kind](seed).to(dtype=dtype)


def vector(F, seed):
    dtype = F.tensors()[0].dtype
    return {k: v.to(dtype) for k, v in random_like(F, seed).items()}


def in_order(tensors, F):
    return flat({name: tensors[name] for name in F.shapes})


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def near(got, want, dtype):
    return relative(got, want) <= (1e-10 if dtype == torch.float64 else 1e-4)


@quick
@given(kinds, dtypes, seeds, st.just(0.0) | st.floats(1e-3, 10))
def test_products_sums_and_multiples(kind, dtype, seed, c):
    F, F2 = operator(kind, seed, dtype), operator(kind, seed + 99, dtype)
    v, matrix, matrix2 = vector(F, seed), dense(F).double(), dense(F2).double()
    assert near(F.to_dense(), matrix, dtype)
    product = F @ v
    assert {k: t.dtype for k, t in product.items()} == dict.fromkeys(F.shapes, dtype)
    assert near(in_order(product, F), matrix @ flat(v), dtype)
    assert near(in_order(F.diagonal(), F), matrix.diagonal(), dtype)
    assert near(matrix, matrix.mT, dtype)
    assert torch.linalg.eigvalsh(matrix)[0] > -1e-5 * matrix.trace()
    for scaled in (c * F, F * c):
        assert near(scaled.to_dense(), c * matrix, dtype)
    total = F + c * F2
    assert isinstance(total, WeightedSum)
    assert not any(isinstance(term, WeightedSum) for term in total.terms)
    assert near(total.to_dense(), matrix + c * matrix2, dtype)
    assert near(in_order(total @ v, F), (matrix + c * matrix2) @ flat(v), dtype)
    assert total.trace() == pytest.approx(
        float((matrix + c * matrix2).trace()), rel=1e-5
    )


@quick
@given(kinds, dtypes, seeds, st.floats(1e-3, 10))
def test_solving(kind, dtype, seed, share):
    """Singular matrices, with damping that is a share of the mean eigenvalue."""
    F = operator(kind, seed, dtype)
    damping = share * F.trace() / F.numel()
    b = vector(F, seed + 5)
    x = F.solve(b, damping=damping)
    assert {k: t.dtype for k, t in x.items()} == dict.fromkeys(F.shapes, dtype)
    matrix = F.to_dense().double() + damping * torch.eye(F.numel()).double()
    want = torch.linalg.solve(matrix, flat(b))
    # A conjugate gradient leaves 1e-10 of b, of which the matrix makes more of x.
    assert relative(in_order(x, F), want) <= (1e-6 if dtype == torch.float64 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_kind
def test_without_damping_it_is_the_pseudo_inverse(kind, dtype):
    if "sum" in kind and dtype == torch.float32:
        pytest.skip("what float32 has in the range of a singular sum is not in it")
    F = operator(kind, 3, dtype)
    b = F @ vector(F, 4)
    matrix = F.to_dense().double()
    rtol = 1e-10 if dtype == torch.float64 else 1e-5
    want = torch.linalg.pinv(matrix, hermitian=True, rtol=rtol) @ flat(b)
    got = in_order(F.solve(b), F)
    assert relative(matrix @ got, flat(b)) <= (1e-8 if rtol < 1e-9 else 1e-3)
    assert relative(got, want) <= (1e-5 if rtol < 1e-9 else 0.05)


def test_what_is_rounding_is_no_eigenvalue():
    """A float32 factor of rank 2 has two eigenvalues, and rounding beside them."""
    k = random_kronecker(1, "w", (6, 5), bias="b").to(dtype=torch.float32)
    b = vector(k, 2)  # not in its range
    got = k.solve(b)
    want = torch.linalg.pinv(k.to_dense().double(), hermitian=True, rtol=1e-5)
    assert relative(flat(got), want @ flat(b)) <= 1e-4
    assert not flat((k * 0.0).solve(b)).any()
    both = Diagonal({"w": torch.tensor([0.0, 1e-30, 2.0])})
    torch.testing.assert_close(
        both.solve({"w": torch.ones(3).double()})["w"],
        torch.tensor([0.0, 1 / both.entries["w"][1].double(), 0.5]).double(),
    )


def test_a_kronecker_is_never_formed_to_be_solved():
    layer = random_kronecker(1, "w", (200, 300), bias="b", rank=400)
    b = random_like(layer, 2)
    x = layer.solve(b, damping=0.5)
    back = {k: v + 0.5 * x[k] for k, v in (layer @ x).items()}
    assert relative(flat(back), flat(b)) <= 1e-10


def test_a_sum_is_solved_block_by_block():
    """Blocks whose scales are far apart do not share conjugate gradients."""
    scales = [1e-9, 1.0, 1e9]
    layers = [random_kronecker(i, f"{i}.weight", rank=8) for i in range(3)]
    others = [random_dense(i, 30, **{f"{i}.weight": (4, 3)}) for i in range(3)]
    F = BlockDiagonal([s * k for s, k in zip(scales, layers, strict=True)])
    F2 = BlockDiagonal([s * d for s, d in zip(scales, others, strict=True)])
    b = random_like(F, 1)
    x, total = (F + F2).solve(b), F + F2
    back = total @ x
    assert all(relative(back[k], b[k]) <= 1e-9 for k in b)


def test_sums_that_need_no_iterations():
    wide = {"w": torch.logspace(-12, 3, 16)}
    pair = Diagonal(wide) + 2.0 * Diagonal(wide)
    got = pair.solve({"w": torch.ones(16).double()})["w"]
    torch.testing.assert_close(got, 1 / (3 * wide["w"].double()))
    layer = random_kronecker(1, bias="b")
    b = layer @ random_like(layer, 2)
    got = WeightedSum([layer], [3.0]).solve(b)
    torch.testing.assert_close(got, (3.0 * layer).solve(b))


def test_a_right_hand_side_out_of_a_sums_range_is_told():
    F = random_kronecker(1) + random_kronecker(2)
    with pytest.raises(StructureError, match=r"WeightedSum\(.*pass more damp"):
        F.solve(random_like(F, 3))
    F.solve(random_like(F, 3), damping=0.1)


# --- sums and multiples ---------------------------------------------------------------


def test_sums_of_sums_are_one_sum():
    F = [random_diagonal(i, w=(3,)) for i in range(4)]
    total = 2 * (F[0] + 3 * F[1]) + (F[2] + WeightedSum([F[3] + F[0]], [0.5]))
    assert isinstance(total, WeightedSum)
    assert total.terms == (F[0], *total.terms[1:2], F[2], F[3], F[0])
    assert total.weights == (2.0, 2.0, 1.0, 0.5, 0.5)
    mean = reduce(add, F) * 0.25
    assert len(mean.terms) == 4
    assert mean.trace() == pytest.approx(sum(f.trace() for f in F) / 4)


def test_a_factor_must_be_at_least_0():
    F = random_diagonal(1, w=(3,))
    for factor in (-1, -1e-9, math.nan, "2", None, True):
        with pytest.raises(ConfigurationError, match="factor must be"):
            F * factor
        if not isinstance(factor, str):  # which multiplies by repeating itself
            with pytest.raises(ConfigurationError, match="factor must be"):
                factor * F


def test_what_cannot_be_added_or_solved():
    F = random_diagonal(1, w=(3,))
    with pytest.raises(TypeError):
        F + 1
    with pytest.raises(StructureError, match="covers other parameters"):
        F + random_diagonal(1, v=(3,))
    with pytest.raises(StructureError, match="does not fit"):
        F.solve({"w": torch.ones(4)})
    for damping in (-0.1, math.nan):
        with pytest.raises(ConfigurationError, match="damping must be"):
            F.solve({"w": torch.ones(3)}, damping)


# --- where and how they are kept ------------------------------------------------------


@every_kind
def test_another_dtype(kind):
    F = CURVATURES[kind](1)
    v = random_like(F, 2)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        G = F.to(dtype=dtype)
        assert type(G) is type(F)
        assert G.shapes == F.shapes
        assert {t.dtype for t in G.tensors()} == {dtype}
        assert {t.dtype for t in F.tensors()} == {torch.float64}
        pairs = zip(F.tensors(), G.tensors(), strict=True)
        assert all(torch.equal(a.to(dtype), b) for a, b in pairs)
        product = G @ {k: t.to(dtype) for k, t in v.items()}
        error = relative(in_order(product, F), in_order(F @ v, F))
        assert error <= 40 * torch.finfo(dtype).eps


@every_kind
def test_its_diagonal_is_a_copy(kind):
    F = CURVATURES[kind](1)
    before = F.to_dense().clone()
    for entry in F.diagonal().values():
        entry.zero_()
    close(F.to_dense(), before)


@every_kind
def test_another_device(kind):
    F = CURVATURES[kind](1)
    for device in ("meta", torch.device("meta")):
        moved = F.to(device)
        assert {t.device.type for t in moved.tensors()} == {"meta"}
        assert {t.dtype for t in moved.tensors()} == {torch.float64}
    assert all(a is b for a, b in zip(F.tensors(), F.to().tensors(), strict=True))
    if ACCELERATOR:
        there = F.to(ACCELERATOR)
        v = random_like(F, 2)
        b = {k: t.to(ACCELERATOR) for k, t in v.items()}
        assert relative(in_order(there @ b, F).cpu(), in_order(F @ v, F)) <= 1e-12
        x, want = there.solve(b, 0.1), F.solve(v, 0.1)
        assert relative(in_order(x, F).cpu(), in_order(want, F)) <= 1e-7


def test_a_vector_that_does_not_fit_is_told_how():
    F = random_kronecker(1)
    vector = random_like(F, 2)
    (name, value), *_ = vector.items()
    lacking = {k: v for k, v in vector.items() if k != name}
    with pytest.raises(StructureError, match=rf"curvature: it lacks '{name}'$"):
        F @ lacking
    with pytest.raises(StructureError, match=r"curvature: no 'odd' is expected$"):
        F @ {**vector, "odd": value}
    with pytest.raises(StructureError, match=rf"'{name}' has shape \(1,\), expected"):
        F.solve({**vector, name: torch.ones(1)})
    for product in (lambda b: F @ b, F.solve):
        with pytest.raises(StructureError, match=r"not a Tensor: pass params\.unfl"):
            product(flat(vector))
    F @ unflatten(flat(vector).to(value), F.shapes)


# --- blocks ---------------------------------------------------------------------------


@every_kind
def test_blocks_lie_along_the_diagonal(kind):
    F = CURVATURES[kind](2)
    names = [name for block in F.blocks() for name in block.shapes]
    assert sorted(names) == sorted(F.shapes)
    v = random_like(F, 3)
    parts = [block @ {k: v[k] for k in block.shapes} for block in F.blocks()]
    joined = {k: t for part in parts for k, t in part.items()}
    close(in_order(joined, F), F.to_dense() @ flat(v))
    assert sum(block.trace() for block in F.blocks()) == pytest.approx(F.trace())
    assert sum(block.numel() for block in F.blocks()) == F.numel()


def test_blocks_that_differ_join_only_what_they_touch():
    """One client's K-FAC, and another's diagonal in another order."""
    first = random_blocks(0)
    second = random_diagonal(1, **dict(reversed(first.shapes.items())))
    groups = [["conv.weight"], ["fc.weight", "fc.bias"], ["norm.weight"], ["norm.bias"]]
    assert [list(block.shapes) for block in first.blocks()] == groups
    for curvatures in ([first, second], [second, first]):
        parts = shared_blocks(curvatures)
        assert sorted(sorted(a.shapes) for a, _ in parts) == sorted(map(sorted, groups))
        for at, F in enumerate(curvatures):
            alike = BlockDiagonal([part[at] for part in parts])
            total = WeightedSum([alike, F], [1, -1])
            close(total.to_dense(), torch.zeros(F.numel(), F.numel()).double())
    blocks = WeightedSum([first, second], [1, 3]).blocks()
    assert [block.weights for block in blocks] == [(1.0, 3.0)] * 4
    assert shared_blocks([]) == []


# --- regularising ---------------------------------------------------------------------


@pytest.mark.parametrize(("shrink", "damping"), [(0.3, 0.0), (0.0, 0.3), (1.0, 0.4)])
def test_shrinking_is_of_inputs_and_damping_of_outputs_group_by_group(shrink, damping):
    for name in ("kronecker-bias", "kronecker-groups-bias"):
        k = CURVATURES[name](1)
        eye = torch.eye(k.G.shape[1]).double()
        A = [(1 - shrink) * a + shrink * torch.diag(a.diag()) for a in k.A]
        G = [(1 - damping) * g + damping * g.trace() / len(g) * eye for g in k.G]
        want = Kronecker("w", k.weight_shape, torch.stack(A), torch.stack(G), "b")
        close(k.regularised(shrink=shrink, damping=damping).to_dense(), want.to_dense())


@every_kind
def test_regularising_keeps_the_trace_and_what_is_positive(kind):
    F = CURVATURES[kind](1)
    close(F.regularised().to_dense(), F.to_dense())
    for shrink, damping in ((0.6, 0.0), (0.0, 0.4), (1.0, 1.0)):
        other = F.regularised(shrink=shrink, damping=damping)
        assert other.shapes == F.shapes
        assert other.trace() == pytest.approx(F.trace(), rel=1e-12)
        assert torch.linalg.eigvalsh(other.to_dense())[0] > -1e-10


def test_compound_curvatures_regularise_each_part():
    options = {"shrink": 0.4, "damping": 0.2}
    blocks = random_blocks(1)
    parts = [child.regularised(**options).to_dense() for child in blocks.children]
    close(blocks.regularised(**options).to_dense(), torch.block_diag(*parts))
    total = WeightedSum([random_blocks(1), random_blocks(2)], [0.3, 2])
    want = sum(w * term.regularised(**options).to_dense() for w, term in total)
    close(total.regularised(**options).to_dense(), want)


# --- layers ---------------------------------------------------------------------------


def test_a_kronecker_product_is_g_w_a_with_the_bias_as_last_column():
    k = random_kronecker(3, bias="b")
    v = random_like(k, 1)
    want = k.G[0] @ torch.cat([v["w"], v["b"].unsqueeze(1)], dim=1) @ k.A[0]
    got = k @ v
    close(got["w"], want[:, :-1])
    close(got["b"], want[:, -1])


def test_a_kronecker_product_keeps_groups_apart():
    k = random_kronecker(4, shape=(6, 2, 2), groups=3)
    parts = [
        Kronecker("w", torch.Size([2, 2, 2]), k.A[g : g + 1], k.G[g : g + 1])
        for g in range(3)
    ]
    close(k.to_dense(), torch.block_diag(*(part.to_dense() for part in parts)))


def test_factors_that_do_not_fit_the_weight_are_named():
    shape = torch.Size([4, 3])
    good_a, good_g = random_psd(3, 2, 0)[None], random_psd(4, 2, 1)[None]
    for A, G, bias in (
        (good_a, good_g, "b"),  # no row for the bias
        (good_a, random_psd(3, 2, 0)[None], None),
        (good_a[0], good_g[0], None),  # no dimension for groups
        (good_a.expand(2, 3, 3), good_g.expand(2, 4, 4), None),
    ):
        with pytest.raises(StructureError, match=r"'fc.weight' of shape \(4, 3\)"):
            Kronecker("fc.weight", shape, A, G, bias)
    Kronecker("fc.weight", shape, good_a, good_g)


ONE = random_diagonal(1, a=(2,), b=(2,))
OTHER, LARGER = random_diagonal(1, a=(2,), c=(2,)), random_diagonal(1, a=(3,), b=(2,))


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (lambda: BlockDiagonal([ONE, OTHER]), r"\['a'\] are in more than one block"),
        (lambda: WeightedSum([ONE, OTHER], [1, 1]), r"curvature 1 .*\['b', 'c'\]"),
        (lambda: WeightedSum([ONE, ONE, LARGER], [1, 1, 1]), "curvature 2 .*'a'"),
        (lambda: WeightedSum([ONE], [1, 1]), "1 curvatures and 2"),
    ],
)
def test_parts_that_do_not_fit_are_named(make, culprit):
    with pytest.raises(StructureError, match=culprit):
        make()
