"""What the functions of older apps return, checked."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from flwr_fisher.errors import ClientError
from flwr_fisher.log_lines import logger


def numbers(metrics: Mapping[str, Any], source: str) -> dict[str, float]:
    """Return the metrics that are numbers: others cannot travel among metrics.

    Examples
    --------
    >>> numbers({"accuracy": 0.5, "straggler": True, "host": "a"}, "fit")
    {'accuracy': 0.5, 'straggler': 1}
    """
    kept: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Integral | bool):
            kept[name] = int(value)
        elif isinstance(value, Real):
            kept[name] = float(value)
    if texts := sorted(metrics.keys() - kept.keys()):
        logger.info("%s returned %s, which are no numbers: left out", source, texts)
    return kept


def checked(
    returned: Any, first: type, method: str, what: str
) -> tuple[Any, int, dict[str, Any]]:
    """Return the three things that a method of a ``NumPyClient`` returns."""
    parts = tuple(returned) if isinstance(returned, tuple | list) else ()
    kinds = (first, Integral, dict)
    fits = len(parts) == len(kinds) and all(map(isinstance, parts, kinds))
    if not fits:
        shown = tuple(type(part).__name__ for part in parts) or type(returned).__name__
        raise ClientError(
            f"{method} must return ({what}, number of examples, dict of metrics), "
            f"got {shown}"
        )
    if parts[1] <= 0:
        raise ClientError(
            f"{method} returned {parts[1]} examples, by which the server weights this "
            "client: return how many it has"
        )
    return parts[0], int(parts[1]), parts[2]
