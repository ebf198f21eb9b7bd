"""Reading arrays that strangers wrote: a tensor or a WireError, and no memory."""

import io
import itertools
import re
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy

from flwr_fisher.errors import WireError
from flwr_fisher.wire import arrays_to_tensors, tensors_to_arrays

REAL = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32"]
REAL += ["uint64", "float16", "float32", "float64"]
SHAPES = [(), (0,), (1,), (5,), (2, 3), (0, 3), (3, 0, 2)]
SHAPES += [(2, 1, 3, 2), (1,) * 12]


def entries(shape, dtype="float32"):
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def saved(values, version=(1, 0)):
    stream = io.BytesIO()
    npy.write_array(stream, np.asarray(values), version)
    return stream.getvalue()


def with_header(header, body=b"", version=1):
    """Bytes with whatever header, of the length that it really has."""
    text = header.encode("latin1")
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + body


def header(shape=(2, 3), descr="<f4", fortran_order=False):
    return repr({"descr": descr, "fortran_order": fortran_order, "shape": shape})


def declared(data, shape=(2, 3), dtype="float32"):
    """An array with whatever metadata: the constructor would check their types."""
    array = Array(entries((2, 3)))
    array.data, array.shape, array.dtype = data, shape, dtype
    return array


def read(array):
    record = ArrayRecord()
    record["fine"], record["layer.w"] = Array(entries((2,))), array
    return arrays_to_tensors(record)["layer.w"]


def complaint(array):
    with pytest.raises(WireError) as caught:
        read(array)
    assert caught.value.field == "layer.w"
    assert caught.value.reason.isprintable()
    return caught.value.reason


GOOD = saved(entries((2, 3)))
BODY = entries((2, 3)).tobytes()


@pytest.mark.parametrize("dtype", REAL)
def test_what_flower_writes_is_read(dtype):
    for shape, order in itertools.product(SHAPES, "CF"):
        values = np.asarray(entries(shape, dtype), order=order)
        tensor = read(Array(values))
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.shape == shape
        assert tensor.is_contiguous()
        assert np.array_equal(tensor.numpy(), values)
    assert b"'fortran_order': True" in Array(entries((3, 4), dtype).T).data


def test_both_versions_of_the_header_and_any_length_are_read():
    whole = [saved(entries((2, 3)), version) for version in ((1, 0), (2, 0))]
    assert [data[6] for data in whole] == [1, 2]
    odd = [with_header(header() + " " * padding, BODY) for padding in range(4)]
    for data in whole + odd:
        assert torch.equal(read(declared(data)), torch.arange(6.0).reshape(2, 3))


