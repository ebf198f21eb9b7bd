"""Loaders, batches, labels and outputs as people have them: right, or refused early.

The oracle takes each example by itself, in float64, through the raw model.
"""

import copy
import itertools
from collections import UserDict, namedtuple
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from oracles import relative
from ordinary import BATCHES, OUTPUTS
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from flwr_fisher.client import FisherClient, LocalSGD, cross_entropy, score
from flwr_fisher.curvature import Pairs, fisher, gradient, gradient_and_hvp
from flwr_fisher.curvature.batch import count_labels, read
from flwr_fisher.curvature.batches import at_most, count_of
from flwr_fisher.errors import DataError, StructureError

N, D, C = 12, 5, 3
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, D, generator=G), torch.randint(0, C, (N,), generator=G)
MODEL = nn.Linear(D, C)


# Loaders


class Normalised(DataLoader):
    def __iter__(self):
        for x, y in super().__iter__():
            yield (x - 1) / 2, y


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Opened(Dataset):
    """A file that only `worker_init_fn` opens."""

    rows = None

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.rows[i]


def open_it(_):
    get_worker_info().dataset.rows = list(zip(X, Y, strict=True))


class Endless(Sampler):
    def __iter__(self):
        return itertools.cycle(range(N))


class Unsized:
    """An iterable that says nothing of its length."""

    def __iter__(self):
        return iter(zip(X.split(4), Y.split(4), strict=True))


DATA = TensorDataset(X, Y)
LOADERS = {
    "list": lambda: list(zip(X.split(5), Y.split(5), strict=True)),
    "plain": lambda: DataLoader(DATA, 4),
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "drop_last": lambda: DataLoader(DATA, 5, drop_last=True),
    "subclass": lambda: Normalised(DATA, 4),
    "stream": lambda: DataLoader(Stream(), 4),
    "unsized": Unsized,
    "batch_sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=False)
    ),
    "batches of a subset": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(SubsetRandomSampler([1, 5, 7, 8]), 3, False)
    ),
    "own batches": lambda: DataLoader(DATA, batch_sampler=[[0, 1, 2], [7, 8]]),
    "no batch size": lambda: DataLoader(
        DATA, sampler=[[0, 1], [2, 3, 4]], batch_size=None
    ),
    "subset": lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(6))),
    "weighted": lambda: DataLoader(
        DATA, 4, sampler=WeightedRandomSampler([1.0] * 3 + [0.0] * 9, 8)
    ),
    "worker_init_fn": lambda: DataLoader(
        Opened(), 4, num_workers=1, worker_init_fn=open_it
    ),
    "endless": lambda: DataLoader(DATA, 4, sampler=Endless()),
}
ENDLESS = {"endless"}


def examples_of(loader, limit=100):
    """Return every example that a loader gives, as bytes."""
    rows = itertools.chain.from_iterable(x for x, _ in loader)
    return [bytes(row.numpy().tobytes()) for row in itertools.islice(rows, limit)]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("wanted", [3, 1000])
def test_examples_are_the_loaders_own(make, wanted, request):
    endless = request.node.callspec.id.split("-")[1] in ENDLESS
    torch.manual_seed(0)
    own = examples_of(make())
    torch.manual_seed(0)
    loader = Pairs(make())
    chosen = [loader.read(b, MODEL) for b in at_most(loader, MODEL, wanted, seed=0)]
    rows = [x.numpy().tobytes() for b in chosen for x in b.inputs.args[0]]
    assert len(rows) == (min(wanted, len(own)) if not endless else wanted)
    assert set(rows) <= set(own)
    for batch in chosen:  # inputs and labels belong together
        for x, y in zip(batch.inputs.args[0], batch.labels, strict=True):
            (index,) = [i for i in range(N) if {0, 1} & _same(x, X[i])]
            assert y == Y[index]


def test_how_a_loader_is_read_changes_no_count():
    for make in LOADERS.values():
        loader = make()
        assert count_of(Pairs(loader, tuple)) == count_of(loader)


def _same(x, row):
    return {k for k, want in enumerate((row, (row - 1) / 2)) if torch.equal(x, want)}


