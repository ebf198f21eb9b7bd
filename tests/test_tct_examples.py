"""A TCT client's examples: the same ones in one order, however often they are read."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from virtual import tiny_data

from flwr_fisher.client.jobs.tct_features import classes_in, read_examples
from flwr_fisher.errors import DataError


def examples(loader, partition=0):
    batches = read_examples(loader, torch.nn.Linear(3, 3), partition)
    return torch.cat([batch.inputs.args[0] for batch in batches])


def test_a_loader_that_shuffles_and_augments_gives_the_same_every_time():
    class Noisy(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + torch.randn(3), y

    loader = DataLoader(Noisy(*tiny_data(1).tensors), batch_size=4, shuffle=True)
    torch.manual_seed(1)
    first = examples(loader)
    torch.manual_seed(2)
    assert torch.equal(examples(loader), first)
    assert not torch.equal(examples(loader, partition=1), first)


def test_examples_without_a_label_are_left_out():
    x = torch.randn(5, 3)
    y = torch.tensor([0, -100, 2, -100, -100])
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    assert torch.equal(examples(loader), x[[0, 2]])


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
    batches = read_examples([(torch.randn(2, 3), labels)], torch.nn.Linear(3, 3), 0)
    with pytest.raises(DataError, match=r"integers \[n\] from 0 to 2; got torch"):
        classes_in(batches, 3)


def test_a_loader_without_batches_is_named():
    loader = DataLoader(tiny_data(0, 3), batch_size=4, drop_last=True)
    with pytest.raises(DataError, match="loader of partition-5 has no example"):
        examples(loader, 5)
