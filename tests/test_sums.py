"""``aggregate="sums"``: the server needs nothing but sums, and gets the same model."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from oracles import posteriors, random_blocks
from test_strategy_contract import left_out, run
from torch import nn
from torch.utils.data import DataLoader
from virtual import (
    FEATURES,
    LIFTED,
    Watched,
    ask,
    change_array,
    drop_array,
    fedfisher_with,
    node_of,
    quick_app,
    same_bits,
    set_array,
    tensors_of,
    tiny_app,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.curvature import Diagonal, WeightedSum, fisher
from flwr_fisher.errors import ConfigurationError, ParamsError, StructureError
from flwr_fisher.merge import (
    SOLVERS,
    DiagonalSums,
    LocalPosterior,
    fedavg,
    fedfisher,
    fedfisher_from_sums,
)
from flwr_fisher.params import shared_state
from flwr_fisher.report import report_one_shot
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import Additive, Codec, arrays_to_tensors
from flwr_fisher.wire.additive import SUMS as SUMMED

NAN, INF = float("nan"), float("inf")
SUMS = {"structure": "diagonal", "aggregate": "sums"}
PARTS = {
    "structure": "diagonal",
    "codec": "lossless",
    "balance": 0.0,
    "robust": 0.0,
    "max_share": 1.0,
}
SHORT = {"iterations": 200}  # of the solvers that take thousands
FEW = {solver: SHORT if solver in ("adam", "gd") else {} for solver in SOLVERS}


def assert_within(got, want, tolerance=1e-5):
    """Relative to each tensor's largest entry, or to 1."""
    assert list(got) == list(want)
    for key, value in want.items():
        assert (got[key].dtype, got[key].shape) == (value.dtype, value.shape), key
        apart = float((got[key].double() - value.double()).abs().max())
        assert apart <= tolerance * max(1.0, float(value.double().abs().max())), key


# The algebra


def by_hand(theta, f, n, count):
    params = {
        "w": torch.tensor([theta]),
        "mean": torch.tensor([theta]),
        "count": torch.tensor(count),
    }
    return LocalPosterior(params, Diagonal({"w": torch.tensor([f])}), n)


def test_two_clients_by_hand():
    sums = DiagonalSums.of([by_hand(1.0, 2.0, 3, 5), by_hand(5.0, 4.0, 1, 8)])
    assert sums.params["w"].tolist() == [(3 * 1 + 1 * 5) / 4]
    assert sums.fisher["w"].tolist() == [(3 * 2 + 1 * 4) / 4]
    assert sums.fisher_params["w"].tolist() == [(3 * 2 * 1 + 1 * 4 * 5) / 4]
    assert (int(sums.params["count"]), sums.params["count"].dtype) == (6, torch.int64)
    merged = fedfisher_from_sums(sums, solver="closed-form").params
    assert merged["w"].tolist() == pytest.approx([26 / 10])
    assert merged["mean"].tolist() == [2.0]  # what has no Fisher is averaged: 8 / 4
    assert int(merged["count"]) == 6  # 23 / 4, rounded
    # A ridge of half the curvature 2.5: 2 + (6.5 - 2.5 * 2) / (2.5 + 1.25).
    anchored = fedfisher_from_sums(sums, anchor=0.5)
    assert anchored.params["w"].tolist() == pytest.approx([2.4])
    assert anchored.shares == []


