"""What a newcomer gets wrong first is told in words that lead out of it."""

import copy

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flowers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import (
    app_by_partition,
    ask,
    metrics_of,
    tiny_app,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import ClientApp, FisherClient, LocalSGD, make_client_app
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.curvature import Diagonal
from flwr_fisher.errors import (
    CheckpointError,
    ClientError,
    ConfigurationError,
    ParamsError,
    RoundError,
    WireError,
)
from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.params import shared_state
from flwr_fisher.secure import SecureSums
from flwr_fisher.strategies import FAGH, TCT, FedAvg, FedFish, FedFisherOneShot
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import tensors_to_arrays
from flwr_fisher.wire.codec import from_container
from flwr_fisher.wire.quantise import decode_param, encode_param


@pytest.mark.parametrize(
    ("returned", "kept", "text"),
    [
        (None, {}, None),
        (0.5, {}, "train_fn returned 0.5"),
        ({"loss": "low", "a": 1}, {"a": 1}, "'loss': 'low'"),
        ({1: 0.5}, {"1": 0.5}, None),
        ({"loss": torch.tensor(0.5)}, {"loss": 0.5}, None),
        ({"loss": np.float32(0.5), "n": np.int64(3)}, {"loss": 0.5, "n": 3}, None),
        ({"each": [0.5, 1]}, {"each": [0.5, 1.0]}, None),
        ({"each": np.arange(2)}, {"each": [0, 1]}, None),
        ({"each": [np.float32(0.5), torch.tensor(1)]}, {"each": [0.5, 1.0]}, None),
        ({"each": np.zeros((2, 2))}, {}, "'each'"),
        ({"late": True}, {"late": 1}, None),
        ({"seed": 2**64}, {}, "'seed'"),
    ],
)
def test_what_is_no_metric_costs_no_training(returned, kept, text, caplog):
    found = dict(metrics_of(ask(tiny_client(train_fn=lambda *arguments: returned))))
    assert found.pop("num-examples")
    assert found == kept
    assert text is None or text in caplog.text


@pytest.mark.parametrize("returned", [None, {"loss": 1.0}])
def test_an_evaluation_must_say_its_weight(returned):
    client = tiny_client(evaluate_fn=lambda *arguments: returned)
    with pytest.raises(ClientError, match="no 'num-examples'"):
        ask(client, kind="evaluate")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_another_dtype_is_refused_before_anything_trains(dtype):
    def train_fn(*arguments):
        raise AssertionError

    client = tiny_client(train_fn=train_fn)
    client.problem.model.to(dtype)
    with pytest.raises(ClientError, match=rf"{dtype}.*start from arrays"):
        ask(client, config={"structure": "kfac"})


X, Y = tiny_data(2).tensors


def trained_copy(model, *arguments):
    copied = copy.deepcopy(model)
    LocalSGD()(copied, *arguments)
    return copied


@pytest.mark.parametrize("aggregate", ["parts", "sums"])
def test_a_training_of_an_unseen_copy_is_told(aggregate, caplog):
    app = app_of(train_fn=lambda *own: {"loss": len([trained_copy(*own)])})
    strategy = FedFisherOneShot(aggregate=aggregate, fraction_evaluate=0.0)
    strategy.start(LocalGrid(app, 2), tiny_arrays())
    assert "The training has changed no parameter" in caplog.text


@pytest.mark.parametrize("config", [{}, {"structure": "kfac"}])
def test_nan_in_the_data_ends_the_training(config):
    epochs = []
    train_fn = LocalSGD(epochs=5, on_epoch=lambda epoch, _: epochs.append(epoch))
    x = torch.where(torch.arange(len(X)) == 7, torch.nan, X.T).T
    client = FisherClient(tiny_model(), [(x, Y)], train_fn=train_fn)
    with pytest.raises(ClientError, match="NaN or infinity"):
        ask(client, config=config)
    assert not epochs


def test_an_evaluate_fn_gets_the_held_out_data_and_the_config():
    def score(model, valloader, device, config):
        return {"num-examples": len(valloader.dataset), "twice": 2 * config["lr"]}

    client = tiny_client(evaluate_fn=score)
    metrics = metrics_of(ask(client, config={"lr": 0.5}, kind="evaluate"))
    assert dict(metrics) == {"num-examples": 8, "twice": 1.0}


@pytest.mark.parametrize("error", [KeyError, SystemExit])
def test_an_exception_in_a_client_is_logged_with_its_traceback(error, caplog):
    def broken(*arguments):
        raise error("partition_id")

    grid = LocalGrid(tiny_client(train_fn=broken).as_client_app(), 3)
    with pytest.raises(RoundError, match="partition_id"):
        FedFisherOneShot().start(grid, tiny_arrays())
    assert "in broken" in caplog.text


def test_parameters_that_require_gradients_or_are_not_finite():
    F = Diagonal({"w": torch.ones(2)})
    good = LocalPosterior({"w": nn.Parameter(torch.ones(2))}, F, 1)
    assert not fedfisher([good, good]).params["w"].requires_grad
    bad = LocalPosterior({"w": torch.tensor([1.0, float("nan")])}, F, 1)
    with pytest.raises(ParamsError, match="posterior 1: 'w' holds NaN"):
        fedfisher([good, bad])


def wrapped(name):
    inner = nn.Linear(3, 2)
    LocalProblem(nn.ModuleDict({name: inner}), []).check_layout(shared_state(inner))


W, DATA = {"w": torch.ones(2)}, TensorDataset(torch.zeros(4, 3), torch.zeros(4).long())


def quickstarts_train(net, trainloader, epochs, device):
    raise AssertionError


def trained_by(train):
    app = ClientApp()
    app.train()(train)
    return app


class Halving(flowers.FedAvg):
    """A strategy of a user's, which beside this library's is not called."""

    def configure_train(self, server_round, arrays, config, grid):
        raise AssertionError


def beside(*bases, **hooks):
    return type("Beside", bases, hooks)().start(LocalGrid(tiny_app(), 2), tiny_arrays())


def starting(arrays=None, app=None, options=(), **more):
    strategy = FedFisherOneShot(**dict(options))
    grid = LocalGrid(app or tiny_app(), 2)
    return strategy.start(grid, arrays or tiny_arrays(), **more)


def fedavgs_reply(message, context):
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content, reply_to=message)


