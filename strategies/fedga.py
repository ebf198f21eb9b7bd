"""FedGA: federated averaging from displaced starts, which align clients' gradients."""

import logging
from collections.abc import Sequence
from typing import Any

from flwr_fisher.errors import check_range
from flwr_fisher.params import Params, norm, weighted_mean
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.state import Exchange, ServerState, Step, Upload
from flwr_fisher.strategies.updates import average, vectors, weights_of
from flwr_fisher.wire import VectorUpload

__all__ = ["FedGA"]

logger = logging.getLogger("flwr")

_GRADIENT = "gradient"


class FedGA(CurvatureStrategy):
    r"""Federated gradient alignment (Dandi, Barba & Jaggi, AAAI 2022).

    A round has two exchanges with the same clients. They report
    :math:`\nabla f_i(\theta)`, of their whole loss; the server returns the mean, and
    each trains, with any loop, from

    .. math:: \theta + v_i, \qquad
              v_i = -\beta \big( \nabla f(\theta) - \nabla f_i(\theta) \big)

    (figure 1 of *Implicit Gradient Alignment in Distributed and Federated Learning*).
    The server averages the trained models as FedAvg does. Twice FedAvg's bytes, and two
    more passes over a client's data for its gradient: the second computes it again, so
    that a client need not keep it.

    Parameters
    ----------
    beta : float, default 0.1
        :math:`\beta`, of the learning rate's scale, and to be tuned; 0 is FedAvg.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range; or by ``configure_train``, since Flower's own
        loop knows one exchange a round.

    Notes
    -----
    Gradients are taken in eval mode, of the client's ``loss_fn``. A client that fails
    in one exchange is asked in the other nonetheless; then the displacements' mean is
    not quite zero. A round's metrics have ``gradient-norm``, and ``num-gradients``: how
    many clients' gradients are in the mean. ``CurvatureResult.details`` is None.

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

    def exchanges(self, server_round: int) -> Sequence[Exchange]:
        """Ask for gradients; then for training from displaced starts."""
        read = VectorUpload.reader
        ask: dict[str, str | float] = {"task": "displaced", "beta": self.beta}
        return [
            Exchange({"task": "gradient"}, read(_GRADIENT), step=self._keep_gradient),
            Exchange(ask, read(params=True), _send),
        ]

    def _keep_gradient(self, state: ServerState, uploads: Sequence[Upload]) -> Step:
        gradient = weighted_mean(vectors(uploads, _GRADIENT), weights_of(uploads))
        extra = {f"{_GRADIENT}/{key}": value for key, value in gradient.items()}
        metrics: dict[str, int | float | list[float]] = {
            "gradient-norm": float(norm({k: v.double() for k, v in gradient.items()})),
            "num-gradients": len(uploads),
        }
        return Step(ServerState(state.params, extra), metrics)

    def step(self, state: ServerState, uploads: Sequence[Upload]) -> Step:
        """Average the trained models."""
        averaged = average(uploads)
        return Step(ServerState({key: averaged[key] for key in state.params}))

    def options(self) -> dict[str, Any]:
        """Return what a resumed run must have in common."""
        return super().options() | {"beta": self.beta}

    def summary(self) -> None:
        """Log the strategy's configuration."""
        logger.info("\t├──> Displacement: beta %g", self.beta)
        super().summary()


def _send(state: ServerState) -> Params:
    return state.extra
