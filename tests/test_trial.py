"""What a client is to upload is tried before it trains, and that changes nothing."""

import logging
import random
import time
from contextlib import suppress
from itertools import islice, product

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from virtual import ask, metrics_of, same_bits, tiny_client, tiny_data, tiny_model

from flwr_fisher.client import FisherClient, LocalSGD, Request, cross_entropy, trial
from flwr_fisher.client.jobs import train
from flwr_fisher.client.trial import on_few_examples, upload_summary
from flwr_fisher.curvature import Likelihood, fisher
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    DataError,
    FlwrFisherError,
    StructureError,
)
from flwr_fisher.params import shared_state
from flwr_fisher.wire.arrays import FORMAT_VERSION

# --- nothing fails after training that could have failed before


class Trained(Exception):  # noqa: N818
    """Training began."""


def never(model, loader, device, config):
    raise Trained


def ask_untrained(model=None, loader=None, config=None, **options):
    model = tiny_model() if model is None else model
    loader = DataLoader(tiny_data(2), 4) if loader is None else loader
    options.setdefault("train_fn", never)
    client = FisherClient(model, loader, device="cpu", **options)
    arrays = ArrayRecord(shared_state(model))
    return ask(client, arrays, {"structure": "kfac"} | (config or {}))


class NaN(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 0


class TwoOutputs(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class AtZero(nn.Linear):
    """Finite outputs, whose gradients are not."""

    def forward(self, x):
        return (
            super().forward(x) + (self.weight - self.weight.detach()).abs().sqrt().sum()
        )


class WrongLikelihood(Likelihood):
    def columns(self, outputs):
        return outputs

    def sample_score(self, outputs, generator):
        raise KeyError("sample")

    def score(self, outputs, labels):
        raise KeyError("score")


def frozen():
    return tiny_model().requires_grad_(False)


def with_inputs(change, labels=None):
    x, y = tiny_data(2).tensors
    return [(change(x), y if labels is None else labels)]


def broadcasting(outputs, labels):
    return (outputs - labels).square().mean()


batch_statistics = nn.Sequential(
    nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)
)
REAL = torch.rand(12)
LATE = TensorDataset(torch.rand(12, 3), torch.tensor([*[1, 2] * 5, 0, 255]).byte())
EMPIRICAL = {"expectation": "empirical"}
PACKED = {"codec": "fedavg", "codec-version": FORMAT_VERSION}


class Scaled(nn.Linear):
    def forward(self, x, scale=None):
        return super().forward(x if scale is None else x * scale.unsqueeze(1))


def fails(error, text, **case):
    return case, error, text


FAILURES = {
    "no-parameters": fails(ConfigurationError, "no trainable parameter", model=frozen),
    "batch-statistics": fails(
        StructureError, "layer '1' normalises", model=lambda: batch_statistics
    ),
    "too-large": fails(
        StructureError,
        "need 9.2 GB",
        model=lambda: nn.Linear(3, 12_000),
        config={"structure": "dense"},
    ),
    "one-class": fails(
        StructureError, "at least 2 classes", model=lambda: nn.Linear(3, 1)
    ),
    "two-outputs": fails(
        StructureError, "the model returns a tuple", model=lambda: TwoOutputs(3, 3)
    ),
    "no-pair": fails(DataError, "a name of labels", loader=[{"a": REAL, "b": REAL}]),
    "no-labels": fails(
        DataError,
        "must hold a tensor of labels",
        loader=DataLoader(tiny_data(2).tensors[0], 4),
        config=EMPIRICAL,
    ),
    "real-labels": fails(
        StructureError,
        "a label is .*: pass likelihood='gaussian'",
        loader=with_inputs(lambda x: x, REAL),
        config=EMPIRICAL,
    ),
    "label-range": fails(
        DataError,
        r"label 7 is outside \[0, 3\)",
        loader=with_inputs(lambda x: x, torch.full((12,), 7)),
        config={"job": "fedfish"},
    ),
    "label-range-unused": fails(
        DataError,
        r"label 7 is outside \[0, 3\)",  # on a GPU, training would end the process
        loader=with_inputs(lambda x: x, torch.full((12,), 7)),
    ),
    "late-label": fails(
        DataError,
        r"label 255 is outside \[0, 3\)",
        loader=DataLoader(Subset(LATE, range(2, 12)), 4, shuffle=True),
    ),
    "late-label-of-a-list": fails(
        DataError,
        r"label 255 is outside \[0, 3\)",
        loader=list(DataLoader(LATE, 4)),
    ),
    "late-label-of-batches": fails(
        DataError,
        r"label 255 is outside \[0, 3\)",
        loader=DataLoader(LATE, batch_sampler=[[0, 1, 2], [11]]),
    ),
    "classes-second": fails(
        StructureError,
        r"the loss shows that the second dimension .*\(4, 3, 3\).*movedim",
        model=lambda: nn.Conv1d(1, 3, 1),
        loader=[(torch.rand(4, 1, 3), torch.arange(12).view(4, 3) % 3)],
        train_fn=LocalSGD(loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1)),
    ),
    "dtype": fails(
        DataError,
        r"model fails on .*, \(12, 3\) of torch.float64: .*Double.*own loop.*batch_fn",
        loader=with_inputs(lambda x: x.double(), REAL.long()),
        train_fn=lambda model, *own: model,
    ),
    "weights": fails(
        DataError,
        r"the last part of a batch is its labels: if the numbers are weights",
        model=lambda: Scaled(3, 3),
        loader=DataLoader(TensorDataset(*tiny_data(2).tensors, torch.rand(12)), 4),
        train_fn=lambda model, *own: model,
    ),
    "softmax": fails(
        StructureError,
        "returns probabilities, after a softmax, and its loss takes their log",
        model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)),
        loader=with_inputs(lambda x: x, torch.arange(12) % 3),
        train_fn=LocalSGD(loss_fn=lambda p, y: nn.functional.nll_loss(p.log(), y)),
    ),
    "sigmoid": fails(
        StructureError,
        "returns probabilities, after a sigmoid, .*cross_entropy_with_logits",
        model=lambda: nn.Sequential(nn.Linear(3, 1), nn.Sigmoid()),
        loader=with_inputs(lambda x: x, (REAL > 0.5).float().unsqueeze(1)),
        likelihood="bernoulli",
        train_fn=LocalSGD(loss_fn=nn.BCELoss()),
    ),
    "broadcast-integers": fails(
        StructureError,
        r"labels, \[4\], may be broadcast against the outputs, \[4, 1\]",
        model=lambda: nn.Linear(3, 1),
        loader=with_inputs(lambda x: x, torch.arange(12)),
        likelihood="gaussian",
        train_fn=LocalSGD(loss_fn=broadcasting),
    ),
    "broadcast": fails(
        StructureError,
        r"labels, \[4\], may be broadcast against the outputs, \[4, 1\]",
        model=lambda: nn.Linear(3, 1),
        loader=with_inputs(lambda x: x, REAL),
        likelihood="gaussian",
        train_fn=LocalSGD(loss_fn=broadcasting),
    ),
    "gaussian": fails(
        DataError, "do not fit outputs", likelihood="gaussian", config=EMPIRICAL
    ),
    "likelihood": fails(
        StructureError, "WrongLikelihood.columns returned", likelihood=WrongLikelihood()
    ),
    "score": fails(KeyError, "score", likelihood=WrongLikelihood(), config=EMPIRICAL),
    "nan-inputs": fails(
        DataError,
        "the inputs of the first training examples hold NaN",
        loader=with_inputs(lambda x: x * float("nan")),
    ),
    "nan-model": fails(
        ClientError, "outputs of the first .* hold NaN", model=lambda: NaN(3, 3)
    ),
    "nan-gradient": fails(
        DataError,
        "Fisher of .* is not finite",
        model=lambda: AtZero(3, 3),
        config={"structure": "diagonal"},
    ),
    "report": fails(
        DataError,
        "labels of shape",
        loader=with_inputs(lambda x: x, REAL),
        likelihood="gaussian",
        config={"report-local": True},
    ),
}