def trained(model, n):
    """A client whose model is some steps away from the start."""
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, FEATURES, generator=generator, dtype=dtype)
    y = torch.randint(2, (n,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    params = {k: v.clone() for k, v in shared_state(model).items()}
    return LocalPosterior(params, fisher(model, [x], structure="diagonal"), n)


def each_trained(make):
    clients = []
    for n in (4, 9, 30):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            clients.append(trained(make(), n))
    return clients


def drawn(count=4, scale=1.0, sizes=(1, 20, 3, 50)):
    """Clients with Fishers over ten decades and weights over six."""
    clients = []
    for i in range(count):
        low, *draws = torch.rand(5, 40, generator=torch.Generator().manual_seed(i))
        weights = 10 ** (6 * draws[0] - 4) * (draws[1] - 0.5).sign()
        params = {"w": weights.reshape(8, 5), "b": low}
        entries = {
            "w": (scale * 10 ** (-10 * draws[2])).reshape(8, 5),
            "b": scale * draws[3],
        }
        clients.append(LocalPosterior(params, Diagonal(entries), sizes[i % len(sizes)]))
    return clients


def with_zeros():
    """Entries of which one client knows anything, or none."""
    clients = drawn()
    for index, client in enumerate(clients):
        entries = client.curvature.diagonal()
        entries["w"][0] = 0.0
        entries["w"][1] *= index == 2
        clients[index] = replace(client, curvature=Diagonal(entries))
    return clients


def partly_covered():
    return [
        replace(c, curvature=Diagonal({"w": c.curvature.diagonal()["w"]}))
        for c in drawn()
    ]


CASES = {
    "linear": lambda: each_trained(lambda: nn.Linear(FEATURES, 2)),
    "batch norm": lambda: each_trained(tiny_model),
    "double": lambda: each_trained(lambda: nn.Linear(FEATURES, 2).double()),
    "one client": lambda: drawn(1),
    "weights of all sizes": drawn,
    "clients of all sizes": lambda: drawn(sizes=(1, 10**6, 3, 70_000)),
    "tiny Fishers": lambda: drawn(scale=1e-27),
    "zeros": with_zeros,
    "a parameter without a Fisher": partly_covered,
}


OPTIONS = [
    *({"solver": solver} | FEW[solver] for solver in SOLVERS),
    {"solver": "cg", "anchor": 0.0},
    {"solver": "closed-form", "anchor": 0.2},
    {"solver": "gd", "anchor": 0.2, "iterations": 50},
]


@pytest.mark.parametrize(
    ("case", "options"),
    [
        *(("weights of all sizes", options) for options in OPTIONS),
        *((case, OPTIONS[(i + j) % 8]) for j in (0, 3) for i, case in enumerate(CASES)),
    ],
    ids=str,
)
def test_sums_give_the_model_of_the_parts(case, options):
    clients = CASES[case]()
    parts = fedfisher(clients, balance=0.0, robust=0.0, max_share=1.0, **options)
    sums = fedfisher_from_sums(
        DiagonalSums.of(clients), like=clients[0].params, **options
    )
    assert_within(sums.params, parts.params)
    assert len(sums.residuals) == sums.iterations + 1


@pytest.mark.parametrize("case", CASES)
def test_the_mean_of_the_sums_is_fedavgs(case):
    clients = CASES[case]()
    mean = DiagonalSums.of(clients).mean(clients[0].params)
    assert_within(mean, fedavg(clients), 1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: posteriors(random_blocks)[0],
        lambda: replace(
            drawn()[0], curvature=WeightedSum([drawn()[0].curvature], [1.0])
        ),
    ],
    ids=["kfac", "lazy sum"],
)
def test_only_diagonals_can_be_summed(make):
    with pytest.raises(StructureError, match="only diagonals can be summed"):
        DiagonalSums.of([make()])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("robust", 1.0), ("max_share", 0.5), ("trust", 0.75)],
        *[("balance", 1.0), ("balance", -1.0), ("balance", NAN), ("anchor", -1)],
        ("score", lambda params: 0.0),  # for Adam alone
    ],
)
def test_what_sums_do_not_tell_is_refused_by_name(name, value):
    with pytest.raises(ConfigurationError, match=rf"^{name} "):
        fedfisher_from_sums(DiagonalSums.of(drawn()), **{name: value})


