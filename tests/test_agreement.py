"""Clients that train other parameters than the rest are named before they train."""

import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from virtual import app_by_partition

from flwr_fisher.client import (
    ClientApp,
    FisherClient,
    LocalSGD,
    check_fisher,
    fisher_arrays,
    identify,
)
from flwr_fisher.curvature.estimate.likelihood import likelihood_of
from flwr_fisher.errors import RoundError, WireError
from flwr_fisher.params import shared_state
from flwr_fisher.secure import SecureSums, SecureSumsMod
from flwr_fisher.strategies import (
    FAGH,
    FedAvg,
    FedFish,
    FedFisherOneShot,
    Refinement,
    Waiting,
)
from flwr_fisher.strategies.baselines import AFL, Scaffold
from flwr_fisher.strategies.tct import TCT
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire.options import split_not_sent

MOST = ("categorical",) * 2
one_shot = partial(FedFisherOneShot, refine=None, fraction_evaluate=0.0)


def model(frozen=()):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    return net


def examples():
    return TensorDataset(torch.randn(8, 3), torch.randint(2, (8,)))


def app_of(make, trained, likelihoods=("categorical",), data=None):
    """Return clients with a model for each partition; `trained` notes who trains.

    They have these likelihoods in turn.
    """
    data = data or examples()

    def noting(partition):
        class Noted(LocalSGD):
            def __call__(self, *args, **options):
                trained.append(partition)
                return super().__call__(*args, **options)

        loader = DataLoader(data, batch_size=4)
        own = likelihoods[partition % len(likelihoods)]
        return FisherClient(make(partition), loader, likelihood=own, train_fn=Noted())

    return app_by_partition(noting)


def grid_of(frozen, count, trained, kind=LocalGrid):
    """Return clients of which some freeze parameters."""
    app = app_of(lambda partition: model(frozen.get(partition, ())), trained)
    return kind(app, count)


def arrays(tensors):
    return ArrayRecord({name: value.clone() for name, value in tensors.items()})


@pytest.mark.parametrize("make", [FedFisherOneShot, FedFish])
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
    strategy = one_shot(min_train_nodes=3)
    with pytest.raises(RoundError) as caught:
        strategy.start(grid, arrays(model().state_dict()), num_rounds=1)
    assert trained == []
    assert "2 usable replies are possible, but min_train_nodes=3" in str(caught.value)
    assert re.search(
        r"partition-1: node \d+: it trains '0.weight', which most freeze",
        str(caught.value),
    )
    assert "did not reply" not in str(caught.value)


# What labels are


class Softmax(type(likelihood_of("categorical"))):
    """A likelihood of a user's own."""


@pytest.mark.parametrize(
    ("make", "odd"),
    [
        (FedFisherOneShot, "bernoulli"),
        (FedFisherOneShot, Softmax()),
        (FAGH, "gaussian"),
        (partial(FedAvg, refine=Refinement()), "bernoulli"),
    ],
)
def test_who_has_another_kind_of_labels_is_named_before_it_trains(make, odd, caplog):
    trained = []
    app = app_of(lambda partition: model(), trained, ("categorical", odd, *MOST))
    strategy = make(fraction_evaluate=0.0)
    result = strategy.start(LocalGrid(app, 4), arrays(shared_state(model())))
    assert len(result.uploads) == 3
    assert 1 not in trained
    name = odd if isinstance(odd, str) else "Softmax"
    said = f"it has likelihood='{name}', and most have 'categorical'"
    assert caplog.text.count(said) == 1


def folders(classes, transform=None):
    """Return a data set that knows its classes, as torchvision's ImageFolder does."""
    own = examples()
    own.classes, own.target_transform = classes, transform
    return own


def table(classes):
    """Return one that has features, as Hugging Face's do."""
    own = examples()
    own.features = {"image": object(), "label": SimpleNamespace(names=classes)}
    return own


def tagged(classes):
    """Return one whose features are lists of classes, as of tagged words."""
    own = examples()
    own.features = {"tags": SimpleNamespace(feature=SimpleNamespace(names=classes))}
    return own