@pytest.mark.parametrize(("case", "error", "text"), FAILURES.values(), ids=FAILURES)
def test_what_would_fail_after_training_fails_before(case, error, text):
    case = dict(case)
    if "model" in case:
        case["model"] = case["model"]()
    if case.get("loader", 0) is None:
        case["loader"] = (batch for batch in DataLoader(tiny_data(2), 4))
    with pytest.raises(error, match=text):
        ask_untrained(**case)


class Labelled(Sampler):
    def __iter__(self):
        return iter(range(10))

    def __len__(self):
        return 10


@pytest.mark.parametrize(
    "sampler", [Labelled(), range(10), SubsetRandomSampler(range(10))]
)
def test_labels_that_no_sampler_draws_are_no_reason_to_fail(sampler):
    with pytest.raises(Trained):
        ask_untrained(loader=DataLoader(LATE, 4, sampler=sampler))


@pytest.mark.parametrize(
    ("loss_fn", "text"), [(None, "last dimension"), (cross_entropy, "")]
)
def test_classes_may_be_last_where_both_orders_fit(loss_fn, text, caplog):
    loop = never if loss_fn is None else LocalSGD(loss_fn=loss_fn)
    data = torch.rand(4, 3, 3), torch.arange(12).view(4, 3) % 3
    model = nn.Linear(3, 3)
    client = FisherClient(model, [data], train_fn=loop, device="cpu")
    caplog.set_level("INFO")
    with suppress(Trained):
        ask(client, ArrayRecord(shared_state(model)), config={"structure": "kfac"})
    assert text in caplog.text


