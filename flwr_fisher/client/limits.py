"""Limits on the work that a server may request, and readers of its numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr_fisher.errors import (
    ClientError,
    check_number,
    check_range,
    check_whole,
    plain_fields,
)
from flwr_fisher.wire.options import OPTION


@dataclass(frozen=True, kw_only=True)
class ClientLimits:
    """The limits on a client's work for one request.

    All other work is limited by the client's data and by the epochs of its own
    `train_fn`.

    Parameters
    ----------
    max_examples : int, optional
        From how many examples a client computes a Fisher. Default: as many as the
        server requests.
    max_steps : int, default 1000
        Steps of TCT (500 in its paper), or iterations of a solver, each of which
        takes a pass over the client's data.
    max_epochs : int, default 100
        Epochs of fine-tuning in an evaluation.

    Raises
    ------
    ConfigurationError
        If one is no integer, or below 1.

    Examples
    --------
    >>> ClientLimits(max_steps=100).steps({"local-steps": 5000}, "local-steps", 500)
    Traceback (most recent call last):
    flwr_fisher.errors.ClientError: the server requests fisher.local-steps=5000, but ...
    """

    max_examples: int | None = None
    max_steps: int = 1000
    max_epochs: int = 100

    def __post_init__(self) -> None:
        plain_fields(self)
        if self.max_examples is not None:
            check_whole("max_examples", self.max_examples, 1)
        check_whole("max_steps", self.max_steps, 1)
        check_whole("max_epochs", self.max_epochs, 1)

    def examples(self, requested: int | None) -> int | None:
        """Return the number of examples of a Fisher, or None for all."""
        both = (requested, self.max_examples)
        return min((most for most in both if most is not None), default=None)

    def steps(self, options: Mapping[str, Any], name: str, default: int) -> int:
        """Return an option that is a number of steps.

        Raises
        ------
        ClientError
            If there are more than `max_steps`.
        ConfigurationError
            If it is no integer, or below 1.
        """
        return self._within("max_steps", options, name, default)

    def epochs(self, options: Mapping[str, Any], name: str, default: int) -> int:
        """Return an option that is a number of epochs; errors as of :meth:`steps`."""
        return self._within("max_epochs", options, name, default)

    def _within(
        self, limit: str, options: Mapping[str, Any], name: str, default: int
    ) -> int:
        value, most = whole_number(options, name, default), getattr(self, limit)
        check_range(name, value, 1)
        if value > most:
            raise ClientError(
                f"the server requests {OPTION}{name}={value}, but this client's limit "
                f"is {most}: request less, or pass "
                f"FisherClient(limits=ClientLimits({limit}={value}))"
            )
        return value


def whole_number(options: Mapping[str, Any], name: str, default: int) -> int:
    """Return an option of the server, after a check that it is an integer."""
    value = options.get(name, default)
    check_whole(name, value)
    return int(value)


def real_number(options: Mapping[str, Any], name: str, default: float) -> float:
    """Return an option of the server that is a number; its range is not checked."""
    value = options.get(name, default)
    check_number(name, value)
    return float(value)
