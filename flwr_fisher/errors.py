"""The exceptions that this library raises, all derived from :class:`FlwrFisherError`.

Each message names the culprit (an argument, a layer, a node, a key, a file) and the
way out. Most classes also derive from the built-in exception of the same meaning, so
that code which catches ``ValueError`` keeps working.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf
from numbers import Integral, Real
from typing import Any

_MOST, _NAMES = 80, 5  # characters of a text from outside, and names, that are shown


class FlwrFisherError(Exception):
    """Base of every error that this library raises on purpose.

    It can be pickled, so another process (a pool's, or Ray's) sees the same text and
    attributes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how pickle makes the error again, from its text."""
        kind = type(self)
        return kind.__new__, (kind, *self.args), self.__dict__


class ConfigurationError(FlwrFisherError, ValueError):
    """An argument or a run-config value is out of range."""


class UnknownNameError(ConfigurationError):
    """A name (of a dataset, model, structure, solver, …) is not known.

    Parameters
    ----------
    what : str
        The argument or run-config key that holds the name.
    name : str
        The unknown name.
    known : Iterable[str]
        The names that would have worked.

    Examples
    --------
    >>> raise UnknownNameError("structure", "kfca", ["diagonal", "kfac"])
    Traceback (most recent call last):
    flwr_fisher.errors.UnknownNameError: unknown structure 'kfca'; known: diagonal, kfac
    """

    def __init__(self, what: str, name: object, known: Iterable[str]) -> None:
        # It may come from a stranger, and ends in a log.
        super().__init__(f"unknown {what} {name!r:.80}; known: {', '.join(known)}")


class MissingExtraError(FlwrFisherError, ImportError):
    """A package is not installed; one of this library's extras installs it.

    Parameters
    ----------
    package : str
        The missing package.
    extra : str
        The extra that installs it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"'{package}' is not installed: pip install \"flwr-fisher[{extra}]\""
        )


class CallbackError(FlwrFisherError, RuntimeError):
    """A callback failed after a round, which the strategy's `partial_result` has."""


class ParamsError(FlwrFisherError, ValueError):
    """Two sets of named tensors differ in keys, shapes or dtypes, or are not finite."""


class StructureError(FlwrFisherError, ValueError):
    """A curvature structure cannot represent a layer, or two curvatures do not fit."""


class DataError(FlwrFisherError, ValueError):
    """Data is missing, empty, or not in the expected form."""


class ClientError(FlwrFisherError, RuntimeError):
    """A client cannot do what the server wants of it."""


