"""One metric of a history, round by round."""

from math import inf, isnan

from flwr_fisher.callbacks.base import History, Value
from flwr_fisher.errors import ConfigurationError, check_known

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
