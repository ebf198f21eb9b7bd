"""Personalisation: how well held-out clients fine-tune the server's model."""

from flwr.app import ArrayRecord, MetricRecord

from flwr_fisher.errors import ConfigurationError, check_positive, check_range
from flwr_fisher.measures.combine import means, numbers, warn_unmeasured
from flwr_fisher.measures.grid import MeasuredGrid, check_measured
from flwr_fisher.wire import named_options


class Personalisation:
    """Fine-tuning on held-out clients, as an ``evaluate_fn``.

    FedFish, sections 4 and 5.2.2: a client that is held out fine-tunes a copy of the
    server's model on a `fraction` of its training data, and is scored on the half that
    it never fine-tunes on: before (zero-shot) and after. The halves are drawn once,
    from the grid's seed and the client's partition, so that every round and fraction is
    scored on the same examples.

    Clients fine-tune with their own ``train_fn``, which has to be ``LocalSGD`` or
    another dataclass with a field ``epochs``, and in batches of their ``trainloader``'s
    size, which has to be a ``DataLoader`` of a map-style data set.

    Parameters
    ----------
    grid : MeasuredGrid
        What the strategy is started with; it holds clients out.
    fraction : float, default 0.5
        Of a held-out client's examples, to fine-tune on: in (0, 0.5].
    epochs : int, default 1
        Passes over them.
    lr : float, optional
        By default the clients' own.
    every : int, default 1
        Measure round 0, before any training, and each `every`-th round.
    timeout : float, default 3600
        Seconds to wait for the clients.
    name : str, default "personalised"
        What its metrics begin with. Give two measures with different fractions
        different names.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, or the grid is no MeasuredGrid that holds
        someone out.

    Notes
    -----
    A round's metrics, plain means over the clients that replied:
    ``personalised-loss``, ``personalised-accuracy``, ``zero-shot-loss``,
    ``zero-shot-accuracy``; ``personalised-clients``, how many these are, and
    ``personalised-missing``, how many could not (with fewer than four examples, for
    one). If none replied, a warning stands for the round.

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
        check_range("epochs", epochs, 1)
        check_range("every", every, 1)
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
