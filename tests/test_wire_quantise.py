"""One tensor as bytes: within the stated bounds, or refused by name."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_fisher.errors import WireError
from flwr_fisher.wire.quantise import (
    HEAD,
    ROW,
    Packing,
    decode_diagonal,
    decode_param,
    encode_diagonal,
    encode_param,
    packed_size,
    read_head,
    size_of_diagonal,
    size_of_param,
)

SETTINGS = settings(deadline=None, database=None, derandomize=True, max_examples=60)
WIDTHS = (8, 16)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
FLOAT32 = torch.finfo(torch.float32)
TINY = 2.0**-133  # what float32 leaves of a scale below its range
IMPOSSIBLE = [math.nan, math.inf, -math.inf, -1.0, -1e-45]


def param_back(values, bits):
    """Encode and decode a parameter, with the checks that hold for all."""
    before = values.clone()
    entry = encode_param(values, bits)
    assert torch.equal(values, before)
    assert (entry.dtype, len(entry)) == (torch.uint8, size_of_param(values, bits))
    got = decode_param(entry, values, field="x")
    assert (got.dtype, got.shape) == (values.dtype, values.shape)
    return got


def diagonal_back(values, bits=16, fine=None):
    """The same of a diagonal, all of whose values have `bits`, or the first few 16."""
    count = values.numel()
    fine = (count if bits == 16 else 0) if fine is None else fine
    entry = encode_diagonal(values, fine)
    assert len(entry) == size_of_diagonal(count, fine)
    form, said, _, body = read_head(entry, "x")
    assert (form, said) == (Packing.FLOAT, 16)
    return decode_diagonal(body, count, values.dtype, field="x").view(values.shape)


def rounding(values):
    """Float32's rounding of scales and sums, and the dtype's of values."""
    eps = torch.finfo(values.dtype).eps + 8 * FLOAT32.eps
    smallest = torch.finfo(values.dtype).smallest_normal
    return eps * values.double().abs() + max(smallest, TINY)


def assert_float_bound(x, got, bits):
    top = float(x.abs().max()) if len(x) else 0.0
    share, least = {16: (2**-11, 2**-40), 8: (2**-4, 2**-33)}[bits]
    bound = share * x.abs() + least * top + rounding(got)
    assert ((got.double() - x).abs() <= bound).all()


@st.composite
def tensors(draw):
    """Draw float tensors, mostly of several rows that differ in size."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from([(), (1,), (0,), (3, 0), (1, 300), (20, 30), (256,)]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(shape, generator=random, dtype=torch.float64)
    spread = draw(st.sampled_from([0, 1, 20]))
    powers = torch.rand(shape, generator=random, dtype=torch.float64) - 0.5
    values *= 10 ** (draw(st.sampled_from([-30, -4, 0, 4, 26])) + spread * powers)
    values[torch.rand(shape, generator=random) < draw(st.sampled_from([0, 0.3, 1]))] = 0
    limit = min(torch.finfo(dtype).max, FLOAT32.max)
    return values.clamp(-limit, limit).to(dtype)


@pytest.mark.parametrize("bits", WIDTHS)
@SETTINGS
@given(values=tensors())
def test_a_parameter_stays_within_the_bound(bits, values):
    got, x = param_back(values, bits).double().view(-1), values.double().view(-1)
    assert got.isfinite().all()
    assert (got[x == 0] == 0).all()
    if 8 * values.itemsize <= bits:
        assert torch.equal(got, x)
    elif bits == 16:
        assert_float_bound(x, got.to(values.dtype), 16)
    else:
        for own, read in zip(x.split(ROW), got.split(ROW), strict=True):
            top = own.abs().max() if len(own) else torch.zeros(())
            bound = top / (2 * (2 ** (bits - 1) - 1)) * (1 + 1e-6)
            assert ((own - read).abs() <= bound + rounding(read.to(values.dtype))).all()