class CheckpointError(FlwrFisherError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class RoundError(FlwrFisherError, RuntimeError):
    """A round ended without a result: too few clients, or too few usable replies."""


_FIELD, _REASON = 120, 600  # characters of a WireError's texts


class WireError(FlwrFisherError, ValueError):
    """A message from a node does not hold what was requested.

    Parameters
    ----------
    reason : str
        What is wrong with the message.
    field : str
        The key in the record.

    Notes
    -----
    Both texts may quote the message, so they are cut and made printable.
    """

    def __init__(self, reason: str, *, field: str) -> None:
        self.reason = printable(reason, _REASON)
        self.field = printable(field, _FIELD)
        super().__init__(f"'{self.field}': {self.reason}")


def check_known(what: str, name: object, known: Iterable[str]) -> None:
    """Raise :class:`UnknownNameError` unless `name` is one of `known`."""
    if name not in (known := list(known)):
        raise UnknownNameError(what, name, known)


def check_number(name: str, value: object) -> None:
    """Raise :class:`ConfigurationError` unless the value is a number.

    Examples
    --------
    >>> check_number("lr", "0.1")
    Traceback (most recent call last):
    flwr_fisher.errors.ConfigurationError: lr must be a number, got '0.1'
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ConfigurationError(f"{name} must be a number, got {value!r:.80}")


def check_whole(name: str, value: object, low: int | None = None) -> None:
    """Raise :class:`ConfigurationError` unless the value is an integer >= `low`.

    Examples
    --------
    >>> check_whole("num_features", 100.5, 1)
    Traceback (most recent call last):
    flwr_fisher.errors.ConfigurationError: num_features must be an integer, got 100.5
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigurationError(f"{name} must be an integer, got {value!r:.80}")
    if low is not None:
        check_range(name, int(value), low)


def check_positive(name: str, value: float, *, or_zero: bool = False) -> None:
    """Raise :class:`ConfigurationError` unless the value is positive and finite.

    Examples
    --------
    >>> check_positive("lr", 0)
    Traceback (most recent call last):
    flwr_fisher.errors.ConfigurationError: lr must be > 0 and finite, got 0
    """
    check_number(name, value)
    if not (0 < value < inf or (or_zero and value == 0)):
        span = ">= 0" if or_zero else "> 0"
        raise ConfigurationError(f"{name} must be {span} and finite, got {value}")


def check_range(
    name: str, value: float, low: float, high: float = inf, above: float = -inf
) -> None:
    """Raise :class:`ConfigurationError` unless a number is in a range (NaN is not).

    It must be at least `low`, at most `high`, and greater than `above`.

    Examples
    --------
    >>> check_range("shrink", 1.5, 0, 1)
    Traceback (most recent call last):
    flwr_fisher.errors.ConfigurationError: shrink must be in [0, 1], got 1.5
    """
    check_number(name, value)
    if not low <= value <= high or value <= above:
        span = range_text(low, high, above)
        raise ConfigurationError(f"{name} must be {span}, got {value}")


def range_text(low: float, high: float, above: float) -> str:
    """Return the range of :func:`check_range` as text, such as ``in [0, 1]``."""
    if high == inf:
        return f"> {above}" if above > low else f">= {low}"
    return f"in ({above}, {high}]" if above > low else f"in [{low}, {high}]"


def plain(value: Any) -> Any:
    """Return a number or an array of NumPy or torch as Python's own.

    So is each entry of a dict, a list or a tuple, which becomes a list. Others do not
    travel in records, and their arithmetic has a precision of its own.
    """
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import the packages of an extra within a ``with`` block.

    Parameters
    ----------
    name : str
        The extra's name in ``pip install "flwr-fisher[…]"``.

    Raises
    ------
    MissingExtraError
        If a package is not installed. It names the package and the extra.

    Examples
    --------
    >>> with extra("report"):
    ...     import math
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name).partition(".")[0], name) from error


@contextmanager
def kept_record(what: object) -> Iterator[None]:
    """Read a run's saved record within a ``with`` block, by this version's keys.

    Parameters
    ----------
    what : object
        The record, for the error.

    Raises
    ------
    CheckpointError
        If another version wrote the record. It names the record and the way out.

    Examples
    --------
    >>> with kept_record("round-0003.safetensors"):
    ...     {}["round"]
    Traceback (most recent call last):
    flwr_fisher.errors.CheckpointError: round-0003.safetensors is not in this \
    version's format (KeyError: 'round'): resume with the version of flwr-fisher that \
    began the run, or begin a new run in another checkpoint_dir
    """
    try:
        yield
    except FlwrFisherError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what} is not in this version's format ({type(error).__name__}: "
            f"{error}): resume with the version of flwr-fisher that began the run, or "
            "begin a new run in another checkpoint_dir"
        ) from error


def printable(value: object, most: int = _MOST) -> str:
    r"""Return an untrusted value as one line of text, at most `most` characters long.

    A client's names and texts may be megabytes long, and may hold line breaks or a
    terminal's control characters.

    Examples
    --------
    >>> printable((2, 3)), printable("a\nb\x1b[2J"), len(printable("x" * 10**6))
    ('(2, 3)', 'a\\nb\\x1b[2J', 80)
    >>> printable("it's")
    "it's"
    """
    try:
        # Cut before and after: escaping makes up to ten characters of one.
        text = str(value)[: most + 1]
    except ValueError:  # an integer with more digits than Python prints
        return "…"
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def listed(names: Iterable[str]) -> str:
    """Return the first few names as text, partition-2 before partition-10.

    Examples
    --------
    >>> listed(["a", "b"]), listed([f"partition-{i}" for i in range(7)])[-20:]
    ('a, b', 'rtition-4 and 2 more')
    """
    first = sorted(names, key=lambda name: (len(name), name))
    more = len(first) - _NAMES
    return ", ".join(first[:_NAMES]) + (f" and {more} more" if more > 0 else "")


def quoted(names: Iterable[str]) -> str:
    """Return the first few names of parameters as text, in quotes.

    Examples
    --------
    >>> quoted(["fc.weight", "fc.bias"])
    "'fc.bias', 'fc.weight'"
    """
    return listed(f"'{name}'" for name in names)
