"""Positive semi-definite matrices in few bytes: bounds, and what is refused."""

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import random_psd, relative
from torch import Tensor
from uploads import SPECTRA, psd

from flwr_fisher.curvature.operators.factors import DenseFactor, LowRankFactor
from flwr_fisher.errors import WireError
from flwr_fisher.wire import matrix_codes as factors

SETTINGS = settings(deadline=None, database=None, derandomize=True, max_examples=25)
WIDTHS = range(2, 17)
SHAPES = [(1, 1), (1, 2), (3, 1), (1, 7), (4, 5), (1, 33)]
EPS = torch.finfo(torch.float32).eps


def whole(matrices: Tensor, bits: int) -> Tensor:
    """Encode and decode, with what holds of every size."""
    groups, n = matrices.shape[:2]
    before = matrices.clone()
    data = factors.encode_whole(matrices, bits)
    assert torch.equal(matrices, before)
    assert data.dtype == torch.uint8
    assert data.shape == (factors.size_of_whole(groups, n, bits),)
    return factors.decode_whole(data, groups, n, bits, field="x").to_dense()


def spectrum_of(matrices: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrices)
    return values.flip(-1).clamp_min(0), vectors.flip(-1)


def cut(matrices: Tensor, rank: int, bits: int) -> Tensor:
    groups, n = matrices.shape[:2]
    trace = diagonal(matrices).sum(-1)
    data = factors.encode_columns(*spectrum_of(matrices), trace, rank, bits)
    assert data.shape == (factors.size_of_columns(groups, n, rank, bits),)
    got = factors.decode_columns(data, groups, n, rank, bits, field="x")
    assert got.directions.shape == (groups, n, rank)
    return got.to_dense()


def assert_psd(matrices: Tensor) -> None:
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


def correlations_of(matrices: Tensor) -> tuple[Tensor, Tensor]:
    roots = matrices.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    scale = roots.unsqueeze(-1) * roots.unsqueeze(-2)
    return torch.where(scale > 0, matrices / scale, 0), scale


def assert_within_the_bound(sent: Tensor, got: Tensor, bits: int) -> None:
    """The bound of the module's docstring, entry by entry."""
    n = sent.shape[-1]
    step = math.sqrt(n) / ((1 << (bits - 1)) - 1)
    _, scale = correlations_of(sent.double())
    # What a singular matrix is made regular by, and float32's rounding.
    slack = 4e-6 + 16 * n * EPS
    bound = (2 * step + step**2 + slack) * scale + 1e-37
    assert ((got.double() - sent.double()).abs() <= bound).all()


def diagonal(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).double()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("groups", "n"), SHAPES)
def test_a_matrix_sent_whole_is_within_the_bound(
    groups: int, n: int, spectrum: str, bits: int
) -> None:
    sent = psd(n, groups, n, spectrum)
    got = whole(sent, bits)
    assert_psd(got)
    assert_within_the_bound(sent, got, bits)
    torch.testing.assert_close(
        diagonal(got), diagonal(sent), rtol=1e-5, atol=1e-37, check_dtype=False
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [1, 6, 30])
def test_rounding_before_it_is_sent_does_not_matter(n: int, dtype: torch.dtype) -> None:
    """Rounded, a matrix may have negative eigenvalues; they are lifted to zero."""
    sent = psd(n, 2, n, "low-rank").to(dtype)
    got = whole(sent, 16)
    assert_psd(got)
    away = (got.double() - sent.double()).abs().max()
    assert away <= 8 * n * torch.finfo(dtype).eps * float(sent.abs().max())


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("groups", "n"), SHAPES)
def test_a_cut_matrix_keeps_its_trace_and_its_leading_directions(
    groups: int, n: int, spectrum: str
) -> None:
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


@pytest.mark.parametrize("groups", [1, 3])
def test_without_columns_a_matrix_is_its_mean_eigenvalue(groups: int) -> None:
    sent = psd(0, groups, 5)
    means = sent.diagonal(dim1=-2, dim2=-1).mean(-1).reshape(-1, 1, 1)
    want = (means * torch.eye(5, dtype=torch.float64)).float()
    torch.testing.assert_close(cut(sent, 0, 8), want)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_basis_comes_back_within_the_bound(bits: int) -> None:
    vectors = torch.linalg.qr(psd(3, 2, 9))[0]
    for rank in (0, 1, 5, 9):
        data = factors.encode_basis(vectors, rank, bits)
        assert data.shape == (factors.size_of_basis(2, 9, rank, bits),)
        got = factors.decode_basis(data, 2, 9, rank, bits, field="x")
        assert got.shape == (2, 9, rank)
        away = (got.double() - vectors[..., :rank]).norm(dim=-2)
        assert (away <= 3 / ((1 << (bits - 1)) - 1) + 1e-6).all()
        assert rank == 0 or (got.norm(dim=-2) - 1).abs().max() < 1e-6


def test_no_rows_and_no_groups_are_no_bytes() -> None:
    for groups, n in ((1, 0), (0, 3), (0, 0)):
        nothing = torch.zeros(groups, n, n)
        assert whole(nothing, 6).shape == (groups, n, n)


def test_a_row_of_zeros_stays_one() -> None:
    sent = psd(1, 1, 6)
    sent[:, 2], sent[:, :, 2] = 0, 0
    got = whole(sent, 16)
    assert not got[:, 2].any()
    assert_within_the_bound(sent, got, 16)


