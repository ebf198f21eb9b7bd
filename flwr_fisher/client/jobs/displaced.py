"""FedGA's client: training from a start that aligns gradients."""

from flwr_fisher.client.jobs import register_job
from flwr_fisher.client.limits import real_number
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.curvature import gradient
from flwr_fisher.randomness import seeded
from flwr_fisher.rounds import fedga_start
from flwr_fisher.wire import VectorUpload


@register_job("displaced")
def displaced_job(problem: LocalProblem, request: Request) -> Reply:
    """Train with `train_fn` from FedGA's start, ``beta`` away from the parameters.

    The server sent the cohort's mean ``gradient``; the client's own is computed again.
    """
    model, loader = problem.model, problem.train_pairs
    mean = request.vector("gradient", problem.trained())
    beta = real_number(request.options, "beta", 0.0)
    with seeded(0):  # leaves training the random numbers that FedAvg's has
        own, _ = gradient(model, loader, loss_fn=problem.differentiable_loss)
    start = {n: p.detach() for n, p in problem.trained().items()}
    start = fedga_start(start, mean, own, beta=beta)
    model.load_state_dict(start, strict=False)
    metrics = problem.train(request.config)
    upload = VectorUpload({}, problem.state_like(request.params))
    return Reply(metrics, upload.to_arrays())
