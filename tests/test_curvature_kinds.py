import pytest
import torch
from oracles import (
    CURVATURES,
    SHAPES,
    flat,
    random_blocks,
    random_dense,
    random_diagonal,
    random_eigen,
    random_kronecker,
    random_like,
    random_psd,
)

from flwr_fisher.curvature import (
    BlockDiagonal,
    Dense,
    Diagonal,
    EigenKronecker,
    Kronecker,
    WeightedSum,
)
from flwr_fisher.curvature.operators.lazy import shared_blocks
from flwr_fisher.errors import StructureError

KINDS = CURVATURES
all_kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def in_order(tensors, curvature):
    return flat({name: tensors[name] for name in curvature.shapes})


@all_kinds
def test_blocks_lie_along_the_diagonal(make):
    curvature = make(2)
    blocks = curvature.blocks()
    names = [name for block in blocks for name in block.shapes]
    assert sorted(names) == sorted(curvature.shapes)
    v = random_like(curvature, 3)
    parts = [block.matvec({k: v[k] for k in block.shapes}) for block in blocks]
    joined = {k: t for part in parts for k, t in part.items()}
    close(in_order(joined, curvature), curvature.to_dense() @ flat(v))
    assert sum(block.trace() for block in blocks) == pytest.approx(curvature.trace())
    assert sum(block.numel() for block in blocks) == curvature.numel()


def test_which_blocks_there_are():
    first, second = random_blocks(0), random_blocks(1)
    assert [list(b.shapes) for b in first.blocks()] == [
        ["conv.weight"],
        ["fc.weight", "fc.bias"],
        ["norm.weight"],
        ["norm.bias"],
    ]
    total = WeightedSum([first, second], [1, 3])
    assert all(isinstance(block, WeightedSum) for block in total.blocks())
    assert len(total.blocks()) == 4
    assert [b.weights for b in total.blocks()] == [(1.0, 3.0)] * 4
    # One term that mixes what the other keeps apart: no blocks in common.
    one = random_dense(0, 5, **dict(first.shapes))
    assert len(WeightedSum([first, one], [1, 1]).blocks()) == 1
    assert len(random_diagonal(0, a=(2,), b=(3,)).blocks()) == 2


def test_blocks_that_differ_join_only_what_they_touch():
    def diagonal(seed, *names):
        return random_diagonal(seed, **dict.fromkeys(names, (2,)))

    def dense(seed, *names):
        return random_dense(seed, 9, **dict.fromkeys(names, (2,)))

    curvatures = [
        BlockDiagonal([diagonal(1, "a", "b", "c"), dense(2, "d", "e"), dense(3, "f")]),
        BlockDiagonal([dense(4, "e", "d"), dense(5, "c", "a"), diagonal(6, "f", "b")]),
        BlockDiagonal([diagonal(7, *"fedcb"), dense(8, "a")]),
    ]
    for order, groups in (
        ([0, 1, 2], [["a", "c"], ["b"], ["d", "e"], ["f"]]),
        ([1, 2, 0], [["e", "d"], ["c", "a"], ["f"], ["b"]]),
    ):
        chosen = [curvatures[i] for i in order]
        parts = shared_blocks(chosen)
        assert [list(first.shapes) for first, *_ in parts] == groups
        for at, curvature in enumerate(chosen):
            own = BlockDiagonal([part[at] for part in parts])
            total = WeightedSum([own, curvature], [1, -1])
            close(total.to_dense(), torch.zeros(12, 12).double())
    assert shared_blocks([]) == []


def test_the_diagonal_is_a_copy():
    for make in (KINDS["diagonal"], KINDS["dense"], KINDS["weighted-sum"]):
        curvature = make(1)
        before = curvature.to_dense().clone()
        for entry in curvature.diagonal().values():
            entry.zero_()
        close(curvature.to_dense(), before)


def test_a_kronecker_product_is_g_w_a_with_the_bias_as_last_column():
    k = random_kronecker(3, bias="b")
    v = random_like(k, 1)
    matrix = torch.cat([v["w"], v["b"].unsqueeze(1)], dim=1)
    want = k.G[0] @ matrix @ k.A[0]
    got = k.matvec(v)
    close(got["w"], want[:, :-1])
    close(got["b"], want[:, -1])


def test_a_kronecker_product_keeps_groups_apart():
    k = random_kronecker(4, shape=(6, 2, 2), groups=3)
    parts = [
        Kronecker("w", torch.Size([2, 2, 2]), k.A[g : g + 1], k.G[g : g + 1])
        for g in range(3)
    ]
    close(k.to_dense(), torch.block_diag(*(part.to_dense() for part in parts)))


