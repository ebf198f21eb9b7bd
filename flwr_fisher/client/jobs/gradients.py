"""The jobs that differentiate a client's loss."""

import math
from dataclasses import replace
from typing import Any

import torch

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.client.jobs.train import TrainingJob
from flwr_fisher.client.request import whole_number
from flwr_fisher.client.training import score
from flwr_fisher.curvature import FisherOptions, gradient, gradient_and_hvp
from flwr_fisher.curvature.second_order import random_probe
from flwr_fisher.errors import check_known
from flwr_fisher.params import Params, is_finite
from flwr_fisher.rounds.quasi_newton import TOO_FAR
from flwr_fisher.wire import LOSSLESS, Additive, LossUpload
from flwr_fisher.wire.additive import GradientUpload

_PROBES = ("first", "random", "momentum")


@register_job("gradient")
def gradient_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the gradient of the mean loss over all of the client's examples.

    It is in train mode if ``train-mode`` of the options says so, or else in eval mode.
    """
    data = problem.model, problem.train_batches
    vector, loss = gradient(*data, **_loss_and_mode(problem, request))
    return Reply({"train_loss": loss}, Additive({"gradient": vector}).to_arrays())


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
    data = problem.model, problem.train_batches, probe
    slope, product, loss = gradient_and_hvp(*data, **_loss_and_mode(problem, request))
    upload = Additive({"gradient": slope, "hvp": product})
    return Reply({"train_loss": loss}, upload.to_arrays())


@register_job("gradient-and-kfac")
def step_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the mean loss over the client's examples and its gradient, in eval mode.

    With ``kfac`` among the options, also the K-FAC at this model. Where the loss is not
    finite, it is a very large one, without a direction: the step leads too far.
    """
    loss_fn = problem.differentiable_loss
    vector, loss = gradient(problem.model, problem.train_batches, loss_fn=loss_fn)
    if not math.isfinite(loss) or not is_finite(vector):
        vector, loss = {k: torch.zeros_like(v) for k, v in vector.items()}, TOO_FAR
    kfac = None
    if request.options.get("kfac") is True:
        options = FisherOptions.from_options(request.options)
        if problem.likelihood == "gaussian":  # residuals have the unit of the targets
            options = replace(options, expectation="exact")
        job = TrainingJob("kfac", options, LOSSLESS)
        kfac = job.curvature(problem, problem.train_batches)
    value = torch.tensor(loss, dtype=torch.float64)
    return Reply({}, GradientUpload.of(vector, value, kfac).to_arrays())


@register_job("mean-loss")
def mean_loss_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the mean loss over the client's examples, in eval mode."""
    data = problem.train_batches, problem.device, problem.differentiable_loss
    loss, _, _ = score(problem.model, *data, classes=False)
    finite = loss if math.isfinite(loss) else TOO_FAR
    losses = torch.tensor([finite], dtype=torch.float64)
    return Reply({}, LossUpload(losses).to_arrays())


def _loss_and_mode(problem: LocalProblem, request: Request) -> dict[str, Any]:
    """Return the loss to differentiate, and the model's mode, as keywords."""
    in_train_mode = request.options.get("train-mode", False) is True
    return {"loss_fn": problem.differentiable_loss, "train_mode": in_train_mode}