MISTAKES = {
    "a state dict": (
        lambda: starting(nn.Linear(2, 2).state_dict()),
        r"pass ArrayRecord\(\.\.\.\)",
    ),
    "a model that has diverged": (
        lambda: starting(ArrayRecord({"w": torch.tensor([torch.nan])})),
        "the initial arrays cannot be trained: 'w': holds NaN or infinity",
    ),
    "an app for a grid": (
        lambda: FedFisherOneShot().start(tiny_app(), tiny_arrays()),
        "grid must be .*LocalGrid",
    ),
    "a list of arrays": (
        lambda: starting(ArrayRecord([torch.ones(2).numpy()])),
        r"'0' of .*no such entry: start from shared_state\(model\)",
        RoundError,
    ),
    "a plain reply without a Fisher": (
        lambda: starting(app=trained_by(fedavgs_reply), options={"codec": "lossless"}),
        r"'curvature/format': missing: .*fisher_arrays\(message",
        RoundError,
    ),
    "no reply": (
        lambda: starting(app=trained_by(lambda message, context: None)),
        r"the app's function returned None, no Message\(RecordDict",
        RoundError,
    ),
    "what evaluate_fn returned once": (
        lambda: starting(evaluate_fn=lambda *_: (0.1, {})),
        r"evaluate_fn must return a MetricRecord of numbers .*, got \(0.1",
    ),
    "a name for an evaluate_fn": (
        lambda: starting(evaluate_fn="accuracy"),
        "evaluate_fn must be a function, got 'accuracy'",
    ),
    "a file for a checkpoint_dir": (
        lambda: starting(checkpoint_dir=__file__),
        "checkpoint_dir is a file, .*: pass a folder, or None",
        CheckpointError,
    ),
    "no metrics of the training": (
        lambda: starting(options={"train_metrics_aggr_fn": lambda *_: [0.5]}),
        r"train_metrics_aggr_fn must return a MetricRecord of numbers .*, got \[0.5\]",
    ),
    "a refinement that is not listed": (
        lambda: beside(FedFisherOneShot, exchanges=lambda self, server_round: []),
        r"refine= has no effect on Beside.* with \*refinements\(self, server_round\)",
    ),
    "metrics of the evaluation": (
        lambda: starting(options={"evaluate_metrics_aggr_fn": lambda *_: {"a": "b"}}),
        r"evaluate_metrics_aggr_fn must return a MetricRecord .*, got {'a': 'b'}",
    ),
    "a class of secure sums": (
        lambda: FedFisherOneShot(secure=SecureSums),
        r"secure must be SecureSums\(\), got <class",
    ),
    "a score that returns nothing": (
        lambda: starting(options={"solver": "adam", "score": lambda params: None}),
        "score's result must be a number, got None",
    ),
    "a server's device that is not there": (
        lambda: FedFisherOneShot(device="cuda:99"),
        r"the device 'cuda:99' cannot be used here .*merge on the CPU, device='cpu'",
    ),
    "a client's device that is not there": (
        lambda: FisherClient(nn.Linear(3, 2), [], device="gpu"),
        r"the device 'gpu' cannot be used here .*FisherClient\(device='cpu'\)",
    ),
    "a dict of limits": (
        lambda: FisherClient(nn.Linear(3, 2), [], limits={"max_steps": 3}),
        r"limits must be ClientLimits\(...\), got {'max_steps': 3}",
    ),
    "a strategy in front": (
        lambda: beside(Halving, FedFish),
        r"does not call Halving.configure_train: .* round_config\(\)",
    ),
    "Flower's strategy behind": (
        lambda: beside(FedFish, flowers.FedProx),
        "does not call FedProx.configure_train",
    ),
    "no config of a round": (
        lambda: beside(FedFish, round_config=lambda self, number, config: None),
        r"round_config\(\) must return the config of round 1, got None: return Conf",
    ),
    "a model for a client": (
        lambda: starting(app=make_client_app(lambda _: tiny_model())),
        r"client_fn must return FisherClient\(.*, got Seq",
        RoundError,
    ),
    "start's keyword": (
        lambda: FedFisherOneShot(num_rounds=3),
        r"^FedFisherOneShot.*'num_rounds'",
        TypeError,
    ),
    "no loader": (
        lambda: FisherClient(nn.Linear(3, 2), None),
        "trainloader must yield batches, but it is None",
    ),
    "a function for a loader": (
        lambda: FisherClient(nn.Linear(3, 2), lambda: DATA),
        "trainloader must yield batches, but it is <function",
    ),
    "a class for a loader": (
        lambda: FisherClient(nn.Linear(3, 2), [], DataLoader),
        "valloader must yield batches, but it is <class",
    ),
    "a lazy layer": (
        lambda: FisherClient(nn.LazyLinear(2), []),
        "'weight' has no shape yet.*call the model once",
        ParamsError,
    ),
    "a name for a loop": (
        lambda: FisherClient(nn.Linear(3, 2), [], train_fn="train"),
        "train_fn must be a function, got 'train'",
    ),
    "a loop with other arguments": (
        lambda: tiny_client(train_fn=lambda net, trainloader: None),
        r"train_fn is called with \(model, loader, device, config\), but .*\(net, tr",
    ),
    "a loop in another order": (
        lambda: tiny_client(train_fn=quickstarts_train),
        r"quickstarts_train takes \(net, trainloader, epochs, device\): pass lambda",
    ),
    "an evaluation in another order": (
        lambda: tiny_client(evaluate_fn=lambda net, device, testloader, config: {}),
        "evaluate_fn is called with",
    ),
    "an optimizer for what makes one": (
        lambda: LocalSGD(optimizer=torch.optim.SGD([torch.zeros(1)])),
        "optimizer must be a function, got SGD",
    ),
    "a class for a model": (
        lambda: FisherClient(nn.Linear, []),
        r"model must be an nn.Module.*Net\(\)",
    ),
    "a reply without a Fisher": (
        lambda: from_container(tensors_to_arrays(W), limit=10**6, count=1),
        r"got 'w': .* as fisher_arrays\(\.\.\.\)",
        WireError,
    ),
    "another dtype": (
        lambda: decode_param(
            encode_param(torch.zeros(3, 2).half(), 16), torch.zeros(3, 2), field="w"
        ),
        "12 bytes, expected 24 .* torch.float32",
        WireError,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_with_the_way_out(mistake):
    make, text, *error = mistake  # most are of the configuration
    with pytest.raises(*error or [ConfigurationError], match=text):
        make()


def test_a_schedule_that_changes_its_config_leaves_the_callers():
    class Schedule(FedAvg):
        def round_config(self, server_round, config):
            config["lr"] = 0.1 / server_round
            return config

    given = ConfigRecord({"note": "mine"})
    Schedule(fraction_evaluate=0.0).start(
        LocalGrid(tiny_app(), 2), tiny_arrays(), train_config=given
    )
    assert dict(given) == {"note": "mine"}


def app_of(model=None, **options):
    def make(partition):
        client = tiny_client(partition, **options)
        client.problem.model = client.problem.model if model is None else model
        return client

    return app_by_partition(make)


def test_the_loss_that_clients_train_with_is_the_one_that_they_differentiate():
    def nothing(outputs, labels):
        return outputs.sum() * 0

    norms = []
    for train_fn in (LocalSGD(), LocalSGD(loss_fn=nothing)):
        grid = LocalGrid(app_of(train_fn=train_fn), 3)
        result = FAGH(fraction_evaluate=0.0).start(grid, tiny_arrays())
        norms.append(result.train_metrics_clientapp[1]["gradient-norm"])
    assert norms[0] > 0.01
    assert norms[1] == 0


def test_a_gradient_of_no_classes_needs_a_loss():
    grid = LocalGrid(app_of(likelihood="gaussian"), 3)
    with pytest.raises(RoundError, match=r"FisherClient\(loss_fn=\.\.\.\)"):
        FAGH().start(grid, tiny_arrays())


def test_a_tct_models_arrays_are_no_networks():
    arrays = tiny_arrays()
    arrays["tct/weight"] = Array(np.zeros((2, 3)))
    with pytest.raises(RoundError, match=r"'tct/weight' .*no such entry"):
        FAGH().start(LocalGrid(tiny_app(), 3), arrays)


def test_a_run_is_not_resumed_with_another_model(tmp_path):
    grid = LocalGrid(tiny_app(), 3)
    FAGH(fraction_evaluate=0.0).start(grid, tiny_arrays(), checkpoint_dir=tmp_path)
    other = ArrayRecord(nn.Linear(7, 2).state_dict())
    fewer = tiny_arrays()
    del fewer["0.weight"]  # as if it were frozen now
    for arrays in (other, fewer):
        with pytest.raises(CheckpointError, match=r"initial_arrays\['(0\.)?weight"):
            FAGH(fraction_evaluate=0.0).start(
                grid, arrays, checkpoint_dir=tmp_path, resume=True
            )


class Unused(nn.Module):
    """Its last linear layer is for something else."""

    def __init__(self):
        super().__init__()
        self.net, self.aux = tiny_model(), nn.Linear(3, 2)

    def forward(self, x):
        return self.net(x)


def test_a_layer_that_is_never_called_is_no_head_of_tct():
    app = app_of(model=Unused())
    with pytest.raises(
        RoundError, match="pass the name of another layer as head"
    ) as raised:
        TCT(stage1_rounds=0, fraction_evaluate=0.0).start(
            LocalGrid(app, 3), ArrayRecord(Unused().state_dict()), num_rounds=2
        )
    assert "labels must be" not in str(raised.value)


def test_features_that_are_no_numbers_lead_to_the_inputs():
    class NoNumber(nn.Sequential):
        def forward(self, x):
            return super().forward(x / 0.0)

    model = NoNumber(*tiny_model())
    app = app_of(model=model)
    with pytest.raises(RoundError, match="check its inputs for such values"):
        TCT(stage1_rounds=0, fraction_evaluate=0.0).start(
            LocalGrid(app, 3), ArrayRecord(model.state_dict()), num_rounds=2
        )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("structre", "structure"),
        ("fraction_fit", "fraction_train"),
        ("anchor", "merge=MergeOptions(anchor=…)"),
        ("examples", "fisher=FisherOptions(examples=…)"),
        ("solver", "regression=Regression(solver=…)"),
        ("min_fit_clients", "min_train_nodes"),
        ("evaluate_fn", "start(evaluate_fn=…)"),
        ("num_rounds", "start(num_rounds=…)"),
        ("fit_metrics_aggregation_fn", "train_metrics_aggr_fn"),
        ("on_fit_config_fn", "start(train_config=…)"),
        ("checkpoint_folder", None),
    ],
)
def test_a_keyword_may_be_close_to_one(name, meant):
    strategy = TCT if name == "solver" else FedFisherOneShot
    with pytest.raises(TypeError, match=f"unexpected keyword arguments .'{name}'") as e:
        strategy(**{name: 1})
    told = str(e.value).partition("did you mean ")[2]
    assert told == (f"{meant} for {name}?" if meant else "")
