"""Virtual clients for the protocol tests: a tiny federation, and ways to spoil it."""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.params import shared_state
from flwr_fisher.server.journal import Journal
from flwr_fisher.strategies import FedFisherOneShot, FisherOptions, MergeOptions, Policy
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import PREFIX, arrays_to_tensors, named_options
from flwr_fisher.wire.options import split_config

FEATURES, CLASSES = 3, 3
USERS = {"lr", "proximal-mu", "server-round", "note"}  # keys; others are a server's

# The server takes what clients say as they say it.
LIFTED = Policy(max_weight=math.inf, max_distance=math.inf)

OF_FISHER = {field.name for field in fields(FisherOptions)}
OF_MERGE = {field.name for field in fields(MergeOptions)}


def fedfisher_with(**options):
    """FedFisher by all its options in one table, whichever object holds them.

    A round of it is one request, unless statistics are to be refreshed (test_norms) or
    the merge to be refined (test_refinement).
    """
    options.setdefault("norm_statistics", "average")
    options.setdefault("refine", None)
    fisher = {k: options.pop(k) for k in OF_FISHER & options.keys()}
    merge = {k: options.pop(k) for k in OF_MERGE & options.keys()}
    return FedFisherOneShot(
        **options, fisher=FisherOptions(**fisher), merge=MergeOptions(**merge)
    )


def tiny_model(seed=0):
    """A net with Kronecker layers, a batch norm (diagonal block) and its buffers."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone: it is quick
        return nn.Sequential(
            nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, CLASSES)
        )


def tiny_data(holding, n=None):
    """A client's examples: a function of `holding`; by default 8, 10, 12, … of them."""
    n = 8 + 2 * holding if n is None else n
    generator = torch.Generator().manual_seed(holding)
    x = torch.randn(n, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (n,), generator=generator))


def tiny_client(holding=0, **options):
    """A client whose replies depend on what it holds, and on nothing else."""
    data = tiny_data(holding)
    options.setdefault("train_fn", LocalSGD(lr=0.1))
    options.setdefault("device", "cpu")
    loader = DataLoader(data, batch_size=4)
    return FisherClient(tiny_model(), loader, DataLoader(data, batch_size=8), **options)


def tiny_arrays(seed=0):
    """What a server starts from."""
    return ArrayRecord(shared_state(tiny_model(seed)))


def app_by_partition(make, **options):
    """An app whose partition i is the client ``make(i)``."""

    def client_fn(context):
        return make(int(context.node_config["partition-id"]))

    return make_client_app(client_fn, **options)


def tiny_app(holdings=None, **options):
    """An app whose partition i holds ``holdings[i]``, by default i."""

    def make(partition):
        return tiny_client(partition if holdings is None else holdings[partition])

    return app_by_partition(make, **options)


_ANSWERS = {}


class Remembering(ClientApp):
    """Clients that answer again what they have answered, without the work.

    For tests of a server: what a tiny client answers hangs on what it holds and on the
    message alone, which test_strategy_contract.py sees of every strategy. Clients that
    remember a run do the work: its number is in the message.

    Parameters
    ----------
    app : ClientApp
        The app behind it.
    made_of : Callable[[int], Hashable]
        What the client of a partition is made of.
    """

    def __init__(self, app, made_of):
        super().__init__()
        self.app, self.made_of = app, made_of

    def __call__(self, message, context):
        return self.answer(message, context, self.app)

    def answer(self, message, context, app):
        """Answer from memory, or as the app does; for it as a mod, too."""
        records = message.content.array_records
        if not message.content or any(
            key.startswith("server/run") for each in records.values() for key in each
        ):
            return app(message, context)
        key = self._key(message, int(context.node_config["partition-id"]))
        if key not in _ANSWERS:
            reply = app(message, context)
            if reply.has_error():
                return reply
            _ANSWERS[key] = _copied(reply.content)
        return Message(_copied(_ANSWERS[key]), reply_to=message)

    def _key(self, message, partition):
        sent = [
            (name, key, value.dtype, tuple(value.shape), value.data)
            for name, record in message.content.array_records.items()
            for key, value in record.items()
        ]
        config = {
            key: value
            for record in message.content.config_records.values()
            for key, value in record.items()
            if key != "fisher.run"  # names what a client keeps of it, and no more
        }
        kind = message.metadata.message_type
        return self.made_of(partition), partition, kind, repr(config), *sent


def tiny(partition, *more):
    """What a tiny client's answers hang on."""
    return "tiny", partition, repr(LocalSGD()), *more


def quick_app(holdings=None, mods=None):
    """``tiny_app``, whose clients answer from memory where they can, below all mods."""
    memory = Remembering(None, lambda i: tiny(i if holdings is None else holdings[i]))
    memory.app = tiny_app(holdings, mods=mods and [*mods, memory.answer])
    return memory.app if mods else memory


def _copied(content):
    return RecordDict({k: type(record)(dict(record)) for k, record in content.items()})


class Watched(ClientApp):
    """An app that notes whom it asked, and may spoil replies to train messages.

    Parameters
    ----------
    app : ClientApp
        The app behind it; by default tiny clients that remember what they answered.
    tamper : Mapping[int, Callable[[RecordDict], None]]
        By partition: changes a reply's content in place, or raises.
    """

    def __init__(self, app=None, tamper=None):
        super().__init__()
        self.app = quick_app() if app is None else app
        self.tamper = dict(tamper or {})
        self.trained = []
        self.evaluated = []
        self.configs = []

    def __call__(self, message, context):
        kind = message.metadata.message_type
        partition = int(context.node_config["partition-id"])
        if kind == "query":
            return self.app(message, context)
        config = dict(message.content.config_records["config"])
        asked = self.trained if kind == "train" else self.evaluated
        asked.append((int(config["server-round"]), partition))
        options, own = split_config(config)
        self.configs.append(own | options)
        reply = self.app(message, context)
        if kind == "train" and partition in self.tamper:
            self.tamper[partition](reply.content)
        return reply


