"""What a newcomer gets wrong first is told in words that lead out of it."""

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.utils.data import TensorDataset
from virtual import ask, metrics_of, tiny_app, tiny_arrays, tiny_client, tiny_model

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.curvature import Diagonal, fisher
from flwr_fisher.errors import (
    CheckpointError,
    ClientError,
    ConfigurationError,
    DataError,
    ParamsError,
    RoundError,
    WireError,
)
from flwr_fisher.measures import MeasuredGrid, costs
from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FAGH, TCT, FedFisherOneShot
from flwr_fisher.tangent import TCTModel
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import tensors_to_arrays
from flwr_fisher.wire.container import from_container
from flwr_fisher.wire.packing import pack_params, unpack_params


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "train_fn must return a dict of metrics"),
        (0.5, "train_fn must return a dict of metrics"),
        ({"loss": "low"}, "train_fn returned 'loss': 'low'"),
        ({1: 0.5}, "train_fn returned 1"),
    ],
)
def test_what_train_fn_must_return(returned, text):
    client = tiny_client(train_fn=lambda *arguments: returned)
    with pytest.raises(ClientError, match=text):
        ask(client)


def test_a_metric_may_be_a_tensor_of_one_number():
    client = tiny_client(train_fn=lambda *arguments: {"loss": torch.tensor(0.5)})
    assert metrics_of(ask(client))["loss"] == 0.5


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "evaluate_fn must return a dict of metrics"),
        ({"loss": 1.0}, r"returned no 'num-examples'.*add it to \['loss'\]"),
    ],
)
def test_what_evaluate_fn_must_return(returned, text):
    client = tiny_client(evaluate_fn=lambda *arguments: returned)
    with pytest.raises(ClientError, match=text):
        ask(client, kind="evaluate")


def test_an_evaluate_fn_gets_the_held_out_data_and_the_config():
    def score(model, valloader, device, config):
        return {"num-examples": len(valloader.dataset), "twice": 2 * config["lr"]}

    client = tiny_client(evaluate_fn=score)
    metrics = metrics_of(ask(client, config={"lr": 0.5}, kind="evaluate"))
    assert dict(metrics) == {"num-examples": 8, "twice": 1.0}


def test_initial_arrays_that_are_a_state_dict():
    grid = LocalGrid(tiny_app(), 3)
    with pytest.raises(ConfigurationError, match=r"wrap it, ArrayRecord\(\.\.\.\)"):
        FedFisherOneShot().start(grid, nn.Linear(2, 2).state_dict())


def test_a_keyword_of_start_given_to_the_constructor():
    with pytest.raises(TypeError, match=r"^FedFisherOneShot.*'num_rounds'"):
        FedFisherOneShot(num_rounds=3)


def test_an_exception_in_a_client_is_logged_with_its_traceback(caplog):
    def broken(*arguments):
        raise KeyError("partition_id")

    grid = LocalGrid(tiny_client(train_fn=broken).as_client_app(), 3)
    with pytest.raises(Exception, match="partition_id"):
        FedFisherOneShot().start(grid, tiny_arrays())
    assert "in broken" in caplog.text


def test_a_model_where_its_parameters_are_wanted():
    F = Diagonal({"w": torch.ones(2)})
    with pytest.raises(ConfigurationError, match=r"shared_state\(model\)"):
        LocalPosterior(nn.Linear(2, 2), F, 1)
    with pytest.raises(ConfigurationError, match="a Curvature"):
        LocalPosterior({"w": torch.ones(2)}, {"w": torch.ones(2)}, 1)


def test_parameters_that_require_gradients_or_are_not_finite():
    F = Diagonal({"w": torch.ones(2)})
    good = LocalPosterior({"w": nn.Parameter(torch.ones(2))}, F, 1)
    assert not fedfisher([good, good]).params["w"].requires_grad
    bad = LocalPosterior({"w": torch.tensor([1.0, float("nan")])}, F, 1)
    with pytest.raises(ParamsError, match="posterior 1: 'w' holds NaN"):
        fedfisher([good, bad])


def test_a_batch_where_a_loader_is_wanted():
    with pytest.raises(DataError, match=r"pass \[inputs\]"):
        fisher(nn.Linear(2, 2), torch.randn(3, 2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: TCT(num_features=100.5), "num_features must be an integer, got 100.5"),
        (lambda: TCT(stage1_rounds=True), "stage1_rounds must be an integer"),
        (lambda: TCT(local_steps="5"), "local_steps must be an integer, got '5'"),
        (lambda: TCT(lr="0.1"), "lr must be a number, got '0.1'"),
        (lambda: TCT(regression="steps"), r"regression must be Regression\(\.\.\.\)"),
        (lambda: FAGH(lr="1"), "lr must be a number, got '1'"),
        (lambda: FAGH(rho="a"), "rho must be a number"),
        (lambda: FAGH(betas=0.9), "betas must be two numbers"),
        (lambda: FAGH(betas=("a", 1)), "betas must be two numbers"),
        (lambda: FAGH(seed="a"), "seed must be an integer, got 'a'"),
        (lambda: FAGH(fraction_train="0.5"), "fraction_train must be a number"),
    ],
)
def test_arguments_of_another_type_are_named(make, text):
    with pytest.raises(ConfigurationError, match=text):
        make()


