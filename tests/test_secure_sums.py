"""Secure sums as strategies take them: the model of plain sums, and no summand seen."""

import copy
import json
from functools import partial

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from kinds import KINDS, of_sums
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from virtual import (
    LIFTED,
    Remembering,
    Watched,
    app_by_partition,
    close,
    quick_app,
    tiny,
    tiny_app,
    tiny_arrays,
    tiny_client,
    tiny_data,
)

from flwr_fisher.client import FisherClient, LocalSGD, identify, make_client_app
from flwr_fisher.client.disk import ClientDisk
from flwr_fisher.errors import (
    CheckpointError,
    ClientError,
    ConfigurationError,
    RoundError,
)
from flwr_fisher.secure import Participant, SecureSums, SecureSumsMod
from flwr_fisher.secure.crypto import check_signatures, signature, trusted_keys
from flwr_fisher.secure.mod import SumMemory
from flwr_fisher.secure.payload import Contribution
from flwr_fisher.secure.steps import SecureState
from flwr_fisher.server.exchange import ServerState
from flwr_fisher.strategies import (
    AFL,
    TCT,
    FedAvg,
    FedFish,
    FedFisherOneShot,
    MergeOptions,
    Policy,
    Privacy,
    Refinement,
    Scaffold,
    Waiting,
)
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire.options import split_config


def secure_app(
    folder,
    spoil=lambda message, context, stage: None,
    change=lambda reply, context, stage: None,
    says=None,
    **options,
):
    """An app that takes part in secure sums; each message finds a new process's mod.

    `spoil` may do something else, and `change` what is replied.
    """

    class Spoiling(SecureSumsMod):
        def __call__(self, message, context, call_next):
            own, stage = SecureSumsMod(state_dir=folder, **options), stage_of(message)
            reply = spoil(message, context, stage) or own(message, context, call_next)
            change(reply.content, context, stage)
            return reply

    memory = Remembering(None, lambda i: tiny(i, says if i == 1 else None))
    mods = [Spoiling(), memory.answer]
    return make_client_app(partial(client_of, says=says), mods=mods)


def client_of(context, says=None):
    """A client; partition 1 may say that it has more examples than its loader gives."""
    partition = int(context.node_config["partition-id"])
    return tiny_client(partition, num_examples=says if partition == 1 else None)


def stage_of(message):
    config = next(iter(message.content.config_records.values()))
    return str(split_config(config)[0].get("secure"))


def merged(strategy, app, clients=3, rounds=1):
    result = strategy.start(LocalGrid(app, clients), tiny_arrays(), num_rounds=rounds)
    return result.arrays.to_torch_state_dict()


def distance(a, b):
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


# One sum, or those of a merge, and none of batch norms' statistics: test_norms.
ONE_SUM = {
    "fraction_evaluate": 0.0,
    "aggregate": "sums",
    "norm_statistics": "average",
    "refine": None,
}
STRATEGIES = {
    "fedfisher": partial(FedFisherOneShot, **ONE_SUM, structure="diagonal"),
    "kfac": partial(FedFisherOneShot, **ONE_SUM, merge=MergeOptions(iterations=2)),
    **{
        name.lower(): partial(KINDS[name], fraction_evaluate=0.0)
        for name in sorted(of_sums() - {"TCT"})  # in a file of its own
    },
}


@pytest.mark.parametrize(
    ("name", "bits"), [*((name, 32) for name in STRATEGIES), ("fedfisher", 64)]
)
def test_a_secure_sum_gives_the_model_of_the_plain_one(name, bits, tmp_path):
    make, app = STRATEGIES[name], secure_app(tmp_path, says=14)
    of = {"clients": 3, "rounds": 1 + bool(make().initial_groups())}
    plain = merged(make(policy=LIFTED), app, **of)
    assert distance(plain, merged(make(secure=SecureSums(bits=bits)), app, **of)) < 1e-4


