"""A server and clients that do not go together are told so before anyone trains."""

import pytest
import rivals_path  # noqa: F401
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client import ClientApp as OlderClientApp
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import Server, SimpleClientManager
from flwr.serverapp.strategy import FedAvg
from harness.repeatable import Repeatable
from virtual import (
    close,
    fedfisher_with,
    quick_app,
    tiny_app,
    tiny_arrays,
    tiny_client,
    tiny_model,
)

from flwr_fisher.client import ClientApp as OurApp
from flwr_fisher.client import LocalSGD, check_fisher, fisher_arrays, identify
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    RoundError,
    StructureError,
)
from flwr_fisher.strategies import FAGH, TCT, FedFish, FedFisherOneShot, Scaffold
from flwr_fisher.testing import LocalGrid

OURS = quick_app()


class Plain(ClientApp):
    """An app as Flower's tutorials have it, which notes who trained.

    `curvature` says whether its train function calls `fisher_arrays`.
    """

    def __init__(self, curvature=False):
        super().__init__()
        self.trained = []

        @self.train()
        def train(message, context):
            partition = int(context.node_config["partition-id"])
            self.trained.append(partition)
            problem = tiny_client(partition).problem
            model, loader = problem.model, problem.trainloader
            model.load_state_dict(message.content["arrays"].to_torch_state_dict())
            own = LocalSGD(lr=0.1)(model, loader, problem.device, {})
            arrays = ArrayRecord(model.state_dict())
            if curvature:
                arrays = fisher_arrays(message, context, model, loader)
            metrics = {**own, "num-examples": 8 + 2 * partition}
            content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
            return Message(content, reply_to=message)


class Older(NumPyClient):
    def fit(self, parameters, config):
        raise AssertionError("it trains")


def strategies():
    options = {"fraction_evaluate": 0.0}
    return [
        fedfisher_with(**options),
        FedFish(**options),
        FAGH(**options),
        Scaffold(**options),
        TCT(stage1_rounds=1, **options),
    ]


@pytest.mark.parametrize("strategy", strategies(), ids=lambda s: type(s).__name__)
def test_a_plain_app_is_told_before_it_trains(strategy, caplog):
    app = Plain()
    text = r"only 0 of 2 required nodes \(.*\) can be asked after 0 s\n"
    text += r"node-\d+, node-\d+, node-\d+: "
    text += r"its ClientApp is not flwr-fisher's.*app.query\(\)\(identify\)"
    with pytest.raises(RoundError, match=text):
        strategy.start(LocalGrid(app, 3), tiny_arrays(), num_rounds=3)
    assert not app.trained
    said = [r.getMessage() for r in caplog.records if "Not asking" in r.getMessage()]
    assert len(said) == 1


def test_a_numpy_client_is_told_before_it_trains():
    app = OlderClientApp(lambda context: Older().to_client())
    text = r"its ClientApp is that of a NumPyClient.*legacy.client_app\(client_fn"
    for strategy in strategies():
        with pytest.raises(RoundError, match=text):
            strategy.start(LocalGrid(app, 2), tiny_arrays(), num_rounds=3)


def test_a_client_of_another_version_is_told_before_it_trains(monkeypatch):
    monkeypatch.setattr("flwr_fisher.client.messages.__version__", "0.1.0")
    with pytest.raises(RoundError, match=r"runs flwr-fisher 0.1.0, the server \d"):
        fedfisher_with().start(LocalGrid(quick_app(), 2), tiny_arrays())


# Flower's own strategies take any client


@pytest.mark.parametrize("wrap", [lambda s: s, Repeatable], ids=["bare", "repeatable"])
@pytest.mark.parametrize("app", [Plain, tiny_app], ids=["plain", "ours"])
def test_flowers_strategies_work_with_either(wrap, app):
    made = wrap(FedAvg(fraction_evaluate=0.0))
    arrays = made.start(LocalGrid(app(), 2), tiny_arrays(), num_rounds=1).arrays
    expected = FedAvg(fraction_evaluate=0.0).start(
        LocalGrid(OURS, 2), tiny_arrays(), num_rounds=1
    )
    assert close(arrays, expected.arrays)


# Train functions that stay as they are


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_a_train_function_by_hand_uploads_what_ours_does(structure):
    app = Plain(curvature=True)
    app.query()(identify)
    for options in ({}, {"aggregate": "sums"}):
        if options and structure != "diagonal":
            continue
        made = fedfisher_with(structure=structure, fraction_evaluate=0.0, **options)
        results = [made.start(LocalGrid(own, 3), tiny_arrays()) for own in (app, OURS)]
        assert close(*(r.arrays for r in results))
        names = [[u.client for u in r.uploads] for r in results]
        assert names[0] == names[1] == [f"partition-{p}" for p in range(3)]


def test_what_a_train_function_by_hand_cannot_do_is_told():
    app = Plain(curvature=True)
    app.query()(identify)
    with pytest.raises(RoundError, match=r"requests the job 'probe', but this app"):
        FAGH(fraction_evaluate=0.0).start(LocalGrid(app, 2), tiny_arrays())


@pytest.mark.parametrize("strategy", [FAGH, Scaffold, TCT, FedFisherOneShot])
def test_our_app_with_a_train_function_tells_it_before_it_trains(strategy):
    options = {FedFisherOneShot: {"aggregate": "sums"}, TCT: {"stage1_rounds": 1}}
    plain, app = Plain(curvature=True), OurApp()
    app.train()(lambda message, context: plain(message, context))
    made = strategy(fraction_evaluate=0.0, **options.get(strategy, {}))
    with pytest.raises(RoundError, match=r"requests the job .* FisherClient\(model"):
        made.start(LocalGrid(app, 2), tiny_arrays(), num_rounds=4)
    assert not plain.trained


def asked(**options):
    """What a train function is called with."""
    LocalGrid(tiny_app(), 1)
    config = ConfigRecord({f"fisher.{name}": value for name, value in options.items()})
    content = RecordDict({"arrays": tiny_arrays(), "config": config})
    return Message(content, 77, "train"), Context(1, 77, {}, RecordDict(), {})


@pytest.mark.parametrize("call", [fisher_arrays, check_fisher])
def test_arrays_of_another_model_are_refused_by_hand(call):
    model = tiny_model()[0]  # type: ignore[index]
    loader = tiny_client().problem.trainloader
    with pytest.raises(ClientError, match="start from shared_state"):
        call(*asked(structure="kfac"), model, loader)


def test_what_would_fail_after_a_training_by_hand_fails_before():
    model = tiny_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loader = tiny_client().problem.trainloader
    random = torch.get_rng_state()
    for config in ({}, {"structure": "kfac"}):  # FedAvg asks for none
        check_fisher(*asked(**config), model, loader)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    masks = [(x, torch.zeros(len(x), 3)) for x, _ in loader]
    with pytest.raises(StructureError, match="are neither classes nor probabilities"):
        check_fisher(*asked(structure="kfac"), model, masks)


# Servers of Flower's older kind


@pytest.mark.parametrize("strategy", strategies(), ids=lambda s: type(s).__name__)
def test_our_strategy_in_an_older_server_is_told(strategy):
    server = Server(client_manager=SimpleClientManager(), strategy=strategy)
    name = type(strategy).__name__
    with pytest.raises(
        ConfigurationError, match=rf"{name} is a strategy of .*as_legacy"
    ):
        server.fit(1, None)
