"""How much worse the server's model is to the clients than their own."""

import logging

from flwr.app import ArrayRecord, MetricRecord

from flwr_fisher.errors import check_range
from flwr_fisher.measures.combine import means, numbers
from flwr_fisher.measures.grid import MeasuredGrid, check_measured

__all__ = ["ClientServerBarrier"]

logger = logging.getLogger("flwr")


class ClientServerBarrier:
    r"""The client-server barrier of the cohort just aggregated, as an ``evaluate_fn``.

    FedFish, Eq. 5: with :math:`L_i` on client i's own training data,

    .. math:: \frac{1}{M} \sum_i \left[L_i(\theta_G) - L_i(\theta_i)\right],

    where :math:`L_i(\theta_i)` comes with the reply to a train message, as
    ``local-loss`` and ``local-accuracy``, and the same clients then evaluate
    :math:`\theta_G`. It costs each of them two passes over its data and one more
    message.

    Parameters
    ----------
    grid : MeasuredGrid
        What the strategy is started with.
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

    - ``barrier-loss``; ``barrier-error`` in classification errors, so
      :math:`\mathrm{accuracy}_i(\theta_i) - \mathrm{accuracy}_i(\theta_G)`: positive
      where the server's model is worse, as for the loss;
    - ``barrier-server-loss``, ``barrier-server-accuracy``, ``barrier-local-loss``,
      ``barrier-local-accuracy``: the two means that the barrier lies between;
    - ``barrier-clients``: how many clients these are, and ``barrier-missing``: how many
      were asked to train but lack one of the two.

    If there are none, a warning stands for the round.

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
        check_range("every", every, 1)
        self.grid, self.every, self.timeout = grid, every, timeout
        grid.report_local(every)

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return the barrier at the round's new parameters."""
        cohort = self.grid.take_cohort()
        if server_round == 0 or server_round % self.every:
            return None
        trained = {n: numbers(r, "local-") for n, r in cohort.items() if r is not None}
        local = {n: scores for n, scores in trained.items() if "loss" in scores}
        if not local:
            logger.warning(
                "No client-server barrier in round %d: none of %d clients replied with "
                "a local-loss. Start the strategy with the MeasuredGrid, and make "
                "clients with FisherClient; where clients train no model, as in FAGH "
                "or TCT's stage 2, there is none",
                server_round,
                len(cohort),
            )
            return None
        config = {"evaluate-on": "train"}
        replies = self.grid.evaluate(local, server_round, arrays, config, self.timeout)
        server = {node: numbers(record) for node, record in replies.items()}
        both = [node for node, scores in server.items() if "loss" in scores]
        if not both:
            logger.warning(
                "No client-server barrier in round %d: none of %d clients evaluated",
                server_round,
                len(local),
            )
            return None
        return _barrier(
            [local[n] for n in both], [server[n] for n in both], missing=len(cohort)
        )


def _barrier(
    local: list[dict[str, float]], server: list[dict[str, float]], missing: int
) -> MetricRecord:
    pairs = list(zip(local, server, strict=True))
    rises = means([{"loss": s["loss"] - own["loss"]} for own, s in pairs])
    found = {"barrier-loss": rises["loss"]}
    keys = ["loss"]
    if all("accuracy" in scores for pair in pairs for scores in pair):
        keys.append("accuracy")
        falls = [{"error": own["accuracy"] - s["accuracy"]} for own, s in pairs]
        found["barrier-error"] = means(falls)["error"]
    for name, rows in (("server", server), ("local", local)):
        mean = means(rows)
        found |= {f"barrier-{name}-{key}": mean[key] for key in keys}
    counts = {"barrier-clients": len(pairs), "barrier-missing": missing - len(pairs)}
    return MetricRecord({**found, **counts})
