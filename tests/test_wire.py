import io
import pickle
from functools import cache

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from virtual import FEATURES, tiny_model

from flwr_fisher.curvature import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Kronecker,
    WeightedSum,
    fisher,
)
from flwr_fisher.errors import StructureError, WireError
from flwr_fisher.flower_internals import round_trip
from flwr_fisher.params import shared_state
from flwr_fisher.wire import (
    LOSSLESS,
    PREFIX,
    FisherUpload,
    arrays_to_tensors,
    curvature_to_tensors,
    tensors_to_arrays,
    tensors_to_curvature,
)
from flwr_fisher.wire.codec import description_text

Named = dict[str, Tensor]

MODELS = {
    "bias": lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 2)),
    "no-bias": lambda: nn.Linear(FEATURES, 2, bias=False),
    "groups": lambda: nn.Sequential(
        nn.Unflatten(1, (FEATURES, 1)),
        nn.Conv1d(FEATURES, 6, 1, groups=3),
        nn.Flatten(),
        nn.Linear(6, 2),
    ),
    "mixture-and-buffers": tiny_model,
    "frozen-bias": lambda: _frozen(nn.Linear(FEATURES, 3)),
}


def _frozen(layer):
    layer.bias.requires_grad_(False)
    return layer


def upload_of(model, structure):
    inputs = torch.randn(7, FEATURES, generator=torch.Generator().manual_seed(1))
    params = {k: v.clone() for k, v in shared_state(model).items()}
    return FisherUpload(params, fisher(model, [inputs], structure=structure))


def format_entry():
    """What a lossless record says about itself."""
    return {f"{PREFIX}format": description_text(LOSSLESS.describe())}


def travelled(record):
    """Serialise a record as Flower does."""
    (arrived,) = round_trip(RecordDict({"arrays": record})).array_records.values()
    return arrived


def assert_same(left, right):
    assert list(left) == list(right)
    for key, value in left.items():
        assert value.dtype == right[key].dtype, key
        assert value.shape == right[key].shape, key
        assert torch.equal(value, right[key]), key


@pytest.mark.parametrize("structure", ["kfac", "diagonal", "dense"])
@pytest.mark.parametrize("model", MODELS)
def test_an_upload_comes_back_bit_for_bit(model, structure):
    sent = upload_of(MODELS[model](), structure)
    got = FisherUpload.from_arrays(travelled(sent.to_arrays()), sent.params)
    assert_same(sent.params, got.params)
    assert type(got.curvature) is type(sent.curvature)
    kinds = [(type(b), list(b.shapes)) for b in sent.curvature.blocks()]
    assert [(type(b), list(b.shapes)) for b in got.curvature.blocks()] == kinds
    laid_out = curvature_to_tensors(sent.curvature)
    assert_same(laid_out, curvature_to_tensors(got.curvature))
    assert torch.equal(sent.curvature.to_dense(), got.curvature.to_dense())


def test_the_mixture_has_what_it_is_named_for():
    sent = upload_of(tiny_model(), "kfac")
    kinds = {type(block) for block in sent.curvature.blocks()}
    assert kinds == {Kronecker, Diagonal}
    counter = sent.params["1.num_batches_tracked"]
    assert counter.dtype == torch.int64
    assert counter.dim() == 0
    assert upload_of(MODELS["groups"](), "kfac").curvature.blocks()[0].A.shape[0] == 3


def test_a_dense_block_beside_others_comes_back():
    params = {name: torch.randn(2, 2) for name in ("a.weight", "b", "c", "d")}
    dense = Dense({n: params[n].shape for n in ("c", "b")}, torch.eye(8) + 0.25)
    layer = Kronecker(
        "a.weight", torch.Size([2, 2]), torch.eye(2)[None], 2 * torch.eye(2)[None]
    )
    curvature = BlockDiagonal([layer, dense, Diagonal({"d": torch.rand(2, 2)})])
    record = travelled(FisherUpload(params, curvature).to_arrays())
    got = FisherUpload.from_arrays(record, params).curvature
    assert [type(block) for block in got.blocks()] == [Kronecker, Dense, Diagonal]
    assert list(got.blocks()[1].shapes) == ["c", "b"]
    assert torch.equal(got.to_dense(), curvature.to_dense())


