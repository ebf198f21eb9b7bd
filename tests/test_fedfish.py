"""FedFish as a strategy: against sums written out, and as people run it."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import (
    LIFTED,
    Tamper,
    Watched,
    ask,
    change_array,
    drop_array,
    fail,
    killing_app,
    same_bits,
    tensors_of,
    tiny_app,
    tiny_arrays,
    tiny_client,
    tiny_data,
)

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.errors import (
    CheckpointError,
    ClientError,
    ConfigurationError,
    RoundError,
    UnknownNameError,
)
from flwr_fisher.measures import (
    ClientServerBarrier,
    MeasuredGrid,
    Personalisation,
    combine,
)
from flwr_fisher.params import shared_state, weighted_mean
from flwr_fisher.report import evaluate_on_test
from flwr_fisher.strategies import CurvatureResult, FedFish
from flwr_fisher.tasks import Task, Transformer, load_task
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import (
    PREFIX,
    Codec,
    FisherUpload,
    arrays_to_tensors,
    serialized_bytes,
)

Tensors = dict[str, Tensor]
MOMENTUM = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
ASKS = {"job": "fedfish"}
FISHER = f"{PREFIX}diagonal/"


def fedfish(**options: Any) -> FedFish:
    """The paper's, unless the options say more."""
    defaults = {"fraction_evaluate": 0.0, "power": 1.0, "balance": 0.0}
    if options.get("upload") != "product":
        defaults["codec"] = "lossless"
    return FedFish(**{**defaults, **options})


def run(
    strategy: FedFish,
    app: Any = None,
    clients: int = 3,
    arrays: ArrayRecord | None = None,
    **options: Any,
) -> CurvatureResult:
    grid = LocalGrid(tiny_app() if app is None else app, clients)
    start = tiny_arrays() if arrays is None else arrays
    return strategy.start(grid, start, **options)


def left_out(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [m for m in map(logging.LogRecord.getMessage, caplog.records) if "left" in m]


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


def half_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().sum(1).mean() / 2


def plane() -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def on_the_plane(context: Context) -> FisherClient:
    x, y = HOLDINGS[int(context.node_config["partition-id"])]
    data = TensorDataset(torch.tensor(x).float(), torch.tensor(y).float())
    train = LocalSGD(lr=0.5, momentum=0.0, loss_fn=half_square)
    loader = DataLoader(data, batch_size=1)
    return FisherClient(plane(), loader, train_fn=train, likelihood="gaussian")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [5 / 3, 2]),
        ({"server_lr": 0.5}, [5 / 6, 1]),
        # The mean over client 1's two batches halves its F: 4, 0 and 1/2, 1.
        ({"reduction": "mean"}, [(1 * 4 * 2 + 2 * 0.5 * 1) / (4 + 2 * 0.5), 2]),
        # Of traces 4 and 3, F becomes 1, 0 and 1/3, 2/3; or by their roots 2, 0 and …
        ({"balance": 1.0}, [(1 * 1 * 2 + 2 / 3 * 1) / (1 + 2 / 3), 2]),
        ({"balance": 1.0, "reduction": "mean"}, [(2 + 2 / 3) / (1 + 2 / 3), 2]),
        ({"balance": 0.5}, [(2 * 2 + 2 / 3**0.5) / (2 + 2 / 3**0.5), 2]),
        # Of roots 2, 0 and 1, √2; divided by their traces 1, 0 and 1/(1 + √2), …
        ({"power": 0.5}, [(2 * 2 + 2 * 1) / (2 + 2), 2]),
        (
            {"power": 0.5, "balance": 1.0},
            [(2 + 2 / (1 + 2**0.5)) / (1 + 2 / (1 + 2**0.5)), 2],
        ),
        ({"power": 0.0}, [(2 + 2 * 1) / 3, 4 / 3]),  # FedAvg
        # While training, the gradients were (-4, 0), and (-2, -2) and (0, -2).
        ({"fisher_source": "last-epoch"}, [(16 * 2 + 2 * 4 * 1) / (16 + 2 * 4), 2]),
        # (1·4·(-2) + 2·1·(-1)) / 3 and 2·2·(-2) / 3 have a sign: Adam's first step.
        (
            {"upload": "product", "server_optimizer": "adam", "server_lr": 0.25},
            [0.25, 0.25],
        ),
        # AdaGrad too, and torch's starts from zero.
        ({"server_optimizer": "adagrad", "server_lr": 0.25}, [0.25, 0.25]),
    ],
    ids=[
        "paper",
        "server-lr",
        "mean",
        "balance",
        "all",
        "by-root",
        "power",
        "power-balance",
        "fedavg",
        "last-epoch",
        "product",
        "adagrad",
    ],
)
def test_one_round_is_what_a_pencil_gives(
    options: dict[str, Any], expected: list[float]
) -> None:
    start = ArrayRecord(shared_state(plane()))
    result = run(fedfish(**options), make_client_app(on_the_plane), 2, start)
    got = arrays_to_tensors(result.arrays)["weight"]
    torch.testing.assert_close(got, torch.tensor([expected]))
    if not options:
        torch.testing.assert_close(
            result.details["weight"], torch.tensor([[-5 / 3, -2]]).double()
        )
        norm = result.train_metrics_clientapp[1]["pseudo-gradient-norm"]
        assert norm == pytest.approx((25 / 9 + 4) ** 0.5)


