"""What a few bytes may announce, how many keys an upload may have, what errors quote.

Nothing is allocated, read or written to a log beyond what the model's own uploads need.
"""

import gc
import struct
import weakref

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from fuzz_wire import Largest, load_what_is_loaded_once
from safetensors.torch import save
from torch import Tensor
from uploads import upload_of
from virtual import tiny_app, tiny_arrays

from flwr_fisher.curvature import Deferred
from flwr_fisher.curvature.estimate.options import LARGEST_FACTOR
from flwr_fisher.errors import WireError
from flwr_fisher.strategies import FedFish, FedFisherOneShot
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import Additive, Codec, FisherUpload, resolve
from flwr_fisher.wire.additive import SUMS
from flwr_fisher.wire.arrays import check_second_moment
from flwr_fisher.wire.codec import PACKED
from flwr_fisher.wire.matrices import check_part
from flwr_fisher.wire.quantise import Packing
from flwr_fisher.wire.tct_upload import EigenvalueUpload, FeatureUpload

LIKE = {"fc.weight": torch.zeros(3, 4), "fc.bias": torch.zeros(3)}
READERS = {
    "lossless": lambda record: FisherUpload.from_arrays(record, LIKE),
    "packed": lambda record: FisherUpload.from_arrays(
        record, LIKE, Codec("fedavg", budget=3.0)
    ),
    "products": lambda record: Additive.reader("product")(record, LIKE),
    "sums": lambda record: Additive.reader(*SUMS)(record, LIKE),
    "vectors": lambda record: Additive.reader("gradient", "params")(record, LIKE),
    "features": lambda record: FeatureUpload.read(record, LIKE, p=10),
    "spectrum": lambda record: EigenvalueUpload.read(record, LIKE),
}


def entry(form, n, groups=1, rank=0, body=0):
    head = struct.pack("<BBIII", form, 8, groups, n, rank) + bytes(body)
    return torch.frombuffer(bytearray(head), dtype=torch.uint8)


def weight_of(*shape):
    return {"w": torch.empty(shape, device="meta")}


@pytest.fixture(autouse=True, scope="module")
def _torch_is_ready():
    load_what_is_loaded_once()


# --- sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("letter", "shape"), [("G", (50_000, 16)), ("A", (16, 50_000))]
)
def test_no_factor_is_larger_than_a_client_would_send(letter, shape):
    key = f"curvature/kfac/w/{letter}"
    huge = entry(Packing.COLUMNS, 50_000, body=4)
    with Largest() as made, pytest.raises(WireError, match="at most 16384 rows"):
        check_part(huge, weight_of(*shape), field=key)
    assert made.nbytes < 1000
    largest = entry(Packing.COLUMNS, LARGEST_FACTOR, body=4)
    fitting = tuple(min(side, LARGEST_FACTOR) for side in shape)
    check_part(largest, weight_of(*fitting), field=key)


def test_a_few_bytes_make_no_matrix_until_it_is_used():
    few, n = entry(Packing.COLUMNS, 4096, body=4), 4096
    with Largest() as made:
        part = check_part(few, weight_of(8, n), field="curvature/kfac/w/A")
    assert made.nbytes < 10 * 4 * n
    assert part.shape == (1, n, n)


def test_a_lossless_uploads_shapes_are_checked_before_any_array_is_read(monkeypatch):
    sent = upload_of("wide", "kfac")
    arrays = dict(sent.to_arrays())
    key = next(key for key in arrays if key.endswith("/A"))
    arrays[key] = Array("float32", (1, 7, 7), "numpy.ndarray", bytes(10_000))
    refuse_to_read(monkeypatch)
    with pytest.raises(WireError, match=r"shape \(1, 7, 7\)"):
        FisherUpload.from_arrays(ArrayRecord(arrays), sent.params)


# --- counts ---------------------------------------------------------------------------


def refuse_to_read(monkeypatch):
    def read(array):
        raise AssertionError("an array was read")

    monkeypatch.setattr("flwr_fisher.wire.arrays._read", read)


@pytest.mark.parametrize("start", ["x", "curvature/diagonal/", "fc.weight", "product/"])
def test_too_many_keys_are_refused_before_anything_is_read(start, monkeypatch):
    array = Array(np.zeros(1, np.float32))
    record = ArrayRecord({f"{start}{number}": array for number in range(5000)})
    refuse_to_read(monkeypatch)
    for reader, read in READERS.items():
        text = "5000 arrived, but at most" if reader != "packed" else "this key alone"
        with pytest.raises(WireError, match=text):
            read(record)


def test_a_container_has_no_more_entries_than_the_model_has_parts():
    like = {"w": torch.zeros(8)}
    entries = {f"{number}": torch.zeros(1, dtype=torch.uint8) for number in range(60)}
    record = ArrayRecord({PACKED: Array(np.frombuffer(save(entries), np.uint8))})
    with pytest.raises(WireError, match="60 arrived, but at most 5 are allowed"):
        FisherUpload.from_arrays(record, like, Codec("fedavg", budget=30.0))


# --- what errors say ------------------------------------------------------------------


def assert_fit_for_a_log(error):
    text = str(error)
    assert len(text) < 800
    assert text.isprintable()
    assert len(error.field) <= 120


