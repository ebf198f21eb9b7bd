"""The language data set, its natural partition and its transformer."""

import math
import warnings
from collections import Counter

import numpy as np
import pytest
import rivals_path  # noqa: F401
import torch
import torch.nn.functional as F
from tasks import (
    PARTITIONS,
    VOCABULARY,
    Transformer,
    load_dataset,
    load_task,
)
from tasks.language import cut, load_language, without_repeats
from tasks.task import _share_out
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import LocalSGD, cross_entropy, score
from flwr_fisher.errors import ConfigurationError, DataError
from flwr_fisher.report import accuracies


def language(**changes):
    arguments = {
        "dataset": "language",
        "model": "transformer",
        "partition": "by-document",
        "num_partitions": 8,
    }
    return load_task(**{**arguments, **changes})


def text(tokens):
    return "".join(VOCABULARY[token] for token in tokens.flatten().tolist())


# --- the text


def test_language():
    data = load_dataset("language")
    assert (data.shape, data.num_outputs) == ((64,), 97)
    assert data.num_classes == len(data.class_names) >= 70
    assert {"assert", "while", "string-methods"} <= set(data.class_names)
    assert len(data.train) > 4000
    assert 0.1 < len(data.test) / len(data.train) < 0.15
    x, y = data.train[[3, 0]]
    assert x.shape == y.shape == (2, 64)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    single = data.train[3]
    assert torch.equal(single[0], x[0])
    assert torch.equal(single[1], y[0])
    # Characters outside the vocabulary are rare.
    assert (data.train.data == 0).float().mean() < 0.01
    first = (data.train.targets == data.class_names.index("assert")).nonzero()[0]
    assert text(data.train.data[first]).startswith('The "assert" statement\n***')


def test_every_document_is_in_both_splits_and_the_test_is_its_end():
    from pydoc_data.topics import topics

    whole = dict(without_repeats(topics))
    data = load_language()
    for index, name in enumerate(data.class_names):
        train, test = (
            text(split.data[split.targets == index])
            for split in (data.train, data.test)
        )
        assert train
        assert test
        # One after the other: no character is in two pieces or in both splits.
        found, want = train + test, whole[name]
        assert len(want) - len(found) in range(65)
        assert (
            found
            == "".join(c if c in VOCABULARY else VOCABULARY[0] for c in want)[
                : len(found)
            ]
        )


def test_the_splits_share_hardly_any_text():
    """As they would if topics kept the paragraphs that other topics have."""
    data = load_language()
    train = text(data.train.data)
    starts = [text(tokens[10:50]) for tokens in data.test.data]
    assert np.mean([start in train for start in starts]) < 0.04


def test_a_paragraph_stays_in_the_shortest_document_that_has_it():
    topics = {
        "all": "A.\n\n   B is\n   long.\n\nC.\n\nA.",
        "b": "B is long.",
        "also-b": "Also.\n\nB is long.",
    }
    assert without_repeats(topics) == [
        ("all", "A.\n\nC."),
        ("also-b", "Also."),
        ("b", "B is long."),
    ]


def test_cutting_documents():
    documents = [("long", "abcdefghijkl"), ("short", "abcde"), ("two", "éb\ncde")]
    data = cut(documents, length=2, held=4)
    assert data.class_names == ("long", "two")
    assert [text(t) for t in data.train.data] == ["abc", "def", "ghi", "\ufffdb\n"]
    assert [text(t) for t in data.test.data] == ["jkl", "cde"]
    assert data.train.targets.tolist() == [0, 0, 0, 1]
    assert data.test.targets.tolist() == [0, 1]
    with pytest.raises(DataError, match="no document has two pieces of 8 characters"):
        cut(documents, length=7, held=4)


# --- by-document


@pytest.mark.parametrize("clients", [1, 8, 20, 60])
def test_every_document_is_at_one_client(clients):
    task = language(num_partitions=clients)
    counts = task.label_histogram()
    assert counts.shape == (clients, task.data.num_classes)
    assert ((counts > 0).sum(dim=0) == 1).all()
    assert torch.equal(counts.sum(dim=0), task.data.train.targets.bincount())
    sizes = [task.num_examples(i) for i in range(clients)]
    assert counts.sum(dim=1).tolist() == sizes
    # No client has more than its fair share by more than one document.
    largest = int(counts.max())
    assert max(sizes) <= sum(sizes) / clients + largest
    if clients <= 8:
        assert max(sizes) < 1.2 * min(sizes)


def test_the_seed_decides_who_has_what():
    first = language(seed=1)
    _share_out.cache_clear()
    np.random.seed(5)  # noqa: NPY002 - the global state must not matter
    assert language(seed=1).parts == first.parts
    assert language(seed=2).parts != first.parts
    # Not only the names of the clients change.
    groups = [
        {frozenset(row.nonzero().flatten().tolist()) for row in task.label_histogram()}
        for task in (first, language(seed=2))
    ]
    assert groups[0] != groups[1]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_other_partitions_share_out_documents_too(partition):
    with warnings.catch_warnings():
        # Few clients with two documents each leave out most documents.
        warnings.filterwarnings("ignore", message=".*no client holds")
        task = language(partition=partition, alpha=1.0)
    used = [index for part in task.parts for index in part]
    assert len(used) == len(set(used))
    assert task.label_histogram().sum() == len(used)