def test_the_fisher_is_of_what_the_loader_prepares():
    raw = TensorDataset(X * 50 + 100, Y)
    loader, plain = (
        Normalised(raw, 4),
        DataLoader(TensorDataset((raw.tensors[0] - 1) / 2, Y), 4),
    )
    for examples in (None, 12):
        got, want = (
            fisher(MODEL, x, examples=examples).trace() for x in (loader, plain)
        )
        assert got == pytest.approx(want, rel=1e-5)


def test_random_examples_of_an_ordered_loader_are_of_all_its_classes():
    labels = torch.arange(400) // 100
    loader = Normalised(TensorDataset(torch.randn(400, D), labels), 10)
    chosen = at_most(loader, MODEL, 40, seed=0)
    assert set(torch.cat([b.labels for b in chosen]).tolist()) == {0, 1, 2, 3}


def test_no_more_is_read_of_a_plain_data_set():
    class Counted(Dataset):
        read = 0

        def __len__(self):
            return 100

        def __getitem__(self, i):
            Counted.read += 1
            return torch.zeros(D), 0

    assert (
        len([x for b in at_most(DataLoader(Counted(), 10), MODEL, 7, 0) for x in b[0]])
        == 7
    )
    assert Counted.read == 7


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


First = namedtuple("First", ["label", "left"])
Pair = namedtuple("Pair", "x y")
FORMS = {
    **BATCHES,
    "tensor": lambda x, y: x,
    "list of one": lambda x, y: [x],
    "namedtuple": Pair,
    "labels first": lambda x, y: First(label=y, left=x),
    "UserDict": lambda x, y: UserDict(left=x, labels=y),
    "without labels": lambda x, y: {"left": 2 * x, "right": x},
}


SOME = ["kfac", "diagonal", "dense"]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_a_batch_has_the_same_fisher(form):
    model, batches = Two(), [form(X[:7], Y[:7]), form(X[7:], Y[7:])]
    found, wanted = (fisher(model, b, structure=SOME) for b in (batches, [X]))
    for got, want in zip(found, wanted, strict=True):
        for name, value in want.diagonal().items():
            assert relative(got.diagonal()[name], value) < 1e-5


REFUSED = {
    "too many": (lambda x, y: (x, x, x, y), "forward"),
    "unknown names": (lambda x, y: {"a": x, "b": x, "label": y}, "'b'"),
    "two labels": (lambda x, y: {"left": x, "label": y, "target": y}, "target"),
    "nothing": (lambda x, y: {"label": y}, "no tensor of inputs"),
    "sparse": (lambda x, y: (x.to_sparse(), y), r"sparse_coo.*to_dense\(\)"),
    "nested": (
        lambda x, y: (torch.nested.as_nested_tensor(list(x), layout=torch.strided), y),
        r"nested.*to_padded_tensor",
    ),
    "text": (lambda x, y: (["a"] * len(x), y), "batch_fn"),
    "an object": (lambda x, y: object(), "object"),
    "rows": (lambda x, y: (x, x[:-1], y), "first dimensions"),
    "copy": (lambda x, y: {"left": tokens(x), "labels": tokens(x)}, "Shift"),
}


@pytest.mark.parametrize("function", [fisher, gradient])
def test_tensors_in_place_of_a_loader_are_refused(function):
    with pytest.raises(DataError, match=r"inputs and labels: .*TensorDataset"):
        function(MODEL, (X, Y))


