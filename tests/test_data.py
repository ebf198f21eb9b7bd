"""Batches and loaders: what the contract promises is right, all else is named.

The oracle of a reading is the pair ``(inputs, labels)`` that was put into the batch.
"""

from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F
from oracles import relative
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from virtual import ask, metrics_of, same_bits, tiny_client

from flwr_fisher.client import FisherClient, LocalSGD, cross_entropy, score
from flwr_fisher.curvature import (
    Batch,
    FisherOptions,
    Inputs,
    MappedLoader,
    fisher,
    gradient,
    gradient_and_hvp,
)
from flwr_fisher.curvature.data import check_classes, count_labels, read, some_of
from flwr_fisher.errors import DataError, StructureError
from flwr_fisher.tangent import TangentFeatures, head_sums

CPU = torch.device("cpu")
N, D, C = 12, 5, 3
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, D, generator=G), torch.randint(0, C, (N,), generator=G)
MODEL = nn.Linear(D, C)


# Batches


class Two(nn.Module):
    """A model of two inputs, by position or by name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, C)

    def forward(self, left, right=None):
        return self.layer(left if right is None else left - right)


class AnyName(Two):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


FORMS = {
    "pair": lambda x, y: (x, y),
    "three": lambda x, y: [2 * x, x, y],
    "mapping": lambda x, y: {"left": 2 * x, "right": x, "labels": y},
    "another name": lambda x, y: {"img": x, "label": y, "path": ["a"] * len(x)},
    "beside": lambda x, y: {"left": x, "index": torch.arange(len(x)), "label": y},
    "inputs by name": lambda x, y: ({"left": 2 * x, "right": x}, y),
    "uint8": lambda x, y: (x, y.to(torch.uint8)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_a_batch_is_the_same_inputs_and_labels(form):
    model = Two()
    made = read(form(X, Y), model)
    assert torch.allclose(made.inputs(model), model(X), atol=1e-6)
    assert torch.equal(made.labels, Y)


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (lambda x, y: {"a": x, "b": x, "label": y}, "'b'.*none of these is an arg"),
        (lambda x, y: {"left": x, "label": y, "labels": y}, "two entries of labels"),
        (lambda x, y: {"label": y}, "no tensor of inputs"),
        (lambda x, y: (["a"] * len(x), y), "no tensor"),
        (lambda x, y: (x, x[:-1], y), "first dimensions"),
        (lambda x, y: (x, y[0]), "12 rows of inputs, and labels of shape"),
        (lambda x, y: object(), "no tensor"),
    ],
)
def test_what_is_no_batch_is_named_with_the_way_out(make, culprit):
    with pytest.raises(DataError, match=culprit) as raised:
        read(make(X, Y), Two())
    assert "batch_fn=... to FisherClient or fisher_arrays" in str(raised.value)


@pytest.mark.parametrize("loader", [X, {"left": X, "label": Y}])
def test_a_batch_in_place_of_a_loader_is_refused(loader):
    with pytest.raises(DataError, match="the loader is one batch"):
        fisher(MODEL, loader)


class Annotated(torch.Tensor):
    """As MONAI's MetaTensor, which has rules of its own for slices."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.__getitem__, torch.clone, torch.cat):
            raise TypeError(f"{function} of annotated tensors")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_of_tensor_is_the_tensor_that_it_holds():
    made = read((X.as_subclass(Annotated), Y.as_subclass(Annotated)), MODEL)
    assert {type(made.labels), *map(type, made.inputs.tensors)} == {torch.Tensor}
    assert torch.equal(made.inputs.tensors[0], X)
    assert torch.equal(made.labels, Y)


@pytest.mark.parametrize("batch", [X, {"img": X, "fine_label": Y}])
def test_labels_under_another_name_need_a_batch_fn(batch):
    with pytest.raises(DataError, match="'label'"):
        gradient(MODEL, [batch])


def test_a_model_that_takes_any_name_gets_all_tensors_by_name():
    batch = {"left": 2 * X, "right": X, "labels": Y, "path": ["a"] * N}
    assert set(read(batch, AnyName()).inputs.kwargs) == {"left", "right"}


def ForCausalLMLoss():  # noqa: N802
    """As transformers names it."""


class OfType(Two):
    loss_type = "ForCausalLM"


class ByDefault(Two):
    """As GPT-2."""

    loss_type, loss_function = None, staticmethod(ForCausalLMLoss)


