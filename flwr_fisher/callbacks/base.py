"""The interface of callbacks; how they are called, and how their errors are raised."""

from collections.abc import Iterable, Mapping
from inspect import iscoroutinefunction
from typing import Protocol

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from flwr_fisher.errors import CallbackError, ConfigurationError

Value = int | float | list[int] | list[float]
History = Mapping[int, Mapping[str, Value]]
"""Metrics by name, by round. ``train/…`` and ``evaluate/…`` are means over the clients,
and ``server/…`` is what ``evaluate_fn`` returned. Round 0 is before the first."""


def history_of(result: Result) -> dict[int, dict[str, Value]]:
    """Return all metrics of a run so far.

    Parameters
    ----------
    result : Result
        Flower's result, or this library's.
    """
    sources = {
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
    joined: dict[int, dict[str, Value]] = {}
    for source, rounds in sources.items():
        for number, record in rounds.items():
            own = {f"{source}/{name}": value for name, value in record.items()}
            joined.setdefault(number, {}).update(own)
    return joined


class Callback(Protocol):
    """A callback: any object with a method `on_round_end`."""

    def on_round_end(
        self, server_round: int, arrays: ArrayRecord, history: History
    ) -> bool | None:
        """Do something after a round; with a checkpoint_dir, the round is on the disk.

        A resumed run first calls it for the last round that was finished, because a
        crash may have come before the call. So it may see that round twice.

        Parameters
        ----------
        server_round : int
            The round, from 1.
        arrays : ArrayRecord
            The global parameters and buffers.
        history : Mapping[int, Mapping[str, int | float | list]]
            The metrics of this round and all before.

        Returns
        -------
        bool | None
            True ends the run; anything else continues it.
        """


def checked_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return the callbacks as a list, after a check that each has its method.

    Raises
    ------
    ConfigurationError
        If an object is not a callback. It names the object.
    """
    if not isinstance(callbacks, Iterable):
        raise ConfigurationError(
            f"callbacks must be a list of callbacks, got {callbacks!r:.80}"
        )
    every = list(callbacks)  # a generator can be read once
    for callback in every:
        method = getattr(callback, "on_round_end", None)
        if not callable(method):
            raise ConfigurationError(
                f"callbacks must have a method on_round_end, and {callback!r} has none"
            )
        if isinstance(callback, type) or iscoroutinefunction(method):
            raise ConfigurationError(
                f"{callback!r:.80} is a class, or its on_round_end is async: pass an "
                "object, such as BestModel(...), with an ordinary method"
            )
    return every


def call(
    callbacks: Iterable[Callback],
    server_round: int,
    arrays: ArrayRecord,
    history: History,
) -> list[str]:
    """Call all callbacks; return the names of those that end the run.

    Raises
    ------
    CallbackError
        If a callback failed. It names the first that failed, after all others have been
        called.
    """
    ending = []
    failed: tuple[str, Exception] | None = None
    for callback in callbacks:
        name = type(callback).__name__
        try:
            if callback.on_round_end(server_round, arrays, history):
                ending.append(name)
        except Exception as error:  # a user's own code, or a tracker's server
            failed = failed or (name, error)
    if failed is not None:
        name, reason = failed
        raise CallbackError(
            f"{name}.on_round_end failed after round {server_round}: "
            f"{type(reason).__name__}: {reason}. The round itself is finished: the "
            "strategy's partial_result has it, and with a checkpoint_dir, resume=True "
            "goes on from there"
        ) from reason
    return ending
