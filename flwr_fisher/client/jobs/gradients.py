"""The jobs of FAGH, GIANT, DONE and FedGA, which differentiate a client's loss."""

from typing import Any

from torch import Tensor

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.client.jobs.evaluate import local_scores
from flwr_fisher.client.limits import real_number, whole_number
from flwr_fisher.curvature import gradient, gradient_and_hvp, hvp
from flwr_fisher.curvature.random_probe import random_probe
from flwr_fisher.errors import check_known
from flwr_fisher.params import Params
from flwr_fisher.randomness import seeded
from flwr_fisher.rounds import done_direction, fedga_start, giant_direction
from flwr_fisher.wire import Additive

_PROBES = ("first", "random", "momentum")
_SOLVERS = ("giant", "done")


@register_job("gradient")
def gradient_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the gradient of the mean loss over all of the client's examples.

    It is in train mode if ``train-mode`` of the options says so, or else in eval mode.
    """
    vector, loss = gradient(
        problem.model, problem.train_batches, **_loss_and_mode(problem, request)
    )
    upload = Additive({"gradient": vector})
    return Reply({"train_loss": loss}, upload.to_arrays())


@register_job("probe")
def probe_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the gradient, and the Hessian's product with the probe of the options.

    ``probe`` is ``first`` (the first trained coordinate), ``random`` (drawn here with
    the server's ``probe-seed``) or ``momentum`` (the vector ``probe`` that the server
    sent). ``train-mode`` is :func:`gradient_job`'s.
    """
    kind = str(request.options.get("probe", "first"))
    check_known("probe", kind, _PROBES)
    probe: Params | str = "first"
    if kind == "random":
        seed = whole_number(request.options, "probe-seed", 0)
        probe = random_probe(problem.trainable(), seed)
    elif kind == "momentum":
        probe = request.vector("probe", problem.trainable())
    slope, product, loss = gradient_and_hvp(
        problem.model, problem.train_batches, probe, **_loss_and_mode(problem, request)
    )
    upload = Additive({"gradient": slope, "hvp": product})
    return Reply({"train_loss": loss}, upload.to_arrays())


def _loss_and_mode(problem: LocalProblem, request: Request) -> dict[str, Any]:
    """Return the loss to differentiate, and the model's mode, as keywords."""
    in_train_mode = request.options.get("train-mode", False) is True
    return {"loss_fn": problem.differentiable_loss, "train_mode": in_train_mode}


@register_job("direction")
def direction_job(problem: LocalProblem, request: Request) -> Reply:
    """Return this client's solution of ``H_i p = g``, for the ``gradient`` sent.

    ``solver`` is ``giant`` (conjugate gradients) or ``done`` (Richardson's iterations
    with step ``alpha``). ``iterations`` is their number; each takes a pass over the
    data.

    Raises
    ------
    ClientError
        If there are more iterations than the client's `max_steps`.
    """
    options = request.options
    solver = str(options.get("solver", "giant"))
    check_known("solver", solver, _SOLVERS)
    g = request.vector("gradient", problem.trainable())
    iterations = problem.limits.steps(options, "iterations", 10)
    loss_fn = problem.differentiable_loss

    def product(vector: Params) -> dict[str, Tensor]:
        return hvp(problem.model, problem.train_batches, vector, loss_fn=loss_fn)

    if solver == "giant":
        direction = giant_direction(product, g, iterations=iterations)
    else:
        alpha = real_number(options, "alpha", 0.05)
        direction = done_direction(product, g, alpha=alpha, iterations=iterations)
    return Reply({}, Additive({"direction": direction}).to_arrays())


@register_job("displaced")
def displaced_job(problem: LocalProblem, request: Request) -> Reply:
    """Train with `train_fn` from FedGA's start, displaced by ``beta``.

    The server sent the cohort's mean ``gradient``; the client computes its own gradient
    again.
    """
    model, loader = problem.model, problem.train_batches
    mean = request.vector("gradient", problem.trainable())
    beta = real_number(request.options, "beta", 0.0)
    with seeded(0):  # training then uses the same random numbers as FedAvg's
        own, _ = gradient(model, loader, loss_fn=problem.differentiable_loss)
    start = {n: p.detach() for n, p in problem.trainable().items()}
    start = fedga_start(start, mean, own, beta=beta)
    model.load_state_dict(start, strict=False)
    metrics = problem.train(request.config)
    upload = Additive({"params": problem.state_like(request.params)})
    return Reply(metrics | local_scores(problem, request), upload.to_arrays())
