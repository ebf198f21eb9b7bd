"""What every strategy owes its users.

``STRATEGIES`` has rows for each but TCT, which has two stages. A row names the tests
that it need not pass in ``lacks``: where a method's own formula makes one untrue, and
says why.
"""

import re
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import tutorials
import virtual
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from virtual import (
    Watched,
    app_by_partition,
    ask,
    change_array,
    close,
    drop_array,
    drop_extras,
    fail,
    fedfisher_with,
    killing_app,
    left_out,
    node_of,
    quick_app,
    same_bits,
    set_array,
    set_metric,
    tensors_of,
    tiny_app,
    tiny_arrays,
    tiny_client,
    tiny_model,
)

from flwr_fisher import __version__
from flwr_fisher.client import LocalSGD
from flwr_fisher.errors import ConfigurationError, RoundError
from flwr_fisher.params import trainable_names
from flwr_fisher.randomness import seed_of_clients
from flwr_fisher.strategies import (
    AFL,
    FAGH,
    CurvatureStrategy,
    FedFish,
    FedFisherOneShot,
    FisherOptions,
    MergeOptions,
    Policy,
    Refinement,
    Scaffold,
)
from flwr_fisher.strategies import FedAvg as OurFedAvg
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import PREFIX, arrays_to_tensors


@dataclass(frozen=True, eq=False)
class Row:
    """A strategy under test.

    Parameters
    ----------
    make : Callable[..., CurvatureStrategy]
        Makes it; takes the shared base's keywords.
    own : dict
        Its own arguments.
    lacks : Set[str]
        The names of the tests that it need not pass.
    plain_sgd : bool
        Whether its clients train without momentum.
    extras : bool
        Whether its clients upload the diagonals or factors of a Fisher, too.
    """

    make: Callable[..., CurvatureStrategy]
    own: dict[str, Any]
    lacks: Set[str] = frozenset()
    plain_sgd: bool = False
    extras: bool = False

    def __call__(self, **options):
        return self.make(**{"fraction_evaluate": 0.0, **self.own, **options})


