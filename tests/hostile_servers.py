"""A server that asks what it should not, in the middle of an honest run.

Each kind of request that a strategy makes of a client comes to it hostile, in many
ways, just before it comes honest. The client is harmed if a hostile request takes more
than five seconds, leaves more than a megabyte on its disk, or is answered by an error
that is not of the library's own kinds; or if the run it is in ends with other
parameters than without. :mod:`hostile` runs all of them, and writes the page.
"""

import copy
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.clientapp import ClientApp
from hostile import CLIENTS, HOSTILE, VICTIMS, make_app, make_model
from virtual import same_bits

from flwr_fisher.errors import FlwrFisherError
from flwr_fisher.params import shared_state
from flwr_fisher.testing import LocalGrid

SECONDS, BYTES = 5, 1 << 20

Change = Callable[[RecordDict], None]
VALUES = (2**62, -1, 0.5, float("nan"), "much", [1, 2], "x\n\x1b[2J" * 10**5)


# What a server may do to a request


def floats(change):
    """Change all that is no integer."""

    def changed(content):
        (record,) = content.array_records.values()
        for key in list(record):
            values = record[key].numpy()
            if values.dtype.kind == "f":
                with np.errstate(all="ignore"):
                    new = np.asarray(change(values)).astype(values.dtype)
                record[key] = Array(np.ascontiguousarray(new))

    return changed


def integers(value):
    """Change all integers: runs, steps."""

    def changed(content):
        (record,) = content.array_records.values()
        for key in list(record):
            values = record[key].numpy()
            if values.dtype.kind == "i":
                record[key] = Array(np.full_like(values, value))

    return changed


def setting(key, value):
    """Ask with another value of a setting."""

    def changed(content):
        (record,) = content.config_records.values()
        record[key] = value

    return changed


def without_arrays(content):
    """Send nothing."""
    for name in list(content.array_records):
        del content[name]


def without_config(content):
    """Ask nothing."""
    for name in list(content.config_records):
        content[name] = ConfigRecord()


def many_arrays(content, count=10**5):
    """A hundred thousand arrays, or so many."""
    (name,) = content.array_records
    tiny = Array(np.zeros(1, np.float32))
    more = {f"server/{i}": tiny for i in range(count)}
    content[name] = ArrayRecord({**content.array_records[name], **more})


def long_key(content):
    """An array whose name is a megabyte of control characters."""
    (record,) = content.array_records.values()
    record["server/" + "\n\x1b[2J\x07" * 200_000] = Array(np.zeros(1, np.float32))


CHANGES = {
    "NaN": floats(lambda a: a * np.nan),
    "infinite": floats(lambda a: a + np.inf),
    "1e30": floats(lambda a: a * 0 + 1e30),
    "transposed": floats(np.transpose),
    "flat": floats(np.ravel),
    "empty": floats(lambda a: a[:0] if a.ndim else a),
    "float64": floats(lambda a: a * 1.0),
    "integers 2^62": integers(2**62),
    "integers -1": integers(-1),
    "no arrays": without_arrays,
    "no config": without_config,
    "100 000 arrays": many_arrays,
    "a key of a megabyte": long_key,
    "an unknown job": setting("fisher.job", "no such job"),
    "a job of a megabyte": setting("fisher.job", "x\n" * 500_000),
    "another job": setting("fisher.job", "gradient"),
}


def hostile_requests(message):
    """Yield requests that an honest one could be instead."""
    changes = dict(CHANGES)
    (config,) = message.content.config_records.values()
    for key, value in config.items():
        for wrong in VALUES:
            if wrong != value:
                changes[f"{key} {str(wrong)[:8]!r}"] = setting(key, wrong)
    (record,) = message.content.array_records.values()
    if "server/run" in record:
        for number in range(50):
            changes[f"invented run {number}"] = integers(10**6 + number)
    for name, change in changes.items():
        content = copy.deepcopy(message.content)
        change(content)
        yield name, content


# The client


class Besieged(ClientApp):
    """Six clients, of which one gets every hostile request before an honest one."""

    def __init__(self, app, folder):
        super().__init__()
        self.app, self.folder = app, folder
        self.harmed = []
        self.asked = 0
        self._known = set()

    def __call__(self, message, context):
        config = next(iter(message.content.config_records.values()), {})
        kind = f"{message.metadata.message_type} {config.get('fisher.job', '')}".strip()
        mine = context.node_config["partition-id"] == HOSTILE
        if mine and kind not in self._known and message.content.array_records:
            self._known.add(kind)
            for name, content in hostile_requests(message):
                self._besiege(f"{kind}: {name}", content, message, context)
        return self.app(message, context)

    def _besiege(self, name, content, message, context):
        request = copy.copy(message)
        request.__dict__["_content"] = content
        self.asked += 1
        before, began = size_of(self.folder), time.monotonic()
        try:
            with at_most(SECONDS):
                self.app(request, copy.deepcopy(context))
        except TimeoutError:
            self.harmed.append(f"{name}: {SECONDS} s were not enough")
        except FlwrFisherError as error:
            if len(str(error)) > 2000 or not str(error).isprintable():
                self.harmed.append(f"{name}: a long error, or one of several lines")
        except Exception as error:
            self.harmed.append(f"{name}: {type(error).__name__}: {str(error)[:100]}")
        took = time.monotonic() - began
        if took > SECONDS:
            self.harmed.append(f"{name}: {took:.0f} s")
        if (more := size_of(self.folder) - before) > BYTES:
            self.harmed.append(f"{name}: {more} bytes")


def size_of(folder):
    """How many bytes all files in a folder have."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


@contextmanager
def at_most(seconds):
    """Raise :class:`TimeoutError` after that long."""

    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def besiege(name, rounds=None):
    """Return how many hostile requests a strategy's client had, and what harm came."""
    victim = VICTIMS[name]
    results = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as own:
        besieged = Besieged(make_app(victim, folder), Path(folder))
        for app in (besieged, make_app(victim, own)):
            grid = LocalGrid(app, CLIENTS, seed=1)
            start = ArrayRecord(shared_state(make_model(victim.normalised)))
            strategy = victim.make(min_train_nodes=CLIENTS)
            result = strategy.start(grid, start, num_rounds=rounds or victim.rounds)
            results.append(result.arrays)
    if not same_bits(*results):
        besieged.harmed.append("the run ended with other parameters")
    return besieged.asked, besieged.harmed
