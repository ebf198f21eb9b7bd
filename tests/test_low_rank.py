"""Factors of few directions against their dense twins, and how they are found."""

import itertools

import pytest
import torch
from fuzz_wire import Largest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import randn, random_like, random_psd, relative

from flwr_fisher.curvature import Kronecker
from flwr_fisher.curvature.operators.factors import DenseFactor, LowRankFactor
from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.wire.budget import _Matrix, _pack_matrices
from flwr_fisher.wire.matrices import leading_vectors
from flwr_fisher.wire.quantise import Packing

SETTINGS = settings(deadline=None, database=None, derandomize=True, max_examples=40)
F64 = torch.float64


def low_rank(seed, groups, n, rank, *, rows=False):
    directions = randn(seed, groups, n, rank, dtype=F64)
    lengths = randn(seed + 1, groups, rank, dtype=F64).abs()
    rest = randn(seed + 2, groups, n, dtype=F64).square()
    scales = randn(seed + 3, groups, n, dtype=F64).abs() if rows else None
    return LowRankFactor(directions, lengths, rest, scales)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def added(factor):
    """Return ones to which a factor was added in place."""
    total = torch.ones(factor.shape).to(factor.diagonal())
    factor.add_to(total)
    return total


@SETTINGS
@given(
    groups=st.integers(1, 3),
    n=st.integers(1, 7),
    rank=st.integers(0, 7),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
    rows=st.booleans(),
)
def test_a_low_rank_factor_is_its_dense_twin(groups, n, rank, share, seed, rows):
    factor = low_rank(seed, groups, n, min(rank, n), rows=rows)
    twin = DenseFactor(factor.to_dense())
    assert factor.shape == twin.shape
    assert torch.equal(factor.to_dense(), factor.to_dense().mT)
    close(factor.diagonal(), twin.diagonal())
    close(factor.trace(), twin.trace())
    right, left = randn(seed, groups, n, 3).double(), randn(seed, groups, 2, n).double()
    close(factor @ right, twin @ right)
    close(left @ factor, left @ twin)
    per_group = torch.linspace(0.5, 2, groups, dtype=F64)
    changes = [
        lambda f: f.scaled(share),
        lambda f: f.scaled(per_group),
        lambda f: f.towards_diagonal(share),
        lambda f: f.towards_identity(share),
        lambda f: f.plus_diagonal(torch.ones(groups, n, dtype=F64)),
        lambda f: f.mapped(lambda tensor: tensor.float()),
    ]
    for change in changes:
        changed = change(factor)
        assert isinstance(changed, LowRankFactor)
        want = change(twin).to_dense()
        rtol = 1e-5 if want.dtype == torch.float32 else 1e-10
        torch.testing.assert_close(changed.to_dense(), want, rtol=rtol, atol=rtol)
        torch.testing.assert_close(added(changed), 1 + want, rtol=rtol, atol=rtol)


@SETTINGS
@given(groups=st.integers(1, 3), n=st.integers(1, 7), share=st.floats(0, 1))
def test_a_dense_factor_that_was_changed_is_its_matrix_changed(groups, n, share):
    matrices = torch.stack([random_psd(n, n, seed) for seed in range(groups)])
    factor = DenseFactor(matrices)
    per_group = torch.linspace(0.5, 2, groups, dtype=F64)
    changed = factor.towards_diagonal(share).scaled(per_group).towards_identity(share)
    assert isinstance(changed, DenseFactor)
    assert changed.matrix is matrices  # many clients' are regularised, and none copied
    diagonal = torch.diag_embed(matrices.diagonal(dim1=-2, dim2=-1))
    want = (1 - share) * matrices + share * diagonal
    want = want * per_group[:, None, None]
    mean = want.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    want = (1 - share) * want + share * mean * torch.eye(n, dtype=F64)
    close(changed.to_dense(), want)
    for each in (changed, factor.scaled(share)):
        close(added(each), 1 + each.to_dense())
    close(changed.diagonal(), want.diagonal(dim1=-2, dim2=-1))
    right, left = randn(5, groups, n, 3).double(), randn(6, groups, 2, n).double()
    close(changed @ right, want @ right)
    close(left @ changed, left @ want)
    close(changed.mapped(lambda tensor: 2 * tensor).matrix, 2 * matrices)