@pytest.mark.parametrize("causal", [OfType, ByDefault])
def test_a_causal_models_labels_are_shifted_by_one(causal):
    tokens = (X.abs() * 10).long()
    made = read({"left": tokens, "labels": tokens}, causal())
    assert torch.equal(made.labels[:, :-1], tokens[:, 1:])
    assert (made.labels[:, -1] == -100).all()


class Returns(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(D, C), form

    def forward(self, x):
        return self.form(self.layer(x))


class Named(dict):
    """As transformers' ModelOutput: a dict with attributes."""

    def __getattr__(self, name):
        return self[name]


def test_outputs_are_a_tensor_or_have_logits():
    for form in (lambda o: {"logits": o, "x": o}, lambda o: Named(logits=o, loss=None)):
        model = Returns(form)
        want = fisher(model.layer, [X], "diagonal").trace()
        assert fisher(model, [X], "diagonal").trace() == want
    with pytest.raises(StructureError, match=r"\.logits, but it returned a tuple"):
        fisher(Returns(lambda o: (o, 2 * o)), [X])


# A batch_fn


def odd(loader):
    """Return the same batches in a form that only a `batch_fn` can tell."""
    return [{"left": x, "right": -x, "class": y} for x, y in loader]


def plain(model, loader, device, config):
    """Return the metrics of a loop that passes on the loader that it got."""
    assert isinstance(next(iter(loader)), dict) or not config.get("raw")
    return LocalSGD(lr=0.1, epochs=2)(model, loader, device, config)


CONFIGS = {
    "kfac": {"structure": "kfac", "examples": 5},
    "batches": {"job": "fedfish", "reduction": "sum"},
    "last-epoch": {"job": "fedfish", "source": "last-epoch"},
    "plain": {"report-local": True},
    "own loop": {"structure": "diagonal", "raw": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_fn_gives_the_same_bits_as_pairs(name):
    train_fn = plain if name == "own loop" else LocalSGD(lr=0.1, epochs=2)
    clients = [tiny_client(2, train_fn=train_fn) for _ in range(2)]
    pairs = list(DataLoader(clients[0].problem.counted.loader.dataset, 4))
    replies = []
    for loader, batch_fn in ((pairs, None), (odd(pairs), itemgetter("left", "class"))):
        config = {k: v for k, v in CONFIGS[name].items() if k != "raw" or batch_fn}
        client = FisherClient(
            tiny_client().problem.model, loader, train_fn=train_fn, batch_fn=batch_fn
        )
        replies.append(ask(client, config=config))
    assert metrics_of(replies[0]) == metrics_of(replies[1])
    (one,), (other,) = (r.content.array_records.values() for r in replies)
    assert same_bits(one, other)


def test_a_batch_fn_that_fails_or_returns_something_else_is_named():
    for function, text in (
        (lambda batch: X, "a tensor"),
        (lambda batch: (X, Y, Y), "a tuple of 3"),
        (lambda batch: batch["img"], r"batch_fn fails on a batch.*'left'.*KeyError"),
    ):
        with pytest.raises(DataError, match=text):
            gradient(MODEL, MappedLoader(odd([(X, Y)]), function))


# Loaders


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Iterated:
    """A loader that has nothing but `__iter__`, and counts how it is used."""

    def __init__(self, batches):
        self.batches, self.begun, self.given = batches, 0, 0

    def __iter__(self):
        self.begun += 1
        for batch in self.batches:
            self.given += 1
            yield batch


def test_a_loader_is_iterated_once_and_nothing_else():
    batches = list(zip(X.split(4), Y.split(4), strict=True))
    some = FisherOptions.full(examples=5)
    for read_it in (
        fisher,
        lambda m, loader: fisher(m, loader, options=some, num_examples=N),
        gradient,
        gradient_and_hvp,
        lambda m, loader: score(m, loader, CPU, cross_entropy),
    ):
        loader = Iterated(batches)
        read_it(MODEL, loader)
        assert (loader.begun, loader.given) == (1, 3)


def test_without_a_number_the_first_examples_are_taken_and_no_more_are_read():
    loader = Iterated(zip(X.split(4), Y.split(4), strict=True))
    want = fisher(MODEL, [(X[:5], Y[:5])], options=FisherOptions.full(tolerance=0))
    got = fisher(MODEL, loader, options=FisherOptions.full(examples=5, tolerance=0))
    assert loader.given == 2
    assert relative(got.to_dense(), want.to_dense()) < 1e-6


@pytest.mark.parametrize("size", [1, 7, 64, 400])
@pytest.mark.parametrize("wanted", [1, 40, 399, 400, 1000])
def test_of_each_batch_the_same_share_is_taken(size, wanted):
    x = torch.arange(400.0).unsqueeze(1)
    batches = [Batch(Inputs((part,)), part.squeeze(1)) for part in x.split(size)]
    chosen = list(some_of(batches, wanted, 400, seed=3))
    rows = torch.cat([batch.inputs.args[0] for batch in chosen]).squeeze(1)
    assert torch.equal(rows, torch.cat([batch.labels for batch in chosen]))
    assert len(set(rows.tolist())) == len(rows) == min(wanted, 400)
    # In a sorted loader, each tenth of the data gives a tenth, but for rounding.
    tenths = torch.histc(rows, 10, 0, 400)
    assert (tenths - len(rows) / 10).abs().max() <= max(2, min(size, 40) / 4)
    assert all(len(batch) >= min(size, len(rows)) for batch in chosen[:-1])


def test_each_example_has_the_same_chance():
    batches = [
        Batch(Inputs((part.unsqueeze(1),))) for part in torch.arange(20).split(3)
    ]
    counts = torch.zeros(20)
    for seed in range(2000):
        for batch in some_of(batches, 5, 20, seed):
            counts[batch.inputs.args[0].squeeze(1)] += 1
    # 500 each in the mean, with a deviation of 19.
    assert (counts - 500).abs().max() < 90


def test_texts_of_unlike_lengths_are_chosen_too():
    batches = [Batch(Inputs((torch.ones(4, n),)), Y[:4]) for n in (3, 5) * 5]
    chosen = list(some_of(batches, 20, 40, seed=0))
    assert sum(map(len, chosen)) == 20
    assert {b.inputs.args[0].shape[1] for b in chosen} == {3, 5}


def test_a_stream_is_counted_by_its_first_epoch():
    client = tiny_client(2)
    client.problem.trainloader = DataLoader(Stream(), 4)
    client.problem.model = nn.Linear(D, C)
    client.problem.load = lambda params: client.problem
    assert client.problem.count_examples(0) == N


ONCE = {
    "generator": lambda: (batch for batch in [(X, Y)]),
    "_SingleProcessDataLoaderIter": lambda: iter(DataLoader(TensorDataset(X, Y), 4)),
}


@pytest.mark.parametrize("name", ONCE)
def test_what_gives_its_batches_once_is_refused_before_anything_trains(name):
    def train_fn(*arguments):
        raise AssertionError

    client = FisherClient(tiny_client().problem.model, ONCE[name](), train_fn=train_fn)
    with pytest.raises(DataError, match=f"the loader is a {name}, which gives"):
        ask(client, config={"structure": "kfac"})


# Labels


LABELS = torch.tensor([[1, 2, -100], [0, -100, -100], [2, 1, 0], [-100, -100, -100]])
TOKENS = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6], [1, 1, 1]])
EXACT = FisherOptions.full(tolerance=0)