def test_by_default_fishers_are_rooted_and_balanced() -> None:
    start, app = ArrayRecord(shared_state(plane())), make_client_app(on_the_plane)
    own = FedFish(fraction_evaluate=0.0, codec="lossless")
    mended = run(fedfish(power=0.5, balance=1.0), app, 2, start)
    assert_same(run(own, app, 2, start), mended)


# FedAvg


def every_fisher(change: Callable[[Any], Any]) -> Tamper:
    def tamper(content: RecordDict) -> None:
        for key in list(content.array_records["arrays"]):
            if key.startswith(FISHER):
                change_array(key, change)(content)

    return tamper


@pytest.mark.parametrize("value", [1.0, 3e-7, 0.0])
def test_equal_fishers_give_fedavg_bit_for_bit(value: float) -> None:
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
        LocalGrid(tiny_app(), 4), tiny_arrays(), num_rounds=1
    )
    theirs = flowers.arrays.to_torch_state_dict()
    for key in (k for k in got if "num_batches" not in k):
        torch.testing.assert_close(got[key], theirs[key], rtol=1e-6, atol=1e-7)
    zeros = result.train_metrics_clientapp[1]["num-zero-fishers"]
    assert zeros == (4 if value == 0 else 0)


def test_batch_norm_statistics_are_averaged_by_examples() -> None:
    for options in (
        {},
        {"server_lr": 0.5},
        {"upload": "product", "server_optimizer": "adam"},
    ):
        result = run(fedfish(**options))
        replies = [
            tensors_of(ask(tiny_client(i), config={"server-round": 1}, partition=i))
            for i in range(3)
        ]
        for key in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            mean = weighted_mean([{key: r[key]} for r in replies], [8, 10, 12])
            got = arrays_to_tensors(result.arrays)[key]
            assert torch.equal(got, mean[key]), (key, options)


# The Fisher, by loops of its own


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def net_client(
    batch_size: int = 4, holding: int = 1, **training: Any
) -> tuple[FisherClient, DataLoader[Any]]:
    loader = DataLoader(tiny_data(holding), batch_size=batch_size)
    train = LocalSGD(**{"lr": 0.1, **training})
    return FisherClient(net(), loader, train_fn=train, device="cpu"), loader


def fisher_of(client: FisherClient, **config: Any) -> tuple[Tensors, Tensors]:
    """What a client uploads: its parameters and its Fisher."""
    start = shared_state(net())
    reply = ask(client, ArrayRecord(start), ASKS | config)
    (record,) = reply.content.array_records.values()
    upload = FisherUpload.from_arrays(record, start)
    return upload.params, upload.curvature.diagonal()


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = F.cross_entropy(model(x), y)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def trained_in_a_loop(
    loader: Iterable[tuple[Tensor, Tensor]],
    epochs: int,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    mu: float = 0.0,
) -> tuple[nn.Module, Tensors, int]:
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