@pytest.mark.parametrize("bits", WIDTHS)
@SETTINGS
@given(values=tensors())
def test_a_diagonal_stays_within_the_bound(bits, values):
    values = values.abs()
    got = diagonal_back(values, bits)
    assert got.isfinite().all()
    assert (got >= 0).all()
    assert (got[values == 0] == 0).all()
    if values.dtype != torch.float16:  # whose own range is short
        assert_float_bound(values.double().view(-1), got.view(-1), bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_float64_beyond_float32_counts_as_the_end_of_what_can_be(bits):
    values = torch.tensor([1e300, -1e300, 1e-300, 0.0], dtype=torch.float64)
    got = param_back(values, bits)
    assert got.isfinite().all()
    assert got[0] == -got[1] >= FLOAT32.max / 2
    assert got[2] == got[3] == 0
    assert diagonal_back(values.abs(), bits).isfinite().all()


def test_what_is_no_float_or_as_narrow_is_sent_as_it_is():
    for value in (
        torch.tensor([[True, False]]),
        torch.tensor(2**40),
        torch.tensor([1e-7, 3.0], dtype=torch.float16),
        torch.tensor([1e-30, 3.0], dtype=torch.bfloat16),
    ):
        assert read_head(encode_param(value, 16), "x")[0] == Packing.RAW
        assert torch.equal(param_back(value, 16), value)
    exact = torch.tensor([1.0 + 1e-7, 1e-40])
    assert torch.equal(param_back(exact, 64), exact)
    entry, flags = encode_param(torch.tensor([True, False]), 16), torch.zeros(2).bool()
    entry[-1] = 2
    with pytest.raises(WireError, match="other than 0 and 1"):
        decode_param(entry, flags, field="x")


def test_strides_gradients_and_odd_offsets_do_not_matter():
    values = torch.rand(30, 40, generator=torch.Generator().manual_seed(0))
    for bits in WIDTHS:
        entry = encode_param(values.T.requires_grad_(), bits)
        assert not entry.requires_grad
        assert torch.equal(entry, encode_param(values.T.contiguous(), bits))
        shifted = torch.cat([entry.new_zeros(1), entry])[1:]
        want = decode_param(entry, values, field="x")
        assert torch.equal(decode_param(shifted, values, field="x"), want)


def test_some_values_of_a_diagonal_have_more_bits():
    values = torch.rand(31, generator=torch.Generator().manual_seed(0))
    for fine in (0, 1, 10, 31):
        got = diagonal_back(values, fine=fine)
        better = got == diagonal_back(values)
        assert fine <= int(better.sum()) <= fine + 2  # two of these are equal in both
        assert torch.equal(got[~better], diagonal_back(values, 8)[~better])
        assert fine != 10 or better.nonzero().diff(dim=0).max() <= 4


@pytest.mark.parametrize("bits", WIDTHS)
@settings(SETTINGS, max_examples=100)
@given(drawn=st.data())
def test_any_bytes_give_finite_values_or_a_wire_error(bits, drawn):
    count = drawn.draw(st.sampled_from([0, 1, 5, 300]))
    dtype = drawn.draw(st.sampled_from(DTYPES))
    form = drawn.draw(st.sampled_from([Packing.FLOAT, Packing.ROWS]))
    scales = 1 if form == Packing.FLOAT else -(-count // ROW)
    size = packed_size(count, bits)
    scale = st.sampled_from(
        [0.0, -0.0, 1e-45, 1.0, 7e4, 3e38, FLOAT32.max, *IMPOSSIBLE]
    )
    values = drawn.draw(st.lists(scale, min_size=scales, max_size=scales))
    noise = struct.pack(f"<{scales}f", *values)
    noise += drawn.draw(st.binary(min_size=size, max_size=size))
    body = torch.tensor(list(noise), dtype=torch.uint8)
    head = torch.tensor(list(struct.pack("<BBIII", form, bits, 0, 0, 0))).byte()
    like = torch.zeros(count, dtype=dtype)
    try:
        got = decode_param(torch.cat([head, body]), like, field="f")
        assert got.isfinite().all()
    except WireError as error:
        assert error.field == "f"  # noqa: PT017
    if bits == 16:
        fine = drawn.draw(st.integers(0, count + 1))
        size = size_of_diagonal(count, min(fine, count)) - HEAD - 8
        noise = struct.pack("<fI", drawn.draw(scale), fine)
        noise += drawn.draw(st.binary(min_size=size, max_size=size))
        try:
            got = decode_diagonal(
                np.frombuffer(noise, np.uint8), count, dtype, field="f"
            )
        except WireError:
            return
        assert (got.shape, got.dtype) == ((count,), dtype)
        assert got.isfinite().all()
        assert (got >= 0).all()
