"""Evaluation on a client's data."""

import math
from collections.abc import Callable

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.client.training import Loader, score
from flwr_fisher.errors import ClientError, check_known
from flwr_fisher.params import Params
from flwr_fisher.randomness import derive_seed, seeded
from flwr_fisher.wire import NUM_EXAMPLES

_SETS = ("validation", "train")


def local_scores(problem: LocalProblem, request: Request) -> dict[str, float]:
    """Return ``local-loss`` and ``local-accuracy`` on the client's training data.

    Return nothing unless the server requests them, by the option ``report-local``.
    """
    if not request.options.get("report-local"):
        return {}
    scores = _training_scores(problem, request.client)
    return {f"local-{key}": scores[key] for key in scores if key != NUM_EXAMPLES}


@register_job("evaluate", kind="evaluate")
def evaluate_job(problem: LocalProblem, request: Request) -> Reply:
    """Evaluate the server's parameters on the data that the options name.

    The option is ``evaluate-on`` = "validation" (default) or "train". The metrics are
    ``num-examples``, ``loss`` and ``accuracy``. There is an accuracy only if the
    likelihood is of classes and the labels are classes, not probabilities. On
    validation data, a client's own ``evaluate_fn`` decides what is measured.

    Raises
    ------
    ClientError
        If there is no such data, or the parameters are not this model's.
    DataError
        If there are no examples.
    """
    return evaluation(problem, request, LocalProblem.load)


def evaluation(
    problem: LocalProblem,
    request: Request,
    load: Callable[[LocalProblem, Params], LocalProblem],
) -> Reply:
    """Evaluate the model that `load` returns; raise an error without data.

    `load` puts parameters into the problem's model, or returns a problem with another.
    """
    options = request.options
    where = options.get("evaluate-on", "validation")
    check_known("evaluate-on", where, _SETS)
    nothing = problem.valloader is None and problem.evaluate_fn is None
    if where == "validation" and nothing:
        if options.get("may-abstain") is True:
            return Reply({NUM_EXAMPLES: 0})
        raise ClientError(
            "this client has no valloader to evaluate on: pass one to FisherClient,"
            " or pass fraction_evaluate=0.0 to the strategy"
        )
    problem = load(problem, request.params)
    if where == "train":
        return Reply(_training_scores(problem, request.client))
    if problem.val_batches is None or problem.evaluate_fn is not None:
        return Reply(problem.evaluate(request.config))
    return Reply(_scores(problem, problem.val_batches))


def _scores(problem: LocalProblem, loader: Loader) -> dict[str, float]:
    loss, accuracy, n = score(
        problem.model,
        loader,
        problem.device,
        problem.loss,
        classes=problem.has_classes,
    )
    scores = {NUM_EXAMPLES: n, "loss": loss, "accuracy": accuracy}
    if math.isnan(accuracy):
        del scores["accuracy"]
    return scores


def _training_scores(problem: LocalProblem, partition: int) -> dict[str, float]:
    """Evaluate on the training data, always in one order, so that sums agree."""
    with seeded(derive_seed("training data", partition)):
        return _scores(problem, problem.train_batches)
