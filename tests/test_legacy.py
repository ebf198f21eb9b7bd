"""Apps of Flower's older API, behind this library's strategies."""

import pickle

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader
from virtual import (
    ask,
    close,
    fedfisher_with,
    killing_app,
    metrics_of,
    same_bits,
    tiny_app,
    tiny_arrays,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import LocalSGD
from flwr_fisher.errors import (
    CheckpointError,
    ClientError,
    ConfigurationError,
    ParamsError,
    UnknownNameError,
)
from flwr_fisher.legacy import (
    Server,
    as_legacy,
    client_app,
    from_numpy_client,
    server_app,
)
from flwr_fisher.legacy.client import from_list, names_of, to_list
from flwr_fisher.strategies import TCT, FedFish, FedFisherOneShot, Refinement
from flwr_fisher.testing import LocalGrid


class Older(NumPyClient):
    """As most are written: lists of all of the state, trained by LocalSGD."""

    def __init__(self, holding=0):
        self.net, self.holding = tiny_model(1), holding
        self.trainloader = DataLoader(tiny_data(holding), batch_size=4)
        self.configs = []

    def names(self):
        return list(self.net.state_dict())

    def load(self, parameters):
        pairs = zip(self.names(), parameters, strict=True)
        state = {name: torch.tensor(array) for name, array in pairs}
        self.net.load_state_dict(state, strict=False)

    def fit(self, parameters, config):
        self.configs.append(config)
        self.load(parameters)
        own = LocalSGD(lr=0.1)(self.net, self.trainloader, torch.device("cpu"), {})
        return self.arrays(), len(self.trainloader.dataset), own

    def arrays(self):
        state = self.net.state_dict()
        return [state[name].numpy() for name in self.names()]

    def evaluate(self, parameters, config):
        self.configs.append(config)
        self.load(parameters)
        return 0.5, 7, {"accuracy": float(np.abs(parameters[0]).sum()), "sure": True}


class TrainableOnly(Older):
    """As LoRA apps are: lists of what is trained."""

    def names(self):
        return [name for name, p in self.net.named_parameters() if p.requires_grad]


def ours(older, **options):
    return from_numpy_client(
        older, older.net, older.trainloader, device="cpu", **options
    )


def older_app(kind=Older, wrapped=True, **options):
    def client_fn(context):
        older = kind(int(context.node_config["partition-id"]))
        return older.to_client() if wrapped else older

    parts = {"model": "net", "trainloader": "trainloader", "device": "cpu"}
    return client_app(client_fn, **parts | options)


def one_shot(**options):
    return fedfisher_with(**{"fraction_evaluate": 0.0} | options)


# Clients


def test_a_numpy_client_uploads_what_ours_does():
    """It trains alike, so the merge is alike."""
    apps = older_app(wrapped=False), older_app(), tiny_app()
    bare, wrapped, ours = (
        one_shot().start(LocalGrid(app, 3), tiny_arrays()).arrays for app in apps
    )
    assert close(bare, ours)
    assert close(wrapped, ours)


def test_fit_gets_the_users_config_and_the_servers_arrays():
    older = Older()
    seen = {}

    class Spy(Older):
        def fit(self, parameters, config):
            seen.update(config=config, arrays=[p.copy() for p in parameters])
            return super().fit(parameters, config)

    older = Spy()
    ask(ours(older), config={"lr": 0.5, "server-round": 3, "structure": "kfac"})
    assert seen["config"] == {"lr": 0.5, "server-round": 3}
    pairs = zip(seen["arrays"], tiny_model().state_dict().values(), strict=True)
    assert all(np.array_equal(a, b.numpy()) for a, b in pairs)


def test_its_number_of_examples_weighs_and_its_metrics_travel():
    class Few(Older):
        def fit(self, parameters, config):
            arrays, _, _ = super().fit(parameters, config)
            mine = {"is_straggler": False, "loss": np.float32(0.5), "host": "a"}
            return arrays, 3, mine

    for options in ({}, {"structure": "diagonal", "aggregate": "sums"}):
        metrics = metrics_of(ask(ours(Few()), config=options))
        assert dict(metrics) == {"num-examples": 3, "is_straggler": 0, "loss": 0.5}
    sums = one_shot(structure="diagonal", aggregate="sums")
    grid = LocalGrid(ours(Few()).as_client_app(), 2)
    assert {u.num_examples for u in sums.start(grid, tiny_arrays()).uploads} == {3}


def test_its_evaluate_answers_evaluations():
    metrics = metrics_of(ask(ours(Older()), kind="evaluate"))
    weights = next(iter(tiny_model().parameters()))
    expected = {"accuracy": pytest.approx(float(weights.detach().abs().sum()))}
    assert dict(metrics) == {**expected, "sure": 1, "loss": 0.5, "num-examples": 7}


# Lists


def frozen(kind):
    older = kind()
    older.net[0].requires_grad_(False)
    return older


def test_lists_of_what_is_trained_where_that_is_told():
    for older, options in (
        (frozen(TrainableOnly), {"order": "trainable"}),
        (frozen(TrainableOnly), {"order": frozen(TrainableOnly).names()}),
    ):
        client = ours(older, **options)
        arrays = ArrayRecord(tiny_model().state_dict())
        assert metrics_of(ask(client, arrays))["train_loss"] > 0
        assert metrics_of(ask(client, arrays, kind="evaluate"))["loss"] == 0.5


class Returns(Older):
    """Returns what it is told to."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def fit(self, parameters, config):
        return self.change(super().fit(parameters, config))


# By what is returned, the error and what it names.
WRONG = {
    "one too few": (lambda r: (r[0][:-1], *r[1:]), ParamsError, "Returns.fit returned"),
    "another shape": (
        lambda r: ([r[0][0].T, *r[0][1:]], *r[1:]),
        ParamsError,
        'order="parameters"',
    ),
    "two things": (lambda r: r[:2], ClientError, "fit must return three"),
    "no examples": (lambda r: (r[0], 0, {}), ClientError, "number of examples"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_fit_returns_is_checked(case):
    change, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        ask(ours(Returns(change)))


def test_a_network_of_its_own_sends_its_norms_statistics_too():
    older = TrainableOnly()
    options = {"order": "trainable", "device": "cpu"}
    own = from_numpy_client(older, tiny_model(), older.trainloader, **options)
    with pytest.raises(ClientError, match=r"has no '1\.running_mean'"):
        ask(own)
    metrics_of(ask(ours(older, order="trainable")))


def test_an_order_that_is_none():
    with pytest.raises(UnknownNameError, match="unknown order 'alphabet'; known: sta"):
        ask(ours(Older(), order="alphabet"))
    with pytest.raises(ParamsError, match=r"order names \['w'\]"):
        ask(ours(Older(), order=["w"]))


def test_bfloat16_travels_as_float32_and_comes_back():
    model = nn.Linear(2, 2).bfloat16()
    names = names_of(model, "state")
    arrays = to_list(model, names)
    assert {a.dtype for a in arrays} == {np.dtype("float32")}
    back = from_list(model, names, arrays, "it")
    assert all(torch.equal(back[n], v) for n, v in model.state_dict().items())


def test_what_is_no_numpy_client():
    with pytest.raises(
        ClientError, match=r"Linear does not define fit\(parameters, config\)"
    ):
        from_numpy_client(nn.Linear(1, 1), nn.Linear(1, 1), [])


# Servers


def run(components, clients=3, app=None):
    grid = LocalGrid(older_app() if app is None else app, clients)
    server_app(lambda context: components)(grid, Context(1, 1, {}, RecordDict(), {}))
    return grid


class Saves(Server):
    """As baselines do: it keeps the history."""

    def fit(self, num_rounds, timeout):
        self.history, seconds = super().fit(num_rounds, timeout)
        return self.history, seconds


def served(rounds=1, app=None, **options):
    settings = {"model": tiny_model(), "fraction_evaluate": 0.0} | options
    strategy = as_legacy(settings.pop("kind", FedFisherOneShot), **settings)
    server = Saves(client_manager=SimpleClientManager(), strategy=strategy)
    config = ServerConfig(num_rounds=rounds)
    run(ServerAppComponents(server=server, config=config), app=app)
    return server


def test_a_server_fn_gives_what_start_gives():
    strategy = one_shot(norm_statistics="refresh", refine=Refinement())  # as by default
    expected = strategy.start(LocalGrid(older_app(), 3), tiny_arrays(), 2)
    assert same_bits(served(2).result.arrays, expected.arrays)


@pytest.mark.parametrize(
    ("form", "order"), [(list, "parameters"), (ndarrays_to_parameters, "state")]
)
def test_initial_parameters_are_matched_to_names(form, order):
    start = tiny_model(3)
    arrays = to_list(start, names_of(start, order))
    seen = []

    def evaluate(server_round, arrays, config):
        seen.append(arrays)

    server = served(initial_parameters=form(arrays), order=order, evaluate_fn=evaluate)
    assert [len(a) for a in seen] == [len(arrays)] * 2
    assert all(map(np.array_equal, seen[0], arrays))
    assert server.history.losses_centralized == []


def test_initial_parameters_of_another_model():
    with pytest.raises(ParamsError, match="initial_parameters: arrays of shapes"):
        as_legacy(FedFish, model=tiny_model(), initial_parameters=[np.zeros(1)])


def test_the_older_settings_keep_their_names():
    strategy = as_legacy(
        FedFisherOneShot,
        model=tiny_model(),
        structure="diagonal",
        fraction_fit=0.5,
        fraction_evaluate=0.25,
        min_fit_clients=3,
        min_evaluate_clients=4,
        min_available_clients=5,
    )
    assert isinstance(strategy, FedFisherOneShot)
    assert (strategy.fraction_train, strategy.fraction_evaluate) == (0.5, 0.25)
    assert (strategy.min_train_nodes, strategy.min_evaluate_nodes) == (3, 4)
    assert strategy.min_available_nodes == 5
    assert (
        strategy.options()
        == FedFisherOneShot(
            structure="diagonal", fraction_train=0.5, min_train_nodes=3
        ).options()
    )


def test_configs_and_scores_by_round():
    configs = []

    class Notes(Older):
        def fit(self, parameters, config):
            configs.append({"fit": True, **config})
            return super().fit(parameters, config)

        def evaluate(self, parameters, config):
            configs.append({"fit": False, **config})
            return float(self.holding), 1 + self.holding, {"x": 2.0 * self.holding}

    server = served(
        2,
        older_app(Notes),
        fraction_evaluate=1.0,
        evaluate_fn=lambda n, arrays, config: (float(n), {"top": n + 0.5, "what": "a"}),
        on_fit_config_fn=lambda n: {"current_round": n},
        on_evaluate_config_fn=lambda n: {"tested": -n},
    )
    fits = [c["current_round"] for c in configs if c["fit"]]
    assert sorted(fits) == [1, 1, 1, 2, 2, 2]
    assert sorted(c["tested"] for c in configs if not c["fit"]) == [-2] * 3 + [-1] * 3
    history = pickle.loads(pickle.dumps(server.history))
    assert history.losses_centralized == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert history.metrics_centralized == {"top": [(0, 0.5), (1, 1.5), (2, 2.5)]}
    weighted = (0 * 1 + 2 * 2 + 4 * 3) / 6
    x = history.metrics_distributed["x"]
    assert x == [(n, pytest.approx(weighted)) for n in (1, 2)]
    weighted = (0 * 1 + 1 * 2 + 2 * 3) / 6
    assert history.losses_distributed == [(n, pytest.approx(weighted)) for n in (1, 2)]


def test_a_server_fn_run_is_kept_and_resumed(tmp_path):
    whole = served(2)
    served(1, checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointError, match="resume"):
        served(2, checkpoint_dir=tmp_path)
    resumed = served(2, checkpoint_dir=tmp_path, resume=True)
    assert same_bits(resumed.result.arrays, whole.result.arrays)


def test_a_round_goes_on_with_the_config_that_it_began_with(tmp_path):
    config = {"lr": 0.1, "to": float("inf"), "mask": b"a"}

    def resumed(app=None, **changed):
        own = {"checkpoint_dir": tmp_path, "resume": True}
        own["on_fit_config_fn"] = lambda server_round: config | changed
        return served(1, app, **own).result

    with pytest.raises(KeyboardInterrupt):
        resumed(killing_app(1, 3))
    with pytest.raises(CheckpointError, match=r"began with lr=0.1 .* now it is 0.2"):
        resumed(lr=0.2)
    assert len(resumed().uploads) == 3


def test_what_has_no_counterpart_is_refused():
    from flwr.server import Server as FlowersServer
    from flwr.server.strategy import FedAvg as OlderFedAvg

    model = tiny_model()
    for other in (OlderFedAvg, FedFish(), FedAvg):
        with pytest.raises(ConfigurationError, match="as_legacy takes a class"):
            as_legacy(other, model=model)
    with pytest.raises(ConfigurationError, match=r"TCT.* score its TCTModel"):
        as_legacy(TCT, model=model)
    with pytest.raises(TypeError, match="fraction_fti"):
        as_legacy(FedFish, model=model, fraction_fti=0.5)
    with pytest.raises(ConfigurationError, match="FedAvg must be from as_legacy"):
        run(ServerAppComponents(strategy=OlderFedAvg()))
    theirs = FlowersServer(
        client_manager=SimpleClientManager(), strategy=as_legacy(FedFish, model=model)
    )
    with pytest.raises(ConfigurationError, match="must derive from flwr_fisher"):
        run(ServerAppComponents(server=theirs))
