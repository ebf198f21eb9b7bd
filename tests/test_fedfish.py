"""FedFish as a strategy: against sums written out, and as people run it."""

import itertools
import re
from functools import partial

import numpy as np
import pytest
import rivals_path  # noqa: F401
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from virtual import (
    LIFTED,
    Watched,
    app_by_partition,
    ask,
    change_array,
    half_square,
    killing_app,
    plane,
    quick_app,
    same_bits,
    tensors_of,
    tiny_arrays,
    tiny_client,
    tiny_data,
)
from virtual import start as run

from flwr_fisher.client import ClientLimits, FisherClient, LocalSGD
from flwr_fisher.errors import CheckpointError, ConfigurationError, RoundError
from flwr_fisher.params import shared_state, weighted_mean
from flwr_fisher.strategies import FedFish
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import PREFIX, Additive, FisherUpload, arrays_to_tensors
from flwr_fisher.wire.additive import products

MOMENTUM = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
ASKS = {"job": "fedfish"}
FISHER = f"{PREFIX}diagonal/"
ADAM = {"server_optimizer": "adam", "server_lr": 0.02}


def fedfish(**options):
    """The paper's, unless the options say more."""
    paper = {"power": 1.0, "balance": 0.0, "codec": "lossless"}
    return FedFish(**{"fraction_evaluate": 0.0, **paper, **options})


# One round by hand

# y = w x with w in R^2 and the loss (w x - y)^2 / 2, whose gradient is (w x - y) x.
# Both clients start from (0, 0) and train with learning rate 1/2, in batches of one.
#
# Client 0 sees x = (1, 0), y = 4: gradient (-4, 0), so w = (2, 0). There the gradient
# is (-2, 0), so F = (4, 0).
# Client 1 sees x = (1, 1), y = 2: gradient (-2, -2), so w = (1, 1); then x = (0, 1),
# y = 3: gradient (0, -2), so w = (1, 2). There the gradients are (1, 1) and (0, -1),
# so F = (1, 2).
#
# g = (1·4·(-2) + 2·1·(-1)) / (1·4 + 2·1), 2·2·(-2) / (2·2) = (-5/3, -2).
HOLDINGS = [([[1, 0]], [[4]]), ([[1, 1], [0, 1]], [[2], [3]])]


def on_the_plane(partition):
    x, y = HOLDINGS[partition]
    data = TensorDataset(torch.tensor(x).float(), torch.tensor(y).float())
    train = LocalSGD(lr=0.5, momentum=0.0, loss_fn=half_square)
    loader = DataLoader(data, batch_size=1)
    return FisherClient(plane(), loader, train_fn=train, likelihood="gaussian")


CASES = [
    ("paper", {}, [5 / 3, 2]),
    ("server-lr", {"server_lr": 0.5}, [5 / 6, 1]),
    # The mean over client 1's two batches halves its F: 4, 0 and 1/2, 1.
    ("mean", {"reduction": "mean"}, [(1 * 4 * 2 + 2 * 0.5 * 1) / (4 + 2 * 0.5), 2]),
    # Of traces 4 and 3, F becomes 1, 0 and 1/3, 2/3; or by their roots 2, 0 and …
    ("balance", {"balance": 1.0}, [(1 * 1 * 2 + 2 / 3 * 1) / (1 + 2 / 3), 2]),
    ("all", {"balance": 1.0, "reduction": "mean"}, [(2 + 2 / 3) / (1 + 2 / 3), 2]),
    ("by-root", {"balance": 0.5}, [(2 * 2 + 2 / 3**0.5) / (2 + 2 / 3**0.5), 2]),
    # Of roots 2, 0 and 1, √2; divided by their traces 1, 0 and 1/(1 + √2), …
    ("power", {"power": 0.5}, [(2 * 2 + 2 * 1) / (2 + 2), 2]),
    (
        "power-balance",
        {"power": 0.5, "balance": 1.0},
        [(2 + 2 / (1 + 2**0.5)) / (1 + 2 / (1 + 2**0.5)), 2],
    ),
    ("fedavg", {"power": 0.0}, [(2 + 2 * 1) / 3, 4 / 3]),
    # While training, the gradients were (-4, 0), and (-2, -2) and (0, -2).
    (
        "last-epoch",
        {"fisher_source": "last-epoch"},
        [(16 * 2 + 2 * 4 * 1) / (16 + 2 * 4), 2],
    ),
    # AdaGrad's first step has the gradient's sign: torch's starts from zero.
    ("adagrad", {"server_optimizer": "adagrad", "server_lr": 0.25}, [0.25, 0.25]),
]


