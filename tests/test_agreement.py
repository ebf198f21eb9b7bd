"""Clients that train other parameters than the rest are named before they train."""

import re

import pytest
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import same_bits

from flwr_fisher.client import (
    FisherClient,
    LocalSGD,
    fisher_arrays,
    identify,
    make_client_app,
)
from flwr_fisher.errors import RoundError
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FedFish, FedFisherOneShot
from flwr_fisher.strategies.baselines import AFL, FedPM
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import named_options
from flwr_fisher.wire.answer import Answer, frozen_name


def model(frozen=()):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    return net


def app_of(make, trained):
    """Return clients with a model for each partition; `trained` notes who trains."""
    data = TensorDataset(torch.randn(8, 3), torch.randint(2, (8,)))

    def client_fn(context):
        partition = int(context.node_config["partition-id"])

        class Noted(LocalSGD):
            def __call__(self, *args, **options):
                trained.append(partition)
                return super().__call__(*args, **options)

        loader = DataLoader(data, batch_size=4)
        return FisherClient(make(partition), loader, train_fn=Noted())

    return make_client_app(client_fn)


def grid_of(frozen, count, trained, kind=LocalGrid):
    """Return clients of which some freeze parameters."""
    app = app_of(lambda partition: model(frozen.get(partition, ())), trained)
    return kind(app, count)


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


# What is frozen and never sent


def on_a_base(seed):
    """A trained head on a frozen layer whose values are of a seed."""
    torch.manual_seed(seed)
    base = nn.Linear(3, 4).requires_grad_(False)
    torch.manual_seed(0)
    return nn.Sequential(base, nn.Tanh(), nn.Linear(4, 2))


OTHER_BASE = re.compile(
    r"partition-1: node \d+: its frozen '0.bias', '0.weight' are not what most have: "
    "load the same pre-trained parameters on every client"
)


@pytest.mark.parametrize("make", [FedFisherOneShot, FedFish, FedPM, AFL])
def test_who_has_another_frozen_base_is_named_before_it_trains(make, caplog):
    trained = []
    app = app_of(lambda partition: on_a_base(int(partition == 1)), trained)
    start = arrays(shared_state(on_a_base(0)))
    assert set(start) == {"2.weight", "2.bias"}
    result = make(fraction_evaluate=0.0).start(LocalGrid(app, 3), start)
    assert len(result.uploads) == 2
    assert 1 not in trained
    assert len(OTHER_BASE.findall(caplog.text)) == 1
    strategy = make(fraction_evaluate=0.0, min_train_nodes=3)
    with pytest.raises(RoundError, match=OTHER_BASE):
        strategy.start(LocalGrid(app, 3), start)


def test_frozen_parameters_that_the_server_sends_may_have_been_others():
    trained = []
    app = app_of(on_a_base, trained)
    strategy = FedFisherOneShot(fraction_evaluate=0.0)
    start = arrays(on_a_base(0).state_dict())
    assert len(strategy.start(LocalGrid(app, 3), start).uploads) == 3
    assert sorted(trained) == [0, 1, 2]


@pytest.mark.parametrize(
    "says", [None, "", [f"0.weight {n:030}" for n in range(300_000)]]
)
def test_who_says_nothing_of_its_frozen_parameters_takes_part(says):
    """As clients of 0.2 do, and those that say what is no list, or too long."""

    class Older:
        def __init__(self, app):
            self.app = app

        def __call__(self, message, context):
            reply = self.app(message, context)
            one = context.node_config["partition-id"] == 1
            for record in reply.content.config_records.values() if one else ():
                if record.pop("frozen", None) is not None and says is not None:
                    record["frozen"] = says
            return reply

    start = arrays(shared_state(on_a_base(0)))
    models = []
    for kind in (Older, lambda app: app):
        grid = LocalGrid(kind(app_of(lambda partition: on_a_base(0), [])), 3)
        result = FedFisherOneShot(fraction_evaluate=0.0).start(grid, start)
        assert len(result.uploads) == 3
        models.append(result.arrays)
    assert same_bits(*models)


def test_a_frozen_parameter_that_cannot_be_read_is_not_told_of():
    config = ConfigRecord({**named_options({"query": "trained"})})
    query = Message(RecordDict({"config": config}), 1, MessageType.QUERY)
    context = Context(1, 1, {}, RecordDict(), {})
    answers = []
    for model in (on_a_base(0), on_a_base(0)):
        if answers:
            model[0].to("meta")
        answers.append(Answer.of(identify(query, context, model)))
    assert [answer.trained for answer in answers] == [{"2.weight", "2.bias"}] * 2
    whole, unread = answers
    assert {frozen_name(each) for each in whole.frozen} == {"0.weight", "0.bias"}
    assert {len(name) for name in whole.frozen} == {39, 41}
    assert unread.frozen is None


class Replaced(nn.Module):
    """As PEFT's `modules_to_save`: a frozen head of each client, and a trained copy."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.original_module = nn.Linear(3, 2).requires_grad_(False)
        torch.manual_seed(0)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(3, 2)})

    def forward(self, x):
        return self.modules_to_save["default"](x)


def test_a_frozen_head_that_a_trained_copy_replaces_is_each_clients_own():
    trained = []
    start = arrays(shared_state(Replaced(0)))
    grid = LocalGrid(app_of(Replaced, trained), 3)
    strategy = FedFisherOneShot(fraction_evaluate=0.0)
    assert len(strategy.start(grid, start).uploads) == 3


class Adapter(nn.Module):
    """With PEFT's names."""

    def __init__(self, freeze):
        super().__init__()
        layer, A, B = nn.Linear(3, 2), nn.Linear(3, 1, bias=False), nn.Linear(1, 2)
        self.layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": A.requires_grad_(not freeze)})
        self.lora_B = nn.ModuleDict({"default": B})

    def forward(self, x):
        adapted = self.lora_B["default"](self.lora_A["default"](x))
        return self.layer(x) + adapted


@pytest.mark.parametrize("freeze", [False, True])
def test_that_factors_of_a_product_are_merged_apart_is_told_once(freeze, caplog):
    def make(partition):
        torch.manual_seed(0)
        return Adapter(freeze)

    start = arrays(shared_state(make(0)))
    strategy = FedFisherOneShot(fraction_evaluate=0.0)
    strategy.start(LocalGrid(app_of(make, []), 3), start, num_rounds=2)
    told = [r for r in caplog.records if "Both factors of adapters" in r.getMessage()]
    assert len(told) == (not freeze)
    if told:
        assert "'lora_A.default.weight' and its lora_B" in told[0].getMessage()


def test_an_app_of_its_own_tells_what_is_frozen_by_identify(caplog):
    app = ClientApp()

    def own(context):
        return on_a_base(int(context.node_config["partition-id"] == 1))

    @app.query()
    def query(message, context):
        return identify(message, context, own(context))

    @app.train()
    def train(message, context):
        model, data = (
            own(context),
            TensorDataset(torch.randn(8, 3), torch.zeros(8).long()),
        )
        model.load_state_dict(
            message.content["arrays"].to_torch_state_dict(), strict=False
        )
        arrays = fisher_arrays(message, context, model, DataLoader(data))
        metrics = MetricRecord({"num-examples": 8})
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        return Message(content, reply_to=message)

    start = arrays(shared_state(on_a_base(0)))
    strategy = FedFisherOneShot(fraction_evaluate=0.0)
    assert len(strategy.start(LocalGrid(app, 3), start).uploads) == 2
    assert OTHER_BASE.search(caplog.text)