def test_nested_blocks_come_back_flat():
    params = {"a": torch.zeros(2), "b": torch.zeros(1)}
    inner = [
        BlockDiagonal([Diagonal({"a": torch.ones(2)})]),
        Diagonal({"b": torch.ones(1)}),
    ]
    record = FisherUpload(params, BlockDiagonal(inner)).to_arrays()
    got = FisherUpload.from_arrays(record, params).curvature
    assert torch.equal(got.to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3),
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor(True),
        torch.arange(6, dtype=torch.int32).reshape(2, 3),
        torch.randn(4, 3).mT,
        torch.zeros(0, 3),
        torch.randn(3).half(),
        torch.tensor([-0.0, 1e-45]),
    ],
    ids=["int", "double", "bool", "int32", "strided", "empty", "half", "subnormal"],
)
def test_any_array_keeps_its_dtype_shape_and_bits(value):
    (got,) = arrays_to_tensors(travelled(tensors_to_arrays({"x": value}))).values()
    assert got.dtype == value.dtype
    assert got.shape == value.shape
    assert got.numpy().tobytes() == np.ascontiguousarray(value.numpy()).tobytes()


def test_parameters_keep_their_keys_and_only_extras_are_prefixed():
    sent = upload_of(tiny_model(), "kfac")
    keys = list(sent.to_arrays())
    own = list(sent.params)
    assert keys[: len(own)] == own
    assert all(key.startswith(PREFIX) for key in keys[len(own) :])
    assert PREFIX == "curvature/"


def test_the_layout_is_the_documented_one():
    assert set(curvature_to_tensors(upload_of(tiny_model(), "kfac").curvature)) == {
        "curvature/kfac/0.weight/A",
        "curvature/kfac/0.weight/G",
        "curvature/kfac/3.weight/A",
        "curvature/kfac/3.weight/G",
        "curvature/diagonal/1.weight",
        "curvature/diagonal/1.bias",
    }
    dense = curvature_to_tensors(upload_of(nn.Linear(FEATURES, 2), "dense").curvature)
    assert {k: tuple(v.shape) for k, v in dense.items()} == {
        "curvature/dense/weight,bias": (8, 8),
    }


def test_arrays_that_arrive_in_another_order_are_put_back():
    sent = upload_of(tiny_model(), "kfac")
    record = sent.to_arrays()
    shuffled = ArrayRecord({key: record[key] for key in reversed(list(record))})
    got = FisherUpload.from_arrays(shuffled, sent.params)
    assert_same(sent.params, got.params)


def test_the_tensors_are_writable_and_the_callers_own():
    record = tensors_to_arrays({"x": torch.zeros(3)})
    arrays_to_tensors(record)["x"].add_(1)
    assert torch.equal(arrays_to_tensors(record)["x"], torch.zeros(3))
    source = torch.zeros(3)
    record = tensors_to_arrays({"x": source})
    source.add_(1)
    assert torch.equal(arrays_to_tensors(record)["x"], torch.zeros(3))


def test_a_lazy_sum_cannot_be_sent():
    one = Diagonal({"w": torch.ones(2)})
    with pytest.raises(StructureError, match="WeightedSum cannot be sent"):
        curvature_to_tensors(WeightedSum([one, one], [1.0, 1.0]))


# What arrives wrong, one change to a good upload at a time. Parameters: a linear layer
# "0", a batch norm "1" with buffers, a linear layer "3".

A, G = "curvature/kfac/0.weight/A", "curvature/kfac/0.weight/G"
NORM = "curvature/diagonal/1.weight"
NAN, INF = float("nan"), float("inf")


def unsymmetric(tensor):
    changed = tensor.clone()
    changed[0, 0, 1] += 0.1 * tensor.abs().max()
    return changed


def with_entry(tensor, value):
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


