"""The check of the first batch, the count of examples, and the dry run."""

from functools import partial

import pytest
import torch
from flwr.app import ArrayRecord
from nets import MIXES, Mixes
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from virtual import ask, metrics_of, same_bits, tiny_arrays, tiny_data, tiny_model

from flwr_fisher.client import FisherClient, LocalSGD, check_client
from flwr_fisher.client.jobs import train
from flwr_fisher.curvature import LIKELIHOODS, Likelihood
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    DataError,
    FlwrFisherError,
    StructureError,
)
from flwr_fisher.params import shared_state

KFAC = {"structure": "kfac"}
FISH = {"job": "fedfish"}


class Trained(Exception):  # noqa: N818
    """A training has taken a step."""


def untrained(model, loader, device, config):
    """A loop that reads its first batch, and would then train."""
    for _ in loader:
        raise Trained


OWN_LOSS = LocalSGD(loss_fn=nn.CrossEntropyLoss())  # classes second, as torch's


class AlwaysDrops(nn.Module):
    """Dropout that stays in eval mode."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True)


class NaN(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float("nan")


class WithoutGradients(nn.Linear):
    """Switches gradients off by itself, in eval mode."""

    def forward(self, x):
        with torch.set_grad_enabled(self.training):
            return super().forward(x)


class Checkpointed(nn.Linear):
    """Computes its outputs again in the backward pass, in the older way."""

    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


class Adapter(nn.Linear):
    """Adds its adapter to its weight in eval mode, and takes it out in train mode."""

    def __init__(self):
        super().__init__(3, 3)
        self.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.full((1, 3), 0.1))
        self.b = nn.Parameter(torch.full((3, 1), 0.1))
        self.merged = False

    def train(self, mode=True):
        if self.merged == mode:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.b @ self.a).detach()
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        outputs = super().forward(x)
        return outputs if self.merged else outputs + x @ self.a.T @ self.b.T


class TwoOutputs(nn.Linear):
    def forward(self, x):
        return super().forward(x), super().forward(x)


class WrongLikelihood(Likelihood):
    def columns(self, outputs):
        return outputs

    def sample_score(self, outputs, generator):
        raise StructureError("no label can be drawn")

    def score(self, outputs, labels):
        raise KeyError("score")


class Own(type(LIKELIHOODS["bernoulli"])):
    def check_labels(self, outputs, labels):
        return


def frozen():
    return tiny_model().requires_grad_(False)


def with_inputs(change, labels=None):
    x, y = tiny_data(2).tensors
    return [(change(x), y if labels is None else labels)]


REAL = torch.rand(12)


def fails(error, text, **case):
    return case, error, text


odd, misread = partial(fails, StructureError), partial(fails, DataError)
FAILURES = {
    "no-parameters": fails(ConfigurationError, "no trainable parameter", model=frozen),
    "one-class": odd("2 classes", model=lambda: nn.Linear(3, 1), loader=None),
    "two-outputs": odd("it returned a tuple", model=lambda: TwoOutputs(3, 3)),
    "no-pair": misread("label", loader=[{"a": REAL, "b": REAL}]),
    "label-range": misread(
        r"label 7 is outside \[0, 3\)",  # on a GPU, training would end the process
        loader=with_inputs(lambda x: x, torch.full((12,), 7)),
    ),
    "classes-second": odd(
        r"outputs, of shape \(4, 3, 5\), is the classes: .*movedim",
        model=lambda: nn.Conv1d(1, 3, 1),
        loader=[(torch.rand(4, 1, 5), torch.arange(20).view(4, 5) % 3)],
    ),
    "dtype": misread(
        r"model fails on .*, \(12, 3\) of torch.float64: .*Double.*batch_fn",
        loader=with_inputs(lambda x: x.double()),
    ),
    "broadcast": misread(
        r"labels of shape \(12,\) do not fit outputs of shape \(12, 1\)",
        model=lambda: nn.Linear(3, 1),
        loader=with_inputs(lambda x: x, REAL),
        likelihood="gaussian",
    ),
    "mask": misread(
        r"labels of -100 in shape \(12, 3\) .* in shape \(12,\) alone",
        loader=with_inputs(lambda x: x, torch.tensor([1, 0, -100]).repeat(12, 1)),
        likelihood=Own(),
    ),
    "likelihood": odd("no label can be drawn", likelihood=WrongLikelihood()),
    "nan-inputs": fails(
        ClientError, "NaN", loader=with_inputs(lambda x: x * float("nan"))
    ),
    **{
        name: odd(
            "depend on the other examples",
            model=lambda mix=mix: Mixes(mix),
            loader=with_inputs(lambda x: x),
        )
        for name, mix in MIXES.items()
    },
    "no-gradients": odd("gradient", model=lambda: WithoutGradients(3, 3)),
    "reentrant": odd("use_reentrant", model=lambda: Checkpointed(3, 3)),
    "nan-model": fails(ClientError, "hold NaN", model=lambda: NaN(3, 3)),
}


def client_of(model=tiny_model, loader=None, **options):
    loader = DataLoader(tiny_data(2), 4) if loader is None else loader
    return FisherClient(model(), loader, device="cpu", **options)


def asked(client, **config):
    return ask(client, ArrayRecord(shared_state(client.problem.model)), KFAC | config)


@pytest.mark.parametrize(("case", "error", "text"), FAILURES.values(), ids=FAILURES)
def test_what_would_fail_after_training_fails_before(case, error, text):
    with pytest.raises(error, match=text):
        asked(client_of(**case, train_fn=untrained))
    with pytest.raises(error, match=text):
        check_client(client_of(**case))


@pytest.mark.parametrize("missing", [3, 5])
def test_examples_without_a_label_are_not_tried(missing):
    """They have no Fisher; here three of the first batch, or all and one more."""
    x, y = tiny_data(2).tensors
    labels = y.clone()
    labels[:missing] = -100
    client = client_of(loader=DataLoader(TensorDataset(x, labels), batch_size=4))
    check_client(client)
    asked(client)


def test_probabilities_are_told(caplog):
    def softmax():
        return nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1))

    asked(client_of(softmax, train_fn=LocalSGD(loss_fn=nn.CrossEntropyLoss())))
    assert "returns probabilities" in caplog.text


@pytest.mark.parametrize("model", [WithoutGradients, Checkpointed])
def test_fedfish_fails_before_its_training_too(model):
    """It takes no example apart."""
    client = client_of(lambda: model(3, 3), train_fn=untrained)
    with pytest.raises(StructureError, match="grad"):
        ask(client, ArrayRecord(shared_state(client.problem.model)), FISH)


def test_an_adapter_that_merges_in_eval_mode_is_trained_and_told(caplog):
    client = client_of(Adapter)
    model = client.problem.model
    before = [p.detach().clone() for p in (model.a, model.b)]
    asked(client)
    assert not any(map(torch.equal, before, (model.a, model.b)))
    assert not model.merged
    assert "do not depend on a, b: no Fisher weighs these" in caplog.text


def test_it_is_made_once_a_process(monkeypatch):
    calls, tries = [], []
    original = train.try_upload

    def counted(*args):
        before = len(calls)
        original(*args)
        tries.append(len(calls) - before)

    class Counting(nn.Linear):
        def forward(self, x):
            calls.append((len(x), self.training, torch.is_grad_enabled()))
            return super().forward(x)

    monkeypatch.setattr(train, "try_upload", counted)
    for config in ({}, {"server-round": 2}, {"structure": "diagonal"}):
        asked(client_of(lambda: Counting(3, 3)), **config)
    assert tries[1] == 0
    assert tries[0] == tries[2] > 3
    # The batch, its first example, and every second one; then the Fisher of two.
    assert calls[:3] == [(n, False, False) for n in (4, 1, 2)]
    assert {n for n, _, _ in calls[3 : tries[0]]} <= {1, 2}
    ask(client_of(), tiny_arrays())  # without a Fisher
    assert len(tries) == 3


class Sorted(nn.Module):
    """A recurrent net of sequences that a collate function sorts by their lengths."""

    def __init__(self):
        super().__init__()
        self.cell, self.last = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        return self.last(self.cell(packed)[1][0])


def test_a_batch_stays_in_its_order():
    x, lengths = torch.rand(6, 5, 3), torch.tensor([5, 4, 4, 3, 2, 1])
    check_client(client_of(Sorted, [(x, lengths, torch.arange(6) % 3)]))


@pytest.mark.parametrize("fisher_source", ["last-epoch", "extra-pass"])
def test_squares_of_a_loops_own_loss_need_no_likelihood(fisher_source):
    loader = [(torch.rand(4, 1, 5), torch.arange(20).view(4, 5) % 3)]
    client = client_of(lambda: nn.Conv1d(1, 3, 1), loader, train_fn=OWN_LOSS)
    config = {"job": "fedfish", "structure": None, "fisher-source": fisher_source}
    arrays = ArrayRecord(shared_state(client.problem.model))
    config = {k: v for k, v in config.items() if v is not None}
    if fisher_source == "last-epoch":
        ask(client, arrays, config)
        return
    with pytest.raises(StructureError, match="movedim"):
        ask(client, arrays, config)


def test_the_check_draws_none_of_the_trainings_random_numbers(monkeypatch):
    def reply():
        model = nn.Sequential(tiny_model(), AlwaysDrops())
        return asked(client_of(lambda: model), job="fedfish", seed=2)

    first, again = reply(), reply()  # it is made once a process
    assert same_bits(*(r.content.array_records["arrays"] for r in (first, again)))


def test_results_are_the_same_bits_with_and_without(monkeypatch):
    def reply():
        torch.manual_seed(3)
        loader = DataLoader(tiny_data(4), 4, shuffle=True)
        model = nn.Sequential(tiny_model(), nn.Dropout(0.5))
        return asked(FisherClient(model, loader, device="cpu"), seed=2)

    with_trial = reply()
    monkeypatch.setattr(train, "try_upload", lambda *args: None)
    without = reply()
    assert metrics_of(with_trial) == metrics_of(without)
    records = [r.content.array_records["arrays"] for r in (with_trial, without)]
    assert same_bits(*records)


class Records(Dataset):
    """A data set that keeps a file open, at a place that reading moves."""

    def __init__(self, path):
        x, y = tiny_data(2).tensors
        rows = torch.cat([x, y.unsqueeze(1)], 1)
        path.write_bytes(rows.numpy().tobytes() * 100)
        self.file, self.expected = path.open("rb"), rows

    def __len__(self):
        return 100 * len(self.expected)

    def __getitem__(self, i):
        self.file.seek(16 * i)
        row = torch.frombuffer(bytearray(self.file.read(16)), dtype=torch.float32)
        assert torch.equal(row, self.expected[i % len(self.expected)])
        return row[:3], row[3].long()


def test_an_open_file_is_read_by_this_process_alone(tmp_path):
    records = Records(tmp_path / "rows")
    with records.file:
        reply = asked(client_of(loader=DataLoader(records, 20)))
    assert metrics_of(reply)["num-examples"] == 1200


# How many examples there are


class Endless(IterableDataset):
    read = 0

    def __iter__(self):
        while True:
            type(self).read += 1
            yield torch.rand(3), torch.tensor(1)


def a_few_batches(model, loader, device, config):
    for number, _ in enumerate(loader, 1):
        if number == 3:
            return {}


class Bucket:
    """A batch without tensors."""

    def __init__(self, part):
        self.part = part


def peeking(model, loader, device, config):
    next(iter(loader))
    assert isinstance(loader, DataLoader)
    assert len(loader) == len(list(loader)) == len(loader.dataset) // 4
    return {}


COUNTS = {
    "library": (DataLoader(tiny_data(2), 5), {}, 12),
    "what is dropped": (DataLoader(tiny_data(2), 5, drop_last=True), {}, 10),
    "a list": ([tiny_data(2).tensors] * 2, {}, 24),
    "mappings": ([{"x": torch.rand(5, 3), "label": torch.zeros(5).long()}], {}, 5),
    "own loop": (DataLoader(tiny_data(2), 4), {"train_fn": peeking}, 12),
    "a part": (DataLoader(tiny_data(2), 3), {"train_fn": a_few_batches}, 9),
    "an endless stream": (DataLoader(Endless(), 4), {"train_fn": a_few_batches}, 12),
    "the loop's": (
        DataLoader(tiny_data(2), 4),
        {"train_fn": lambda *_: {"num-examples": 2.5}},
        2.5,
    ),
    "unread": (DataLoader(tiny_data(2), 4), {"train_fn": lambda *_: {}}, 12),
    "given": (DataLoader(tiny_data(2), 4), {"num_examples": 77}, 77),
    "given, a part read": (
        DataLoader(tiny_data(2), 3),
        {"train_fn": a_few_batches, "num_examples": 12},
        12,
    ),
    "batch_fn": (
        [Bucket(tiny_data(2).tensors)],
        {"batch_fn": lambda batch: batch.part},
        12,
    ),
}


@pytest.mark.parametrize("structure", [None, "kfac"])
@pytest.mark.parametrize(("loader", "options", "count"), COUNTS.values(), ids=COUNTS)
def test_a_client_has_as_many_examples_as_its_training_read(
    loader, options, count, structure
):
    client = client_of(loader=loader, **options)
    config = {} if structure is None else {"structure": structure}
    assert metrics_of(ask(client, config=config))["num-examples"] == count


@pytest.mark.parametrize("job", ["gradient", "probe"])
def test_an_endless_stream_is_read_for_as_many_examples_as_are_given(job):
    client = client_of(loader=DataLoader(Endless(), 4), num_examples=10)
    Endless.read = 0
    ask(client, tiny_arrays(), {"job": job})
    assert Endless.read <= 5 * 12


def test_an_endless_stream_is_read_no_further_than_the_training_read():
    client = client_of(loader=DataLoader(Endless(), 4), train_fn=a_few_batches)
    Endless.read = 0
    asked(client)
    assert Endless.read <= 5 * 12 + 4
    untold = client_of(
        loader=DataLoader(Endless(), 10**6), train_fn=lambda *_: {"num-examples": 3}
    )
    assert metrics_of(ask(untold))["num-examples"] == 3


# The dry run


def test_a_dry_run_trains_nothing_and_tells_the_upload(caplog):
    client = client_of(train_fn=untrained)
    before = {k: v.clone() for k, v in client.problem.model.state_dict().items()}
    check_client(client)
    after = client.problem.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert "curvature: K-FAC of 0, 3; diagonal of 1; upload " in caplog.text
    assert "of FedAvg's" in caplog.text
    assert "changed no parameter" not in caplog.text


def test_a_dry_run_finds_what_the_first_batch_does_not_show():
    batch_statistics = nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)
    )
    with pytest.raises(FlwrFisherError, match="fails on fewer"):
        check_client(client_of(lambda: batch_statistics))
    with pytest.raises(FlwrFisherError, match="structure 'kfca'"):
        check_client(client_of(), structure="kfca")
    with pytest.raises(DataError, match="no batches"):
        check_client(client_of(loader=[]))
