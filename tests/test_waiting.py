"""Rounds end: at enough, or at the deadline, whoever hangs, dies, is late or comes."""

import gc
import logging
import weakref
from functools import partial
from math import inf

import pytest
import rivals_path  # noqa: F401
from clocked import Behaviour, ClockedGrid, options_of
from rivals import FedGA
from test_secure_sums import secure_app
from virtual import Watched, quick_app, same_bits, saved_state, tiny_app, tiny_arrays

from flwr_fisher.errors import ConfigurationError, RoundError
from flwr_fisher.secure import SecureSums
from flwr_fisher.server.round import ExchangeRun
from flwr_fisher.strategies import (
    FAGH,
    TCT,
    FedAvg,
    FedFisherOneShot,
    Waiting,
    wait_for_nodes,
)
from flwr_fisher.testing import LocalGrid

SLOW_TO_EVALUATE = Behaviour(seconds=lambda times: 1.0 if times == 0 else 5.0)


HANGS = Behaviour(seconds=lambda times: inf)
LATE = Behaviour(seconds=lambda times: 30.0)


def start(grid, *, make=FedAvg, **options):
    own = ("num_rounds", "timeout", "checkpoint_dir", "resume", "evaluate_fn")
    run = {k: options.pop(k) for k in own if k in options}
    return make(**options_of(**options)).start(grid, tiny_arrays(), **run)


# Six clients: one hangs, one dies, one is late, one connects in the middle


MIXED = {
    1: HANGS,
    2: Behaviour(dies=0.9),
    3: LATE,
    5: Behaviour(connected=lambda now: now > 8),
}


def test_twenty_rounds_end_at_enough(clock, caplog):
    caplog.set_level(logging.INFO, "flwr")
    app = Watched()
    grid = ClockedGrid(app, MIXED, clock, 6)
    result = start(grid, num_rounds=20, timeout=100, waiting=Waiting(enough_replies=2))
    rounds = result.train_metrics_clientapp.values()
    assert len(rounds) == 20
    assert clock.now < 20 * 5  # of which ten may go to the silent queries
    assert all(metrics["num-replies"] >= 2 for metrics in rounds)
    text = caplog.text
    assert "left out partition-2: no reply, Node unavailable" in text
    assert "partition-1" in text
    assert "not waited for, since enough have replied" in text
    assert "node-1:" not in text  # the link's own id
    assert "the reply of partition-3 to round" in text
    assert any(p == 5 for _, p in app.trained)


def test_twenty_rounds_end_at_the_deadline(clock, caplog):
    grid = ClockedGrid(quick_app(), MIXED, clock, 6)
    result = start(grid, num_rounds=20, timeout=20)
    rounds = list(result.train_metrics_clientapp.values())
    assert len(rounds) == 20
    # Who lets a deadline pass sits out 1, 2, 4, 8 rounds: asked in 1, 3, 6, 11, 20.
    assert [who for _, kind, who in grid.sent if kind == "train"].count(1) == 5
    assert 5 * 20 < clock.now < 6 * 20 + 20 * 3
    assert (
        "left out partition-1, partition-3: no reply, none within 20 s" in caplog.text
    )
    assert "left out partition-2: no reply, Node unavailable" in caplog.text
    assert [metrics.get("num-missing", 0) for metrics in rounds[:2]] == [3, 0]


@pytest.mark.parametrize(
    ("behaviour", "share", "lies", "evaluate", "seconds"),
    [
        (HANGS, 1.0, False, [0, 2], 60),  # it has let the round's deadline pass
        (Behaviour(seconds=lambda n: inf if n else 1.0), 0.6, False, [0, 2], 20),
        (SLOW_TO_EVALUATE, 0.6, True, [0, 1, 2], 20),
    ],
    ids=["hangs", "enough", "of no use"],
)
def test_a_hanging_client_costs_evaluation_nothing_more(
    clock, behaviour, share, lies, evaluate, seconds
):
    """It ends at enough, of those that are of use."""

    class Liar(Watched):
        def __call__(self, message, context):
            reply = super().__call__(message, context)
            liar = lies and context.node_config["partition-id"] == 2
            if liar and message.metadata.message_type == "evaluate":
                for record in reply.content.metric_records.values():
                    record["num-examples"] = -1
            return reply

    app = Liar()
    grid = ClockedGrid(app, {1: behaviour}, clock, 3)
    strategy = FedFisherOneShot(waiting=Waiting(enough_fraction=share))
    result = strategy.start(grid, tiny_arrays(), timeout=50)
    assert clock.now < seconds
    assert sorted(p for _, p in app.evaluated) == evaluate
    assert result.evaluate_metrics_clientapp[1]