def assert_close(got: Tensors, expected: Mapping[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("batch_size", [4, 10, 1])
def test_the_extra_pass_is_algorithm_2(batch_size: int, reduction: str) -> None:
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
        {"epochs": 3, "momentum": 0.9},
        {"epochs": 2, "momentum": 0.5, "weight_decay": 0.1},
    ],
)
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_the_last_epoch_squares_what_training_saw(
    training: dict[str, Any], reduction: str, mu: float
) -> None:
    """Of the batch loss alone, whatever else the step is made of."""
    client, loader = net_client(**training)
    asked = {"source": "last-epoch", "reduction": reduction}
    params, fisher = fisher_of(client, **asked, **{"proximal-mu": mu})
    model, squares, batches = trained_in_a_loop(loader, lr=0.1, mu=mu, **training)
    assert_close(params, model.state_dict())
    count = batches if reduction == "mean" else 1
    assert_close(fisher, {k: s / count for k, s in squares.items()})


def test_the_last_epoch_costs_no_further_backward_pass() -> None:
    counts = {}
    for source in ("extra-pass", "last-epoch"):
        client, loader = net_client(epochs=2)
        passes: list[Tensor] = []
        client.problem.model[2].bias.register_hook(passes.append)
        fisher_of(client, source=source)
        counts[source] = len(passes)
    assert counts["last-epoch"] == 2 * len(loader)
    assert counts["extra-pass"] == 3 * len(loader)


def test_the_last_epoch_needs_local_sgd_and_says_so_before_training() -> None:
    calls: list[int] = []

    def mine(model: nn.Module, *args: Any) -> dict[str, float]:
        calls.append(1)
        return {}

    client = tiny_client(train_fn=mine)
    with pytest.raises(ClientError, match=r"'last-epoch'.* train_fn=LocalSGD"):
        ask(client, config=ASKS | {"source": "last-epoch"})
    app = client.as_client_app()
    with pytest.raises(RoundError, match=r"'last-epoch'.* train_fn=LocalSGD"):
        run(fedfish(fisher_source="last-epoch"), app)
    assert not calls
    run(fedfish(), app)
    assert len(calls) == 3


# Products alone


def products(**options: Any) -> FedFish:
    adam = {"server_optimizer": "adam", "server_lr": 0.01}
    return fedfish(**{"upload": "product", **adam, **options})


def adam_by_hand(start: Tensors, gradients: list[Tensors], lr: float) -> Tensors:
    """Kingma and Ba's Algorithm 1 with their decay rates, in float64."""
    out = {}
    for key, value in start.items():
        m = v = torch.zeros_like(value, dtype=torch.float64)
        x = value.double()
        for t, step in enumerate((g[key] for g in gradients), start=1):
            m, v = 0.9 * m + 0.1 * step, 0.999 * v + 0.001 * step**2
            scale = (v / (1 - 0.999**t)).sqrt() + 1e-16
            x = (x - lr * m / (1 - 0.9**t) / scale).float().double()
        out[key] = x.float()
    return out


@pytest.mark.parametrize("source", ["extra-pass", "last-epoch"])
def test_products_are_adams_gradient(source: str) -> None:
    start = arrays_to_tensors(tiny_arrays())
    means: list[Tensors] = []
    for num_rounds in (1, 2):
        result = run(products(fisher_source=source), num_rounds=num_rounds)
        sent = [upload.payload.part("product") for upload in result.uploads]
        weights = [8, 10, 12]
        means.append(
            {
                key: sum(
                    w * p[key].double() for w, p in zip(weights, sent, strict=True)
                )
                / 30
                for key in sent[0]
            }
        )
        expected = adam_by_hand({k: start[k] for k in means[0]}, means, 0.01)
        got = arrays_to_tensors(result.arrays)
        assert_close({k: got[k] for k in expected}, expected)
    # What a client sends is its Fisher times its step.
    one = tensors_of(ask(tiny_client(2), config=ASKS | {"upload": "product"}))
    both = tensors_of(ask(tiny_client(2), config=ASKS))
    for key in ("0.weight", "1.bias", "3.weight"):
        away = start[key] - both[key]
        assert torch.equal(one[f"product/{key}"], both[f"{FISHER}{key}"] * away)


