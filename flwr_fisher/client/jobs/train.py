"""Training, and the Fisher after it: what the server's config asks for."""

from flwr_fisher.client.dry_run import dry_run
from flwr_fisher.client.fisher_options import FisherOptions
from flwr_fisher.client.jobs import register_job
from flwr_fisher.client.jobs.evaluate import local_scores
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.log_lines import logger


@register_job("train")
def train_job(problem: LocalProblem, request: Request) -> Reply:
    """Train from the parameters that arrived, then compute what the config asks for.

    Without ``structure`` the reply is an ordinary one. ``report-local`` adds
    ``local-loss`` and ``local-accuracy``. What the reply needs is tried on a few
    examples first, so that nothing is trained in vain.

    Raises
    ------
    ClientError
        If there is no such upload.
    FlwrFisherError
        As :func:`~flwr_fisher.client.dry_run.dry_run`.
    """
    options = FisherOptions.of(request.options, request.params, problem.train_fn)
    dry_run(problem, request, options)
    metrics, curvature = options.train(problem, request.config)
    params = problem.state_like(request.params)
    count = request.weight(metrics)
    arrays = options.arrays(request.params, params, curvature, count)
    if request.options.get("report-local"):
        metrics |= local_scores(problem, request.client)
    logger.info("Partition %s: trained on %g examples", request.client, count)
    return Reply(metrics, arrays)