@pytest.mark.parametrize(
    "make",
    [
        AFL,
        partial(FedAvg, refine=Refinement(head=True)),
        partial(TCT, stage1_rounds=0, local_steps=5, lr=0.01),
    ],
)
def test_features_of_unlike_sizes_are_summed_exactly(make, tmp_path):
    """The rounding of 32 bits would make their second moments indefinite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 3))
    sizes = torch.logspace(-2, 2, 32)
    model[0].weight.data *= sizes[:, None]
    model[0].bias.data *= sizes
    model[2].weight.data /= sizes

    def make_client(partition):
        own = copy.deepcopy(model), DataLoader(tiny_data(partition), 8)
        none = LocalSGD(lr=1e-12)
        return FisherClient(*own, train_fn=none, device="cpu", state_dir=tmp_path)

    def arrays(**options):
        app = app_by_partition(make_client, mods=[SecureSumsMod(state_dir=tmp_path)])
        strategy = make(fraction_evaluate=0.0, **options)
        rounds = 2 if isinstance(strategy, TCT) else 1
        start = ArrayRecord(model.state_dict())
        return strategy.start(LocalGrid(app, 3), start, rounds).arrays

    plain, secure = arrays(), arrays(secure=SecureSums())
    assert close(secure, plain, 1e-4)


def test_nothing_of_a_sum_is_left_in_the_state(tmp_path):
    strategy = STRATEGIES["kfac"](secure=SecureSums())
    grid, run = LocalGrid(secure_app(tmp_path / "a"), 3), tmp_path / "run"
    result = strategy.start(grid, tiny_arrays(), checkpoint_dir=run)
    (upload,) = result.uploads
    assert upload.client == "the sum over 3 clients"
    # Of all exchanges: the keys and shares, four numbers of the model's size and more.
    assert result.upload_bytes > 10_000
    saved = load_file(run / "round-0001.safetensors")
    assert "groups/sums/run" in saved
    assert not [key for key in saved if "secure" in key]


def test_fedavg_of_anybodys_clients(tmp_path):
    """The mean of clients that know this library by the mod alone."""
    app = ClientApp()

    @app.train(mods=[SecureSumsMod(state_dir=tmp_path)])
    def train(message, context):
        arrays = message.content.array_records["arrays"]
        partition = int(context.node_config["partition-id"])
        trained = {k: v + partition for k, v in arrays.to_torch_state_dict().items()}
        metrics = MetricRecord({"num-examples": 1 + partition, "loss": 0.5})
        content = RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics})
        return Message(content, reply_to=message)

    app.query()(identify)
    result = merged(FedAvg(fraction_evaluate=0.0, secure=SecureSums()), app, clients=3)
    for name, value in tiny_arrays().to_torch_state_dict().items():
        mean = value.double() + (0 * 1 + 1 * 2 + 2 * 3) / 6
        expected = mean if value.is_floating_point() else mean.round()
        assert (result[name] - expected).abs().max() < 1e-6, name


class Buffers(nn.Module):
    """A model with integers of all kinds, of which a training counts up one."""

    LARGE = (
        *(torch.tensor([2**31 + 1, 10**9 + 7]), torch.tensor(-123456789012345)),
        *(torch.tensor(2**53 - 1), torch.tensor([True, False]), torch.arange(300)),
        torch.tensor([2**62, 3], dtype=torch.uint64),
    )

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        for index, value in enumerate(self.LARGE):
            self.register_buffer(f"large{index}", value)
        for kind in ("uint8", "uint16", "uint32", "int8", "int16", "int32"):
            dtype = getattr(torch, kind)
            ends = [torch.iinfo(dtype).min, 1, torch.iinfo(dtype).max]
            self.register_buffer(kind, torch.tensor(ends, dtype=dtype))
        self.register_buffer("counter", torch.tensor(200, dtype=torch.uint8))

    def forward(self, x):
        if self.training:
            self.counter += 1
        return self.layer(x)


PRIVATE = {"privacy": Privacy(noise_multiplier=1.0, clipping_norm=1.0)}


@pytest.mark.parametrize(
    ("name", "bits"),
    [(name, 32) for name in ("fedavg", "fedfish", "fedfisher", "kfac", "private")]
    + [("fedavg", 64), ("private", 64)],
)
def test_integer_buffers_are_those_of_a_plain_round(name, bits, tmp_path):
    """In 32 bits, large ones were rounded; uint8 was refused after the training."""

    def make_client(partition):
        loader = DataLoader(tiny_data(partition), 2 + partition)
        return FisherClient(Buffers(), loader, device="cpu", state_dir=tmp_path)

    def state(**options):
        app = app_by_partition(make_client, mods=[SecureSumsMod(state_dir=tmp_path)])
        strategy = STRATEGIES["fedavg" if name == "private" else name](**options)
        start = ArrayRecord(Buffers().state_dict())
        return strategy.start(LocalGrid(app, 3), start).arrays.to_torch_state_dict()

    private = PRIVATE if name == "private" else {}
    plain, secure = state(), state(secure=SecureSums(bits=bits), **private)
    assert plain["counter"] > 200
    start = dict(Buffers().named_buffers())
    for key, sent in start.items():
        wanted = plain[key]
        if key != "counter" or private:  # with noise, integers stay as they were sent
            wanted = sent
        assert secure[key].dtype == sent.dtype, key
        assert torch.equal(secure[key], wanted), key


def test_bytes_that_are_no_buffer_of_the_models_are_still_refused(tmp_path):
    """As a packed upload's are."""

    def adds_bytes(message, context, call_next):
        reply = call_next(message, context)
        if arrays := reply.content.array_records.get("arrays"):
            arrays["packed"] = Array(np.zeros(9, np.uint8))
        return reply

    mods = [SecureSumsMod(state_dir=tmp_path), adds_bytes]
    app = make_client_app(client_of, mods=mods)
    with pytest.raises(RoundError, match="'packed' is packed"):
        merged(FedAvg(fraction_evaluate=0.0, secure=SecureSums()), app, clients=3)