HAS_DETAILS = "test_the_result_has_uploads_and_weighted_metrics"
ALL_BAD = "test_all_bad_replies_at_once_spoil_nothing"
TOO_FEW = "test_too_few_usable_replies_end_the_round_with_every_reason"
GOES_ON = "test_the_model_is_not_the_start_and_each_round_goes_on"  # with no state
RATIO = "test_the_scale_of_weights_does_not_matter_but_their_ratio_does"
IDENTICAL = "test_identical_clients_get_their_model"
# Where no model is uploaded, of which the new one is some mean.
OF_MODELS = {IDENTICAL, ALL_BAD, TOO_FEW}
# Where a round asks twice, which Flower's hooks do not know.
OF_ONE_EXCHANGE = {ALL_BAD, TOO_FEW, HAS_DETAILS}
# What a second request for batch norms' statistics makes untrue: the clients' are not
# the model's, and Flower's hooks know one request.
OF_AVERAGES = {IDENTICAL}
# Where the step counts clients that were asked and did not answer, as FedDyn's does: it
# is another than in a run without them.
COUNTS_ABSENT = {
    ALL_BAD,
    "test_a_client_that_never_answers_costs_the_timeout_and_no_more",
}
# What the base class does alone is tried with a few.
OF_THE_BASE = {
    "test_sampling_depends_on_seed_and_round_not_on_node_ids",
    "test_the_minimum_is_a_floor_of_the_sample",
    "test_without_training_the_start_is_evaluated_as_with_fedavg",
    "test_metrics_can_be_aggregated_in_the_users_way",
    "test_arguments_out_of_range_are_named",
    "test_an_argument_that_does_not_exist_is_a_type_error",
    "test_an_odd_evaluation_costs_a_warning_and_not_the_round",
    "test_nodes_without_a_partition_go_by_their_id",
    "test_the_callers_records_are_left_as_they_were",
    "test_the_callers_config_cannot_change_what_the_strategy_asks_for",
    "test_records_travel_under_the_keys_that_were_asked_for",
    "test_weights_may_come_from_another_metric",
    "test_a_users_own_keys_reach_the_training_loop_untouched",
}
# What an option of a method changes is what its rounds give, and where they go on.
OF_ROUNDS = {
    "test_another_default_dtype_changes_nothing",
    "test_node_ids_and_the_order_of_replies_do_not_matter",
    GOES_ON,
    "test_a_stopped_run_goes_on_bit_for_bit",
}
PROBES = ("first", "random", "momentum", "none")
VARIANTS = {"fedfisher-adam", "fedfish-last-epoch", *(f"fagh-{p}" for p in PROBES[1:])}
FEW = ("fedfisher-kfac", "fedfish")
# Lossless, so that what comes back is exact and has keys to tamper with. A structure
# or a solver more has the same rounds: one each that reads twice, and that scores.
PLAIN = {"codec": "lossless"}
FEDFISHER = partial(Row, fedfisher_with, extras=True)
LAST_EPOCH = {"fisher_source": "last-epoch", "reduction": "mean"}
STRATEGIES = {
    # As it is by default: a second request a round, for batch norms' statistics.
    "fedfisher": FEDFISHER(PLAIN | {"norm_statistics": "refresh"}, OF_AVERAGES),
    "fedfisher-kfac": FEDFISHER(PLAIN),
    "fedfisher-adam": FEDFISHER(PLAIN | {"solver": "adam", "iterations": 30}),
    "fedfish": Row(FedFish, PLAIN, extras=True),
    "fedfish-last-epoch": Row(FedFish, PLAIN | LAST_EPOCH, extras=True),
    # Float32 sums are equal up to rounding, and weigh by the examples alone.
    "fedfisher-sums": Row(
        fedfisher_with,
        {"structure": "diagonal", "aggregate": "sums"},
        {IDENTICAL, RATIO},
    ),
    "fedavg": Row(OurFedAvg, {}, {HAS_DETAILS}),
    "scaffold": Row(Scaffold, {}, {GOES_ON}, plain_sgd=True),
    # A user's own, of the tutorial. It goes beyond the mean of the models.
    "own-feddyn": Row(
        tutorials.load("own_state", "Two runs").FedDyn,
        {"trained": trainable_names(tiny_model())},
        {IDENTICAL, GOES_ON, HAS_DETAILS} | COUNTS_ABSENT,
    ),
    # Another user's own, of several exchanges.
    "own-regmean": Row(
        tutorials.load("own_exchanges", "Three runs").RegMeanPlusPlus,
        {"layers": ["0.weight", "3.weight"]},
        OF_ONE_EXCHANGE,
    ),
    **{
        f"fagh-{probe}": Row(
            FAGH, {"lr": 0.3, "rho": 0.5, "probe": probe}, OF_MODELS | {GOES_ON}
        )
        for probe in PROBES
    },
    "afl": Row(AFL, {}, OF_MODELS | {GOES_ON, RATIO, HAS_DETAILS}),
}


def pytest_generate_tests(metafunc):
    """Run a test with every row that does not lack it."""
    if "row" in metafunc.fixturenames:
        name = metafunc.function.__name__
        some = FEW if name in OF_THE_BASE else STRATEGIES
        left = set() if name in OF_ROUNDS else VARIANTS
        rows = [k for k in some if k not in left and name not in STRATEGIES[k].lacks]
        metafunc.parametrize("row", rows, indirect=True)


@pytest.fixture
def row(request):
    """A row, whose clients train as it needs from now on."""
    with pytest.MonkeyPatch.context() as patch:
        yield of_name(request.param, patch)


