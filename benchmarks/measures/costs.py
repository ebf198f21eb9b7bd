"""The costs of a federation for its clients, by round."""

from flwr.app import ArrayRecord, MetricRecord

from flwr_fisher.errors import check_range
from flwr_fisher.log_lines import logger
from flwr_fisher.server.driver import EvaluateFn
from measures.grid import MeasuredGrid, check_measured


def costs(grid: MeasuredGrid, gradient_evaluations: int) -> EvaluateFn:
    """Return an ``evaluate_fn`` that reports the costs of all rounds so far.

    Its metrics are ``uploaded-bytes``, the serialised size of all train replies of all
    clients in all exchanges, and ``gradient-evaluations``. A resumed run has only
    the latter, because the uploads before the resume are not known.

    Parameters
    ----------
    grid : MeasuredGrid
        The grid with which the strategy is started.
    gradient_evaluations : int
        The work of a client in a round, counted in gradients of its whole loss. A local
        epoch is one. A pass for a gradient and the Hessian's product with a vector is
        two, because it takes about twice as long.

    Raises
    ------
    ConfigurationError
        If the number is out of range, or the grid is no MeasuredGrid.

    Examples
    --------
    ::

        measured = MeasuredGrid(grid)
        evaluate_fn = combine(my_evaluate_fn, costs(measured, 2))
        result = FAGH().start(measured, arrays, evaluate_fn=evaluate_fn)
    """
    check_measured(grid)
    check_range("gradient_evaluations", gradient_evaluations, 0)
    before: int | None = None
    grid.count_uploads()

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal before
        evaluations = {"gradient-evaluations": gradient_evaluations * server_round}
        if server_round == 0:  # another run begins
            before = grid.count_uploads()
        if before is None:
            logger.warning(
                "No uploaded-bytes in round %d: the run was resumed, and what clients "
                "uploaded before is not known here",
                server_round,
            )
            return MetricRecord({**evaluations})
        uploaded = grid.count_uploads() - before
        if server_round and not uploaded:
            logger.warning(
                "The MeasuredGrid saw no upload up to round %d: start the strategy "
                "with it, too",
                server_round,
            )
        return MetricRecord({"uploaded-bytes": uploaded, **evaluations})

    return evaluate_fn
