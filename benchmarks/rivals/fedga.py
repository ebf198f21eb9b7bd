"""FedGA: federated averaging from displaced starts, to align clients' gradients."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flwr_fisher.client import LocalProblem, Reply, Request, register_job
from flwr_fisher.curvature import gradient
from flwr_fisher.errors import check_range
from flwr_fisher.params import Params, add, subtract
from flwr_fisher.randomness import seeded
from flwr_fisher.strategies import (
    CurvatureStrategy,
    Exchange,
    ServerState,
    Step,
    Summation,
)
from flwr_fisher.wire import Additive
from rivals.gradients import Uploads, gradient_exchange, mean_of, send_gradient


def fedga_start(
    params: Params, mean_gradient: Params, gradient: Params, *, beta: float
) -> dict[str, Tensor]:
    r"""Return the displaced parameters where a client of FedGA starts training.

    .. math:: \theta_i = \theta - \beta \big( \nabla f(\theta) - \nabla f_i(\theta)
              \big)

    (Dandi, Barba & Jaggi, "Implicit Gradient Alignment in Distributed and Federated
    Learning", AAAI 2022, figure 1.) The mean of the displacements is zero. Gradients at
    displaced points have, to first order in :math:`\beta`, the mean
    :math:`\nabla \big( f + \frac\beta2 \sum_i p_i \|\nabla f_i - \nabla f\|^2 \big)`.
    """
    return add(params, subtract(mean_gradient, gradient), -beta)


@register_job("displaced")
def displaced_job(problem: LocalProblem, request: Request) -> Reply:
    """Train from the displaced start; the server sent the mean ``gradient``."""
    mean = request.vector("gradient", problem.trainable())
    with seeded(0):  # training then uses the same random numbers as FedAvg's
        own, _ = gradient(
            problem.model, problem.train_batches, loss_fn=problem.differentiable_loss
        )
    start = {name: p.detach() for name, p in problem.trainable().items()}
    start = fedga_start(start, mean, own, beta=float(request.options["beta"]))
    problem.model.load_state_dict(start, strict=False)
    metrics = problem.train(request.config)
    upload = Additive({"params": problem.state_like(request.params)})
    return Reply(metrics, upload.to_arrays())


class FedGA(CurvatureStrategy):
    """Ask for gradients; send their mean, from which displaced clients train.

    Parameters
    ----------
    beta : float, default 0.1
        How far starts are displaced, on the learning rate's scale; 0 is FedAvg.
    **kwargs
        :class:`CurvatureStrategy`'s.
    """

    def __init__(self, *, beta: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("beta", beta, 0)
        self.beta = beta

    def exchanges(self, server_round: int) -> Sequence[Exchange[Additive]]:
        """Ask for gradients, then for a training."""
        request, read = {"job": "displaced", "beta": self.beta}, "params"
        training = Exchange(
            request,
            Additive.reader(read),
            _average,
            send=send_gradient,
            additive=Summation(),
        )
        return [gradient_exchange(), training]

    def settings(self) -> dict[str, Any]:
        """Return the options that a resumed run must have alike."""
        return {"beta": self.beta}


def _average(state: ServerState, uploads: Uploads) -> Step:
    return Step(ServerState(mean_of(uploads, "params")))
