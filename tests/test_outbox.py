"""A client's crash: what it has finished, and its last epoch, are on its disk."""

import re
import threading
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn
from torch.utils.data import DataLoader
from virtual import (
    CLASSES,
    FEATURES,
    ask,
    metrics_of,
    same_bits,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import (
    ClientLimits,
    FisherClient,
    LocalSGD,
    Reply,
    Request,
    TrainingCheckpoint,
    register_job,
)
from flwr_fisher.client.disk import ClientDisk
from flwr_fisher.client.jobs.train import TrainingJob
from flwr_fisher.client.outbox import Outbox, attributes_of
from flwr_fisher.errors import ClientError, ConfigurationError
from flwr_fisher.params import shared_state
from flwr_fisher.wire import tensors_to_arrays

CPU = torch.device("cpu")
RUN = "00ff00ff00ff00ff"
KFAC = {"structure": "kfac"}


def files(where):
    return sorted(path.name.split(".")[0] for path in where.rglob("*.safetensors"))


class Seen:
    """What trainings did; not among what their results depend on."""

    def __init__(self):
        self.trainings, self.epochs = 0, list[int]()
        self.running, self.go_on = threading.Event(), threading.Event()


SEEN = Seen()


class Counted(LocalSGD):
    """Counts how often it trains."""

    def __call__(self, *args, checkpoint=None, **kwargs):
        SEEN.trainings += 1
        return super().__call__(*args, checkpoint=checkpoint, **kwargs)


@pytest.fixture(autouse=True)
def fresh():
    SEEN.__init__()  # type: ignore[misc]


def disk_of(root, **options):
    return ClientDisk(root, "uploads", 0, "1", **options)


def client(where, **options):
    options.setdefault("train_fn", Counted(lr=0.1))
    return tiny_client(state_dir=where, **options)


def arrays_of(message):
    (record,) = message.content.array_records.values()
    return record


# What was finished


def test_a_finished_upload_is_handed_over_when_asked_again(tmp_path):
    config = {"run": RUN, "structure": "kfac", "server-round": 1}
    first = ask(client(tmp_path), config=config)
    again = ask(client(tmp_path), config=config)
    assert SEEN.trainings == 1
    assert same_bits(arrays_of(again), arrays_of(first))
    assert dict(metrics_of(again)) == dict(metrics_of(first))


def test_a_server_that_keeps_nothing_has_clients_keep_nothing(tmp_path):
    for _ in range(2):
        ask(client(tmp_path), config={"structure": "kfac"})
    assert SEEN.trainings == 2
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"server-round": 2}, {}),
        ({"run": "abc"}, {}),
        ({"lr": 0.2}, {}),
        ({"structure": "diagonal"}, {}),
        ({"seed": 4}, {}),
        ({}, {"arrays": tiny_arrays(5)}),
        ({}, {"partition": 1}),
    ],
    ids=["round", "run", "config", "option", "seed", "parameters", "client"],
)
def test_another_request_is_trained_for(tmp_path, change, options):
    config = {"run": RUN, "structure": "kfac", "server-round": 1}
    ask(client(tmp_path), config=config)
    ask(client(tmp_path), config=config | change, **options)
    assert SEEN.trainings == 2


def test_other_data_or_another_loop_are_trained_with(tmp_path):
    config = {"run": RUN, "server-round": 1}
    ask(client(tmp_path), config=config)
    ask(client(tmp_path, train_fn=Counted(lr=0.1, epochs=2)), config=config)
    ask(tiny_client(1, train_fn=Counted(lr=0.1), state_dir=tmp_path), config=config)
    assert SEEN.trainings == 3


class Layer(nn.Module):
    """With attributes of all kinds, as layers of other libraries have them."""

    def __init__(self, scale=2, shift=(0, 0), act=torch.relu, base=10.0, alpha=1):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.scaling, self.shift, self.act = {"default": scale}, list(shift), act
        self.tied = {"weight": self.weight, "twin": [nn.Linear(2, 2)]}
        self._alpha, self.training = np.float32(alpha), alpha == 1
        self.register_buffer("graph", torch.eye(2).to_sparse(), persistent=False)
        self.register_buffer("freqs", torch.tensor(1j * base), persistent=False)