REFUSED = ["folders", "subset", "table", "tagged", "bernoulli"]


@pytest.mark.parametrize("kind", [*REFUSED, "renumbered", "none", "gaussian"])
def test_classes_have_the_same_numbers_on_all_clients(kind, caplog):
    """A folder for each class gives other numbers where a class is missing."""

    def client_of(partition):
        lacks = partition == 1
        classes = ["cat", "dog"] if lacks else ["ant", "cat", "dog"]
        own = {
            "folders": lambda: folders(classes),
            "subset": lambda: Subset(folders(classes), range(8)),
            "table": lambda: table(classes),
            "tagged": lambda: tagged(classes),
            **dict.fromkeys(["gaussian", "bernoulli"], lambda: table(classes)),
            "renumbered": lambda: folders(classes, lambda label: label),
            "none": lambda: folders(None) if lacks else folders(classes),
        }[kind]()
        if kind in ("gaussian", "bernoulli"):  # numbers, and a yes or no for each class
            x, y = own.tensors
            own.tensors = x, torch.stack([y, y], -1).float()
            train = LocalSGD(loss_fn=nn.MSELoss())
            loader = DataLoader(own, 4)
            return FisherClient(model(), loader, train_fn=train, likelihood=kind)
        return FisherClient(model(), DataLoader(own, 4))

    grid, strategy = LocalGrid(app_by_partition(client_of), 4), FedFisherOneShot()
    result = strategy.start(grid, arrays(shared_state(model())))
    refused = kind in REFUSED
    assert len(result.uploads) == 4 - refused
    said = "its classes cat, dog, and those of most ant, cat, dog: number them"
    assert caplog.text.count(said) == refused


def class_lists(partition):
    """Return a client; that of partition 1 lacks a class, and says so."""
    classes = ["cat", "dog"] if partition == 1 else ["ant", "cat", "dog"]
    loader = DataLoader(folders(classes), 4)
    score = {"loss": float(partition == 1), "num-examples": 8}
    own = {"train_fn": LocalSGD(momentum=0), "evaluate_fn": lambda *_: score}
    return FisherClient(model(), loader, loader, **own)


WINDOW = {"waiting": Waiting(window=60, enough_replies=4)}


@pytest.mark.parametrize(
    "make",
    [
        partial(FedFisherOneShot, refine=None, **WINDOW),
        partial(AFL, **WINDOW),
        partial(FedAvg, **WINDOW),
        FedAvg,
        Scaffold,
        partial(TCT, stage1_rounds=1, num_features=5, local_steps=1),
    ],
)
def test_classes_have_the_same_numbers_for_every_strategy(make, caplog):
    grid, strategy = LocalGrid(app_by_partition(class_lists), 4), make()
    result = strategy.start(grid, arrays(shared_state(model())), num_rounds=3)
    assert 1 not in clients_of(result)
    assert re.search("partition-1: .*its data set names its classes", caplog.text)
    scores = result.evaluate_metrics_clientapp.values()
    assert [score["loss"] for score in scores] == [0.0] * 3


@pytest.mark.parametrize("slow", [False, True])
def test_who_is_left_out_does_not_evaluate_after_a_restart_either(
    slow, clock, tmp_path
):
    def ends(server_round, arrays):
        if server_round and not again:
            raise KeyboardInterrupt

    def go_on(**options):
        grid = (Slow if slow else LocalGrid)(app_by_partition(class_lists), 4)
        own = {"evaluate_fn": ends, "checkpoint_dir": tmp_path, **options}
        return FedAvg().start(grid, arrays(shared_state(model())), **own)

    again = False
    with pytest.raises(KeyboardInterrupt):
        go_on()
    again = True
    assert go_on(resume=True).evaluate_metrics_clientapp[1]["loss"] == 0


class Slow(LocalGrid):
    """Partition 1's answers to queries never come."""

    def push_messages(self, messages):
        ids = list(super().push_messages(messages))
        for id_ in ids:
            message = self._waiting[id_]
            odd = self.nodes[message.metadata.dst_node_id] == 1
            if odd and "query" in str(message.content):
                del self._waiting[id_]
        return ids