def test_the_tensor_is_writable_and_its_memory_its_own():
    array = Array(entries((2, 3)))
    read(array).fill_(7)
    assert array.data == GOOD
    assert torch.equal(read(array), torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(value):
    for dtype, order in itertools.product(("float16", "float32", "float64"), "CF"):
        values = np.ones((2, 3), dtype, order=order)
        values[1, 1] = value
        assert complaint(Array(values)) == "holds NaN or infinity"


def huge_int(digits):
    return 10 ** (digits - 1)


# What arrives in (data, shape, dtype), and the complaint.
def said_twice(shape, body=BODY, descr="<f4", dtype="float32"):
    """An array whose header and metadata agree."""
    return declared(with_header(header(shape, descr), body), shape, dtype)


def of_numpy(values, dtype):
    return declared(saved(values), np.shape(values), dtype)


HOSTILE = {
    "no bytes": (declared(b""), "magic"),
    "cut header": (declared(GOOD[:50]), "EOF"),
    "version 3": (declared(with_header(header(), BODY, 3)), r"\(3, 0\)"),
    "long header": (declared(with_header(header() + " " * 1000, BODY)), "EOF: .* 10"),
    "header of 4 GB": (
        declared(b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 2000),
        "EOF: reading array header, expected 4294967295",
    ),
    "nested brackets": (declared(with_header("[" * 990)), "unreadable"),
    "float shape": (declared(with_header(header((2.0, 3)), BODY)), "shape"),
    "one byte short": (declared(GOOD[:-1]), "23 bytes of entries, but shape"),
    "one byte more": (declared(GOOD + b"\0"), "25 bytes of entries"),
    "negative": (said_twice((-6,)), "has -24"),
    "too many dimensions": (said_twice((1,) * 200, BODY[:4]), "dimension"),
    "wraps around 64 bits": (said_twice((2**32, 2**32), b""), "0 bytes of entries"),
    "astronomic, declared": (declared(GOOD, (huge_int(5000), 3)), "announced as"),
    "big-endian": (of_numpy(entries((2, 3), ">f4"), ">f4"), "numbers >f4"),
    "objects": (
        declared(with_header(header(descr="|O"), BODY), dtype="object"),
        "no real",
    ),
    "2 GB an entry": (
        said_twice((0,), b"", *["|V2000000000"] * 2),
        "torch has no real",
    ),
    "complex": (of_numpy(np.ones(2, np.complex64), "complex64"), "no real numbers"),
    "a third truth": (
        said_twice((2,), b"\x01\x02", "|b1", "bool"),
        "other than 0 and 1",
    ),
    "other shape": (declared(GOOD, (3, 2)), r"as .* \(3, 2\), but .* \(2, 3\)"),
    "long dtype": (declared(GOOD, dtype="x" * 10**6), "announced as x{79}…"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.filterwarnings("default")  # numpy's and Python's parsers may warn first
def test_what_is_not_an_array_is_refused_by_name(case):
    array, reason = HOSTILE[case]
    reason_given = complaint(array)
    assert reason_given.startswith("unreadable array: ")
    assert re.search(reason, reason_given)
    assert len(reason_given) < 2500


PEAK = 10**6


def peak_of(data, shape, dtype):
    array = declared(data, shape, dtype)
    tracemalloc.start()
    try:
        complaint(array)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "shape", [(10**12,), (10**8,), (10**6, 10**6), (2**62, 4), (10**300,)], ids=repr
)
def test_a_header_that_asks_for_a_terabyte_allocates_nothing(shape):
    for descr, order in itertools.product(("<f4", "|b1"), (False, True)):
        data = with_header(header(shape, descr, order), BODY)
        assert peak_of(data, shape, np.dtype(descr).name) < PEAK
        assert peak_of(data, (2, 3), "float32") < PEAK


def test_a_record_over_the_limit_is_refused_by_its_largest_array():
    record = tensors_to_arrays({"a": torch.zeros(10), "b": torch.zeros(20)})
    record["c"] = declared(b"not even read")
    total = sum(len(array.data) for array in record.values())
    with pytest.raises(WireError) as caught:
        arrays_to_tensors(record, limit=total - 1)
    assert caught.value.field == "b"
    assert caught.value.reason == (
        f"{total} bytes arrived, but at most {total - 1} are allowed"
    )


TOKENS = [b"(", b"-1", b"'<f8'", b"'|O'", b"'>f4'", b"True ", b"999999999999", b"L"]
TOKENS += [b"0", b"(0,", b"\\d", b"\n", b"{", b"\x00", b"\xff\xff", b"\x02\x00"]
SCALARS = st.one_of(
    st.integers(), st.floats(), st.none(), st.booleans(), st.text(max_size=5)
)
SHAPE_LIKE = st.one_of(
    st.just((2, 3)), st.lists(st.integers(0, 4), max_size=3).map(tuple), SCALARS
) | st.lists(SCALARS, max_size=4)
DTYPE_LIKE = st.sampled_from(REAL) | SCALARS


@st.composite
def payloads(draw):
    """A valid array's bytes, flipped, cut, doubled, or with text put in."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
    values = np.asarray(
        entries(shape, draw(st.sampled_from(REAL))), order=draw(st.sampled_from("CF"))
    )
    data = bytearray(saved(values, draw(st.sampled_from([(1, 0), (2, 0)]))))
    for _ in range(draw(st.integers(0, 3))):
        # Most of a small array's bytes are padding; what matters is around it.
        at = draw(st.integers(0, 80) | st.integers(0, len(data)))
        piece = draw(st.binary(max_size=6) | st.sampled_from(TOKENS))
        match draw(st.sampled_from(["write", "insert", "cut", "drop"])):
            case "write":
                data[at : at + len(piece)] = piece
            case "insert":
                data[at:at] = piece
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + len(piece)]
    return bytes(data)


def says(data):
    stream = io.BytesIO(data)
    first = npy.read_magic(stream) == (1, 0)
    read_header = npy.read_array_header_1_0 if first else npy.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    return shape, str(dtype)


@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, database=None, derandomize=True, max_examples=150)
@given(data=payloads(), shape=SHAPE_LIKE, dtype=DTYPE_LIKE, honest=st.booleans())
def test_whatever_arrives_is_a_tensor_or_a_wire_error(data, shape, dtype, honest):
    array = declared(data, shape, dtype)
    if honest:  # about a header that can be read
        with suppress(Exception):
            array.shape, array.dtype = says(data)
    try:
        tensor = read(array)
    except WireError as error:
        assert error.field == "layer.w"  # noqa: PT017
        assert error.reason.isprintable()  # noqa: PT017
        return
    assert tensor.shape == tuple(array.shape)
    assert str(tensor.dtype) == f"torch.{array.dtype}"
    assert np.array_equal(tensor.numpy(), array.numpy())
    assert tensor.isfinite().all()