def token_net():
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))


def masked_fisher(model):
    """Return the Fisher's diagonal over the labelled positions alone, in loops."""
    model = model.double().eval()
    params = dict(model.named_parameters())
    total = {k: torch.zeros_like(p) for k, p in params.items()}
    examples = [i for i in range(len(TOKENS)) if (LABELS[i] != -100).any()]
    for i in examples:
        log_p = model(TOKENS[i : i + 1]).log_softmax(-1)[0]
        for t in range(3):
            if LABELS[i, t] == -100:
                continue
            for c in range(3):
                rows = torch.autograd.grad(
                    log_p[t, c], list(params.values()), retain_graph=True
                )
                for sums, row in zip(total.values(), rows, strict=True):
                    sums += log_p[t, c].exp().detach() * row.square()
    return {k: v / len(examples) for k, v in total.items()}


def test_positions_without_a_label_do_not_count():
    model = token_net()
    got = fisher(model, [(TOKENS, LABELS)], "diagonal", options=EXACT).diagonal()
    for name, want in masked_fisher(model).items():
        assert relative(got[name], want) < 1e-5


@pytest.mark.parametrize(
    ("structure", "sharing"),
    [("diagonal", "expand"), ("kfac", "expand"), ("kfac", "reduce")],
)
@pytest.mark.parametrize("expectation", ["exact", "empirical"])
def test_padding_changes_nothing(structure, expectation, sharing):
    options = FisherOptions.full(expectation=expectation, weight_sharing=sharing)
    model, x, y = token_net(), TOKENS[2:3], LABELS[2:3]
    wide = F.pad(x, (0, 5)), F.pad(y, (0, 5), value=-100)
    want = fisher(model, [(x, y)], structure, options=options).diagonal()
    got = fisher(model, [wide], structure, options=options).diagonal()
    for name, value in want.items():
        assert relative(got[name], value) < 1e-5


