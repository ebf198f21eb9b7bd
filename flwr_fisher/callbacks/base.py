"""When a callback is called, with what, and what becomes of its errors."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from flwr_fisher.errors import CallbackError, ConfigurationError

Value = int | float | list[int] | list[float]
History = Mapping[int, Mapping[str, Value]]
"""By round, metrics by name: ``train/…`` and ``evaluate/…`` are the clients', averaged,
``server/…`` is what ``evaluate_fn`` returned. Round 0 is before the first."""


def history_of(result: Result) -> dict[int, dict[str, Value]]:
    """Return all metrics of a run so far.

    Parameters
    ----------
    result : Result
        Flower's, or one of this library's.
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
    """Anything with this method."""

    def on_round_end(
        self, server_round: int, arrays: ArrayRecord, history: History
    ) -> bool | None:
        """Learn that a round is finished, and on the disk where the run is kept.

        A run that is resumed calls it at once, for the last round that was finished:
        the crash may have come before the call. So it may see that round twice.

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
            True ends the run.
        """


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """Refuse what is no callback, before anything begins.

    Raises
    ------
    ConfigurationError
        Naming it.
    """
    for callback in callbacks:
        if not callable(getattr(callback, "on_round_end", None)):
            raise ConfigurationError(
                f"a callback has a method on_round_end, and {callback!r} has none"
            )


def call(
    callbacks: Iterable[Callback],
    server_round: int,
    arrays: ArrayRecord,
    history: History,
) -> list[str]:
    """Call all; return the names of those that end the run.

    Raises
    ------
    CallbackError
        Naming the first that failed, when all others have been called.
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
            f"{type(reason).__name__}: {reason}; the round is finished: with a "
            "checkpoint_dir, resume=True goes on from there"
        ) from reason
    return ending