def test_who_says_its_classes_too_late_is_left_out_by_its_upload(clock, caplog):
    """Its query was not waited for, and nobody looked at it again."""
    grid = Slow(app_by_partition(class_lists), 4)
    result = FedFisherOneShot(refine=None).start(grid, arrays(shared_state(model())))
    assert clients_of(result) == [0, 2, 3]
    assert result.evaluate_metrics_clientapp[1]["loss"] == 0  # the odd one's is 1
    assert "its data set names its classes otherwise" in caplog.text


def test_who_was_left_out_is_left_out_after_a_restart(tmp_path):
    trained, kept = [], {"checkpoint_dir": tmp_path, "resume": True}

    def start(app):
        strategy = one_shot(min_train_nodes=2)
        return strategy.start(LocalGrid(app, 4), arrays(shared_state(model())), **kept)

    class Dies(list):
        def append(self, partition):
            if len(self) == 2:
                raise KeyboardInterrupt
            super().append(partition)

    likelihoods = ("categorical", "gaussian", *MOST)
    with pytest.raises(KeyboardInterrupt):
        start(app_of(lambda partition: model(), Dies(), likelihoods))
    result = start(app_of(lambda partition: model(), trained, likelihoods))
    assert len(result.uploads) == 3
    assert 1 not in trained


# What is frozen and never sent


def on_a_base(seed):
    """A trained head on a frozen layer whose values are of a seed."""
    torch.manual_seed(seed)
    base = nn.Linear(3, 4).requires_grad_(False)
    torch.manual_seed(0)
    return nn.Sequential(base, nn.Tanh(), nn.Linear(4, 2))


OTHER_BASE = re.compile(
    r"partition-1: node \d+: its frozen '0.bias', '0.weight' differ from those of "
    "most: load the same pre-trained parameters on every client"
)


@pytest.mark.parametrize("make", [FedFisherOneShot, FedFish, AFL])
def test_who_has_another_frozen_base_is_named_before_it_trains(make, caplog):
    trained = []
    app = app_of(lambda partition: on_a_base(int(partition == 1)), trained)
    start = arrays(shared_state(on_a_base(0)))
    assert set(start) == {"2.weight", "2.bias"}
    assert len(make(fraction_evaluate=0.0).start(LocalGrid(app, 3), start).uploads) == 2
    assert 1 not in trained
    assert len(OTHER_BASE.findall(caplog.text)) == 1
    strategy = make(fraction_evaluate=0.0, min_train_nodes=3)
    with pytest.raises(RoundError, match=OTHER_BASE):
        strategy.start(LocalGrid(app, 3), start)


@pytest.mark.parametrize("make", [FedFisherOneShot, FedAvg])
def test_who_has_another_frozen_base_has_no_part_in_the_head(make):
    """A head asks clients that did not train, too: all features were summed up."""
    app = app_of(lambda partition: on_a_base(int(partition == 0)), [])
    head = Refinement(head=True)
    strategy = make(fraction_train=0.5, fraction_evaluate=0.0, refine=head)
    result = strategy.start(LocalGrid(app, 6), arrays(shared_state(on_a_base(0))))
    uploads = result.exchange_uploads["head"]
    assert [upload.number for upload in uploads] == [1, 2, 3, 4, 5]


def test_frozen_parameters_that_the_server_sends_may_have_been_others():
    trained = []
    app = app_of(on_a_base, trained)
    strategy = one_shot()
    start = arrays(on_a_base(0).state_dict())
    assert len(strategy.start(LocalGrid(app, 3), start).uploads) == 3
    assert sorted(trained) == [0, 1, 2]


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
    start = arrays(shared_state(Replaced(0)))
    assert len(one_shot().start(LocalGrid(app_of(Replaced, []), 3), start).uploads) == 3