# What is seen


def test_no_number_of_a_client_leaves_it(tmp_path):
    """Of two runs that differ in one client's data, all replies look alike."""
    seen = {}

    def watch(content, context, stage):
        seen.setdefault(stage, []).append(content)

    app = secure_app(tmp_path, change=watch)
    merged(STRATEGIES["fedfisher"](secure=SecureSums()), app)
    assert set(seen) == {"keys", "shares", "exponents", "values", "open"}
    for stage, contents in seen.items():
        for content in contents:
            (metrics,) = content.metric_records.values()
            assert dict(metrics) == {"num-examples": 1}
            (arrays,) = content.array_records.values()
            allowed = {"sums/format", *(f"secure/{name}" for name in PARTS[stage])}
            assert set(arrays) <= allowed
    words = [
        np.frombuffer(c.array_records["arrays"]["secure/words"].data[128:], np.uint32)
        for c in seen["values"]
    ]
    for own_words in words:  # neither small, nor like another's
        assert 0.2 < np.mean(own_words > 2**31) < 0.8
        assert sum((own_words == other).mean() > 0.1 for other in words) == 1


PARTS = {
    "keys": ("session", "keys", "signature"),
    "shares": ("sealed-shares", "commitments"),
    "exponents": ("words", "layout"),
    "values": ("words", "layout"),
    "open": ("shares",),
}


# Who leaves


@pytest.mark.parametrize(
    ("stage", "times"),
    [
        *[("keys", 1), ("shares", 1), ("exponents", 1)],
        *[("open", 1), ("values", 1), ("open", 2)],
    ],
)
def test_who_leaves_changes_the_set_and_nothing_else(stage, times, tmp_path, caplog):
    seen = []

    def leaves(message, context, now):
        if context.node_config["partition-id"] == 2:
            seen.append(now)
            if seen.count(stage) >= times:
                raise ClientError("gone")

    make = STRATEGIES["fedfisher"]
    strategy = make(secure=SecureSums(), min_train_nodes=3)
    secure = merged(strategy, secure_app(tmp_path / "a", leaves), clients=4)
    # When the values are opened its summand is there, and counts.
    there = [0, 1, 2, 3] if times == 2 else [0, 1, 3]
    plain = merged(make(policy=LIFTED), quick_app(there), clients=len(there))
    assert distance(plain, secure) < 1e-4
    assert "partition-2" in caplog.text
    assert ("not in the last round's model" in caplog.text) == (times == 1)


