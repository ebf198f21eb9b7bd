"""Packed uploads: within the budget, near what was sent, else refused with a key."""

import json
import re
import struct
from functools import cache, partial

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from uploads import (
    LAYOUTS,
    SPECTRA,
    STRUCTURES,
    Layout,
    curvature_of,
    fedavg_reply_bytes,
    norm,
    params_of,
    psd,
    reply_bytes,
    upload_of,
)

from flwr_fisher.errors import ConfigurationError, WireError
from flwr_fisher.wire import (
    LOSSLESS,
    Codec,
    FisherUpload,
    curvature_to_tensors,
    resolve,
)
from flwr_fisher.wire.budget import _greedy, _Matrix, _pack_matrices, byte_limit
from flwr_fisher.wire.quantise import HEAD, Packing, read_head

SETTINGS = settings(deadline=None, database=None, derandomize=True, max_examples=60)
CASES = [(name, structure) for name in LAYOUTS for structure in STRUCTURES]
FORMAT = "curvature/format"
NAN, INF = float("nan"), float("inf")


def sent_and_read(sent, codec, structure=None):
    """Send an upload; return what arrives, unpacked whole."""
    record = sent.to_arrays(codec)
    got = FisherUpload.from_arrays(record, sent.params, codec, structure=structure)
    return FisherUpload(dict(got.params), got.curvature.made())


def enough(codec, params):
    """Return the codec, with a larger budget if the model needs it."""
    return Codec(budget=max(needed_for(params), codec.budget))


def needed_for(params):
    """Return the smallest budget, as the refusal of a smaller one names it."""
    try:
        resolve(Codec(budget=0.001), params)
    except ConfigurationError as error:
        return float(re.findall(r">= ([\d.]+)", str(error))[0])
    return 0.001


def relative(got, want):
    error = (got.double() - want.double()).norm()
    return float(error / want.double().norm()) if error else 0.0


def assert_sound(got, like):
    """Check what must hold for everything that is read."""
    assert list(got.params) == list(like)
    for key, value in got.params.items():
        assert (value.shape, value.dtype) == (like[key].shape, like[key].dtype), key
        assert value.isfinite().all(), key
    for key, value in curvature_to_tensors(got.curvature).items():
        assert value.isfinite().all(), key
        if "/diagonal/" in key:
            assert (value >= 0).all(), key
        else:
            assert torch.equal(value, value.mT), key
            assert (value.diagonal(dim1=-2, dim2=-1) >= 0).all(), key


# --- round trips ----------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1.0, 0.75])
@pytest.mark.parametrize(("name", "structure"), CASES)
def test_an_upload_comes_back_much_as_it_was(name, structure, budget):
    sent = upload_of(name, structure)
    got = sent_and_read(sent, enough(Codec(budget=budget), sent.params), structure)
    assert_sound(got, sent.params)
    blocks = [(type(b), set(b.shapes)) for b in sent.curvature.blocks()]
    for block in got.curvature.blocks():
        assert (type(block), set(block.shapes)) in blocks
    assert len(got.curvature.blocks()) == len(blocks)
    near = 2**-11 if budget == 1 and needed_for(sent.params) < 1 else 0.2
    for key in LAYOUTS[name].trained:
        assert relative(got.params[key], sent.params[key]) < near, key
    for key in LAYOUTS[name].buffers:
        assert torch.equal(got.params[key], sent.params[key]), key


@pytest.mark.parametrize(
    ("name", "structure", "dtype"),
    [
        *((name, structure, torch.float32) for name, structure in CASES),
        *((n, s, torch.float64) for n, s in CASES if n == "odd"),
        *((n, s, torch.float16) for n, s in CASES if n == "cnn"),
        *((n, s, torch.bfloat16) for n, s in CASES if n == "mlp"),
    ],
)
def test_with_a_large_budget_hardly_anything_is_lost(name, structure, dtype):
    sent = upload_of(name, structure, dtype, "flat")
    budget = 8.0 if name == "linear" else 4.0  # whose 40 inputs make large factors
    got = sent_and_read(sent, Codec(budget=budget), structure)
    assert_sound(got, sent.params)
    near = max(1e-3, 4 * torch.finfo(dtype).eps)
    for key, value in sent.params.items():
        assert relative(got.params[key], value) < near, key
    want = curvature_to_tensors(sent.curvature)
    parts = curvature_to_tensors(got.curvature)
    assert parts.keys() == want.keys()
    for (key, part), block in zip(
        sorted(parts.items()), sorted(want.items()), strict=True
    ):
        assert relative(part, block[1]) < near, key


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("budget", [1.0, 400.0])
def test_no_curvature_is_too_odd(budget, structure):
    """Nor is what was read of it: rounding makes nothing that a reader refuses."""
    for spectrum in SPECTRA:
        for name in ("odd", "cnn"):
            sent = upload_of(name, structure, spectrum=spectrum)
            codec = enough(Codec(budget=budget), sent.params)
            got = sent_and_read(sent, codec, structure)
            assert_sound(got, sent.params)
            if spectrum == "zero":
                for key, part in curvature_to_tensors(got.curvature).items():
                    assert not part.any(), key
        for again in (LOSSLESS, codec):
            assert_sound(sent_and_read(got, again, structure), sent.params)


