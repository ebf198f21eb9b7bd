"""How far long work is: a line in the log, at most every so many seconds.

Whoever knows what is done says so, ``with watching("curvature", 1000):``; whoever does
it says how much of it is done, ``advance(32)``, and need not know for what. Where
nobody watches, and where it is quick, nothing is logged. Only the clock decides.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flwr_fisher.log_lines import logger

EVERY = 15.0  # seconds from one line to the next, and to the first


class Progress:
    """Work under way; its lines begin with what is watched around it.

    Parameters
    ----------
    what : str
        The work.
    total : int, optional
        How much there is to do, where that is known.
    unit : str, default "examples"
        Of what.
    """

    def __init__(
        self, what: str, total: int | None = None, unit: str = "examples"
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
        """How long it has taken so far."""
        return time.monotonic() - self._began

    def tell(self, text: str) -> None:
        """Log a line; :attr:`due` says when."""
        self._told = time.monotonic()
        logger.info("%s, %s", self.what, text)

    def advance(self, count: int = 1) -> None:
        """Note that so much more is done, and log it when it is time."""
        self.done += count
        if self.due:
            self.tell(f"{self._done()}, {self.seconds:.0f} s so far")

    def _done(self) -> str:
        if self.total is None or self.done > self.total:
            return f"{_grouped(self.done)} {self.unit}"
        share = f"{100 * self.done / self.total:.0f} %"
        return f"{share} of {_grouped(self.total)} {self.unit}"


_watched: ContextVar[Progress | None] = ContextVar("watched", default=None)


@contextmanager
def watching(
    what: str, total: int | None = None, unit: str = "examples"
) -> Iterator[Progress]:
    """Have :func:`advance` tell of this work, as long as the block lasts.

    Parameters
    ----------
    what, total, unit
        As for :class:`Progress`.

    Examples
    --------
    >>> with watching("partition-3"), watching("curvature", 1000) as progress:
    ...     advance(400)
    >>> progress.what, progress.done
    ('partition-3: curvature', 400)
    """
    progress = Progress(what, total, unit)
    token = _watched.set(progress)
    try:
        yield progress
    finally:
        _watched.reset(token)


def advance(count: int = 1) -> None:
    """Note that so much more is done of what is watched, if anything is."""
    if (progress := _watched.get()) is not None:
        progress.advance(count)


def _grouped(number: int) -> str:
    return f"{number:_}".replace("_", " ")
