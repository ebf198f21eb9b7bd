"""Flower's logger, with lines wrapped to the terminal, and a log of exceptions.

The logger is looked up by its name, so nothing of Flower is imported.
"""

import logging
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

from flwr_fisher.errors import FlwrFisherError, printable

_PREFIX = 12  # columns of what Flower's handler puts in front: "INFO :      "
_TAB = 4  # columns that a tab takes after those
_NARROWEST = 40
_ENTRIES = 10  # of a metric that is a list
_LONGEST = 800  # characters of an error in the log; it may quote a server's message


def width() -> int:
    """Return how many columns a message may have: the terminal's, or ``$COLUMNS``.

    If there is neither, as in the processes that ``flwr run`` starts, a line has 80
    columns.
    """
    return max(shutil.get_terminal_size().columns - _PREFIX, _NARROWEST)


def wrapped(text: str) -> str:
    r"""Return a text with its lines wrapped; nothing is cut, and no word is broken.

    Examples
    --------
    >>> print(wrapped("\t└──> " + "word " * 16))
        └──> word word word word word word word word word word word word
                    word word word word
    """
    return "\n".join(_wrapped(line) for line in text.split("\n"))


def _wrapped(line: str) -> str:
    spread = line.expandtabs(_TAB)
    if len(spread) <= width():
        return line
    margin = " " * (_PREFIX + len(spread) - len(spread.lstrip()))
    lines = textwrap.wrap(
        spread.strip(),
        width() + _PREFIX,
        initial_indent=margin,
        subsequent_indent=f"{margin}    ",
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)[_PREFIX:]


def shown(metrics: Mapping[str, object] | None) -> str:
    """Return a round's metrics as Flower logs them, with long lists shortened.

    Examples
    --------
    >>> shown({"loss": 0.5, "client-share": [0.05] * 20})[:38]
    "{'loss': 0.5, 'client-share': [0.05, 0"
    >>> shown({"client-share": [0.05] * 20})[-21:]
    '0.05, … and 10 more]}'
    """
    if metrics is None:
        return "None"
    entries = (f"{name!r}: {_value(value)}" for name, value in metrics.items())
    return f"{{{', '.join(entries)}}}"


def _value(value: object) -> str:
    if not isinstance(value, list) or len(value) <= _ENTRIES:
        return repr(value)
    first = ", ".join(repr(entry) for entry in value[:_ENTRIES])
    return f"[{first}, … and {len(value) - _ENTRIES} more]"


class _Wrapping(logging.LoggerAdapter[logging.Logger]):
    """A logger that wraps messages which are longer than a line."""

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """Log a message, as ``logging.Logger.log`` does."""
        if not self.isEnabledFor(level):
            return
        text = str(msg) % args if args else str(msg)
        if (lines := wrapped(text)) != text:
            msg, args = "%s", (lines,)
        options.setdefault("stacklevel", 2)  # the line of code that logs
        self.logger.log(level, msg, *args, **options)


logger = _Wrapping(logging.getLogger("flwr"))


class Failures:
    """Logs exceptions: the first of a kind with its traceback, later ones in a line.

    Two exceptions are of one kind if they have the same type and come from the same
    line of code. This library's own errors are logged without a traceback: they say
    what is wrong and what to do.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, str, int]] = set()

    def tell(self, who: str, error: BaseException) -> str:
        """Log which client failed and why; return the reason."""
        reason = f"{type(error).__name__}: {error}"
        text = printable(reason, _LONGEST)
        if isinstance(error, FlwrFisherError):
            logger.error("%s failed: %s", who, text)
        elif (kind := _kind(error)) in self._known:
            logger.error("%s failed with the same error as another: %s", who, text)
        else:
            self._known.add(kind)
            logger.error("%s failed: %s", who, text, exc_info=error)
        return reason


def _kind(error: BaseException) -> tuple[str, str, int]:
    """Return an exception's type, and the file and line that raised it."""
    trace, file, line = error.__traceback__, "", 0
    while trace is not None:
        file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return type(error).__qualname__, file, line
