"""AFL's job: one forward pass over the client's data, and two sums."""

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.tangent.frozen_head import head_sums
from flwr_fisher.tangent.head import find_head, linear_layer
from flwr_fisher.wire import HeadUpload


@register_job("afl")
def afl_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the sums of this client's features and targets, without training.

    Raises
    ------
    DataError
        If labels do not fit the head.
    StructureError
        If the model has no linear layer that is called once.
    """
    head = find_head(problem.model, str(request.options.get("head", "")) or None)
    sums = head_sums(problem.model, problem.train_batches, head)
    start = f"{head}." if head else ""
    biased = linear_layer(problem.model, head).bias is not None
    upload = HeadUpload.of(f"{start}weight", f"{start}bias" if biased else None, sums)
    return Reply({}, upload.to_arrays())
