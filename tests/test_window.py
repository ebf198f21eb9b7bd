"""A collection window: clients are asked as they come, over all lives of a server."""

import shutil
from math import inf

import pytest
from clocked import Behaviour, ClockedGrid, KilledError, options_of
from virtual import LIFTED, Watched, quick_app, same_bits, tiny_app, tiny_arrays

from flwr_fisher.errors import CheckpointError, ConfigurationError, RoundError
from flwr_fisher.strategies import FedFisherOneShot, Refinement, Waiting
from flwr_fisher.testing import LocalGrid


def clients_of(result):
    names = [upload.client for upload in result.uploads]
    return [int(name.removeprefix("partition-")) for name in names]


HOUR = 300.0  # a short one
DAY = 24 * HOUR


def between(first, last):
    """A client that is connected then, and takes a while to train."""
    return Behaviour(
        seconds=lambda times: 20.0, connected=lambda now: first <= now < last
    )


def start(grid, waiting=None, **options):
    of_start = {"timeout", "checkpoint_dir", "resume", "reopen", "num_rounds"}
    own = {key: options.pop(key) for key in options.keys() - of_start}
    strategy = FedFisherOneShot(**options_of(waiting=waiting, **own))
    return strategy.start(grid, tiny_arrays(), **options)


def merged_of(*partitions):
    """The one-shot model of these clients, all of them there."""
    return start(LocalGrid(quick_app(partitions), len(partitions)), policy=None)


def test_clients_are_asked_as_they_come(clock):
    comes = {p: between(HOUR * p, HOUR * p + 100) for p in range(4)}
    app = Watched()
    result = start(ClockedGrid(app, comes, clock, 4), Waiting(window=DAY))
    assert clients_of(result) == [0, 1, 2, 3]
    assert sorted(p for _, p in app.trained) == [0, 1, 2, 3]
    assert DAY <= clock.now < DAY + 10


@pytest.mark.parametrize("leave", [inf, 40.0])
def test_a_reply_that_comes_while_a_newcomer_is_asked_is_not_late(clock, leave):
    """Where all others have left, the newcomer's answer is waited for."""
    trains = Behaviour(
        seconds=lambda times: 60.0, connected=lambda now: not leave <= now < 70
    )
    for when in range(44, 60, 4):
        new = Behaviour(answers=6.0, connected=lambda now, when=when: now > when)
        grid = ClockedGrid(quick_app(), {0: trains, 1: trains, 2: new}, clock, 3)
        clock.now = 0
        assert clients_of(start(grid, Waiting(window=200))) == [0, 1, 2]


def test_who_comes_first_to_a_window_shuts_nobody_out(clock):
    """What most train, the uploads tell, and not who was there first."""

    class Odd(Watched):
        def __call__(self, message, context):
            odd = context.node_config["partition-id"] == 0
            reply = super().__call__(message, context)
            for record in reply.content.config_records.values() if odd else ():
                record["trained"] = ["0.bias"]
            return reply

    comes = {p: between(HOUR * p, inf) for p in range(4)}
    grid = ClockedGrid(Odd(quick_app()), comes, clock, 4)
    assert len(start(grid, Waiting(window=5 * HOUR)).uploads) == 4


def test_enough_closes_the_window(clock):
    comes = {p: between(HOUR * p, inf) for p in range(6)}
    grid = ClockedGrid(quick_app(), comes, clock, 6)
    assert len(start(grid, Waiting(window=DAY, enough_replies=3)).uploads) == 3
    assert clock.now < 2 * HOUR + 100


def test_what_asks_known_clients_again_waits_for_no_other(clock, tmp_path, monkeypatch):
    """K-FAC's sums: a training, and five requests to those who have trained."""
    comes = {p: between(HOUR * p, inf) for p in range(2)}
    comes[2] = between(DAY + 70, inf)
    monkeypatch.setenv("HOME", str(tmp_path))  # clients keep their Fishers
    strategy = FedFisherOneShot(
        **options_of(aggregate="sums", waiting=Waiting(window=DAY))
    )
    result = strategy.start(ClockedGrid(tiny_app(), comes, clock, 3), tiny_arrays())
    assert result.train_metrics_clientapp[1]["num-rejected"] == 0
    assert clock.now < DAY + HOUR


