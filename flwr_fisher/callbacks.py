"""Callbacks after each round: the best model, early stopping, or one's own.

``strategy.start(..., callbacks=[...])`` calls each after every round.
"""

from collections.abc import Iterable, Mapping
from math import inf, isnan
from pathlib import Path
from re import split
from typing import Any, Protocol

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from flwr_fisher.errors import (
    CallbackError,
    ConfigurationError,
    check_known,
    check_whole,
)
from flwr_fisher.files import save_tensors
from flwr_fisher.log_lines import logger
from flwr_fisher.wire import arrays_to_tensors

__all__ = ["BestModel", "Callback", "EarlyStopping", "History"]

Value = int | float | list[int] | list[float]
History = Mapping[int, Mapping[str, Value]]
"""Metrics by name, by round. ``train/…`` and ``evaluate/…`` are means over the clients,
and ``server/…`` is what ``evaluate_fn`` returned. Round 0 is before the first."""


# The fields of Flower's `Result` that hold metrics, by the name of their source.
HISTORIES = {
    "train": "train_metrics_clientapp",
    "evaluate": "evaluate_metrics_clientapp",
    "server": "evaluate_metrics_serverapp",
}


def history_of(result: Result) -> dict[int, dict[str, Value]]:
    """Return all metrics of a run so far.

    Parameters
    ----------
    result : Result
        Flower's result, or this library's.
    """
    joined: dict[int, dict[str, Value]] = {}
    for source, field in HISTORIES.items():
        for number, record in getattr(result, field).items():
            named = {f"{source}/{name}": value for name, value in record.items()}
            joined.setdefault(number, {}).update(named)
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
        if isinstance(callback, type) or not hasattr(callback, "on_round_end"):
            raise ConfigurationError(
                f"{callback!r:.80} is no callback: pass objects with a method "
                "on_round_end, such as BestModel(...)"
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
        except Exception as error:  # the user's own code
            failed = failed or (name, error)
    if failed is not None:
        name, reason = failed
        raise CallbackError(
            f"{name}.on_round_end failed after round {server_round}: "
            f"{type(reason).__name__}: {reason}. The round is finished: partial_result "
            "has it, and with a checkpoint_dir, resume=True goes on from there"
        ) from reason
    return ending


# What the words of a metric's name say of its direction.
_BETTER = {
    "max": {"accuracy", "acc", "auc", "auroc", "f1", "precision", "recall", "dice"},
    "min": {"loss", "error", "perplexity", "mse", "rmse", "mae", "nll"},
}


class _Watched:
    """A metric, and whether larger or smaller values are better."""

    def __init__(self, name: str, mode: str | None) -> None:
        source, slash, _ = str(name).partition("/")
        if not slash or source not in ("server", "evaluate", "train"):
            raise ConfigurationError(
                f"{name!r:.80} is not the name of a metric, such as 'server/accuracy', "
                "'evaluate/loss' or 'train/train_loss'"
            )
        if mode is None:
            words = {*split(r"[^a-z0-9]+", name.lower())}
            mode, *others = [m for m, known in _BETTER.items() if words & known] or [""]
            if others or not mode:
                raise ConfigurationError(
                    f"the name '{name}' does not say whether a larger value is better: "
                    'pass mode="max" or mode="min"'
                )
        check_known("mode", mode, _BETTER)
        self.name, self._source = name, f"{source}/"
        self._sign = 1.0 if mode == "max" else -1.0

    def best_round(self, server_round: int, history: History) -> int:
        """Return the first of the rounds in which the metric is best, or 0.

        No round may have it yet, because not every round has to be evaluated.

        Raises
        ------
        ConfigurationError
            If the metric is a list, or NaN before the first round, or if rounds have
            metrics of its source but not this one.
        """
        known: dict[int, Any] = {
            n: r[self.name] for n, r in history.items() if self.name in r
        }
        lists = any(isinstance(value, list) for value in known.values())
        if lists or isnan(known.get(0, 0.0)):  # an untrained model has each metric
            what = "is a list" if lists else "is NaN before the first round"
            raise ConfigurationError(f"'{self.name}' {what}: watch another metric")
        names = sorted({name for record in history.values() for name in record})
        if not known and any(name.startswith(self._source) for name in names):
            raise ConfigurationError(
                f"no round up to {server_round} has the metric '{self.name}'. The "
                f"metrics are: {', '.join(names)}"
            )
        if not known:
            logger.warning("no round has '%s' yet: is it measured?", self.name)
        # To nine digits: sums over clients in another order differ by rounding.
        values = {
            n: -inf if isnan(v) else self._sign * float(f"{v:.9g}")
            for n, v in known.items()
        }
        return max(values.keys() - {0}, key=lambda n: (values[n], -n), default=0)


class BestModel:
    """Saves the model after each round that is the best so far.

    If a run goes on after its last round, the refined model of that round is taken
    back, with its scores; so is a round that ``reopen=True`` repeats. Another round's
    model may then replace it in the file: copy the file before, if you want to keep it.

    Parameters
    ----------
    path : str | Path
        A ``.safetensors`` file, written whole or not at all. Its metadata have the
        round.
    metric : str, default "server/accuracy"
        The metric that decides. Measure it on validation data: the accuracy of the best
        round on a test set would be too optimistic.
    mode : "max" | "min", optional
        Whether a larger or a smaller value is better. By default it follows from a word
        of the name, such as ``accuracy`` or ``loss``; a name without one is refused.

    Examples
    --------
    ::

        strategy.start(grid, arrays, 20, callbacks=[BestModel("best.safetensors")])
    """

    def __init__(
        self, path: str | Path, metric: str = "server/accuracy", mode: str | None = None
    ) -> None:
        self.path = Path(path).expanduser()
        self._watched = _Watched(metric, mode)

    def on_round_end(
        self, server_round: int, arrays: ArrayRecord, history: History
    ) -> None:
        """Save the model if no earlier round was as good."""
        if self._watched.best_round(server_round, history) != server_round:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"round": str(server_round), "metric": self._watched.name}
        save_tensors(self.path, arrays_to_tensors(arrays), metadata)
        logger.info("The best model so far is round %s's: %s", server_round, self.path)


