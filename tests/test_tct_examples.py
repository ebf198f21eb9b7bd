"""A TCT client's examples: in one order, and of one digest, however they come."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from virtual import tiny_data

from flwr_fisher.client.jobs.tct_features import read_examples
from flwr_fisher.errors import DataError


def examples(loader, partition=0):
    return read_examples(loader, torch.nn.Linear(3, 3), partition)


def inputs_of(examples):
    ((inputs, _),) = examples.parts
    return inputs.args[0]


def test_examples_are_the_same_in_whatever_order_and_batches_they_come():
    data = tiny_data(3)
    plain = examples(DataLoader(data, batch_size=4))
    for options in (
        {"batch_size": 5, "shuffle": True},
        {"batch_size": 1},
        {
            "batch_size": 4,
            "shuffle": True,
            "generator": torch.Generator().manual_seed(7),
        },
    ):
        other = examples(DataLoader(data, **options))
        assert other.digest == plain.digest
        assert torch.equal(inputs_of(other), inputs_of(plain))
        assert torch.equal(other.labels, plain.labels)
    pairs = {(*x.tolist(), int(y)) for x, y in data}
    again = zip(inputs_of(plain).tolist(), plain.labels.tolist(), strict=True)
    assert {(*x, y) for x, y in again} == pairs


def test_other_examples_have_another_digest():
    data = tiny_data(3)
    x, y = data.tensors
    relabelled, moved = y.clone(), x.clone()
    relabelled[0] = (relabelled[0] + 1) % 3
    moved[2, 1] += 1e-6
    sets = [
        TensorDataset(x, y),
        TensorDataset(x, relabelled),
        TensorDataset(moved, y),
        TensorDataset(x[1:], y[1:]),
        TensorDataset(torch.cat([x, x[:1]]), torch.cat([y, y[:1]])),
        TensorDataset(x.double(), y),
    ]
    digests = [examples(DataLoader(d, batch_size=4)).digest for d in sets]
    assert len(set(digests)) == len(sets)
    narrow = examples(DataLoader(TensorDataset(x, y.int()), batch_size=4)).digest
    assert narrow == digests[0]  # they are read as int64


def test_a_loader_that_augments_gives_the_same_every_time():
    class Noisy(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + torch.randn(3), y

    loader = DataLoader(Noisy(*tiny_data(1).tensors), batch_size=4, shuffle=True)
    torch.manual_seed(1)
    first = examples(loader)
    torch.manual_seed(2)
    assert examples(loader).digest == first.digest
    assert examples(loader, partition=1).digest != first.digest


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0, 3]),
        torch.tensor([-1, 0]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([[0], [1]]),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels):
    found = examples([(torch.randn(2, 3), labels)])
    with pytest.raises(DataError, match=r"integers \[n\] from 0 to 2; got torch"):
        found.check_classes(3)


def test_a_loader_without_batches_is_named():
    loader = DataLoader(tiny_data(0, 3), batch_size=4, drop_last=True)
    with pytest.raises(DataError, match="loader of partition 5 has no example"):
        examples(loader, 5)
