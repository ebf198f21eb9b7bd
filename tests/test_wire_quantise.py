import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, WireError
from flwr_fisher.wire.bits import pack, packed_size, unpack
from flwr_fisher.wire.levels import Linear, Logarithmic, SquareRoot
from flwr_fisher.wire.quantise import BLOCK, Quantiser

SETTINGS = settings(deadline=None, database=None, derandomize=True, max_examples=25)
KINDS = [Linear, SquareRoot, Logarithmic]
WIDTHS = range(2, 17)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
FLOAT32 = torch.finfo(torch.float32)
INT_DTYPES = [torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]


def randint(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def smallest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def back(quantiser: Quantiser, values: Tensor) -> Tensor:
    """Encode and decode, with the checks that hold for all."""
    before = values.clone()
    data = quantiser.encode(values)
    assert torch.equal(values, before)
    assert data.dtype == torch.uint8
    assert data.shape == (quantiser.size(values.numel()),)
    got = quantiser.decode(data, values.numel(), values.dtype, field="x")
    assert got.dtype == values.dtype
    return got.view(values.shape)


def assert_within_the_bound(quantiser: Quantiser, values: Tensor) -> None:
    """Check a round trip block by block against the bounds, in float64."""
    decoded = back(quantiser, values).reshape(-1)
    assert decoded.isfinite().all()
    sent = values.reshape(-1).double().clamp(-FLOAT32.max, FLOAT32.max)
    if not len(sent):
        return
    for x, got in zip(sent.split(BLOCK), decoded.double().split(BLOCK), strict=True):
        # Somewhere in [low, high] is what was decoded before it was rounded.
        near = 0.51 * torch.finfo(values.dtype).eps + 4 * FLOAT32.eps
        slack = near * got.abs() + max(smallest(values.dtype), smallest(torch.float32))
        low, high = got - slack, got + slack
        if isinstance(quantiser, Linear):
            top = x.abs().max()
            bound = top / (2 * (2 ** (quantiser.bits - 1) - 1)) + 4 * FLOAT32.eps * top
            assert (x >= low - bound).all()
            assert (x <= high + bound).all()
        elif isinstance(quantiser, SquareRoot):
            top = x.max().sqrt()
            bound = top / (2 * (2**quantiser.bits - 1)) + 4 * FLOAT32.eps * top
            assert (x.sqrt() >= low.clamp(0).sqrt() - bound).all()
            assert (x.sqrt() <= high.sqrt() + bound).all()
        elif x.any():
            assert torch.equal(got == 0, x == 0)
            x = torch.where(x > 0, x.clamp(smallest(torch.float32)), 0)
            ratio = x.max() / x[x > 0].min()
            q = ratio ** (1 / (2**quantiser.bits - 2))
            assert (x >= low / q.sqrt()).all()
            assert (x <= high * q.sqrt()).all()
        assert quantiser.signed or (got >= 0).all()
        assert (got[x == 0] == 0).all()


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw float tensors, mostly of several blocks that differ in size."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from([(), (1,), (0,), (3, 0), (1, 300), (20, 30), (256,)]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(shape, generator=random, dtype=torch.float64)
    spread = draw(st.sampled_from([0, 1, 40, 80]))
    powers = torch.rand(shape, generator=random, dtype=torch.float64) - 0.5
    values *= 10 ** (draw(st.sampled_from([-44, -20, 0, 20, 40])) + spread * powers)
    values[torch.rand(shape, generator=random) < draw(st.sampled_from([0, 0.3, 1]))] = 0
    if dtype == torch.float64:
        return values
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
@SETTINGS
@given(values=tensors())
def test_a_round_trip_stays_within_the_bound(
    kind: type[Quantiser], bits: int, values: Tensor
) -> None:
    quantiser = kind(bits)
    assert_within_the_bound(quantiser, values if kind.signed else values.abs())


@pytest.mark.parametrize("kind", KINDS)
@settings(SETTINGS, max_examples=150)
@given(
    bits=st.sampled_from(WIDTHS),
    values=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=12
    ),
)
def test_any_floats_come_back_within_the_bound(
    kind: type[Quantiser], bits: int, values: list[float]
) -> None:
    tensor = torch.tensor(values)
    assert_within_the_bound(kind(bits), tensor if kind.signed else tensor.abs())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_of_a_dtype_come_back(
    kind: type[Quantiser], dtype: torch.dtype
) -> None:
    info = torch.finfo(dtype)
    high = min(info.max, FLOAT32.max)
    low = max(smallest(dtype), smallest(torch.float32))
    for bits in WIDTHS:
        ends = torch.tensor([high, 0, low], dtype=dtype)
        assert_within_the_bound(kind(bits), ends)
        got = back(kind(bits), ends)
        assert got[0] == high
        assert got[1] == 0
        assert kind is not Logarithmic or got[2] == low
        assert torch.equal(back(kind(bits), ends[2:]), ends[2:])
        if kind.signed:
            assert torch.equal(back(kind(bits), -ends[:2]), -ends[:2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 1.0, 3.3, 1e-38, 1e-44, 1e38])