def test_what_does_not_fit_is_refused():
    clients = drawn(2)
    one, w = DiagonalSums.of(clients[:1]), {"w": clients[1].params["w"]}
    odd = one.fisher | {"b": one.fisher["b"] * NAN}
    clients[1] = LocalPosterior(w, Diagonal({"w": torch.ones(8, 5)}), 1)
    for culprit, make in (
        ("no posterior", lambda: DiagonalSums.of([])),
        ("posterior 1 .*'b'", lambda: DiagonalSums.of(clients)),
        ("'b'", lambda: fedfisher_from_sums(replace(one, fisher=odd))),
        ("sums", lambda: fedfisher_from_sums(one, like=w)),
    ):
        with pytest.raises(ParamsError, match=culprit):
            make()


# What travels


READ = Additive.reader(*SUMMED)


def tiny_upload():
    sums = DiagonalSums.of(each_trained(tiny_model)[:1])
    parts = sums.params, sums.fisher, sums.fisher_params
    return Additive(dict(zip(SUMMED, parts, strict=True)))


LIKE = arrays_to_tensors(tiny_arrays())


def travelled(record):
    """Serialise a record as Flower does."""
    proto = recorddict_to_proto(RecordDict({"arrays": record}))
    (arrived,) = recorddict_from_proto(proto).array_records.values()
    return arrived


def test_an_upload_comes_back_bit_for_bit_in_any_order():
    sent = tiny_upload()
    record = travelled(sent.to_arrays())
    shuffled = ArrayRecord({key: record[key] for key in reversed(list(record))})
    for arrived in (record, shuffled):
        got = READ(arrived, LIKE)
        assert got.layout() == sent.layout()
        assert same_bits(got.to_arrays(), sent.to_arrays())


def test_a_client_uploads_its_contribution():
    asked = {"structure": "diagonal", "seed": 3}
    parts = tensors_of(ask(tiny_client(1), config=asked))
    own = tensors_of(ask(tiny_client(1), config=asked | {"job": "diagonal-sums"}))
    trainable = [n for n, _ in tiny_model().named_parameters()]
    assert list(own) == [
        *(name for name in LIKE),
        *(f"fisher/{name}" for name in trainable),
        *(f"fisher-params/{name}" for name in trainable),
    ]
    for name in LIKE:
        assert torch.equal(own[name], parts[name])
    for name in trainable:
        f = parts[f"curvature/diagonal/{name}"]
        assert torch.equal(own[f"fisher/{name}"], f)
        torch.testing.assert_close(own[f"fisher-params/{name}"], f * parts[name])


def with_entry(value):
    def change(array):
        changed = array.copy()
        changed.flat[0] = value
        return changed

    return change


def drop_all(prefix):
    def tamper(content):
        record = content.array_records["arrays"]
        for key in [k for k in record if k.startswith(prefix)]:
            del record[key]

    return tamper


def together(*tampers):
    def tamper(content):
        for one in tampers:
            one(content)

    return tamper


def of(reason, tamper, key, *how):
    """A change of one array, which is named."""
    return tamper(key, *how), key, reason


F, FT, COUNTER = "fisher/", "fisher-params/", "1.num_batches_tracked"
ODD = "holds NaN or infinity"
BAD = {
    "missing parameter": of("missing", drop_array, "3.bias"),
    "no Fisher": (together(drop_all(F), drop_all(FT)), F, "no fisher arrived"),
    "Fisher of fewer parameters": (
        together(drop_array(f"{F}1.bias"), drop_array(f"{FT}1.bias")),
        "arrays",
        f"other parameters than most clients' does: ['{FT}1.bias (4,)', '{F}1.bias",
    ),
    "unknown prefix": of("unexpected key", set_array, "sums/more", [1.0]),
    "Fisher of a counter": of("unexpected key", set_array, f"{F}{COUNTER}", 1.0),
    "Fisher's shape": of("expected (4, 3)", change_array, f"{F}0.weight", np.ravel),
    "double": of("torch.float64", change_array, f"{FT}3.weight", np.float64),
    "NaN": of(ODD, change_array, "3.bias", with_entry(NAN)),
    "negative Fisher": of("negative", change_array, f"{F}0.bias", with_entry(-1e-3)),
}


