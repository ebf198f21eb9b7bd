"""FedPM's job: local steps, preconditioned by second moments of layers' inputs."""

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.client.jobs.evaluate import local_scores
from flwr_fisher.client.limits import real_number
from flwr_fisher.client.training import local_sgd
from flwr_fisher.curvature import InputCovariance, input_covariances
from flwr_fisher.errors import ClientError
from flwr_fisher.randomness import seeded
from flwr_fisher.rounds import Preconditioner
from flwr_fisher.wire import CovarianceUpload


@register_job("fedpm")
def fedpm_job(problem: LocalProblem, request: Request) -> Reply:
    r"""Train with steps along :math:`\hat G (A + \delta I)^{-1}`; then measure A again.

    For the steps, A is measured over the client's whole data at the received
    parameters. The client uploads the trained model, and A measured again at its
    parameters. The loop's momentum, weight decay and FedProx's term come after the
    preconditioner.

    Raises
    ------
    ClientError
        If the client's loop is not ``LocalSGD``, or no layer of the model has an A.
    ConfigurationError
        If the strategy's ``damping`` is out of range.
    """
    local_sgd(problem.train_fn, "FedPM preconditions every local step")
    damping = real_number(request.options, "damping", 0.0)
    parameters = problem.trainable()
    if not (before := _covariances(problem)):
        raise ClientError(
            "FedPM needs a linear or convolution layer that is called once, with one "
            "row for each example, and this model has none: use FedAvg"
        )
    preconditioner = Preconditioner.of(before, damping=damping)

    def precondition(epoch: int, step: int) -> None:
        found = {k: p.grad for k, p in parameters.items() if p.grad is not None}
        for name, value in preconditioner.direction(found).items():
            if value is not found[name]:
                found[name].copy_(value)

    metrics = problem.train(request.config, on_gradients=precondition)
    after = _covariances(problem)
    if lost := before.keys() - after.keys():
        raise ClientError(
            f"after training, the inputs of {sorted(lost)} no longer explain the "
            "gradients, or are not finite, so the model diverges: lower lr, or raise "
            "damping"
        )
    upload = CovarianceUpload(problem.state_like(request.params), after)
    return Reply(metrics | local_scores(problem, request), upload.to_arrays())


def _covariances(problem: LocalProblem) -> dict[str, InputCovariance]:
    with seeded(0):  # training uses the same random numbers as FedAvg's
        return input_covariances(problem.model, problem.train_batches)