# --- regularising ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shrink", "damping"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.3), (0.3, 1.0), (1.0, 0.3)]
)
def test_shrinking_is_of_inputs_and_damping_of_outputs_group_by_group(shrink, damping):
    dense = KINDS["dense"](1)
    full = dense.to_dense()
    want = (1 - shrink) * full + shrink * torch.diag(full.diagonal())
    close(dense.regularised(shrink=shrink).to_dense(), want)
    for name in ("kronecker-bias", "kronecker-groups-bias"):
        k = KINDS[name](1)
        eye = torch.eye(k.G.shape[1]).double()
        A = [(1 - shrink) * a + shrink * torch.diag(a.diag()) for a in k.A]
        G = [(1 - damping) * g + damping * g.trace() / len(g) * eye for g in k.G]
        want = Kronecker("w", k.weight_shape, torch.stack(A), torch.stack(G), "b")
        got = k.regularised(shrink=shrink, damping=damping)
        close(got.to_dense(), want.to_dense())


def eigen_of(k):
    """Return the same matrix by its eigenbasis."""
    (a, U_A), (g, U_G) = torch.linalg.eigh(k.A), torch.linalg.eigh(k.G)
    moments = g.unsqueeze(-1) * a.unsqueeze(-2)
    return EigenKronecker(k.weight, k.weight_shape, U_A, U_G, moments, k.bias)


@pytest.mark.parametrize(
    ("shrink", "damping"), [(0.4, 0.0), (0.0, 0.3), (0.4, 1.0), (1.0, 0.3)]
)
@pytest.mark.parametrize(
    "layer",
    [
        {"bias": "fc.bias"},
        {"bias": None},
        {"shape": (6, 1, 2), "bias": "fc.bias", "groups": 3},
    ],
    ids=["bias", "no bias", "groups"],
)
def test_regularising_means_the_same_in_the_eigenbasis(layer, shrink, damping):
    k = random_kronecker(1, "fc.weight", **layer)
    want = k.regularised(shrink=shrink, damping=damping)
    got = eigen_of(k).regularised(shrink=shrink, damping=damping)
    close(got.to_dense(), want.to_dense())
    v = random_like(k, 3)
    close(flat(got.matvec(v)), flat(want.matvec(v)))
    assert got.trace() == pytest.approx(k.trace(), rel=1e-12)


