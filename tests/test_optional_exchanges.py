"""Exchanges without which a round is good: a head that is fitted anew after a merge."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_secure_sums import secure_app
from virtual import (
    Watched,
    fail,
    killing_app,
    quick_app,
    same_bits,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import make_client_app
from flwr_fisher.params import shared_state
from flwr_fisher.secure import SecureSums
from flwr_fisher.strategies import (
    FedAvg,
    FedFisherOneShot,
    Refinement,
    ServerState,
    Step,
    Waiting,
    head_exchange,
)
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors

CLIENTS = 3
SUMS = {"structure": "diagonal", "aggregate": "sums"}


class WithHead(FedFisherOneShot):
    """As the page on one's own methods shows it."""

    def exchanges(self, server_round):
        head = head_exchange(ridge=1e-3, clients="previous", name="head", optional=True)
        return [*super().exchanges(server_round), head]


class HeadFirst(WithHead):
    def exchanges(self, server_round):
        *others, head = super().exchanges(server_round)
        return [replace(head, clients="all"), *others]


def run(make, app=None, clients=CLIENTS, *, options=None, **start):
    strategy = make(fraction_evaluate=0.0, refine=None, **(options or {}))
    grid = LocalGrid(quick_app() if app is None else app, clients)
    return strategy.start(grid, tiny_arrays(), **start)


def with_best_head(arrays):
    """A model with the ridge regression of all clients' labels on its features."""
    model = tiny_model().double()
    model.load_state_dict(arrays_to_tensors(arrays))
    model.eval()
    x, y = zip(*(tiny_data(client).tensors for client in range(CLIENTS)), strict=True)
    with torch.no_grad():
        features = model[:3](torch.cat(x).double())
    inputs = torch.cat([features, torch.ones(len(features), 1)], dim=1)
    targets = torch.nn.functional.one_hot(torch.cat(y), 3).double()
    gram = inputs.mT @ inputs
    penalty = 1e-3 * gram.diagonal()[:-1].mean() * torch.eye(len(gram))
    penalty[-1, -1] = 0  # of the bias
    solution = torch.linalg.solve(gram + penalty, inputs.mT @ targets)
    return {**shared_state(model), "3.weight": solution[:-1].mT, "3.bias": solution[-1]}


def assert_head_of(merged, refitted, tolerance=1e-4):
    expected = with_best_head(merged.arrays)
    for name, value in arrays_to_tensors(refitted.arrays).items():
        wanted = expected[name].to(value.dtype)
        torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)


def test_a_head_is_fitted_to_features_with_fresh_statistics():
    app = Watched()
    merged, refitted = run(FedFisherOneShot), run(WithHead, app)
    assert_head_of(merged, refitted)
    jobs = [config.get("job") for config in app.configs]
    assert jobs == ["train"] * 3 + ["norm-statistics"] * 3 + ["head-sums"] * 3
    # The result reports the merge.
    assert type(refitted.details) is type(merged.details)
    kinds = [[type(u.payload) for u in r.uploads] for r in (merged, refitted)]
    assert kinds[0] == kinds[1]
    assert sorted(refitted.exchange_uploads) == ["head", "norm statistics"]
    assert len(refitted.exchange_uploads["head"]) == 3
    metrics = [r.train_metrics_clientapp[1] for r in (merged, refitted)]
    assert dict(metrics[0]) == dict(metrics[1])
    first = run(HeadFirst)
    assert len(first.exchange_uploads["head"]) == 3
    assert first.upload_bytes > merged.upload_bytes


def test_a_head_is_fitted_from_a_secure_sum(tmp_path):
    options = {**SUMS, "secure": SecureSums(bits=64)}
    merged = run(FedFisherOneShot, secure_app(tmp_path / "a"), options=options)
    refitted = run(WithHead, secure_app(tmp_path / "b"), options=options)
    assert_head_of(merged, refitted)
    (summed,) = refitted.exchange_uploads["head"]
    assert sorted(summed.members) == [0, 1, 2]


