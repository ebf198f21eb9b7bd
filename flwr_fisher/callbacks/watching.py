"""Callbacks that watch one metric: they save the best model, or end the run early."""

from math import inf, isnan
from pathlib import Path

from flwr.app import ArrayRecord

from flwr_fisher.callbacks.base import History, Value
from flwr_fisher.errors import (
    ConfigurationError,
    check_known,
    check_positive,
    check_whole,
)
from flwr_fisher.files import save_tensors
from flwr_fisher.log_lines import logger
from flwr_fisher.wire import arrays_to_tensors

_MODES = ("max", "min")
_KINDS = ("server", "evaluate", "train")  # of metrics, by their source


class Watched:
    """A metric, and whether larger or smaller values are better.

    Parameters
    ----------
    name : str
        The metric's name in the history, such as ``server/accuracy``.
    mode : "max" | "min"
        Whether a larger or a smaller value is better.

    Raises
    ------
    ConfigurationError
        If no metric can have this name, or the mode is unknown.
    """

    def __init__(self, name: str, mode: str) -> None:
        check_known("mode", mode, _MODES)
        kind, slash, _ = str(name).partition("/")
        if not slash or kind not in _KINDS:
            raise ConfigurationError(
                f"{name!r:.80} is not the name of a metric: names are such as "
                "'server/accuracy', 'evaluate/loss' or 'train/train_loss'"
            )
        self._told = False
        self.name, self._sign = name, 1.0 if mode == "max" else -1.0

    def values(self, server_round: int, history: History) -> dict[int, float]:
        """Return the metric's values by round, signed so that larger is better.

        There may be none yet, because not every round has to be evaluated.

        Raises
        ------
        ConfigurationError
            If the metric is a list, or if rounds have metrics of its kind but not this
            one.
        """
        known = {n: r[self.name] for n, r in history.items() if self.name in r}
        if not known:
            self._check_may_come(server_round, history)
        return {n: self._better(value) for n, value in known.items() if n}

    def _check_may_come(self, server_round: int, history: History) -> None:
        """Raise an error if no later round can have the metric either."""
        kind = self.name.partition("/")[0]
        names = sorted({name for record in history.values() for name in record})
        if any(name.startswith(f"{kind}/") for name in names):
            raise ConfigurationError(
                f"no round up to {server_round} has the metric '{self.name}'. The "
                f"metrics are: {', '.join(names)}"
            )
        if not self._told:
            self._told = True
            logger.warning(
                "no round up to %d has the metric '%s', or any '%s/…': 'server/…' come "
                "from start(evaluate_fn=...), 'evaluate/…' from clients that evaluate",
                server_round,
                self.name,
                kind,
            )

    def _better(self, value: Value) -> float:
        if isinstance(value, list):
            raise ConfigurationError(
                f"the metric '{self.name}' is a list: watch one that is a number"
            )
        return -inf if isnan(value) else self._sign * value


class BestModel:
    """Saves the model after each round that is the best so far.

    Parameters
    ----------
    path : str | Path
        A ``.safetensors`` file, written whole or not at all. Its metadata have the
        round.
    metric : str, default "server/accuracy"
        The metric that decides. Measure it on validation data: the accuracy of the best
        round on a test set would be too optimistic.
    mode : "max" | "min", default "max"
        Whether a larger or a smaller value is better.

    Examples
    --------
    ::

        strategy.start(grid, arrays, 20, callbacks=[BestModel("best.safetensors")])
    """

    def __init__(
        self, path: str | Path, metric: str = "server/accuracy", mode: str = "max"
    ) -> None:
        self.path = Path(path).expanduser()
        self._watched = Watched(metric, mode)

    def on_round_end(
        self, server_round: int, arrays: ArrayRecord, history: History
    ) -> None:
        """Save the model if no earlier round was as good."""
        values = self._watched.values(server_round, history)
        if max(values, key=lambda n: (values[n], -n), default=0) != server_round:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"round": str(server_round), "metric": self._watched.name}
        save_tensors(self.path, arrays_to_tensors(arrays), metadata)


class EarlyStopping:
    """Ends a run if its metric has not improved for `patience` rounds.

    It checks all rounds each time, so a resumed run ends in the same round as an
    uninterrupted one. To continue a run that has ended, resume it with more patience.

    Parameters
    ----------
    metric : str, default "server/accuracy"
        The metric that decides, which must not be measured on the test set.
    mode : "max" | "min", default "max"
        Whether a larger or a smaller value is better.
    patience : int, default 5
        How many rounds may pass without an improvement.
    min_delta : float, default 0
        The smallest change that counts as an improvement.

    Examples
    --------
    >>> stop = EarlyStopping("server/loss", mode="min", patience=2)
    >>> losses = {1: 0.9, 2: 0.5, 3: 0.6, 4: 0.5}
    >>> history = {n: {"server/loss": loss} for n, loss in losses.items()}
    >>> stop.on_round_end(4, ArrayRecord(), history)
    True
    """

    def __init__(
        self,
        metric: str = "server/accuracy",
        mode: str = "max",
        *,
        patience: int = 5,
        min_delta: float = 0.0,
    ) -> None:
        check_whole("patience", patience, 1)
        check_positive("min_delta", min_delta, or_zero=True)
        self._watched = Watched(metric, mode)
        self.patience, self.min_delta = patience, min_delta

    def on_round_end(
        self, server_round: int, arrays: ArrayRecord, history: History
    ) -> bool:
        """Return whether to end the run."""
        best, since = float("-inf"), 0
        for number, value in sorted(
            self._watched.values(server_round, history).items()
        ):
            if value > best + self.min_delta or since == 0:
                best, since = value, number
        if not since or server_round - since < self.patience:
            return False
        logger.info("'%s' has not improved since round %s", self._watched.name, since)
        return True