@pytest.mark.parametrize("train_fn", [LocalSGD(), lambda *own: LocalSGD()(*own)])
def test_probabilities_may_be_logits_to_a_cross_entropy(train_fn, caplog):
    """Torch's takes a second softmax of them, and so does the Fisher."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1))
    loader = with_inputs(lambda x: x, torch.arange(12) % 3)
    client = FisherClient(model, loader, train_fn=train_fn, device="cpu")
    caplog.set_level("INFO")
    ask(client, ArrayRecord(shared_state(model)), config={"structure": "kfac"})
    own = not isinstance(train_fn, LocalSGD)
    assert ("The model returns probabilities" in caplog.text) == own


class Again:
    """An iterator, though one that begins anew."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        self.rest = iter(self.batches)
        return self

    def __next__(self):
        return next(self.rest)


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
@pytest.mark.parametrize("codec", ["lossless", "fedavg"])
@pytest.mark.parametrize("kind", ["zero", "one-example", "constant", "typical"])
def test_few_examples_of_little_use_are_no_reason_to_fail(structure, codec, kind):
    model = nn.Sequential(nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 3))
    x, y = torch.randn(6, 30), torch.arange(6) % 3
    if kind == "zero":
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    if kind == "constant":
        x = torch.zeros_like(x)
    n = 1 if kind == "one-example" else 6
    config = {"structure": structure, "codec": codec, "codec-version": FORMAT_VERSION}
    with pytest.raises(Trained):
        ask_untrained(model, [(x[:n], y[:n])], config)


def test_many_labels_cost_one_pass_an_example():
    passes = []

    class Counted(nn.Linear):
        def forward(self, x):
            outputs = super().forward(x)
            if outputs.requires_grad:
                outputs.register_hook(lambda gradient: passes.append(1))
            return outputs

    with pytest.raises(Trained):
        ask_untrained(
            Counted(3, 200), config={"structure": "diagonal", "tolerance": 0.0}
        )
    assert 0 < len(passes) < 10


def test_a_model_of_one_batch_size_is_tried_on_a_whole_batch():
    class Fixed(nn.Linear):
        def forward(self, x):
            return super().forward(x.reshape(6, 3))

    with pytest.raises(Trained):
        ask_untrained(Fixed(3, 3), DataLoader(tiny_data(2), 6), {"job": "fedfish"})


