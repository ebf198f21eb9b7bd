"""Positive semi-definite matrices in few bytes: bounds, and what is refused."""

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import random_psd, relative
from uploads import SPECTRA, psd

from flwr_fisher.curvature.operators.factors import DenseFactor, LowRankFactor
from flwr_fisher.errors import WireError
from flwr_fisher.wire import matrices as factors
from flwr_fisher.wire.matrices import check_part, size_of_matrices
from flwr_fisher.wire.quantise import HEAD, Packing

SETTINGS = settings(deadline=None, database=None, derandomize=True, max_examples=25)
WIDTHS = (8, 16)
SHAPES = [(1, 1), (1, 2), (3, 1), (1, 7), (4, 5), (1, 33)]
EPS = torch.finfo(torch.float32).eps


def read(entry, groups, n):
    """Check and decode an entry of a layer that has such factors."""
    like = {"w": torch.empty(groups, n, 1)}
    return check_part(entry, like, field="curvature/kfac/w/A").make()


def whole(matrices, bits):
    """Encode and decode, with what holds of every size."""
    groups, n = matrices.shape[:2]
    before = matrices.clone()
    entry = factors.encode_whole(matrices, bits)
    assert torch.equal(matrices, before)
    size = HEAD + size_of_matrices(Packing.WHOLE, (groups, n, 0), bits)
    assert (entry.dtype, len(entry)) == (torch.uint8, size)
    return read(entry, groups, n).to_dense()


def spectrum_of(matrices):
    values, vectors = torch.linalg.eigh(matrices)
    return values.flip(-1).clamp_min(0), vectors.flip(-1)


def cut(matrices, rank, bits):
    groups, n = matrices.shape[:2]
    trace = diagonal(matrices).sum(-1)
    entry = factors.encode_columns(*spectrum_of(matrices), trace, rank, bits)
    assert len(entry) == HEAD + size_of_matrices(
        Packing.COLUMNS, (groups, n, rank), bits
    )
    got = read(entry, groups, n)
    assert got.directions.shape == (groups, n, rank)
    return got.to_dense()


def assert_psd(matrices):
    assert matrices.dtype == torch.float32
    assert matrices.isfinite().all()
    assert torch.equal(matrices, matrices.mT)
    if not matrices.numel():
        return
    assert (matrices.diagonal(dim1=-2, dim2=-1) >= 0).all()
    # Relative to each entry's own scale: rows may be many decades apart.
    correlations, _ = correlations_of(matrices.double())
    n = matrices.shape[-1]
    assert torch.linalg.eigvalsh(correlations).min() >= -8 * n * EPS


def correlations_of(matrices):
    roots = matrices.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    scale = roots.unsqueeze(-1) * roots.unsqueeze(-2)
    return torch.where(scale > 0, matrices / scale, 0), scale


def assert_within_the_bound(sent, got, bits):
    """The bound of the module's docstring, entry by entry."""
    n = sent.shape[-1]
    step = math.sqrt(n) / ((1 << (bits - 1)) - 1)
    _, scale = correlations_of(sent.double())
    # What a singular matrix is made regular by, and float32's rounding.
    slack = 4e-6 + 16 * n * EPS
    bound = (2 * step + step**2 + slack) * scale + 1e-37
    assert ((got.double() - sent.double()).abs() <= bound).all()