def test_the_fraction_holds_for_the_sample_and_not_for_each_exchange(caplog, tmp_path):
    """A secure sum and sums of K-FACs need again those that were enough."""
    waiting = Waiting(enough_fraction=0.6)
    for own in ({"secure": SecureSums()}, {}):
        strategy = FedFisherOneShot(
            aggregate="sums",
            norm_statistics="average",
            refine=None,
            fraction_evaluate=0.0,
            waiting=waiting,
            **own,
        )
        app = secure_app(tmp_path) if own else tiny_app()
        result = strategy.start(LocalGrid(app, 6), tiny_arrays())
        assert result.train_metrics_clientapp[1]["num-missing"] == 2
    asked = {line for line in caplog.messages if "asking" in line}
    assert {line.rpartition("asking ")[2] for line in asked} == {"4 nodes"}


def test_evaluation_without_clients_costs_the_run_nothing(clock, caplog):
    gone = Behaviour(connected=lambda now: now < 1)
    grid = ClockedGrid(quick_app(), dict.fromkeys(range(3), gone), clock, 3)
    result = FedFisherOneShot().start(grid, tiny_arrays(), timeout=3600)
    assert result.train_metrics_clientapp[1]["num-replies"] == 3
    assert (
        "no client evaluates: only 0 of 2 required nodes (min_evaluate_nodes=2) are "
        "connected after 60 s" in caplog.text
    )
    assert clock.now < 70


def test_those_that_are_left_evaluate(clock):
    """Who has died since the training is not waited for."""
    gone = {2: Behaviour(connected=lambda now: now < 1)}
    grid = ClockedGrid(quick_app(), gone, clock, 3)
    result = FedFisherOneShot(min_available_nodes=3).start(grid, tiny_arrays())
    assert result.evaluate_metrics_clientapp[1]
    assert clock.now < 70


def test_a_silent_node_delays_the_start_by_seconds(clock):
    grid = ClockedGrid(Watched(), {1: Behaviour(answers=inf)}, clock, 4)
    result = start(grid, num_rounds=2, timeout=3600)
    assert result.train_metrics_clientapp[1]["num-replies"] == 3
    assert clock.now < 20


@pytest.mark.parametrize(("answers", "replies"), [(100.0, 4), (inf, 3)])
def test_in_one_shot_every_connected_node_is_waited_for(clock, answers, replies):
    grid = ClockedGrid(quick_app(), {1: Behaviour(answers=answers)}, clock, 4)
    result = start(grid, timeout=3600)
    assert result.train_metrics_clientapp[1]["num-replies"] == replies
    assert 100 < clock.now < 150


def test_a_node_that_starts_again_is_waited_for_where_it_is_wanted(clock):
    grid = ClockedGrid(quick_app(), {1: Behaviour(answers=100.0)}, clock, 4)
    result = start(grid, timeout=3600, min_available_nodes=4)
    assert result.train_metrics_clientapp[1]["num-replies"] == 4


def test_a_node_that_never_answers_is_named_and_waited_for_once(clock, caplog):
    grid = ClockedGrid(Watched(), {1: Behaviour(answers=inf)}, clock, 4)
    result = start(grid, num_rounds=5, timeout=3600, min_available_nodes=4)
    assert result.train_metrics_clientapp[1]["num-replies"] == 3
    assert 120 < clock.now < 150
    (silent,) = [node for node, partition in grid.nodes.items() if partition == 1]
    assert caplog.text.count(f"have not answered yet: node-{silent}") == 1


def test_who_connects_later_never_holds_up_a_round(clock):
    comes = Behaviour(answers=500.0, connected=lambda now: now > 5)
    app = Watched()
    start(ClockedGrid(app, {3: comes}, clock, 4), num_rounds=10, timeout=3600)
    assert clock.now < 10 * 5
    assert all(p != 3 for _, p in app.trained)