class Node(NamedTuple):
    """What a grid tells of a node: as Flower's NodeInfo, which has names since 1.38."""

    node_id: int
    name: str | None = ""


def node_of(grid, partition):
    """The id of the node that holds a partition."""
    return next(node for node, held in grid.nodes.items() if held == partition)


def travelling(config):
    """A config as a server sends it: ``fisher.`` before all that is not the user's."""
    own = {k: v for k, v in config.items() if k in USERS}
    return own | named_options({k: v for k, v in config.items() if k not in USERS})


def ask(client, arrays=None, config=None, *, partition=0, kind="train"):
    """Hand a client a message without any grid; what it raises comes through."""
    LocalGrid(tiny_app(), 1)  # messages need the process's identity
    content = RecordDict(
        {
            "arrays": tiny_arrays() if arrays is None else arrays,
            "config": ConfigRecord(travelling(config or {})),
        }
    )
    node_config = {} if partition is None else {"partition-id": partition}
    context = Context(1, 77, node_config, RecordDict(), {})
    message = Message(content, 77, kind)
    handler = client.fit if kind == "train" else client.evaluate
    return handler(message, context)


def tensors_of(message):
    """The arrays of a reply."""
    (record,) = message.content.array_records.values()
    return arrays_to_tensors(record)


def metrics_of(message):
    """The metrics of a reply."""
    (record,) = message.content.metric_records.values()
    return record


def start(strategy, app=None, clients=3, arrays=None, **options):
    """Run a strategy over a grid of its own."""
    grid = LocalGrid(quick_app() if app is None else app, clients)
    return strategy.start(grid, tiny_arrays() if arrays is None else arrays, **options)


def left_out(caplog):
    """What the log says of replies that are left out."""
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if "left out" in line]


def plane():
    """y = w x from (0, 0): one step of SGD, or its Fisher, is a matter of a pencil."""
    model = nn.Linear(FEATURES - 1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def half_square(outputs, labels):
    """The loss (w x - y)^2 / 2."""
    return (outputs - labels).square().sum(1).mean() / 2


@dataclass(frozen=True)
class Compared:
    """True if nothing differs; an assert that fails shows what does."""

    differences: tuple[str, ...]

    def __bool__(self):
        return not self.differences

    def __repr__(self):
        return "the same" if self else "; ".join(self.differences)


def same_bits(left, right):
    """Whether two records have the same keys, in the same order, and the same bytes."""
    if list(left) != list(right):
        return Compared((f"keys {list(left)} and {list(right)}",))
    odd = [
        k
        for k in left
        if left[k].data != right[k].data or left[k].dtype != right[k].dtype
    ]
    return Compared(tuple(f"{k} {_apart(left[k], right[k])}" for k in odd))


def _apart(left, right):
    a, b = left.numpy(), right.numpy()
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"is {a.dtype} of {a.shape} and {b.dtype} of {b.shape}"
    return f"differs by up to {np.abs(a.astype(float) - b.astype(float)).max():.2g}"


def close(left, right, tolerance=1e-5):
    """Whether two records are equal up to rounding."""
    a, b = arrays_to_tensors(left), arrays_to_tensors(right)
    return a.keys() == b.keys() and all(
        torch.allclose(a[k].double(), b[k].double(), tolerance, tolerance) for k in a
    )


def set_array(key, values):
    """Replace one array, or add it."""

    def tamper(content):
        content.array_records["arrays"][key] = Array(np.array(values))

    return tamper


def change_array(key, change):
    """Replace one array by a function of itself."""

    def tamper(content):
        record = content.array_records["arrays"]
        record[key] = Array(np.array(change(record[key].numpy())))

    return tamper


def drop_array(key):
    """Leave one array out."""

    def tamper(content):
        del content.array_records["arrays"][key]

    return tamper


def drop_extras(content):
    """Leave out what the strategy asked for beside parameters."""
    record = content.array_records["arrays"]
    for key in [k for k in record if k.startswith(PREFIX)]:
        del record[key]


def set_metric(key, value):
    """Replace one metric, or add it; None drops it."""

    def tamper(content):
        record = content.metric_records["metrics"]
        if value is None:
            del record[key]
        else:
            record[key] = value

    return tamper


def fail(content):
    """Raise, as a client with a bug does."""
    raise ValueError("out of cheese")


def kill(content):
    """Stop the whole process, as Ctrl-C does."""
    raise KeyboardInterrupt


def kill_after(asked, app):
    """Stop the process when one more client has trained than was `asked` for."""

    def tamper(content):
        if len(app.trained) > asked:
            raise KeyboardInterrupt

    return tamper


def killing_app(asked, clients=4):
    """An app that stops the process when it has trained for that many clients."""
    app = Watched()
    app.tamper = dict.fromkeys(range(clients), kill_after(asked, app))
    return app


def opened(where):
    """The journal of a run that nobody is at work with."""
    journal = Journal(where)
    journal.load()
    journal.release()
    return journal


def saved_state(where, server_round):
    """The tensors of a run's state after a round."""
    return load_file(where / f"round-{server_round:04d}.safetensors")


class Clock:
    """Stands in for the ``time`` module: sleeping only moves the clock."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def monotonic(self):
        return self.now

    def time(self):
        return 1e9 + self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds
