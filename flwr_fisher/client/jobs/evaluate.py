"""Evaluation on a client's held-out data."""

import math

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.client.training import score
from flwr_fisher.errors import ClientError
from flwr_fisher.wire import NUM_EXAMPLES


@register_job("evaluate", kind="evaluate")
def evaluate_job(problem: LocalProblem, request: Request) -> Reply:
    """Evaluate the server's parameters on the client's `valloader`.

    The metrics are ``num-examples``, ``loss`` and ``accuracy``. There is an accuracy
    only if the likelihood is of classes and the labels are classes, not probabilities.
    A client's own ``evaluate_fn`` decides by itself what is measured.

    Raises
    ------
    ClientError
        If there is no such data, or the parameters are not this model's.
    DataError
        If there are no examples.
    """
    return evaluation(problem.load(request.params), request)


def evaluation(problem: LocalProblem, request: Request) -> Reply:
    """Evaluate a problem's model; raise an error without data."""
    if problem.valloader is None and problem.evaluate_fn is None:
        if request.options.get("may-abstain") is True:
            return Reply({NUM_EXAMPLES: 0})
        raise ClientError(
            "this client has no valloader to evaluate on: pass one to FisherClient,"
            " or pass fraction_evaluate=0.0 to the strategy"
        )
    if problem.val_batches is None or problem.evaluate_fn is not None:
        return Reply(problem.evaluate(request.config))
    data = problem.val_batches, problem.device, problem.loss
    loss, accuracy, n = score(problem.model, *data, classes=problem.has_classes)
    scores = {NUM_EXAMPLES: n, "loss": loss}
    return Reply(scores if math.isnan(accuracy) else {**scores, "accuracy": accuracy})