def test_a_model_that_cannot_be_copied_is_trained(caplog):
    class Locked(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("a lock")

    with pytest.raises(Trained), caplog.at_level(logging.INFO):
        ask_untrained(Locked(3, 3))
    assert "Skipping the trial before training: TypeError: a lock" in caplog.text


# --- and it changes nothing


class Noisy(Dataset):
    """Draws from every generator, and opens its file on first use."""

    def __init__(self):
        self.data, self.file = tiny_data(4), None
        self.opened = 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        if self.file is None:
            self.file, self.opened = object(), self.opened + 1
        x, y = self.data[i]
        noise = random.random() + np.random.rand() + torch.rand(3)  # noqa: NPY002
        return x + noise, y


class OwnNoise(Noisy):
    """Draws from generators of its own, one of them in a function."""

    def __init__(self):
        super().__init__()
        draw, self.draw = np.random.default_rng(3), torch.Generator().manual_seed(3)
        self.transform = lambda x: x + draw.random() + self.noise()

    def noise(self):
        return torch.rand(3, generator=self.draw)

    def __getitem__(self, i):
        x, y = self.data[i]
        return self.transform(x), y


class OwnSampler(Sampler):
    def __init__(self, n):
        self.n, self.draw = n, np.random.default_rng(5)

    def __iter__(self):
        return iter(self.draw.permutation(self.n).tolist())

    def __len__(self):
        return self.n


class Chunks(IterableDataset):
    """Each reading goes on where the last ended: what is read is gone."""

    def __init__(self):
        self.source, self.read = iter(range(10_000)), 0

    def __len__(self):
        return 8

    def __iter__(self):
        for _ in range(8):
            self.read += 1
            i = next(self.source) % 12
            yield tiny_data(2)[i]


def seeded_generator():
    return torch.Generator().manual_seed(7)


LOADERS = {
    "shuffled": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "own": lambda: DataLoader(Noisy(), 4, shuffle=True, generator=seeded_generator()),
    "in-order": lambda: DataLoader(Noisy(), 4),
    "sampler": lambda: DataLoader(Noisy(), 4, sampler=OwnSampler(16)),
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=1),
    "own-noise": lambda: DataLoader(OwnNoise(), 4),
    "lists": lambda: DataLoader(
        tiny_data(4), batch_size=None, sampler=BatchSampler(range(16), 4, False)
    ),
    "chunks": lambda: DataLoader(Chunks(), 4),
    "list": lambda: list(DataLoader(tiny_data(2), 4)),
    "iterator": lambda: Again(list(DataLoader(tiny_data(2), 4))),
}
CONFIGS = {
    "kfac": {"structure": "kfac", "expectation": "sampled"},
    "diagonal": {"structure": "diagonal", "report-local": True},
    "batches": {"job": "fedfish", "reduction": "sum"},
    "last-epoch": {"job": "fedfish", "source": "last-epoch"},
    "sums": {"job": "diagonal-sums", "structure": "diagonal"},
    "few": {"structure": "kfac", "examples": 3},
}


