"""Where models are, where they are left, and what is said of it."""

import copy
import io
import logging

import pytest
import torch
from devices import pretended
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import nn
from torch.utils.data import DataLoader
from virtual import (
    ask,
    fedfisher_with,
    tensors_of,
    tiny_app,
    tiny_arrays,
    tiny_data,
    tiny_model,
    travelling,
)

from flwr_fisher.client import FisherClient, check_fisher, fisher_arrays
from flwr_fisher.curvature import fisher
from flwr_fisher.devices import default_device, has_float64
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.legacy import from_numpy_client
from flwr_fisher.legacy.client import names_of, to_list
from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.params import shared_state
from flwr_fisher.randomness import generator_states, seeded, set_generator_states
from flwr_fisher.testing import LocalGrid

DEVICE = pretended.NAME
KFAC = {"structure": "kfac"}


def loader():
    return DataLoader(tiny_data(0), batch_size=4)


def kind_of(model):
    (kind,) = {p.device.type for p in model.parameters()}
    return kind


def plain_sgd(model, batches):
    """A loop that knows no device, as tutorials have it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {}


def own_loop(model, batches, device, config):
    return plain_sgd(model, batches)


def moving_loop(model, batches, device, config):
    """A loop that takes the accelerator by itself, and leaves the model there."""
    model.to(DEVICE)
    return plain_sgd(model, [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches])


class Older:
    """A NumPyClient's two methods; it names no device."""

    def __init__(self, net, device="cpu"):
        self.net, self.device = net, device

    def fit(self, parameters, config):
        assert kind_of(self.net) == self.device
        plain_sgd(
            self.net, [(x.to(self.device), y.to(self.device)) for x, y in loader()]
        )
        return to_list(self.net, names_of(self.net, "state")), 8, {}


def test_local_sgd_trains_on_the_accelerator():
    client = FisherClient(tiny_model(), loader())
    assert client.problem.device == default_device() == torch.device(DEVICE)
    tensors_of(ask(client, config=KFAC))
    assert kind_of(client.problem.model) == DEVICE


def test_an_own_loop_finds_its_model_where_it_was_and_is_told(monkeypatch, caplog):
    monkeypatch.setattr("flwr_fisher.log_lines._logged", set())
    with caplog.at_level(logging.INFO):
        client = FisherClient(tiny_model(), loader(), train_fn=own_loop)
    assert client.problem.device.type == "cpu"
    assert f"FisherClient(device='{DEVICE}" in caplog.text
    cpu = FisherClient(tiny_model(), loader(), train_fn=own_loop, device="cpu")
    got, want = (tensors_of(ask(each, config=KFAC)) for each in (client, cpu))
    assert all(torch.equal(got[name], want[name]) for name in want)
    there = FisherClient(tiny_model().to(DEVICE), loader(), train_fn=own_loop)
    assert there.problem.device.type == DEVICE


def test_a_numpy_client_that_names_no_device_trains():
    net = tiny_model()
    tensors_of(ask(from_numpy_client(Older(net), net, loader()), config=KFAC))
    assert kind_of(net) == "cpu"


def test_a_numpy_client_on_the_accelerator_is_one_on_the_cpu():
    replies = []
    for device in (DEVICE, "cpu"):
        net = tiny_model().to(device)
        client = from_numpy_client(Older(net, device), net, loader())
        replies.append(tensors_of(ask(client, config=KFAC)))
    for name, value in replies[1].items():
        torch.testing.assert_close(replies[0][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [KFAC, {"structure": "diagonal"}, {}])
def test_a_loop_that_moves_the_model_is_followed(config):
    own = FisherClient(tiny_model(), loader(), train_fn=moving_loop)
    cpu = FisherClient(tiny_model(), loader(), train_fn=own_loop, device="cpu")
    got, want = (tensors_of(ask(each, config=config)) for each in (own, cpu))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)
    assert ask(own, config=config)  # again, from where it is


def test_random_numbers_are_put_back():
    torch.manual_seed(3)
    before = torch.rand(4, device=DEVICE)
    torch.manual_seed(3)
    with seeded(5):
        first = torch.rand(4, device=DEVICE)
    assert torch.equal(torch.rand(4, device=DEVICE), before)
    with seeded(5):
        assert torch.equal(torch.rand(4, device=DEVICE), first)


def test_a_training_that_goes_on_draws_what_it_would_have_drawn():
    torch.manual_seed(3)
    file = io.BytesIO()
    torch.save(generator_states(), file)
    want = torch.rand(4, device=DEVICE)
    torch.manual_seed(4)
    file.seek(0)
    set_generator_states(torch.load(file, weights_only=True))
    assert torch.equal(torch.rand(4, device=DEVICE), want)


@pytest.fixture
def no_float64():
    with pretended.without_float64():
        yield


@pytest.mark.usefixtures("no_float64")
def test_a_device_without_float64_is_not_chosen():
    assert not has_float64(torch.device(DEVICE))
    assert default_device().type == "cpu"
    assert FisherClient(tiny_model(), loader()).problem.device.type == "cpu"
    assert fedfisher_with().device.type == "cpu"


@pytest.mark.usefixtures("no_float64")
def test_a_device_without_float64_is_refused_before_any_training():
    with pytest.raises(ConfigurationError, match=r"no float64.*device='cpu'"):
        FisherClient(tiny_model(), loader(), device=DEVICE)
    with pytest.raises(ConfigurationError, match="no float64"):
        fedfisher_with(device=DEVICE)
    model = tiny_model()
    with pytest.raises(ConfigurationError, match=r"no float64.*model\.cpu"):
        fisher(copy.deepcopy(model).to(DEVICE), [torch.ones(2, 3, device=DEVICE)])
    one = LocalPosterior(shared_state(model), fisher(model, [torch.randn(4, 3)]), 1)
    with pytest.raises(ConfigurationError, match="no float64"):
        fedfisher([one, one], device=DEVICE)


@pytest.mark.usefixtures("no_float64")
def test_a_loop_may_train_where_there_is_no_float64():
    own = FisherClient(tiny_model(), loader(), train_fn=moving_loop)
    assert own.problem.device.type == "cpu"
    for _ in range(2):
        tensors_of(ask(own, config=KFAC))
    assert kind_of(own.problem.model) == "cpu"


@pytest.mark.usefixtures("no_float64")
def test_an_app_of_ones_own_is_refused_where_there_is_no_float64():
    LocalGrid(tiny_app(), 1)  # messages need the process's identity
    config = ConfigRecord(travelling(KFAC))
    content = RecordDict({"arrays": tiny_arrays(1), "config": config})
    context = Context(1, 77, {"partition-id": 0}, RecordDict(), {})
    message, model = Message(content, 77, "train"), tiny_model().to(DEVICE)
    for function in (check_fisher, fisher_arrays):
        with pytest.raises(ConfigurationError, match=r"no float64.*model\.cpu"):
            function(message, context, model, loader())
    assert kind_of(model) == DEVICE
