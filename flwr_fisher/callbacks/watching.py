"""Callbacks that watch one metric of a run: the best model on disk, an early end."""

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


class Watched:
    """A metric that is to grow, or to fall.

    Parameters
    ----------
    name : str
        As in the history: ``server/accuracy``, for example.
    mode : "max" | "min"
        What is better.
    """

    def __init__(self, name: str, mode: str) -> None:
        check_known("mode", mode, _MODES)
        self.name, self._sign = name, 1.0 if mode == "max" else -1.0

    def values(self, server_round: int, history: History) -> dict[int, float]:
        """Return what there is of it by round; where it is larger, it is better.

        There may be none yet: not every round need be evaluated.

        Raises
        ------
        ConfigurationError
            If no round has it, and one has others of its kind, or it is a list.
        """
        known = {n: r[self.name] for n, r in history.items() if self.name in r}
        if not known:
            self._check_may_come(server_round, history)
        return {n: self._better(value) for n, value in known.items() if n}

    def _check_may_come(self, server_round: int, history: History) -> None:
        """Raise where a later round cannot have it either."""
        kind, slash, _ = self.name.partition("/")
        if not slash:
            raise ConfigurationError(
                f"'{self.name}' is no name of a metric, such as 'server/accuracy' or "
                "'evaluate/loss'"
            )
        names = sorted({name for record in history.values() for name in record})
        if any(name.startswith(f"{kind}/") for name in names):
            raise ConfigurationError(
                f"no round up to {server_round} has the metric '{self.name}'; there "
                f"are: {', '.join(names)}"
            )

    def _better(self, value: Value) -> float:
        if isinstance(value, list):
            raise ConfigurationError(f"'{self.name}' is a list, not a number")
        return -inf if isnan(value) else self._sign * value


class BestModel:
    """Writes the model whenever a round is the best so far.

    Parameters
    ----------
    path : str | Path
        A ``.safetensors`` file, written whole or not at all. Which round it is of
        stands in its metadata.
    metric : str, default "server/accuracy"
        What decides. Choose on validation data: of a test set, the best round's
        accuracy says too much.
    mode : "max" | "min", default "max"
        What is better.

    Examples
    --------
    ::

        strategy.start(grid, arrays, 20, callbacks=[BestModel("best.safetensors")])
    """

    def __init__(
        self, path: str | Path, metric: str = "server/accuracy", mode: str = "max"
    ) -> None:
        self.path, self._watched = Path(path), Watched(metric, mode)

    def on_round_end(
        self, server_round: int, arrays: ArrayRecord, history: History
    ) -> None:
        """Write it, if no round before was as good."""
        values = self._watched.values(server_round, history)
        if max(values, key=lambda n: (values[n], -n), default=0) != server_round:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"round": str(server_round), "metric": self._watched.name}
        save_tensors(self.path, arrays_to_tensors(arrays), metadata)


class EarlyStopping:
    """Ends a run that has not become better for some rounds.

    It looks at all rounds each time: a resumed run ends where the uninterrupted one
    would. With more patience it goes on.

    Parameters
    ----------
    metric : str, default "server/accuracy"
        What decides; not of a test set.
    mode : "max" | "min", default "max"
        What is better.
    patience : int, default 5
        How many rounds may pass without a better one.
    min_delta : float, default 0
        By how much it must be better.

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
        """Return whether to end."""
        best, since = float("-inf"), 0
        for number, value in sorted(
            self._watched.values(server_round, history).items()
        ):
            if value > best + self.min_delta or since == 0:
                best, since = value, number
        if not since or server_round - since < self.patience:
            return False
        logger.info(
            "'%s' has not become better since round %s", self._watched.name, since
        )
        return True
