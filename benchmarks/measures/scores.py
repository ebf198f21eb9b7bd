"""Jobs that score models on a client's own training data."""

from dataclasses import replace

from flwr_fisher.client import LocalProblem, Reply, Request, register_job, score
from flwr_fisher.client.jobs import get_job
from flwr_fisher.randomness import derive_seed, seeded
from flwr_fisher.wire import NUM_EXAMPLES

TRAININGS = ("train", "fedfish", "scaffold", "diagonal-sums", "kfac-train")


@register_job("scored")
def scored_job(problem: LocalProblem, request: Request) -> Reply:
    """Do the job ``scored-job``; report ``local-loss`` and ``local-accuracy``, too."""
    reply = get_job(str(request.options["scored-job"]))(problem, request)
    scores = training_scores(problem, request.client)
    local = {f"local-{key}": scores[key] for key in ("loss", "accuracy")}
    return replace(reply, metrics={**reply.metrics, **local})


@register_job("evaluate-on-train", kind="evaluate")
def evaluate_on_train_job(problem: LocalProblem, request: Request) -> Reply:
    """Score the server's parameters on the client's training data."""
    problem.load(request.params)
    return Reply(training_scores(problem, request.client))


def training_scores(problem: LocalProblem, partition: int) -> dict[str, float]:
    """Evaluate on the training data, always in one order, so that sums agree."""
    with seeded(derive_seed("training data", partition)):
        loss, accuracy, n = score(
            problem.model, problem.train_batches, problem.device, problem.loss
        )
    return {NUM_EXAMPLES: n, "loss": loss, "accuracy": accuracy}
