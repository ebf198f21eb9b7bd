"""Rounds of two exchanges: a mean gradient, then clients' Newton directions for it."""

import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flwr_fisher.errors import ConfigurationError, check_range
from flwr_fisher.merge import newton_step
from flwr_fisher.params import Params, norm, weighted_mean
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.state import Exchange, ServerState, Step, Upload
from flwr_fisher.wire import VectorUpload

__all__ = ["NewtonStrategy"]

logger = logging.getLogger("flwr")

_GRADIENT = "newton/gradient/"


class NewtonStrategy(CurvatureStrategy):
    r"""Base of GIANT and DONE, which differ in how a client solves :math:`H_i p_i = g`.

    In a round, clients report the gradients of their whole loss at :math:`\theta`; the
    same clients then get the mean :math:`g`, solve, and the server steps
    :math:`\theta \leftarrow \theta - \eta \sum_i p_i`, the sum weighted by examples.
    Two uploads of a model's size; a client that fails in one exchange is asked in the
    other nonetheless.

    Parameters
    ----------
    lr : float, default 1.0
        :math:`\eta`.
    iterations : int, default 10
        Of a client's solver, a pass over its data each.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range; or by ``configure_train``, since Flower's own
        loop knows one exchange a round.
    """

    def __init__(self, *, lr: float = 1.0, iterations: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 <= lr < math.inf:
            raise ConfigurationError(f"lr must be >= 0 and finite, got {lr}")
        check_range("iterations", iterations, 1)
        self.lr, self.iterations = lr, iterations

    @abstractmethod
    def solver(self) -> dict[str, str | int | float]:
        """Return how a client solves, as the task ``direction`` takes it."""

    def exchanges(self, server_round: int) -> Sequence[Exchange]:
        """Ask for gradients; then, with their mean, for directions."""
        read = VectorUpload.reader
        return [
            Exchange({"task": "gradient"}, read("gradient"), step=self._keep_gradient),
            Exchange({"task": "direction", **self.solver()}, read("direction"), _send),
        ]

    def _keep_gradient(self, state: ServerState, uploads: Sequence[Upload]) -> Step:
        gradient = _mean(uploads, "gradient")
        extra = state.extra | {_GRADIENT + k: v for k, v in gradient.items()}
        metrics: dict[str, int | float | list[float]] = {
            "gradient-norm": float(norm({k: v.double() for k, v in gradient.items()}))
        }
        return Step(ServerState(state.params, extra), metrics)

    def step(self, state: ServerState, uploads: Sequence[Upload]) -> Step:
        """Step along the mean of the clients' directions."""
        direction = _mean(uploads, "direction")
        params = newton_step(state.params, [direction], [1.0], lr=self.lr)
        extra = {k: v for k, v in state.extra.items() if not k.startswith(_GRADIENT)}
        return Step(ServerState(params, extra), details=direction)

    def options(self) -> dict[str, Any]:
        """Return what a resumed run must have in common."""
        return super().options() | {"lr": self.lr} | self.solver()

    def summary(self) -> None:
        """Log the strategy's configuration."""
        logger.info("\t├──> Step: lr %g, clients solve by %s", self.lr, self.solver())
        super().summary()


def _send(state: ServerState) -> Params:
    return {
        f"gradient/{key.removeprefix(_GRADIENT)}": value
        for key, value in state.extra.items()
        if key.startswith(_GRADIENT)
    }


def _mean(uploads: Sequence[Upload], name: str) -> dict[str, Tensor]:
    vectors = []
    for upload in uploads:
        assert isinstance(upload.payload, VectorUpload)
        vectors.append(upload.payload.vectors[name])
    return weighted_mean(vectors, [upload.num_examples for upload in uploads])