class Counting(nn.Module):
    """Counts its calls in a buffer and in an attribute, and both change its outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.last = 0.0

    def forward(self, x):
        self.last = self.last + 1e-5
        self.calls += 1e-4
        return x + self.calls + self.last


def awkward_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(3, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(0.5),
            Counting(),
            nn.Linear(4, 3),
        )


def reply_of(loader, config, train_fn=None):
    model = awkward_model()
    model[1].eval()  # a mode that is the user's own choice
    loop = LocalSGD(lr=0.1, epochs=2) if train_fn is None else train_fn
    client = FisherClient(model, loader, device="cpu", train_fn=loop)
    reply = ask(client, ArrayRecord(shared_state(awkward_model())), config)
    (arrays,) = reply.content.array_records.values()
    modes = [module.training for module in model.modules()]
    return arrays, metrics_of(reply), modes


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("loader", "asked"),
    [*product(LOADERS, ("kfac", "batches")), *product(["own-noise"], CONFIGS)],
)
def test_results_are_the_same_bits_with_and_without(loader, asked, monkeypatch):
    make, config = LOADERS[loader], CONFIGS[asked]
    tried, counted = reply_of(make(), config), []
    monkeypatch.setattr(train, "try_upload", lambda *arguments: counted.append(1))
    untried = reply_of(make(), config)
    assert counted
    assert same_bits(tried[0], untried[0])
    assert tried[1:] == untried[1:]


def tried(loader, structure="kfac"):
    problem = FisherClient(awkward_model(), loader, device="cpu").problem
    request = Request(shared_state(problem.model), options={"structure": structure})
    train.try_upload(problem, request, train.TrainingJob.of(problem, request))
    return problem


def test_model_loader_and_generators_are_as_they_were():
    loader = DataLoader(tiny_data(4), 4, shuffle=True, generator=seeded_generator())
    parts = [loader, loader.sampler, loader.batch_sampler, loader.dataset]
    before = [dict(vars(part)) for part in parts]
    numbers = [torch.get_rng_state(), loader.generator.get_state()]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    model = tried(loader).model
    for part, own in zip(parts, before, strict=True):
        assert vars(part).keys() == own.keys()
        assert all(vars(part)[name] is value for name, value in own.items())
    after = [torch.get_rng_state(), loader.generator.get_state()]
    assert all(torch.equal(a, b) for a, b in zip(numbers, after, strict=True))
    assert random.getstate() == python
    assert str(np.random.get_state()) == str(numpy)  # noqa: NPY002
    assert (model[3].last, model[3].calls) == (0.0, 0)
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_file_is_opened_in_a_worker(workers):
    loader = DataLoader(Noisy(), 4, num_workers=workers)
    assert tried(loader).trainloader.dataset.file is None


@pytest.mark.parametrize("stuck", ["fork", "platform"])
def test_where_no_process_can_read_training_goes_on(stuck, monkeypatch, caplog):
    class Stuck(Noisy):
        def __getitem__(self, i):
            return time.sleep(0.5 if stuck == "fork" else 0)

    if stuck == "fork":
        monkeypatch.setattr("flwr_fisher.client.trial._SECONDS", 0.1)
    else:
        monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(Trained), caplog.at_level(logging.INFO):
        ask_untrained(loader=DataLoader(Stuck(), 4))
    assert "Skipping the trial before training" in caplog.text


def test_it_is_done_once_a_request_and_only_for_curvature(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "flwr_fisher.client.jobs.train.on_few_examples",
        lambda *arguments: seen.append(1),
    )
    ask(tiny_client(2))
    assert not seen
    ask(tiny_client(2), config={"structure": "kfac"})
    assert len(seen) == 1


# --- which examples


def examples_of(loader, count=3):
    problem = FisherClient(tiny_model(), loader, device="cpu").problem
    batch = on_few_examples(problem, lambda copied, batch: batch)
    (x,), y = batch.inputs.args, batch.labels
    return x[:count], y[:count]


def rows(positions):
    x, y = tiny_data(4).tensors
    return x[positions], y[positions]


DATA = tiny_data(4)
SAMPLERS = {
    "in-order": (DataLoader(DATA, 4), [0, 1, 2]),
    "random": (DataLoader(DATA, 4, sampler=RandomSampler(DATA)), [0, 1, 2]),
    "subset": (DataLoader(DATA, 4, sampler=SubsetRandomSampler([5, 3])), [5, 3]),
    "weights": (
        DataLoader(DATA, 4, sampler=WeightedRandomSampler([0] * 9 + [1] * 7, 4)),
        [9, 10, 11],
    ),
    "batches": (DataLoader(DATA, batch_sampler=[[7, 8], [1]]), [7, 8]),
    "range": (DataLoader(DATA, 4, sampler=range(6, 9)), [6, 7, 8]),
    "whole": (
        DataLoader(DATA, batch_size=None, sampler=BatchSampler(range(9), 5, False)),
        [0, 1, 2],
    ),
    "lists": (DataLoader(DATA, batch_size=None, sampler=[[4, 5], [6]]), [4, 5]),
    "list": (list(DataLoader(DATA, 4)), [0, 1, 2]),
}


@pytest.mark.parametrize(("loader", "positions"), SAMPLERS.values(), ids=SAMPLERS)
def test_examples_are_such_as_the_loader_gives(loader, positions):
    found = examples_of(loader)
    assert all(torch.equal(a, b) for a, b in zip(found, rows(positions), strict=True))


def test_each_position_of_a_data_set_may_be_a_batch():
    class Batched(Dataset):
        def __getitem__(self, i):
            return rows([i, i + 1, i + 2, i + 3])

        def __len__(self):
            return 4

    found = examples_of(DataLoader(Batched(), batch_size=None))
    assert torch.equal(found[0], rows([0, 1, 2])[0])


def test_a_stream_keeps_its_first_batch(caplog):
    loader = DataLoader(Chunks(), 4)
    with pytest.raises(Trained), caplog.at_level(logging.INFO):
        ask_untrained(loader=loader)
    assert loader.dataset.read == 0
    assert "Skipping the trial before training: the data are a stream" in caplog.text


def untrained(number, loss):
    raise AssertionError("an epoch was trained")


def test_a_stream_is_tried_on_the_first_batch_of_its_training():
    model, loader = NaN(3, 3), DataLoader(Chunks(), 4)
    train_fn = LocalSGD(on_epoch=untrained)
    with pytest.raises(ClientError, match=r"outputs of the first .* hold NaN"):
        ask_untrained(model, loader, train_fn=train_fn)
    assert loader.dataset.read == 4  # examples, of the first batch
    assert all(p.grad is None for p in model.parameters())  # no step was begun


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield from tiny_data(2)


def some_steps(model, loader, device, config):
    for x, y in islice(loader, 3):
        nn.functional.cross_entropy(model(x), y).backward()
    return {"num-examples": 12} if config.get("note") else {}


def test_a_loop_may_take_what_it_likes_of_an_endless_stream(monkeypatch):
    monkeypatch.setattr("flwr_fisher.client.problem._MOST", 100)
    loader = DataLoader(Endless(), 4)
    client = FisherClient(tiny_model(), loader, device="cpu", train_fn=some_steps)
    config = {"structure": "kfac", "examples": 8}
    assert metrics_of(ask(client, config=config | {"note": 1}))["num-examples"] == 12
    with pytest.raises(
        DataError, match=r"own train_fn, or pass num_examples=\.\.\. to"
    ):
        ask(client, config=config)


def test_a_fisher_of_all_that_an_endless_stream_gives_is_of_what_the_loop_took():
    """It read on forever, once it was trained on."""
    client = FisherClient(
        tiny_model(), DataLoader(Endless(), 4), device="cpu", train_fn=some_steps
    )
    config = {"structure": "diagonal", "note": 1}
    few = ask(client, config=config | {"examples": 12})
    (one,), (two,) = (
        reply.content.array_records.values()
        for reply in (few, ask(client, config=config))
    )
    assert same_bits(one, two)


@pytest.mark.parametrize("begin", ["state_dict", "shared_state"])
def test_an_upload_of_frozen_parameters_is_told(begin, caplog):
    model = tiny_model()
    model[0].requires_grad_(False)
    begins = {"state_dict": model.state_dict(), "shared_state": shared_state(model)}
    arrays = ArrayRecord({k: v for k, v in begins[begin].items() if v.dim()})
    client = FisherClient(model, DataLoader(tiny_data(2), 4), device="cpu")
    with caplog.at_level(logging.INFO):
        ask(client, arrays)
    told = "2 frozen parameters are 34% of the upload, since" in caplog.text
    assert told == (begin == "state_dict")


def test_the_first_examples_may_lack_labels():
    x, y = tiny_data(2).tensors
    y = y.where(torch.arange(len(y)) > 7, -100)  # of two batches of four
    loader = DataLoader(TensorDataset(x, y), 4)
    client = FisherClient(tiny_model(), loader, device="cpu")
    assert ask(client, config={"structure": "kfac"})


def prepare(worker):
    torch.utils.data.get_worker_info().dataset.data = tiny_data(2)


class InWorkers(Dataset):
    """What can be read once it is prepared, as workers are."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.data[i]