def test_the_order_of_blocks_is_not_that_of_arrival():
    sent = upload_of("cnn", "kfac")
    for codec in (LOSSLESS, Codec("fedavg")):
        record = sent.to_arrays(codec)
        if codec == LOSSLESS:
            backwards = ArrayRecord({k: record[k] for k in reversed(list(record))})
        else:
            entries = entries_of(record)
            backwards = container({k: entries[k] for k in reversed(list(entries))})
        uploads = [
            FisherUpload.from_arrays(arrived, sent.params, codec)
            for arrived in (record, backwards)
        ]
        assert all(list(upload.params) == list(sent.params) for upload in uploads)
        read = [upload.curvature for upload in uploads]
        orders = [[list(block.shapes) for block in c.blocks()] for c in read]
        assert orders[0] == orders[1]
        assert torch.equal(read[0].to_dense(), read[1].to_dense())


# --- the budget -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "structure"), CASES)
def test_a_reply_weighs_at_most_the_budget(name, structure):
    sents = [upload_of(name, structure, spectrum=s) for s in ("steep", "flat")]
    for budget, sent in zip((0.6, 0.75, 1.0, 2.5), sents * 2, strict=True):
        codec = Codec(budget=budget)
        if needed_for(sent.params) > budget:
            with pytest.raises(ConfigurationError, match="budget must be >="):
                resolve(codec, sent.params)
            continue
        record = sent.to_arrays(resolve(codec, sent.params))
        assert reply_bytes(record) <= budget * fedavg_reply_bytes(sent.params)


def test_a_large_upload_that_flower_cuts_into_pieces_is_within_the_budget():
    layout = Layout({"0.weight": (900, 700), "1.weight": (900, 900)})
    sent = FisherUpload(params_of(layout), curvature_of(layout, "kfac"))
    for budget, least in ((0.6, 0.5), (1.0, 0.67)):
        record = sent.to_arrays(Codec(budget=budget))
        used = reply_bytes(record) / fedavg_reply_bytes(sent.params)
        assert least < used <= budget


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_budget_too_small_is_refused_with_the_smallest_that_works(name):
    sent = upload_of(name, "kfac")
    needed = needed_for(sent.params)
    codec = Codec(budget=needed)
    assert resolve(codec, sent.params) == codec
    record = sent.to_arrays(codec)
    assert reply_bytes(record) <= needed * fedavg_reply_bytes(sent.params)
    for too_small in (0.05, needed - 0.002):
        with pytest.raises(ConfigurationError, match=f"budget must be >= {needed}"):
            resolve(Codec(budget=too_small), sent.params)


def test_what_cannot_be_packed_is_refused_without_resolve_too():
    with pytest.raises(ConfigurationError, match=r"budget must be >= \d"):
        upload_of("mlp", "kfac").to_arrays(Codec("fedavg", budget=0.05))


SHAPES = st.one_of(
    st.tuples(st.integers(1, 40)),
    st.tuples(st.integers(1, 12), st.integers(1, 20)),
    st.tuples(st.integers(1, 24), st.integers(1, 3), st.integers(1, 3), st.just(2)),
)


@st.composite
def layouts(draw):
    trained, groups, buffers = {}, {}, {}
    for i, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=5))):
        trained[f"{i}.weight"] = shape
        if draw(st.booleans()):
            trained[f"{i}.bias"] = shape[:1]
        divisors = [g for g in range(1, shape[0] + 1) if shape[0] % g == 0]
        if len(shape) > 2:
            groups[f"{i}.weight"] = draw(st.sampled_from(divisors))
        if draw(st.booleans()):
            own = norm(f"n{i}", draw(st.integers(1, 300)))[1]
            # Flower sends equal arrays once: no two norms' statistics are equal.
            buffers |= {name: value + i for name, value in own.items()}
    return Layout(trained, groups, buffers)