def test_who_misses_one_secure_sum_is_asked_for_the_next(tmp_path):
    keys = []

    def no_norms(message, context, stage):
        if context.node_config["partition-id"] == 1 and stage == "keys":
            keys.append(stage)
            if len(keys) == 2:  # of the norms' sum
                raise ValueError("out of cheese")

    own = {"norm_statistics": "refresh", "refine": Refinement(), "secure": SecureSums()}
    grid = LocalGrid(secure_app(tmp_path, no_norms), 4)
    result = FedAvg(fraction_evaluate=0.0, **own).start(grid, tiny_arrays())
    uploads = result.exchange_uploads
    members = [sorted(uploads[name][0].members) for name in ("norm statistics", "head")]
    assert members == [[0, 2, 3], [0, 1, 2, 3]]


def test_one_client_that_fails_is_skipped_and_named(caplog):
    with caplog.at_level(logging.WARNING, "flwr"):
        result = run(WithHead, Watched(tamper={1: at_request(3, fail)}))
    assert len(result.exchange_uploads["head"]) == 2
    assert "head: left out partition-1" in caplog.text
    assert len(result.uploads) == 3


@pytest.mark.parametrize(("make", "request_number"), [(WithHead, 3), (HeadFirst, 1)])
@pytest.mark.parametrize("left", [1, 2])
def test_what_few_clients_say_is_not_taken_for_what_all_say(
    left, make, request_number, caplog
):
    gone = {p: at_request(request_number, fail) for p in range(left, CLIENTS)}
    with caplog.at_level(logging.WARNING, "flwr"):
        result = run(make, Watched(tamper=gone))
    assert ("head" in result.exchange_uploads) == (left == 2)
    assert ("but 2 must reply" in caplog.text) == (left == 1)


def test_the_same_clients_are_asked_in_all_of_them():
    """Whose replies were enough for the merge are waited for: all of them refine it."""
    waiting = Waiting(enough_fraction=0.6)
    strategy = FedFisherOneShot(
        fraction_evaluate=0.0, refine=Refinement(steps=2), waiting=waiting
    )
    result = strategy.start(LocalGrid(quick_app(), 10), tiny_arrays())
    assert len(result.uploads) == 6
    assert len(result.exchange_uploads) == 3
    assert {len(uploads) for uploads in result.exchange_uploads.values()} == {6}


def test_whom_a_head_took_is_waited_for_in_what_follows():
    """A head takes half of those that it asks, also where fewer are enough."""
    own = {"fraction_train": 0.5, "waiting": Waiting(enough_replies=3)}
    strategy = FedAvg(fraction_evaluate=0.0, refine=Refinement(), **own)
    result = strategy.start(LocalGrid(quick_app(), 8), tiny_arrays())
    heads = "head", "head losses"
    assert [len(result.exchange_uploads[name]) for name in heads] == [4, 4]


@pytest.mark.parametrize("kind", [FedAvg, FedFisherOneShot])
def test_a_head_asks_more_clients_than_a_round_samples(kind, tmp_path):
    for again in ({}, {"resume": True, "reopen": True}):
        strategy = kind(fraction_train=0.4, fraction_evaluate=0.0, refine=Refinement())
        options = {"checkpoint_dir": tmp_path, **again}
        result = strategy.start(LocalGrid(quick_app(), 5), tiny_arrays(), **options)
        assert len(result.uploads) == 2
        assert len(result.exchange_uploads["head"]) == 5


@pytest.mark.parametrize("later", [3, 10])
def test_a_heads_half_is_of_those_that_it_asked(later, tmp_path):
    """Other clients may be here when a killed run goes on."""

    def dies(content):
        if any("slopes" in record for record in content.array_records.values()):
            raise KeyboardInterrupt

    def start(app, clients, **options):
        own = {"fraction_train": 0.5, "fraction_evaluate": 0.0, "refine": Refinement()}
        return FedAvg(**own).start(LocalGrid(app, clients), tiny_arrays(), **options)

    dying = Watched(tamper=dict.fromkeys(range(4), dies))
    with pytest.raises(KeyboardInterrupt):
        start(dying, 4, checkpoint_dir=tmp_path)
    resumed = start(Watched(), later, checkpoint_dir=tmp_path, resume=True)
    assert len(resumed.exchange_uploads["head"]) == 4
    if later > 4:
        assert same_bits(resumed.arrays, start(Watched(), 4).arrays)