def test_a_layers_own_settings_count_and_what_is_drawn_does_not():
    same = attributes_of(nn.Sequential(Layer()))
    assert attributes_of(nn.Sequential(Layer()).eval()) == same
    others = {"scale": 4}, {"shift": (0, 2)}, {"act": torch.tanh}
    others += {"base": 100.0}, {"alpha": 2}
    assert all(attributes_of(nn.Sequential(Layer(**each))) != same for each in others)


def test_a_fisher_after_a_crash_is_of_the_same_examples(tmp_path, monkeypatch):
    """The epochs are not done again, so nothing has counted the examples."""
    start = ArrayRecord(shared_state(nn.Linear(FEATURES, CLASSES)))

    def answer(where):
        own = {"train_fn": LocalSGD(lr=0.1), "device": "cpu", "state_dir": where}
        loader = DataLoader(tiny_data(0, n=600), batch_size=50, shuffle=True)
        client = FisherClient(nn.Linear(FEATURES, CLASSES), loader, **own)
        reply = ask(client, start, {"run": RUN, "examples": 40, **KFAC})
        return next(iter(reply.content.array_records.values()))

    with monkeypatch.context() as patch:
        patch.setattr(TrainingJob, "curvature", lambda *_: dies_after(1)(1, 0.0))
        with pytest.raises(KilledError):
            answer(tmp_path)
    assert same_bits(answer(tmp_path), answer(tmp_path / "whole"))


def flip(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_disk_that_is_full_costs_a_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert ask(client(blocked), config={"run": RUN, "server-round": 1}).has_content()
    assert "Cannot keep this upload" in caplog.text


def test_a_training_stays_where_its_upload_is_too_large(tmp_path, caplog):
    """Asked again, the client need not train again."""
    outbox = Outbox(disk_of(tmp_path, limit=10**5), 1, "x")
    training = TrainingCheckpoint(outbox.disk, note="x")
    training.save({"w": torch.zeros(10**5)})
    assert "Cannot save this training" in caplog.text
    training.save({"epoch": 3})
    large = ArrayRecord({"w": Array(np.zeros(10**5, np.float32))})
    outbox.keep(Reply({"num-examples": 8}, large))
    assert "Cannot keep this upload: the upload of run" in caplog.text
    assert training.load() == {"epoch": 3}
    assert TrainingCheckpoint(disk_of(tmp_path), 1, "another request").load() is None
    outbox.keep(Reply({"num-examples": 8}, tiny_arrays()))
    assert files(tmp_path) == ["upload-000001"]


@pytest.mark.parametrize("run", ["../../etc", "", 3.5, "FF"])
def test_a_run_of_no_name_is_refused(tmp_path, run):
    with pytest.raises(ConfigurationError, match="the key of a client's entry must"):
        ask(client(tmp_path), config={"run": run})


# A training under way


class KilledError(Exception):
    """Stands for the end of the process."""


def dies_after(epoch):
    def on_epoch(number, loss):
        if number == epoch:
            raise KilledError

    return on_epoch


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)
        )


LOOPS = {
    "momentum": {"lr": 0.1},
    "adam": {"optimizer": partial(torch.optim.Adam, lr=0.01)},
    "schedule": {
        "lr": 0.1,
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.3),
    },
    "proximal": {"lr": 0.1},
}


@pytest.mark.parametrize("epoch", [1, 5])
@pytest.mark.parametrize("loop", LOOPS)
def test_local_sgd_goes_on_after_its_last_finished_epoch_bit_for_bit(
    tmp_path, loop, epoch
):
    options = {"epochs": 5, **LOOPS[loop]}
    config = {"proximal-mu": 0.5} if loop == "proximal" else {}
    disk = disk_of(tmp_path)

    def train(model, checkpoint, **more):
        torch.manual_seed(7)
        sgd = LocalSGD(**options, **more)
        loader = DataLoader(tiny_data(3), batch_size=4, shuffle=True)
        return sgd(model, loader, CPU, config, checkpoint=checkpoint)

    whole, stopped, resumed = net(), net(), net()
    expected = train(whole, None)
    with pytest.raises(KilledError):
        train(stopped, TrainingCheckpoint(disk, 1, "x"), on_epoch=dies_after(epoch))
    seen = []
    metrics = train(
        resumed,
        TrainingCheckpoint(disk, 1, "x"),
        on_epoch=lambda number, loss: seen.append(number),
    )
    assert seen == list(range(epoch + 1, 6))
    assert metrics == expected
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


