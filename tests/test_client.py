import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from devices import ACCELERATOR
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import (
    CLASSES,
    FEATURES,
    ask,
    metrics_of,
    same_bits,
    tensors_of,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import ClientLimits, FisherClient, LocalSGD, score
from flwr_fisher.curvature import fisher
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    DataError,
    UnknownNameError,
)
from flwr_fisher.params import shared_state
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import PREFIX, FisherUpload, arrays_to_tensors, tensors_to_arrays

CPU = torch.device("cpu")
KFAC = {"structure": "kfac"}


def records(reply):
    return tuple(reply.content.array_records.values())


def random_client(**options):
    """A client whose training draws from torch's, NumPy's and Python's generators."""
    model = nn.Sequential(
        nn.Linear(FEATURES, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(0.5),
        nn.Linear(4, CLASSES),
    )

    def train(model, loader, device, config):
        metrics = LocalSGD()(model, loader, device, config)
        drawn = {"numpy": float(np.random.rand()), "python": random.random()}  # noqa: NPY002
        return {**metrics, **drawn}

    loader = DataLoader(tiny_data(0), batch_size=4, shuffle=True)
    return FisherClient(model, loader, train_fn=train, device="cpu", **options)


# The reply


def test_the_reply_has_one_array_record_and_one_metric_record():
    for config in ({}, KFAC):
        reply = ask(tiny_client(3), config=config)
        assert len(reply.content.array_records) == 1
        assert len(reply.content.metric_records) == 1
        assert not reply.content.config_records
        metrics = metrics_of(reply)
        assert metrics["num-examples"] == len(tiny_data(3)) == 14
        assert isinstance(metrics["num-examples"], int)
        assert metrics["train_loss"] > 0


def test_without_a_structure_the_reply_is_an_ordinary_one():
    arrays = tiny_arrays()
    (record,) = records(ask(tiny_client(), arrays))
    assert list(record) == list(arrays)
    assert not same_bits(record, arrays)


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_with_a_structure_the_fisher_of_the_trained_model_is_added(structure):
    client = tiny_client()
    plain = tensors_of(ask(tiny_client()))
    reply = ask(client, config={"structure": structure, "expectation": "exact"})
    like = arrays_to_tensors(tiny_arrays())
    upload = FisherUpload.from_arrays(records(reply)[0], like)
    assert all(torch.equal(v, plain[k]) for k, v in upload.params.items())
    model = tiny_model()
    model.load_state_dict(upload.params)
    expected = fisher(model, client.problem.trainloader, structure=structure)
    assert torch.equal(upload.curvature.to_dense(), expected.to_dense())


@pytest.mark.parametrize(
    ("asked", "cap", "taken"),
    [(None, None, None), (3, None, 3), (None, 4, 4), (3, 4, 3), (5, 4, 4)],
)
def test_the_fisher_is_limited_as_server_and_client_want(
    monkeypatch, asked, cap, taken
):
    heard = {}

    def told(*args, **options):
        heard.update(options)
        return fisher(*args, **options)

    monkeypatch.setattr("flwr_fisher.client.jobs.train.fisher", told)
    limits = {"max-passes": 2, "max-positions": 3}
    limits |= {} if asked is None else {"examples": asked}
    ask(tiny_client(limits=ClientLimits(max_examples=cap)), config=KFAC | limits)
    options = heard["options"]
    assert (options.examples, heard["num_examples"]) == (taken, 8)
    assert (options.max_passes, options.max_positions) == (2, 3)


def test_the_reply_keeps_the_servers_order_of_keys():
    arrays = tiny_arrays()
    turned = ArrayRecord({key: arrays[key] for key in reversed(list(arrays))})
    (record,) = records(ask(tiny_client(), turned, KFAC))
    assert [key for key in record if not key.startswith(PREFIX)] == list(turned)


def test_all_examples_count_if_the_loop_reads_them_by_itself():
    """Also where its Fisher is of some of them."""

    def loop(model, loader, device, config):
        return LocalSGD(lr=0.1)(model, DataLoader(loader.dataset, 3), device, config)

    model, data = nn.Linear(FEATURES, CLASSES), tiny_data(2)
    client = FisherClient(model, DataLoader(data, 4), train_fn=loop, device="cpu")
    options = {"structure": "diagonal", "examples": 4}
    reply = ask(client, ArrayRecord(shared_state(model)), options)
    assert metrics_of(reply)["num-examples"] == len(data)


def test_a_loader_without_a_dataset_is_counted():
    batches = [(torch.randn(4, FEATURES), torch.arange(4) % CLASSES)] * 2
    client = FisherClient(tiny_model(), batches, device="cpu")
    assert metrics_of(ask(client))["num-examples"] == 8


# Randomness


def test_the_same_seed_round_and_partition_give_the_same_reply_bit_for_bit():
    client = random_client()
    arrays = ArrayRecord(shared_state(client.problem.model))

    def reply(partition=1, **config):
        told = {"seed": 3, "server-round": 2, **config, **KFAC}
        return ask(client, arrays, told, partition=partition)

    torch.manual_seed(0)
    first = reply()
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    again = reply()
    assert same_bits(*records(first), *records(again))
    assert metrics_of(first) == metrics_of(again)
    for other in [reply(2), reply(seed=4), reply(**{"server-round": 3}), reply(None)]:
        assert not same_bits(*records(first), *records(other))
        assert metrics_of(first)["numpy"] != metrics_of(other)["numpy"]
        assert metrics_of(first)["python"] != metrics_of(other)["python"]


def broken(*args):
    torch.rand(3)
    np.random.rand()  # noqa: NPY002
    random.random()
    raise RuntimeError("no")


@pytest.mark.parametrize("kind", ["train", "evaluate", "broken"])
def test_the_global_generators_are_left_as_they_were(kind):
    client = random_client(valloader=DataLoader(tiny_data(1), batch_size=4))
    arrays = ArrayRecord(shared_state(client.problem.model))
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    if kind == "broken":
        with pytest.raises(RuntimeError, match="no"):
            ask(tiny_client(train_fn=broken))
    else:
        ask(client, arrays, KFAC, kind=kind)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert random.getstate() == before[2]


# Evaluation


def test_evaluate_scores_the_servers_arrays():
    reply = ask(tiny_client(4), tiny_arrays(7), kind="evaluate")
    assert not reply.content.array_records
    model = tiny_model(7).eval()
    x, y = tiny_data(4).tensors
    with torch.no_grad():
        logits = model(x)
    metrics = metrics_of(reply)
    assert set(metrics) == {"num-examples", "loss", "accuracy"}
    assert metrics["num-examples"] == 16
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(logits, y)))
    assert metrics["accuracy"] == float((logits.argmax(1) == y).double().mean())


