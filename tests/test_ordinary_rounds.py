"""{loaders} x {batches} x {labels} x {outputs} x {strategies}: right, or refused early.

What is right is told by each example alone, in float64, through the bare layers, for
the functions that a client is made of. A round of a strategy must end where it ends on
a list of pairs of tensors. Numbers of kinds are coprime, so that each two meet; each
strategy meets each kind.
"""

from itertools import count
from math import lcm

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord
from oracles import relative
from ordinary import BATCHES, OUTPUTS
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from virtual import close

from flwr_fisher.client import FisherClient, LocalSGD, cross_entropy, make_client_app
from flwr_fisher.client.training import score
from flwr_fisher.curvature import Pairs, fisher
from flwr_fisher.errors import FlwrFisherError
from flwr_fisher.strategies import FAGH, TCT, FedFish, FedFisherOneShot
from flwr_fisher.testing import LocalGrid

N, D, C, T, SIZE, LR = 12, 4, 3, 2, 4, 0.1
CPU = torch.device("cpu")
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, D, generator=G), torch.randint(0, C, (N,), generator=G)
WIDE = torch.randn(N, T, D, generator=G)
TOLD = torch.arange(N) % 5 > 0  # the first example among those without a label


class Net(nn.Module):
    """Takes one or two inputs, by position or by name; returns what `form` makes."""

    def __init__(self, form=lambda outputs: outputs):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head, self.form = nn.Linear(D, 5), nn.Linear(5, C), form

    def forward(self, left, right=None):
        x = left if right is None else left - right
        return self.form(self.head(self.hidden(x).tanh()))


# Kinds


class Rows(Dataset):
    """Positions of examples; a collator makes the batch."""

    def __init__(self, n=N):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return i


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(N))


class Doubled(DataLoader):
    """A data set of half the values, that the loader doubles."""

    def __iter__(self):
        for batch in super().__iter__():
            yield self.finish(batch)


class Unsized:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


CHUNKS = [list(range(k, k + SIZE)) for k in range(0, N, SIZE)]


def subclass(make):
    loader = Doubled(Rows(), SIZE, collate_fn=torch.tensor)
    loader.finish = make
    return loader


LOADERS = {
    "list": lambda make: [make(torch.tensor(rows)) for rows in CHUNKS],
    "plain": lambda make: DataLoader(Rows(), SIZE, collate_fn=Collator(make)),
    "drop_last": lambda make: DataLoader(
        Rows(N + 1), SIZE, drop_last=True, collate_fn=Collator(make)
    ),
    "subclass": subclass,
    "stream": lambda make: DataLoader(Stream(), SIZE, collate_fn=Collator(make)),
    "unsized": lambda make: Unsized([make(torch.tensor(rows)) for rows in CHUNKS]),
    "own batches": lambda make: DataLoader(
        Rows(), batch_sampler=CHUNKS, collate_fn=Collator(make)
    ),
    "no batch size": lambda make: DataLoader(
        Rows(), sampler=CHUNKS, batch_size=None, collate_fn=Collator(make)
    ),
    "workers": lambda make: DataLoader(
        Rows(), SIZE, num_workers=1, collate_fn=Collator(make)
    ),
}


class Collator:
    def __init__(self, make):
        self.make = make

    def __call__(self, rows):
        return self.make(torch.as_tensor(rows))


