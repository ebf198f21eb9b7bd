"""Who is who: restarts, claims, registrations and errors count nobody twice."""

import re

import pytest
from clocked import Behaviour, ClockedGrid, KilledError, options_of
from flwr.app import Error, Message
from virtual import LIFTED, Node, Watched, quick_app, tiny_arrays, tiny_client

from flwr_fisher.client import make_client_app
from flwr_fisher.errors import RoundError
from flwr_fisher.flower_internals import ErrorCode
from flwr_fisher.strategies import FedFisherOneShot, Waiting
from flwr_fisher.testing import LocalGrid

CLIENTS = quick_app()


def start(grid, waiting=None, **options):
    own = options_of(waiting=waiting, policy=LIFTED)
    own |= {k: options.pop(k) for k in ("min_train_nodes",) if k in options}
    return FedFisherOneShot(**own).start(grid, tiny_arrays(), **options)


def clients_of(result):
    return [upload.client for upload in result.uploads]


class Named(ClockedGrid):
    """Some nodes are registered by name; some claim others' partitions.

    Both are given by the place of a node.
    """

    def __init__(self, *args, registered=None, claims=None):
        super().__init__(*args)
        self.registered = registered or {}
        for node, place in self.nodes.items():
            own = self._contexts[node].node_config
            own["partition-id"] = (claims or {}).get(place, place)

    def get_nodes(self):
        named = self.registered
        nodes = {node: named.get(self.nodes[node], "") for node in self.get_node_ids()}
        return [Node(node, name) for node, name in nodes.items()]


# Restarts


def test_a_client_that_restarts_while_its_old_node_is_listed_is_waited_for(clock):
    old = {1: Behaviour(connected=lambda now: now < 70)}
    grid = Named(CLIENTS, old, clock, 3, claims={2: 1})
    assert clients_of(start(grid, timeout=3600)) == ["partition-0", "partition-1"]
    assert 70 < clock.now < 90


def test_two_nodes_of_one_name_end_the_run_after_two_minutes(clock):
    grid = Named(CLIENTS, {}, clock, 3, claims={0: 0, 1: 0, 2: 0})
    with pytest.raises(RoundError, match="only 0 of 2 required nodes "):
        start(grid, timeout=3600)
    assert 120 < clock.now < 130


# Claims


def test_a_claim_does_not_cost_the_owner_what_it_was_asked_for(clock):
    slow = {p: Behaviour(seconds=lambda times: 60.0) for p in range(3)}
    slow[3] = Behaviour(connected=lambda now: now > 20)
    grid = Named(CLIENTS, slow, clock, 4, claims={3: 1})
    result = start(grid, Waiting(window=200))
    assert clients_of(result) == ["partition-0", "partition-1", "partition-2"]
    owner = next(node for node, place in grid.nodes.items() if place == 1)
    assert result.uploads[1].node_id == owner


def test_registered_nodes_with_one_partition_are_told_which(clock):
    names = {"registered": {0: "hospital", 1: "clinic"}, "claims": {0: 1}}
    grid = Named(CLIENTS, {}, clock, 3, **names)
    with pytest.raises(RoundError, match=r"claims 'partition-1' .* partition-id"):
        start(grid, timeout=3600)


def test_an_unregistered_claim_costs_a_registered_node_nothing(clock):
    """The impostor replies first, and is gone when the owner comes."""

    comes = {
        1: Behaviour(connected=lambda now: now > 50),
        2: Behaviour(connected=lambda now: now < 30),
    }
    names = {"registered": {1: "hospital"}, "claims": {2: 1}}
    result = start(Named(CLIENTS, comes, clock, 3, **names), Waiting(window=200))
    assert clients_of(result) == ["partition-0", "hospital"]
    assert result.train_metrics_clientapp[1]["num-rejected"] == 1


def test_a_node_that_is_registered_between_two_lives_counts_once(clock, tmp_path):
    comes = {p: Behaviour(connected=lambda now: now < 100) for p in (0, 1)}
    comes[2] = Behaviour(connected=lambda now: now > 100)
    app, waiting = Watched(CLIENTS), Waiting(window=1000)

    grid = Named(app, comes, clock, 3)
    grid.server_dies = 90
    with pytest.raises(KilledError):
        start(grid, waiting, checkpoint_dir=tmp_path)
    comes = {0: Behaviour(connected=lambda now: False)}
    grid = Named(app, comes, clock, 3, registered={1: "hospital"})
    # with other node ids
    grid.nodes = {node + 1: place for node, place in grid.nodes.items()}
    grid._contexts = {node + 1: own for node, own in grid._contexts.items()}
    result = start(grid, waiting, checkpoint_dir=tmp_path, resume=True)
    assert clients_of(result) == ["partition-0", "partition-2", "hospital"]


