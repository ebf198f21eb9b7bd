"""Uploads of parameters and inputs' second moments: lossless, and refused by name."""

import json

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from uploads import LAYOUTS, params_of, psd

from flwr_fisher.curvature import InputCovariance
from flwr_fisher.errors import WireError
from flwr_fisher.wire import CovarianceUpload

NAN = float("nan")
FC, CONV = "curvature/kfac/6.weight/A", "curvature/kfac/3.weight/A"


def upload(dtype=torch.float32, name="cnn"):
    """Of two convolutions, one of four groups, a batch norm and a linear layer."""
    layout = LAYOUTS[name]
    params = params_of(layout, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    found = {}
    for seed, (weight, shape) in enumerate(layout.trained.items()):
        if len(shape) > 1:
            bias = weight.replace("weight", "bias")
            bias = bias if bias in params else None
            size = torch.Size(shape[1:]).numel() + (bias is not None)
            A = psd(seed, layout.groups.get(weight, 1), size).to(wide)
            found[weight] = InputCovariance(weight, bias, A)
    return CovarianceUpload(params, found)


def arrays():
    return upload().to_arrays()


def read(record):
    return CovarianceUpload.from_arrays(record, upload().params)


@pytest.mark.parametrize("name", ["cnn", "mlp", "linear", "depthwise", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_what_was_sent_is_what_is_read(dtype, name):
    sent = upload(dtype, name)
    got = CovarianceUpload.from_arrays(sent.to_arrays(), sent.params)
    assert list(got.params) == list(sent.params)
    assert all(torch.equal(got.params[k], v) for k, v in sent.params.items())
    assert list(got.covariances) == list(sent.covariances)
    for key, layer in sent.covariances.items():
        found = got.covariances[key]
        assert (found.weight, found.bias) == (layer.weight, layer.bias)
        assert (
            found.A.dtype == layer.A.dtype == torch.promote_types(dtype, layer.A.dtype)
        )
        assert torch.equal(found.A, layer.A)


def test_the_order_of_arrival_does_not_matter():
    record = arrays()
    back = ArrayRecord({key: record[key] for key in reversed(list(record))})
    assert list(read(back).params) == list(upload().params)
    assert read(back).layout() == read(record).layout() == upload().layout()


def test_clients_whose_layers_differ_have_another_layout():
    fewer = arrays()
    del fewer[CONV]
    assert read(fewer).layout() != upload().layout()
    narrow = arrays()
    narrow[FC] = Array(np.eye(24, dtype=np.float32)[None])  # without the bias
    assert read(narrow).covariances["6.weight"].bias is None
    assert read(narrow).layout() != upload().layout()


def changed(key, change):
    def spoil(record):
        record[key] = Array(np.array(change(record[key].numpy())))

    return spoil


def entry(key, at, value):
    def change(array):
        array = np.array(array)
        array[at] = value
        return array

    return changed(key, change)


def added(key, values):
    def spoil(record):
        record[key] = Array(np.array(values, dtype=np.float32))

    return spoil


def dropped(*keys):
    def spoil(record):
        for key in keys:
            del record[key]

    return spoil


def no_moments(record):
    dropped(*(key for key in record if key.startswith("curvature/")))(record)


SPOILED = {
    "missing": (dropped("6.bias"), "6.bias", "missing"),
    "unexpected": (added("9.bias", [1]), "9.bias", "unexpected key"),
    "parameter's shape": (changed("6.bias", lambda a: a[:2]), "6.bias", "shape"),
    "parameter's dtype": (changed("6.bias", lambda a: a.astype("f8")), "6.bias", "64"),
    "parameter's NaN": (changed("6.bias", lambda a: a * NAN), "6.bias", "NaN"),
    "none": (no_moments, "curvature/", "no second moment of inputs"),
    "shape": (changed(FC, lambda a: a[:, :20, :20]), FC, r"shape \(1, 20, 20\)"),
    "dimensions": (changed(FC, lambda a: a[0]), FC, "shape"),
    "groups": (changed(CONV, lambda a: np.repeat(a, 3, 0)), CONV, "shape"),
    "dtype": (changed(FC, lambda a: a.astype("f8")), FC, "float64"),
    "half": (changed(FC, lambda a: a.astype("f2")), FC, "float16"),
    "integers": (changed(FC, lambda a: a.astype("i4")), FC, "int32"),
    "NaN": (entry(FC, (0, 1, 2), NAN), FC, "NaN"),
    "infinite": (entry(FC, (0, 1, 1), float("inf")), FC, "infinity"),
    "negative": (entry(FC, (0, 1, 1), -1e-6), FC, "negative on the diagonal"),
    "not symmetric": (entry(FC, (0, 1, 2), 0.5), FC, "not symmetric"),
    "another factor": (
        added("curvature/kfac/6.weight/G", np.eye(4)[None]),
        "G",
        "only",
    ),
    "a diagonal": (
        added("curvature/diagonal/6.weight", np.ones((4, 24))),
        "dia",
        "only",
    ),
    "of nothing": (added("curvature/kfac/7.weight/A", [[[1]]]), "7.weight", "no such"),
    "of a vector": (added("curvature/kfac/1.weight/A", [[[1]]]), "1.weight", "shape"),
    "of a buffer": (
        added("curvature/kfac/1.num_batches_tracked/A", [[[1]]]),
        "1.num_batches_tracked",
        "no curvature",
    ),
    "of no kind": (added("curvature/x", [1]), "curvature/x", "unknown key"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_spoiled_is_named(case):
    spoil, field, reason = SPOILED[case]
    record = arrays()
    spoil(record)
    with pytest.raises(WireError, match=f"'.*{field}.*': .*{reason}"):
        read(record)


def header(shape):
    text = json.dumps({"descr": "<f4"})[1:-1].replace('"', "'")
    body = f"{{{text}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


@pytest.mark.parametrize(
    "shape",
    [
        (1, 10**6, 10**6),
        (4, 10**9, 10**9),
        (2**40, 8, 8),
        (-1, 25, 25),
        (8, 1),
        ("a", 25, 25),
        (1, 25.0, 25),
        None,
        7,
    ],
)
def test_what_is_announced_is_refused_before_it_is_read(shape, monkeypatch):
    record = arrays()
    record[FC] = Array("float32", (1, 1), "numpy.ndarray", header((1, 1)))
    record[FC].shape = shape  # from the wire it may be anything

    def allocate(*args, **kwargs):
        raise AssertionError("read before its shape was checked")

    monkeypatch.setattr("flwr_fisher.wire.arrays.arrays_to_tensors", allocate)
    with pytest.raises(WireError, match=f"'{FC}': .*shape"):
        read(record)


def test_what_is_announced_must_be_what_arrives():
    record = arrays()
    data = header((1, 10**6, 10**6))
    record[FC] = Array("float32", (1, 25, 25), "numpy.ndarray", data)
    with pytest.raises(WireError, match=f"'{FC}': unreadable array: announced as"):
        read(record)


def test_groups_have_the_bound_of_kfacs_factors():
    """The server does not know a layer's groups, and they multiply its matrices."""
    like = {"c.weight": torch.zeros(512, 512, 3, 3)}
    record = ArrayRecord(
        {
            "c.weight": Array(np.zeros((512, 512, 3, 3), dtype=np.float32)),
            "curvature/kfac/c.weight/A": Array(
                "float32", (512, 4608, 4608), "numpy.ndarray", b""
            ),
        }
    )
    with pytest.raises(WireError, match=r"c.weight/A': shape \(512, 4608, 4608\)"):
        CovarianceUpload.from_arrays(record, like)
