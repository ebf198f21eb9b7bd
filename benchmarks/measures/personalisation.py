"""Personalisation: how well held-out clients fine-tune the server's model."""

from flwr.app import ArrayRecord, MetricRecord

from flwr_fisher.errors import (
    ConfigurationError,
    check_positive,
    check_range,
    check_whole,
)
from flwr_fisher.wire import named_options
from measures.combine import means, numbers, warn_unmeasured
from measures.grid import MeasuredGrid, check_measured


class Personalisation:
    """Fine-tuning on held-out clients, as an ``evaluate_fn``.

    FedFish, sections 4 and 5.2.2: a held-out client fine-tunes a copy of the server's
    model on a `fraction` of its training data. It scores the model before (zero-shot)
    and after, on the half of its data that it never uses for fine-tuning. The grid's
    seed and the client's partition determine the halves, so every round and fraction is
    scored on the same examples.

    Clients fine-tune with their own ``train_fn``, which must be ``LocalSGD`` or another
    dataclass with a field ``epochs``. They use the batch size of their ``trainloader``,
    which must be a ``DataLoader`` of a map-style data set.

    Parameters
    ----------
    grid : MeasuredGrid
        The grid with which the strategy is started. It must hold clients out.
    fraction : float, default 0.5
        The share of a held-out client's examples for fine-tuning, in (0, 0.5].
    epochs : int, default 1
        Passes over these examples.
    lr : float, optional
        The learning rate. Default: the clients' own.
    every : int, default 1
        Measure round 0, before any training, and each `every`-th round.
    timeout : float, default 3600
        Seconds to wait for the clients.
    name : str, default "personalised"
        The beginning of its metrics' names. Two measures with different fractions need
        different names.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, or the grid is not a MeasuredGrid that holds
        clients out.

    Notes
    -----
    A round's metrics, plain means over the clients that replied: ``personalised-loss``,
    ``personalised-accuracy``, ``zero-shot-loss``, ``zero-shot-accuracy``;
    ``personalised-clients``, the number of these clients; and ``personalised-missing``,
    the number of clients that could not (because they have fewer than four examples,
    for instance). If no client replied, the log has a warning, and the round has no
    such metrics.

    Examples
    --------
    ::

        measured = MeasuredGrid(grid, held_out=20)
        quarter = Personalisation(measured, fraction=0.25, name="personalised-25")
        half = Personalisation(measured, fraction=0.5, name="personalised-50")
        strategy.start(measured, arrays, evaluate_fn=combine(quarter, half))
    """

    def __init__(
        self,
        grid: MeasuredGrid,
        *,
        fraction: float = 0.5,
        epochs: int = 1,
        lr: float | None = None,
        every: int = 1,
        timeout: float = 3600,
        name: str = "personalised",
    ) -> None:
        check_positive("fraction", fraction, most=0.5)
        check_whole("epochs", epochs, 1)
        check_whole("every", every, 1)
        check_measured(grid)
        if not grid.num_held_out:
            raise ConfigurationError(
                "personalisation needs clients that never train: hold some out, "
                "MeasuredGrid(grid, held_out=20)"
            )
        self.grid, self.every, self.timeout, self.name = grid, every, timeout, name
        options = {"personalise-fraction": fraction, "personalise-epochs": epochs}
        self.config = named_options(options)
        if lr is not None:
            check_range("lr", lr, 0)
            self.config["lr"] = lr

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return the scores of held-out clients, before and after fine-tuning."""
        if server_round % self.every:
            return None
        nodes = self.grid.held_out()
        replies = self.grid.evaluate(
            nodes, server_round, arrays, self.config, self.timeout
        )
        rows = [numbers(record) for record in replies.values()]
        needed = {"zero-shot-loss", "personalised-loss"}
        good = [row for row in rows if needed <= row.keys()]
        if not good:
            reason = f"none of {len(nodes)} held-out clients replied"
            warn_unmeasured("personalisation", server_round, reason)
            return None
        mean = means(good)
        metrics: dict[str, float] = {}
        for kind, name in (("zero-shot", "zero-shot"), ("personalised", self.name)):
            scores = numbers(mean, f"{kind}-")
            metrics |= {f"{name}-{key}": value for key, value in scores.items()}
        missing = len(nodes) - len(good)
        counts = {f"{self.name}-clients": len(good), f"{self.name}-missing": missing}
        return MetricRecord({**metrics, **counts})