@pytest.mark.parametrize(
    ("other_id", "partition", "told"), [(1, False, 1), (0, False, 0), (1, True, 0)]
)
def test_a_named_node_with_another_id_is_told_apart(
    other_id, partition, told, clock, tmp_path, caplog
):
    """Its name alone does not find what it kept: its partition does, or its old id."""
    app = make_client_app(lambda context: tiny_client(context.node_config["data"]))
    for life in range(2):
        grid = Named(app, {}, clock, 3, registered={1: "hospital"})
        for own in grid._contexts.values():
            place = own.node_config.pop("partition-id")
            own.node_config |= {
                "data": place,
                **({"partition-id": place} if partition else {}),
            }
        shift = life * other_id
        grid.nodes = {node + shift: place for node, place in grid.nodes.items()}
        grid._contexts = {node + shift: own for node, own in grid._contexts.items()}
        start(grid, checkpoint_dir=tmp_path, resume=True, num_rounds=1 + life)
    assert caplog.text.count("hospital was client ") == told


# Errors


class Fails(Watched):
    """Nodes that answer the first questions about who they are with an error."""

    def __init__(self, times):
        super().__init__(CLIENTS)
        self.times = times
        self.asked = {}

    def __call__(self, message, context):
        if message.metadata.message_type == "query" and not message.content:
            asked = self.asked.get(context.node_id, 0)
            self.asked[context.node_id] = asked + 1
            if asked < self.times:
                error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "out of memory")
                return Message(error, reply_to=message)
        return super().__call__(message, context)


def test_an_error_is_no_answer_to_who_one_is(caplog):
    """Who cannot tell goes by its node, and the log says why."""
    result = start(LocalGrid(Fails(1), 3))
    assert clients_of(result) == [f"partition-{p}" for p in range(3)]
    result = start(LocalGrid(Fails(100), 3))
    assert all(name.startswith("node-") for name in clients_of(result))
    assert caplog.text.count("failed to send its partition-id") == 1
    assert re.search(r"and is known as node-\d+: out of memory", caplog.text)


def test_a_client_known_better_in_the_next_life_counts_once(clock, tmp_path):
    """Its app failed at the question in the first one; its node's id is the same."""
    waiting = Waiting(window=1000)
    dying = Named(Fails(100), {2: Behaviour(connected=lambda now: now > 95)}, clock, 3)
    dying.server_dies = 90
    with pytest.raises(KilledError):
        start(dying, waiting, checkpoint_dir=tmp_path)
    app = Watched(CLIENTS)
    grid = ClockedGrid(app, {}, clock, 3)
    assert len(start(grid, waiting, checkpoint_dir=tmp_path, resume=True).uploads) == 3
    assert app.trained == [(1, 2)]


# Messages that nobody takes


class Refusing(ClockedGrid):
    """The SuperLink takes nothing for some nodes."""

    refuses: tuple[int, ...] = ()

    def push_messages(self, messages):
        messages = list(messages)
        kinds = {m.metadata.message_type for m in messages}
        taken = [
            m
            for m in messages
            if self.nodes[m.metadata.dst_node_id] not in self.refuses
            or "query" in kinds
        ]
        return super().push_messages(taken)


def test_who_could_not_be_reached_missed_no_deadline(clock, caplog):
    grid = Refusing(CLIENTS, {}, clock, 3)
    grid.refuses = (1,)
    result = start(grid, num_rounds=3, timeout=50)
    assert (
        "left out partition-1: no reply, the SuperLink took no message" in caplog.text
    )
    missing = [m.get("num-missing") for m in result.train_metrics_clientapp.values()]
    assert missing == [1, 1, 1]  # asked in each: it sits out none
    assert clock.now < 20
    grid.refuses = (0, 1)
    with pytest.raises(
        RoundError, match="partition-0, partition-1: no reply, the SuperLink"
    ):
        start(grid, timeout=500)
    assert clock.now < 40


# What clients say they train