FORMS = {
    **BATCHES,
    "list": lambda x, y: [x, y],
    "batch_fn": lambda x, y: {"a": [x, "x"], "class": y},
    "batch_fn of names": lambda x, y: (y, x, 2 * x),
}
BATCH_FNS = {
    "batch_fn": lambda batch: (batch["a"][0], batch["class"]),
    "batch_fn of names": lambda b: ({"right": b[1], "left": b[2]}, b[0]),
}
NONE = torch.tensor(-100)
LABELS = {
    "int64": (X, Y, "categorical"),
    "uint8": (X, Y.byte(), "categorical"),
    "some -100": (X, Y.where(TOLD, NONE), "categorical"),
    "positions": (
        WIDE,
        torch.stack([Y.where(TOLD, NONE), Y.flip(0).where(TOLD.flip(0), NONE)], 1),
        "categorical",
    ),
    "probabilities": (X, WIDE[:, 0, :C].softmax(-1), "categorical"),
    "numbers": (X, WIDE[:, 0, :C], "gaussian"),
    "bits": (X, (WIDE[:, 0, :C] > 0).float(), "bernoulli"),
}
LOSSES = {
    "categorical": cross_entropy,
    "gaussian": F.mse_loss,
    "bernoulli": F.binary_cross_entropy_with_logits,
}
METHODS = {
    "FedFisher": (lambda: FedFisherOneShot(), 1),
    "FedFish": (lambda: FedFish(), 1),
    "FAGH": (lambda: FAGH(lr=0.1, rho=1.0), 1),
    "TCT": (lambda: TCT(stage1_rounds=1, num_features=20, local_steps=3), 3),
}
KINDS = (LOADERS, FORMS, LABELS, OUTPUTS, METHODS)
COUNT = max(lcm(len(a), len(b)) for a in KINDS for b in KINDS if a is not b)
CASES = [tuple(list(kind)[i % len(kind)] for kind in KINDS) for i in range(COUNT)]
ROUNDS = CASES[: max(lcm(len(METHODS), len(kind)) for kind in KINDS)]
# A head of one output an example, of one class an example, is what TCT is made of.
NOT_FOR_TCT = ("positions", "probabilities", "numbers", "bits")


def test_each_two_kinds_meet():
    for a in range(len(KINDS)):
        for b in range(a):
            met = {(case[a], case[b]) for case in CASES}
            assert len(met) == len(KINDS[a]) * len(KINDS[b])
    for a, kind in enumerate(KINDS[:-1]):
        met = {(case[a], case[-1]) for case in ROUNDS}
        assert len(met) == len(kind) * len(METHODS)


def loader_of(loader, form, labels):
    x, y, _ = LABELS[labels]
    return LOADERS[loader](lambda rows: FORMS[form](x[rows], y[rows]))


# What is right


def batches_of(labels):
    """Each batch without what has no label, in float64, one row a label."""
    x, y, kind = LABELS[labels]
    for rows in CHUNKS:
        a, b = x[rows].double(), y[rows]
        if kind == "categorical" and labels != "probabilities":
            told = b.long() != -100
            yield a[told], b[told].long()
        else:
            yield a, b.double()


def right_fisher(labels):
    """The diagonal, a label's outputs after the other; over examples with a label."""
    x, y, kind = LABELS[labels]
    model = Net().double()
    params = dict(model.named_parameters())
    total = {k: torch.zeros_like(p) for k, p in params.items()}
    seen = 0
    for one, label in zip(x.double(), y, strict=True):
        told = label.reshape(-1) != -100 if not y.is_floating_point() else None
        if told is not None and not told.any():
            continue
        seen += 1
        rows = one.reshape(-1, D) if told is None else one.reshape(-1, D)[told]
        for row in rows:
            outputs = model(row.unsqueeze(0))[0]
            p = outputs.softmax(-1) if kind == "categorical" else outputs.sigmoid()
            weight = {"categorical": p, "bernoulli": p * (1 - p)}.get(
                kind, torch.ones(C)
            )
            values = outputs.log_softmax(-1) if kind == "categorical" else outputs
            for c in range(C):
                grads = torch.autograd.grad(
                    values[c], list(params.values()), retain_graph=True
                )
                for sums, g in zip(total.values(), grads, strict=True):
                    sums += weight[c].detach() * g.square()
    return {k: v / seen for k, v in total.items()}