@SETTINGS
@given(
    layout=layouts(), structure=st.sampled_from(STRUCTURES), budget=st.floats(0.5, 4.0)
)
def test_any_model_fits_or_is_refused(layout, structure, budget):
    params = params_of(layout)
    codec = enough(Codec(budget=budget), params)
    sent = FisherUpload(params, curvature_of(layout, structure))
    record = sent.to_arrays(resolve(codec, params))
    assert reply_bytes(record) <= codec.budget * fedavg_reply_bytes(params)
    got = FisherUpload.from_arrays(record, params, codec, structure=structure)
    assert_sound(got, params)


def test_more_budget_is_used():
    sent = upload_of("wide", "kfac")
    errors = []
    for budget in (0.55, 0.6, 0.7, 1.0, 2.0):
        read = curvature_to_tensors(sent_and_read(sent, Codec(budget=budget)).curvature)
        parts = curvature_to_tensors(sent.curvature)
        errors.append(max(relative(read[key], v) for key, v in parts.items()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02 < errors[0]


# --- who gets the bytes ---------------------------------------------------------------


def twin(columns, left):
    """Buy one (gain, cost) after the other, the best first, as long as one can pay."""
    counts = [0] * len(columns)
    while True:
        best, owner = 0.0, None
        for index, offers in enumerate(columns):
            if counts[index] < len(offers) and offers[counts[index]][0] > best:
                best, owner = offers[counts[index]][0], index
        if owner is None or columns[owner][counts[owner]][1] > left:
            return counts, left
        left -= columns[owner][counts[owner]][1]
        counts[owner] += 1


def offered(matrix):
    """Each column's share of its matrix's trace a byte, and its bytes."""
    values, totals = matrix.spectrum(matrix.n)[0].double(), matrix.trace
    cost = matrix.groups * (matrix.n + 4)
    shares = []
    for column in range(matrix.n):
        share = 0.0
        for group in range(matrix.groups):
            total = float(totals[group])
            share += float(values[group, column]) / total if total > 0 else 0.0
        shares.append((share / matrix.groups / cost, cost))
    return shares


@SETTINGS
@given(
    sizes=st.lists(
        st.tuples(
            st.integers(1, 3),
            st.integers(1, 9),
            st.sampled_from(["steep", "flat", "low-rank", "zero"]),
        ),
        min_size=1,
        max_size=4,
    ),
    left=st.integers(0, 800),
)
def test_columns_are_bought_as_the_slow_twin_buys_them(sizes, left):
    matrices = [
        _Matrix(str(i), psd(i, groups, n, spectrum), torch.float32)
        for i, (groups, n, spectrum) in enumerate(sizes)
    ]
    spectra = {m.key: m.spectrum(m.n) for m in matrices}
    counts, rest = twin([offered(m) for m in matrices], left)
    assert list(_greedy(matrices, spectra, left).values()) == counts
    assert rest >= 0
    # Whole where it is no larger, and all together within what is left.
    entries = {
        key: (entry[0], read_head(entry, key)[2][2], len(entry))
        for key, entry in _pack_matrices(matrices, left)
    }
    assert entries.keys() == {m.key for m in matrices}
    cut = [m for m in matrices if entries[m.key][0] == Packing.COLUMNS]
    freed = left - sum(m.whole(8) for m in matrices if m not in cut)
    if cut:
        counts, _ = twin([offered(m) for m in cut], freed)
        assert [entries[m.key][1] for m in cut] == counts
    for m in cut:
        assert entries[m.key][1] * m.column() < m.whole(8)
    assert sum(entries[m.key][2] - m.least for m in matrices) <= left


# --- the codec itself -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        *((partial(Codec, budget=b), "budget") for b in (0, -1, 1e-4, 1e4, NAN, INF)),
        (partial(Codec, "lossless", budget=0.5), "takes no budget"),
        (partial(Codec.of, "codec", "zip"), "unknown codec 'zip'"),
        (partial(Codec.of, "codec", 3), "codec must be Codec"),
    ],
)
def test_what_is_no_codec_is_refused(make, culprit):
    with pytest.raises(ConfigurationError, match=culprit):
        make()