def test_directions_may_be_the_integers_as_which_they_travelled():
    codes = torch.randint(-7, 8, (2, 5, 3), dtype=torch.int8)
    lengths, rest = randn(1, 2, 3).abs(), randn(2, 2, 5).abs()
    factor = LowRankFactor(codes, lengths, rest)
    twin = LowRankFactor(codes.float(), lengths, rest)
    assert torch.equal(factor.to_dense(), twin.to_dense())
    assert torch.equal(factor @ torch.ones(2, 5, 1), twin @ torch.ones(2, 5, 1))
    assert factor.scaled(2.0).directions is codes


def test_a_diagonal_takes_no_second_copy_of_the_directions():
    """A merge asks for those of all clients, and memory let go may not come back."""
    n, rank = 300, 1000
    directions = torch.randint(-7, 8, (1, n, rank), dtype=torch.int8)
    lengths, rest = randn(1, 1, rank).abs(), randn(2, 1, n).abs()
    factor = LowRankFactor(directions, lengths, rest)
    with Largest() as made:
        found = factor.diagonal()
    assert made.nbytes <= directions.nbytes  # as small integers, and no floats
    torch.testing.assert_close(found, factor.to_dense().diagonal(dim1=-2, dim2=-1))


def test_nothing_of_the_size_of_the_matrix_is_made():
    """A factor of a million rows would have 10^12 entries."""
    n = 10**6
    rest = torch.ones(1, 1).expand(1, n)
    factor = LowRankFactor(torch.ones(1, n, 2), torch.ones(1, 2), rest)
    changed = factor.towards_diagonal(0.5).towards_identity(0.5).scaled(2.0)
    assert isinstance(changed, LowRankFactor)
    assert changed.directions is factor.directions  # nor is what it holds copied
    assert changed.trace() == pytest.approx(6 * n)
    assert (changed @ torch.ones(1, n, 1)).shape == (1, n, 1)


def clients(rank, dense, count=3):
    found = []
    for client in range(count):
        A, G = (low_rank(10 * client + s, 1, n, rank) for s, n in ((0, 30), (5, 8)))
        parts = [f.to_dense() if dense else f for f in (A, G)]
        layer = Kronecker("w", torch.Size([8, 29]), *parts, "b")
        found.append(LocalPosterior(random_like(layer, client), layer, client + 1))
    return found


@pytest.mark.parametrize(
    ("solver", "rank"),
    [("pcg", 0), ("pcg", 1), ("pcg", 4), ("pcg", 8), ("cg", 1), ("gd", 4), ("adam", 8)],
)
def test_it_merges_as_its_dense_twin(solver, rank):
    """Also where few vectors are inverted, and where all together are too many."""
    options = {"anchor": 0.1, "shrink": 0.2, "damping": 0.1}
    options |= {"balance": 0.5, "iterations": 6}
    for more in ({"shrink": 0.0, "damping": 0.0}, {}):
        got, want = (
            fedfisher(clients(rank, dense), solver=solver, **(options | more))
            for dense in (False, True)
        )
        assert got.shares == pytest.approx(want.shares)
        for key, value in want.params.items():
            assert relative(got.params[key], value) <= 1e-8


# --- finding leading vectors ----------------------------------------------------------


