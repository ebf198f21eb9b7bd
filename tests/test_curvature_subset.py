"""A Fisher of some examples: which, how many, and right on average."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from flwr_fisher.curvature import Pairs, fisher
from flwr_fisher.curvature.subset import at_most
from flwr_fisher.errors import ConfigurationError, DataError

N = 40


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self):
        return zip(*data().tensors, strict=True)


def data():
    """Numbers from 0, and each of them as its label."""
    x = torch.arange(N, dtype=torch.float32)
    return TensorDataset(x.unsqueeze(1), x.long())


def batches(size=7):
    x, y = data().tensors
    return list(zip(x.split(size), y.split(size), strict=True))


LOADERS = {
    "in order": lambda: DataLoader(data(), batch_size=7),
    "shuffled": lambda: DataLoader(data(), batch_size=7, shuffle=True),
    "by batches": lambda: DataLoader(
        data(),
        sampler=BatchSampler(RandomSampler(data()), 7, drop_last=False),
        batch_size=None,
    ),
    "stream": lambda: DataLoader(Stream(), batch_size=7),
    "list": batches,
    "generator": lambda: iter(batches()),
    "whole batches": lambda: DataLoader(batches(), batch_size=None),
}


def read(loader):
    found = []
    for x, y in loader:
        assert torch.equal(x.squeeze(1).long(), y)
        found += y.tolist()
    return found


@pytest.mark.parametrize("kind", LOADERS)
def test_so_many_are_read_and_never_one_twice(kind):
    found = read(at_most(LOADERS[kind](), 10, seed=0))
    assert len(found) == len(set(found)) == 10
    other = read(at_most(LOADERS[kind](), 10, seed=1))
    assert set(found) != set(other)


@pytest.mark.parametrize("kind", LOADERS)
def test_all_are_read_where_there_are_no_more(kind):
    for examples in (N, N + 1):
        loader = LOADERS[kind]()
        chosen = at_most(loader, examples, seed=0)
        assert chosen is loader or kind == "generator"
        assert sorted(read(chosen)) == list(range(N))


@pytest.mark.parametrize("kind", ["in order", "stream", "list", "whole batches"])
def test_the_choice_hangs_on_the_seed_and_each_is_as_likely(kind):
    counts = torch.zeros(N)
    for seed in range(400):
        found = read(at_most(LOADERS[kind](), 10, seed))
        if not seed % 100:
            assert found == read(at_most(LOADERS[kind](), 10, seed))
        counts[found] += 1
    # 400 draws of 10 in 40: a hundred each, and a deviation of sqrt(400 3/16) = 8.7.
    assert (counts - 100).abs().max() < 4.5 * 8.7
    assert 5 < counts.std() < 12


def test_the_seed_chooses_of_a_shuffling_loader_as_well():
    found = [sorted(read(at_most(LOADERS["shuffled"](), 10, seed=3))) for _ in range(2)]
    assert found[0] == found[1]


def test_only_what_is_chosen_is_loaded():
    class Counted(TensorDataset):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    counted = Counted(*data().tensors)
    list(at_most(DataLoader(counted, batch_size=7), 10, seed=0))
    assert counted.reads == 10


def test_a_samplers_own_choice_is_kept():
    own = list(range(0, N, 2))
    loader = DataLoader(data(), sampler=SubsetRandomSampler(own), batch_size=7)
    assert set(read(at_most(loader, 10, seed=0))) < set(own)
    assert sorted(read(at_most(loader, 20, seed=0))) == own


def test_a_loaders_own_collation_is_kept():
    def negative(rows):
        return -torch.stack([x for x, _ in rows])

    loader = DataLoader(data(), batch_size=7, collate_fn=negative)
    assert all((x <= 0).all() for x in at_most(loader, 10, seed=0))


def test_batches_of_other_lengths_stay_apart():
    """Such as sentences, each batch padded to its own longest."""
    loader = [torch.ones(5, length) for length in (3, 4, 9, 5)]
    chosen = list(at_most(loader, 12, seed=0))
    assert sum(len(x) for x in chosen) == 12
    assert {x.shape[1] for x in chosen} <= {3, 4, 9, 5}


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal"])
@pytest.mark.parametrize("kind", ["list", "generator"])
def test_a_fisher_of_some_is_that_of_a_loader_of_them(kind, structure):
    torch.manual_seed(0)
    model = nn.Linear(1, 3)
    chosen = read(at_most(batches(), 10, seed=3))
    options = {"structure": structure, "tolerance": 0}
    want = fisher(model, [data().tensors[0][chosen]], **options)
    got = fisher(model, LOADERS[kind](), examples=10, seed=3, **options)
    torch.testing.assert_close(got.to_dense(), want.to_dense())


def test_its_mean_over_seeds_is_that_of_all():
    torch.manual_seed(0)
    model = nn.Linear(1, 3)
    loader = DataLoader(TensorDataset(torch.randn(N, 1)), batch_size=8)
    whole = fisher(model, loader, structure="diagonal", tolerance=0).diagonal()
    draws = [
        fisher(
            model, loader, structure="diagonal", tolerance=0, examples=8, seed=seed
        ).diagonal()
        for seed in range(200)
    ]
    for name, want in whole.items():
        values = torch.stack([draw[name] for draw in draws])
        error = values.std(0) / len(draws) ** 0.5
        assert ((values.mean(0) - want).abs() < 4 * error).all()
        assert (values.std(0) > 0.01 * want).all()


def test_what_is_no_number_or_no_loader_is_refused():
    model = nn.Linear(1, 3)
    with pytest.raises(ConfigurationError, match="examples"):
        fisher(model, batches(), examples=0)
    with pytest.raises(DataError, match=r"pass \[inputs\]"):
        fisher(model, torch.ones(4, 1), examples=2)
    with pytest.raises(DataError, match="as tensors, got a str"):
        fisher(model, ["images"], examples=2)
    with pytest.raises(DataError, match="no examples"):
        fisher(model, [], examples=2)


def test_a_stream_of_pairs_is_read_to_its_end_and_no_batch_is_empty():
    assert len(read(at_most(Pairs(iter(batches())), N + 1, seed=0))) == N
    assert all(len(x) for x, _ in at_most(batches(1), 3, seed=0))
