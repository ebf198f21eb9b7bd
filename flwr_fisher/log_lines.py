"""Lines in Flower's log: metrics, exceptions, and the progress of long work.

The logger is looked up by its name, so nothing of Flower is imported.

Progress is a line in the log at most every 15 seconds. A caller names the work, ``with
watching("curvature", 1000):``. The code that does it reports how much is done,
``advance(32)``, and need not know the name. Without a ``watching`` block, and for quick
work, nothing is logged.
"""

import logging
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from flwr_fisher.errors import FlwrFisherError, printable

logger = logging.getLogger("flwr")
_ENTRIES = 10  # of a metric that is a list
_LONGEST = 800  # characters of an error in the log; it may quote a server's message
EVERY = 15.0  # seconds from one line to the next, and to the first


def shown(metrics: Mapping[str, object], clients: Sequence[str] = ()) -> str:
    """Return a round's metrics as Flower logs them, but with four digits.

    Long lists are shortened. A list whose name begins with ``client-`` has a number for
    each of the `clients`, and these are named.

    Examples
    --------
    >>> shown({"loss": 1 / 3, "client-share": [0.25, 0.75]}, ["a", "b"])
    "{'loss': 0.3333, 'client-share': [a: 0.25, b: 0.75]}"
    >>> shown({"client-share": [0.05] * 20})[-21:]
    '0.05, … and 10 more]}'
    """
    entries = []
    for name, value in metrics.items():
        owners = clients if name.startswith("client-") else ()
        entries.append(f"{name!r}: {_value(value, owners)}")
    return f"{{{', '.join(entries)}}}"


def _value(value: object, owners: Sequence[str] = ()) -> str:
    if not isinstance(value, list):
        return f"{value:.4g}" if isinstance(value, float) else repr(value)
    texts = [_value(entry) for entry in value[:_ENTRIES]]
    if len(owners) == len(value):
        texts = [f"{who}: {text}" for who, text in zip(owners, texts, strict=False)]
    if more := len(value) - len(texts):
        texts.append(f"… and {more} more")
    return f"[{', '.join(texts)}]"


class Failures:
    """Logs exceptions: the first of a kind with its traceback, later ones in a line.

    Two exceptions are of one kind if they have the same type and come from the same
    line of code. This library's own errors are logged without a traceback: they say
    what is wrong and what to do.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def tell(self, who: str, error: BaseException) -> str:
        """Log which client failed and why; return the reason."""
        reason = f"{type(error).__name__}: {error}"
        text = printable(reason, _LONGEST)
        if isinstance(error, FlwrFisherError):
            logger.error("%s failed: %s", who, text)
            return reason
        # Its type, and the file and line that raised it.
        kind = f"{type(error)} {traceback.extract_tb(error.__traceback__)[-1:]}"
        if kind in self._known:
            logger.error("%s failed with the same error as another: %s", who, text)
        else:
            self._known.add(kind)
            logger.error("%s failed: %s", who, text, exc_info=error)
        return reason


# --- progress


class Progress:
    """Work in progress; its log lines begin with the names of the outer blocks.

    Parameters
    ----------
    what : str
        The work's name.
    total : int, optional
        The total amount of work, if it is known.
    unit : str | None, default "examples"
        What is counted; with None nothing, because the block only names the work of
        inner ones.
    """

    def __init__(
        self, what: str, total: int | None = None, unit: str | None = "examples"
    ) -> None:
        outer = _watched.get()
        self.what: str = what if outer is None else f"{outer.what}: {what}"
        self.total, self.unit, self.done = total, unit, 0
        self._began = self._told = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time for a line."""
        return time.monotonic() - self._told >= EVERY

    def tell(self, text: str) -> None:
        """Log a line at once, whether or not it is :attr:`due`."""
        self._told = time.monotonic()
        logger.info("%s, %s", self.what, text)

    def advance(self, count: int = 1) -> None:
        """Count `count` more as done; log the progress when a line is due."""
        self.done += count
        if self.unit is not None and self.due:
            done, seconds = _grouped(self.done), time.monotonic() - self._began
            if self.total is not None and self.done <= self.total:
                done = f"{100 * self.done / self.total:.0f} % of {_grouped(self.total)}"
            self.tell(f"{done} {self.unit}, {seconds:.0f} s so far")


_watched: ContextVar[Progress | None] = ContextVar("watched", default=None)


@contextmanager
def watching(
    what: str, total: int | None = None, unit: str | None = "examples"
) -> Iterator[Progress]:
    """Count this work by :func:`advance`, as long as the block lasts.

    Examples
    --------
    >>> with watching("partition-3", unit=None), watching("curvature", 10) as progress:
    ...     advance(4)
    >>> progress.what, progress.done
    ('partition-3: curvature', 4)
    """
    progress = Progress(what, total, unit)
    token = _watched.set(progress)
    try:
        yield progress
    finally:
        _watched.reset(token)


def advance(count: int = 1) -> None:
    """Count `count` more as done in the innermost `watching` block, if there is one."""
    if (progress := _watched.get()) is not None:
        progress.advance(count)


def _grouped(number: int) -> str:
    return f"{number:_}".replace("_", " ")


_logged: set[tuple[str, int]] = set()


def log_once(text: str, run: int = 0) -> None:
    """Log a text once in this process, or once for each run, by its number."""
    if (text, run) not in _logged:
        _logged.add((text, run))
        logger.info("%s", text)