def with_spectrum(values, seed=0):
    n = len(values)
    basis = torch.linalg.qr(randn(seed, n, n, dtype=F64)).Q
    matrix = (basis * values) @ basis.mT
    return ((matrix + matrix.mT) / 2).unsqueeze(0)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_leading_vectors_leave_no_more_than_the_bound(power, dtype):
    n, k = 700, 60
    spectrum = torch.arange(1, n + 1, dtype=F64) ** -power
    matrices = with_spectrum(spectrum).to(dtype)
    values, vectors = leading_vectors(matrices, k)
    assert values.shape == (1, k)
    assert vectors.shape == (1, n, k)
    eye = torch.eye(k, dtype=dtype)
    torch.testing.assert_close(vectors[0].mT @ vectors[0], eye, rtol=0, atol=1e-5)
    assert (values[0, :-1] >= values[0, 1:]).all()
    assert (values[0].double() <= spectrum[:k] * (1 + 1e-5)).all()
    left = float(spectrum.sum() - values.double().sum())
    bounds = []
    for r in range(1, k - 1):
        excess = r / (k - r - 1) * (spectrum[r:] / spectrum[r - 1]) ** 3
        bounds.append(float((spectrum[r:] * (1 + excess)).sum()))
    assert left <= min(bounds)  # one draw is within the expectation's bound
    kept = vectors[0].double().mT @ matrices[0].double() @ vectors[0].double()
    torch.testing.assert_close(kept.diagonal(), values[0].double(), rtol=1e-4, atol=0)


def test_small_matrices_are_decomposed_whole():
    for n, count in itertools.product((1, 5, 512), (1, 4)):
        matrices = random_psd(n, n + 3, 0).unsqueeze(0)
        values, vectors = leading_vectors(matrices, count)
        assert values.shape == (1, n)
        close(vectors * values.unsqueeze(-2) @ vectors.mT, matrices)


@pytest.mark.parametrize("left", [20_000, 60_000, 150_000])
def test_large_matrices_share_the_bytes_much_as_if_all_were_known(left):
    """Columns are guessed before they are found, and what is sent fits."""
    spectra = [
        torch.arange(1, n + 1, dtype=F64) ** -p for n, p in ((640, 0.6), (720, 1.2))
    ]
    matrices = [
        _Matrix(str(i), with_spectrum(s, i).float(), torch.float32)
        for i, s in enumerate(spectra)
    ]
    entries = dict(_pack_matrices(matrices, left))
    spent = sum(len(entries[m.key]) - m.least for m in matrices)
    assert 0.9 * left - 720 <= spent <= left + 2
    ranks = {
        int(key): int.from_bytes(bytes(entry[10:14].tolist()), "little")
        for key, entry in entries.items()
        if entry[0] == Packing.COLUMNS
    }
    for index, rank in ranks.items():
        spectrum = spectra[index]
        share = float(spectrum[rank] / spectrum.sum()) / len(spectrum)
        for other in ranks.keys() - {index}:
            # The next column here is worth no more than theirs.
            theirs, sent = spectra[other], ranks[other]
            last = float(theirs[sent - 1] / theirs.sum()) / len(theirs)
            assert share <= 1.3 * last


@pytest.mark.parametrize("told", [True, False])
def test_what_float32_cannot_decompose_float64_does(told, monkeypatch):
    """LAPACK does not converge on some finite matrices, of trained networks, too.

    It tells, or gives NaN for some of the eigenvalues.
    """
    own = torch.linalg.eigh

    def not_in_float32(matrices, **options):
        values, vectors = own(matrices, **options)
        if matrices.dtype is torch.float32:
            if told:
                raise torch.linalg.LinAlgError("the algorithm failed to converge")
            values[..., 0] = torch.nan
        return torch.return_types.linalg_eigh((values, vectors))

    matrix = randn(0, 1, 6, 6) @ randn(0, 1, 6, 6).mT
    wanted = own(matrix).eigenvalues.flip(-1)
    monkeypatch.setattr(torch.linalg, "eigh", not_in_float32)
    values, vectors = leading_vectors(matrix, 6)
    assert values.dtype == vectors.dtype == torch.float32
    torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-5)
