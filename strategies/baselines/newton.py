"""GIANT's and DONE's rounds: a mean gradient, then the clients' Newton directions."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord

from flwr_fisher.errors import check_positive, check_whole
from flwr_fisher.params import Params, double, norm
from flwr_fisher.rounds import newton_step
from flwr_fisher.server.exchange import (
    Exchange,
    Groups,
    ServerState,
    Step,
    Summation,
    Uploads,
    mean_vector,
)
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.wire import Additive, ConfigValue

_GRADIENT, _DIRECTION = "gradient", "direction"


def gradients_then(
    request: Mapping[str, ConfigValue],
    read: Callable[[ArrayRecord, Params], Additive],
    step: Callable[[ServerState, Uploads[Additive]], Step],
) -> list[Exchange[Additive]]:
    """Return two exchanges: for gradients, and one that sends clients their mean.

    Parameters
    ----------
    request, read, step
        The second exchange's.
    """
    of_gradients, mean = Additive.reader(_GRADIENT), Summation[Additive]()
    return [
        Exchange({"job": "gradient"}, of_gradients, _keep_mean, additive=mean),
        Exchange(request, read, step, _send_mean, additive=mean),
    ]


def _keep_mean(state: ServerState, uploads: Uploads[Additive]) -> Step:
    gradient = mean_vector(uploads, _GRADIENT)
    metrics = {
        "gradient-norm": float(norm(double(gradient))),
        "num-gradients": sum(len(upload.members) or 1 for upload in uploads),
    }
    return Step(ServerState(state.params, {_GRADIENT: gradient}), metrics)


def _send_mean(state: ServerState) -> Groups:
    return {_GRADIENT: state.group(_GRADIENT)}


class NewtonStrategy(CurvatureStrategy):
    r"""Base of GIANT and DONE, with different solvers of :math:`H_i d_i = g`.

    In a round, clients report the gradients of their whole loss at :math:`\theta`; then
    the same clients receive the mean :math:`g` and solve, and the server takes the step
    :math:`\theta \leftarrow \theta - \eta \sum_i p_i d_i`, where :math:`p_i` is a
    client's share of the examples. A client uploads twice a model's size. A client that
    fails in one exchange still takes part in the other.

    Parameters
    ----------
    lr : float, default 1.0
        :math:`\eta`.
    iterations : int, default 10
        Iterations of a client's solver. Each takes a Hessian-vector product over the
        client's data, which costs as much as two gradients.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range; or, from ``configure_train``, if Flower's own
        loop runs the strategy: that loop has one exchange a round, and this strategy
        needs two.
    """

    moves_norms = False  # clients differentiate in eval mode

    def __init__(self, *, lr: float = 1.0, iterations: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive("lr", lr, or_zero=True)
        check_whole("iterations", iterations, 1)
        self.lr, self.iterations = lr, iterations

    @abstractmethod
    def solver(self) -> dict[str, str | int | float]:
        """Return the options of a client's solver, for the job ``direction``."""

    def exchanges(self, server_round: int) -> Sequence[Exchange[Additive]]:
        """Return two exchanges: for gradients, and with their mean for directions."""
        request, read = {"job": "direction", **self.solver()}, Additive.reader
        return gradients_then(request, read(_DIRECTION), self._step)

    def _step(self, state: ServerState, uploads: Uploads[Additive]) -> Step:
        """Return a step along the mean of the clients' directions."""
        direction = mean_vector(uploads, _DIRECTION)
        params = newton_step(state.params, [direction], [1.0], lr=self.lr)
        return Step(ServerState(params), details=direction)

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        return {"lr": self.lr, **self.solver()}


class GIANT(NewtonStrategy):
    r"""Globally improved approximate Newton (Wang et al., NeurIPS 2018).

    Each client solves :math:`H_i d_i = g` for the mean gradient :math:`g` by conjugate
    gradients on its own Hessian, and the server steps along the mean of the
    :math:`d_i`. For convex losses; see :func:`flwr_fisher.rounds.giant_direction`.
    Clients are weighted by their numbers of examples; in the paper all have equally
    many. `lr` replaces the paper's line search.

    Parameters
    ----------
    lr : float, default 1.0
        :math:`\eta`; 1 is Newton's own step.
    iterations : int, default 10
        Iterations of conjugate gradients. Each takes a pass over a client's data.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range; or, from ``configure_train``, if Flower's own
        loop runs the strategy: that loop has one exchange a round, and this strategy
        needs two.

    Notes
    -----
    Buffers stay as they are. ``CurvatureResult.details`` is the last mean direction, by
    parameter; a round's metrics have ``gradient-norm``, and ``num-gradients``: how many
    clients' gradients are in the mean.

    Examples
    --------
    ::

        strategy = GIANT(fraction_train=0.4)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=100)
    """

    def solver(self) -> dict[str, str | int | float]:
        """Return the options of a client's solver."""
        return {"solver": "giant", "iterations": self.iterations}


class DONE(NewtonStrategy):
    r"""Distributed approximate Newton for federated edge learning (Dinh et al., 2022).

    Each client solves :math:`H_i d_i = g` for the mean gradient :math:`g` by

    .. math:: d_i \leftarrow d_i + \alpha (g - H_i d_i), \qquad d_i^{(0)} = 0,

    and the server steps along the mean of the :math:`d_i`. It converges where
    :math:`0 < \alpha < 2 / \lambda_\max(H_i)` and the Hessian is positive definite; see
    :func:`flwr_fisher.rounds.done_direction`. Clients are weighted by their examples.

    Parameters
    ----------
    lr : float, default 1.0
        :math:`\eta`; 1 is Newton's own step.
    alpha : float, default 0.05
        :math:`\alpha`; FAGH's comparison takes 0.01 or 0.05.
    iterations : int, default 10
        The number of steps. The first is free. Each further one takes a pass over a
        client's data.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range; or, from ``configure_train``, if Flower's own
        loop runs the strategy: that loop has one exchange a round, and this strategy
        needs two.

    Notes
    -----
    Buffers stay as they are. ``CurvatureResult.details`` is the last mean direction, by
    parameter; a round's metrics have ``gradient-norm``, and ``num-gradients``: how many
    clients' gradients are in the mean.

    Examples
    --------
    ::

        strategy = DONE(alpha=0.01, fraction_train=0.4)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=100)
    """

    def __init__(
        self,
        *,
        lr: float = 1.0,
        alpha: float = 0.05,
        iterations: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(lr=lr, iterations=iterations, **kwargs)
        check_positive("alpha", alpha)
        self.alpha = alpha

    def solver(self) -> dict[str, str | int | float]:
        """Return the options of a client's solver."""
        return {"solver": "done", "iterations": self.iterations, "alpha": self.alpha}
