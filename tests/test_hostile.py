"""One hostile client of six: every case that was seen to do harm, and does none now."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hostile import (
    ANY,
    CLIENTS,
    CURVATURE,
    HOSTILE,
    LONG_KEY,
    MANY_RANDOM,
    NETWORK,
    PACKED,
    PRODUCTS,
    RANDOM,
    STRICT,
    VICTIMS,
    adds,
    both,
    counting,
    edit,
    identity,
    noise,
    raising,
    repacked,
    run,
    says,
)
from hostile_servers import CHANGES, besiege
from virtual import (
    LIFTED,
    Node,
    Watched,
    fail,
    opened,
    quick_app,
    same_bits,
    tiny_arrays,
)

from flwr_fisher import __version__
from flwr_fisher.errors import ConfigurationError, ParamsError, RoundError, WireError
from flwr_fisher.randomness import seed_of_clients
from flwr_fisher.server.door import LeftOut
from flwr_fisher.server.exchange import Upload
from flwr_fisher.server.policy import Policy, Sizes
from flwr_fisher.strategies import FedAvg, FedFisherOneShot, MergeOptions
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import Additive, FisherUpload
from flwr_fisher.wire.additive import SUMS


def arrow(a):
    """A small diagonal that ends with 0, and entries beside that 0."""
    small = np.diag(np.r_[3e-7 * np.diag(a[0].astype(float))[:-1], 0])
    small[-1] = small[:, -1] = np.sqrt(0.9e-5 * np.diag(small))
    return small[None]


def left(reason):
    return rf"left out partition-2: .*{reason}"


def limited(what):
    return rf"limited partition-2: {what}"


def constant(pattern, value):
    return edit(pattern, lambda a: a * 0 + value)


def times(pattern, factor):
    return edit(pattern, lambda a: factor * a)


def times_if_no_params(pattern, factor):
    """Multiply curvature that comes without a model: that of the steps."""

    def attack(content, sent=None):
        (record,) = content.array_records.values()
        if not any(re.search(NETWORK, key) for key in record):
            times(pattern, factor)(content, sent)

    return attack


INDEFINITE = both(
    times(r"^\d", -1), edit("/kfac/.*/A$", arrow), times("/kfac/.*/G$", 1 / 3e-7)
)
TOO_MANY = says(num_examples=2**62)
HUGE, NEGATIVE = "of size .*, which is not possible", "/A': has a negative eigenvalue"
STEP_OF_PRODUCT = limited(".*step of the product x")
MUCH_CURVATURE = limited(".*curvature of 0.weight x")
MANY_COUNTS = limited(r"weight x 8.*e-08, parameters x")
CONTROL = limited("control x .*, parameters x")
SQUARES = left("'head/cross': is larger than its squares allow")
ROWS = left("'head/cross': has other counts than rows")
VARIANCE = left("'1.running_var': a variance below 0")


def impossible(what):
    return left(f"{what}: is {HUGE}")


def below_zero(a):
    return np.where(a == a.min(), a - 10, a)


def other_labels(a):
    return 1e9 * np.roll(a, 1, axis=-1)


# By strategy, what the hostile client does, and what the log says of it.
BY_STRATEGY = {
    "FedFisher": {
        "F = 1e30 I": (edit(CURVATURE, lambda a: 1e30 * identity(a)), left(HUGE)),
        "F x 1e-20": (times(CURVATURE, 1e-20), ""),
        "a factor with negative eigenvalues": (
            edit("/kfac/.*/A$", lambda a: 2 * a - a * identity(a)),
            left(NEGATIVE),
        ),
        "an indefinite factor whose diagonal ends with 0": (INDEFINITE, left(NEGATIVE)),
        "2^62 examples": (TOO_MANY, left(r"a positive number up to 1e\+15")),
        "1e9 examples, random": (MANY_RANDOM, MANY_COUNTS),
        # A hundred thousand take as many times longer in Flower's own serialisation.
        "10 000 keys": (adds(10**4), left("")),
        "a key of a megabyte": (adds(1, LONG_KEY), left("")),
        "an error of a megabyte": (raising, left("the client failed")),
    },
    "FedFisher, batch norm": {
        "a variance below zero": (edit("running_var", below_zero), VARIANCE),
        "-37 batches": (counting(-37), left("-37 batches, after 0")),
        "2^62 batches": (counting(2**62), left(r"46\d+ batches, after 0")),
    },
    "FedAvg": {"step x 1e4": (times(ANY, 1e4), limited("parameters x"))},
    "SCAFFOLD": {"change x -1e4": (times(ANY, -1e4), CONTROL)},
    "FedFish": {"FedFish, F x 1e6": (times(CURVATURE, 1e6), MUCH_CURVATURE)},
    "FAGH": {"gradients of 1e30": (constant(ANY, 1e30), impossible("'gradient'"))},
    "TCT": {
        "30 000 examples": (says(num_examples=30_000), limited(r"weight x 0\.00\d+")),
        "means of 1e300": (constant("^tct/sum$", 1e300), impossible("'features'")),
        "eigenvalue 1e9": (
            constant("^tct/largest", 1e9),
            limited("tct/largest-eigenvalue x"),
        ),
    },
    "AFL": {
        "labels x -1e4": (times("^head/cross$", -1e4), SQUARES),
        "sums of 1e30": (constant("^head/", 1e30), ROWS),
    },
    "FedFisher, pretrained": {
        "sums for a head x 1e9, of other labels": (
            both(
                times("^head/(gram|square)$", 1e9), edit("^head/cross$", other_labels)
            ),
            limited(".*head"),
        )
    },
    "FedFisher, refined": {
        "steps, F x 1e8": (times_if_no_params(CURVATURE, 1e8), limited(".*curvature"))
    },
    "FedFisher, sums": {
        "sums, F x 1e6": (times(CURVATURE, 1e6), limited("fisher/0.weight x"))
    },
    PRODUCTS: {
        "products that cannot be": (
            constant("^product/", 3e38),
            impossible("product'"),
        ),
        "products the other way": (times("^product/", -1e6), limited(".*product x")),
        "products that are random": (RANDOM, STEP_OF_PRODUCT),
        "1e9 examples, random products": (MANY_RANDOM, STEP_OF_PRODUCT),
        "F of products x 1e6": (times(CURVATURE, 1e6), MUCH_CURVATURE),
    },
    PACKED: {"packed F x 1e-20": (repacked(times(CURVATURE, 1e-20)), "")},
}
CASES = {
    case: (strategy, *how)
    for strategy, cases in BY_STRATEGY.items()
    for case, how in cases.items()
}


@pytest.mark.parametrize("case", CASES)
def test_what_did_harm_does_none(case):
    name, attack, said = CASES[case]
    # Two products are enough for a client that lies in each.
    own = {"merge": MergeOptions(iterations=2)} if name == PRODUCTS else {}
    rounds = min(VICTIMS[name].rounds, {"TCT": 5, "SCAFFOLD": 4}.get(name, 3))
    outcome = run(name, attack, rounds=rounds, fraction_evaluate=0, **own)
    assert outcome.harm == ""
    assert re.search(said, outcome.log)
    # Nobody can forge a line, flood the log or stretch it.
    lines = outcome.log.splitlines()
    assert all(len(line) < 1000 and line.isprintable() for line in lines)
    assert len(lines) < 30


def test_a_hostile_server_does_no_client_harm(monkeypatch):
    monkeypatch.setitem(CHANGES, "100 000 arrays", adds(10**4, "server/{}"))
    asked, harmed = besiege("SCAFFOLD", rounds=2)
    assert asked > 100
    assert harmed == []


HARMFUL = {"FedAvg": MANY_RANDOM, PACKED: repacked(MANY_RANDOM)}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_hostile_run_can_be_harmed(name):
    """That the harness sees harm: without a policy, 1e9 examples own the model."""
    options = {"policy": LIFTED, "rounds": 2, "fraction_evaluate": 0.0}
    assert run(name, HARMFUL[name], **options).harm.startswith("accuracy")


# Decoding, and what turns out bad later


def test_any_exception_of_one_reply_costs_that_reply_alone(monkeypatch, caplog):
    read = FisherUpload.from_arrays
    calls = []

    def sometimes(record, *args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise RecursionError("too deep\nINFO : all is well")
        return read(record, *args, **options)

    monkeypatch.setattr(FisherUpload, "from_arrays", staticmethod(sometimes))
    strategy = FedFisherOneShot(fraction_evaluate=0.0)
    result = strategy.start(LocalGrid(quick_app(), 4), tiny_arrays())
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["num-replies"], metrics["num-rejected"]) == (3, 1)
    assert r"RecursionError: too deep\nINFO : all is well" in caplog.text


def stepping(make):
    """A strategy whose step is another one; it is given the right one, too."""

    class Odd(FedFisherOneShot):
        def exchanges(self, server_round):
            exchange, *others = super().exchanges(server_round)
            return [replace(exchange, step=partial(make, exchange.step)), *others]

    return Odd(fraction_evaluate=0.0)


@pytest.mark.parametrize(
    "error",
    [
        ParamsError("the third client's overflow"),
        KeyError("the third client's overflow"),  # a metric that it lacks
        WireError("the third client's overflow", field="steps"),
    ],
)
def test_an_upload_that_no_step_can_take_is_left_out_by_name(tmp_path, caplog, error):
    def step(taken, state, uploads):
        if any(upload.client == "partition-2" for upload in uploads):
            raise error
        return taken(state, uploads)

    where = {"checkpoint_dir": tmp_path}
    result = stepping(step).start(LocalGrid(quick_app(), 4), tiny_arrays(), **where)
    without = LocalGrid(Watched(tamper={2: fail}), 4)
    expected = FedFisherOneShot(fraction_evaluate=0.0).start(without, tiny_arrays())
    assert same_bits(result.arrays, expected.arrays)
    assert "left out partition-2: node" in caplog.text
    assert "the third client's overflow" in caplog.text
    closed = opened(tmp_path).exchange_journal(1, 1).record
    assert "overflow" in closed.rejected["partition-2"]


def test_a_step_that_fails_whatever_it_is_given_ends_the_round_and_keeps_all(tmp_path):
    def step(taken, state, uploads):
        raise ParamsError("no step at all")

    grid, where = LocalGrid(quick_app(), 3), {"checkpoint_dir": tmp_path}
    with pytest.raises(RoundError, match="the step failed: no step at all"):
        stepping(step).start(grid, tiny_arrays(), **where)
    kept = sorted(p.stem for p in tmp_path.glob("uploads-0001/*/*.safetensors"))
    assert kept == ["partition-0", "partition-1", "partition-2"]


# Who says what


class Claims(ClientApp):
    """Nodes whose answers to the query are chosen by the partition that they hold."""

    def __init__(self, claims):
        super().__init__()
        self.app, self.claims = quick_app(), claims
        self.trained = []

    def __call__(self, message, context):
        partition = int(context.node_config["partition-id"])
        if message.metadata.message_type == "query":
            claim = self.claims.get(partition, partition)
            content = RecordDict({"m": MetricRecord({"partition-id": claim})})
            content["c"] = ConfigRecord({"flwr-fisher": __version__})
            return Message(content, reply_to=message)
        self.trained.append(partition)
        return self.app(message, context)


def start(app, grid=None, clients=4, **options):
    strategy = FedAvg(fraction_evaluate=0.0, **options)
    return strategy.start(grid or LocalGrid(app, clients), tiny_arrays(), num_rounds=1)


@pytest.mark.parametrize("claim", [-5, 2**63])
def test_a_partition_that_cannot_be_is_none(claim):
    result = start(Claims({3: claim}), clients=6)
    numbers = [upload.number for upload in result.uploads]
    assert len(set(numbers)) == 6  # -5 was 5 in the roster


def test_a_node_id_cannot_be_claimed_as_a_partition():
    app = Claims({0: -1})  # goes by its node's id
    grid = LocalGrid(app, 4)
    app.claims[3] = next(node for node, held in grid.nodes.items() if held == 0)
    start(app, grid)
    assert sorted(app.trained) == [0, 1, 2]


class Registered(LocalGrid):
    """A grid some of whose nodes are registered by a name."""

    names: dict[int, str]

    def get_nodes(self):
        for node in self.get_node_ids():
            yield Node(node, self.names.get(self.nodes[node]))


@pytest.mark.parametrize(
    ("registered", "claims", "clients", "trained"),
    [
        # What its claim would make of "partition-0" is taken.
        (
            {1: "st mary/2", 2: "partition-0"},
            {3: 0},
            ["partition-0", "st mary/2"],
            [1, 2],
        ),
        ({1: "st mary"}, {3: 1}, ["partition-0", "partition-2", "st mary"], [0, 1, 2]),
        ({1: "st mary", 3: "st john"}, {3: 1}, ["partition-0", "partition-2"], [0, 2]),
    ],
)
def test_a_registered_name_is_who_a_node_is_and_is_lost_to_no_claim(
    registered, claims, clients, trained, caplog
):
    app = Claims(claims)
    grid = Registered(app, 4)
    grid.names = registered
    assert [u.client for u in start(app, grid).uploads] == clients
    assert sorted(app.trained) == trained
    if len(registered) == 1:
        (said,) = [m for m in caplog.messages if "Not asking node" in m]
        nodes = [node for node, held in grid.nodes.items() if held in (1, 3)]
        assert all(f"node-{node}" in said for node in nodes)


def test_the_seed_that_draws_cohorts_is_sent_to_nobody():
    app = Watched()
    strategy = FedAvg(seed=12345, fraction_train=0.5, fraction_evaluate=1.0)
    strategy.start(LocalGrid(app, 4), tiny_arrays(), num_rounds=2)
    assert {config["seed"] for config in app.configs} == {seed_of_clients(12345)}
    assert not any(12345 in config.values() for config in app.configs)


def test_products_of_one_client_are_computed_and_not_believed():
    like = {"w": torch.zeros(2)}
    parts = {
        "params": {"w": torch.tensor([1.0, 2.0])},
        "fisher": {"w": torch.tensor([1e-42, 1.0])},
        "fisher-params": {"w": torch.tensor([9e-38, 5.0])},  # would pull w to 90 000
    }
    read = Additive.reader(*SUMS)(Additive(parts).to_arrays(), like)
    products = read.part("fisher-params")["w"]
    assert torch.equal(products, parts["fisher"]["w"] * parts["params"]["w"])


# The policy


def test_a_policy_out_of_range_is_named():
    for policy, said in (
        ({"max_curvature": 0.4}, "curvature"),
        ({"max_distance": 0.5}, "distance"),
    ):
        with pytest.raises(ConfigurationError, match=f"^max_{said}"):
            Policy(**policy)
    with pytest.raises(
        ConfigurationError, match=r"policy must be Policy\(\.\.\.\), got \{"
    ):
        FedAvg(policy={"max_weight": 3})


def test_two_clients_are_not_limited():
    sizes = [Sizes({"step": size}, {"curvature": size}) for size in (1.0, 1e6)]
    uploads = [
        Upload(i, f"{i}", 10.0 ** (9 * i), Additive({}), MetricRecord(), num_bytes=0)
        for i in range(2)
    ]
    assert STRICT.references(sizes, {}) == {}
    assert STRICT.limit(uploads, sizes, {}, {}) == uploads


@pytest.mark.parametrize(
    ("name", "spoilt"),
    [("FedAvg", NETWORK), (PRODUCTS, NETWORK), ("FedFisher, refined", "^gradient/")],
)
def test_who_is_limited_in_any_exchange_of_a_round_is_counted(name, spoilt):
    attack = both(edit(spoilt, noise), times(spoilt, 1e3))
    metrics = run(name, attack, rounds=1, fraction_evaluate=0).metrics[1]
    # To which part of what each sent.
    parts, weights = metrics["limited-parts"], metrics["limited-weights"]
    cut = [min(pair) for pair in zip(parts, weights, strict=True)]
    assert metrics["num-limited"] == sum(part < 1 for part in cut)
    assert [part < 0.01 for part in cut] == [c == HOSTILE for c in range(CLIENTS)]


# The log


def test_one_mistake_of_many_clients_is_two_lines(caplog):
    left_out = LeftOut("train")
    for i in range(1000):
        left_out.reject(f"partition-{i}", "no\nsuch layer", i)
    left_out.log_repeated()
    first, rest = (r.getMessage() for r in caplog.records)
    assert first == r"train: left out partition-0: node 0: no\nsuch layer"
    assert rest.startswith("train: left out partition-1, ")
    assert rest.endswith(r"and 994 more, too: no\nsuch layer")
    assert len(left_out.rejected) == 1000
    (line,) = left_out.lines()
    assert line.endswith(r"and 995 more: no\nsuch layer")


def test_a_thousand_mistakes_are_twenty_lines_of_an_error():
    left_out = LeftOut("train")
    for i in range(1000):
        left_out.reject(f"partition-{i}", f"mistake {i}")
    assert len(left_out.lines()) == 21
    assert left_out.lines()[-1] == "… and 980 more reasons"


# Evaluate replies weigh no more than they may, either


@pytest.mark.parametrize(
    ("examples", "policy", "loss"),
    [
        (2**62, Policy(), 0.0),  # refused: nobody has so many
        (70, Policy(), 0.7),  # as Flower's FedAvg
        (10**9, STRICT, STRICT.max_weight / (STRICT.max_weight + 3)),
    ],
)
def test_evaluations_weigh_what_clients_report_unless_the_policy_is_strict(
    examples, policy, loss, caplog
):
    plain = quick_app()
    app = ClientApp()
    app.train()(plain)
    app.query()(plain)

    @app.evaluate()
    def evaluate(message, context):
        liar = context.node_config["partition-id"] == 3
        own = {"num-examples": examples, "loss": 1.0} if liar else {"num-examples": 10}
        content = RecordDict({"m": MetricRecord({"loss": 0.0, **own})})
        return Message(content, reply_to=message)

    strategy = FedAvg(fraction_train=0.0, fraction_evaluate=1.0, policy=policy)
    result = strategy.start(LocalGrid(app, 4), tiny_arrays(), num_rounds=1)
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(loss)
    assert ("partition-3" in caplog.text) == (examples > 70)