REJECTED = {
    "missing parameter": ({"0.weight": None}, "0.weight", "missing"),
    "missing buffer": ({"1.running_var": None}, "1.running_var", "missing"),
    "unexpected key": ({"9.weight": torch.ones(2)}, "9.weight", "unexpected key"),
    "transposed": ({"0.weight": lambda t: t.mT}, "0.weight", r"shape \(3, 4\), exp"),
    "flattened": ({"0.weight": lambda t: t.reshape(-1)}, "0.weight", r"shape \(12,\)"),
    "1-dim scalar": (
        {"1.num_batches_tracked": lambda t: t[None]},
        "1.num_batches_tracked",
        r"shape \(1,\), expected \(\)",
    ),
    "float64": ({"0.bias": lambda t: t.double()}, "0.bias", "dtype torch.float64"),
    "float counter": (
        {"1.num_batches_tracked": lambda t: t.float()},
        "1.num_batches_tracked",
        "dtype torch.float32, expected torch.int64",
    ),
    "NaN": ({"3.bias": lambda t: with_entry(t, NAN)}, "3.bias", "NaN"),
    "inf": ({"3.bias": lambda t: with_entry(t, INF)}, "3.bias", "infinity"),
    "NaN buffer": (
        {"1.running_mean": lambda t: t * float("nan")},
        "1.running_mean",
        "NaN",
    ),
    "NaN in a factor": ({G: lambda t: with_entry(t, NAN)}, G, "NaN"),
    "inf in a diagonal": ({NORM: lambda t: with_entry(t, INF)}, NORM, "NaN"),
    "negative diagonal": ({NORM: lambda t: with_entry(t, -1e-9)}, NORM, "negative"),
    "negative A": ({A: lambda t: with_entry(t, -0.1)}, A, "negative"),
    "negative G": ({G: lambda t: with_entry(t, -0.1)}, G, "negative"),
    "unsymmetric A": ({A: unsymmetric}, A, "not symmetric"),
    "unsymmetric G": ({G: unsymmetric}, G, "not symmetric"),
    "no G": ({G: None}, G, "missing"),
    "no A": ({A: None}, A, "missing"),
    "misshapen A": (
        {A: lambda t: t[:, :2, :2]},
        A,
        r"expected \(1, 3, 3\) or \(1, 4, 4\)",
    ),
    "too large A": (
        {A: lambda t: torch.eye(9)[None]},
        A,
        r"expected \(1, 3, 3\) or \(1, 4, 4\)",
    ),
    "two-dimensional A": ({A: lambda t: t[0]}, A, "shape"),
    "scalar A": ({A: lambda t: t.sum()}, A, "shape"),
    "misshapen G": ({G: lambda t: t[:, :2, :2]}, G, r"expected \(1, 4, 4\)"),
    "no group": ({A: lambda t: t[:0], G: lambda t: t[:0]}, A, "expected factors"),
    "groups that do not divide": (
        {A: lambda t: t.repeat(3, 1, 1), G: lambda t: torch.ones(3, 1, 1)},
        A,
        r"shape \(3, 4, 4\)",
    ),
    "more groups than outputs": (
        {A: lambda t: t.repeat(5, 1, 1), G: lambda t: torch.ones(5, 0, 0)},
        A,
        r"shape \(5, 4, 4\)",
    ),
    "a factor pair for a vector": (
        {
            NORM: None,
            "curvature/kfac/1.weight/A": torch.eye(1)[None],
            "curvature/kfac/1.weight/G": torch.eye(4)[None],
        },
        "curvature/kfac/1.weight/A",
        r"weight of shape \(4,\)",
    ),
    "a factor pair for a scalar": (
        {
            "curvature/kfac/1.num_batches_tracked/A": torch.eye(1).long()[None],
            "curvature/kfac/1.num_batches_tracked/G": torch.eye(1).long()[None],
        },
        "curvature/kfac/1.num_batches_tracked/A",
        "dtype torch.int64",
    ),
    "integer curvature": ({NORM: lambda t: t.long()}, NORM, "dtype torch.int64"),
    "half curvature": ({NORM: lambda t: t.half()}, NORM, "dtype torch.float16, exp"),
    "double A": ({A: lambda t: t.double()}, A, "dtype torch.float64"),
    "double G": ({G: lambda t: t.double()}, G, "dtype torch.float64"),
    "complex curvature": ({NORM: lambda t: t.cfloat()}, NORM, "dtype torch.complex64"),
    "curvature of a counter": (
        {"curvature/diagonal/1.num_batches_tracked": torch.ones(())},
        "curvature/diagonal/1.num_batches_tracked",
        "dtype",
    ),
    "misshapen diagonal": ({NORM: lambda t: t[:2]}, NORM, r"shape \(2,\), expected"),
    "unknown kind": (
        {"curvature/lowrank/x": torch.ones(2)},
        "curvature/lowrank/x",
        "unknown key",
    ),
    "bare prefix": ({"curvature/": torch.ones(2)}, "curvature/", "unknown key"),
    "third factor": ({f"{A[:-1]}B": torch.ones(2)}, f"{A[:-1]}B", "unknown key"),
    "factor without a side": ({A[:-2]: torch.ones(2)}, A[:-2], "unknown key"),
    "unknown parameter": (
        {"curvature/diagonal/nope": torch.ones(2)},
        "curvature/diagonal/nope",
        "no such parameter",
    ),
    "unknown weight": (
        {
            "curvature/kfac/nope/A": torch.eye(2)[None],
            "curvature/kfac/nope/G": torch.eye(2)[None],
        },
        "curvature/kfac/nope/A",
        "no such parameter",
    ),
    "dense over a counter": (
        {"curvature/dense/1.bias,1.num_batches_tracked": torch.eye(5)},
        "curvature/dense/1.bias,1.num_batches_tracked",
        "'1.num_batches_tracked' has dtype torch.int64",
    ),
    "unknown dense": (
        {"curvature/dense/nope": torch.ones(2, 2)},
        "curvature/dense/nope",
        "no such parameter",
    ),
    "weight in two blocks": (
        {"curvature/diagonal/0.weight": torch.ones(4, 3)},
        "curvature/",
        "'0.weight'.*more than one",
    ),
    "bias in two blocks": (
        {"curvature/diagonal/0.bias": torch.ones(4)},
        "curvature/",
        "'0.bias'.*more than one",
    ),
    "dense twice over a parameter": (
        {"curvature/dense/1.bias,1.bias": torch.eye(8)},
        "curvature/dense/1.bias,1.bias",
        "twice",
    ),
    "dense and a factor": (
        {"curvature/dense/3.bias": torch.eye(3)},
        "curvature/",
        "'3.bias'.*more than one",
    ),
    "misshapen dense": (
        {"curvature/dense/1.bias": torch.ones(4, 3)},
        "curvature/dense/1.bias",
        r"shape \(4, 3\), expected \(4, 4\)",
    ),
    "unsymmetric dense": (
        {"curvature/dense/1.bias": torch.ones(4, 4).triu()},
        "curvature/dense/1.bias",
        "not symmetric",
    ),
    "negative dense": (
        {"curvature/dense/1.bias": -torch.eye(4)},
        "curvature/dense/1.bias",
        "negative",
    ),
}


