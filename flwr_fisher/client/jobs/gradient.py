"""The gradient of a client's whole loss."""

from flwr_fisher.client.jobs import register_job
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.curvature import gradient
from flwr_fisher.wire import VectorUpload


@register_job("gradient")
def gradient_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the gradient of the mean loss over all of the client's examples."""
    loss_fn = problem.differentiable_loss
    vector, loss = gradient(problem.model, problem.train_pairs, loss_fn=loss_fn)
    upload = VectorUpload({"gradient": vector})
    return Reply({"train_loss": loss}, upload.to_arrays())
