"""A hundred honest clients of very unlike sizes get what Flower's FedAvg gives them."""

import copy

import numpy as np
import rivals_path  # noqa: F401
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import strategy as flowers
from tasks import load_dataset
from torch import nn
from virtual import arrays_to_tensors

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FedAvg
from flwr_fisher.testing import LocalGrid

CLIENTS = 100
SIZES = [round(max(10_000 / rank, 10)) for rank in range(1, CLIENTS + 1)]
SIZES[-1] = 10  # the smallest of them
BATCH = 64


def holdings(name, alpha, share=1, data_dir=None, clients=CLIENTS):
    """Each client's inputs and labels, drawn with replacement.

    Its classes are in shares that are Dirichlet's, and of its size comes a `share`.
    """
    train = load_dataset(name, data_dir).train
    by_class = [(train.targets == c).nonzero()[:, 0].numpy() for c in range(10)]
    generator = np.random.default_rng(0)
    found = []
    for size in SIZES[:clients]:
        shares = generator.dirichlet([alpha] * 10)
        counts = generator.multinomial(max(3, size // share), shares)
        drawn = [generator.choice(*own) for own in zip(by_class, counts, strict=True)]
        x, y = train[generator.permutation(np.concatenate(drawn)).tolist()]
        found.append((x.flatten(1), y))
    return found


class Federation:
    """Clients with these examples, who train a small network from one start."""

    def __init__(self, examples):
        self.examples, features = examples, examples[0][0].shape[1]
        self.app = make_client_app(self._client)
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(features, 10), nn.ReLU(), nn.Linear(10, 10)
        )

    def _client(self, context):
        x, y = self.examples[int(context.node_config["partition-id"])]
        batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
        train = LocalSGD(lr=0.1, epochs=1, momentum=0.0)
        model = copy.deepcopy(self.model)
        return FisherClient(model, batches, batches[:2], train_fn=train, device="cpu")

    def run(self, strategy, rounds, app=None):
        """Return a run's result, and the models after each of its rounds."""
        models = []

        def evaluate_fn(server_round, arrays):
            models.append(ArrayRecord(arrays.to_torch_state_dict()))
            return MetricRecord({})

        grid = LocalGrid(app or self.app, len(self.examples))
        start = ArrayRecord(shared_state(self.model))
        result = strategy.start(
            grid, start, rounds, train_config=ConfigRecord({}), evaluate_fn=evaluate_fn
        )
        return result, models


class FlowersFedAvg(flowers.FedAvg):
    """Flower's FedAvg, whose rounds begin with these models and not with its own.

    Rounding differs between two runs, and training makes such differences grow.
    """

    def __init__(self, models, **kwargs):
        super().__init__(**kwargs)
        self.models = models

    def configure_train(self, server_round, arrays, config, grid):
        before = ArrayRecord(self.models[server_round - 1].to_torch_state_dict())
        return super().configure_train(server_round, before, config, grid)


def furthest(ours, theirs):
    """By how much two runs' parameters differ at most: of each round's."""
    pairs = zip(ours, theirs, strict=True)
    return [
        max(float((own[k].double() - other[k].double()).abs().max()) for k in own)
        for own, other in (map(arrays_to_tensors, pair) for pair in pairs)
    ]


def metrics_apart(ours, theirs):
    """By how much two runs' aggregated metrics differ at most, and of how many."""
    apart = []
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        for server_round, found in getattr(theirs, kind).items():
            mine = getattr(ours, kind)[server_round]
            apart += [abs(mine[key] - value) for key, value in found.items()]
    return max(apart), len(apart)


def test_fedavg_is_flowers_in_every_round():
    """Sizes by Zipf's law over three decades, in parameters and in metrics.

    Of each client's examples comes a fifth.
    """
    assert (SIZES[0], SIZES[-1], len(SIZES)) == (10_000, 10, 100)
    clients = Federation(holdings("digits", alpha=0.1, share=5))
    ours, our_models = clients.run(FedAvg(min_train_nodes=CLIENTS), 2)
    theirs, their_models = clients.run(
        FlowersFedAvg(our_models, min_train_nodes=CLIENTS), 2
    )
    assert len(our_models) == 3
    assert max(furthest(our_models, their_models)) <= 1e-6
    most, count = metrics_apart(ours, theirs)
    assert most <= 1e-6
    assert count >= 6
    assert not any("num-limited" in m for m in ours.train_metrics_clientapp.values())