@pytest.mark.parametrize(
    ("options", "expected"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_one_round_is_what_a_pencil_gives(options, expected):
    start = ArrayRecord(shared_state(plane()))
    result = run(fedfish(**options), app_by_partition(on_the_plane), 2, start)
    got = arrays_to_tensors(result.arrays)["weight"]
    torch.testing.assert_close(got, torch.tensor([expected]))
    if not options:
        wanted = torch.tensor([[-5 / 3, -2]]).double()
        torch.testing.assert_close(result.details["weight"], wanted)
        norm = result.train_metrics_clientapp[1]["pseudo-gradient-norm"]
        assert norm == pytest.approx((25 / 9 + 4) ** 0.5)


def test_by_default_fishers_are_rooted_and_balanced():
    start, app = ArrayRecord(shared_state(plane())), app_by_partition(on_the_plane)
    own = FedFish(fraction_evaluate=0.0, codec="lossless")
    mended = run(fedfish(power=0.5, balance=1.0), app, 2, start)
    assert_same(run(own, app, 2, start), mended)


# FedAvg


def every_fisher(change):
    def tamper(content):
        for key in list(content.array_records["arrays"]):
            if key.startswith(FISHER):
                change_array(key, change)(content)

    return tamper


@pytest.mark.parametrize("value", [3e-7, 0.0])
def test_equal_fishers_give_fedavg_bit_for_bit(value):
    equal = every_fisher(lambda a: np.full_like(a, value))
    result = run(fedfish(), Watched(tamper=dict.fromkeys(range(4), equal)), 4)
    posteriors = [u.payload.posterior(u.num_examples) for u in result.uploads]
    mean = weighted_mean(
        [p.params for p in posteriors], [p.num_examples for p in posteriors]
    )
    got = arrays_to_tensors(result.arrays)
    for key, expected in mean.items():
        assert torch.equal(got[key], expected), key
    flowers = FedAvg(fraction_evaluate=0.0).start(
        LocalGrid(quick_app(), 4), tiny_arrays(), num_rounds=1
    )
    theirs = flowers.arrays.to_torch_state_dict()
    for key in (k for k in got if "num_batches" not in k):
        torch.testing.assert_close(got[key], theirs[key], rtol=1e-6, atol=1e-7)
    zeros = result.train_metrics_clientapp[1]["num-zero-fishers"]
    assert zeros == (4 if value == 0 else 0)


def test_batch_norm_statistics_are_averaged_by_examples():
    asked = {"server-round": 1}
    replies = [tensors_of(ask(tiny_client(i), config=asked)) for i in range(3)]
    for options in ({}, {"server_lr": 0.5}):
        got = arrays_to_tensors(run(fedfish(**options)).arrays)
        for key in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            mean = weighted_mean([{key: r[key]} for r in replies], [8, 10, 12])
            assert torch.equal(got[key], mean[key]), (key, options)


# The Fisher, by loops of its own


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def net_client(batch_size=4, holding=1, **training):
    loader = DataLoader(tiny_data(holding), batch_size=batch_size)
    train = LocalSGD(**{"lr": 0.1, **training})
    return FisherClient(net(), loader, train_fn=train, device="cpu"), loader


def fisher_of(client, **config):
    """What a client uploads: its parameters and its Fisher."""
    start = shared_state(net())
    reply = ask(client, ArrayRecord(start), ASKS | config)
    (record,) = reply.content.array_records.values()
    upload = FisherUpload.from_arrays(record, start)
    return upload.params, upload.curvature.diagonal()


def gradients(model, x, y):
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = F.cross_entropy(model(x), y)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def trained_in_a_loop(loader, epochs, lr, momentum=0.0, weight_decay=0.0, mu=0.0):
    """SGD without torch.optim; returns the last epoch's sum of squares too."""
    model = net()
    start = {k: p.detach().clone() for k, p in model.named_parameters()}
    velocity = {k: torch.zeros_like(p) for k, p in start.items()}
    squares, batches = {k: torch.zeros_like(p) for k, p in start.items()}, 0
    for epoch in range(epochs):
        for x, y in loader:
            found = gradients(model, x, y)
            if epoch == epochs - 1:
                squares = {k: s + found[k] ** 2 for k, s in squares.items()}
                batches += 1
            with torch.no_grad():
                for name, p in model.named_parameters():
                    g = found[name] + mu * (p - start[name]) + weight_decay * p
                    velocity[name] = momentum * velocity[name] + g
                    p -= lr * velocity[name]
    return model, squares, batches


def assert_close(got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("batch_size", [4, 1])
def test_the_extra_pass_is_algorithm_2(batch_size, reduction):
    client, loader = net_client(batch_size, epochs=2, momentum=0.9)
    params, fisher = fisher_of(client, reduction=reduction)
    model, _, _ = trained_in_a_loop(loader, 2, 0.1, momentum=0.9)
    assert_close(params, model.state_dict())
    total = {k: torch.zeros_like(v) for k, v in params.items()}
    for x, y in loader:
        found = gradients(model, x, y)
        total = {k: t + found[k] ** 2 for k, t in total.items()}
    count = len(loader) if reduction == "mean" else 1
    assert_close(fisher, {k: t / count for k, t in total.items()})


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    "training",
    [
        {"epochs": 1, "momentum": 0.0},
        {"epochs": 2, "momentum": 0.5, "weight_decay": 0.1},
    ],
)
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_the_last_epoch_squares_what_training_saw(training, reduction, mu):
    """Of the batch loss alone, whatever else the step is made of."""
    client, loader = net_client(**training)
    asked = {"fisher-source": "last-epoch", "reduction": reduction}
    params, fisher = fisher_of(client, **asked, **{"proximal-mu": mu})
    model, squares, batches = trained_in_a_loop(loader, lr=0.1, mu=mu, **training)
    assert_close(params, model.state_dict())
    count = batches if reduction == "mean" else 1
    assert_close(fisher, {k: s / count for k, s in squares.items()})


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("source", ["extra-pass", "last-epoch"])
@pytest.mark.parametrize("form", ["pairs", "batch_fn", "limited"])
def test_a_batch_without_labels_is_not_counted(source, reduction, form):
    """Of three batches, the last has no label, and the second a half of them."""
    x, y = tiny_data(0, n=12).tensors
    y = torch.where(torch.arange(12) < 6, y, -100)
    batches = list(zip(x.split(4), y.split(4), strict=True))
    labelled = batches[:2]
    model, squares, _ = trained_in_a_loop(labelled, 1, lr=0.1, momentum=0.0)
    if source == "extra-pass":
        first, second = (gradients(model, *batch) for batch in labelled)
        squares = {k: first[k] ** 2 + second[k] ** 2 for k in first}
    options = {"train_fn": LocalSGD(lr=0.1, momentum=0.0), "device": "cpu"}
    if form == "batch_fn":
        batches = [{"y": b, "x": a} for a, b in batches]
        options["batch_fn"] = lambda batch: (batch["x"], batch["y"])
    if form == "limited":
        options["limits"] = ClientLimits(max_examples=12)
    client = FisherClient(net(), batches, **options)
    _, fisher = fisher_of(client, **{"fisher-source": source}, reduction=reduction)
    count = len(labelled) if reduction == "mean" else 1
    assert_close(fisher, {k: s / count for k, s in squares.items()})


def test_the_last_epoch_costs_no_further_backward_pass():
    counts, passes = {}, []

    def count(module, args, output):  # the extra pass calls no hooks of parameters
        if output.requires_grad:
            output.register_hook(passes.append)

    for source in ("extra-pass", "last-epoch"):
        client, loader = net_client(epochs=2)
        passes.clear()
        client.problem.model.register_forward_hook(count)
        fisher_of(client, **{"fisher-source": source})
        counts[source] = len(passes)
    assert counts["last-epoch"] == 2 * len(loader)
    assert counts["extra-pass"] == 3 * len(loader) + 1  # the trial's two examples


def test_the_last_epoch_needs_local_sgd_and_says_so_before_training():
    calls = []

    def mine(model, *args):
        calls.append(1)
        return {}

    app = tiny_client(train_fn=mine).as_client_app()
    with pytest.raises(RoundError, match=r"ClientError.*'last-epoch'.* train_fn=Local"):
        run(fedfish(fisher_source="last-epoch"), app)
    assert not calls
    run(fedfish(), app)
    assert len(calls) == 3


# Odd clients


def test_a_client_without_any_fisher_has_no_say_and_is_counted():
    zeros = every_fisher(np.zeros_like)
    result = run(fedfish(policy=LIFTED), Watched(tamper={1: zeros}))
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["num-rejected"], metrics["num-zero-fishers"]) == (0, 1)
    alone = run(fedfish(), quick_app([0, 2]), 2).arrays
    trained = [k for k in alone if "running" not in k and "num_batches" not in k]
    a, b = arrays_to_tensors(result.arrays), arrays_to_tensors(alone)
    fishers = result.uploads[0].payload.curvature.diagonal()
    for key in trained:
        seen = fishers[key] > 0  # elsewhere it is a matter of FedAvg's mean
        torch.testing.assert_close(a[key][seen], b[key][seen])
    assert not torch.equal(a["1.running_var"], b["1.running_var"])
    some = change_array(f"{FISHER}0.weight", np.zeros_like)
    metrics = run(fedfish(), Watched(tamper={1: some})).train_metrics_clientapp[1]
    assert metrics["num-zero-fishers"] == 0


def test_a_fisher_that_is_far_too_large_decides_nothing():
    def with_fishers(factor):
        tamper = {1: every_fisher(lambda a: a * factor)}
        own = FedFish(fraction_evaluate=0.0, codec="lossless")
        return arrays_to_tensors(run(own, Watched(tamper=tamper)).arrays)["0.weight"]

    # Honest: its trace is 1. More counts for more, and from twice as much for no more.
    honest, twice, liar = map(with_fishers, (1.0, 2.0, 1e12))
    torch.testing.assert_close(liar, twice)
    assert not torch.allclose(honest, twice)


# Stopped, and resumed

OPTIMIZERS = {"momentum": {"server_optimizer": MOMENTUM}, "adam": ADAM}
CLIENTS, ROUNDS = 4, 3


def assert_same(left, right):
    """Bit for bit."""
    assert same_bits(left.arrays, right.arrays)
    assert left.train_metrics_clientapp == right.train_metrics_clientapp


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stopped_run_continues_bit_for_bit(tmp_path, name):
    make, own = partial(fedfish, **OPTIMIZERS[name]), {"num_rounds": ROUNDS}
    whole = run(make(), None, CLIENTS, **own)
    own |= {"checkpoint_dir": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        run(make(), killing_app(CLIENTS + 1, CLIENTS), CLIENTS, **own)
    assert_same(run(make(), None, CLIENTS, resume=True, **own), whole)
    # The optimiser's state is what makes the rounds depend on each other.
    first, second = (run(make(), None, CLIENTS, num_rounds=n).arrays for n in (1, 2))
    restarted = make().start(LocalGrid(quick_app(), CLIENTS), first)
    assert not same_bits(restarted.arrays, second)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"server_optimizer": "sgd"}, "server: 'Adam' -> 'SGD'"),
        ({"server_lr": 0.5}, "server-lr: 0.02 -> 0.5"),
        (
            {
                "server_optimizer": partial(torch.optim.Adam, lr=0.02, eps=1e-3),
                "server_lr": None,
            },
            "server-eps: 1e-08 -> 0.001",
        ),
    ],
)
def test_another_runs_options_are_refused_by_name(tmp_path, options, change):
    run(fedfish(**ADAM), checkpoint_dir=tmp_path)
    app, own = Watched(), {"checkpoint_dir": tmp_path, "resume": True, "num_rounds": 2}
    with pytest.raises(CheckpointError, match="with other options") as caught:
        run(fedfish(**(ADAM | options)), app, **own)
    assert change in str(caught.value)
    assert not app.trained