class Adapter(nn.Module):
    """With PEFT's names."""

    def __init__(self, freeze):
        super().__init__()
        layer, A, B = nn.Linear(3, 2), nn.Linear(3, 1, bias=False), nn.Linear(1, 2)
        self.layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": A.requires_grad_(not freeze)})
        self.lora_B = nn.ModuleDict({"default": B})

    def forward(self, x):
        return self.layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("freeze", [False, True])
def test_that_factors_of_a_product_are_merged_apart_is_told_once(freeze, caplog):
    def make(partition):
        torch.manual_seed(0)
        return Adapter(freeze)

    start = arrays(shared_state(make(0)))
    one_shot().start(LocalGrid(app_of(make, []), 3), start, num_rounds=2)
    told = [m for m in caplog.messages if "both factors of adapters" in m]
    assert len(told) == (not freeze)
    if told:
        assert "'lora_A.default.weight' and its lora_B" in told[0]


def plain_app(make, tells, mods=(), likelihoods=("categorical",)):
    """Return an app with functions of its own; `tells`: identify is given the model."""
    app = ClientApp(mods=[*mods])

    def own(context):
        return make(int(context.node_config["partition-id"]))

    if tells:

        @app.query()
        def query(message, context):
            return identify(message, context, own(context))

    @app.train()
    def train(message, context):
        data = TensorDataset(torch.randn(8, 3), torch.zeros(8).long())
        kind = likelihoods[int(context.node_config["partition-id"]) % len(likelihoods)]
        given = context, own(context), DataLoader(data)
        check_fisher(message, *given, likelihood=kind)
        arrays = fisher_arrays(message, *given, likelihood=kind)
        metrics = MetricRecord({"num-examples": 8})
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        return Message(content, reply_to=message)

    return app


OTHER_FROZEN = re.compile(
    r"partition-\d: (node \d+: )?'frozen': its frozen parameters, .* "
    "differ from those of (most|others): load the same pre-trained"
)
PLAIN = {
    "kfac": lambda: one_shot(min_train_nodes=3),
    "sums": lambda: one_shot(structure="diagonal", aggregate="sums", min_train_nodes=3),
    "fedfish": lambda: FedFish(fraction_evaluate=0.0, min_train_nodes=3),
    "secure": lambda: FedFish(
        secure=SecureSums(), fraction_evaluate=0.0, min_train_nodes=3
    ),
}


def clients_of(result):
    first = result.uploads[0]
    return sorted(first.members or [upload.number for upload in result.uploads])


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_identify_finds_other_frozen_values_with_the_upload(
    name, tmp_path, caplog
):
    """They were merged without a word."""
    mods = [SecureSumsMod(state_dir=tmp_path)] if name == "secure" else []
    start = arrays(shared_state(on_a_base(0)))
    alike = plain_app(lambda partition: on_a_base(0), False, mods)
    assert len(clients_of(PLAIN[name]().start(LocalGrid(alike, 4), start))) == 4
    app = plain_app(lambda partition: on_a_base(int(partition == 1)), False, mods)
    assert clients_of(PLAIN[name]().start(LocalGrid(app, 4), start)) == [0, 2, 3]
    assert "partition-1" in OTHER_FROZEN.search(caplog.text)[0]


def test_where_no_two_freeze_the_same_nobody_takes_part():
    start = arrays(shared_state(on_a_base(0)))
    strategy = one_shot(min_train_nodes=1)
    for app in (plain_app(on_a_base, False), app_of(on_a_base, [])):
        with pytest.raises(RoundError, match="0 usable replies") as caught:
            strategy.start(LocalGrid(app, 3), start)
        assert "those of others: load the same" in str(caught.value)
        assert all(f"partition-{k}" in str(caught.value) for k in range(3))


@pytest.mark.parametrize("kind", ["plain", "FisherClient", "FedAvg"])
def test_clients_that_come_in_a_window_are_compared_by_their_uploads(kind, caplog):
    """Nobody is asked what it freezes before it trains."""

    def make(partition):
        return on_a_base(int(partition == 1))

    app = plain_app(make, tells=True) if kind == "plain" else app_of(make, [])
    window = Waiting(window=60, enough_replies=3)
    method = FedAvg if kind == "FedAvg" else FedFisherOneShot
    refine = Refinement(head=True)  # FedAvg compares who takes part in it
    strategy = method(fraction_evaluate=0.0, waiting=window, refine=refine)
    start = arrays(shared_state(on_a_base(0)))
    assert len(strategy.start(LocalGrid(app, 3), start).uploads) == 2
    assert "partition-1" in OTHER_FROZEN.search(caplog.text)[0]