@pytest.mark.parametrize("damping", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("bias", ["fc.bias", None])
def test_damping_means_the_same_to_a_dense_layer(bias, damping):
    k = random_kronecker(1, "fc.weight", (4, 3, 2), bias)
    dense = Dense(k.shapes, k.to_dense())
    want = k.regularised(damping=damping).to_dense()
    close(dense.regularised(damping=damping).to_dense(), want)
    other = random_diagonal(2, position=(3, 2), norm=(3,))
    shapes = {**other.shapes, **k.shapes}
    whole = Dense(shapes, torch.block_diag(other.to_dense(), k.to_dense()))
    got = whole.regularised(damping=damping).to_dense()
    close(got, torch.block_diag(other.to_dense(), want))


def test_full_damping_leaves_one_block_for_all_outputs_of_a_layer():
    dense = random_dense(1, 30, **SHAPES)
    matrix = dense.regularised(damping=1.0).to_dense()
    want = torch.diag(dense.matrix.diagonal())
    at = {"conv": [[0, 1, 4], [2, 3, 5]], "fc": [[16, 17, 13], [18, 19, 14]]}
    at["fc"].append([20, 21, 15])
    for outputs in at.values():
        mean = sum(dense.matrix[o][:, o] for o in outputs) / len(outputs)
        for o in outputs:
            want[torch.tensor(o).unsqueeze(1), o] = mean
    close(matrix, want)
    # Where a bias does not fit (of a transposed convolution), it stays by itself.
    odd = random_dense(1, 30, **{"up.weight": (2, 3), "up.bias": (3,)})
    kept = odd.regularised(damping=1.0).to_dense()[6:, 6:]
    close(kept, torch.diag(odd.matrix.diagonal()[6:]))


@pytest.mark.parametrize("amount", [0.3, 1.0])
def test_damping_reaches_directions_that_a_codec_left_out(amount):
    whole = random_eigen(1)  # no bias, so that rows are outputs by inputs
    kept_A = torch.tensor([1.0, 1.0, 0.0]).double()
    kept_G = torch.tensor([1.0, 1.0, 0.0, 0.0]).double()
    bases = whole.basis_A * kept_A, whole.basis_G * kept_G
    cut_off = EigenKronecker("w", whole.weight_shape, *bases, whole.moments)
    F = cut_off.to_dense()
    of_inputs = torch.einsum("iaib->ab", F.reshape(4, 3, 4, 3)) / 4
    apart = torch.kron(torch.eye(4).double(), of_inputs)
    got = cut_off.regularised(damping=amount)
    close(got.to_dense(), (1 - amount) * F + amount * apart)
    assert got.trace() == pytest.approx(cut_off.trace(), rel=1e-12)
    shrunk = cut_off.regularised(shrink=amount)
    assert shrunk.trace() == pytest.approx(cut_off.trace(), rel=1e-12)


@all_kinds
def test_regularising_keeps_the_trace_and_what_is_positive(make):
    curvature = make(1)
    close(curvature.regularised().to_dense(), curvature.to_dense())
    for shrink, damping in ((0.6, 0.0), (0.0, 0.4), (1.0, 1.0)):
        other = curvature.regularised(shrink=shrink, damping=damping)
        assert other.shapes == curvature.shapes
        assert other.trace() == pytest.approx(curvature.trace(), rel=1e-12)
        assert torch.linalg.eigvalsh(other.to_dense())[0] > -1e-10


def test_compound_curvatures_regularise_each_part():
    options = {"shrink": 0.4, "damping": 0.2}
    blocks = random_blocks(1)
    parts = [child.regularised(**options).to_dense() for child in blocks.children]
    close(blocks.regularised(**options).to_dense(), torch.block_diag(*parts))
    total = WeightedSum([random_blocks(1), random_blocks(2)], [0.3, 2])
    want = sum(w * term.regularised(**options).to_dense() for w, term in total)
    close(total.regularised(**options).to_dense(), want)


# --- what does not fit ----------------------------------------------------------------


@all_kinds
def test_a_vector_that_does_not_fit_is_named(make):
    curvature = make(1)
    v = random_like(curvature, 1)
    name = next(iter(v))
    wrong = [
        {k: t for k, t in v.items() if k != name},
        v | {name: v[name].unsqueeze(0)},
    ]
    for vector in wrong:
        with pytest.raises(StructureError, match=name):
            curvature.matvec(vector)
    with pytest.raises(StructureError, match="surprise"):
        curvature.matvec(v | {"surprise": torch.zeros(1)})


def test_factors_that_do_not_fit_the_weight_are_named():
    shape = torch.Size([4, 3])
    good_a, good_g = random_psd(3, 2, 0)[None], random_psd(4, 2, 1)[None]
    for A, G, bias in (
        (good_a, good_g, "b"),  # no row for the bias
        (random_psd(4, 2, 0)[None], good_g, None),
        (good_a, random_psd(3, 2, 0)[None], None),
        (good_a[0], good_g[0], None),  # no dimension for groups
        (good_a.expand(2, 3, 3), good_g.expand(2, 4, 4), None),
        (good_a[:0], good_g[:0], None),
    ):
        with pytest.raises(StructureError, match=r"'fc.weight' of shape \(4, 3\)"):
            Kronecker("fc.weight", shape, A, G, bias)
    Kronecker("fc.weight", shape, good_a, good_g)


ONE = random_diagonal(1, a=(2,), b=(2,))
OTHER, LARGER = random_diagonal(1, a=(2,), c=(2,)), random_diagonal(1, a=(3,), b=(2,))


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (
            lambda: Dense({"w": torch.Size([4])}, torch.eye(3)),
            r"\(3, 3\) does not fit",
        ),
        (lambda: Diagonal({"n": torch.ones(2).long()}), "'n' has dtype torch.int64"),
        (lambda: BlockDiagonal([ONE, OTHER]), r"\['a'\] are in more than one block"),
        (lambda: WeightedSum([ONE, OTHER], [1, 1]), r"curvature 1 .*\['b', 'c'\]"),
        (lambda: WeightedSum([ONE, ONE, LARGER], [1, 1, 1]), "curvature 2 .*'a'"),
        (lambda: WeightedSum([], []), "0 curvatures"),
        (lambda: WeightedSum([ONE], [1, 1]), "1 curvatures and 2"),
    ],
)
def test_parts_that_do_not_fit_are_named(make, culprit):
    with pytest.raises(StructureError, match=culprit):
        make()
