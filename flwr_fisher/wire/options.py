"""The server's options in a request's ``ConfigRecord``, beside the user's keys.

The server's keys begin with ``fisher.``, so that a user's own ``seed``, ``task`` or
``structure`` stays the user's. ``server-round`` is Flower's, and is not changed.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

OPTION = "fisher."
LIBRARY = "flwr-fisher"  # the key of a client's version in its answer
NUM_EXAMPLES = "num-examples"  # Flower's metric, by which clients are weighted
REGRESSION = "regression"  # a metric of clients with a Gaussian likelihood

Value = TypeVar("Value")
# the values of a ConfigRecord, which flwr.app names since 1.31
_Scalar = int | float | str | bytes | bool
ConfigValue = _Scalar | list[int] | list[float] | list[str] | list[bytes] | list[bool]


def named_options(options: Mapping[str, Value]) -> dict[str, Value]:
    """Return a server's options under their keys in the config.

    Examples
    --------
    >>> named_options({"structure": "kfac"})
    {'fisher.structure': 'kfac'}
    """
    return {f"{OPTION}{name}": value for name, value in options.items()}


def split_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a config into the server's options and the user's own entries.

    Examples
    --------
    >>> split_config({"fisher.structure": "kfac", "structure": "mine", "lr": 0.1})
    ({'structure': 'kfac'}, {'structure': 'mine', 'lr': 0.1})
    """
    options = {
        key.removeprefix(OPTION): value
        for key, value in config.items()
        if key.startswith(OPTION)
    }
    return options, {k: v for k, v in config.items() if not k.startswith(OPTION)}
