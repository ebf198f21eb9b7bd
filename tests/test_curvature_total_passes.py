"""How many passes a Fisher takes over all examples, and a client's own bound."""

import pytest
import torch
from oracles import randn, seeded
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from flwr_fisher.curvature import FisherOptions, fisher
from flwr_fisher.curvature.estimate.engine import Engine
from flwr_fisher.errors import ConfigurationError

COUNT, CLASSES = 320, 6
DATA = TensorDataset(randn(1, COUNT, 5), torch.arange(COUNT) % CLASSES)


def model(scale=0.01):
    """Return one that is as sure of its classes as `scale` is large."""
    net = seeded(
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    )
    for parameter in net[-1].parameters():
        parameter.data.mul_(scale)
    return net


class Counted(nn.Module):
    """A model that tells what it is called with."""

    def __init__(self, net, tell):
        super().__init__()
        self.net, self.tell = net, tell

    def forward(self, x):
        self.tell(x.detach())
        return self.net(x)


@pytest.fixture
def taken(monkeypatch):
    """Return the engines that sums were taken by."""
    engines, own = [], Engine.__init__

    def init(self, *args, **options):
        own(self, *args, **options)
        engines.append(self)

    monkeypatch.setattr(Engine, "__init__", init)
    return engines


def by_default(net, loader, count=COUNT, **more):
    return fisher(net, loader, **FisherOptions(**more).for_client(count))


@pytest.mark.parametrize("batch", [8, 64, 320])
def test_unsure_a_client_takes_an_eighth_of_its_examples(taken, batch):
    by_default(model(), DataLoader(DATA, batch, shuffle=True))
    (engine,) = taken
    assert engine.count == COUNT // 8
    assert engine.passes == COUNT // 2


def test_sure_it_takes_half_of_them(taken):
    by_default(model(1e4), DataLoader(DATA, 64, shuffle=True))
    (engine,) = taken
    assert engine.count > 0.4 * COUNT
    assert engine.passes <= COUNT // 2 + 64


@pytest.mark.parametrize("structure", ["diagonal", "block", "dense"])
def test_every_structure_is_bounded(taken, structure):
    options = FisherOptions(max_positions=None).for_client(COUNT)
    fisher(model(), DataLoader(DATA, 32), structure=structure, **options)
    (engine,) = taken
    assert COUNT // 2 - 10 <= engine.passes <= COUNT // 2 + 10
    assert engine.count == (COUNT // 20 if structure == "dense" else COUNT // 8)


def test_two_readings_share_the_passes(taken):
    fisher(model(), DataLoader(DATA, 32), structure="ekfac", total_passes=COUNT)
    assert [engine.passes <= COUNT // 2 + 10 for engine in taken] == [True, True]


@pytest.mark.parametrize(
    ("how", "count"),
    [({"expectation": "sampled"}, 160), ({"expectation": "empirical"}, 160)],
)
def test_one_pass_an_example_leaves_room_for_half_of_them(taken, how, count):
    fisher(model(), DataLoader(DATA, 64), total_passes=COUNT, **how)
    assert taken[0].count == count


def test_they_are_random_ones_of_a_loader_that_has_an_order():
    ordered = DataLoader(Subset(DATA, range(COUNT)), 16)
    seen = []
    net = Counted(model(), seen.append)
    by_default(net, ordered)
    rows = {tuple(x) for batch in seen for x in batch.tolist()}
    where = [i for i, x in enumerate(DATA.tensors[0].tolist()) if tuple(x) in rows]
    assert len(where) < COUNT / 2
    assert max(where) > 0.9 * COUNT


@pytest.mark.parametrize("loader", ["batches", "a batch sampler of lists"])
def test_a_loader_that_cannot_be_reordered_gives_an_eighth_at_random(taken, loader):
    batches = [DATA[range(k, k + 32)] for k in range(0, COUNT, 32)]
    if loader != "batches":
        lists = [list(range(k, k + 32)) for k in range(0, COUNT, 32)]
        batches = DataLoader(DATA, batch_sampler=lists)
    by_default(model(1e4), batches)
    assert taken[0].count == COUNT // 8


def test_of_many_examples_a_client_takes_a_thousand(taken):
    data = TensorDataset(randn(2, 5000, 5), torch.zeros(5000, dtype=torch.long))
    by_default(model(), DataLoader(data, 64), 5000)
    assert taken[0].count == 1000


def test_of_few_it_takes_at_least_32(taken):
    by_default(model(), DataLoader(Subset(DATA, range(40)), 64), 40)
    assert taken[0].count == 32


def test_auto_is_refused_where_nobody_says_how_many_examples_a_client_has():
    with pytest.raises(ConfigurationError, match="FisherOptions"):
        fisher(model(), DataLoader(DATA, 64), examples="auto")


def test_what_is_asked_for_means_what_it_says(taken):
    by_default(model(), DataLoader(DATA, 64), examples=250)
    by_default(model(), DataLoader(DATA, 64), examples=None)
    assert [engine.count for engine in taken] == [250, COUNT]


def test_where_the_count_is_not_known_there_is_no_such_bound(taken):
    by_default(model(), iter([DATA[:]]), None)
    assert taken[0].count == COUNT


def test_a_seed_repeats_it():
    found = [
        fisher(model(), DataLoader(DATA, 64), seed=seed, total_passes=100).to_dense()
        for seed in (1, 1, 2)
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("wrong", [0, 1.5])
def test_a_number_of_passes_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="total_passes"):
        fisher(model(), DataLoader(DATA, 64), total_passes=wrong)