def diagonal(matrices):
    return matrices.diagonal(dim1=-2, dim2=-1).double()


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_a_matrix_sent_whole_is_within_the_bound(spectrum):
    for (groups, n), bits in itertools.product(SHAPES, WIDTHS):
        sent = psd(n, groups, n, spectrum)
        got = whole(sent, bits)
        assert_psd(got)
        assert_within_the_bound(sent, got, bits)
        a, b = diagonal(got), diagonal(sent)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_before_it_is_sent_does_not_matter(dtype):
    """Rounded, a matrix may have negative eigenvalues; they are lifted to zero."""
    for n in (1, 6, 30):
        sent = psd(n, 2, n, "low-rank").to(dtype)
        got = whole(sent, 16)
        assert_psd(got)
        away = (got.double() - sent.double()).abs().max()
        assert away <= 8 * n * torch.finfo(dtype).eps * float(sent.abs().max())


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("groups", "n"), [(1, 2), (3, 1), (4, 5), (1, 33)])
def test_a_cut_matrix_keeps_its_trace_and_its_leading_directions(groups, n, spectrum):
    sent = psd(n, groups, n, spectrum)
    trace, (values, vectors) = diagonal(sent).sum(-1), spectrum_of(sent)
    for bits, rank in itertools.product(WIDTHS, {0, 1, n // 2, n}):
        got = cut(sent, rank, bits)
        assert torch.equal(got, got.mT)
        assert got.isfinite().all()
        torch.testing.assert_close(diagonal(got).sum(-1), trace, rtol=1e-5, atol=1e-37)
        lowest = torch.linalg.eigvalsh(got.double()).min(-1).values
        assert (lowest >= -8 * n * EPS * trace).all()
        # The smaller eigenvalues are their mean, and each direction is off by `step`.
        tail = values[:, rank:].mean(-1) if rank < n else torch.zeros(groups)
        tail = tail.double().reshape(-1, 1)
        above = (values[:, :rank] - tail).clamp_min(0)
        leading = vectors[..., :rank]
        want = leading * above.unsqueeze(-2) @ leading.mT
        want += tail.unsqueeze(-1) * torch.eye(n, dtype=torch.float64)
        step = math.sqrt(n) / ((1 << (bits - 1)) - 1)
        bound = (2 * step + step**2) * above.sum(-1) + 16 * n * EPS * trace + 1e-37
        assert (torch.linalg.matrix_norm(got.double() - want) <= bound).all()


def test_the_ends_of_float32_come_back():
    for scale in (1e38, 3e38, 1e-38, 1e-44):
        sent = torch.full((1, 1, 1), scale, dtype=torch.float64)
        torch.testing.assert_close(whole(sent, 8).double(), sent, rtol=0.3, atol=0)
        assert cut(sent * torch.eye(3, dtype=torch.float64), 1, 8).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["whole", "columns"])
def test_matrices_at_the_end_of_a_dtype_are_never_refused(form, dtype):
    """Rounding must not lift what an honest client has beyond what a reader takes."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    sent = psd(0, 1, 8, "flat")
    sent = (sent / sent.abs().max() * limit).to(dtype)
    fitting = factors.within_range(sent, dtype)
    if form == "whole":
        entry = factors.encode_whole(fitting, 8)
    else:
        wide = fitting.float()
        entry = factors.encode_columns(*spectrum_of(wide), diagonal(wide).sum(-1), 3, 8)
    like = {"w": torch.empty(1, 8, 1, dtype=dtype)}
    made = check_part(entry, like, field="curvature/kfac/w/A").make().to_dense()
    assert made.isfinite().all()
    assert made.diagonal(dim1=-2, dim2=-1).max() > limit / 16


@SETTINGS
@given(
    data=st.binary(max_size=120),
    groups=st.integers(1, 4),
    n=st.integers(0, 6),
    rank=st.integers(0, 6),
    bits=st.sampled_from(WIDTHS),
    form=st.sampled_from([Packing.WHOLE, Packing.COLUMNS]),
    right=st.booleans(),
)
def test_any_bytes_are_a_psd_matrix_or_a_wire_error(
    data, groups, n, rank, bits, form, right
):
    sizes = (groups, n, min(rank, n))
    wanted = size_of_matrices(form, sizes, bits)
    if right:
        data = (data * (wanted // max(len(data), 1) + 1))[:wanted].ljust(wanted, b"\0")
    head = struct.pack("<BBIII", form, bits, *sizes)
    entry = torch.frombuffer(bytearray(head + data), dtype=torch.uint8)
    try:
        got = read(entry, groups, n).to_dense()
    except WireError as error:
        assert error.field == "curvature/kfac/w/A"  # noqa: PT017
        return
    assert got.shape == (groups, n, n)
    assert torch.equal(got, got.mT)
    assert (diagonal(got) >= 0).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_large_matrix_stays_the_codes_that_it_travelled_as(monkeypatch, bits):
    matrices = torch.stack([random_psd(9, 9, seed).float() for seed in range(2)])
    matrices[1, 0] = matrices[1, :, 0] = 0
    entry = factors.encode_whole(matrices, bits)
    made = read(entry, 2, 9)
    assert isinstance(made, DenseFactor)
    monkeypatch.setattr("flwr_fisher.wire.matrices._SMALL", 8)
    kept = read(entry, 2, 9)
    assert isinstance(kept, LowRankFactor)
    assert kept.directions.dtype == (torch.int8 if bits <= 8 else torch.int16)
    assert relative(kept.to_dense(), made.to_dense()) < 1e-6
    assert relative(kept.diagonal(), made.diagonal()) < 1e-6


def test_few_examples_cost_no_eigenvectors_where_few_bits_travel(monkeypatch):
    """Rounding leaves a singular matrix with eigenvalues below zero."""
    monkeypatch.setattr(factors, "eigh", None)
    columns = torch.randn(1, 400, 60, generator=torch.Generator().manual_seed(0))
    sent = (columns @ columns.mT) / 60 - 2e-5 * torch.eye(400)
    got = whole(sent, 8)
    assert_psd(got)
    assert_within_the_bound(sent, got, 8)