def test_who_leaves_between_two_sums_of_a_merge_is_left_out(tmp_path):
    opened = []

    def leaves(message, context, now):
        if context.node_config["partition-id"] == 2:
            opened.append(now == "open")
            if sum(opened) >= 2:  # of the models, which had come
                raise ClientError("gone")

    strategy = STRATEGIES["kfac"](secure=SecureSums(), min_train_nodes=3)
    grid = LocalGrid(secure_app(tmp_path, leaves), 4)
    result = strategy.start(grid, tiny_arrays())
    assert list(result.uploads[0].members) == [0, 1, 3]
    assert list(result.left_out) == ["partition-2"]


@pytest.mark.parametrize("late", ["shares", "exponents", "values"])
def test_half_of_those_asked_for_keys_must_reply_to_the_end(late, tmp_path, caplog):
    """Three of the head's eight are half of four that were there for the shares."""
    seen = {partition: [] for partition in range(8)}

    def leaves(message, context, now):
        partition = context.node_config["partition-id"]
        seen[partition].append(now)
        again = seen[partition].count("keys") == 2  # of the head's sums
        if again and (partition < 4 or (partition == 4 and late in seen[4][-1:])):
            raise ClientError("gone")

    strategy = FedAvg(secure=SecureSums(), refine=Refinement(), fraction_evaluate=0.0)
    grid = LocalGrid(secure_app(tmp_path, leaves, min_clients=2), 8)
    result = strategy.start(grid, tiny_arrays(), num_rounds=1)
    assert "only 3 usable replies, but 4 must reply" in caplog.text
    assert "head-loss" not in str(result.train_metrics_clientapp)


# What is refused


def test_a_client_without_the_mod_says_so():
    with pytest.raises(RoundError, match=r"mods=\[SecureSumsMod\(\)\]"):
        merged(FedAvg(secure=SecureSums()), tiny_app())


def test_clients_hide_among_enough(tmp_path):
    strategy = STRATEGIES["fedfisher"](secure=SecureSums())
    with pytest.raises(RoundError, match="2 clients share secrets here, but this"):
        merged(strategy, secure_app(tmp_path), clients=2)
    app = secure_app(tmp_path, min_clients=2)
    merged(STRATEGIES["fedfisher"](secure=SecureSums()), app, clients=2)


def test_a_client_may_refuse_everything_else(tmp_path):
    app = make_client_app(
        client_of, mods=[SecureSumsMod(required=True, state_dir=tmp_path)]
    )
    with pytest.raises(RoundError, match="replies only to secure sums"):
        merged(STRATEGIES["fedfisher"](), app)
    merged(STRATEGIES["fedfisher"](secure=SecureSums()), app)