def test_products_have_fedavgs_bytes() -> None:
    model = nn.Sequential(nn.Linear(3, 400), nn.BatchNorm1d(400), nn.Linear(400, 3))
    loader = tiny_client(3).problem.trainloader
    sizes = {}
    for name, config in {
        "fedavg": {},
        "product": ASKS | {"upload": "product"},
        "both": ASKS,
    }.items():
        reply = ask(
            FisherClient(model, loader), ArrayRecord(shared_state(model)), config
        )
        sizes[name] = serialized_bytes(reply.content)
    keys = len("product/") * len(model.state_dict())
    assert sizes["fedavg"] <= sizes["product"] <= 1.01 * sizes["fedavg"] + keys
    assert sizes["both"] > 1.5 * sizes["fedavg"]


PRODUCT, BUFFER = "product/3.weight", "buffers/1.running_var"


def rename(old: str, new: str) -> Tamper:
    def tamper(content: RecordDict) -> None:
        record = content.array_records["arrays"]
        record[new] = record.pop(old)

    return tamper


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (change_array(PRODUCT, lambda a: a * np.nan), f"'{PRODUCT}'"),
        (change_array(PRODUCT, lambda a: a.T), f"'{PRODUCT}'"),
        (change_array(PRODUCT, lambda a: a.astype("float64")), f"'{PRODUCT}'"),
        (change_array(BUFFER, lambda a: a * np.nan), f"'{BUFFER}'"),
        (rename(PRODUCT, "buffers/3.weight"), "covers other parameters"),
        (rename(PRODUCT, "product/4.weight"), "'product/4.weight': unexpected key"),
        (rename(BUFFER, "buffers/more"), "'buffers/more': unexpected key"),
        (drop_array(BUFFER), f"'{BUFFER}': missing"),
    ],
    ids=[
        "NaN",
        "shape",
        "dtype",
        "buffer",
        "not a product",
        "unknown",
        "other",
        "gone",
    ],
)
def test_a_bad_product_is_left_out_by_name(
    tamper: Tamper, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = run(products(), Watched(tamper={2: tamper}), 4)
    assert same_bits(result.arrays, run(products(), tiny_app([0, 1, 3])).arrays)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["num-replies"], metrics["num-rejected"]) == (3, 1)
    (said,) = left_out(caplog)
    assert "partition-2" in said
    assert reason in said


# Bad replies, and odd ones


def an_array(key: str, change: Callable[[Any], Any]) -> Tamper:
    return change_array(key, change)