# --- the task


def test_loaders():
    task = language(validation=40)
    everyone = [index for part in task.parts for index in part]
    assert len(everyone) == len(task.data.train) - 40
    batches = list(task.train_loader(2, 16))
    assert {(x.shape[1], y.shape[1]) for x, y in batches} == {(64, 64)}
    rows = Counter(tuple(row) for x, _ in batches for row in x.tolist())
    expected = task.data.train[list(task.parts[2])][0].tolist()
    assert rows == Counter(map(tuple, expected))
    tested = torch.cat([y for _, y in task.test_loader(100)])
    assert torch.equal(tested, task.data.test.data[:, 1:])
    held = list(task.eval_loader(task.validation, 16))
    assert [len(x) for x, _ in held] == [16, 16, 8]
    assert repr(task).startswith("Task(Splits(")
    assert len(repr(task)) < 200


IMAGES = {"dataset": "digits", "partition": "iid"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dataset": "digits", "model": "mlp"}, ConfigurationError, "'by-document'"),
        ({"model": "lenet"}, ConfigurationError, "'lenet' .* use one of transformer$"),
        (IMAGES, ConfigurationError, "'transformer' .* use one of logistic, mlp"),
        ({"num_partitions": 500}, DataError, "fewer clients"),
        ({"num_partitions": 0}, ConfigurationError, "num_partitions"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(changes, error, message):
    with pytest.raises(error, match=message):
        language(**changes)


# --- the model


def small(**changes):
    sizes = {"vocabulary": 7, "length": 5, "width": 8, "layers": 2, "heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer(**{**sizes, **changes})


def test_the_model_s_size_and_calls():
    model = language().make_model()
    block = (64 * 3 + 64 + 256 + 64) + (64 * 64 * 12) + 4 * 64
    assert sum(p.numel() for p in model.parameters()) == (
        97 * 64 + 64 * 64 + 2 * block + 2 * 64 + 97 * 64 + 97
    )
    calls = Counter[str]()
    layers = {k: m for k, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    for key, layer in layers.items():
        layer.register_forward_hook(lambda *_, key=key: calls.update([key]))
    logits = model(torch.zeros(2, 64, dtype=torch.int64))
    assert logits.shape == (2, 64, 97)
    assert calls == dict.fromkeys(layers, 1)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_model_computes_what_its_weights_say():
    """One sequence, position by position and head by head."""
    model = small(layers=1).double()
    w = {k: v.detach() for k, v in model.state_dict().items()}
    tokens = [3, 1, 1, 6]

    def norm(x, name):
        scaled = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    xs = [
        w["tokens.weight"][t] + w["positions.weight"][i] for i, t in enumerate(tokens)
    ]
    seen = [linear(norm(x, "blocks.0.attention_norm"), "blocks.0.qkv") for x in xs]
    for t, x in enumerate(xs):
        heads = []
        for h in (0, 4):
            keys = torch.stack([s[8 + h : 12 + h] for s in seen[: t + 1]])
            values = torch.stack([s[16 + h : 20 + h] for s in seen[: t + 1]])
            heads.append((keys @ seen[t][h : h + 4] / 2).softmax(0) @ values)
        x = x + linear(torch.cat(heads), "blocks.0.out")
        hidden = linear(norm(x, "blocks.0.mlp_norm"), "blocks.0.up")
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        x = x + linear(hidden, "blocks.0.down")
        logits = linear(norm(x, "norm"), "head")
        torch.testing.assert_close(model(torch.tensor([tokens]))[0, t], logits)


@pytest.mark.parametrize("change", [{"heads": 3}, {"layers": 0}, {"vocabulary": 0}])
def test_sizes_that_make_no_model(change):
    ((name, value),) = change.items()
    said = f"{value} {name}" if name != "vocabulary" else f"{name} {value}"
    with pytest.raises(ConfigurationError, match=said):
        small(**change)


def test_the_client_s_loops_and_the_measures_take_tokens():
    task, device = language(num_partitions=60), torch.device("cpu")
    x, y = task.data.test[:100]
    model, test = task.make_model(), DataLoader(TensorDataset(x, y), 32)
    with torch.no_grad():
        logits = model(x)
    want = F.cross_entropy(logits.mT, y)
    torch.testing.assert_close(cross_entropy(logits, y), want)
    right = float((logits.argmax(-1) == y).float().mean())
    loss, accuracy, count = score(model, test, device, cross_entropy)
    assert loss == pytest.approx(float(want), rel=1e-5)
    assert (accuracy, count) == (pytest.approx(right), len(x))
    same = accuracies(model, {"own": model.state_dict()}, test)
    assert same["own"] == pytest.approx(right)
    before = score(model, task.train_loader(0, 8), device, cross_entropy)[0]
    LocalSGD(epochs=2, lr=0.1)(model, task.train_loader(0, 8), device, {})
    assert score(model, task.train_loader(0, 8), device, cross_entropy)[0] < before