@register_job("train-twice")
def train_twice(problem, request):
    """Train, go half-way back, and train again, as a personal part does."""
    metrics = problem.train(request.config)
    problem.load(
        {name: value / 2 for name, value in problem.model.state_dict().items()}
    )
    second = problem.train(request.config)
    params = problem.state_like(request.params)
    both = {"first": metrics["train_loss"], "second": second["train_loss"]}
    return Reply(both, tensors_to_arrays(params))


@pytest.mark.parametrize("training", [1, 2])
def test_each_training_of_a_job_is_kept_apart(tmp_path, training):
    ends = []
    killed_at = [[], [1, 2], [1, 2, 3, 1, 2]][training]

    def on_epoch(number, loss):
        ends.append(number)
        if ends == killed_at:
            raise KilledError

    def answer(**config):
        loop = LocalSGD(lr=0.1, epochs=3, on_epoch=on_epoch)
        config |= {"job": "train-twice", "server-round": 1}
        return ask(client(tmp_path, train_fn=loop), config=config)

    with pytest.raises(KilledError):
        answer(run=RUN)
    again = answer(run=RUN)
    assert ends == [1, 2, 3, 1, 2, 3]
    assert files(tmp_path) == ["upload-000001"]
    whole = answer()
    assert same_bits(arrays_of(again), arrays_of(whole))
    assert dict(metrics_of(again)) == dict(metrics_of(whole))


@pytest.mark.parametrize("damage", ["flipped", "foreign"])
def test_a_damaged_training_starts_anew(tmp_path, damage, caplog):
    disk = disk_of(tmp_path)
    checkpoint = TrainingCheckpoint(disk, 1, "x")
    checkpoint.save({"epoch": 1})
    if damage == "flipped":
        (path,) = tmp_path.rglob("training-*.safetensors")
        flip(path)
    else:
        data = torch.arange(9).to(torch.uint8)
        disk.save("training", {"data": data}, step=1, note="x")
    assert checkpoint.load() is None
    assert re.search("which cannot be read|from its beginning", caplog.text)


def test_a_train_fn_of_ones_own_saves_itself_through_its_checkpoint(tmp_path):
    def train_fn(model, loader, device, config, *, checkpoint):
        saved = checkpoint.load() or {"epoch": 0, "model": model.state_dict()}
        model.load_state_dict(saved["model"])
        for epoch in range(saved["epoch"] + 1, 4):
            SEEN.epochs.append(epoch)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += torch.randn_like(parameter)
            checkpoint.save({"epoch": epoch, "model": model.state_dict()})
            if SEEN.epochs == [1, 2]:
                raise KilledError
        return {}

    config = {"run": RUN, "server-round": 1}
    with pytest.raises(KilledError):
        ask(client(tmp_path, train_fn=train_fn), config=config)
    reply = ask(client(tmp_path, train_fn=train_fn), config=config)
    assert SEEN.epochs == [1, 2, 3]
    SEEN.epochs = [0]
    whole = ask(client(tmp_path / "b", train_fn=train_fn), config=config)
    assert same_bits(arrays_of(reply), arrays_of(whole))


def test_the_process_that_is_left_over_is_waited_for(tmp_path):
    """Two lives of a client at the same request: one trains, the other hands over."""
    config, replies = {"run": RUN, "server-round": 1}, list[Any]()
    arrays = tiny_arrays()  # not in the threads: all draw from one generator

    def slow(model, loader, device, config):
        SEEN.trainings += 1
        SEEN.running.set()
        SEEN.go_on.wait(30)
        return {"mine": 1.0}

    def work():
        own = client(tmp_path, train_fn=slow)
        replies.append(ask(own, config=config, arrays=arrays))

    first, second = threading.Thread(target=work), threading.Thread(target=work)
    first.start()
    assert SEEN.running.wait(30)
    second.start()
    SEEN.go_on.set()
    first.join(60)
    second.join(60)
    assert [metrics_of(reply)["mine"] for reply in replies] == [1.0, 1.0]
    assert SEEN.trainings == 1