BAD = {
    "drops out": (fail, "out of cheese"),
    "NaN": (an_array("0.weight", lambda a: a * np.nan), "0.weight"),
    "NaN Fisher": (an_array(f"{FISHER}0.weight", lambda a: a * np.nan), "0.weight"),
    "infinite Fisher": (an_array(f"{FISHER}3.bias", lambda a: a + np.inf), "3.bias"),
    "negative Fisher": (an_array(f"{FISHER}3.bias", lambda a: a - 9), "3.bias"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("source", ["extra-pass", "last-epoch"])
def test_a_bad_client_is_left_out_and_counted(
    case: str, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    tamper, reason = BAD[case]
    strategy = partial(fedfish, fisher_source=source)
    result = run(strategy(), Watched(tamper={1: tamper}), 4)
    assert same_bits(result.arrays, run(strategy(), tiny_app([0, 2, 3])).arrays)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["num-replies"], metrics["num-rejected"]) == (3, 1)
    assert metrics["num-zero-fishers"] == 0
    (said,) = left_out(caplog)
    assert "partition-1" in said
    assert reason in said


def test_a_client_without_any_fisher_has_no_say_and_is_counted() -> None:
    zeros = every_fisher(np.zeros_like)
    result = run(fedfish(policy=LIFTED), Watched(tamper={1: zeros}))
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["num-rejected"], metrics["num-zero-fishers"]) == (0, 1)
    alone = run(fedfish(), tiny_app([0, 2]), 2).arrays
    trained = [k for k in alone if "running" not in k and "num_batches" not in k]
    a, b = arrays_to_tensors(result.arrays), arrays_to_tensors(alone)
    fishers = result.uploads[0].payload.curvature.diagonal()
    for key in trained:
        seen = fishers[key] > 0  # elsewhere it is a matter of FedAvg's mean
        torch.testing.assert_close(a[key][seen], b[key][seen])
    assert not torch.equal(a["1.running_var"], b["1.running_var"])


def test_a_client_that_returns_zeros_is_tolerated() -> None:
    """A model of zeros is a model; its Fisher of zeros says that it knows nothing."""

    def zeros(content: RecordDict) -> None:
        record = content.array_records["arrays"]
        for key in (k for k in record if k != f"{PREFIX}format"):
            record[key] = Array(np.zeros_like(record[key].numpy()))

    result = run(fedfish(policy=LIFTED), Watched(tamper={1: zeros}))
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["num-replies"], metrics["num-zero-fishers"]) == (3, 1)
    fishers = [u.payload.curvature.diagonal()["3.bias"] for u in result.uploads]
    assert (fishers[0] > 0).all()
    alone = run(fedfish(), tiny_app([0, 2]), 2).arrays
    got, expected = (arrays_to_tensors(a)["3.bias"] for a in (result.arrays, alone))
    torch.testing.assert_close(got, expected)


# Stopped, and resumed

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"server_optimizer": MOMENTUM},
    "adam": {"server_optimizer": "adam", "server_lr": 0.02},
    "product": {
        "upload": "product",
        "server_optimizer": "adam",
        "fisher_source": "last-epoch",
        "fraction_train": 0.5,
    },
}
CLIENTS, ROUNDS = 4, 3


def assert_same(left: CurvatureResult, right: CurvatureResult) -> None:
    """Bit for bit."""
    assert same_bits(left.arrays, right.arrays)
    assert left.train_metrics_clientapp == right.train_metrics_clientapp


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stopped_run_continues_bit_for_bit(tmp_path: Path, name: str) -> None:
    make = partial(fedfish, **OPTIMIZERS[name])
    whole = run(make(), None, CLIENTS, num_rounds=ROUNDS)
    size = round(CLIENTS * OPTIMIZERS[name].get("fraction_train", 1))
    stops = (0, size, 3 * size - 1) if name == "sgd" else (size + 1,)
    for index, asked in enumerate(stops):
        where = tmp_path / str(index)
        with pytest.raises(KeyboardInterrupt):
            run(
                make(),
                killing_app(asked, CLIENTS),
                CLIENTS,
                num_rounds=ROUNDS,
                checkpoint_dir=where,
            )
        again = Watched()
        resumed = run(
            make(),
            again,
            CLIENTS,
            num_rounds=ROUNDS,
            checkpoint_dir=where,
            resume=True,
        )
        assert_same(resumed, whole)
        assert len(again.trained) == ROUNDS * size - asked
    # The optimiser's state is what makes the rounds depend on each other.
    first = run(make(), None, CLIENTS, num_rounds=1)
    afresh = run(make(), None, CLIENTS, arrays=first.arrays, num_rounds=1)
    second = run(make(), None, CLIENTS, num_rounds=2)
    if name in ("momentum", "adam"):
        restarted = fedfish(**OPTIMIZERS[name])
        grid = LocalGrid(tiny_app(), CLIENTS)
        messages = restarted.configure_train(2, first.arrays, ConfigRecord(), grid)
        arrays, _ = restarted.aggregate_train(2, grid.send_and_receive(messages))
        assert not same_bits(arrays, second.arrays)
    assert not same_bits(afresh.arrays, first.arrays)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"server_optimizer": "sgd"}, "server: 'Adam' -> 'SGD'"),
        ({"server_optimizer": "adamw"}, "server: 'Adam' -> 'AdamW'"),
        ({"server_lr": 0.5}, "server-lr: 0.02 -> 0.5"),
        (
            {"fisher_source": "last-epoch"},
            "source: 'extra-pass' -> 'last-epoch'",
        ),
        ({"reduction": "mean"}, "reduction: 'sum' -> 'mean'"),
        ({"upload": "product"}, "upload: 'fisher' -> 'product'"),
        ({"codec": "fedavg"}, "codec: 'lossless' -> "),
        (
            {"server_optimizer": partial(torch.optim.Adam, lr=0.02, eps=1e-3)},
            "server-eps: 1e-08 -> 0.001",
        ),
    ],
)
def test_another_runs_options_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], change: str
) -> None:
    adam = OPTIMIZERS["adam"]
    run(fedfish(**adam), checkpoint_dir=tmp_path)
    app = Watched()
    with pytest.raises(CheckpointError, match="with other options") as caught:
        run(
            fedfish(**(adam | options)),
            app,
            num_rounds=2,
            checkpoint_dir=tmp_path,
            resume=True,
        )
    assert change in str(caught.value)
    assert not app.trained