def tokens(x):
    return (x.abs() * 10).long()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(("form", "culprit"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_told_is_refused_by_name(form, culprit):
    with pytest.raises(DataError, match=culprit):
        read(form(X, Y), Two())


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


@pytest.mark.parametrize("Causal", [OfType, ByDefault])
def test_a_causal_models_labels_are_shifted_by_one(Causal):
    made = read({"left": tokens(X), "labels": tokens(X)}, Causal())
    assert torch.equal(made.labels[:, :-1], tokens(X)[:, 1:])
    assert (made.labels[:, -1] == -100).all()


# Outputs


class Named(dict):
    """As transformers' ModelOutput: a dict with attributes."""

    def __getattr__(self, name):
        return self[name]


RETURNED = {**OUTPUTS, "attribute": (lambda o: Named(logits=o, loss=None), None)}


class Returns(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(D, C), form

    def forward(self, x):
        return self.form(self.layer(x))


@pytest.mark.parametrize(("form", "output_fn"), RETURNED.values(), ids=RETURNED)
def test_every_form_of_outputs_has_the_same_fisher(form, output_fn):
    model = Returns(form)
    wanted = fisher(model.layer, [X], structure=SOME)
    found = fisher(model, Pairs([X], None, output_fn), structure=SOME)
    for got, want in zip(found, wanted, strict=True):
        assert got.trace() == pytest.approx(want.trace(), rel=1e-5)


def test_outputs_that_cannot_be_told_are_refused():
    with pytest.raises(StructureError, match="output_fn"):
        fisher(Returns(lambda o: (o, 2 * o)), [X])


# Labels


LABELS = torch.tensor([[1, 2, -100], [0, -100, -100], [2, 1, 0], [-100, -100, -100]])
TOKENS = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6], [1, 1, 1]])


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
    model, exact = token_net(), ["diagonal", "block", "dense"]
    found = fisher(model, [(TOKENS, LABELS)], structure=exact, tolerance=0.0)
    want = masked_fisher(model)
    for got in found:
        for name, value in got.diagonal().items():
            assert relative(value, want[name]) < 1e-5


@pytest.mark.parametrize(
    ("structure", "sharing"),
    [("diagonal", "expand"), ("kfac", "expand"), ("kfac", "reduce")],
)
@pytest.mark.parametrize("expectation", ["exact", "empirical"])
def test_padding_changes_nothing(structure, expectation, sharing):
    model, options = (
        token_net(),
        {"expectation": expectation, "weight_sharing": sharing},
    )
    x, y = TOKENS[2:3], LABELS[2:3]
    wide = F.pad(x, (0, 5)), F.pad(y, (0, 5), value=-100)
    want = fisher(model, [(x, y)], structure=structure, **options).diagonal()
    got = fisher(model, [wide], structure=structure, **options).diagonal()
    for name, value in want.items():
        assert relative(got[name], value) < 1e-5


def test_without_any_label_there_is_no_fisher():
    with pytest.raises(DataError, match="-100"):
        fisher(token_net(), [(TOKENS, torch.full_like(LABELS, -100))])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradient_is_of_the_mean_over_labels(size):
    model = token_net()

    def loss_fn(o, y):
        return F.cross_entropy(o.flatten(0, 1), y.flatten())

    whole = loss_fn(model(TOKENS), LABELS)
    want = torch.autograd.grad(whole, list(model.parameters()))
    whole = whole.detach()
    got, loss = gradient(
        model,
        list(zip(TOKENS.split(size), LABELS.split(size), strict=True)),
        loss_fn=loss_fn,
    )
    assert loss == pytest.approx(float(whole), rel=1e-6)
    for one, other in zip(got.values(), want, strict=True):
        assert relative(one, other) < 1e-5


def test_labels_are_counted():
    assert count_labels(LABELS) == 6
    assert count_labels(torch.zeros(4, 2)) == 8


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_whole_numbers_are_read_as_int64(dtype):
    labels = torch.tensor([1, 100, -100 if dtype.is_signed else 156])
    made = read((torch.zeros(3, D), labels.to(dtype)), MODEL)  # 156 is -100 in uint8
    assert torch.equal(made.labels, labels)
    assert made.num_labels == (2 if dtype.is_signed else 3)


def test_batches_that_are_none_are_left_out():
    batches = list(zip(X.split(4), Y.split(4), strict=True))
    loader = [None, *batches[:1], None, *batches[1:]]
    for examples in (None, 5):
        got, want = (
            fisher(MODEL, each, examples=examples).trace() for each in (loader, batches)
        )
        assert got == want
    models = [copy.deepcopy(MODEL) for _ in range(2)]
    losses = [
        LocalSGD()(model, each, torch.device("cpu"), {})
        for model, each in zip(models, (loader, batches), strict=True)
    ]
    assert losses[0] == losses[1]


