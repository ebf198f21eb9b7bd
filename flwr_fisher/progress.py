"""Progress of long work: a line in the log, at most every 15 seconds.

A caller names the work, ``with watching("curvature", 1000):``. The code that does it
reports how much is done, ``advance(32)``, and need not know the name. Without a
``watching`` block, and for quick work, nothing is logged.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flwr_fisher.log_lines import logger

EVERY = 15.0  # seconds from one line to the next, and to the first


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

    @property
    def seconds(self) -> float:
        """How many seconds it has taken so far."""
        return time.monotonic() - self._began

    def tell(self, text: str) -> None:
        """Log a line at once, whether or not it is :attr:`due`."""
        self._told = time.monotonic()
        logger.info("%s, %s", self.what, text)

    def advance(self, count: int = 1) -> None:
        """Count `count` more as done; log the progress when a line is due."""
        self.done += count
        if self.unit is not None and self.due:
            self.tell(f"{self._done()}, {self.seconds:.0f} s so far")

    def _done(self) -> str:
        if self.total is None or self.done > self.total:
            return f"{_grouped(self.done)} {self.unit}"
        share = f"{100 * self.done / self.total:.0f} %"
        return f"{share} of {_grouped(self.total)} {self.unit}"


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
