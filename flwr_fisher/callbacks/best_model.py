"""The model of the best round, on disk."""

from pathlib import Path

from flwr.app import ArrayRecord

from flwr_fisher.callbacks.base import History
from flwr_fisher.callbacks.metric import Watched
from flwr_fisher.files import save_tensors
from flwr_fisher.wire import arrays_to_tensors


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