SOFT = torch.randn(4, 3, C).softmax(-1)


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [
        (torch.randn(4, 1), torch.randn(4, 1)),  # whose loss is 0
        (torch.randn(4, 1), torch.zeros(4, dtype=torch.int64)),
        (torch.randn(4), torch.randn(4)),  # one example of four classes
        (torch.randn(4, C), torch.randn(4, C)),  # no probabilities
        (torch.randn(4, C), torch.ones(4, C)),
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


UNFIT = {
    "bool": (Y > 0, "torch.bool"),
    "a column": (Y.unsqueeze(1), r"labels of shape \(4, 1\)"),
    "numbers": (Y.float(), "labels of shape .* torch.float32"),
    "no such class": (Y + C * (torch.arange(N) > 7), "Target"),  # in the last batch
}


@pytest.mark.parametrize(("labels", "culprit"), UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize("function", ["score", "train", "gradient"])
def test_labels_that_the_loss_refuses_are_named(labels, culprit, function):
    loader = list(zip(X.split(4), labels.split(4), strict=True))
    call = {
        "score": lambda: score(MODEL, loader, torch.device("cpu"), F.cross_entropy),
        "train": lambda: LocalSGD()(nn.Linear(D, C), loader, torch.device("cpu"), {}),
        "gradient": lambda: gradient(MODEL, loader),
    }
    with pytest.raises(DataError, match=culprit) as raised:
        call[function]()
    assert "batch_fn" in str(raised.value)


@pytest.mark.parametrize("label", [-1, C, 255])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("tokens", [False, True])
def test_what_a_loss_ignores_is_no_label_by_minus_100_alone(label, dtype, tokens):
    """A loop of a user's own may ignore -1 or 255: they were examples to the Fisher."""
    x, y = (X.expand(2, N, D), Y.expand(2, N)) if tokens else (X, Y)
    odd = torch.where(torch.arange(y.shape[-1]) > 9, label, y).to(dtype)
    ignoring = partial(F.cross_entropy, ignore_index=int(odd.flatten()[-1]))
    text = rf"label {int(odd.flatten()[-1])} is outside \[0, 3\).*-100.*batch_fn"
    for expectation in ("exact", "sampled", "empirical"):
        with pytest.raises(DataError, match=text):
            fisher(MODEL, [(x, y), (x, odd)], expectation=expectation)
    flat = [(x.flatten(0, -2), y.flatten()), (x.flatten(0, -2), odd.flatten())]
    with pytest.raises(DataError, match=text):
        score(MODEL, flat, torch.device("cpu"), ignoring)
    score(MODEL, flat, torch.device("cpu"), ignoring, classes=False)


@pytest.mark.parametrize("label", [-1.0, float("nan"), 2.0])
def test_labels_of_sigmoids_are_from_0_to_1(label):
    labels = F.one_hot(Y, C).float()
    client = FisherClient(MODEL, [(X, labels)], likelihood="bernoulli")

    def loss(labels):
        return score(MODEL, [(X, labels)], torch.device("cpu"), client.problem.loss)[0]

    assert loss(labels > 0) == loss(labels)
    odd = labels.index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(label))
    text = rf"label {label:g} is outside \[0, 1\]"
    with pytest.raises(DataError, match=text):
        loss(odd)
    with pytest.raises(DataError, match=text):
        fisher(MODEL, [(X, odd)], likelihood="bernoulli", expectation="empirical")


@pytest.mark.parametrize("function", [gradient, gradient_and_hvp])
@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1])),
        nn.CrossEntropyLoss(ignore_index=2),
    ],
)
def test_a_loss_that_is_no_mean_over_labels_is_refused(loss_fn, function):
    with pytest.raises(StructureError, match="mean over"):
        function(MODEL, [(X, Y)], loss_fn=loss_fn)
    for order in (Y.argsort(), Y.argsort(descending=True)):  # batches of one class
        ones = [(X[[i]], Y[[i]]) for i in order.tolist()]
        with pytest.raises(StructureError, match="mean over"):
            function(MODEL, ones, loss_fn=loss_fn)


# Lengths


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
    for structure in ("kfac", "diagonal"):
        got = fisher(model, batches, structure=structure)
        parts = [
            fisher(model, [b], structure=structure, tolerance=0.0) for b in batches
        ]
        for name, value in got.diagonal().items():
            if structure == "diagonal":
                mean = torch.stack([p.diagonal()[name] for p in parts]).mean(0)
                assert relative(value, mean) < 5e-2  # the tolerance, of small traces