def test_a_constant_comes_back_exactly(kind: type[Quantiser], value: float) -> None:
    for bits in WIDTHS:
        for shape in [(), (1,), (1, 7), (3, 300)]:
            values = torch.full(shape, value)
            assert torch.equal(back(kind(bits), values), values)


@pytest.mark.parametrize("kind", KINDS)
def test_float64_beyond_float32_counts_as_its_end(kind: type[Quantiser]) -> None:
    values = torch.tensor([1e300, 1e-300, 0.0], dtype=torch.float64)
    got = back(kind(16), values)
    assert got[0] == FLOAT32.max
    assert got[1] == (smallest(torch.float32) if kind is Logarithmic else 0)
    assert got[2] == 0
    (tiny,) = back(kind(16), values[1:2])
    assert tiny == (smallest(torch.float32) if kind is Logarithmic else 0)


def test_float64_is_coded_more_finely_than_float32_can() -> None:
    values = torch.arange(8, dtype=torch.float64) / 7
    assert (back(Linear(16), values) - values).abs().max() <= 1 / (2 * 32767)
    assert back(Linear(4), values)[3] == 3 / 7


def test_the_widest_codes_are_as_good_as_float32_allows() -> None:
    values = 1e30 * torch.linspace(1, 1.001, BLOCK)
    ratio = back(Logarithmic(16), values) / values
    assert (ratio - 1).abs().max() < 3 * FLOAT32.eps


def test_the_levels_are_the_documented_ones() -> None:
    values = torch.linspace(-1, 1, 201)
    assert back(Linear(2), values).unique().tolist() == [-1, 0, 1]
    thirds = torch.arange(-3, 4) / 3
    torch.testing.assert_close(back(Linear(3), values).unique(), thirds)
    squares = (torch.arange(8) / 7).square()
    torch.testing.assert_close(back(SquareRoot(3), values.abs()).unique(), squares)
    powers = torch.tensor([1e-6, 1e-3, 1.0])
    values = torch.cat([torch.logspace(-6, 0, 99), powers, torch.zeros(3)])
    levels = torch.cat([torch.zeros(1), powers])
    torch.testing.assert_close(back(Logarithmic(2), values).unique(), levels)


def test_a_block_does_not_feel_its_neighbours() -> None:
    values = torch.cat([torch.full((BLOCK,), 1e30), torch.full((BLOCK,), 1e-30)])
    for kind in KINDS:
        assert torch.equal(back(kind(2), values), values)
        both = kind(8).encode(values)
        assert both.numel() == 2 * kind(8).encode(values[:BLOCK]).numel()


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoding_is_scales_and_then_codes(kind: type[Quantiser]) -> None:
    values = torch.tensor([4.0, 1.0]).repeat_interleave(BLOCK)[:-6]
    values[0] = 2
    data = bytes(kind(6).encode(values).tolist())
    scales = [2, 4, 1, 1] if kind is Logarithmic else [4, 1]
    head = struct.pack(f"<{len(scales)}f", *scales)
    assert data.startswith(head)
    rest = torch.tensor(list(data[len(head) :]), dtype=torch.uint8)
    codes = unpack(rest, 6, len(values))
    first = {Linear: 47, SquareRoot: 45, Logarithmic: 1}[kind]  # 31 + 16, √½ 63
    assert codes[0] == first
    assert (codes[1:BLOCK] == {Linear: 62}.get(kind, 63)).all()


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
@pytest.mark.parametrize("bits", WIDTHS)
def test_the_size_is_exact(bits: int, count: int) -> None:
    blocks, codes = math.ceil(count / 256), math.ceil(count * bits / 8)
    assert Linear(bits).size(count) == SquareRoot(bits).size(count)
    assert Linear(bits).size(count) == 4 * blocks + codes
    assert Logarithmic(bits).size(count) == 8 * blocks + codes
    for kind in KINDS:
        assert kind(bits).encode(torch.ones(count)).shape == (kind(bits).size(count),)


