"""Text from outside, made fit for a log line or an error."""

from collections.abc import Iterable

__all__ = ["listed", "printable"]

_MOST, _NAMES = 80, 5


def printable(value: object, most: int = _MOST) -> str:
    r"""Return an untrusted value as text on one line, of at most `most` signs.

    What a client names or says may be megabytes, and may hold line breaks or a
    terminal's control characters.

    Examples
    --------
    >>> printable((2, 3)), printable("a\nb\x1b[2J"), len(printable("x" * 10**6))
    ('(2, 3)', 'a\\nb\\x1b[2J', 80)
    >>> printable("it's")
    "it's"
    """
    try:
        # Cut before and after: an escaped sign is up to ten signs long.
        text = str(value)[: most + 1]
    except ValueError:  # an integer with more digits than Python prints
        return "…"
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def listed(names: Iterable[str]) -> str:
    """Return some of many names in words, partition-2 before partition-10.

    Examples
    --------
    >>> listed(["a", "b"]), listed([f"partition-{i}" for i in range(7)])[-20:]
    ('a, b', 'rtition-4 and 2 more')
    """
    first = sorted(names, key=lambda name: (len(name), name))
    more = len(first) - _NAMES
    return ", ".join(first[:_NAMES]) + (f" and {more} more" if more > 0 else "")
