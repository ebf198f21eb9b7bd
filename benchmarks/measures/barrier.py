"""The client-server barrier: the server's model against the clients' own."""

from collections.abc import Mapping

from flwr.app import ArrayRecord, MetricRecord

from flwr_fisher.errors import check_whole
from flwr_fisher.wire import named_options
from measures.combine import means, numbers, warn_unmeasured
from measures.grid import MeasuredGrid, check_measured


class ClientServerBarrier:
    r"""The client-server barrier of the last aggregated cohort, as an ``evaluate_fn``.

    FedFish, Eq. 5: with :math:`L_i` on client i's own training data,

    .. math:: \frac{1}{M} \sum_i \left[L_i(\theta_G) - L_i(\theta_i)\right],

    A client reports :math:`L_i(\theta_i)` in its reply to a train message, as
    ``local-loss`` and ``local-accuracy``. The same clients then evaluate
    :math:`\theta_G`. Each client needs two passes over its data and one more message.

    Parameters
    ----------
    grid : MeasuredGrid
        The grid with which the strategy is started.
    every : int, default 1
        Measure each `every`-th round.
    timeout : float, default 3600
        Seconds to wait for the clients.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, or the grid is no MeasuredGrid.

    Notes
    -----
    A round's metrics, means over the clients that scored both models:

    - ``barrier-loss``, and ``barrier-error``, the same of classification errors:
      :math:`\mathrm{accuracy}_i(\theta_i) - \mathrm{accuracy}_i(\theta_G)`. Both are
      positive if the server's model is worse;
    - ``barrier-server-loss``, ``barrier-server-accuracy``, ``barrier-local-loss``,
      ``barrier-local-accuracy``: the two means whose difference is the barrier;
    - ``barrier-clients``: the number of these clients, and ``barrier-missing``: the
      number of clients that were asked to train but lack one of the two scores.

    If there are no such clients, the log has a warning, and the round has no such
    metrics.

    Examples
    --------
    ::

        measured = MeasuredGrid(grid)
        barrier = ClientServerBarrier(measured)
        result = FedAvg().start(measured, arrays, evaluate_fn=barrier)
        result.evaluate_metrics_serverapp[1]["barrier-loss"]
    """

    def __init__(
        self, grid: MeasuredGrid, *, every: int = 1, timeout: float = 3600
    ) -> None:
        check_measured(grid)
        check_whole("every", every, 1)
        self.grid, self.every, self.timeout = grid, every, timeout
        grid.report_local(every)

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return the barrier at the round's new parameters."""
        cohort = self.grid.take_cohort()
        if server_round == 0 or server_round % self.every:
            return None
        local = _scores(cohort, "local-")
        if not local:
            reason = (
                f"none of {len(cohort)} clients replied with a local-loss. Start the "
                "strategy with the MeasuredGrid, and use FisherClient. If clients "
                "train no model, as in FAGH or TCT's stage 2, or hide their metrics in "
                "a secure sum, there is no barrier"
            )
            warn_unmeasured("client-server barrier", server_round, reason)
            return None
        config = named_options({"job": "evaluate-on-train"})
        replies = self.grid.evaluate(local, server_round, arrays, config, self.timeout)
        server = _scores(replies)
        if not server:
            reason = f"none of {len(local)} clients evaluated"
            warn_unmeasured("client-server barrier", server_round, reason)
            return None
        barrier = means([_barrier(local[n], scores) for n, scores in server.items()])
        missing = len(cohort) - len(server)
        counts = {"barrier-clients": len(server), "barrier-missing": missing}
        return MetricRecord({**barrier, **counts})


def _scores(
    records: Mapping[int, MetricRecord | None], prefix: str = ""
) -> dict[int, dict[str, float]]:
    """Return the nodes' numbers under a prefix, for nodes that report a loss."""
    scores = {node: numbers(record or {}, prefix) for node, record in records.items()}
    return {node: row for node, row in scores.items() if "loss" in row}


def _barrier(local: dict[str, float], server: dict[str, float]) -> dict[str, float]:
    """Return one client's differences, and the scores between which they are."""
    barrier = {"barrier-loss": server["loss"] - local["loss"]}
    keys = ["loss"]
    if "accuracy" in local and "accuracy" in server:
        keys.append("accuracy")
        barrier["barrier-error"] = local["accuracy"] - server["accuracy"]
    for name, scores in (("server", server), ("local", local)):
        barrier |= {f"barrier-{name}-{key}": scores[key] for key in keys}
    return barrier