def test_evaluate_uses_the_loss_it_was_given_and_changes_nothing():
    client = tiny_client(loss_fn=lambda output, labels: torch.tensor(2.5))
    client.problem.model.train()
    assert metrics_of(ask(client, kind="evaluate"))["loss"] == 2.5
    assert client.problem.model.training
    sent = arrays_to_tensors(tiny_arrays())
    state = client.problem.model.state_dict()
    assert all(torch.equal(value, sent[key]) for key, value in state.items())


def test_without_examples_there_is_nothing_to_score_or_to_train_on():
    client = FisherClient(tiny_model(), DataLoader(tiny_data(0)), device="cpu")
    with pytest.raises(ClientError, match=r"no valloader.*fraction_evaluate=0\.0"):
        ask(client, kind="evaluate")
    with pytest.raises(DataError, match="no examples"):
        score(tiny_model(), [], CPU, F.cross_entropy)
    with pytest.raises(DataError, match="training loader has no examples"):
        LocalSGD()(tiny_model(), [], CPU, {})
    empty = DataLoader(TensorDataset(torch.zeros(0, FEATURES), torch.zeros(0).long()))
    for loader in (empty, []):
        client = FisherClient(tiny_model(), loader, device="cpu")
        with pytest.raises(DataError, match="training loader has no examples"):
            ask(client, partition=6)
        with pytest.raises(DataError, match=r"^this node has no"):
            client.problem.count_examples(2**62)  # a node without a partition-id