def of_name(name, monkeypatch):
    """Return a row, whose clients train as it needs from now on."""
    found = STRATEGIES[name]
    if found.plain_sgd:
        monkeypatch.setattr(virtual, "LocalSGD", partial(LocalSGD, momentum=0.0))
    return found


def run(strategy, app=None, clients=3, *, seed=None, **options):
    grid = LocalGrid(quick_app() if app is None else app, clients, seed=seed)
    return strategy.start(grid, tiny_arrays(), **options)


@cache
def plain(row, *holdings, num_rounds=1):
    """What good clients give, without anything special."""
    held = holdings or (0, 1, 2)
    return run(row(), quick_app(held), len(held), num_rounds=num_rounds)


# The model


def test_identical_clients_get_their_model(row):
    result = run(row(), quick_app([1, 1, 1]))
    alone = tensors_of(ask(tiny_client(1)))
    merged = arrays_to_tensors(result.arrays)
    assert list(merged) == list(alone)
    for key, value in alone.items():
        assert merged[key].dtype == value.dtype
        assert torch.equal(merged[key], value), key


def test_node_ids_and_the_order_of_replies_do_not_matter(row):
    """Nor who remembers: one of both runs computes all anew."""
    results = [
        run(row(fraction_evaluate=1.0), app, seed=seed, num_rounds=2)
        for seed, app in enumerate([tiny_app(), quick_app()])
    ]
    one, other = results
    assert same_bits(one.arrays, other.arrays)
    assert one.train_metrics_clientapp == other.train_metrics_clientapp
    assert one.evaluate_metrics_clientapp == other.evaluate_metrics_clientapp
    assert [u.client for u in one.uploads] == [f"partition-{i}" for i in range(3)]
    ids = [[upload.node_id for upload in result.uploads] for result in results]
    assert ids[0] != ids[1]


def in_float32(dtype):
    """Clients in float32, in a process whose default dtype is another."""

    def make(partition):
        torch.set_default_dtype(torch.float32)
        client = tiny_client(partition)
        torch.set_default_dtype(dtype)
        return client

    return app_by_partition(make)


def check_default_dtype(row, dtype):
    want = run(row(), in_float32(torch.float32)).arrays
    got = run(row(), in_float32(dtype)).arrays
    torch.set_default_dtype(torch.float32)
    assert same_bits(got, want)