def changed_upload(changes):
    sent = upload_of(tiny_model(), "kfac")
    tensors = arrays_to_tensors(sent.to_arrays())
    for key, change in changes.items():
        if change is None:
            del tensors[key]
        else:
            tensors[key] = change(tensors[key]) if callable(change) else change
    return tensors_to_arrays(tensors), sent.params


@pytest.mark.parametrize("case", REJECTED)
def test_what_arrives_wrong_is_rejected_by_name(case):
    changes, field, reason = REJECTED[case]
    record, like = changed_upload(changes)
    with pytest.raises(WireError, match=reason) as caught:
        FisherUpload.from_arrays(record, like)
    assert caught.value.field == field
    assert f"'{field}'" in str(caught.value)


def test_without_any_change_nothing_is_rejected():
    record, like = changed_upload({})
    FisherUpload.from_arrays(record, like)


def test_rounding_in_a_symmetric_factor_is_not_rejected():
    record, like = changed_upload({A: lambda t: t * (1 + 1e-6 * torch.rand_like(t))})
    FisherUpload.from_arrays(record, like)


def test_no_curvature_is_rejected():
    params = {"w": torch.ones(2)}
    with pytest.raises(WireError, match="no curvature arrived") as caught:
        FisherUpload.from_arrays(tensors_to_arrays(params | format_entry()), params)
    assert caught.value.field == PREFIX