def test_who_fails_once_and_then_hangs_holds_up_no_round(clock):
    """It was asked again and again, without end."""
    comes = Behaviour(connected=lambda now: now > 0.5)

    class Fails(Watched):
        def __call__(self, message, context):
            query = message.metadata.message_type == "query"
            if query and context.node_config["partition-id"] == 2:
                comes.answers = inf
                raise KeyError
            return super().__call__(message, context)

    grid = ClockedGrid(Fails(), {2: comes}, clock, 3)
    start(grid, num_rounds=5, timeout=3600)
    assert clock.now < 5 * 5
    assert [(kind, who) for _, kind, who in grid.sent].count(("query", 2)) == 2


def test_the_option_that_asks_for_more_nodes_than_answer_is_named(clock):
    grid = ClockedGrid(quick_app(), {1: Behaviour(answers=inf)}, clock, 3)
    with pytest.raises(RoundError) as caught:
        start(grid, timeout=60, min_available_nodes=3)
    text = str(caught.value)
    assert "only 2 of 3 required nodes (min_available_nodes=3) can be asked" in text
    assert "no answer: node-" in text


def test_messages_die_with_their_round(clock):
    grid = ClockedGrid(quick_app(), {}, clock, 3)
    start(grid, num_rounds=2, timeout=77)
    assert grid.lifetimes == [77] * 6


def test_an_answer_that_was_lost_is_asked_for_again(clock):
    lost = Behaviour(answers=inf)
    grid = ClockedGrid(quick_app(), {3: lost}, clock, 4)

    def evaluate(server_round, arrays):
        if server_round:
            clock.now += 400
            lost.answers = 0.1  # of the next question

    result = start(grid, num_rounds=5, timeout=100, evaluate_fn=evaluate)
    replies = [m["num-replies"] for m in result.train_metrics_clientapp.values()]
    assert (replies[0], replies[-1]) == (3, 4)


@pytest.mark.parametrize(
    "waiting", [Waiting(enough_replies=1), Waiting(enough_fraction=0.1)]
)
def test_enough_is_never_less_than_a_round_needs(clock, waiting):
    slow = {p: Behaviour(seconds=lambda times: 10.0) for p in (1, 2, 3)}
    grid = ClockedGrid(quick_app(), slow, clock, 4)
    result = start(grid, timeout=100, waiting=waiting, min_train_nodes=3)
    assert len(result.uploads) >= 3