def test_another_default_dtype_changes_nothing(row):
    check_default_dtype(row, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_nor_for_packed_uploads_and_steps(dtype):
    refine = Refinement(head=True, steps=2)
    check_default_dtype(
        Row(fedfisher_with, {"codec": "fedavg", "refine": refine}), dtype
    )


def scaled_weights(*factors):
    def scale(factor):
        def tamper(content):
            metrics = content.metric_records["metrics"]
            metrics["num-examples"] = metrics["num-examples"] * factor

        return tamper

    return Watched(tamper={i: scale(factor) for i, factor in enumerate(factors)})


def test_the_scale_of_weights_does_not_matter_but_their_ratio_does(row):
    expected = plain(row).arrays
    assert same_bits(expected, run(row(), scaled_weights(4, 4, 4)).arrays)
    assert close(expected, run(row(), scaled_weights(0.3, 0.3, 0.3)).arrays, 1e-3)
    assert not close(expected, run(row(), scaled_weights(1, 1, 20)).arrays, 1e-3)


def test_weights_may_come_from_another_metric(row):
    def trust(content):
        metrics = content.metric_records["metrics"]
        metrics["trust"] = metrics["num-examples"]
        metrics["num-examples"] = 1

    app = Watched(tamper=dict.fromkeys(range(3), trust))
    assert same_bits(run(row(weighted_by_key="trust"), app).arrays, plain(row).arrays)


def test_the_model_is_not_the_start_and_each_round_goes_on(row):
    first, second = (plain(row, num_rounds=n).arrays for n in (1, 2))
    assert not close(first, tiny_arrays(), 1e-3)
    again = row().start(LocalGrid(quick_app(), 3), first, num_rounds=1)
    assert same_bits(again.arrays, second)
    assert not close(first, second, 1e-4)


# A bad reply is left out, by name


def two_records(content):
    content["more"] = ArrayRecord({"0.weight": Array(torch.ones(1).numpy())})


def two_metric_records(content):
    content["more"] = MetricRecord({"num-examples": 3})


def no_record(content):
    del content["arrays"]


def corrupted(content):
    record = content.array_records["arrays"]
    array = record["3.weight"]
    record["3.weight"] = Array(array.dtype, array.shape, array.stype, array.data[:-3])


def spoil_an_extra(change):
    def tamper(content):
        record = content.array_records["arrays"]
        key = next(key for key in record if key.startswith(PREFIX))
        change_array(key, change)(content)

    return tamper


def drop_a_block(content):
    record = content.array_records["arrays"]
    for key in [k for k in record if k.startswith(PREFIX) and "1.bias" in k]:
        del record[key]


NAN = float("nan")
BAD_REPLIES = {
    "missing key": (drop_array("3.bias"), "3.bias"),
    "unexpected key": (set_array("9.bias", [1.0]), "9.bias"),
    "shape": (change_array("0.weight", lambda a: a.T), "0.weight"),
    "dtype": (change_array("0.weight", lambda a: a.astype("float64")), "0.weight"),
    "NaN": (change_array("3.weight", lambda a: a * NAN), "3.weight"),
    "NaN in a buffer": (change_array("1.running_var", lambda a: a * NAN), "1.running"),
    "bytes": (corrupted, "3.weight"),
    "no extras": (drop_extras, PREFIX),
    "NaN in an extra": (spoil_an_extra(lambda a: a * NAN), PREFIX),
    "shape of an extra": (spoil_an_extra(lambda a: a[..., :1]), PREFIX),
    "dtype of an extra": (spoil_an_extra(lambda a: a.astype("int32")), PREFIX),
    "half of the extras": (drop_a_block, PREFIX),
    "two ArrayRecords": (two_records, "content"),
    "no ArrayRecord": (no_record, "content"),
    "two MetricRecords": (two_metric_records, "content"),
    "no weight": (set_metric("num-examples", None), "num-examples"),
    "zero weight": (set_metric("num-examples", 0), "num-examples"),
    "negative weight": (set_metric("num-examples", -3), "num-examples"),
    "NaN weight": (set_metric("num-examples", NAN), "num-examples"),
    "infinite weight": (set_metric("num-examples", float("inf")), "num-examples"),
    "weights": (set_metric("num-examples", [1, 2]), "num-examples"),
    "an exception": (fail, "error"),
}
# Metrics that cannot be averaged with the others', of whom, and whether they cost the
# client its place in the metrics; never in the model.
ODD_METRICS = {
    "another metric": (set_metric("more", 1.0), [2], False),
    "half have another metric": (set_metric("more", 1.0), [0, 1], False),
    "a metric less": (set_metric("train_loss", None), [2], True),
    "a list for a number": (set_metric("train_loss", [1.0, 2.0]), [2], True),
    "NaN": (set_metric("train_loss", NAN), [2], True),
}


@pytest.mark.parametrize("case", ODD_METRICS)
def test_odd_metrics_cost_metrics_and_no_upload(case, caplog):
    row = STRATEGIES["fedfisher-kfac"]
    tamper, whose, costs = ODD_METRICS[case]
    result = run(row(), Watched(tamper=dict.fromkeys(whose, tamper)), 4)
    whole, three = plain(row, 0, 1, 2, 3), plain(row, 0, 1, 3)
    assert same_bits(result.arrays, whole.arrays)
    metrics = result.train_metrics_clientapp[1]
    expected = (three if costs else whole).train_metrics_clientapp[1]
    assert metrics["train_loss"] == expected["train_loss"]
    assert costs or metrics == expected
    assert (metrics["num-replies"], metrics["num-rejected"]) == (4, 0)
    assert ("metrics without partition-2" in caplog.text) is costs


def test_all_bad_replies_at_once_spoil_nothing(row, caplog):
    bad = [
        (tamper, field)
        for case, (tamper, field) in BAD_REPLIES.items()
        if row.extras or (field != PREFIX and case != "half of the extras")
    ]
    spoiled = {3 + i: tamper for i, (tamper, _) in enumerate(bad)}
    app = Watched(quick_app([0, 1, 2, *[0] * len(spoiled)]), spoiled)
    grid = LocalGrid(app, 3 + len(spoiled))
    result = row().start(grid, tiny_arrays())
    assert same_bits(result.arrays, plain(row).arrays)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["num-replies"], metrics["num-rejected"]) == (3, len(spoiled))
    said = left_out(caplog)
    assert len(said) == len(spoiled)
    for partition, (_, field) in enumerate(bad, start=3):
        start = f"left out partition-{partition}: node {node_of(grid, partition)}: "
        assert any(f"{start}'{field}" in text for text in said), start