# What does not fit


def sent(**changes):
    tensors = arrays_to_tensors(tiny_arrays())
    for key, value in changes.items():
        if value is None:
            del tensors[key.replace("_", ".", 1)]
        else:
            tensors[key.replace("_", ".", 1)] = value
    return tensors_to_arrays(tensors)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("arrays", "names"),
    [
        (sent(**{"0_weight": torch.ones(3, 4)}), ["'0.weight'", "(3, 4)", "(4, 3)"]),
        (sent(**{"3_bias": torch.ones(1)}), ["'3.bias'", "(1,)", "(3,)"]),
        (
            sent(**{"7_weight": torch.ones(2)}),
            ["'7.weight'", "no such entry", "another app"],
        ),
        (sent(**{"0_weight": None, "3_bias": None}), ["'3.bias', '0.weight'"]),
        (ArrayRecord(), ["0.weight", "shared_state"]),
    ],
    ids=["transposed", "broadcastable", "unknown", "lacking", "empty"],
)
def test_arrays_that_do_not_fit_are_refused_by_name(kind, arrays, names):
    client = tiny_client()
    before = {k: v.clone() for k, v in client.problem.model.state_dict().items()}
    with pytest.raises(ClientError) as caught:
        ask(client, arrays, kind=kind)
    assert all(name in str(caught.value) for name in names)
    after = client.problem.model.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items())


def test_two_array_records_are_refused():
    message = Message(RecordDict({"a": tiny_arrays(), "b": tiny_arrays()}), 1, "train")
    with pytest.raises(ClientError, match="have one ArrayRecord, but this one has 2"):
        tiny_client().fit(message, Context(1, 1, {}, RecordDict(), {}))


def test_buffers_may_stay_with_the_client():
    named = dict(tiny_model().named_parameters())
    arrays = tensors_to_arrays(named)
    client = tiny_client()
    (record,) = records(ask(client, arrays))
    assert list(record) == list(named)
    assert client.problem.model.get_buffer("1.num_batches_tracked") == 2


def weighs(told):
    return tiny_client(train_fn=lambda *_: {"train_loss": 1.0, "num-examples": told})


@pytest.mark.parametrize("told", [float("nan"), 0, "many"])
def test_a_weight_that_is_none_is_named(told):
    with pytest.raises(ClientError, match="train_fn returned 'num-examples': "):
        ask(weighs(told), config=KFAC)


@pytest.mark.parametrize("job", ["train", "diagonal-sums"])
def test_a_weight_need_be_no_integer(job):
    reply = ask(weighs(0.5), config={"structure": "diagonal", "job": job})
    assert metrics_of(reply)["num-examples"] == 0.5


def test_a_model_without_trainable_parameters_is_refused():
    client = tiny_client()
    client.problem.model.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        ask(client)


@pytest.mark.parametrize(
    ("config", "error", "name"),
    [
        ({"structure": "kfca"}, UnknownNameError, "'kfca'; known: diagonal, kfac"),
        ({**KFAC, "expectation": "guess"}, UnknownNameError, "expectation 'guess'"),
        (
            {"job": "fedfish", "fisher-source": "moon"},
            UnknownNameError,
            "source 'moon'",
        ),
        ({"job": "fedfish", "power": 1.5}, ConfigurationError, "power"),
        ({**KFAC, "max-passes": 1.5}, ConfigurationError, "max_passes"),
    ],
)
def test_an_option_that_is_none_is_refused_before_training(config, error, name):
    with pytest.raises(error, match=name):
        ask(tiny_client(train_fn=broken), config=config)


# Frozen parts