def test_a_record_that_does_not_say_its_format_is_rejected():
    params = {"w": torch.ones(2)}
    with pytest.raises(WireError, match="missing") as caught:
        FisherUpload.from_arrays(tensors_to_arrays(params), params)
    assert caught.value.field == f"{PREFIX}format"


def test_a_bias_of_another_size_is_not_the_layers():
    params = {"up.weight": torch.ones(4, 3), "up.bias": torch.ones(3)}
    extras = {
        "curvature/kfac/up.weight/A": torch.eye(4)[None],
        "curvature/kfac/up.weight/G": torch.eye(4)[None],
    }
    with pytest.raises(WireError, match=r"shape \(1, 4, 4\), expected \(1, 3, 3\)"):
        tensors_to_curvature(extras, params)


def test_a_parameter_without_entries_comes_back():
    params = {"w": torch.ones(0, 2), "b": torch.ones(3)}
    layer = Kronecker("w", params["w"].shape, torch.eye(2)[None], torch.ones(1, 0, 0))
    sent = FisherUpload(params, BlockDiagonal([layer, Diagonal({"b": torch.ones(3)})]))
    got = FisherUpload.from_arrays(travelled(sent.to_arrays()), params)
    laid_out = curvature_to_tensors(sent.curvature)
    assert_same(laid_out, curvature_to_tensors(got.curvature))


def test_a_scalar_parameter_has_no_factors():
    extras = {
        "curvature/kfac/scale/A": torch.eye(1)[None],
        "curvature/kfac/scale/G": torch.eye(1)[None],
    }
    with pytest.raises(WireError, match=r"weight of shape \(\)"):
        tensors_to_curvature(extras, {"scale": torch.ones(())})


def npy(values, *, pickled=False):
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(values), allow_pickle=pickled)
    return buffer.getvalue()


class Boom:
    """Unpickling this would show."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


GOOD = npy(np.zeros((2, 3), np.float32))


def bad_array(data=GOOD, dtype="float32", shape=(2, 3), stype="numpy.ndarray"):
    return Array(dtype, shape, stype, data)


def huge_header():
    return GOOD.replace(
        b"(2, 3), }                   ", b"(999999999, 999999999999), }"
    )


UNREADABLE = {
    "empty": (bad_array(b""), "unreadable"),
    "garbage": (bad_array(b"\x00garbage"), "unreadable"),
    "truncated": (bad_array(GOOD[:-1]), "unreadable"),
    "header only": (bad_array(GOOD[:128]), "unreadable"),
    "cut header": (bad_array(GOOD[:40]), "unreadable"),
    "huge": (bad_array(huge_header()), "unreadable"),
    "zip": (bad_array(b"PK\x03\x04" + GOOD), "unreadable"),
    "pickle": (bad_array(pickle.dumps(Boom())), "unreadable"),
    "objects": (bad_array(npy([Boom()] * 6, pickled=True)), "unreadable"),
    "text": (bad_array(npy(["a", "b"])), "unreadable"),
    "records": (bad_array(npy(np.zeros(2, [("a", "f4")]))), "unreadable"),
    "dates": (bad_array(npy(np.zeros(2, "M8[s]"))), "unreadable"),
    "stype": (bad_array(stype="torch.tensor"), "unreadable.*torch.tensor"),
    "other shape": (bad_array(npy(np.zeros((3, 2), np.float32))), "declared"),
    "other dtype": (bad_array(npy(np.zeros((2, 3), np.float64))), "declared"),
    "declared shape": (bad_array(shape=(6,)), r"declared as float32 of shape \(6,\)"),
    "declared dtype": (bad_array(dtype="int8"), "declared as int8"),
    "declared nonsense": (bad_array(dtype="x", shape=(-1,)), "declared as x"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_array_that_is_not_what_it_says_is_rejected_by_name(case):
    array, reason = UNREADABLE[case]
    with pytest.raises(WireError, match=reason) as caught:
        arrays_to_tensors(ArrayRecord({"fine": Array(np.ones(2)), "layer.w": array}))
    assert caught.value.field == "layer.w"


def test_the_huge_header_is_one():
    assert huge_header() != GOOD
    assert len(huge_header()) == len(GOOD)


SETTINGS = settings(deadline=None, database=None, derandomize=True, max_examples=150)


@st.composite
def mutations(draw, original):
    """Bytes near a good array's: flipped, cut, doubled, or with text put in."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        piece = draw(st.one_of(st.binary(max_size=8), st.sampled_from(TOKENS)))
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