def test_too_few_usable_replies_end_the_round_with_every_reason(row):
    spoiled = {0: fail, 1: drop_array("3.bias"), 3: set_metric("num-examples", NAN)}
    grid = LocalGrid(Watched(tamper=spoiled), 4)
    with pytest.raises(RoundError) as caught:
        row(min_train_nodes=2).start(grid, tiny_arrays())
    text = str(caught.value)
    assert "1 usable reply, but min_train_nodes=2" in text
    for partition, reason in (
        (0, "ValueError: out of cheese"),
        (1, "'3.bias': missing"),
        (3, "'num-examples': the weight must be a positive number up to 1e+15, got"),
    ):
        line = f"partition-{partition}: node {node_of(grid, partition)}: "
        assert re.search(f"{line}.*{re.escape(reason)}", text)
    assert "partition-2" not in text


class Silent(LocalGrid):
    """One node never answers what it is asked to train."""

    silent = 1

    def pull_messages(self, message_ids):
        replies = list(super().pull_messages(message_ids))
        return [r for r in replies if not self._swallowed(r)]

    def _swallowed(self, reply):
        is_train = reply.metadata.message_type == "train"
        return is_train and self.nodes[reply.metadata.src_node_id] == self.silent


def test_a_client_that_never_answers_costs_the_timeout_and_no_more(row, clock):
    result = row().start(Silent(quick_app(), 3), tiny_arrays(), timeout=20)
    assert same_bits(result.arrays, plain(row, 0, 2).arrays)
    assert 20 <= clock.now < 25
    assert max(clock.slept) <= 3


# What belongs to the caller stays as it is


def test_the_callers_records_are_left_as_they_were(row):
    arrays = tiny_arrays()
    train, evaluate = ConfigRecord({"lr": 0.2}), ConfigRecord({"note": "hi"})
    app = Watched()
    row(fraction_evaluate=1.0).start(
        LocalGrid(app, 3),
        arrays,
        num_rounds=2,
        train_config=train,
        evaluate_config=evaluate,
    )
    assert dict(train) == {"lr": 0.2}
    assert dict(evaluate) == {"note": "hi"}
    assert same_bits(arrays, tiny_arrays())
    asked = [c for c in app.configs if "lr" in c]
    assert len(asked) == 6
    assert all(c["lr"] == 0.2 and c["seed"] == seed_of_clients(0) for c in asked)
    told = [c for c in app.configs if "note" in c]
    assert len(told) == 6
    assert {c["server-round"] for c in told} == {1, 2}


