"""The papers' measures, which the benchmarks have: each by hand on tiny clients."""

import pytest
import rivals_path  # noqa: F401
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from measures import ClientServerBarrier, MeasuredGrid, Personalisation, combine, costs
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from virtual import app_by_partition, tiny_data

from flwr_fisher.client import FisherClient, LocalSGD
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FedFish
from flwr_fisher.testing import LocalGrid

CLIENTS = 4
TRAIN = LocalSGD(lr=0.1, momentum=0.0)


def net():
    return nn.Linear(3, 3)


def loader(client):
    x, y = tiny_data(client, n=12).tensors
    data = TensorDataset(x.flatten(1)[:, :3], y % 3)
    sampler = BatchSampler(RandomSampler(data), 4, drop_last=False)
    return DataLoader(data, sampler=sampler, batch_size=None)


LOADERS = [loader(client) for client in range(CLIENTS)]


def measured_grid(**options):
    own = {"train_fn": TRAIN, "device": "cpu"}
    app = app_by_partition(lambda i: FisherClient(net(), LOADERS[i], **own))
    return MeasuredGrid(LocalGrid(app, CLIENTS), **options)


def start():
    torch.manual_seed(0)
    return ArrayRecord(shared_state(net()))


def loss(arrays, client):
    params = arrays.to_torch_state_dict()
    x, y = LOADERS[client].dataset.tensors
    return float(F.cross_entropy(F.linear(x, **params), y))


def test_the_barrier_is_the_servers_loss_minus_the_clients_own():
    grid = measured_grid()
    strategy = FedFish(fraction_evaluate=0.0)
    found = strategy.start(grid, start(), evaluate_fn=ClientServerBarrier(grid))
    metrics = found.evaluate_metrics_serverapp[1]
    server = sum(loss(found.arrays, client) for client in range(CLIENTS)) / CLIENTS
    assert metrics["barrier-server-loss"] == pytest.approx(server, rel=1e-5)
    local = metrics["barrier-local-loss"]
    assert metrics["barrier-loss"] == pytest.approx(server - local, rel=1e-4)
    before = sum(loss(start(), client) for client in range(CLIENTS)) / CLIENTS
    assert local < before
    assert (metrics["barrier-clients"], metrics["barrier-missing"]) == (CLIENTS, 0)


def test_held_out_clients_never_train_and_fine_tune_half_of_their_data():
    grid = measured_grid(held_out=2, seed=1)
    held = grid.held_out_clients()
    measure = Personalisation(grid, LOADERS, net(), TRAIN, epochs=50)
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    found = strategy.start(grid, start(), num_rounds=1, evaluate_fn=measure)
    assert set(grid.held_out_clients()) == set(held)
    assert len(held) == 2
    assert found.train_metrics_clientapp[1]
    metrics = found.evaluate_metrics_serverapp[1]
    assert metrics["personalised-clients"] == 2
    assert dict(measure(1, found.arrays)) == dict(metrics)  # the same halves
    small = Personalisation(grid, LOADERS, net(), TRAIN, fraction=0.25, name="small")
    other = small(1, found.arrays)
    assert other["zero-shot-loss"] == metrics["zero-shot-loss"]
    assert other["small-loss"] != metrics["personalised-loss"]


def test_costs_count_bytes_and_gradients():
    grid = measured_grid()
    spent = combine(None, costs(grid, 3))
    result = FedFish(fraction_evaluate=0.0).start(
        grid, start(), num_rounds=2, evaluate_fn=spent
    )
    first, second = (result.evaluate_metrics_serverapp[n] for n in (1, 2))
    assert (first["gradient-evaluations"], second["gradient-evaluations"]) == (3, 6)
    assert 0 < first["uploaded-bytes"] < second["uploaded-bytes"]