@pytest.mark.parametrize(
    "codec", [*map(Codec, ("auto", "lossless", "fedavg")), Codec(budget=1 / 3)]
)
def test_a_codec_comes_back_from_a_config(codec):
    assert Codec.from_options(codec.to_options()) == codec
    codec.check_description(text(**codec.describe()), field="x")
    assert Codec.from_options({}) == LOSSLESS


@pytest.mark.parametrize("version", [0, 1, 3, None, "2"])
def test_a_client_refuses_to_write_another_version(version):
    config = {**Codec("fedavg").to_options(), "codec-version": version}
    with pytest.raises(ConfigurationError, match=r"version .* of the upload format"):
        Codec.from_options(config)


def test_which_codec_a_name_or_a_budget_means():
    auto = Codec("auto")
    assert resolve(auto, params_of(LAYOUTS["wide"])) == Codec("fedavg")
    assert resolve(auto, {"w": torch.zeros(2)}) == LOSSLESS
    assert Codec(budget=0.7) == Codec("fedavg", budget=0.7)
    assert Codec("fedavg").budget == 1.0


# --- what arrives wrong ---------------------------------------------------------------


def entries_of(record):
    return load(record["packed"].numpy().tobytes())


def container(entries):
    return ArrayRecord({"packed": Array(np.frombuffer(save(entries), np.uint8))})


def raw(data):
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]


def text(**description):
    return raw(json.dumps(description).encode())


@cache
def packed_entries(structure, codec):
    return entries_of(upload_of("cnn", structure).to_arrays(codec))


def changed(key, change, codec):
    entries = dict(packed_entries("kfac", codec))
    new = change(entries[key].clone()) if callable(change) else change
    if new is None:
        del entries[key]
    else:
        entries[key] = new
    return container(entries)


def with_head(**fields):
    """Change what the first bytes say."""
    names = ("form", "bits", "a", "b", "c")

    def change(entry):
        head = struct.unpack("<BBIII", bytes(entry[:HEAD].tolist()))
        head = dict(zip(names, head, strict=True)) | fields
        return torch.cat([raw(struct.pack("<BBIII", *head.values())), entry[HEAD:]])

    return change


def with_byte(at, value):
    def change(entry):
        entry[at] = value
        return entry

    return change


def with_float(at, value):
    def change(entry):
        entry[at : at + 4] = raw(struct.pack("<f", value))
        return entry

    return change


def columns_of(groups, n, rank):
    """An entry of eigenvectors that is consistent in itself."""

    def change(_):
        codes = b"\1" * (groups * n * rank)
        norms = struct.pack("<f", 1) * (groups * (rank + 1))
        return raw(
            struct.pack("<BBIII", Packing.COLUMNS, 8, groups, n, rank) + norms + codes
        )

    return change


W, WC = "0.weight", "3.weight"
A, G = f"curvature/kfac/{W}/A", f"curvature/kfac/{W}/G"
GROUPED = f"curvature/kfac/{WC}/A"
D = "curvature/diagonal/1.weight"
COUNTER, MEAN = "1.num_batches_tracked", "1.running_mean"
FINE = Codec("fedavg", budget=1.0)
WIDE = Codec("fedavg", budget=20.0)

