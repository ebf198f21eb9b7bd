"""Spoiled messages of secure sums: each is read or refused, by servers and clients."""

import random
from contextlib import suppress
from functools import partial

import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from fuzz_wire import spoil_array
from test_secure_sums import client_of, merged, stage_of
from virtual import LIFTED, tiny_arrays

from flwr_fisher.client import make_client_app
from flwr_fisher.errors import FlwrFisherError, RoundError, WireError
from flwr_fisher.secure import SecureSums, SecureSumsMod
from flwr_fisher.secure.payload import SecureUpload
from flwr_fisher.strategies import FedFisherOneShot, MergeOptions
from flwr_fisher.tangent import feature_sums
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import Additive, arrays_to_tensors
from flwr_fisher.wire.additive import LayerTraces
from flwr_fisher.wire.tct_upload import EigenvalueCounts, FeatureUpload, about_features

PLAIN = {"aggregate": "sums", "fraction_evaluate": 0.0}
DIAGONAL = {**PLAIN, "structure": "diagonal"}


def spoiled(record, rng):
    """Spoil, drop, rename or exchange some of a record's arrays."""
    arrays = dict(record)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not arrays:
            break
        key, other = rng.choice(sorted(arrays)), rng.choice(sorted(arrays))
        match rng.randrange(7):
            case 0 | 1 | 2:
                with suppress(TypeError, ValueError, RuntimeWarning):  # spoiled before
                    arrays[key] = spoil_array(arrays[key], rng)
            case 3:
                arrays[key], arrays[other] = arrays[other], arrays[key]
            case 4:
                del arrays[key]
            case 5:
                arrays[rng.choice((f"{key}x", "", "secure/words", "w"))] = arrays[other]
            case 6:
                values = torch.randn(rng.choice(((), (3,), (2, 2), (0,))))
                arrays[key] = Array(values.numpy())
    return ArrayRecord(arrays)


class Noted(LocalGrid):
    """Keeps every reply to a request to train."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.replies = []

    def pull_messages(self, message_ids):
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            if reply.metadata.message_type == "train" and reply.has_content():
                self.replies += reply.content.array_records.values()
        return replies


def replies_of(strategy, folder):
    grid = Noted(make_client_app(client_of, mods=[SecureSumsMod(state_dir=folder)]), 3)
    strategy.start(grid, tiny_arrays())
    return grid.replies


def test_spoiled_replies_are_read_or_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    like = arrays_to_tensors(tiny_arrays())
    secure = replies_of(FedFisherOneShot(**DIAGONAL, secure=SecureSums()), tmp_path)
    sums = replies_of(
        FedFisherOneShot(**PLAIN, merge=MergeOptions(iterations=1), policy=LIFTED),
        tmp_path,
    )
    control = Additive({"params": like, "control": {"0.bias": like["0.bias"]}})
    about = about_features("d", "head", 3)
    features = FeatureUpload.of(about, feature_sums(torch.randn(5, 4)))
    counts = EigenvalueCounts.of(about, 2.0)
    cases = [
        *((SecureUpload.from_arrays, record) for record in secure),
        *((LayerTraces.read_traces, record) for record in sums[3:6]),
        *((Additive.reader("product"), record) for record in sums[6:9]),
        (Additive.reader("params", "control"), control.to_arrays()),
        (partial(FeatureUpload.read, p=4), features.to_arrays()),
        (EigenvalueCounts.read, counts.to_arrays()),
    ]
    rng, refused, read = random.Random(0), 0, 0
    for _ in range(1000):
        reader, record = rng.choice(cases)
        try:
            reader(spoiled(record, rng), like)
            read += 1
        except WireError:
            refused += 1
    assert refused > 500  # most of what is spoiled cannot be used
    assert read > 25  # and some of it can be told by nobody


@pytest.mark.parametrize("seed", range(3))
def test_a_round_with_a_spoiler_ends_with_a_model_or_a_round_error(seed, tmp_path):
    """One of five clients spoils each of its replies, or some of them."""
    own, rng = SecureSumsMod(state_dir=tmp_path), random.Random(seed)

    class Spoiling(SecureSumsMod):
        def __call__(self, message, context, call_next):
            reply = own(message, context, call_next)
            mine = context.node_config["partition-id"] == 2
            if mine and stage_of(message) != "None" and rng.random() < 0.4:
                record = reply.content.array_records["arrays"]
                reply.content["arrays"] = spoiled(record, rng)
            return reply

    app = make_client_app(client_of, mods=[Spoiling()])
    strategy = FedFisherOneShot(**DIAGONAL, secure=SecureSums(), min_train_nodes=3)
    try:
        result = merged(strategy, app, clients=5)
    except RoundError:
        return
    assert all(value.isfinite().all() for value in result.values())


def test_spoiled_requests_do_a_client_no_harm(tmp_path):
    """The client answers, or raises what the server is told; its disk is as before."""
    rng, raised = random.Random(1), 0

    class Spoiling(SecureSumsMod):
        def __call__(self, message, context, call_next):
            nonlocal raised
            inner = SecureSumsMod(state_dir=tmp_path)
            if stage_of(message) == "None" or rng.random() < 0.5:
                return inner(message, context, call_next)
            ((name, record),) = message.content.array_records.items()
            content = RecordDict({**message.content, name: spoiled(record, rng)})
            message.content = content
            try:
                return inner(message, context, call_next)
            except FlwrFisherError:
                raised += 1
                raise

    app = make_client_app(client_of, mods=[Spoiling()])
    failed = 0
    for _ in range(6):
        strategy = FedFisherOneShot(**DIAGONAL, secure=SecureSums())
        try:
            merged(strategy, app, clients=5)
        except RoundError:
            failed += 1
    assert raised > 10
