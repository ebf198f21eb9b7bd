"""A hundred honest clients of very unlike sizes get what Flower's FedAvg gives them."""

from functools import cache, partial

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import strategy as flowers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import LIFTED, close, same_bits

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import (
    TCT,
    FedAvg,
    FedFish,
    FedFisherOneShot,
    Regression,
    Scaffold,
)
from flwr_fisher.testing import LocalGrid

# Zipf's law over three decades, and every other client has one class alone.
CLIENTS, SOME, CLASSES, FEATURES = 100, 30, 3, 4
SIZES = [max(3, int(3000 / (1 + i) ** 1.5)) for i in range(CLIENTS)]


@cache
def holding(partition, share):
    """A share of a client's examples, around its classes' centres."""
    generator = torch.Generator().manual_seed(partition)
    centres = 3 * torch.eye(CLASSES, FEATURES)
    n = max(3, SIZES[partition] // share)
    y = torch.randint(CLASSES, (n,), generator=generator)
    if partition % 2:
        y = torch.full_like(y, partition % CLASSES)
    return TensorDataset(centres[y] + torch.randn(n, FEATURES, generator=generator), y)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def app(share):
    def client_fn(context):
        data = holding(int(context.node_config["partition-id"]), share)
        train = LocalSGD(lr=0.3, epochs=3, momentum=0.0)
        loader = DataLoader(data, batch_size=len(data))
        return FisherClient(make_model(), loader, loader, train_fn=train, device="cpu")

    return make_client_app(client_fn)


def run(strategy, rounds=1, clients=CLIENTS, share=1):
    """Return a run's result, and the models after each of its rounds."""
    models = []

    def evaluate_fn(server_round, arrays):
        models.append(ArrayRecord(arrays.to_torch_state_dict()))
        return MetricRecord({})

    grid = LocalGrid(app(share), clients)
    start = ArrayRecord(shared_state(make_model()))
    result = strategy.start(
        grid,
        start,
        num_rounds=rounds,
        train_config=ConfigRecord({}),
        evaluate_fn=evaluate_fn,
    )
    return result, models


def test_fedavg_is_flowers_in_every_round():
    ours, our_models = run(FedAvg(min_train_nodes=CLIENTS), 3)
    theirs, their_models = run(flowers.FedAvg(min_train_nodes=CLIENTS), 3)
    assert len(our_models) == 4
    for mine, flower in zip(our_models, their_models, strict=True):
        assert close(mine, flower, 1e-6)
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        for server_round, flower in getattr(theirs, kind).items():
            mine = getattr(ours, kind)[server_round]
            assert "num-limited" not in mine
            assert {k: mine[k] for k in flower} == pytest.approx(dict(flower), 1e-6)


SHORT = {"stage1_rounds": 1, "num_features": 20, "local_steps": 5}
METHODS = {
    "FedFisher": partial(FedFisherOneShot, codec="lossless"),
    "FedFisher, sums": partial(
        FedFisherOneShot, structure="diagonal", aggregate="sums"
    ),
    "FedFish": FedFish,
    "SCAFFOLD": Scaffold,
    "TCT": partial(TCT, **SHORT, regression=Regression(solver="steps")),
}


@pytest.mark.parametrize("name", METHODS)
def test_no_limit_touches_them(name):
    def by(**policy):
        strategy = METHODS[name](fraction_evaluate=0.0, **policy)
        return run(strategy, 3 if name == "TCT" else 1, SOME, share=10)[0]

    by_default, lifted = by(), by(policy=LIFTED)
    assert same_bits(by_default.arrays, lifted.arrays)
    metrics = by_default.train_metrics_clientapp.values()
    assert not any("num-limited" in own for own in metrics)