# Arguments


def test_parameters_that_an_optimizer_refuses_are_told_before_anything_trains():
    def for_matrices(parameters):
        if any(p.dim() != 2 for p in parameters):
            raise ValueError("this optimizer is for matrices, as Muon is")
        return torch.optim.SGD(parameters, 1.0)

    app = Watched()
    with pytest.raises(ValueError, match="as Muon is"):
        run(FedFish(server_optimizer=for_matrices, fraction_evaluate=0.0), app)
    assert not app.trained


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"server_lr": -1.0}, "server_lr must be >= 0, got -1.0"),
        ({"power": -1.0}, "power must be in [0, 1], got -1.0"),
        ({"balance": 1.5}, "balance must be in [0, 1], got 1.5"),
        ({"server_optimizer": "lbfgs"}, "unknown server_optimizer 'lbfgs'"),
        ({"server_optimizer": MOMENTUM, "server_lr": 1}, "server_lr is for"),
        ({"server_optimizer": 3}, "server_optimizer: 'int' object is not callable"),
        ({"server_optimizer": "adm"}, "unknown server_optimizer 'adm'"),
        ({"codec": "nope"}, "unknown codec 'nope'; known: auto, "),
        ({"reduction": "nope"}, "unknown reduction 'nope'; known: sum, mean"),
        ({"fisher_source": "nope"}, "unknown fisher_source 'nope'; known: extra-pass"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(options, text):
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        FedFish(**options)


# As people use it


def test_a_fisher_of_nothing_has_no_size_to_be_divided_by():
    """A model that is sure of all that it has: every gradient is 0."""
    model = nn.Linear(2, 2)
    data = TensorDataset(torch.zeros(4, 2), torch.zeros(4).long())

    def sure(model, *_):
        with torch.no_grad():
            model.bias.copy_(torch.tensor([1e4, -1e4]))
        return {}

    client = FisherClient(model, DataLoader(data, 2), train_fn=sure, device="cpu")
    config = ASKS | {"power": 0.5, "balance": 1.0}
    reply = ask(client, ArrayRecord(model.state_dict()), config)
    fishers = f"{PREFIX}diagonal"
    found = [v for k, v in tensors_of(reply).items() if k.startswith(fishers)]
    assert found
    assert not any(value.any() for value in found)


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.cycle(tiny_data(1))


def test_of_an_endless_stream_squares_are_of_what_the_loop_took():
    """It was read on forever, once it was trained on."""
    taken, data = 8, tiny_data(1)
    client, _ = net_client(lr=0.0)
    client.problem.trainloader = DataLoader(Subset(data, range(taken)), 4)
    _, expected = fisher_of(client)
    loop, stream = (lambda *_: {"num-examples": taken}), DataLoader(Endless(), 4)
    _, fisher = fisher_of(FisherClient(net(), stream, train_fn=loop, device="cpu"))
    assert_close(fisher, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_half_precision_is_summed_in_single_and_double_in_double(dtype):
    """The server refused each sum in half precision, when all had trained."""
    x, y = torch.randn(8, 3).to(dtype), torch.arange(8) % 2
    model = nn.Linear(3, 2).to(dtype)
    sent, config = ArrayRecord(model.state_dict()), {"job": "fedfish", "upload": "sums"}
    reply = ask(FisherClient(model, [(x, y)]), sent, config)
    (record,) = reply.content.array_records.values()
    read = Additive.reader("product", "fisher", "params")
    fisher = read(record, arrays_to_tensors(sent)).part("fisher")
    wide = torch.promote_types(dtype, torch.float32)
    assert {value.dtype for value in fisher.values()} == {wide}


def fedfish_uploads(dtype, **config):
    """What one client sends plainly, and for a sum: its step and Fisher are small."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3).to(dtype), torch.arange(8) % 2
    model = nn.Linear(3, 2).to(dtype)
    sent, uploads = ArrayRecord(model.state_dict()), []
    for packing in ({}, {"upload": "sums"}):
        model.load_state_dict(sent.to_torch_state_dict())
        loop = LocalSGD(lr=0.3, loss_fn=lambda z, y: F.cross_entropy(z, y) / 64)
        client = FisherClient(model, [(x, y)], train_fn=loop, device="cpu")
        asked = {**ASKS, "fisher-source": "last-epoch", **packing, **config}
        (record,) = ask(client, sent, asked).content.array_records.values()
        uploads.append(record)
    start, (plain, summed) = arrays_to_tensors(sent), uploads
    read = Additive.reader("product", "fisher", "params")
    return start, FisherUpload.from_arrays(plain, start), read(summed, start)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("config", [{}, {"power": 0.5, "balance": 1.0}])
def test_the_product_for_a_sum_is_computed_and_sent_in_single_or_better(dtype, config):
    """A small Fisher's product with a small step is 0 in half precision."""
    start, plain, summed = fedfish_uploads(dtype, **config)
    product = summed.part("product")
    for name, fisher in plain.curvature.diagonal().items():
        step = start[name].double() - plain.params[name].double()
        wanted = (fisher.double() * step).to(torch.promote_types(dtype, torch.float32))
        assert torch.equal(product[name], wanted)
    if dtype == torch.float16 and not config:
        assert any((v.half() == 0)[v != 0].any() for v in product.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wide_fisher_times_a_step_in_half_precision_keeps_its_digits(dtype):
    fisher = {"w": torch.full((3,), 1e-6, dtype=dtype).float()}
    step = {"w": torch.full((3,), 1e-3, dtype=dtype)}
    (product,) = products(fisher, step).values()
    assert torch.equal(product, (fisher["w"].double() * step["w"].double()).float())
    torch.testing.assert_close(product, torch.full((3,), 1e-9), rtol=0.02, atol=0.0)