def test_a_users_own_keys_reach_the_training_loop_untouched(row):
    mine = {"seed": 9, "task": "mine", "structure": "tree", "codec": "zip", "lr": 0.1}
    seen = []

    class Noting(LocalSGD):
        def __call__(self, model, loader, device, config, **o):
            seen.append(dict(config))
            return super().__call__(model, loader, device, config, **o)

    app = app_by_partition(lambda i: tiny_client(i, train_fn=Noting(lr=0.1)))
    result = run(row(), app, train_config=ConfigRecord(mine))
    assert same_bits(result.arrays, plain(row).arrays)
    assert seen == [{**mine, "server-round": 1}] * 3


def test_the_callers_config_cannot_change_what_the_strategy_asks_for(row):
    config = ConfigRecord({"fisher.structure": "nonsense", "server-round": 9})
    config["fisher.seed"] = 9
    assert same_bits(run(row(), train_config=config).arrays, plain(row).arrays)


def test_records_travel_under_the_keys_that_were_asked_for(row):
    seen = set()
    app = quick_app()

    class Spy(ClientApp):
        def __call__(self, message, context):
            if message.metadata.message_type == "train":
                seen.add(frozenset(message.content))
            return app(message, context)

    run(row(arrayrecord_key="model", configrecord_key="how"), Spy())
    assert seen == {frozenset({"model", "how"})}


# Sampling


def sampled(row, which, **options):
    """Which partitions are asked to train, or to evaluate, in four rounds."""
    app = Watched()
    run(row(**{"fraction_train": 0.0, **options}), app, 6, num_rounds=4)
    asked = app.trained if which == "train" else app.evaluated
    return [sorted(p for n, p in asked if n == number) for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("which", ["train", "evaluate"])
def test_sampling_depends_on_seed_and_round_not_on_node_ids(row, which):
    half = {f"fraction_{which}": 0.5}
    first = sampled(row, which, **half)
    assert first == sampled(row, which, **half)
    assert all(len(set(partitions)) == 3 for partitions in first)
    assert len({tuple(partitions) for partitions in first}) > 1
    assert first != sampled(row, which, **half, seed=1)


@pytest.mark.parametrize("which", ["train", "evaluate"])
def test_the_minimum_is_a_floor_of_the_sample(row, which):
    few = {f"fraction_{which}": 0.01, f"min_{which}_nodes": 2}
    assert {len(partitions) for partitions in sampled(row, which, **few)} == {2}
    assert sampled(row, which, **{f"fraction_{which}": 1.0}) == [list(range(6))] * 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_rounds": "3"}, "num_rounds must be an integer, got '3'"),
        ({"num_rounds": -1}, "num_rounds must be"),
        ({"timeout": None}, "timeout must be"),
        ({"timeout": -5}, "timeout must be"),
        ({"callbacks": print}, "callbacks must be a list of callbacks, got <built-in"),
    ],
)
def test_arguments_of_start_are_looked_at(options, says):
    with pytest.raises(ConfigurationError, match=says):
        FedFish().start(LocalGrid(quick_app(), 2), tiny_arrays(), **options)


def test_hooks_that_nobody_would_call_are_refused():
    class Own(FedFish):
        def aggregate_train(self, server_round, replies):
            raise AssertionError

    grid = LocalGrid(quick_app(), 2)
    with pytest.raises(ConfigurationError, match=r"Own\.aggregate_train: .*callbacks"):
        Own().start(grid, tiny_arrays())
    for strategy in (FedFish(), FedFisherOneShot()):  # in Flower's own loop
        with pytest.raises(ConfigurationError, match=r"call Fed\w+\.start\(grid"):
            Strategy.start(strategy, grid, tiny_arrays(), num_rounds=2)


def test_a_start_from_flowers_mean_of_batch_counts(row):
    """Flower averages integers to floats, as it does in its FedAvg."""
    start, count = tiny_arrays(), Array(np.array(4.6))
    start = ArrayRecord({**start, "1.num_batches_tracked": count})
    result = virtual.start(row(), arrays=start)
    assert result.arrays["1.num_batches_tracked"].dtype == "int64"