def test_the_ends_of_float32_come_back() -> None:
    for scale in (1e38, 3e38, 1e-38, 1e-44):
        sent = torch.full((1, 1, 1), scale, dtype=torch.float64)
        torch.testing.assert_close(whole(sent, 8).double(), sent, rtol=0.3, atol=0)
        got = cut(sent * torch.eye(3, dtype=torch.float64), 1, 8)
        assert got.isfinite().all()


def some(groups: int = 1, n: int = 3, bits: int = 6) -> tuple[Tensor, Tensor]:
    sent = psd(0, groups, n)
    trace = diagonal(sent).sum(-1)
    return (
        factors.encode_whole(sent, bits),
        factors.encode_columns(*spectrum_of(sent), trace, 2, bits),
    )


def with_norm(data: Tensor, value: float) -> Tensor:
    changed = data.clone()
    changed[4:8] = torch.frombuffer(
        bytearray(struct.pack("<f", value)), dtype=torch.uint8
    )
    return changed


def decoders(full: Tensor, columns: Tensor) -> list[tuple[Tensor, object]]:
    return [
        (full, lambda d: factors.decode_whole(d, 1, 3, 6, field="x")),
        (columns, lambda d: factors.decode_columns(d, 1, 3, 2, 6, field="x")),
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, -1e-45])
def test_an_impossible_norm_is_refused(value: float) -> None:
    for data, decode in decoders(*some()):
        with pytest.raises(WireError, match="negative or not finite") as caught:
            decode(with_norm(data, value))
        assert caught.value.field == "x"


def test_norms_that_overflow_are_refused() -> None:
    for data, decode in decoders(*some()):
        with pytest.raises(WireError, match="overflow"):
            decode(with_norm(data, 3e38))


def test_another_number_of_bytes_is_refused() -> None:
    for data, decode in decoders(*some()):
        for wrong in (data[:-1], torch.cat([data, data[:1]])):
            with pytest.raises(WireError, match="bytes of codes, expected"):
                decode(wrong)
        with pytest.raises(WireError, match="of norms"):
            decode(data[:7])


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_code_that_stands_for_nothing_is_refused(bits: int) -> None:
    data = factors.encode_whole(psd(0, 1, 8), bits)
    data[-4:] = 255
    with pytest.raises(WireError, match="stands for no value"):
        factors.decode_whole(data, 1, 8, bits, field="x")


def test_nothing_is_allocated_for_codes_that_did_not_come() -> None:
    with pytest.raises(WireError, match="expected"):
        factors.decode_whole(
            torch.zeros(4 * 10**6, dtype=torch.uint8), 1, 10**6, 8, field="x"
        )
    with pytest.raises(WireError, match="expected"):
        factors.decode_basis(
            torch.zeros(4, dtype=torch.uint8), 2**30, 2**30, 2**30, 8, field="x"
        )


@SETTINGS
@given(
    data=st.binary(max_size=120),
    groups=st.integers(0, 4),
    n=st.integers(0, 6),
    rank=st.integers(0, 6),
    bits=st.integers(2, 16),
    size=st.booleans(),
)
def test_any_bytes_are_a_psd_matrix_or_a_wire_error(
    data: bytes, groups: int, n: int, rank: int, bits: int, size: bool
) -> None:
    rank = min(rank, n)
    sizes = (
        factors.size_of_whole(groups, n, bits),
        factors.size_of_columns(groups, n, rank, bits),
    )
    for kind, wanted in enumerate(sizes):
        given_ = (data * (wanted // max(len(data), 1) + 1))[:wanted] if size else data
        given_ = given_.ljust(wanted, b"\0") if size else given_
        tensor = torch.frombuffer(bytearray(given_ or b"\0"), dtype=torch.uint8)
        tensor = tensor[: len(given_)]
        try:
            if kind == 0:
                got = factors.decode_whole(tensor, groups, n, bits, field="x")
                got = got.to_dense()
            else:
                columns = factors.decode_columns(
                    tensor, groups, n, rank, bits, field="x"
                )
                got = columns.to_dense()
        except WireError as error:
            assert error.field == "x"  # noqa: PT017
            continue
        assert got.shape == (groups, n, n)
        assert torch.equal(got, got.mT)
        assert (diagonal(got) >= 0).all()


@pytest.mark.parametrize("bits", [3, 8, 12])
def test_a_large_matrix_stays_the_codes_that_it_travelled_as(
    monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    matrices = torch.stack([random_psd(9, 9, seed).float() for seed in range(2)])
    matrices[1, 0] = matrices[1, :, 0] = 0
    data = factors.encode_whole(matrices, bits)
    made = factors.decode_whole(data, 2, 9, bits, field="x")
    assert isinstance(made, DenseFactor)
    monkeypatch.setattr("flwr_fisher.wire.coded_matrices._SMALL", 8)
    kept = factors.decode_whole(data, 2, 9, bits, field="x")
    assert isinstance(kept, LowRankFactor)
    assert kept.directions.dtype == (torch.int8 if bits <= 8 else torch.int16)
    assert relative(kept.to_dense(), made.to_dense()) < 1e-6
    assert relative(kept.diagonal(), made.diagonal()) < 1e-6
