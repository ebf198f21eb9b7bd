"""A server that asks what it should not, in the middle of an honest run.

Each kind of request that a strategy makes of a client comes to it hostile, in many
ways, just before it comes honest. The client is harmed if a hostile request takes more
than five seconds, leaves more than a megabyte on its disk, or is answered by an error
that is not of the library's own kinds; or if the run it is in ends with other
parameters than without.
"""

import copy
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord
from flwr.clientapp import ClientApp
from hostile import HOSTILE, LONG_KEY, VICTIMS, adds, edit, make_app, start
from virtual import same_bits

from flwr_fisher.errors import FlwrFisherError

SECONDS, BYTES = 5, 1 << 20
VALUES = (2**62, -1, 0.5, float("nan"), "much", [1, 2], LONG_KEY)


def integers(value):
    """Change all integers: runs, steps."""
    return edit("", lambda a: np.full_like(a, value), kind="i")


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


CHANGES = {
    "NaN": edit("", lambda a: a * np.nan),
    "infinite": edit("", lambda a: a + np.inf),
    "1e30": edit("", lambda a: a * 0 + 1e30),
    "transposed": edit("", np.transpose),
    "flat": edit("", np.ravel),
    "empty": edit("", lambda a: a[:0] if a.ndim else a),
    "integers 2^62": integers(2**62),
    "integers -1": integers(-1),
    "no arrays": without_arrays,
    "no config": without_config,
    "100 000 arrays": adds(10**5, "server/{}"),
    "a key of a megabyte": adds(1, f"server/{LONG_KEY}"),
    "an unknown job": setting("fisher.job", "no such job"),
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
                self.asked += 1
                if harm := self._besieged(content, message, context):
                    self.harmed.append(f"{kind}: {name}: {harm}")
        return self.app(message, context)

    def _besieged(self, content, message, context):
        """Ask; return what harm it did."""
        request = copy.copy(message)
        request.__dict__["_content"] = content
        before = size_of(self.folder)
        try:
            with at_most(SECONDS):
                self.app(request, copy.deepcopy(context))
        except FlwrFisherError as error:
            if len(str(error)) > 2000 or not str(error).isprintable():
                return "a long error, or one of several lines"
        except Exception as error:  # TimeoutError, too
            return f"{type(error).__name__}: {str(error)[:100]}"
        more = size_of(self.folder) - before
        return f"{more} bytes" if more > BYTES else ""


def size_of(folder):
    """How many bytes all files in a folder have."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


@contextmanager
def at_most(seconds):
    """Raise :class:`TimeoutError` after that long."""

    def late(*_):
        raise TimeoutError(f"{seconds} s were not enough")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def besiege(name, **options):
    """Return how many hostile requests a strategy's client had, and what harm came."""
    victim = VICTIMS[name]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as own:
        besieged = Besieged(make_app(victim, folder), Path(folder))
        result = start(name, besieged, **options)
        undisturbed = start(name, make_app(victim, own), **options)
    if not same_bits(result.arrays, undisturbed.arrays):
        besieged.harmed.append("the run ended with other parameters")
    return besieged.asked, besieged.harmed
