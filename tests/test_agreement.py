"""Clients that train other parameters than the rest are named before they train."""

import re

import pytest
import torch
from flwr.app import ArrayRecord, MessageType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.errors import RoundError
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FedFish, FedFisherOneShot
from flwr_fisher.strategies.baselines import FedPM
from flwr_fisher.testing import LocalGrid


def model(frozen=()):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    return net


def grid_of(frozen, count, trained, kind=LocalGrid):
    """Return clients of which some freeze parameters; `trained` notes who trains."""
    data = TensorDataset(torch.randn(8, 3), torch.randint(2, (8,)))

    def client_fn(context):
        partition = int(context.node_config["partition-id"])

        class Noted(LocalSGD):
            def __call__(self, *args, **options):
                trained.append(partition)
                return super().__call__(*args, **options)

        net = model(frozen.get(partition, ()))
        return FisherClient(net, DataLoader(data, batch_size=4), train_fn=Noted())

    return kind(make_client_app(client_fn), count)


def arrays(tensors):
    return ArrayRecord({name: value.clone() for name, value in tensors.items()})


@pytest.mark.parametrize("make", [FedFisherOneShot, FedFish, FedPM])
def test_the_odd_one_is_named_before_it_trains(make, caplog):
    trained = []
    grid = grid_of({1: ("0.weight", "0.bias")}, 4, trained)
    strategy = make(fraction_evaluate=0.0)
    result = strategy.start(grid, arrays(shared_state(model())), num_rounds=2)
    assert sorted(trained) == [0, 0, 2, 2, 3, 3]
    assert len(result.uploads) == 3
    assert result.train_metrics_clientapp[1]["num-rejected"] == 1
    assert re.search(
        r"configure_train: left out partition-1: node \d+: it freezes '0.bias', "
        "'0.weight', which most train: freeze the same parameters on every client",
        caplog.text,
    )


def test_what_most_freeze_may_be_sent_and_who_trains_it_is_odd():
    trained = []
    grid = grid_of({0: ("0.weight",), 2: ("0.weight",)}, 3, trained)
    strategy = FedFisherOneShot(fraction_evaluate=0.0, min_train_nodes=3)
    with pytest.raises(RoundError) as caught:
        strategy.start(grid, arrays(model().state_dict()), num_rounds=1)
    assert trained == []
    assert "2 usable replies, and min_train_nodes=3" in str(caught.value)
    assert re.search(
        r"partition-1: node \d+: it trains '0.weight', which most freeze",
        str(caught.value),
    )
    assert "did not reply" not in str(caught.value)


def test_a_node_that_answers_no_query_is_not_waited_for_twice():
    class Deaf(LocalGrid):
        questions = 0

        def push_messages(self, messages):
            heard = []
            for message in messages:
                query = message.metadata.message_type == MessageType.QUERY
                if query and message.metadata.dst_node_id == min(self.get_node_ids()):
                    self.questions += 1
                    yield "never answered"
                else:
                    heard.append(message)
            yield from super().push_messages(heard)

    grid = grid_of({}, 3, [], Deaf)
    strategy = FedFisherOneShot(fraction_evaluate=0.0)
    result = strategy.start(
        grid, arrays(shared_state(model())), num_rounds=1, timeout=2
    )
    assert grid.questions == 1
    assert len(result.uploads) == 2  # what answers nothing is not asked to train


def test_each_client_is_asked_once():
    asked = []
    data = DataLoader(TensorDataset(torch.randn(8, 3), torch.randint(2, (8,))))

    def client_fn(context):
        asked.append(1)
        return FisherClient(model(), data, train_fn=lambda *_: {})

    grid = LocalGrid(make_client_app(client_fn), 2)
    strategy = FedFisherOneShot(fraction_evaluate=0.0)
    strategy.start(grid, arrays(shared_state(model())), num_rounds=3)
    assert len(asked) == 2 * (1 + 3)
