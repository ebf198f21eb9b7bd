"""A few spoiled uploads; ``make fuzz`` reads a hundred thousand."""

import struct

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from fuzz_wire import (
    SOURCES,
    Good,
    check,
    check_memory,
    fuzz,
    good,
    load_what_is_loaded_once,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from flwr_fisher.wire import LOSSLESS, Codec

SETTINGS = settings(deadline=None, database=None, derandomize=True, max_examples=150)
PACKED = [source for source in SOURCES if source[2] != LOSSLESS]


def packed(entries):
    return ArrayRecord({"packed": Array(np.frombuffer(save(entries), np.uint8))})


def tensor_of(data):
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]


def test_spoiled_uploads_are_read_or_refused():
    counts = fuzz(1000, seed=1, every=5)
    assert set(counts) == {"read", "refused"}
    assert min(counts.values()) > 50


def test_what_is_not_spoiled_is_read_in_the_memory_it_may_take():
    load_what_is_loaded_once()
    for source in SOURCES:
        of = good(*source)
        assert check_memory(of.record, of) == "read", source


def test_the_fuzzer_sees_what_is_allocated():
    load_what_is_loaded_once()
    of = good("mlp", "kfac", Codec("fedavg"))
    little = Good(of.record, of.like, of.codec, of.structure, -(10**6))
    with pytest.raises(AssertionError, match=r"allowed|a tensor of"):
        check_memory(of.record, little)


@settings(SETTINGS, max_examples=80)
@given(data=st.data())
def test_any_head_is_read_or_refused(data):
    of = good(*data.draw(st.sampled_from(PACKED)))
    entries = load(of.record["packed"].numpy().tobytes())
    key = data.draw(st.sampled_from([k for k in sorted(entries) if "/" in k]))
    number = st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1))
    head = struct.pack(
        "<BBIII",
        data.draw(st.integers(0, 8)),
        data.draw(st.integers(0, 18)),
        *(data.draw(number) for _ in range(3)),
    )
    rest = entries[key][len(head) :].numpy().tobytes()
    entries[key] = tensor_of(head + rest[: data.draw(st.integers(0, len(rest)))])
    load_what_is_loaded_once()
    check_memory(packed(entries), of, requested=data.draw(st.booleans()))


NAMES = st.sampled_from(["packed", "0.weight", "curvature/format", "curvature/x", ""])
KINDS = st.sampled_from(["uint8", "float32", "bool", "O", "<f4", "", "complex128"])
LENGTHS = st.lists(st.integers(-2, 2**70) | st.integers(0, 4), max_size=4)


@SETTINGS
@given(
    data=st.lists(
        st.tuples(NAMES, KINDS, LENGTHS, st.text(max_size=8), st.binary(max_size=200)),
        max_size=3,
    ),
    source=st.sampled_from(SOURCES),
)
def test_any_record_is_refused(data, source):
    arrays = {
        name: Array(dtype, tuple(shape), stype or "numpy.ndarray", content)
        for name, dtype, shape, stype, content in data
    }
    assert check(ArrayRecord(arrays), good(*source)) == "refused"