def app_of(model=None, **options):
    def client_fn(context):
        client = tiny_client(int(context.node_config["partition-id"]), **options)
        client.problem.model = client.problem.model if model is None else model
        return client

    return make_client_app(client_fn)


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


def test_costs_of_a_strategy_that_got_another_grid(caplog):
    grid = LocalGrid(tiny_app(), 3)
    spent, arrays = costs(MeasuredGrid(grid), 1), tiny_arrays()
    FAGH(fraction_evaluate=0.0).start(grid, arrays, evaluate_fn=spent)
    assert "start the strategy with the MeasuredGrid too" in caplog.text


def test_costs_begin_anew_with_another_run():
    measured = MeasuredGrid(LocalGrid(tiny_app(), 3))
    spent, arrays = costs(measured, 1), tiny_arrays()
    first, second = (
        FAGH(fraction_evaluate=0.0).start(measured, arrays, evaluate_fn=spent)
        for _ in "ab"
    )
    histories = [r.evaluate_metrics_serverapp for r in (first, second)]
    assert histories[0] == histories[1]
    assert histories[0][0]["uploaded-bytes"] == 0 < histories[0][1]["uploaded-bytes"]


def test_a_run_is_not_resumed_with_another_model(tmp_path):
    grid = LocalGrid(tiny_app(), 3)
    FAGH(fraction_evaluate=0.0).start(grid, tiny_arrays(), checkpoint_dir=tmp_path)
    other = ArrayRecord(nn.Linear(7, 2).state_dict())
    with pytest.raises(CheckpointError, match="holds a run of another model: 'weight'"):
        FAGH(fraction_evaluate=0.0).start(
            grid, other, checkpoint_dir=tmp_path, resume=True
        )


def test_a_tct_model_is_loaded_into_a_module(tmp_path):
    with pytest.raises(ParamsError, match=r"load\(path, model\) takes a module"):
        TCTModel.load(nn.Linear(2, 2), tmp_path / "tct.safetensors")


class Unused(nn.Module):
    """Its last linear layer is for something else."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.aux = tiny_model(), nn.Linear(3, 2)

    def forward(self, x):
        return self.net(x)


def test_a_layer_that_is_never_called_is_no_head_of_tct():
    app = app_of(model=Unused())
    with pytest.raises(RoundError, match="pass another one's name as head") as raised:
        TCT(stage1_rounds=0, fraction_evaluate=0.0).start(
            LocalGrid(app, 3), ArrayRecord(Unused().state_dict()), num_rounds=2
        )
    assert "labels must be" not in str(raised.value)


def test_features_that_are_no_numbers_lead_to_the_inputs():
    class NoNumber(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tiny_model()

        def forward(self, x):
            return self.net(x / 0.0)

    model = NoNumber()
    app = app_of(model=model)
    with pytest.raises(RoundError, match="look for such values among its inputs"):
        TCT(stage1_rounds=0, fraction_evaluate=0.0).start(
            LocalGrid(app, 3), ArrayRecord(model.state_dict()), num_rounds=2
        )


@pytest.mark.parametrize("which", ["trainloader", "valloader"])
def test_a_data_set_is_no_loader(which: str) -> None:
    data = TensorDataset(torch.zeros(4, 3), torch.zeros(4).long())
    loaders = {"trainloader": [(torch.zeros(4, 3), torch.zeros(4).long())]}
    with pytest.raises(ConfigurationError, match=rf"{which} is a TensorDataset.*Data"):
        FisherClient(nn.Linear(3, 2), **{**loaders, which: data})


def test_a_class_is_no_model() -> None:
    with pytest.raises(ConfigurationError, match=r"model must be an nn.Module.*Net()"):
        FisherClient(nn.Linear, [])


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod"])
def test_a_wrapped_model_is_told(wrapper: str) -> None:
    inner = nn.Linear(3, 2)
    problem = LocalProblem(nn.ModuleDict({wrapper: inner}), [])
    with pytest.raises(ClientError, match=f"'{wrapper}.weight'.*in {wrapper}"):
        problem.check_layout(shared_state(inner))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("structre", "structure"),
        ("fraction_fit", "fraction_train"),
        ("min_fit_clients", "min_train_nodes"),
        ("checkpoint_folder", None),
    ],
)
def test_a_keyword_may_be_close_to_one(name: str, meant: str | None) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword arguments .'{name}'") as e:
        FedFisherOneShot(**{name: 1})
    told = str(e.value).partition("did you mean ")[2]
    assert told == (f"{meant} for {name}?" if meant else "")


def test_a_reply_without_a_fisher_names_what_returns_one() -> None:
    like = {"w": torch.zeros(3)}
    with pytest.raises(WireError, match=r"got 'w': .* which fisher_arrays\(\.\.\.\)"):
        from_container(tensors_to_arrays(like), limit=10**6, count=1)


def test_another_dtype_is_told_by_its_bytes() -> None:
    like = torch.zeros(3, 2)
    half = pack_params(like.half(), 16)
    with pytest.raises(WireError, match=r"12 bytes, expected 24 .* torch.float32"):
        unpack_params(half, like, field="w")