def test_the_process_that_hangs_is_not_waited_for_longer_than_the_server_waits(
    tmp_path,
):
    disk = disk_of(tmp_path)
    outbox = Outbox(disk, 1, "")
    with (
        disk.lock(),
        pytest.raises(ClientError, match=r"has held the lock.* for 0 s.*: end that"),
        outbox.locked(0.2),
    ):
        raise AssertionError("two at once")


# Which trainings are the same


def train_by(model, loader, device, config, **how):
    return {}


def train_otherwise(model, loader, device, config):
    return {}


class Loop:
    """A loop that is an object, with settings."""

    def __init__(self, epochs=1):
        self.epochs = epochs

    def __call__(self, model, loader, device, config):
        return {}

    def settings(self):
        return {"epochs": self.epochs}


class OtherLoop(Loop):
    """The same settings, and other code."""


def adam(lr):
    return LocalSGD(optimizer=partial(torch.optim.Adam, lr=lr))


TRAININGS = {
    "keywords of a partial": (partial(train_by, n=30), partial(train_by, n=1)),
    "a function": (train_by, train_otherwise),
    "settings": (Loop(30), Loop(1)),
    "a class": (Loop(), OtherLoop()),
    "options": (LocalSGD(lr=0.1), LocalSGD(lr=0.2)),
    "a loss": (LocalSGD(loss_fn=train_by), LocalSGD(loss_fn=train_otherwise)),
    "an optimiser": (adam(0.01), adam(0.02)),
}


def digest_of(one):
    problem = one.problem
    request = Request({}, options={"run": RUN})
    disk = problem.disk("uploads", 0, RUN)
    return Outbox.of(disk, request, problem.settings()).digest


@pytest.mark.parametrize("what", TRAININGS)
def test_another_training_is_told_apart_and_the_same_is_known_again(tmp_path, what):
    one, other = (client(tmp_path, train_fn=train_fn) for train_fn in TRAININGS[what])
    again = client(tmp_path, train_fn=deepcopy(TRAININGS[what][0]))
    assert digest_of(one) == digest_of(again) != digest_of(other) != ""


@pytest.mark.parametrize(
    "other",
    [
        {"likelihood": "gaussian"},
        {"loss_fn": nn.functional.nll_loss},
        {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"limits": ClientLimits(max_examples=5)},
        {"batch_fn": lambda batch: batch},
        {"num_examples": 5},
    ],
)
def test_another_client_of_the_same_data_hands_over_nothing(tmp_path, other):
    assert digest_of(client(tmp_path)) != digest_of(client(tmp_path, **other)) != ""


def test_a_loss_of_other_settings_hands_over_nothing(tmp_path):
    losses = [
        {},
        {"label_smoothing": 0.1},
        {"ignore_index": 2},
        {"weight": torch.tensor([1.0, 2.0, 3.0])},
        {"weight": torch.tensor([1.0, 2.0, 4.0])},
    ]
    made = (client(tmp_path, loss_fn=nn.CrossEntropyLoss(**own)) for own in losses * 2)
    assert len({digest_of(one) for one in made}) == len(losses)


def test_another_layer_or_a_frozen_one_makes_another_upload(tmp_path):
    tanh, slow, frozen, two, four, same = every = [client(tmp_path) for _ in range(6)]
    tanh.problem.model[2] = nn.Tanh()
    slow.problem.model[1].momentum = 0.01  # a layer of other settings
    frozen.problem.model[0].requires_grad_(False)
    for heads, one in ((2, two), (4, four)):  # which the layer's text leaves out
        one.problem.model[2] = nn.MultiheadAttention(4, heads)
    assert len({digest_of(one) for one in every}) == 6
    assert digest_of(same) == digest_of(client(tmp_path))


@pytest.mark.parametrize("tells", [{}, {"tell": "parameters"}], ids=["", "window"])
def test_another_frozen_backbone_is_trained_with(tmp_path, tells):
    """The upload and its digest belong to one backbone."""

    def replies(seed):
        one = client(tmp_path)
        one.problem.model[0].load_state_dict(tiny_model(seed)[0].state_dict())
        one.problem.model[0].requires_grad_(False)
        arrays = tensors_to_arrays(shared_state(one.problem.model))
        config = {"run": RUN, "server-round": 1, **tells, **KFAC}
        return arrays_of(ask(one, arrays, config))

    first, other, again = replies(0), replies(1), replies(1)
    assert SEEN.trainings == 2
    assert same_bits(other, again)
    assert not same_bits(first, other)