@pytest.mark.parametrize("kind", KINDS)
def test_strides_gradients_and_odd_offsets_do_not_matter(kind: type[Quantiser]) -> None:
    values = torch.rand(30, 40, generator=torch.Generator().manual_seed(0))
    for bits in (6, 8, 16):
        data = kind(bits).encode(values.T.requires_grad_())
        assert not data.requires_grad
        assert torch.equal(data, kind(bits).encode(values.T.contiguous()))
        shifted = torch.cat([data.new_zeros(1), data])[1:]
        spread = torch.stack([data, data], 1)[:, 0]
        want = kind(bits).decode(data, 1200, torch.float32, field="x")
        for same in (shifted, spread):
            got = kind(bits).decode(same, 1200, torch.float32, field="x")
            assert torch.equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_narrower_dtype_clips_what_it_cannot_hold(kind: type[Quantiser]) -> None:
    values = torch.tensor([FLOAT32.max, FLOAT32.max, 0])
    for dtype in (torch.float16, torch.bfloat16):
        for sign in [1, -1] if kind.signed else [1]:
            data = kind(8).encode(sign * values)
            got = kind(8).decode(data, 3, dtype, field="x")
            limit = torch.finfo(dtype).max
            assert got.tolist() == [sign * limit, sign * limit, 0]
    values = torch.tensor([1e5, 1e4])  # only what does not fit is clipped
    got = kind(16).decode(kind(16).encode(values), 2, torch.float16, field="x")
    torch.testing.assert_close(got, torch.tensor([65504, 1e4], dtype=torch.float16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [1, 17, 0, -8])
def test_other_widths_are_refused(kind: type[Quantiser], bits: int) -> None:
    with pytest.raises(ConfigurationError, match=r"bits must be in \[2, 16\]"):
        kind(bits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_cannot_be_encoded_is_refused(
    kind: type[Quantiser], dtype: torch.dtype
) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = torch.ones(300, dtype=dtype)
        values[270] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            kind(6).encode(values)
    if not kind.signed:
        with pytest.raises(ValueError, match=f"holds -0.5, and {kind.__name__}"):
            kind(6).encode(torch.tensor([1, -0.5], dtype=dtype))
        assert torch.equal(back(kind(6), -torch.zeros(2)), torch.zeros(2))


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_another_form_is_refused(kind: type[Quantiser]) -> None:
    data = kind(6).encode(torch.ones(300))
    for bad in (data[1:], torch.cat([data, data[:1]]), data[None], data[:0]):
        with pytest.raises(WireError, match=r"^'f': shape .*, expected \(\d+,\)"):
            kind(6).decode(bad, 300, torch.float32, field="f")
    with pytest.raises(WireError, match=r"^'f': dtype torch.int8, expected"):
        kind(6).decode(data.to(torch.int8), 300, torch.float32, field="f")
    with pytest.raises(WireError, match=r"^'f': shape"):
        kind(6).decode(data, 0, torch.float32, field="f")


IMPOSSIBLE = [math.nan, math.inf, -math.inf, -1.0, -1e-45]


def with_scales(quantiser: Quantiser, scales: list[float], count: int) -> Tensor:
    data = quantiser.encode(torch.ones(count))
    head = struct.pack(f"<{len(scales)}f", *scales)
    data[: len(head)] = torch.tensor(list(head))
    return data


@pytest.mark.parametrize(
    ("kind", "scales"),
    [
        *((kind, [bad]) for kind in KINDS for bad in IMPOSSIBLE),
        *((Linear, [1, bad]) for bad in IMPOSSIBLE),
        (Logarithmic, [1, math.nan]),
        (Logarithmic, [1, math.inf]),
        (Logarithmic, [2, 1]),
        (Logarithmic, [0, 1]),
        (Logarithmic, [1, 0]),
        (Logarithmic, [1, 1, 0, 1e-45]),
    ],
)
def test_an_impossible_scale_is_refused(
    kind: type[Quantiser], scales: list[float]
) -> None:
    data = with_scales(kind(6), scales, 300)
    with pytest.raises(WireError, match=r"^'f': holds a scale that no block can have"):
        kind(6).decode(data, 300, torch.float32, field="f")


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_code_that_linear_leaves_out_is_refused(bits: int) -> None:
    codes = torch.full((300,), 2**bits - 2)
    scales = torch.ones(2).view(torch.uint8)
    data = torch.cat([scales, pack(codes, bits)])
    assert (Linear(bits).decode(data, 300, torch.float32, field="f") == 1).all()
    codes[299] += 1
    data = torch.cat([scales, pack(codes, bits)])
    with pytest.raises(WireError, match=r"^'f': holds a code that stands"):
        Linear(bits).decode(data, 300, torch.float32, field="f")


SCALES = [0.0, -0.0, 1e-45, 1e-38, 1.0, 7e4, 3e38, FLOAT32.max]


@pytest.mark.parametrize("kind", KINDS)
@settings(SETTINGS, max_examples=300)
@given(drawn=st.data())
def test_any_bytes_give_finite_values_or_a_wire_error(
    kind: type[Quantiser], drawn: st.DataObject
) -> None:
    quantiser = kind(drawn.draw(st.sampled_from(WIDTHS)))
    count = drawn.draw(st.sampled_from([0, 1, 5, 300]))
    size = quantiser.size(count)
    noise = drawn.draw(st.binary(min_size=size, max_size=size))
    head = size - packed_size(count, quantiser.bits)
    if drawn.draw(st.booleans()):
        scale = st.sampled_from(SCALES + IMPOSSIBLE * drawn.draw(st.booleans()))
        scales = drawn.draw(st.lists(scale, min_size=head // 4, max_size=head // 4))
        noise = struct.pack(f"<{len(scales)}f", *scales) + noise[head:]
    data = torch.tensor(list(noise), dtype=torch.uint8)
    dtype = drawn.draw(st.sampled_from(DTYPES))
    try:
        got = quantiser.decode(data, count, dtype, field="f")
    except WireError:
        return
    assert got.shape == (count,)
    assert got.dtype == dtype
    assert got.isfinite().all()
    assert kind.signed or (got >= 0).all()


@pytest.mark.parametrize("bits", range(1, 17))
def test_unpacking_undoes_packing_for_every_count(bits: int) -> None:
    for count in range(101):
        codes = randint(2**bits, count)
        packed = pack(codes, bits)
        assert packed.dtype == torch.uint8
        assert packed.shape == (packed_size(count, bits),)
        got = unpack(packed, bits, count)
        assert got.dtype == torch.int32
        assert torch.equal(got, codes.int())


@pytest.mark.parametrize("bits", range(1, 17))
def test_the_bits_are_those_of_one_little_endian_number(bits: int) -> None:
    for codes in (randint(2**bits, 37), torch.full((37,), 2**bits - 1)):
        number = sum(code << (i * bits) for i, code in enumerate(codes.tolist()))
        want = number.to_bytes(packed_size(37, bits), "little")
        assert bytes(pack(codes, bits).tolist()) == want


@pytest.mark.parametrize("bits", range(1, 17))
def test_codes_may_be_of_any_integer_dtype_that_holds_them(bits: int) -> None:
    codes = randint(2**bits, 99)
    small = [torch.uint8] * (bits <= 8) + [torch.int8] * (bits <= 7)
    for dtype in INT_DTYPES[bits == 16 :] + small:
        assert torch.equal(pack(codes.to(dtype), bits), pack(codes, bits)), dtype


@pytest.mark.parametrize("bits", range(1, 17))
def test_codes_are_unpacked_from_slices(bits: int) -> None:
    codes = randint(2**bits, 50).int()
    packed = pack(codes, bits)
    shifted = torch.cat([packed.new_full((3,), 255), packed])[3:]
    assert torch.equal(unpack(shifted, bits, 50), codes)
    assert torch.equal(unpack(torch.stack([packed, packed], 1)[:, 1], bits, 50), codes)
    strided = torch.stack([codes, codes + 1], 1)[:, 0]
    assert torch.equal(pack(strided, bits), packed)


def test_left_over_bits_are_ignored() -> None:
    data = torch.tensor([0b11000101], dtype=torch.uint8)
    assert unpack(data, 3, 2).tolist() == [5, 0]


def test_a_mistaken_call_of_the_packing_is_refused() -> None:
    for bad in (torch.zeros(4).byte(), torch.zeros(1, 3).byte(), torch.zeros(3).int()):
        with pytest.raises(ValueError, match=r"3 codes of 6 bits are .* \(3,\), got"):
            unpack(bad, 6, 3)
    for bits in (0, 17):
        with pytest.raises(ConfigurationError, match="bits must be in"):
            pack(torch.zeros(8, dtype=torch.int32), bits)
        with pytest.raises(ConfigurationError, match="bits must be in"):
            unpack(torch.zeros(bits, dtype=torch.uint8), bits, 8)