# Flower's hooks


# Arguments


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"server_lr": -1.0}, "server_lr must be >= 0, got -1.0"),
        ({"power": -1.0}, "power must be in [0, 1], got -1.0"),
        ({"balance": 1.5}, "balance must be in [0, 1], got 1.5"),
        ({"server_optimizer": "lbfgs"}, "optimizer 'lbfgs': it calls a closure"),
        ({"server_optimizer": 3}, "optimizer takes a name or a factory"),
        ({"upload": "product"}, "upload='product' needs an adaptive server_optimizer"),
        (
            {"upload": "product", "server_optimizer": "adam", "codec": "small"},
            "upload='product' has FedAvg's bytes as it is: leave codec out",
        ),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        FedFish(**options)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("fisher_source", "extra-pass, last-epoch"),
        ("upload", "fisher, product"),
        ("reduction", "sum, mean"),
        ("codec", "auto, "),
    ],
)
def test_unknown_names_list_the_known(name: str, known: str) -> None:
    with pytest.raises(UnknownNameError, match=f"^unknown {name} 'nope'; known: ") as e:
        FedFish(**{name: "nope"})
    assert known in str(e.value)
    with pytest.raises(UnknownNameError, match="unknown optimizer 'adm'"):
        FedFish(server_optimizer="adm")


def test_a_budget_that_is_too_small_is_refused_before_training() -> None:
    app = Watched()
    with pytest.raises(ConfigurationError, match=r"budget must be >= [\d.]+"):
        run(FedFish(codec=Codec("fedavg", budget=0.05)), app)
    assert not app.trained


# As people use it


def digits(clients: int = 6) -> Task:
    return load_task(
        dataset="digits",
        model="mlp",
        partition="dirichlet-client",
        alpha=0.3,
        num_partitions=clients,
    )


def digits_app(task: Task, **training: Any) -> Any:
    train = LocalSGD(**{"epochs": 2, "lr": 0.1, "momentum": 0.0, **training})

    def client_fn(context: Context) -> FisherClient:
        loader = task.train_loader(int(context.node_config["partition-id"]), 16)
        return FisherClient(task.make_model(), loader, train_fn=train, device="cpu")

    return make_client_app(client_fn)


