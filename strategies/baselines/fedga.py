"""FedGA: federated averaging from displaced starts, to align clients' gradients."""

from collections.abc import Sequence
from typing import Any

from flwr_fisher.errors import check_range
from flwr_fisher.server.exchange import (
    Exchange,
    ServerState,
    Step,
    Uploads,
    mean_vector,
)
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.baselines.newton import gradients_then
from flwr_fisher.wire import Additive


class FedGA(CurvatureStrategy):
    r"""Federated gradient alignment (Dandi, Barba & Jaggi, AAAI 2022).

    A round has two exchanges with the same clients. First they report
    :math:`\nabla f_i(\theta)`, the gradient of their whole loss. The server sends them
    the mean, and each client trains, with any loop, from

    .. math:: \theta + v_i, \qquad
              v_i = -\beta \big( \nabla f(\theta) - \nabla f_i(\theta) \big)

    (figure 1 of *Implicit Gradient Alignment in Distributed and Federated Learning*).
    The server averages the trained models as FedAvg does. This costs twice FedAvg's
    bytes, and two more passes over a client's data for its gradient. The second pass
    computes the gradient again, so that a client need not store it.

    Parameters
    ----------
    beta : float, default 0.1
        :math:`\beta`. Its scale is that of the learning rate, and it must be tuned; 0
        is FedAvg.
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
    A gradient is that of the client's ``loss_fn``, with the model in eval mode. A
    client that fails in one exchange still takes part in the other; then the mean of
    the displacements is not quite zero. A round's metrics have ``gradient-norm``, and
    ``num-gradients``: how many clients' gradients are in the mean.
    ``CurvatureResult.details`` is None.

    Examples
    --------
    ::

        strategy = FedGA(beta=0.05, fraction_train=0.2)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=100)
    """

    def __init__(self, *, beta: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("beta", beta, 0)
        self.beta = beta

    def exchanges(self, server_round: int) -> Sequence[Exchange[Additive]]:
        """Return two exchanges: for gradients, and training from displaced starts."""
        read = Additive.reader("params")
        return gradients_then({"job": "displaced", "beta": self.beta}, read, _average)

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        return {"beta": self.beta}


def _average(state: ServerState, uploads: Uploads[Additive]) -> Step:
    """Return a step to the mean of the trained models."""
    return Step(ServerState(mean_vector(uploads, "params")))