def test_what_cannot_be_read_is_left_to_training(caplog):
    with pytest.raises(Trained), caplog.at_level(logging.INFO):
        ask_untrained(loader=DataLoader(InWorkers(), 4))
    assert "Skipping the trial before training: AttributeError" in caplog.text


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"examples": 3}])
def test_workers_are_prepared_as_the_loaders_are(options):
    loader = DataLoader(InWorkers(), 4, num_workers=1, worker_init_fn=prepare)
    config = {"structure": "diagonal", **options}
    client = FisherClient(tiny_model(), loader, device="cpu")
    assert metrics_of(ask(client, config=config))["num-examples"] == 8
    assert torch.equal(examples_of(loader)[0], tiny_data(2).tensors[0][:3])


# --- what is told


def described(model, inputs, structure="kfac", **options):
    F = fisher(model, [inputs], structure=structure, max_passes=1, **options)
    return upload_summary(model, F, structure, "upload 1 MB")


def test_the_log_says_once_which_layer_has_which_curvature(caplog):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    for _ in "ab":
        with pytest.raises(Trained), caplog.at_level(logging.INFO):
            ask_untrained(model)
    lines = [r.message for r in caplog.records]
    (first,) = [i for i, line in enumerate(lines) if line.startswith("curvature:")]
    assert " ".join(lines[first:]).startswith(
        "curvature: K-FAC of 2; diagonal of 0, 1 (3 tensors); frozen: 0; upload about "
    )


