"""FedFisher's jobs for a server that sees only sums of Fishers over clients.

With diagonals, a client uploads one contribution after its training. With K-FAC it
keeps its model and its Fisher on its disk, and then multiplies the Fisher by each
vector that the server's conjugate gradients send.
"""

import json
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.client.jobs.train import TrainingJob, training_job
from flwr_fisher.client.state import run_disk
from flwr_fisher.errors import ClientError
from flwr_fisher.merge import DiagonalSums, LocalPosterior, balanced, partial_traces
from flwr_fisher.params import Params, select, subtract
from flwr_fisher.wire import NUM_EXAMPLES, PREFIX, Additive
from flwr_fisher.wire.additive import SUMS, LayerTraces
from flwr_fisher.wire.layout import curvature_to_tensors, tensors_to_curvature

_NAME, _PARAMS = "kfac-sums", "params/"


@training_job("diagonal-sums")
@dataclass(frozen=True)
class DiagonalSumsJob(TrainingJob):
    """Train, compute a diagonal Fisher, and upload a contribution to the sums."""

    def arrays(self, posterior: LocalPosterior, start: Params) -> ArrayRecord:
        """Return this client's contribution."""
        sums = DiagonalSums.of([replace(posterior, num_examples=1)])
        parts = posterior.params, sums.fisher, sums.fisher_params
        return Additive(dict(zip(SUMS, parts, strict=True))).to_arrays()


def _load(problem: LocalProblem, request: Request) -> LocalPosterior:
    disk = run_disk(problem, request)
    kept = disk.load(_NAME, request.server_round)
    if kept is None:
        raise ClientError(
            f"round {request.server_round}'s model and Fisher are not in "
            f"{disk.path}: this client did not train in that round, or lost them"
        )
    tensors = {k: v.to(problem.device) for k, v in kept.tensors.items()}
    parts = {k: v for k, v in tensors.items() if k.startswith(PREFIX)}
    params = {k.removeprefix(_PARAMS): tensors[k] for k in tensors if k not in parts}
    curvature = tensors_to_curvature(parts, params)
    return LocalPosterior(params, curvature, json.loads(kept.note))


@register_job("kfac-train")
def train_job(problem: LocalProblem, request: Request) -> Reply:
    """Train, keep the model and its Fisher, and upload the model.

    ``shrink``, ``damping`` and ``balance`` say how the Fisher is regularised and
    weighted before it is summed.
    """
    job = TrainingJob.of(problem, request)
    (metrics, curvature), count = job.trained(problem, request)
    assert curvature is not None
    params = problem.state_like(request.params)
    names = ("shrink", "damping", "balance")
    wanted = {name: request.options.get(name, 0.0) for name in names}
    curvature = balanced(curvature, **wanted)
    # The model, its Fisher and its weight are kept until the next round.
    kept = {f"{_PARAMS}{name}": value for name, value in params.items()}
    kept |= curvature_to_tensors(curvature)
    disk, note = run_disk(problem, request), json.dumps(count)
    disk.save(_NAME, kept, step=request.server_round, note=note)
    return Reply(metrics, Additive({"params": params}).to_arrays())


@register_job("kfac-traces")
def traces_job(problem: LocalProblem, request: Request) -> Reply:
    """Upload the partial traces, and the Fisher times the step from the mean."""
    kept = _load(problem, request)
    upload = LayerTraces.of(_pull(kept, request), partial_traces(kept.curvature))
    return Reply({NUM_EXAMPLES: kept.num_examples}, upload.to_arrays())


def _pull(kept: LocalPosterior, request: Request) -> dict[str, Tensor]:
    """Return the Fisher times the step from the server's parameters to the client's."""
    names = kept.curvature.shapes
    away = subtract(select(kept.params, names), select(request.params, names))
    return kept.curvature.matvec(away)


@register_job("kfac-product")
def product_job(problem: LocalProblem, request: Request) -> Reply:
    """Upload the Fisher's product with the server's ``direction``.

    If the server sends none, because another client has left, this is the product with
    the step from the server's parameters, as with the traces.
    """
    kept = _load(problem, request)
    like: Params = select(kept.params, kept.curvature.shapes)
    if "direction" in request.groups:
        product = kept.curvature.matvec(request.vector("direction", like))
    else:
        product = _pull(kept, request)
    upload = Additive({"product": product})
    return Reply({NUM_EXAMPLES: kept.num_examples}, upload.to_arrays())