class OfFive(FedFisherOneShot):
    def exchanges(self, server_round):
        head = head_exchange(clients=lambda state: range(5), name="head", optional=True)
        return [*super().exchanges(server_round)[:1], head]


def test_a_resumed_run_needs_as_many_as_before(tmp_path):
    """Half of five, of which three were there."""
    with pytest.raises(KeyboardInterrupt):
        run(OfFive, killing_app(5, CLIENTS), checkpoint_dir=tmp_path)
    failing = Watched(tamper={p: at_request(1, fail) for p in range(CLIENTS)})
    resumed = run(OfFive, failing, checkpoint_dir=tmp_path, resume=True)
    assert len(failing.configs) == 1
    assert "head" not in resumed.exchange_uploads


class StopsAfterTwo:
    def on_round_end(self, server_round, arrays, history):
        return server_round == 2


def test_a_last_round_that_was_none_is_said_to_be_unrefined(tmp_path, caplog):
    for rounds, callbacks in ((3, [StopsAfterTwo()]), (2, [])):
        caplog.clear()
        own = {"num_rounds": rounds, "callbacks": callbacks, "checkpoint_dir": tmp_path}
        grid, strategy = (
            LocalGrid(quick_app(), CLIENTS),
            FedFisherOneShot(fraction_evaluate=0.0),
        )
        result = strategy.start(grid, tiny_arrays(), resume=True, **own)
        assert result.unrefined is None
        assert "round 2 was not done as the last one" in caplog.text


def test_a_client_may_count_fewer_examples_than_its_loader_has():
    def client_fn(context):
        return tiny_client(15, num_examples=21)  # 38 * (21 / 38) is rounded up

    result = run(WithHead, make_client_app(client_fn))
    counts = [float(u.payload.count) for u in result.exchange_uploads["head"]]
    assert counts == pytest.approx([21.0] * CLIENTS)


def at_request(number, tamper):
    """Spoil the reply to a client's request of this number, from 1."""
    count = iter(range(1, 100))
    return lambda content: tamper(content) if next(count) == number else None


@pytest.mark.parametrize("asked", [1, 3, 4, 5, 6, 7, 8])
def test_a_run_that_stops_in_any_exchange_ends_in_the_same_bits(asked, tmp_path):
    whole = run(WithHead)
    with pytest.raises(KeyboardInterrupt):
        run(WithHead, killing_app(asked, CLIENTS), checkpoint_dir=tmp_path)
    again = Watched()
    resumed = run(WithHead, again, checkpoint_dir=tmp_path, resume=True)
    assert same_bits(resumed.arrays, whole.arrays)
    assert resumed.train_metrics_clientapp == whole.train_metrics_clientapp
    assert len(again.trained) == 3 * CLIENTS - asked  # nobody does anything twice


@pytest.mark.parametrize("request_number", [1, 3], ids=["training", "head"])
def test_who_left_while_the_server_was_dead_is_named(request_number, tmp_path, caplog):
    """Also by the exchange that was open when it died."""

    def die(content):
        raise KeyboardInterrupt

    deaths = {p: at_request(request_number, die) for p in range(CLIENTS)}
    with pytest.raises(KeyboardInterrupt):
        run(WithHead, Watched(tamper=deaths), checkpoint_dir=tmp_path)
    run(WithHead, clients=CLIENTS - 1, checkpoint_dir=tmp_path, resume=True, timeout=1)
    gone = f"left out partition-{CLIENTS - 1}: no reply, it did not connect"
    assert gone in caplog.text


def test_an_exchange_that_failed_is_not_tried_again_after_a_crash(tmp_path):
    """Which of the clients are there is another matter in another life."""

    class Dies(WithHead):
        def exchanges(self, server_round):
            training, norms, head = super().exchanges(server_round)

            def die(before, now):
                raise KeyboardInterrupt

            return [training, norms, replace(head, prepare=die)]

    Dies.__name__ = WithHead.__name__  # the same strategy
    failing = Watched(tamper={p: at_request(2, fail) for p in range(CLIENTS)})
    with pytest.raises(KeyboardInterrupt):
        run(Dies, failing, checkpoint_dir=tmp_path)
    again = Watched()
    resumed = run(WithHead, again, checkpoint_dir=tmp_path, resume=True)
    assert "num-norms-refreshed" not in resumed.train_metrics_clientapp[1]
    assert [config.get("job") for config in again.configs] == ["head-sums"] * CLIENTS


