"""GIANT and DONE: Newton directions from the clients' own Hessians.

A round has two exchanges. First, clients send gradients, and the server sends back
their mean g. Then each client solves H_i d_i = g approximately, by Hessian-vector
products, and the server steps along the mean of the solutions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from flwr_fisher.client import LocalProblem, Reply, Request, register_job
from flwr_fisher.curvature import hvp
from flwr_fisher.errors import check_positive, check_whole
from flwr_fisher.params import Params, add, dot, finite, scale, select, subtract
from flwr_fisher.strategies import (
    CurvatureStrategy,
    Exchange,
    ServerState,
    Step,
    Summation,
)
from flwr_fisher.wire import Additive
from rivals.gradients import Uploads, gradient_exchange, mean_of, send_gradient

Product = Callable[[Params], dict[str, Tensor]]


def giant_direction(
    product: Product, gradient: Params, *, iterations: int, tolerance: float = 1e-6
) -> dict[str, Tensor]:
    r"""Return a client's :math:`d_i \approx H_i^{-1} g` by conjugate gradients.

    (Wang, Roosta-Khorasani, Xu & Mahoney, "GIANT: Globally Improved Approximate Newton
    Method for Distributed Optimization", NeurIPS 2018, section 3.) It stops when the
    residual has fallen by `tolerance`. Where the Hessian has no positive curvature, the
    direction is the iterate before, or :math:`g` if there is none: it still descends.
    """
    solution = scale(gradient, 0.0)
    residual = step = dict(gradient)
    start = square = float(dot(residual, residual))
    for iteration in range(iterations):
        if square <= tolerance**2 * start:
            break
        curved = product(step)
        curvature = float(dot(step, curved))
        if curvature <= 0:
            return finite(solution if iteration else gradient, "GIANT's direction")
        solution = add(solution, step, square / curvature)
        residual = add(residual, curved, -square / curvature)
        before, square = square, float(dot(residual, residual))
        step = add(residual, step, square / before)
    return finite(solution, "GIANT's direction")


def done_direction(
    product: Product, gradient: Params, *, alpha: float, iterations: int
) -> dict[str, Tensor]:
    r"""Return a client's :math:`d_i \approx H_i^{-1} g` by Richardson's iterations.

    .. math:: d_i \leftarrow d_i + \alpha (g - H_i d_i), \qquad d_i^{(0)} = 0

    (Dinh, Tran, Nguyen, Bao, Rezaei Balef, Zhou & Zomaya, "DONE: Distributed
    Approximate Newton-type Method for Federated Edge Learning", IEEE TPDS 2022; the
    paper's :math:`d_i` has the opposite sign.) The first iteration needs no product.
    It converges if :math:`0 < \alpha < 2 / \lambda_\max(H_i)` and the Hessian is
    positive definite.
    """
    solution = scale(gradient, alpha)
    for _ in range(iterations - 1):
        solution = add(solution, subtract(gradient, product(solution)), alpha)
    return finite(solution, "DONE's direction")


@register_job("direction")
def direction_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the client's solution of ``H_i d = g`` for the ``gradient`` sent."""
    options = request.options
    gradient = request.vector("gradient", problem.trainable())
    iterations = problem.limits.steps(options, "iterations", 10)

    def product(vector: Params) -> dict[str, Tensor]:
        loss_fn = problem.differentiable_loss
        return hvp(problem.model, problem.train_batches, vector, loss_fn=loss_fn)

    if "alpha" in options:
        alpha = float(options["alpha"])
        found = done_direction(product, gradient, alpha=alpha, iterations=iterations)
    else:
        found = giant_direction(product, gradient, iterations=iterations)
    return Reply({}, Additive({"direction": found}).to_arrays())


class GIANT(CurvatureStrategy):
    """Step along the mean of the clients' solutions by conjugate gradients.

    Parameters
    ----------
    lr : float, default 1.0
        The server's step, in place of the paper's line search; 1 is Newton's own.
    iterations : int, default 10
        Of a client's solver; each takes a pass over its data.
    **kwargs
        :class:`CurvatureStrategy`'s.
    """

    def __init__(self, *, lr: float = 1.0, iterations: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive("lr", lr, or_zero=True)
        check_whole("iterations", iterations, 1)
        self.lr, self.iterations = lr, iterations

    def settings(self) -> Mapping[str, Any]:
        """Return the options that a resumed run must have alike."""
        return {"lr": self.lr, "iterations": self.iterations}

    def solver(self) -> dict[str, int | float]:
        """Return the options of the clients' solver."""
        return {"iterations": self.iterations}

    def exchanges(self, server_round: int) -> Sequence[Exchange[Additive]]:
        """Ask for gradients, then for directions."""
        request, read = {"job": "direction", **self.solver()}, "direction"
        directions = Exchange(
            request,
            Additive.reader(read),
            self._step,
            send=send_gradient,
            additive=Summation(),
        )
        return [gradient_exchange(), directions]

    def _step(self, state: ServerState, uploads: Uploads) -> Step:
        direction = mean_of(uploads, "direction")
        moved = add(select(state.params, direction), direction, -self.lr)
        params = {**state.params, **finite(moved, "the new model")}
        return Step(ServerState(params), details=direction)


class DONE(GIANT):
    """Step along the mean of the clients' solutions by Richardson's iterations.

    Parameters
    ----------
    alpha : float, default 0.05
        The solver's step; FAGH's comparison takes 0.01 or 0.05.
    **kwargs
        :class:`GIANT`'s.
    """

    def __init__(self, *, alpha: float = 0.05, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive("alpha", alpha)
        self.alpha = alpha

    def settings(self) -> Mapping[str, Any]:
        """Return the options that a resumed run must have alike."""
        return {**super().settings(), "alpha": self.alpha}

    def solver(self) -> dict[str, int | float]:
        """Return the options of the clients' solver."""
        return {"iterations": self.iterations, "alpha": self.alpha}