def test_what_an_upload_says_is_frozen_outlives_its_server(tmp_path):
    seen = []

    def make(partition):
        seen.append(partition)
        return on_a_base(int(partition == 1))

    start = arrays(shared_state(on_a_base(0)))
    grid = LocalGrid(plain_app(make, tells=False), 4)
    counts = []
    for _ in range(2):
        strategy = one_shot(min_train_nodes=4)
        with pytest.raises(RoundError, match=OTHER_FROZEN):
            strategy.start(grid, start, checkpoint_dir=tmp_path, resume=bool(counts))
        counts.append(len(seen))
    assert counts[1] - counts[0] <= 4  # who they are is asked once more


@pytest.mark.parametrize(
    ("change", "method"),
    [
        ("frozen parameters, which", FedFisherOneShot),
        ("likelihood differs", FedFisherOneShot),
        ("data set names its classes", FedFisherOneShot),
        ("data set names its classes", FedAvg),
    ],
)
def test_uploads_on_disk_are_compared_with_those_that_come_later(
    change, method, tmp_path, caplog
):
    """Clients that are asked in the second life only were not compared with them."""
    start, trained = arrays(shared_state(on_a_base(0))), []
    lives = (
        app_of(lambda partition: on_a_base(0), trained, data=folders(["cat", "dog"])),
        app_of(
            lambda partition: on_a_base(int("frozen" in change)),
            [],
            [Softmax() if "likelihood" in change else "categorical"],
            folders(["dog", "cat"] if "classes" in change else ["cat", "dog"]),
        ),
    )

    class Dies(LocalGrid):
        def pull_messages(self, ids):
            if len(trained) == 3:
                raise KeyboardInterrupt
            return super().pull_messages(ids)

    def go_on(grid, **options):
        strategy = method(fraction_evaluate=0.0)
        return strategy.start(grid, start, checkpoint_dir=tmp_path, **options)

    with pytest.raises(KeyboardInterrupt):
        go_on(Dies(lives[0], 4))
    assert clients_of(go_on(LocalGrid(lives[1], 4), resume=True)) == sorted(trained)
    assert f"its {change}" in caplog.text


@pytest.mark.parametrize("method", [FedFisherOneShot, FedAvg])
@pytest.mark.parametrize("kind", ["plain", "FisherClient"])
def test_likelihoods_are_compared_where_nobody_is_asked(kind, method, caplog):
    """Clients of another kind were merged without a word."""
    kinds = ["categorical", Softmax(), "categorical"]

    def make(partition):
        torch.manual_seed(0)
        return nn.Linear(3, 2)

    window = Waiting(window=60, enough_replies=3)
    strategy = method(fraction_evaluate=0.0, waiting=window)
    app = (
        plain_app(make, True, likelihoods=kinds)
        if kind == "plain"
        else app_of(make, [], kinds)
    )
    result = strategy.start(LocalGrid(app, 3), arrays(shared_state(make(0))))
    assert clients_of(result) == [0, 2]
    assert "partition-1" in caplog.text
    assert "its likelihood differs from that of most" in caplog.text


def test_a_digest_is_any_few_bytes():
    few, many = (np.frombuffer(b"1" * n, np.uint8) for n in (32, 5000))
    for sent, digest in ((few, "1" * 32), (np.zeros(2), "\0" * 16)):
        record = ArrayRecord({"w": Array(few), "frozen/digest": Array(sent)})
        arrays, read = split_not_sent(record)
        assert (list(arrays), read) == (["w"], digest)
    with pytest.raises(WireError, match="frozen/digest"):
        split_not_sent(ArrayRecord({"frozen/digest": Array(many)}))
