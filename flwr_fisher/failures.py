"""Exceptions in the log: a traceback for each kind, once."""

from flwr_fisher.errors import FlwrFisherError
from flwr_fisher.log_lines import logger
from flwr_fisher.printable import printable

__all__ = ["Failures"]

_LONGEST = 800  # signs of an error in the log; it may quote what a server sent


class Failures:
    """Tells of exceptions: the first of a kind with its traceback, others in a line.

    Of one kind are those of one type from one line of code. This library's own errors
    say what is wrong and what to do, and need no traceback at all.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, str, int]] = set()

    def tell(self, who: str, error: Exception) -> str:
        """Log who failed and why; return the reason.

        Parameters
        ----------
        who : str
            Whose exception it is.
        error : Exception
            The exception, as it was caught.
        """
        reason = f"{type(error).__name__}: {error}"
        text = printable(reason, _LONGEST)
        if isinstance(error, FlwrFisherError):
            logger.error("%s failed: %s", who, text)
        elif (kind := _kind(error)) in self._known:
            logger.error("%s failed as another before: %s", who, text)
        else:
            self._known.add(kind)
            logger.error("%s failed: %s", who, text, exc_info=error)
        return reason


def _kind(error: Exception) -> tuple[str, str, int]:
    """Return an exception's type, and the file and line that it comes from."""
    trace, file, line = error.__traceback__, "", 0
    while trace is not None:
        file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return type(error).__qualname__, file, line