class Frames(nn.Module):
    """It is told the lengths of series, and reads no frame behind them."""

    def __init__(self, is_recurrent):
        super().__init__()
        self.fc, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.cell = nn.GRU(4, 4, batch_first=True) if is_recurrent else None

    def forward(self, x, lengths):
        x = self.fc(x).tanh()
        if self.cell is not None:
            return self.head(self.cell(x)[0][torch.arange(len(x)), lengths - 1])
        behind = torch.arange(x.shape[1]) >= lengths.unsqueeze(1)
        return self.head(x.masked_fill(behind.unsqueeze(2), -1).amax(1))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("is_recurrent", [False, True])
def test_padding_that_only_the_model_knows_changes_nothing(is_recurrent, sharing):
    options = FisherOptions.full(tolerance=0, weight_sharing=sharing)
    model, lengths = Frames(is_recurrent), torch.tensor([3, 5, 1, 2])
    x = torch.randn(4, 5, 3)
    want, got = (
        fisher(model, [(x, lengths, None), (x, lengths, None)], options=options)
        for x in (x, F.pad(x, (0, 0, 0, 9), value=2))
    )
    torch.testing.assert_close(got.diagonal(), want.diagonal())


def test_without_any_label_there_is_no_fisher():
    with pytest.raises(DataError, match="-100"):
        fisher(token_net(), [(TOKENS, torch.full_like(LABELS, -100))])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradient_is_of_the_mean_over_labels(size):
    model = token_net()
    whole = cross_entropy(model(TOKENS), LABELS)
    want = torch.autograd.grad(whole, list(model.parameters()))
    batches = list(zip(TOKENS.split(size), LABELS.split(size), strict=True))
    got, loss = gradient(model, batches, loss_fn=cross_entropy)
    assert loss == pytest.approx(whole.item(), rel=1e-6)
    for one, other in zip(got.values(), want, strict=True):
        assert relative(one, other) < 1e-5


def test_labels_are_counted():
    assert count_labels(LABELS) == 6
    assert count_labels(torch.zeros(4, 2)) == 8
    as_bytes = torch.tensor([1, 156], dtype=torch.uint8)  # 156 is -100 in uint8
    assert read((torch.zeros(2, D), as_bytes), MODEL).num_labels == 2


SOFT = torch.randn(4, 3, C).softmax(-1)


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [
        (torch.randn(4, 1), torch.zeros(4, dtype=torch.int64)),  # whose loss is 0
        (torch.randn(4), torch.randn(4)),  # one example of four classes
        (torch.randn(4, C), torch.randn(4, C)),  # no probabilities
        (torch.randn(4, 3, C), torch.randn(4, 3, C)),
    ],
)
def test_what_is_of_no_classes_has_no_cross_entropy(outputs, labels):
    with pytest.raises((StructureError, DataError), match=r"mse_loss.*bernoulli"):
        cross_entropy(outputs, labels)


def test_probabilities_may_be_those_of_positions():
    outputs = torch.randn(4, 3, C)
    want = -(outputs.log_softmax(-1) * SOFT).sum(-1).mean()
    assert torch.allclose(cross_entropy(outputs, SOFT), want)
    assert torch.allclose(cross_entropy(outputs.mT, SOFT.mT), want)


@pytest.mark.parametrize(
    ("labels", "culprit"),
    [
        (Y.unsqueeze(1), r"labels of shape \(4, 1\)"),
        (Y.float(), "labels of shape .* torch.float32"),
        (Y + C * (torch.arange(N) > 7), "Target"),  # in the last batch
    ],
)
@pytest.mark.parametrize("function", ["score", "train", "gradient"])
def test_labels_that_the_loss_refuses_are_named(labels, culprit, function):
    loader = list(zip(X.split(4), labels.split(4), strict=True))
    call = {
        "score": lambda: score(MODEL, loader, CPU, F.cross_entropy),
        "train": lambda: LocalSGD()(nn.Linear(D, C), loader, CPU, {}),
        "gradient": lambda: gradient(MODEL, loader),
    }
    with pytest.raises(DataError, match=culprit) as raised:
        call[function]()
    assert "batch_fn" in str(raised.value)