HUGE = 2**32 - 1
HOSTILE = {
    "no format": (FORMAT, None, "missing"),
    "format that is no JSON": (FORMAT, raw(b"{nope"), "not JSON"),
    "format too long": (FORMAT, raw(b" " * 1030), "too long"),
    "older version": (FORMAT, text(version=1), "format version 1, .* reads 2"),
    "another budget": (FORMAT, text(**FINE.describe() | {"budget": 2.0}), "budget"),
    "missing parameter": (W, None, "missing"),
    "unknown parameter": ("nope", raw(b"\0\0"), "unexpected key"),
    "unknown kind": ("curvature/lowrank/x", raw(b"\0" * 20), "unknown key"),
    "coded counter": (COUNTER, with_head(form=1, bits=16), "form FLOAT for a param"),
    "other form of a parameter": (W, with_head(form=2, bits=8), "bytes, expected"),
    "NaN scale of a parameter": (W, with_float(HEAD, NAN), "scale"),
    "negative scale": (W, with_float(HEAD, -1.0), "scale"),
    "NaN parameter": (W, with_byte(-1, 0x7F), "must not be NaN"),
    "short parameter": (W, lambda e: e[:-1], "bytes, expected"),
    "NaN buffer": (MEAN, with_float(HEAD, NAN), "NaN or infinity"),
    "cut head": (A, lambda e: e[: HEAD - 1], "its head"),
    "form of a diagonal for a factor": (A, with_head(form=1), "form FLOAT for this"),
    "factor of other bits": (A, with_head(bits=8), "expected"),
    "groups that do not divide": (A, with_head(a=3), "matrices of a weight"),
    "huge n": (A, with_head(b=HUGE), "at most 16384 rows"),
    "rank above n": (A, with_head(form=4, c=20), "rank 20 of a matrix with 19 rows"),
    "groups of the other side": (GROUPED, columns_of(2, 8, 1), "does not fit"),
    "NaN norm": (A, with_float(HEAD, NAN), "scale"),
    "norm that overflows": (A, with_float(HEAD, 3e38), "overflow"),
    "short factor": (A, lambda e: e[:-1], "bytes, expected"),
    "negative code": (D, with_byte(-1, 0xBC), "must not be negative"),
    "too many fine values": (D, with_byte(HEAD + 4, 9), "9 values .*of 8"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_arrives_wrong_is_refused_by_name(case):
    key, change, reason = HOSTILE[case]
    like = params_of(LAYOUTS["cnn"])
    with pytest.raises(WireError, match=reason) as caught:
        FisherUpload.from_arrays(changed(key, change, FINE), like, FINE)
    field = caught.value.field
    assert field == key or field == key[:-1] + "A", field
    assert f"'{field}'" in str(caught.value)


def packed(data, **fields):
    array = Array(np.frombuffer(data, np.uint8))
    for name, value in fields.items():
        setattr(array, name, value)
    return ArrayRecord({"packed": array})


def safetensors_file(header, data=b""):
    return struct.pack("<Q", len(header)) + header + data


NO_CONTAINER = {
    "nothing": packed(b""),
    "a header beyond all": packed(struct.pack("<Q", 2**64 - 1)),
    "a header that is no JSON": packed(safetensors_file(b"{nope")),
    "an entry beyond the end": packed(
        safetensors_file(b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}')
    ),
    "bytes that belong to no entry": packed(
        safetensors_file(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"123"
        )
    ),
    "a matrix": ArrayRecord({"packed": Array(np.zeros((3, 3), np.uint8))}),
    "another shape than said": packed(b"123", shape=(4,)),
    "one key too many": ArrayRecord(
        {k: Array(np.zeros(3, np.uint8)) for k in ("packed", "x" * 10**4)}
    ),
    "an entry that holds no bytes": container({"a": torch.zeros(3)}),
    "plain arrays": upload_of("cnn", "kfac").to_arrays(),
}


@pytest.mark.parametrize("case", NO_CONTAINER)
def test_what_is_no_container_is_refused(case):
    like = params_of(LAYOUTS["cnn"])
    with pytest.raises(WireError) as caught:
        FisherUpload.from_arrays(NO_CONTAINER[case], like, FINE)
    assert caught.value.field == ("a" if "an entry that" in case else "packed")
    assert len(str(caught.value)) < 300


def test_a_record_beyond_the_budget_is_refused_unread():
    like = params_of(LAYOUTS["cnn"])
    limit = byte_limit(like, FINE)
    record = packed(b"\xff" * limit)
    with pytest.raises(WireError, match=f"at most {limit} are allowed") as caught:
        FisherUpload.from_arrays(record, like, FINE)
    assert caught.value.field == "packed"


def test_a_header_of_too_many_entries_is_refused_unread():
    like = {"weight": torch.zeros(500, 500)}
    many = {f"{i}": torch.zeros(0, dtype=torch.uint8) for i in range(5000)}
    with pytest.raises(WireError, match="a header of") as caught:
        FisherUpload.from_arrays(container(many), like, FINE)
    assert caught.value.field == "packed"


@pytest.mark.parametrize("codec", [LOSSLESS, WIDE])
def test_another_structure_than_was_asked_for_is_refused(codec):
    sent = upload_of("cnn", "kfac")
    record = sent.to_arrays(codec)
    with pytest.raises(WireError, match="requested structure 'diagonal'"):
        FisherUpload.from_arrays(record, sent.params, codec, structure="diagonal")


def test_nothing_of_what_is_sent_is_changed():
    for structure in STRUCTURES:
        sent = upload_of("cnn", structure)
        before = {k: v.clone() for k, v in curvature_to_tensors(sent.curvature).items()}
        first, second = (sent.to_arrays(FINE)["packed"].data for _ in range(2))
        assert first == second
        for key, part in curvature_to_tensors(sent.curvature).items():
            assert torch.equal(part, before[key]), key