TOKENS = [b"(", b"-1", b"'<f8'", b"'|O'", b"99999999999", b"L", b"\\d", b"\n", b"{"]


@SETTINGS
@given(data=st.one_of(st.binary(max_size=200), mutations(GOOD)))
def test_no_bytes_crash_the_decoder(data):
    try:
        (tensor,) = arrays_to_tensors(ArrayRecord({"w": bad_array(data)})).values()
    except WireError as error:
        assert error.field == "w"  # noqa: PT017
    else:
        assert (tensor.shape, tensor.dtype) == ((2, 3), torch.float32)
        assert tensor.isfinite().all()


@cache
def good_upload():
    return upload_of(tiny_model(), "kfac")


@SETTINGS
@given(data=st.data())
def test_no_bytes_crash_the_reading_of_an_upload(data):
    record = good_upload().to_arrays()
    key = data.draw(st.sampled_from(sorted(record)))
    old = record[key]
    new = Array(old.dtype, old.shape, old.stype, data.draw(mutations(old.data)))
    check_an_upload(ArrayRecord({**record, key: new}))


FLOATS = st.floats(width=32)


@SETTINGS
@given(data=st.data())
def test_no_values_crash_the_reading_of_an_upload(data):
    record = good_upload().to_arrays()
    key = data.draw(st.sampled_from(sorted(record)))
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    size = int(np.prod(shape))
    values = data.draw(st.lists(FLOATS, min_size=size, max_size=size))
    dtype = data.draw(st.sampled_from([np.float32, np.float16, np.float64, np.int64]))
    with np.errstate(all="ignore"):
        array = np.array(values, np.float32).reshape(shape).astype(dtype)
    check_an_upload(ArrayRecord({**record, key: Array(array)}))


@SETTINGS
@given(
    groups=st.integers(0, 6),
    n=st.integers(0, 6),
    m=st.integers(0, 6),
    weight=st.sampled_from(["0", "1", "3"]),
)
def test_factors_of_any_shape_fit_or_are_rejected(groups, n, m, weight):
    pair = {
        "A": torch.eye(n).repeat(groups, 1, 1),
        "G": torch.eye(m).repeat(groups, 1, 1),
    }
    extras = tensors_to_arrays(
        {f"curvature/kfac/{weight}.weight/{side}": f for side, f in pair.items()}
    )
    plain = tensors_to_arrays(good_upload().params | format_entry())
    check_an_upload(ArrayRecord({**plain, **extras}))


def check_an_upload(record):
    """It is rejected by name, or everything a merge does with it works."""
    try:
        upload = FisherUpload.from_arrays(record, good_upload().params)
    except WireError as error:
        assert f"'{error.field}'" in str(error)  # noqa: PT017
        return
    assert {k: (v.shape, v.dtype) for k, v in upload.params.items()} == {
        k: (v.shape, v.dtype) for k, v in good_upload().params.items()
    }
    curvature = upload.curvature
    vector = {name: upload.params[name] for name in curvature.shapes}
    product = curvature.scaled(0.5).matvec(vector)
    assert {k: v.shape for k, v in product.items()} == curvature.shapes
    assert all(v.dtype == vector[k].dtype for k, v in product.items())