def one_hot(at, value):
    return F.one_hot(Y, C).float().index_put(at, torch.tensor(value))


AT = torch.tensor(3), torch.tensor(1)


@pytest.mark.parametrize(
    ("likelihood", "labels", "error", "text"),
    [
        ("categorical", Y + 9, DataError, r"outside \[0, 3\).*-100"),
        ("categorical", one_hot(AT, 0.5), StructureError, "likelihood='gaussian'"),
        ("bernoulli", one_hot(AT, 2.0), DataError, r"label 2 is outside \[0, 1\]"),
        ("bernoulli", Y.float(), DataError, "a number for each output"),
        ("gaussian", one_hot(AT, float("nan")), DataError, "NaN"),
    ],
)
def test_labels_that_do_not_fit_the_likelihood_are_named(
    likelihood, labels, error, text
):
    with pytest.raises(error, match=text):
        fisher(MODEL, [(X, labels)], likelihood=likelihood)


def test_classes_in_the_second_dimension_are_named():
    model = nn.Conv1d(1, C, 2)
    batch = X.unsqueeze(1), torch.zeros(N, D - 1, dtype=torch.int64)
    with pytest.raises(StructureError, match=r"movedim\(1, -1\)"):
        fisher(model, [batch])


@pytest.mark.parametrize("function", [gradient, gradient_and_hvp])
@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1])),
        nn.CrossEntropyLoss(ignore_index=2),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
)
def test_a_loss_that_is_no_mean_over_labels_is_refused(loss_fn, function):
    one_class = X[Y == 1], Y[Y == 1]  # which shows no weights
    for batches in ([(X, Y)], [one_class, (X, Y)]):
        with pytest.raises(StructureError, match="mean over"):
            function(MODEL, batches, loss_fn=loss_fn)


def test_a_batch_of_one_class_and_missing_labels_shows_no_weights():
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1]))
    first = Y.where(Y == 1, -100)
    with pytest.raises(StructureError, match="mean over"):
        gradient(MODEL, [(X, first), (X, Y)], loss_fn=loss_fn)


def test_batches_of_unlike_lengths_have_the_fisher_of_each_example():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.h = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, x):
            return self.h(self.e(x).mean(1))

    model = Text()
    with torch.no_grad():
        model.h.weight.mul_(20)  # sure of some examples, so that groups are queued
    batches = [torch.randint(1, 9, (6, n)) for n in (3, 7, 3, 5)]
    got = fisher(model, batches, "diagonal").diagonal()
    parts = [fisher(model, [b], "diagonal", options=EXACT).diagonal() for b in batches]
    for name, value in got.items():
        mean = torch.stack([part[name] for part in parts]).mean(0)
        assert relative(value, mean) < 5e-2  # the tolerance, of small traces


# What is left as it was


class Convolved(nn.Module):
    """A convolution under two names, behind a batch norm and dropout."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 2)
        self.same = nn.ModuleList([self.conv])
        self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.same[0](x.unsqueeze(1)))).flatten(1))


TAKES = {
    "fisher": lambda m, b: fisher(m, b),
    "diagonal": lambda m, b: fisher(m, b, "diagonal"),
    "gradient": gradient,
    "in train mode": lambda m, b: gradient(m, b, train_mode=True),
    "hvp": gradient_and_hvp,
    "features": lambda m, b: TangentFeatures(m, 12)(b[0][0]),
    "head": lambda m, b: head_sums(m, b, "head"),
    "score": lambda m, b: score(m, b, CPU, F.cross_entropy),
}


@pytest.mark.parametrize("function", TAKES.values(), ids=TAKES)
def test_a_model_is_afterwards_what_it_was(function):
    model = Convolved().train()
    model.norm.eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    for batches in ([(X, Y)], [(X[:, :4], Y)]):
        try:
            function(model, batches)
        except (RuntimeError, StructureError):
            assert batches[0][0] is not X
        assert [module.training for module in model.modules()] == modes
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert torch.equal(model.head.weight.grad, torch.ones(3, 8))
        assert model.conv.weight.grad is None


def test_the_first_label_that_is_no_class_is_named():
    check_classes(torch.tensor([0, 2, -100]), 3)
    for wrong in (3, -1):
        with pytest.raises(DataError, match=rf"label {wrong} is outside \[0, 3\)"):
            check_classes(torch.tensor([0, wrong]), 3)