def test_a_start_in_another_dtype_is_refused_before_anything_trains(row):
    def never(*arguments):
        raise AssertionError

    app = tiny_client(train_fn=never, loss_fn=never).as_client_app()
    double = {k: v.double() for k, v in arrays_to_tensors(tiny_arrays()).items()}
    with pytest.raises(RoundError, match=r"float64, but .* start from arrays"):
        virtual.start(row(), app, arrays=ArrayRecord(double))


def test_without_training_the_start_is_evaluated_as_with_fedavg(row):
    app = Watched()
    mine = run(row(fraction_train=0.0, fraction_evaluate=1.0), app)
    assert not app.trained
    assert same_bits(mine.arrays, tiny_arrays())
    flowers = FedAvg(fraction_train=0.0).start(
        LocalGrid(quick_app(), 3), tiny_arrays(), 1
    )
    ours, theirs = (r.evaluate_metrics_clientapp[1] for r in (mine, flowers))
    assert ours["loss"] == pytest.approx(theirs["loss"])


class Mute(ClientApp):
    """Nodes that do not tell which partition they hold."""

    def __init__(self, answer):
        super().__init__()
        self.app, self.answer = quick_app(), answer

    def __call__(self, message, context):
        if message.metadata.message_type == "query":
            return self.answer(message)
        return self.app(message, context)


def tells(**metrics):
    version = ConfigRecord({"flwr-fisher": __version__})
    content = {"metrics": MetricRecord(metrics), "config": version}
    return lambda message: Message(RecordDict(content), reply_to=message)


def refuses(message):
    raise FileNotFoundError("no data set at the place where one should be")


@pytest.mark.parametrize(
    "answer",
    [tells(), tells(**{"partition-id": 0.5}), refuses],
    ids=["nothing", "nonsense", "error"],
)
def test_nodes_without_a_partition_go_by_their_id(row, answer):
    grid = LocalGrid(Mute(answer), 3)
    result = row().start(grid, tiny_arrays())
    assert close(result.arrays, plain(row).arrays, 1e-3)
    names = [upload.client for upload in result.uploads]
    assert names == [f"node-{node}" for node in sorted(grid.nodes)]


# Stopped, and resumed


@pytest.mark.parametrize("asked", [1, 4])
def test_a_stopped_run_goes_on_bit_for_bit(row, asked, tmp_path):
    """Stopped within an exchange, and in the next exchange or round."""
    with pytest.raises(KeyboardInterrupt):
        run(row(), killing_app(asked, 3), num_rounds=2, checkpoint_dir=tmp_path)
    again = Watched()
    resumed = run(row(), again, num_rounds=2, checkpoint_dir=tmp_path, resume=True)
    whole = plain(row, num_rounds=2)
    assert same_bits(resumed.arrays, whole.arrays)
    assert resumed.train_metrics_clientapp == whole.train_metrics_clientapp
    requests = 2 * 3 * len(row().exchanges(1))
    assert len(again.trained) == requests - asked


# What a round reports


def test_metrics_can_be_aggregated_in_the_users_way(row):
    heard = []

    def mine(contents, key):
        heard.append((len(contents), key))
        return MetricRecord({"mine": 1.0})

    result = run(row(train_metrics_aggr_fn=mine))
    assert heard == [(3, "num-examples")]
    assert result.train_metrics_clientapp[1]["mine"] == 1.0


def test_the_result_has_uploads_and_weighted_metrics(row):
    result = plain(row, num_rounds=2)
    assert [upload.num_examples for upload in result.uploads] == [8, 10, 12]
    losses = [float(upload.metrics["train_loss"]) for upload in result.uploads]
    mean = sum(w * x for w, x in zip((8, 10, 12), losses, strict=True)) / 30
    last = result.train_metrics_clientapp[2]
    assert last["train_loss"] == pytest.approx(mean)
    assert "num-examples" not in last
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert result.details is not None


# Arguments


