"""An end of a run that gets no better."""

from flwr.app import ArrayRecord

from flwr_fisher.callbacks.base import History
from flwr_fisher.callbacks.metric import Watched
from flwr_fisher.errors import check_positive, check_whole
from flwr_fisher.log_lines import logger


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