def test_a_window_over_three_server_lives(clock, tmp_path):
    """Clients come and go, none is connected at the end; all that came are merged."""
    hour = HOUR
    comes = {
        0: between(0, hour),
        1: between(0.5 * hour, 2 * hour),
        2: between(8 * hour, 9 * hour),
        3: between(15 * hour, 16 * hour),
        4: between(30 * hour, inf),  # after the window
    }
    app, waiting = Watched(), Waiting(window=DAY)
    for life, dies in enumerate((5 * hour, 12 * hour)):
        grid = ClockedGrid(app, comes, clock, 5)
        grid.server_dies = dies
        with pytest.raises(KilledError):
            start(grid, waiting, checkpoint_dir=tmp_path, resume=life > 0)
        clock.now += hour  # until somebody starts it again
    grid = ClockedGrid(app, comes, clock, 5)
    result = start(grid, waiting, checkpoint_dir=tmp_path, resume=True)
    assert list(grid.get_node_ids()) == []
    assert DAY <= clock.now < DAY + 10
    assert sorted(p for _, p in app.trained) == [0, 1, 2, 3]
    assert same_bits(result.arrays, merged_of(0, 1, 2, 3).arrays)
    assert result.train_metrics_clientapp[1]["num-replies"] == 4


def test_a_window_that_closed_while_the_server_was_away(clock, tmp_path):
    app, waiting = Watched(), Waiting(window=DAY)
    comes = dict.fromkeys(range(3), between(0, HOUR))
    grid = ClockedGrid(app, comes, clock, 3)
    grid.server_dies = 2 * HOUR
    with pytest.raises(KilledError):
        start(grid, waiting, checkpoint_dir=tmp_path)
    clock.now += 30 * DAY
    again = ClockedGrid(app, comes, clock, 3)
    result = start(again, waiting, checkpoint_dir=tmp_path, resume=True)
    assert same_bits(result.arrays, merged_of(0, 1, 2).arrays)
    assert again.sent == []


def test_a_client_that_dies_while_it_trains_is_asked_when_it_is_back(clock):
    reborn = Behaviour(seconds=lambda times: 60.0, dies=30.0)
    comes = {0: between(0, inf), 1: between(0, inf), 2: reborn}
    grid, sleep = ClockedGrid(quick_app(), comes, clock, 3), clock.sleep

    def sleeps(seconds):
        sleep(seconds)
        if clock.now > 500:
            reborn.dies = inf

    clock.sleep = sleeps  # type: ignore[method-assign]
    result = start(grid, Waiting(window=3600))
    assert len(result.uploads) == 3
    assert result.train_metrics_clientapp[1].get("num-missing", 0) == 0


def test_a_client_app_that_is_killed_is_asked_again_ever_later(clock, caplog):
    """One that is killed each time ends no window."""
    times = {}
    for crashes, window, uploads in ((2, 600, 3), (1000, 3600, 2)):
        grid = ClockedGrid(quick_app(), {2: Behaviour(crashes=crashes)}, clock, 3)
        assert len(start(grid, Waiting(window=window)).uploads) == uploads
        own = [at for at, kind, who in grid.sent if (kind, who) == ("train", 2)]
        times[crashes] = own
    first, second, third = times[2]
    assert 60 < second - first < 70
    assert 120 < third - second < 130
    assert 5 <= len(times[1000]) <= 7
    assert "left out partition-2: no reply, ClientApp crashed" in caplog.text


@pytest.mark.parametrize("kept", [True, False])
def test_a_node_that_lost_its_request_is_asked_again_where_nothing_is_done_twice(
    clock, tmp_path, kept
):
    lost = Behaviour(seconds=lambda times: inf if times == 0 else 1.0)
    grid = ClockedGrid(quick_app(), {2: lost}, clock, 3)
    where = {"checkpoint_dir": tmp_path} if kept else {}
    assert len(start(grid, Waiting(window=4000), **where).uploads) == (3 if kept else 2)


# The merge asked for again


def test_the_merge_is_made_again_with_who_came_since(clock, tmp_path):
    comes = {p: between(0 if p < 2 else 2 * DAY, inf) for p in range(4)}
    app, waiting = Watched(), Waiting(window=DAY)
    first = start(ClockedGrid(app, comes, clock, 4), waiting, checkpoint_dir=tmp_path)
    assert same_bits(first.arrays, merged_of(0, 1).arrays)
    clock.now += 3 * DAY
    grid = ClockedGrid(app, comes, clock, 4)
    again = start(grid, waiting, checkpoint_dir=tmp_path, resume=True, reopen=True)
    assert same_bits(again.arrays, merged_of(0, 1, 2, 3).arrays)
    assert sorted(p for _, p in app.trained) == [0, 1, 2, 3]
    assert again.train_metrics_clientapp[1]["num-replies"] == 4
    # It is the round's result from now on.
    later = start(
        ClockedGrid(app, comes, clock, 4), waiting, checkpoint_dir=tmp_path, resume=True
    )
    assert same_bits(later.arrays, again.arrays)
    assert later.train_metrics_clientapp == again.train_metrics_clientapp