CLIENTS = quick_app()


def sums(**options):
    return fedfisher_with(**{"fraction_evaluate": 0.0, **SUMS, **options})


@pytest.fixture(scope="module")
def without_2():
    return run(sums(), tiny_app([0, 1, 3])).arrays


@pytest.mark.parametrize("case", BAD)
def test_a_bad_upload_is_left_out_by_name_and_the_round_goes_on(
    case, without_2, caplog
):
    tamper, field, reason = BAD[case]
    grid = LocalGrid(Watched(CLIENTS, {2: tamper}), 4)
    result = sums().start(grid, tiny_arrays())
    assert same_bits(result.arrays, without_2)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["num-replies"], metrics["num-rejected"]) == (3, 1)
    (said,) = left_out(caplog)
    assert f"partition-2: node {node_of(grid, 2)}: '{field}': " in said
    assert reason in said


# The strategy


@pytest.mark.parametrize(
    ("solver", "holdings"),
    [
        *((solver, (0, 1, 2)) for solver in SOLVERS),
        ("cg", (0, 30)),
        ("closed-form", (4, 4, 4)),
    ],
)
def test_a_round_gives_the_model_of_the_parts(solver, holdings):
    results = [
        run(
            fedfisher_with(
                fraction_evaluate=0.0,
                solver=solver,
                policy=LIFTED,
                **FEW[solver],
                **options,
            ),
            CLIENTS if holdings == (0, 1, 2) else tiny_app(holdings),
            len(holdings),
        )
        for options in (PARTS, SUMS)
    ]
    parts, sums = (arrays_to_tensors(result.arrays) for result in results)
    assert_within(sums, parts)
    told = [set(result.train_metrics_clientapp[1]) for result in results]
    assert told[0] - told[1] == {"client-share"}
    assert told[1] < told[0]
    assert results[1].details.shares == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"codec": "fedavg"}, "aggregate='sums' needs codec='lossless'"),
        ({"codec": Codec(budget=0.5)}, "aggregate='sums' needs codec='lossless'"),
        ({"balance": 1.0}, "balance must be 0, got 1.0: the server knows only sums"),
        ({"weighted_by_key": "trust"}, "needs weighted_by_key='num-examples'"),
        ({"anchor": -1.0}, "anchor must be"),
        ({"score": lambda params: 0.0}, "score works with solver='adam' only"),
        ({"aggregate": "mean"}, "unknown aggregate 'mean'; known: parts, sums"),
        ({"structure": "kfac", "solver": "closed-form"}, "needs structure='diagonal'"),
    ],
)
def test_what_sums_cannot_do_is_refused_at_construction(options, text):
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        sums(**options)


# Runs that stop


# The report


@pytest.mark.usefixtures("empty_pictures")
def test_the_report_leaves_out_what_the_server_cannot_know(tmp_path):
    loader, reports = DataLoader(tiny_data(9, n=50), batch_size=25), []
    for name, options in (("parts", PARTS), ("sums", SUMS)):
        own = {"fraction_evaluate": 0.0, "norm_statistics": "average", **options}
        result = fedfisher_with(**own).start(LocalGrid(quick_app(), 3), tiny_arrays())
        report_one_shot(tmp_path / name, tiny_model(), loader, result)
        reports.append(json.loads((tmp_path / name / "metrics.json").read_text()))
    parts, sums = reports
    assert set(sums["accuracy"]) == {"fedavg", "fedfisher"}
    assert sums["accuracy"].items() <= parts["accuracy"].items()
    plain = sums["bytes"]["fedavg_per_client"]
    assert plain == parts["bytes"]["fedavg_per_client"]
    assert sums["bytes"]["upload_per_client"] > 1.5 * plain
