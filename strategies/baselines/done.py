"""DONE: clients' Newton directions by Richardson's iterations."""

from typing import Any

from flwr_fisher.errors import check_positive
from flwr_fisher.strategies.baselines.newton import NewtonStrategy


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
        The first is free, every other a pass over a client's data.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range; or by ``configure_train``: a round has two
        exchanges, which Flower's own loop does not know.

    Notes
    -----
    Buffers stay as they are. ``CurvatureResult.details`` is the last mean direction, by
    parameter; a round's metrics have ``gradient-norm``.

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