def test_one_that_failed_while_nobody_was_there_is_not_tried_again(tmp_path):
    class Late(LocalGrid):
        there = False

        def get_node_ids(self):
            return super().get_node_ids() if self.there else []

    def start(app, there, **options):
        class Waits(HeadFirst):
            def exchanges(self, server_round):
                head, training, *others = super().exchanges(server_round)
                arrive = partial(setattr, grid, "there", True)
                come = replace(training, prepare=lambda *states: arrive() or training)
                return [head, come, *others]

        grid = Late(app, CLIENTS)
        grid.there = there
        strategy = Waits(fraction_evaluate=0.0, refine=None)
        return strategy.start(grid, tiny_arrays(), timeout=0.5, **options)

    whole = start(quick_app(), False)
    assert "head" not in whole.exchange_uploads
    with pytest.raises(KeyboardInterrupt):
        start(killing_app(1, CLIENTS), False, checkpoint_dir=tmp_path)
    resumed = start(quick_app(), True, checkpoint_dir=tmp_path, resume=True)
    assert same_bits(resumed.arrays, whole.arrays)


def test_a_round_that_is_nothing_but_optional_may_fail():
    class Heads(HeadFirst):
        def exchanges(self, server_round):
            return super().exchanges(server_round)[:1]

    app = Watched(tamper={p: at_request(2, fail) for p in range(CLIENTS)})
    result = run(Heads, app, num_rounds=2)
    assert (result.exchange_uploads, result.upload_bytes) == ({}, 0)


def test_who_had_no_part_in_the_first_exchange_cannot_join_the_last(tmp_path, caplog):
    sums, again = {"aggregate": "sums"}, {"resume": True, "reopen": True}
    run(FedFisherOneShot, options=sums, checkpoint_dir=tmp_path)
    assert "no client joins" not in caplog.text
    run(FedFisherOneShot, options=sums, clients=4, checkpoint_dir=tmp_path, **again)
    assert "no client joins it that it had not asked" in caplog.text


def test_reopening_a_round_opens_its_merge(tmp_path):
    """What came after it is done again, for the new model."""
    app = Watched(tamper={2: at_request(1, fail)})
    assert len(run(WithHead, app, checkpoint_dir=tmp_path).uploads) == 2
    again = run(WithHead, Watched(), checkpoint_dir=tmp_path, resume=True, reopen=True)
    assert len(again.uploads) == 3
    assert same_bits(again.arrays, run(WithHead).arrays)


def test_what_is_asked_may_depend_on_the_step_before():
    seen = []

    class Late(FedFisherOneShot):
        def exchanges(self, server_round):
            (training,) = super().exchanges(server_round)[:1]
            head = head_exchange(clients="previous", name="head")

            def prepare(before, now):
                starts = (state.params["0.weight"] for state in (before, now))
                seen.append([torch.equal(weight, START) for weight in starts])
                return None if len(seen) == 1 else head

            return [training, replace(head, prepare=prepare)]

    result = run(Late, num_rounds=2)
    assert seen[0] == [True, False]
    assert seen[1][1] is False
    assert list(result.exchange_uploads) == ["head"]  # of the second round


START = arrays_to_tensors(tiny_arrays())["0.weight"]


def test_a_step_that_cannot_be_taken_leaves_the_merge(caplog):
    def overflow(state, uploads):
        params = {
            k: v * torch.inf if v.is_floating_point() else v
            for k, v in state.params.items()
        }
        return Step(ServerState(params))

    class Odd(WithHead):
        def exchanges(self, server_round):
            *others, head = super().exchanges(server_round)
            return [*others, replace(head, step=overflow)]

    assert same_bits(run(Odd).arrays, run(FedFisherOneShot).arrays)
    assert "head: the model stays that of the step before" in caplog.text
