"""Every algorithm, clients and server on an accelerator: as on the CPU to rounding."""

from functools import partial

import pytest
import test_strategy_contract as contract
import torch
import virtual
from devices import pretended
from flwr.app import ArrayRecord
from oracles import randn, relative, seeded
from test_secure_sums import STRATEGIES as SUMS
from test_tct import tct
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import (
    app_by_partition,
    ask,
    fedfisher_with,
    tensors_of,
    tiny_arrays,
    tiny_client,
)

from flwr_fisher.callbacks import BestModel
from flwr_fisher.client import FisherClient, LocalSGD, score
from flwr_fisher.merge.fedfisher import merge_posteriors
from flwr_fisher.params import shared_state
from flwr_fisher.secure import SecureSums, SecureSumsMod
from flwr_fisher.strategies import FedFish
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import Codec

DEVICE = pretended.NAME


@pytest.fixture(autouse=True)
def nothing_out_of_range():
    pretended.asserts.clear()
    yield
    assert pretended.asserts == []


def app_on(device, mods=None, **options):
    return app_by_partition(
        lambda i: tiny_client(i, device=device, **options), mods=mods
    )


def merged(make, app, clients=3, num_rounds=2, **options):
    result = make().start(
        LocalGrid(app, clients), tiny_arrays(), num_rounds=num_rounds, **options
    )
    return result.arrays.to_torch_state_dict()


def assert_close(got, want, most=1e-3):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert relative(got[name].double(), value.double()) < most, name


# FAGH's others are like one of them; Adam is in test_merge.
LIKE_OTHERS = {"fagh-first", "fagh-momentum", "fagh-none", "fedfisher-adam"}


@pytest.mark.parametrize(
    "name", [n for n in contract.STRATEGIES if n not in LIKE_OTHERS]
)
def test_rounds_are_those_of_the_cpu(name, monkeypatch, tmp_path):
    row = contract.of_name(name, monkeypatch)
    makes = [row, row]
    if row.make is fedfisher_with:
        makes = [partial(row, device=device) for device in (DEVICE, "cpu")]
    got, want = (
        merged(make, app_on(device, state_dir=tmp_path / device))
        for make, device in zip(makes, (DEVICE, "cpu"), strict=True)
    )
    assert_close(got, want)


def test_a_diagonal_is_merged_as_on_the_cpu():
    make = partial(fedfisher_with, structure="diagonal", fraction_evaluate=1.0)
    got, want = (
        merged(partial(make, device=device), app_on(device), num_rounds=1)
        for device in (DEVICE, "cpu")
    )
    assert_close(got, want)


def test_a_merge_for_which_the_memory_is_too_small_is_done_on_the_cpu(
    monkeypatch, caplog
):
    want, whole = merged(fedfisher_with, app_on("cpu"), num_rounds=1), merge_posteriors

    def small(*args, device, **options):
        if torch.device(device).type != "cpu":
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return whole(*args, device=device, **options)

    monkeypatch.setattr("flwr_fisher.strategies.fedfisher.merge_posteriors", small)
    make = partial(fedfisher_with, device=DEVICE)
    assert_close(merged(make, app_on("cpu"), num_rounds=1), want)
    assert "so it is done on the CPU: tried to allocate 9 GiB" in caplog.text


@pytest.mark.parametrize("name", ["fedfisher", "kfac"])
def test_secure_sums_are_those_of_the_cpu(name, tmp_path):
    make = partial(SUMS[name], secure=SecureSums())
    got, want = (
        merged(
            make,
            app_on(
                device,
                [SecureSumsMod(state_dir=tmp_path / device)],
                state_dir=tmp_path / device,
            ),
            num_rounds=1,
        )
        for device in (DEVICE, "cpu")
    )
    assert_close(got, want)


def test_tct_is_that_of_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(virtual, "LocalSGD", partial(LocalSGD, momentum=0.0))
    got, want = (
        merged(
            partial(tct, fraction_evaluate=1.0),
            app_on(device, state_dir=tmp_path / device),
            num_rounds=4,
        )
        for device in (DEVICE, "cpu")
    )
    assert_close(got, want)


def test_a_run_with_callbacks_stops_and_goes_on(tmp_path):
    def run(device, folder):
        folder.mkdir()
        callbacks = [BestModel(folder / "best.safetensors")]
        for rounds in (1, 2):
            strategy = FedFish(fraction_evaluate=1.0)
            result = strategy.start(
                LocalGrid(app_on(device, state_dir=folder / "clients"), 3, seed=1),
                tiny_arrays(),
                num_rounds=rounds,
                checkpoint_dir=folder / "run",
                resume=rounds == 2,
                callbacks=callbacks,
            )
        return result.arrays.to_torch_state_dict()

    got, want = (run(device, tmp_path / device) for device in (DEVICE, "cpu"))
    assert_close(got, want)


def client_of(width):
    """The upload of a wide model is not packed once more in the trial."""
    x, y = randn(0, 40, width), torch.arange(40) % 30
    loader = DataLoader(TensorDataset(x, y), batch_size=8)

    def net():
        return nn.Sequential(nn.Linear(width, 500), nn.Tanh(), nn.Linear(500, 30))

    return FisherClient(seeded(net), loader, device=DEVICE)


JOBS = [{"structure": name} for name in ("kfac", "diagonal")]
JOBS += [{"job": "fedfish", "structure": "diagonal"}, {}]


@pytest.mark.parametrize("config", JOBS, ids=str)
def test_a_request_copies_to_the_host_what_is_uploaded(config):
    client = client_of(600)
    arrays = ArrayRecord(shared_state(client.problem.model))
    with pretended.watch() as seen:
        reply = ask(client, arrays, config | Codec.of("codec", "auto").to_options())
    uploaded = sum(tensor.nbytes for tensor in tensors_of(reply).values())
    few = uploaded // 50  # bytes of counts, flags and losses
    assert seen.bytes_down() <= uploaded + few, (uploaded, seen.where(["down"]))


def test_memory_is_given_back_after_a_request():
    client, config = client_of(20), {"structure": "kfac"}
    arrays = ArrayRecord(shared_state(client.problem.model))
    own = sum(value.nbytes for value in client.problem.model.state_dict().values())
    for _ in range(2):
        ask(client, arrays, config)
    assert pretended.settled(2 * own) <= 2 * own  # the model, and its gradients


def test_scoring_waits_for_a_batchs_loss_and_its_count_and_for_nothing_else():
    model, data = seeded(lambda: nn.Linear(4, 3)).to(DEVICE), randn(0, 30, 4)
    labels = torch.arange(30) % 3
    waits = []
    for batches in (2, 5):
        loader = DataLoader(TensorDataset(data, labels), batch_size=30 // batches)
        with pretended.watch() as seen:
            score(model, loader, torch.device(DEVICE), nn.functional.cross_entropy)
        waits.append(len(seen.waits()))
    assert waits[1] - waits[0] == 3 * 2, seen.where()
