"""Batches as mappings, and of any form through `batch_fn`: the same bits as pairs."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from virtual import (
    ask,
    metrics_of,
    same_bits,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app, score
from flwr_fisher.curvature import (
    Pairs,
    fisher,
    gradient,
    gradient_and_hvp,
)
from flwr_fisher.errors import DataError
from flwr_fisher.report import accuracies
from flwr_fisher.strategies import FAGH, FedAvg
from flwr_fisher.testing import LocalGrid

CPU = torch.device("cpu")


class Named(Dataset):
    """The same examples, with names; a text is beside them, as Hugging Face has it."""

    def __init__(self, data, names=("img", "label"), extra=True):
        self.data, self.names, self.extra = data, names, extra

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        row = dict(zip(self.names, self.data[i], strict=True))
        return row | ({"path": f"{i}.png"} if self.extra else {})


class Odd(Named):
    """Examples that only a `batch_fn` can tell apart."""

    def __getitem__(self, i):
        x, y = self.data[i]
        return {"left": x, "right": -x, "class": y}


def pair_of(batch):
    return batch["left"], batch["class"]


FORMS = {
    "pairs": (lambda data: data, None),
    "named": (Named, None),
    "odd": (Odd, pair_of),
}
NEW = ("named", "odd")


def loaders(form, holding=2, **options):
    """Return the training data and the held-out data, and `batch_fn`."""
    make, batch_fn = FORMS[form]
    options.setdefault("shuffle", True)
    data = make(tiny_data(holding))
    return DataLoader(data, 4, **options), DataLoader(data, 8), batch_fn


def client_of(form, holding=2, **options):
    train, val, batch_fn = loaders(form, holding)
    options.setdefault("train_fn", LocalSGD(lr=0.1, epochs=2))
    options.setdefault("device", "cpu")
    return FisherClient(tiny_model(), train, val, batch_fn=batch_fn, **options)


CONFIGS = {
    "few": {"structure": "kfac", "examples": 5},
    "batches": {"job": "fedfish"},
    "last-epoch": {"job": "fedfish", "fisher-source": "last-epoch"},
    "sum": {"job": "fedfish", "reduction": "sum"},
    "plain": {},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_training_and_curvature_are_the_same_bits(config):
    if config.get("fisher-source") == "last-epoch":
        options = {"train_fn": LocalSGD(lr=0.1, epochs=2)}
    else:
        options = {}
    wanted = ask(client_of("pairs", **options), config=config)
    for form in NEW:
        found = ask(client_of(form, **options), config=config)
        assert metrics_of(found) == metrics_of(wanted)
        (one,), (other,) = (m.content.array_records.values() for m in (found, wanted))
        assert same_bits(one, other)


EVALUATIONS = {
    "validation": {},
}


@pytest.mark.parametrize("form", NEW)
@pytest.mark.parametrize("config", EVALUATIONS.values(), ids=EVALUATIONS)
def test_evaluation_gives_the_same_numbers(form, config):
    train_fn = LocalSGD(lr=0.1)
    wanted, found = (
        ask(client_of(each, train_fn=train_fn), config=config, kind="evaluate")
        for each in ("pairs", form)
    )
    assert metrics_of(found) == metrics_of(wanted)


@pytest.mark.parametrize("method", [FAGH, FedAvg])
def test_every_method_ends_at_the_same_model(method, tmp_path):
    results = []
    for each in ("pairs", "odd"):

        def client_fn(context, each=each):
            partition = int(context.node_config["partition-id"])
            where = tmp_path / each / str(partition)
            options = {"train_fn": LocalSGD(lr=0.1), "state_dir": where}
            return client_of(each, partition, **options)

        grid = LocalGrid(make_client_app(client_fn), 3)
        results.append(method().start(grid, tiny_arrays(), num_rounds=2))
    assert same_bits(results[0].arrays, results[1].arrays)


def test_functions_take_mappings_and_pairs():
    plain, named, odd = (loaders(form, shuffle=False)[0] for form in FORMS)
    model, loss_fn = tiny_model(), nn.functional.cross_entropy
    params = {"a": model.state_dict()}
    for loader in (named, Pairs(named), Pairs(odd, pair_of)):
        for examples in (None, 5):
            options = {"structure": "kfac", "examples": examples}
            one, other = (fisher(model, data, **options) for data in (plain, loader))
            pairs = zip(one.tensors(), other.tensors(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        for function in (gradient, gradient_and_hvp):
            assert repr(function(model, plain)) == repr(function(model, loader))
        one, other = (score(model, data, CPU, loss_fn) for data in (plain, loader))
        assert one == other
        one, other = (accuracies(model, params, data) for data in (plain, loader))
        assert one == other


def test_a_stream_of_mappings_has_a_subset():
    batches = list(DataLoader(Named(tiny_data(3)), 4))
    one = fisher(tiny_model(), batches, examples=5)
    other = fisher(tiny_model(), list(DataLoader(tiny_data(3), 4)), examples=5)
    assert torch.equal(one.to_dense(), other.to_dense())


def test_a_train_fn_of_ones_own_is_given_its_loader():
    seen = []

    def train_fn(model, loader, device, config):
        seen.append((loader, next(iter(loader)).keys()))
        return {}

    client = client_of("odd", train_fn=train_fn)
    ask(client, config={"structure": "kfac"})
    assert isinstance(seen[0][0], DataLoader)
    assert seen[0][1] == {"left", "right", "class"}


X, Y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"img": X, "depth": X, "label": Y}, "mapping of 'img', 'depth', 'label'"),
        ({"img": X, "label": [0, 1]}, "must hold a tensor of labels"),
        (X, "one is a Tensor"),
        ((["a"], Y), "there is no tensor"),
    ],
)
def test_what_cannot_be_told_is_named_with_the_way_out(batch, text):
    client = FisherClient(tiny_model(), [batch], device="cpu", train_fn=LocalSGD())
    client.problem.trainloader = Rows([batch])
    with pytest.raises(DataError, match=text) as raised:
        ask(client)
    assert "batch_fn=... to FisherClient or fisher_arrays" in str(raised.value)


class Rows(list):
    """A list of batches that says how many examples there are."""

    dataset = range(2)


@pytest.mark.parametrize(
    ("returned", "text"), [(X, "a Tensor"), ((X, Y, Y), "a tuple of 3")]
)
def test_what_batch_fn_must_return(returned, text):
    batches = DataLoader(tiny_data(2), 4)
    client = FisherClient(tiny_model(), batches, batch_fn=lambda batch: returned)
    with pytest.raises(DataError, match=f"batch_fn must return .*{text}"):
        ask(client)


class Stream(IterableDataset):
    def __iter__(self):
        yield from tiny_data(2)


def test_a_stream_without_a_length_is_counted():
    """One that begins anew each time; its count and its curvature are all examples'."""
    client = tiny_client(2)
    client.problem.trainloader = DataLoader(Stream(), batch_size=4)
    reply = ask(client, config={"job": "fedfish", "reduction": "sum"})
    assert metrics_of(reply)["num-examples"] == 12
    other = tiny_client(2)
    wanted = ask(other, config={"job": "fedfish", "reduction": "sum"})
    (one,), (two,) = (m.content.array_records.values() for m in (reply, wanted))
    assert same_bits(one, two)


def test_a_generator_is_refused_at_once():
    client = tiny_client(2)
    client.problem.trainloader = (batch for batch in DataLoader(tiny_data(2), 4))
    with pytest.raises(DataError, match="a generator, which can be read only once"):
        ask(client, config={"structure": "kfac"})
