import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, FedProx
from virtual import (
    Watched,
    ask,
    close,
    fail,
    kill,
    metrics_of,
    node_of,
    tensors_of,
    tiny_app,
    tiny_arrays,
    tiny_client,
)

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.params import weighted_mean
from flwr_fisher.testing import LocalGrid


def train_messages(grid, *nodes):
    content = RecordDict(
        {"arrays": tiny_arrays(), "config": ConfigRecord({"server-round": 1})}
    )
    return [Message(content, node, "train") for node in nodes or grid.nodes]


def counting_app():
    """Replies with how many messages its node has had."""
    app = ClientApp()

    @app.query()
    def query(message, context):
        count = context.state.metric_records.get("count", MetricRecord({"n": 0}))
        context.state["count"] = MetricRecord({"n": int(count["n"]) + 1})
        content = RecordDict({"metrics": MetricRecord({**context.state["count"]})})
        return Message(content, reply_to=message)

    return app


def queries(*nodes):
    return [Message(RecordDict(), node, "query") for node in nodes]


def test_a_seed_fixes_ids_and_the_order_of_replies():
    def senders(seed):
        grid = LocalGrid(tiny_app(), 6, seed=seed)
        replies = grid.send_and_receive(train_messages(grid))
        return [reply.metadata.src_node_id for reply in replies]

    assert senders(1) == senders(1)
    assert sorted(senders(1)) != sorted(senders(2))


def test_a_client_sees_its_partition_and_the_run_config():
    seen = []
    app = ClientApp()

    @app.query()
    def query(message, context):
        seen.append(context)
        return Message(RecordDict(), reply_to=message)

    grid = LocalGrid(app, 3, run_config={"lr": 0.5})
    grid.send_and_receive(queries(*grid.nodes))
    assert {c.node_id: c.node_config["partition-id"] for c in seen} == grid.nodes
    assert {c.node_config["num-partitions"] for c in seen} == {3}
    assert all(c.run_config == {"lr": 0.5} for c in seen)


def test_an_exception_becomes_an_error_reply_and_the_others_go_on():
    grid = LocalGrid(Watched(tamper={1: fail}), 3)
    replies = list(grid.send_and_receive(train_messages(grid)))
    (bad,) = [reply for reply in replies if reply.has_error()]
    assert bad.metadata.src_node_id == node_of(grid, 1)
    assert bad.error.reason == "ValueError: out of cheese"
    assert len(replies) == 3


def test_stopping_the_process_is_not_an_error_reply():
    grid = LocalGrid(Watched(tamper={0: kill}), 1)
    with pytest.raises(KeyboardInterrupt):
        grid.send_and_receive(train_messages(grid))


def test_a_reply_that_answers_another_message_is_an_error_reply():
    app = ClientApp()

    @app.query()
    def query(message, context):
        return Message(RecordDict(), reply_to=Message(RecordDict(), reply_to=message))

    grid = LocalGrid(app, 2)
    replies = list(grid.send_and_receive(queries(*grid.nodes)))
    assert len(replies) == 2
    assert all("answers another message" in reply.error.reason for reply in replies)


def test_contexts_live_on_between_messages_and_apart_from_each_other():
    grid = LocalGrid(counting_app(), 2)
    first, second = grid.nodes

    def counts(*nodes):
        replies = grid.send_and_receive(queries(*nodes))
        return [metrics_of(reply)["n"] for reply in replies]

    assert counts(first) == [1]
    assert counts(first) == [2]
    assert counts(second) == [1]
    assert counts(first) == [3]


def test_replies_are_pulled_one_by_one_and_only_once():
    app = Watched()
    grid = LocalGrid(app, 3)
    ids = list(grid.push_messages(train_messages(grid)))
    assert len(set(ids)) == 3
    assert not app.trained
    for done in (1, 2, 3):
        (reply,) = grid.pull_messages(ids)
        assert reply.metadata.reply_to_message_id in ids
        assert len(app.trained) == done
    assert not list(grid.pull_messages(ids))


def test_contents_are_copied_both_ways():
    kept = []
    app = ClientApp()

    @app.train()
    def train(message, context):
        message.content.config_records["config"]["mine"] = True
        kept.append(message.content)
        return Message(message.content, reply_to=message)

    grid = LocalGrid(app, 2)
    messages = train_messages(grid)
    theirs = messages[0].content
    replies = list(grid.send_and_receive(messages))
    assert "mine" not in theirs.config_records["config"]
    for reply in replies:
        assert reply.content.config_records["config"]["mine"] is True
        assert not any(reply.content is content for content in kept)


def test_what_is_no_client_app_is_refused():
    for other in (tiny_client(), lambda context: tiny_client(), ServerApp()):
        with pytest.raises(ConfigurationError, match=r"client\.as_client_app\(\)"):
            LocalGrid(other, 2)


def test_no_nodes_are_refused():
    with pytest.raises(ConfigurationError, match="num_supernodes must be >= 1, got 0"):
        LocalGrid(tiny_app(), 0)


# Our client under this grid


@pytest.mark.parametrize("partition", [1.5, "hospital-a", -1])
def test_a_partition_that_is_no_number_is_refused(partition):
    grid = LocalGrid(tiny_app(), 2)
    for context in grid._contexts.values():
        context.node_config["partition-id"] = partition
    for reply in grid.send_and_receive(queries(*grid.nodes)):
        says = f"partition-id must be an integer, 0 or more, got {partition!r}"
        assert says in reply.error.reason


def local_results(config, clients):
    """The average that FedAvg should find, from clients asked one by one."""
    replies = [
        ask(tiny_client(i), config={"server-round": 1, **config}, partition=i)
        for i in range(clients)
    ]
    weights = [float(metrics_of(reply)["num-examples"]) for reply in replies]
    return ArrayRecord(weighted_mean([tensors_of(reply) for reply in replies], weights))


@pytest.mark.parametrize(
    ("strategy", "config"),
    [(FedAvg(), {}), (FedProx(proximal_mu=0.5), {"proximal-mu": 0.5})],
    ids=["FedAvg", "FedProx"],
)
def test_flowers_own_strategies_run_over_it_with_our_client(strategy, config):
    result = strategy.start(LocalGrid(tiny_app(), 3), tiny_arrays(), num_rounds=1)
    assert close(drop_counters(result.arrays), drop_counters(local_results(config, 3)))
    assert result.train_metrics_clientapp[1]["train_loss"] > 0
    assert 0 <= result.evaluate_metrics_clientapp[1]["accuracy"] <= 1


def drop_counters(arrays):
    """FedAvg turns batch norm's integer counters into floats; they are not ours."""
    return ArrayRecord({k: v for k, v in arrays.items() if "num_batches" not in k})
