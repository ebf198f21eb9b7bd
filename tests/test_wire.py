import pytest
import torch
from flwr.app import RecordDict
from torch import nn
from virtual import FEATURES, tiny_model

from flwr_fisher.curvature import (
    BlockDiagonal,
    Diagonal,
    Kronecker,
    WeightedSum,
    fisher,
)
from flwr_fisher.curvature.structures import STRUCTURES
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
)
from flwr_fisher.wire.arrays import description_text
from flwr_fisher.wire.layout import check_shape

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


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("model", MODELS)
def test_an_upload_comes_back_bit_for_bit(model, structure):
    sent = upload_of(MODELS[model](), structure)
    got = FisherUpload.from_arrays(travelled(sent.to_arrays()), sent.params)
    assert_same(sent.params, got.params)
    kinds = [(type(b), list(b.shapes)) for b in sent.curvature.blocks()]
    assert [(type(b), list(b.shapes)) for b in got.curvature.blocks()] == kinds
    laid_out = curvature_to_tensors(sent.curvature)
    assert_same(laid_out, curvature_to_tensors(got.curvature))
    assert torch.equal(sent.curvature.to_dense(), got.curvature.to_dense())


def test_the_layout_is_the_documented_one():
    assert set(curvature_to_tensors(upload_of(tiny_model(), "kfac").curvature)) == {
        "curvature/kfac/0.weight/A",
        "curvature/kfac/0.weight/G",
        "curvature/kfac/3.weight/A",
        "curvature/kfac/3.weight/G",
        "curvature/diagonal/1.weight",
        "curvature/diagonal/1.bias",
    }


def test_a_record_does_not_follow_its_source():
    source = torch.zeros(3)
    record = tensors_to_arrays({"x": source})
    source.add_(1)
    assert torch.equal(arrays_to_tensors(record)["x"], torch.zeros(3))


def test_a_lazy_sum_cannot_be_sent():
    one = Diagonal({"w": torch.ones(2)})
    with pytest.raises(StructureError, match="block of no structure"):
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


COUNTER, SHAPE = "1.num_batches_tracked", "shape"


def pair(name, first, second):
    """Factors under a weight's name."""
    key = f"curvature/kfac/{name}"
    return {f"{key}/A": first, f"{key}/G": second}


def groups(count):
    return {A: lambda t: t[:1].repeat(count, 1, 1), G: torch.ones(count, 4 // count, 1)}


EYE = torch.eye(1)[None]
REJECTED = {  # what is named, how it is changed (or what is), and the reason
    "missing parameter": ("0.weight", None, "missing"),
    "unexpected key": ("9.weight", torch.ones(2), "unexpected key"),
    "float64": ("0.bias", lambda t: t.double(), "dtype torch.float64"),
    "NaN": ("3.bias", lambda t: with_entry(t, NAN), "NaN"),
    "NaN buffer": ("1.running_mean", lambda t: t * NAN, "NaN"),
    "negative diagonal": (NORM, lambda t: with_entry(t, -1e-9), "negative"),
    "negative A": (A, lambda t: with_entry(t, -0.1), "negative"),
    "unsymmetric A": (A, unsymmetric, "not symmetric"),
    "no A": (A, None, "missing"),
    "misshapen A": (A, lambda t: t[:, :2, :2], r"expected \(1, 3, 3\) or \(1, 4, 4\)"),
    "too large A": (A, lambda t: torch.eye(9)[None], SHAPE),
    "misshapen G": (G, lambda t: t[:, :2, :2], r"expected \(1, 4, 4\)"),
    "no group": (A, {A: lambda t: t[:0], G: lambda t: t[:0]}, "expected matrices"),
    "groups that do not divide": (A, groups(3), r"shape \(3, 4, 4\)"),
    "a factor pair for a vector": (
        "curvature/kfac/1.weight/A",
        {NORM: None, **pair("1.weight", EYE, torch.eye(4)[None])},
        r"weight of shape \(4,\)",
    ),
    "a factor pair for a scalar": (
        f"curvature/kfac/{COUNTER}/A",
        pair(COUNTER, EYE.long(), EYE.long()),
        "dtype torch.int64",
    ),
    "complex curvature": (NORM, lambda t: t.cfloat(), "no real numbers complex64"),
    "misshapen diagonal": (NORM, lambda t: t[:2], SHAPE),
    "unknown kind": ("curvature/lowrank/x", torch.ones(2), "unknown key"),
    "third factor": (f"{A[:-1]}B", torch.ones(2), "unknown key"),
    "unknown parameter": ("curvature/diagonal/no", torch.ones(2), "no such parameter"),
    **{
        f"{name} in two blocks": ("curvature/", {key: more}, f"'{name}'.*more than one")
        for name, key, more in (
            ("0.weight", "curvature/diagonal/0.weight", torch.ones(4, 3)),
            ("0.bias", "curvature/diagonal/0.bias", torch.ones(4)),
        )
    },
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
    field, change, reason = REJECTED[case]
    changes = change if isinstance(change, dict) else {field: change}
    record, like = changed_upload(changes)
    with pytest.raises(WireError, match=reason) as caught:
        FisherUpload.from_arrays(record, like)
    assert caught.value.field == field
    assert f"'{field}'" in str(caught.value)


def test_rounding_in_a_symmetric_factor_is_not_rejected():
    for change in ({}, {A: lambda t: t * (1 + 1e-6 * torch.rand_like(t))}):
        FisherUpload.from_arrays(*changed_upload(change))


def test_a_record_without_a_curvature_or_a_format_is_rejected():
    params = {"w": torch.ones(2)}
    told = {f"{PREFIX}format": description_text(LOSSLESS.describe())}
    for tensors, field in ((params | told, ""), (params, "format")):
        with pytest.raises(WireError) as caught:
            FisherUpload.from_arrays(tensors_to_arrays(tensors), params)
        assert caught.value.field == PREFIX + field


def test_a_bias_of_another_size_is_not_the_layers():
    params = {"up.weight": torch.ones(4, 3), "up.bias": torch.ones(3)}
    with pytest.raises(WireError, match=r"shape \(1, 4, 4\), expected \(1, 3, 3\)"):
        check_shape("curvature/kfac/up.weight/A", (1, 4, 4), params)


def test_a_parameter_without_entries_comes_back():
    params = {"w": torch.ones(0, 2), "b": torch.ones(3)}
    layer = Kronecker("w", params["w"].shape, torch.eye(2)[None], torch.ones(1, 0, 0))
    sent = FisherUpload(params, BlockDiagonal([layer, Diagonal({"b": torch.ones(3)})]))
    got = FisherUpload.from_arrays(travelled(sent.to_arrays()), params)
    laid_out = curvature_to_tensors(sent.curvature)
    assert_same(laid_out, curvature_to_tensors(got.curvature))