def test_what_is_no_sum_is_refused_before_anybody_trains():
    app = Watched()
    for strategy, reason in (
        (FedFisherOneShot(secure=SecureSums()), "needs more than sums"),
        (Scaffold(secure=SecureSums()), "needs more than sums"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            merged(strategy, app)
    assert not app.trained
    with pytest.raises(ConfigurationError, match="window"):
        FedAvg(waiting=Waiting(window=10), secure=SecureSums())
    with pytest.raises(ConfigurationError, match="policy= with secure="):
        FedAvg(policy=Policy.strict(), secure=SecureSums())
    FedAvg(policy=Policy(limit_scores=True), secure=SecureSums())
    with pytest.raises(ConfigurationError, match="packed uploads"):
        FedFish(secure=SecureSums(), codec="fedavg")
    with pytest.raises(ConfigurationError, match="secure must be SecureSums"):
        FedFish(secure=True)
    for wrong in ({"bits": 16}, {"threshold": 0.4}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            SecureSums(**wrong)


def test_an_exchange_of_anothers_keys_is_told(tmp_path, caplog):
    kept = []

    def replays(message, context, now):
        if now == "keys" and context.node_config["partition-id"] in (1, 2):
            if not kept:
                reply = SecureSumsMod(state_dir=tmp_path)(message, context, None)
                kept.append(reply)
                return reply
            return Message(kept[0].content, reply_to=message)
        return None

    strategy = STRATEGIES["fedfisher"](secure=SecureSums(), min_train_nodes=2)
    merged(strategy, secure_app(tmp_path, replays), clients=6)
    assert "its public keys are partition-" in caplog.text


SPOILT = {
    "keys": ("keys", "secure/keys", "public key"),
    "shares": ("shares", "secure/sealed-shares", "other arrays than most"),
    "wrong": ("open", "secure/shares", "wrong shares of"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_malformed_is_told_by_name(what, tmp_path, caplog):
    stage, key, says = SPOILT[what]

    def change(content, context, now):
        if context.node_config["partition-id"] == 1 and now == stage:
            value = content.array_records["arrays"][key].numpy()
            value = np.zeros_like(value) if what != "shares" else value[:-1]
            content.array_records["arrays"][key] = Array(value)

    strategy = STRATEGIES["fedfisher"](secure=SecureSums(), min_train_nodes=2)
    merged(strategy, secure_app(tmp_path, change=change), clients=5)
    assert says in caplog.text
    assert "partition-1" in caplog.text


@pytest.mark.parametrize("key", ["session", "commitments", "sealed-shares", "layout"])
def test_what_all_clients_have_malformed_ends_the_round(key, tmp_path):

    def change(content, context, stage):
        arrays = content.array_records["arrays"]
        if (value := arrays.get(f"secure/{key}")) is not None:
            arrays[f"secure/{key}"] = Array(value.numpy()[..., :-32][..., 1:])

    app = secure_app(tmp_path, change=change)
    with pytest.raises(RoundError):
        merged(STRATEGIES["fedfisher"](secure=SecureSums()), app)


@pytest.mark.parametrize("split", [[[2], [2]], [[3]], [[5]]])
def test_a_layout_that_changes_between_the_stages_ends_the_round(split, tmp_path):
    """Of another number of tensors, or entries, than the exponents were told of."""

    def change(content, context, stage):
        if stage != "values":
            return
        arrays = content.array_records["arrays"]
        layout = json.loads(arrays["secure/layout"].numpy().tobytes())
        (bias,) = [row for row in layout if row[2] == [4] and "0.bias" in row[0]]
        changed = [
            [f"{bias[0]}{i or ''}", bias[1], shape] for i, shape in enumerate(split)
        ]
        place = layout.index(bias)
        text = json.dumps([*layout[:place], *changed, *layout[place + 1 :]])
        arrays["secure/layout"] = Array(np.frombuffer(text.encode(), np.uint8))

    app = secure_app(tmp_path, change=change)
    with pytest.raises(RoundError, match=r"words for \d+ entries"):
        merged(FedAvg(fraction_evaluate=0.0, secure=SecureSums()), app, clients=3)


def keys_of(folder, names):
    """Make a key for each name; return the folder of the public halves."""
    (folder / "trusted").mkdir(parents=True)
    form = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    for name in names:
        key = ec.generate_private_key(ec.SECP384R1())
        private = key.private_bytes(serialization.Encoding.PEM, *form)
        (folder / name).write_bytes(private)
        public = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        (folder / "trusted" / f"{name}.pub").write_bytes(public)
    return folder / "trusted"


@pytest.mark.parametrize(
    ("signers", "says"),
    [
        ("abc", None),
        ("abx", "no client that this one trusts has signed"),
        ("abb", "b has signed for two clients"),
        ("ab-", "no client that this one trusts"),
    ],
)
def test_keys_are_those_of_clients_that_are_trusted(signers, says, tmp_path):
    trusted = keys_of(tmp_path / "ours", "abc")
    keys_of(tmp_path / "theirs", "x")

    class ByPartition(SecureSumsMod):
        def __call__(self, message, context, call_next):
            name = signers[int(context.node_config["partition-id"])]
            folder = tmp_path / ("theirs" if name == "x" else "ours")
            own = SecureSumsMod(
                trusted=trusted,
                identity=None if name == "-" else folder / name,
                state_dir=tmp_path,
            )
            return own(message, context, call_next)

    app = make_client_app(client_of, mods=[ByPartition()])
    strategy = STRATEGIES["fedfisher"](secure=SecureSums())
    if says is None:
        merged(strategy, app, clients=3)
        return
    with pytest.raises(RoundError, match=says):
        merged(strategy, app, clients=3)


def test_a_server_that_hands_out_keys_of_its_own_is_found_out(tmp_path):
    trusted = keys_of(tmp_path, "a")
    client, forged = Participant.new(0, 2), Participant.new(0, 2)
    signed = signature(tmp_path / "a", 0, client.public())
    known = trusted_keys(trusted)
    check_signatures(known, {0: client.public()}, {0: signed})
    with pytest.raises(
        ClientError, match="client 0 differ from those that a has signed"
    ):
        check_signatures(known, {0: forged.public()}, {0: signed})
    with pytest.raises(ClientError, match="client 1 differ from those"):
        check_signatures(known, {1: client.public()}, {1: signed})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"no \*\.pub"):
        SecureSumsMod(trusted=tmp_path / "empty")
    with pytest.raises(ConfigurationError, match="identity="):
        signature(tmp_path / "nowhere", 0, [])


def test_a_lost_state_is_told_and_costs_one_client(tmp_path, caplog):
    def loses(message, context, now):
        if now == "shares" and context.node_config["partition-id"] == 1:
            for path in (tmp_path / "secure").glob("partition-1/*.safetensors"):
                path.unlink()

    strategy = STRATEGIES["fedfisher"](secure=SecureSums(), min_train_nodes=2)
    merged(strategy, secure_app(tmp_path, loses), clients=4)
    assert "the secrets of this secure sum are not in" in caplog.text


def test_what_another_version_kept_of_a_sum_is_named():
    group = {"words": torch.empty(0, dtype=torch.uint32)}
    with pytest.raises(CheckpointError, match="a secure sum is not in this version"):
        SecureState.of(ServerState({}, {"secure": group}))


@pytest.mark.parametrize("index", [-1, 2])
def test_a_sum_is_asked_for_by_its_own_number(index, tmp_path):
    """By -1, the last sum's masks would be used and opened a second time."""
    disk = ClientDisk(tmp_path, "secure", 0, "1")
    SumMemory(disk, Participant.new(0, sums=2), Contribution({})).save()
    assert SumMemory.load(disk, 1).participant.sums == 2
    with pytest.raises(ConfigurationError, match=r"secure-sum must be in \[0, 1\]"):
        SumMemory.load(disk, index)


def test_a_killed_server_goes_on_with_the_same_sums(tmp_path):
    """In any exchange: the model is the same, and nobody trains twice."""
    trained = []

    def counts(context):
        partition = int(context.node_config["partition-id"])

        def train(model, loader, device, config):
            trained.append(partition)
            return LocalSGD(lr=0.1)(model, loader, device, config)

        return tiny_client(partition, train_fn=train, state_dir=tmp_path / "clients")

    stages = []

    class Dying(SecureSumsMod):
        def __call__(self, message, context, call_next):
            stages.append(stage_of(message))
            if len(stages) == 3 * stop + 2:
                raise KeyboardInterrupt
            return super().__call__(message, context, call_next)

    app = make_client_app(counts, mods=[Dying(state_dir=tmp_path / "clients")])
    make = STRATEGIES["fedfisher"]
    expected = merged(make(policy=LIFTED), quick_app())
    for stop in range(6):
        trained.clear(), stages.clear()
        run = {"checkpoint_dir": tmp_path / f"run-{stop}"}
        grid = LocalGrid(app, 3)
        with pytest.raises(KeyboardInterrupt):
            make(secure=SecureSums()).start(grid, tiny_arrays(), **run)
        result = make(secure=SecureSums()).start(
            grid, tiny_arrays(), resume=True, **run
        )
        assert distance(expected, result.arrays.to_torch_state_dict()) < 1e-4
        assert sorted(trained) == [0, 1, 2]


def test_a_summand_leaves_the_disk_when_its_sum_is_open(tmp_path):
    merged(STRATEGIES["fedfisher"](secure=SecureSums()), secure_app(tmp_path))
    folder = tmp_path / "secure"
    assert (folder / "partition-0").stat().st_mode & 0o077 == 0
    files = list(folder.glob("*/*.safetensors"))
    assert len(files) == 3
    assert all(not load_file(path) for path in files)