WRONG_BASE = {
    "fraction_train": (-0.1, NAN),
    "min_evaluate_nodes": (-1,),
    "min_available_nodes": (0,),
}
INF = float("inf")
WRONG = {
    MergeOptions: {"anchor": (NAN,), "shrink": (1.5,), "max_share": (0.49,)},
    FisherOptions: {"tolerance": (-0.1,), "examples": (0, NAN)},
    Scaffold: {"server_lr": (-1,)},
    FAGH: {"lr": (INF,), "rho": (0.0,), "betas": ((0.9, 1.0), (0.9,))},
    AFL: {"ridge": (-1.0,)},
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for kind, wrong in WRONG.items()
        for name, values in wrong.items()
        for value in values
    ],
)
def test_a_strategys_own_arguments_out_of_range_are_named(kind, name, value):
    with pytest.raises(ConfigurationError, match=f"^{name} must be"):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [(k, v) for k, values in WRONG_BASE.items() for v in values]
)
def test_arguments_out_of_range_are_named(row, name, value):
    with pytest.raises(ConfigurationError, match=f"^{name} must be"):
        row(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"solver": "closed-form"}, "solver='closed-form' needs structure='diagonal'"),
        ({"solver": "gd", "policy": Policy.strict()}, "(solver='gd', anchor=0.03)"),
        (
            {"score": lambda params: 0.0},
            "score works with solver='adam' only, not 'pcg'",
        ),
    ],
)
def test_arguments_that_do_not_go_together_are_refused_early(arguments, text):
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        FedFisherOneShot(**arguments)


def test_an_argument_that_does_not_exist_is_a_type_error(row):
    with pytest.raises(TypeError, match="fraction_trian"):
        row(fraction_trian=0.5)


class Evaluates(ClientApp):
    """One client reports other metrics of its evaluation."""

    def __init__(self, partition, **entries):
        super().__init__()
        self.app, self.partition, self.entries = quick_app(), partition, entries

    def __call__(self, message, context):
        reply = self.app(message, context)
        own = context.node_config["partition-id"] == self.partition
        if own and message.metadata.message_type == "evaluate":
            next(iter(reply.content.metric_records.values())).update(self.entries)
        return reply


def test_an_odd_evaluation_costs_a_warning_and_not_the_round(row, caplog):
    result = run(row(fraction_evaluate=1.0), Evaluates(1, more=1.0))
    expected = run(row(fraction_evaluate=1.0))
    assert result.evaluate_metrics_clientapp == expected.evaluate_metrics_clientapp
    assert same_bits(result.arrays, plain(row).arrays)
    assert "left out" not in caplog.text


BAD_EVALUATIONS = {
    "negative weight": ({"num-examples": -192}, "'num-examples': the weight must be"),
    "a list as loss": ({"loss": [1.0, 2.0]}, "it has no finite 'loss'"),
    "NaN": ({"loss": NAN}, "it has no finite 'loss'"),
    "30 000 metrics": (
        {f"m{i}": 1.0 for i in range(30_000)},
        "'metrics': 30003 metrics, but at most 1000 are allowed",
    ),
}


@pytest.mark.parametrize("case", BAD_EVALUATIONS)
def test_a_bad_evaluation_is_left_out_by_name(case, caplog):
    row = STRATEGIES["fedfisher-kfac"]
    entries, reason = BAD_EVALUATIONS[case]
    grid = LocalGrid(Evaluates(3, **entries), 4)
    result = row(fraction_evaluate=1.0, fraction_train=0.0).start(grid, tiny_arrays())
    expected = row(fraction_evaluate=1.0, fraction_train=0.0).start(
        LocalGrid(quick_app(), 3), tiny_arrays()
    )
    assert result.evaluate_metrics_clientapp == expected.evaluate_metrics_clientapp
    assert expected.evaluate_metrics_clientapp[1]
    (said,) = left_out(caplog)
    assert "partition-3" in said
    assert reason in said