def test_rounds_that_are_over_hold_no_model(clock):
    """A client that hangs is due for hours; its rounds' parameters are not kept."""
    alive = []
    close = ExchangeRun.close

    def tracked(self, uploads):
        alive.append(weakref.ref(self))
        close(self, uploads)

    grid = ClockedGrid(quick_app(), {1: HANGS}, clock, 3)
    strategy = FedFisherOneShot(**options_of(waiting=Waiting(enough_fraction=0.6)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExchangeRun, "close", tracked)
        strategy.start(grid, tiny_arrays(), num_rounds=6, timeout=9000)
    assert len(strategy.cohort.mailbox(grid)._due) == 6
    gc.collect()
    assert len(alive) == 6
    assert sum(one() is not None for one in alive) <= 1


def test_a_resumed_run_leaves_out_whom_the_first_life_did(clock, tmp_path):
    """Who sits out decides who is sampled: it is kept with the round."""

    def asked(rounds, where):
        per_round = []
        for index, num_rounds in enumerate(rounds):
            clock.now = 0
            grid = ClockedGrid(quick_app(), {1: HANGS}, clock, 5)
            options = {"checkpoint_dir": where, "resume": index > 0, "timeout": 9}
            options["min_train_nodes"] = 1
            start(grid, num_rounds=num_rounds, fraction_train=0.7, **options)
            sent = [(when, who) for when, kind, who in grid.sent if kind == "train"]
            times = sorted({when for when, _ in sent})
            per_round += [sorted(w for t, w in sent if t == time) for time in times]
        return per_round

    whole = asked([8], tmp_path / "whole")
    assert any(1 in cohort for cohort in whole)
    assert asked([1, 2, 3, 5, 8], tmp_path / "parts") == whole


# What becomes of rounds that fail


def test_a_failed_round_can_be_skipped(clock, caplog):
    slow_first = Behaviour(seconds=lambda times: 100.0 if times == 0 else 1.0)
    grid = ClockedGrid(quick_app(), dict.fromkeys((0, 1), slow_first), clock, 3)
    waiting = Waiting(on_failed_round="skip")
    result = start(grid, num_rounds=2, timeout=9, waiting=waiting)
    assert dict(result.train_metrics_clientapp[1]) == {"skipped": 1}
    assert result.train_metrics_clientapp[2]["num-replies"] == 2
    assert (
        "[ROUND 1] skipped: only 1 usable reply, but min_train_nodes=2" in caplog.text
    )


def test_a_skipped_round_has_no_clients(clock):
    at_first = Behaviour(seconds=lambda times: 1.0 if clock.now < 9 else inf)
    grid = ClockedGrid(quick_app(), {0: HANGS, 1: at_first}, clock, 3)
    skip = Waiting(on_failed_round="skip")
    result = start(grid, num_rounds=2, waiting=skip, timeout=9)
    assert result.train_metrics_clientapp[1]["num-missing"] == 1
    assert (result.left_out, result.upload_bytes) == ({}, 0)


def test_half_of_a_skipped_round_changes_nothing(clock, tmp_path):
    """FedGA's second exchange fails, after the first one's step."""
    second = Behaviour(seconds=lambda times: 1.0 if times % 2 == 0 else inf)
    grid = ClockedGrid(quick_app(), dict.fromkeys(range(3), second), clock, 3)
    skip = Waiting(on_failed_round="skip")
    own = {"timeout": 9, "checkpoint_dir": tmp_path}
    result = start(grid, make=partial(FedGA, beta=0.1), waiting=skip, **own)
    assert same_bits(result.arrays, tiny_arrays())
    before, after = (saved_state(tmp_path, n) for n in (0, 1))
    assert after.keys() == before.keys()  # nor is the mean gradient kept
    assert result.train_metrics_clientapp[1]["skipped"] == 1


def test_a_round_that_all_others_need_is_not_skipped():
    tct = TCT(stage1_rounds=2)
    assert [tct.may_skip(n) for n in (1, 2, 3, 4)] == [True, True, False, True]
    momentum = FAGH(probe="momentum")
    assert [momentum.may_skip(n) for n in (1, 2)] == [False, True]


# Before a server app begins


def test_a_server_app_waits_for_its_nodes(clock):
    comes = Behaviour(connected=lambda now: now >= 7)
    grid = ClockedGrid(quick_app(), {2: comes}, clock, 3)
    assert sorted(wait_for_nodes(grid, 3)) == sorted(grid.nodes)
    assert clock.now == pytest.approx(7)
    with pytest.raises(ConfigurationError, match="minimum must be >= 1, got 0"):
        wait_for_nodes(grid, 0)
    comes.connected = lambda now: False
    with pytest.raises(
        RoundError, match="only 2 of 3 required nodes are connected after 20 s"
    ):
        wait_for_nodes(grid, 3, timeout=20)
    nobody = ClockedGrid(quick_app(), dict.fromkeys(range(3), comes), clock, 3)
    with pytest.raises(RoundError, match="only 0 of 3 required nodes"):
        wait_for_nodes(nobody, 3, timeout=20)
    virtual = LocalGrid(quick_app(), 3)  # whose clients are all there: it has no more
    with pytest.raises(
        RoundError, match="only 3 of 4 required nodes are connected after 0 s"
    ):
        wait_for_nodes(virtual, 4)
    with pytest.raises(RoundError, match=r"only 3 of 9 required nodes .*after 0 s"):
        start(virtual, min_available_nodes=9)


# What is refused


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enough_fraction": 0}, r"enough_fraction must be in \(0, 1\], got 0"),
        ({"enough_replies": 0}, "enough_replies must be >= 1"),
        ({"window": 9, "enough_fraction": 0.3}, "pass enough_replies"),
    ],
)
def test_mistakes_are_named(options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        Waiting(**options)


def test_a_window_asks_everyone():
    with pytest.raises(
        ConfigurationError, match=r"fraction_train= with Waiting\(window"
    ):
        FedFisherOneShot(fraction_train=0.5, waiting=Waiting(window=9))
    with pytest.raises(ConfigurationError, match=r"waiting must be Waiting\("):
        FedFisherOneShot(waiting=60)
