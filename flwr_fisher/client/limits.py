"""What a server may ask of a client: numbers that are numbers, and not too large."""

from collections.abc import Mapping
from typing import Any

from flwr_fisher.errors import ClientError, check_number, check_range, check_whole
from flwr_fisher.wire.options import OPTION

# The papers' most: TCT takes 500 steps a round, FedFish trains for 16 epochs.
MAX_STEPS, MAX_EPOCHS = 1000, 100


def whole_number(options: Mapping[str, Any], name: str, default: int) -> int:
    """Return an option of the server that is an integer.

    Raises
    ------
    ConfigurationError
        If it is none.
    """
    value = options.get(name, default)
    check_whole(name, value)
    return int(value)


def real_number(options: Mapping[str, Any], name: str, default: float) -> float:
    """Return an option of the server that is a number; its range is not looked at.

    Raises
    ------
    ConfigurationError
        If it is none.
    """
    value = options.get(name, default)
    check_number(name, value)
    return float(value)


def capped_number(
    options: Mapping[str, Any], name: str, default: int, *, cap: int, keyword: str
) -> int:
    """Return how many steps or epochs the server asks for.

    Parameters
    ----------
    options : Mapping[str, Any]
        The server's.
    name : str
        The option's.
    default : int
        What it is where it is not sent.
    cap : int
        The most that this client does.
    keyword : str
        What sets the cap: an argument of ``FisherClient``.

    Raises
    ------
    ClientError
        If it is more than the cap.
    ConfigurationError
        If it is no integer, or below 1.

    Examples
    --------
    >>> sent = {"local-steps": 5000}
    >>> capped_number(sent, "local-steps", 500, cap=1000, keyword="max_steps")
    Traceback (most recent call last):
    flwr_fisher.errors.ClientError: the server asks for fisher.local-steps=5000, and ...
    """
    value = whole_number(options, name, default)
    check_range(name, value, 1)
    if value > cap:
        raise ClientError(
            f"the server asks for {OPTION}{name}={value}, and this client does at most "
            f"{cap}: ask for less, or pass FisherClient({keyword}={value})"
        )
    return value
