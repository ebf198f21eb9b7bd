"""AFL: whatever the split, the head is the pooled data's ridge regression."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord
from nets import MIXES, Mixes
from oracles import randn
from test_strategy_contract import Row
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import (
    LIFTED,
    ask,
    change_array,
    drop_array,
    start,
    tensors_of,
    tiny_client,
    tiny_model,
)

from flwr_fisher.client import FisherClient, make_client_app
from flwr_fisher.errors import ConfigurationError, DataError, StructureError, WireError
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import AFL
from flwr_fisher.tangent import HeadSums, closed_form_head, head_sums
from flwr_fisher.tangent.head import find_head
from flwr_fisher.wire import HeadUpload, arrays_to_tensors

ROW = Row(AFL, {})
TASK = {"job": "head-sums", "head": ""}
N, WIDTH, CLASSES = 90, 7, 3


def backbone(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES, bias=bias)
    ).double()


def data():
    x = randn(1, N, 4, dtype=torch.float64)
    return x, x[:, :3].argmax(1)


def pooled(model, ridge, targets=None):
    """The ridge regression as least squares with rows for its penalty."""
    x, y = data()
    features = model[:2](x).detach()
    wanted = F.one_hot(y, CLASSES).double() if targets is None else targets
    penalty = ridge * features.square().mean() * N
    rows = penalty.sqrt() * torch.eye(WIDTH, dtype=torch.float64)
    if model[2].bias is not None:
        features = torch.cat([features, torch.ones(N, 1)], 1)
        rows = torch.cat([rows, torch.zeros(WIDTH, 1)], 1)
    both = torch.cat([features, rows]), torch.cat([wanted, torch.zeros(WIDTH, CLASSES)])
    return torch.linalg.lstsq(*both).solution.mT


SPLITS = {
    "one client": [list(range(N))],
    "equal": [list(range(i, N, 3)) for i in range(3)],
    "one example": [[0], list(range(1, N))],
    "by class": [(data()[1] == c).nonzero().flatten().tolist() for c in range(3)],
    "ninety clients": [[i] for i in range(N)],
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_head_is_the_pooled_regression(split, bias):
    model, (x, y) = backbone(bias), data()
    every = [
        head_sums(model, DataLoader(TensorDataset(x[own], y[own]), 32), "2")
        for own in SPLITS[split]
    ]
    for ridge in (1e-6, 1e-2, 1.0):
        found = closed_form_head(HeadSums.total(every), bias=bias, ridge=ridge)
        whole = torch.cat([each.reshape(CLASSES, -1) for each in found], 1)
        torch.testing.assert_close(whole, pooled(model, ridge), rtol=1e-6, atol=1e-8)


def test_numbers_are_regressed_on_as_they_are():
    model, (x, _) = backbone(), data()
    targets = randn(5, N, CLASSES, dtype=torch.float64)
    sums = head_sums(model, [(x, targets)], "2")
    whole = torch.cat(
        [e.reshape(CLASSES, -1) for e in closed_form_head(sums, bias=True, ridge=0.1)],
        1,
    )
    torch.testing.assert_close(whole, pooled(model, 0.1, targets))


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (
            (torch.zeros(2, 4), torch.tensor([0, 3])),
            "from 0 to 3 do not fit 2 rows and 3",
        ),
        ((torch.zeros(2, 4), torch.zeros(2, 2)), "of 3 outputs"),
        (torch.zeros(2, 4), "must hold a tensor of labels"),
    ],
)
def test_labels_that_do_not_fit_are_refused(batch, says):
    with pytest.raises(DataError, match=says):
        head_sums(backbone().float(), [batch], "2")


def test_a_head_that_is_called_twice_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x):
            return self.head(self.head(x))

    with pytest.raises(StructureError, match="called 2 times"):
        head_sums(Twice(), [(torch.zeros(2, 4), torch.zeros(2).long())], "head")
    with pytest.raises(StructureError, match="the last one would be its head"):
        find_head(nn.Conv2d(1, 2, 3), None)  # it is not TCT that replaces it


# The strategy


def run(app=None, clients=3, arrays=None, **own):
    return start(ROW(**{"policy": LIFTED, **own}), app, clients, arrays)


# What arrives


def uploaded():
    (record,) = ask(tiny_client(1), config=TASK).content.array_records.values()
    return record


LIKE = shared_state(tiny_model())
BAD = {
    "no gram": (drop_array("head/gram"), "'head/gram': missing"),
    "shape": (change_array("head/cross", lambda a: a.T), "'head/cross'"),
    "negative": (change_array("head/gram", lambda a: -a), "'head/gram': no rows"),
    "indefinite": (change_array("head/gram", lambda a: a[::-1] * 1), "'head/gram'"),
    "count": (change_array("head/count", lambda a: a * 0), "'head/count'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_upload_is_refused_by_name(case):
    tamper, says = BAD[case]
    reply = ask(tiny_client(1), config=TASK)
    tamper(reply.content)
    (record,) = reply.content.array_records.values()
    with pytest.raises(WireError, match=says):
        HeadUpload.read(record, LIKE)


@pytest.mark.parametrize(
    ("weight", "bias", "says"),
    [
        ("9.weight", None, "not the weight of a linear layer: '9.weight'"),
        ("3.weight", "1.bias", "not the head's bias: '1.bias'"),
    ],
)
def test_a_head_that_there_is_not_is_refused(weight, bias, says):
    good = HeadUpload.read(uploaded(), LIKE)
    record = HeadUpload.of(weight, bias, "categorical", good.sums).to_arrays()
    with pytest.raises(WireError, match=says):
        HeadUpload.read(record, LIKE)


def test_what_a_policy_may_do_keeps_the_solution():
    good = HeadUpload.read(uploaded(), LIKE)
    solve = partial(closed_form_head, bias=True, ridge=0.1)
    (half,) = (good.scaled(dict.fromkeys(good.curvature_norms(), 0.5), LIKE),)
    for left, right in zip(solve(good.sums), solve(half.sums), strict=True):
        torch.testing.assert_close(left, right)
    double = good.reweighted(2.0).sums
    assert double.count == 2 * good.sums.count
    torch.testing.assert_close(double.gram, 2 * good.sums.gram)
    assert tensors_of(ask(tiny_client(1), config=TASK)).keys() == {
        "head/format",
        "head/gram",
        "head/cross",
        "head/square",
        "head/count",
    }


@pytest.mark.parametrize(("bias", "ridge"), [(True, 1e-3), (False, 1.0)])
def test_the_strategys_head_is_the_pooled_regression(bias, ridge):
    x, y = data()

    def client_fn(context):
        own = SPLITS["equal"][int(context.node_config["partition-id"])]
        loader = DataLoader(TensorDataset(x[own].float(), y[own]), batch_size=32)
        return FisherClient(backbone(bias).float(), loader, device="cpu")

    begin = shared_state(backbone(bias).float())
    result = run(make_client_app(client_fn), 3, ArrayRecord(begin), ridge=ridge)
    found = arrays_to_tensors(result.arrays)
    assert all(found[k].dtype == value.dtype for k, value in begin.items())
    heads = [found[k].reshape(CLASSES, -1) for k in begin if k.startswith("2.")]
    want = pooled(backbone(bias), ridge).float()
    torch.testing.assert_close(torch.cat(heads, 1), want, rtol=1e-4, atol=1e-5)


def test_other_weights_than_the_sums_own_are_refused():
    with pytest.raises(ConfigurationError, match=r"^AFL needs weighted_by_key"):
        AFL(weighted_by_key="trust")


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_features_that_depend_on_other_examples_are_refused(mix):
    x = randn(3, 9, 3)
    with pytest.raises(StructureError, match="depend on the other examples"):
        head_sums(nn.Sequential(Mixes(mix)), [(x, torch.arange(9) % 3)], "0")