def right_training(labels):
    """The parameters after an epoch of SGD with momentum."""
    model, loss_fn = Net().double(), LOSSES[LABELS[labels][2]]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for x, y in batches_of(labels):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def right_scores(labels):
    """Loss and accuracy over all labels at once."""
    x, y = (torch.cat(part) for part in zip(*batches_of(labels), strict=True))
    with torch.no_grad():
        outputs = Net().double()(x)
    loss = float(LOSSES[LABELS[labels][2]](outputs, y))
    accuracy = (outputs.argmax(-1) == y).double().mean() if y.dim() == 1 else None
    return loss, None if accuracy is None else float(accuracy)


@pytest.fixture(scope="module")
def right():
    return {
        labels: (right_fisher(labels), right_training(labels), right_scores(labels))
        for labels in LABELS
    }


@pytest.mark.parametrize(("loader", "form", "labels", "outputs", "method"), CASES)
def test_fisher_training_and_scores_are_right(
    loader, form, labels, outputs, method, right
):
    (returned, output_fn), kind = OUTPUTS[outputs], LABELS[labels][2]
    loss_fn, (curvature, trained, scores) = LOSSES[kind], right[labels]
    data = Pairs(loader_of(loader, form, labels), BATCH_FNS.get(form), output_fn)
    model = Net(returned)
    got = fisher(model, data, structure="diagonal", likelihood=kind, tolerance=0.0)
    for name, value in got.diagonal().items():
        assert relative(value, curvature[name]) < 1e-4
    loss, accuracy, n = score(model, data, CPU, loss_fn)
    assert (loss, n) == (pytest.approx(scores[0], rel=1e-5), N)
    if scores[1] is not None:
        assert accuracy == pytest.approx(scores[1])
    LocalSGD(lr=LR, loss_fn=loss_fn)(model, data, CPU, {})
    for name, value in model.state_dict().items():
        assert relative(value, trained[name]) < 1e-4


# A round


def start(loader, form, labels, outputs, method, told):
    """Run a strategy over two clients, of which the second has a batch less."""
    (returned, output_fn), kind = OUTPUTS[outputs], LABELS[labels][2]
    train = LocalSGD(lr=LR, loss_fn=LOSSES[kind], on_epoch=lambda *_: next(told))

    def client_fn(context):
        data = loader_of(loader, form, labels)
        return FisherClient(
            Net(returned),
            data,
            data,
            device="cpu",
            train_fn=train,
            loss_fn=LOSSES[kind],
            likelihood=kind,
            batch_fn=BATCH_FNS.get(form),
            output_fn=output_fn,
            state_dir=context.run_config["state"],
        )

    make, rounds = METHODS[method]
    return make().start(
        LocalGrid(make_client_app(client_fn), 2, run_config=told.run_config),
        ArrayRecord(Net().state_dict()),
        num_rounds=rounds,
    )


class Told:
    """Counts epochs."""

    def __init__(self, where):
        self.run_config, self.epochs = {"state": str(where)}, count()

    def __next__(self):
        return next(self.epochs)

    @property
    def number(self):
        return next(self.epochs)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Where a strategy ends on a list of pairs, for each kind of labels."""
    found = {}

    def of(labels, method):
        if (labels, method) not in found:
            told = Told(tmp_path_factory.mktemp("plain"))
            found[labels, method] = start(
                "list", "pair", labels, "tensor", method, told
            )
        return found[labels, method]

    return of


@pytest.mark.parametrize(("loader", "form", "labels", "outputs", "method"), ROUNDS)
def test_a_round_ends_where_it_ends_on_pairs(
    loader, form, labels, outputs, method, plain, tmp_path
):
    told = Told(tmp_path)
    case = (loader, form, labels, outputs, method)
    if method == "TCT" and labels in NOT_FOR_TCT:
        with pytest.raises(FlwrFisherError, match=r"labels|likelihood|positions"):
            start(*case, told)
        assert told.number == 0  # no epoch was trained
        return
    want, got = plain(labels, method), start(*case, told)
    assert close(got.arrays, want.arrays)
    assert got.evaluate_metrics_clientapp == want.evaluate_metrics_clientapp
