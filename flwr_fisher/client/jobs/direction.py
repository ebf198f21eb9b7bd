"""GIANT's and DONE's client: a Newton direction of its own Hessian."""

from torch import Tensor

from flwr_fisher.client.jobs import register_job
from flwr_fisher.client.limits import real_number
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.curvature import hvp
from flwr_fisher.errors import check_known
from flwr_fisher.params import Params
from flwr_fisher.rounds import done_direction, giant_direction
from flwr_fisher.wire import VectorUpload

_SOLVERS = ("giant", "done")


@register_job("direction")
def direction_job(problem: LocalProblem, request: Request) -> Reply:
    """Return this client's solution of ``H_i p = g``, for the ``gradient`` sent.

    ``solver`` is ``giant`` (conjugate gradients) or ``done`` (Richardson's iterations
    of step ``alpha``), ``iterations`` their number, a pass over the data each.

    Raises
    ------
    ClientError
        If there are more iterations than the client's `max_steps`.
    """
    options = request.options
    solver = str(options.get("solver", "giant"))
    check_known("solver", solver, _SOLVERS)
    g = request.vector("gradient", problem.trained())
    iterations = problem.limits.steps(options, "iterations", 10)
    loss_fn = problem.differentiable_loss

    def product(vector: Params) -> dict[str, Tensor]:
        return hvp(problem.model, problem.train_pairs, vector, loss_fn=loss_fn)

    if solver == "giant":
        direction = giant_direction(product, g, iterations=iterations)
    else:
        alpha = real_number(options, "alpha", 0.05)
        direction = done_direction(product, g, alpha=alpha, iterations=iterations)
    return Reply({}, VectorUpload({"direction": direction}).to_arrays())