def test_size_without_packing_is_the_codecs_budget(monkeypatch):
    client, problem = tiny_client(2), tiny_client(2).problem
    arrays = shared_state(problem.model)
    told = []
    monkeypatch.setattr("flwr_fisher.client.jobs.train.log_once", told.append)
    for limit in (10**9, 0):
        monkeypatch.setattr("flwr_fisher.client.jobs.train._ENTRIES", limit)
        ask(client, ArrayRecord(arrays), {"structure": "kfac", **PACKED})
    ratios = [float(lines[-1].split(", ")[-1].split()[0]) for lines in told]
    assert 0.3 < ratios[0] <= ratios[1] == 1


def test_tct_looks_at_labels_in_its_first_stage():
    loader = with_inputs(lambda x: x, torch.full((12,), 7))
    config = {"check": "tct-check", "num-features": 10, "local-steps": 5}
    client = FisherClient(tiny_model(), loader, device="cpu", train_fn=never)
    with pytest.raises(FlwrFisherError, match="labels must be one class for"):
        ask(client, config=config)


def test_a_batch_that_no_process_can_send_is_told_at_once():
    """A worker's thread would print it, and the reader wait for a minute."""

    class Local:
        """No other process finds this class."""

    assert trial._Sent(list)([1, 2]) == [1, 2]
    with pytest.raises(Exception, match="Local"):
        trial._Sent(lambda rows: Local())([1, 2])


# --- other people's loaders


class Ward(DataLoader):
    """A loader of one's own that reads as torch's does."""


class Prepared(DataLoader):
    """A loader that changes its batches."""

    def __iter__(self):
        return ((x / 2, y) for x, y in super().__iter__())


def test_a_subclass_that_reads_as_torchs_is_tried():
    data = TensorDataset(tiny_data(2).tensors[0], torch.full((12,), 7))
    with pytest.raises(DataError, match="7"):
        ask_untrained(loader=Ward(data, 4))


def test_the_log_says_that_a_loader_has_an_iter_of_its_own(caplog):
    with caplog.at_level(logging.INFO, "flwr"), suppress(Trained):
        ask_untrained(loader=Prepared(tiny_data(2), 4))
    assert "a Prepared has an __iter__ of its own" in caplog.text


def test_a_batch_fn_that_fails_is_refused_before_the_training():
    def batch_fn(batch):
        return batch["scan"], batch["label"]

    rows = [{"scan": x, "diagnosis": y} for x, y in tiny_data(2)]
    says = "batch_fn fails on a batch, a mapping of 'scan', 'diagnosis': KeyError"
    with pytest.raises(DataError, match=says):
        ask_untrained(loader=DataLoader(rows, 4), batch_fn=batch_fn)


def test_a_batch_fn_may_need_whole_batches():
    def batch_fn(batch):
        assert len(batch[0]) == 6
        return batch

    with pytest.raises(Trained):
        ask_untrained(loader=DataLoader(tiny_data(2), 6), batch_fn=batch_fn)