def test_a_window_that_closed_with_too_few_opens_again(clock, tmp_path):
    comes = {0: between(0, inf), 1: between(2 * DAY, inf)}
    app, waiting = Watched(), Waiting(window=DAY)
    options = {"checkpoint_dir": tmp_path}
    with pytest.raises(RoundError, match=r"1 usable reply.*\n.*reopen=True open it"):
        start(ClockedGrid(app, comes, clock, 2), waiting, **options)
    clock.now = 2.5 * DAY
    options["resume"] = True
    with pytest.raises(RoundError, match="1 usable reply"):  # it stays closed
        start(ClockedGrid(app, comes, clock, 2), waiting, **options)
    result = start(ClockedGrid(app, comes, clock, 2), waiting, reopen=True, **options)
    assert same_bits(result.arrays, merged_of(0, 1).arrays)
    assert sorted(p for _, p in app.trained) == [0, 1]


def test_a_window_is_not_resumed_without_one(clock, tmp_path):
    grid = ClockedGrid(quick_app(), {0: between(0, inf)}, clock, 2)
    grid.behaviours = {0: between(0, inf), 1: between(inf, inf)}
    with pytest.raises(RoundError):
        start(grid, Waiting(window=DAY), checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"resume it with Waiting\(window"):
        start(grid, Waiting(), checkpoint_dir=tmp_path, resume=True)


def test_a_run_kept_nowhere_cannot_be_opened_again(tmp_path):
    grid = LocalGrid(quick_app(), 2)
    with pytest.raises(ConfigurationError, match="reopen=True needs resume=True"):
        start(grid, reopen=True)
    start(grid, checkpoint_dir=tmp_path)
    again = {"checkpoint_dir": tmp_path, "resume": True, "reopen": True}
    with pytest.raises(ConfigurationError, match="repeats round 1, but num_rounds=0"):
        start(grid, **again, num_rounds=0)
    shutil.rmtree(tmp_path / "uploads-0001")
    with pytest.raises(CheckpointError, match="cannot be opened again"):
        start(grid, **again)


def test_a_round_that_others_follow_is_not_opened_again(tmp_path):
    options = {"checkpoint_dir": tmp_path, "num_rounds": 2}
    app = Watched()

    def fails_later(content):
        if len(app.trained) > 3:
            raise ValueError("out of cheese")

    app.tamper = dict.fromkeys(range(3), fails_later)
    with pytest.raises(RoundError):
        start(LocalGrid(app, 3), **options)
    with pytest.raises(CheckpointError, match="round 2 has begun with the model of"):
        start(LocalGrid(quick_app(), 3), **options, resume=True, reopen=True)


@pytest.mark.parametrize(
    "waiting",
    [
        *(Waiting(enough_fraction=0.6), Waiting(enough_replies=2)),
        Waiting(window=DAY, enough_replies=2),
    ],
)
def test_enough_replies_are_not_enough_for_a_round_that_is_reopened(
    waiting, clock, tmp_path
):
    slow = Behaviour(seconds=lambda times: 9.0 if times else 99.0)
    grid, refine = ClockedGrid(Watched(), {1: slow}, clock, 3), Refinement()
    options = {"timeout": 500, "checkpoint_dir": tmp_path}
    assert clients_of(start(grid, waiting, refine=refine, **options)) == [0, 2]
    options |= {"resume": True, "reopen": True}
    again = start(grid, waiting, refine=refine, **options)
    assert clients_of(again) == [0, 1, 2]
    assert {len(every) for every in again.exchange_uploads.values()} == {3}


def test_nor_for_a_head_that_asks_more_clients_than_the_merge(clock, tmp_path):
    slow = Behaviour(seconds=lambda times: 9.0 if times else 99.0)
    grid = ClockedGrid(Watched(), {1: slow}, clock, 4)
    sampling = {"waiting": Waiting(enough_replies=2), "fraction_train": 0.75}
    options = {"refine": Refinement(), "checkpoint_dir": tmp_path, **sampling}
    assert len(start(grid, **options).exchange_uploads["head"]) < 4
    again = start(grid, **options, resume=True, reopen=True)
    assert [
        len(every) for every in (again.uploads, again.exchange_uploads["head"])
    ] == [3, 4]


def test_without_a_window_those_who_were_missing_are_asked_again(clock, tmp_path):
    slow = Behaviour(seconds=lambda times: inf if times == 0 else 1.0)
    app = Watched()
    options = {"timeout": 50, "checkpoint_dir": tmp_path}
    grid = ClockedGrid(app, {1: slow, 3: between(55, inf)}, clock, 4)
    assert clients_of(start(grid, policy=LIFTED, **options)) == [0, 2]
    clock.now = 100
    options |= {"resume": True, "reopen": True}
    assert clients_of(start(grid, policy=LIFTED, **options)) == [0, 1, 2]
    assert sorted(p for _, p in app.trained) == [0, 1, 2]