KEYS = [
    "x" * 10**6,
    "fc.weight\n[INFO] all is well \x1b[2J",
    f"curvature/diagonal/{'y' * 10**6}",
    f"curvature/kfac/{'fc.weight,' * 10**5}",
    "tct/\u202e\0",
]


@pytest.mark.parametrize("reader", READERS)
def test_errors_that_quote_keys_are_short_and_printable(reader):
    good = {name: Array(v.numpy()) for name, v in LIKE.items()}
    for key in KEYS:
        record = ArrayRecord(good | {key: Array(np.zeros(1, np.float32))})
        with pytest.raises(WireError) as error:
            READERS[reader](record)
        assert_fit_for_a_log(error.value)


@pytest.mark.parametrize("reader", READERS)
def test_shapes_that_are_none_are_refused_in_few_words(reader):
    arrays = {name: Array(v.numpy()) for name, v in LIKE.items()}
    keys = [PACKED] if reader == "packed" else ["fc.weight", "tct/sum"]
    for shape in ((1,) * 10**5, (10**4000,), (-1,), (2**80,)):
        for key in keys:
            arrays[key] = Array("float32", (3, 4), "numpy.ndarray", b"")
            arrays[key].shape = shape
        only = {PACKED: arrays[PACKED]} if reader == "packed" else arrays
        with pytest.raises(WireError) as error:
            READERS[reader](ArrayRecord(only))
        assert_fit_for_a_log(error.value)


# --- once, and no longer than needed --------------------------------------------------


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
@pytest.mark.parametrize("budget", [1.0, 4.0])
def test_a_trace_is_known_without_the_matrices(structure, budget, monkeypatch):
    sent = upload_of("cnn", structure)
    chosen = resolve(Codec(budget=budget), sent.params)
    record = sent.to_arrays(chosen)
    curvature = FisherUpload.from_arrays(record, sent.params, chosen).curvature
    for block in curvature.blocks():
        assert isinstance(block, Deferred)
        assert block.trace() == pytest.approx(block.made().trace(), rel=1e-5)
        monkeypatch.setattr(block, "_make", None)  # it is not made
        assert block.trace() > 0


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_an_upload_takes_no_more_memory_than_what_came(structure):
    """However large what it stands for is; its parameters are decoded at once."""
    sent = upload_of("wide", structure)
    chosen = resolve(Codec("fedavg"), sent.params)
    record = sent.to_arrays(chosen)
    arrived = sum(len(array.data) for array in record.values())
    gc.freeze()  # what was there before is not looked at
    got = FisherUpload.from_arrays(record, sent.params, chosen, structure=structure)
    gc.collect()
    made = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    storages = [t.untyped_storage() for t in made if not t.is_meta]
    assert storages
    assert sum({s.data_ptr(): s.nbytes() for s in storages}.values()) <= 3 * arrived
    assert got.curvature.nbytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_second_moments_of_any_rank_and_scale_are_no_less(dtype, scale):
    rows = torch.randn(3, 40, 300, generator=torch.Generator().manual_seed(0))
    rows[0] *= torch.logspace(-6, 6, 300)  # inputs of any unit
    rows[1, :, :100] = 0
    moments = (scale * (rows.mT @ rows / 40)).to(dtype)
    check_second_moment("A", moments)
    check_second_moment("A", torch.zeros_like(moments))


def test_second_moments_of_inputs_that_are_hardly_on_are_no_less():
    """Rounding to the smallest floats says nothing of a matrix's sign."""
    rows = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    rows[:, 10:] *= 3e-22  # whose squares float32 can hardly hold
    check_second_moment("A", (rows.mT @ rows / 5).unsqueeze(0))


def test_a_matrix_with_a_negative_eigenvalue_is_no_second_moment():
    odd = torch.eye(50) - 0.9 * (torch.ones(50, 50) - torch.eye(50))
    scales = torch.logspace(-3, 3, 50)
    for matrix in (odd, odd * scales * scales.unsqueeze(-1), 1e-30 * odd):
        with pytest.raises(WireError, match="'A': has a negative eigenvalue"):
            check_second_moment("A", torch.stack([torch.eye(50), matrix]))
    lonely = torch.zeros(50, 50)
    lonely[0, 1] = lonely[1, 0] = 1.0
    with pytest.raises(WireError, match="has a negative eigenvalue"):
        check_second_moment("A", lonely)


@pytest.mark.parametrize("make", [FedFisherOneShot, FedFish])
def test_no_two_rounds_uploads_are_held_at_once(make):
    refs = []

    class Watched(make):  # type: ignore[misc]
        def exchanges(self, server_round):
            refs.append([])
            return super().exchanges(server_round)

        def _read(self, record, like):
            gc.collect()
            assert not [ref for earlier in refs[:-1] for ref in earlier if ref()]
            upload = super()._read(record, like)
            refs[-1].append(weakref.ref(upload))
            return upload

    grid = LocalGrid(tiny_app(), 3, seed=0)
    gc.freeze()  # what was there before need not be looked at each time
    result = Watched(fraction_evaluate=0.0).start(grid, tiny_arrays(), num_rounds=3)
    looked = [0] * (make is FedFisherOneShot)  # for its refinement, before any round
    assert [len(each) for each in refs] == [*looked, 3, 3, 3]
    assert len(result.uploads) == 3