def frozen_client():
    client = tiny_client()
    client.problem.model[0].requires_grad_(False)
    return client


def test_a_frozen_backbone_neither_travels_nor_changes():
    client = frozen_client()
    before = {k: v.clone() for k, v in client.problem.model[0].state_dict().items()}
    arrays = ArrayRecord(shared_state(client.problem.model))
    assert not [key for key in arrays if key.startswith("0.")]
    (record,) = records(ask(client, arrays, KFAC))
    assert not [key for key in record if "0.weight" in key or "0.bias" in key]
    assert {k for k in record if not k.startswith(PREFIX)} == set(arrays)
    upload = FisherUpload.from_arrays(record, arrays_to_tensors(arrays))
    assert set(upload.curvature.shapes) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    for key, value in client.problem.model[0].state_dict().items():
        assert torch.equal(value, before[key])


def test_frozen_parameters_that_the_server_sends_are_loaded_and_returned():
    client = frozen_client()
    arrays = tiny_arrays(3)
    (record,) = records(ask(client, arrays, KFAC))
    assert record["0.weight"].data == arrays["0.weight"].data
    assert record["3.weight"].data != arrays["3.weight"].data
    assert torch.equal(client.problem.model[0].weight, tiny_model(3)[0].weight)


# The train function


def test_a_custom_train_fn_gets_model_loader_device_and_config():
    seen = {}

    def train(model, loader, device, config):
        seen.update(model=model, loader=loader, device=device, config=dict(config))
        with torch.no_grad():
            model.get_parameter("3.bias").fill_(7.0)
        return {"mine": 1.5}

    client = tiny_client(train_fn=train)
    reply = ask(client, config={"lr": 0.3, "note": "hello", **KFAC})
    assert seen["model"] is client.problem.model
    assert seen["loader"] is client.problem.trainloader
    assert seen["device"] == CPU
    assert seen["config"] == {"lr": 0.3, "note": "hello"}
    assert metrics_of(reply)["mine"] == 1.5
    assert torch.equal(tensors_of(reply)["3.bias"], torch.full((3,), 7.0))


def test_the_device_is_the_one_asked_for():
    client = tiny_client(device="cpu")
    assert client.problem.device == CPU
    assert {p.device for p in client.problem.model.parameters()} == {CPU}
    default = FisherClient(tiny_model(), DataLoader(tiny_data(0))).problem.device.type
    assert default == (ACCELERATOR or "cpu")


@pytest.mark.skipif(not ACCELERATOR, reason="needs an accelerator")
def test_a_gpu_client_answers_as_a_cpu_client_does():
    like = arrays_to_tensors(tiny_arrays())
    replies = [ask(tiny_client(device=d), config=KFAC) for d in ("cpu", ACCELERATOR)]
    cpu, gpu = (FisherUpload.from_arrays(*records(r), like) for r in replies)
    for key, value in cpu.params.items():
        torch.testing.assert_close(gpu.params[key], value, rtol=1e-4, atol=1e-5)
    dense = [upload.curvature.to_dense() for upload in (gpu, cpu)]
    torch.testing.assert_close(*dense, rtol=1e-3, atol=1e-5)


def slow_sgd(epochs=1, lr=0.01, momentum=0.9, decay=0.0, mu=0.0, smoothing=0.0):
    """SGD by hand, with smoothed labels and FedProx's term written out in the loss."""
    model = tiny_model().train()
    start = {k: p.detach().clone() for k, p in model.named_parameters()}
    velocity = {}
    for _ in range(epochs):
        for x, y in DataLoader(tiny_data(0), batch_size=4):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            if smoothing:
                everything = -logits.log_softmax(-1).mean()
                loss = (1 - smoothing) * loss + smoothing * everything
            if mu:
                moved = [(p - start[k]).square().sum() for k, p in named(model)]
                loss = loss + mu / 2 * torch.stack(moved).sum()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for key, p in named(model):
                    gradient = p.grad + decay * p if decay else p.grad
                    if key in velocity:
                        velocity[key].mul_(momentum).add_(gradient)
                    else:
                        velocity[key] = gradient.clone()
                    p.add_(velocity[key], alpha=-lr)
    return model.state_dict()