def test_at_fedavgs_size_it_is_close_to_lossless() -> None:
    task = digits()
    start = ArrayRecord(shared_state(task.make_model()))
    results = {
        codec: run(
            fedfish(codec=codec),
            digits_app(task),
            6,
            start,
            num_rounds=2,
            evaluate_fn=evaluate_on_test(task),
        )
        for codec in ("lossless", "fedavg")
    }
    plain = ask(
        FisherClient(task.make_model(), task.train_loader(0, 16)), start, {}
    ).content
    limit = serialized_bytes(plain) + 64  # a checked reply has longer metrics
    sizes = {k: [u.num_bytes for u in r.uploads] for k, r in results.items()}
    assert max(sizes["fedavg"]) <= limit < min(sizes["lossless"])
    a, b = (arrays_to_tensors(r.arrays) for r in results.values())
    begin = arrays_to_tensors(start)
    moved = torch.cat([(a[k] - begin[k]).flatten() for k in a]).norm()
    apart = torch.cat([(a[k] - b[k]).flatten() for k in a]).norm()
    assert apart < 0.1 * moved
    scores = [r.evaluate_metrics_serverapp[2]["accuracy"] for r in results.values()]
    assert scores[1] == pytest.approx(scores[0], abs=0.03)


def test_it_learns_digits_and_its_measures_reach_the_result() -> None:
    task = digits()
    measured = MeasuredGrid(LocalGrid(digits_app(task), 6), held_out=1)
    measures = combine(
        evaluate_on_test(task, every=2),
        ClientServerBarrier(measured),
        Personalisation(measured, fraction=0.25, epochs=2, every=2),
    )
    strategy = fedfish(codec="auto", fraction_train=0.6)
    start = ArrayRecord(shared_state(task.make_model()))
    result = strategy.start(measured, start, num_rounds=4, evaluate_fn=measures)
    history = result.evaluate_metrics_serverapp
    assert [n for n in history if "accuracy" in history[n]] == [0, 2, 4]
    assert [n for n in history if "barrier-loss" in history[n]] == [1, 2, 3, 4]
    assert [n for n in history if "personalised-loss" in history[n]] == [0, 2, 4]
    assert history[0]["accuracy"] < 0.3
    assert history[4]["accuracy"] > 0.75
    assert history[4]["barrier-clients"] == 3
    assert history[1]["barrier-loss"] > 0
    assert history[4]["personalised-clients"] == 1
    assert history[4]["zero-shot-accuracy"] > history[0]["zero-shot-accuracy"]


@pytest.mark.parametrize("server", ["sgd", "adam"])
def test_it_trains_a_transformer(server: str) -> None:
    task = load_task(
        dataset="language",
        model="transformer",
        partition="by-document",
        num_partitions=4,
    )
    task = replace(task, parts=tuple(part[:96] for part in task.parts))
    heldout = task.data.test.subset(list(range(0, len(task.data.test), 5)))

    def small() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Transformer(task.data.num_outputs, 64, width=16, layers=1, heads=2)

    def client_fn(context: Context) -> FisherClient:
        loader = task.train_loader(int(context.node_config["partition-id"]), 16)
        train = LocalSGD(epochs=2, lr=0.1)
        return FisherClient(small(), loader, train_fn=train, device="cpu")

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = small()
        model.load_state_dict(arrays_to_tensors(arrays))
        x, y = heldout[:]
        with torch.no_grad():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        return MetricRecord({"loss": float(loss)})

    options = {"server_lr": 0.03} if server == "adam" else {}
    start = ArrayRecord(shared_state(small()))
    result = run(
        fedfish(codec="auto", server_optimizer=server, **options),
        make_client_app(client_fn),
        4,
        start,
        num_rounds=3,
        evaluate_fn=evaluate,
    )
    history = result.evaluate_metrics_serverapp
    losses = [float(history[n]["loss"]) for n in range(4)]
    assert losses == sorted(losses, reverse=True), losses
    assert losses[3] < losses[0] - 1, losses


def test_a_fisher_of_nothing_has_no_size_to_be_divided_by() -> None:
    """A model that is sure of all that it has: every gradient is 0."""
    model = nn.Linear(2, 2)
    data = TensorDataset(torch.zeros(4, 2), torch.zeros(4).long())

    def sure(model: nn.Module, *_: object) -> dict[str, float]:
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
