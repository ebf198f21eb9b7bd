"""{forms of batches} x {methods}: a round ends where it ends on pairs of tensors."""

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.utils.data import DataLoader, Dataset
from virtual import close

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.strategies import FAGH, TCT, FedFish, FedFisherOneShot
from flwr_fisher.testing import LocalGrid

N, D, C, SIZE = 12, 4, 3, 4
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, D, generator=G), torch.randint(0, C, (N,), generator=G)


class Net(nn.Module):
    """Takes one or two inputs, by position or by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Linear(D, 5), nn.Linear(5, C)

    def forward(self, left, right=None):
        x = left if right is None else left - right
        return self.head(self.hidden(x).tanh())


class Rows(Dataset):
    """Positions of examples; a collator makes the batch."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return i


FORMS = {
    "two inputs": (lambda x, y: (2 * x, x, y), None),
    "mapping": (lambda x, y: {"left": 2 * x, "right": x, "label": y}, None),
    "batch_fn": (
        lambda x, y: {"a": [x, "x"], "class": y},
        lambda batch: (batch["a"][0], batch["class"]),
    ),
}
METHODS = {
    "FedFisher": (FedFisherOneShot, 1),
    "FedFish": (FedFish, 1),
    "FAGH": (lambda: FAGH(lr=0.1, rho=1.0), 1),
    "TCT": (lambda: TCT(stage1_rounds=1, num_features=20, local_steps=3), 3),
}


def run(method, where, make=lambda x, y: (x, y), batch_fn=None):
    def batch(rows):
        return make(X[rows], Y[rows])

    def client_fn(context):
        data = DataLoader(Rows(), SIZE, collate_fn=batch)
        train = LocalSGD(lr=0.1)
        options = {"batch_fn": batch_fn, "train_fn": train, "state_dir": where}
        return FisherClient(Net(), data, data, device="cpu", **options)

    strategy, rounds = METHODS[method]
    grid = LocalGrid(make_client_app(client_fn), 2)
    return strategy().start(grid, ArrayRecord(Net().state_dict()), num_rounds=rounds)


@pytest.mark.parametrize("method", METHODS)
def test_a_round_ends_where_it_ends_on_pairs(method, tmp_path):
    want = run(method, tmp_path / "pairs")
    for name, form in FORMS.items():
        got = run(method, tmp_path / name, *form)
        assert close(got.arrays, want.arrays), name
        assert got.evaluate_metrics_clientapp == want.evaluate_metrics_clientapp