def named(model):
    return list(model.named_parameters())


TWO = {"epochs": 2, "lr": 0.1}
TWINS = {
    "default": ({}, {}, {}),
    "epochs": ({"epochs": 3, "lr": 0.1}, {}, {"epochs": 3, "lr": 0.1}),
    "lr-from-config": ({"lr": 0.1}, {"lr": 0.25}, {"lr": 0.25}),
    "mu": (TWO, {"proximal-mu": 0.7}, {**TWO, "mu": 0.7}),
    "decay": ({**TWO, "weight_decay": 0.05}, {}, {**TWO, "decay": 0.05}),
    "smooth": ({**TWO, "label_smoothing": 0.2}, {}, {**TWO, "smoothing": 0.2}),
}


@pytest.mark.parametrize(("options", "config", "twin"), TWINS.values(), ids=TWINS)
def test_local_sgd_is_the_loop_one_would_write(options, config, twin):
    """Bit for bit, but for terms that are in the loss here."""
    got = tensors_of(ask(tiny_client(train_fn=LocalSGD(**options)), config=config))
    expected, term = slow_sgd(**twin), twin.keys() & {"mu", "decay", "smoothing"}
    close = {"rtol": 1e-5, "atol": 1e-6} if term else {"rtol": 0, "atol": 0}
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, **close)
    if term:
        without = slow_sgd(**{k: v for k, v in twin.items() if k not in term})
        assert not torch.allclose(got["0.weight"], without["0.weight"], atol=1e-4)


def test_the_proximal_term_leaves_frozen_and_unused_parameters_alone():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "spare": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    before = model["spare"].weight.detach().clone()
    batches = [(torch.randn(4, 2), torch.arange(4) % 2)]
    LocalSGD(epochs=2)(model, batches, CPU, {"proximal-mu": 1.0})
    assert torch.equal(model["spare"].weight, before)


def test_on_epoch_hears_every_epochs_mean_loss():
    heard = []
    trainer = LocalSGD(epochs=3, on_epoch=lambda *args: heard.append(args))
    reply = ask(tiny_client(train_fn=trainer))
    assert [epoch for epoch, _ in heard] == [1, 2, 3]
    assert heard[-1][1] == metrics_of(reply)["train_loss"]
    assert len({loss for _, loss in heard}) == 3


def test_the_train_loss_is_a_mean_over_examples_not_batches():
    data = TensorDataset(torch.zeros(5, 1), torch.tensor([0, 0, 0, 0, 1]))
    client = FisherClient(
        nn.Linear(1, 2),
        DataLoader(data, batch_size=4),
        train_fn=LocalSGD(loss_fn=lambda out, y: 0 * out.sum() + y.float().mean()),
        device="cpu",
    )
    arrays = ArrayRecord(shared_state(client.problem.model))
    assert metrics_of(ask(client, arrays))["train_loss"] == pytest.approx(0.2)


def test_local_sgd_smooths_no_labels_of_another_loss():
    with pytest.raises(ConfigurationError, match=r"^label_smoothing is for the def"):
        LocalSGD(label_smoothing=0.1, loss_fn=F.mse_loss)


# The app


def test_mods_see_train_messages_only():
    seen = []

    def spy(message, context, call_next):
        seen.append(message.metadata.message_type)
        return call_next(message, context)

    grid = LocalGrid(tiny_client().as_client_app(mods=[spy]), 1)
    (node,) = grid.nodes
    content = RecordDict({"arrays": tiny_arrays(), "config": ConfigRecord()})
    kinds = ["train", "evaluate", "query"]
    replies = grid.send_and_receive([Message(content, node, k) for k in kinds])
    assert not [reply for reply in replies if reply.has_error()]
    assert seen == ["train"]
