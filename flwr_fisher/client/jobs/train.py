"""Training, and the Fisher after it: what the server's config asks for."""

import logging

from flwr_fisher.client.fisher_options import FisherOptions
from flwr_fisher.client.jobs.evaluate import local_scores
from flwr_fisher.client.jobs.registry import register_job
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request

logger = logging.getLogger("flwr")


@register_job("train")
def train_job(problem: LocalProblem, request: Request) -> Reply:
    """Train from the parameters that arrived, then compute what the config asks for.

    Without ``structure`` the reply is an ordinary one. ``report-local`` adds
    ``local-loss`` and ``local-accuracy``.

    Raises
    ------
    ClientError
        If there is no such upload.
    """
    options = FisherOptions.of(request.options, request.params, problem.train_fn)
    metrics, curvature = options.train(problem, request.config)
    params, count = problem.state_like(request.params), request.num_examples
    arrays = options.arrays(request.params, params, curvature, count)
    if request.options.get("report-local"):
        metrics |= local_scores(problem, request.client)
    logger.info("Partition %s: trained on %s examples", request.client, count)
    return Reply(metrics, arrays)
