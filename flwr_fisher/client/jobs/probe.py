"""FAGH's client: a gradient, and the Hessian's product with a probe."""

from flwr_fisher.client.jobs import register_job
from flwr_fisher.client.limits import whole_number
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.curvature import gradient_and_hvp
from flwr_fisher.curvature.random_probe import random_probe
from flwr_fisher.errors import check_known
from flwr_fisher.params import Params
from flwr_fisher.wire import VectorUpload

_PROBES = ("first", "random", "momentum")


@register_job("probe")
def probe_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the gradient, and the Hessian's product with the probe of the options.

    ``probe`` is ``first`` (the first trained coordinate), ``random`` (made here from
    the server's ``probe-seed``) or ``momentum`` (what the server sent as ``probe``).
    """
    kind = str(request.options.get("probe", "first"))
    check_known("probe", kind, _PROBES)
    probe: Params | str = "first"
    if kind == "random":
        seed = whole_number(request.options, "probe-seed", 0)
        probe = random_probe(problem.trained(), seed)
    elif kind == "momentum":
        probe = request.vector("probe", problem.trained())
    slope, product, loss = gradient_and_hvp(
        problem.model, problem.train_pairs, probe, loss_fn=problem.differentiable_loss
    )
    upload = VectorUpload({"gradient": slope, "hvp": product})
    return Reply({"train_loss": loss}, upload.to_arrays())