class EarlyStopping:
    """Ends a run if its metric has not improved for `patience` rounds.

    It checks all rounds each time, so a resumed run ends in the same round as an
    uninterrupted one. The score of a refined last round does not count any more when
    further rounds follow it, because they begin from the model before the refinement.
    To continue a run that has ended, resume it with more patience.

    Parameters
    ----------
    metric : str, default "server/accuracy"
        The metric that decides, which must not be measured on the test set.
    mode : "max" | "min", optional
        Whether a larger or a smaller value is better. By default it follows from a word
        of the name, such as ``accuracy`` or ``loss``; a name without one is refused.
    patience : int, default 5
        How many rounds may pass without an improvement.

    Examples
    --------
    >>> stop = EarlyStopping("server/loss", patience=2)
    >>> losses = {1: 0.9, 2: 0.5, 3: 0.6, 4: 0.5}
    >>> history = {n: {"server/loss": loss} for n, loss in losses.items()}
    >>> stop.on_round_end(4, ArrayRecord(), history)
    True
    """

    def __init__(
        self,
        metric: str = "server/accuracy",
        mode: str | None = None,
        *,
        patience: int = 5,
    ) -> None:
        check_whole("patience", patience, 1)
        self._watched, self.patience = _Watched(metric, mode), patience

    def on_round_end(
        self, server_round: int, arrays: ArrayRecord, history: History
    ) -> bool:
        """Return whether to end the run."""
        best = self._watched.best_round(server_round, history)
        if not best or server_round - best < self.patience:
            return False
        logger.info("'%s' has not improved since round %s", self._watched.name, best)
        return True
