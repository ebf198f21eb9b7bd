"""TCT's jobs: the features' sums, their largest eigenvalue, regression rounds."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.client.jobs.evaluate import evaluate_job, evaluation
from flwr_fisher.client.jobs.tct_features import ClientFeatures, with_labels
from flwr_fisher.client.state import ClientState
from flwr_fisher.errors import ClientError, DataError, check_positive
from flwr_fisher.tangent import TCTModel, feature_sums, tct_control
from flwr_fisher.tangent.regression import tct_residual, tct_steps, tct_update
from flwr_fisher.tangent.spectrum import check_lr, largest_safe_lr
from flwr_fisher.wire import NUM_EXAMPLES, tct_upload
from flwr_fisher.wire.arrays import bytes_of

_CONTROL, _STEPS = "tct-control", 500


@register_job("tct-check")
def tct_check_job(problem: LocalProblem, request: Request) -> Reply:
    """Check before the first stage that this client can take part in the second.

    Raises
    ------
    ClientError
        If its loss is not one of classes, its cache is too small, or the server
        requests more ``local-steps`` than its limit.
    DataError
        If a few of its examples have a form that this library does not read, or labels
        that are not classes.
    ConfigurationError, StructureError
        If there is no such head, or the model has no features.
    """
    problem.limits.steps(request.options, "local-steps", _STEPS)
    features = ClientFeatures(problem, 0, 0, request.options)
    features.check_room(problem.count_examples(request.client))
    every = map(with_labels, map(problem.read, problem.trainloader))
    if (batch := next((b for b in every if len(b)), None)) is None:
        raise DataError("no example of the training loader has a label other than -100")
    features.check_classes([batch])
    features.check_examples(batch)
    return Reply({})


@register_job("tct-evaluate", kind="evaluate")
def tct_evaluate_job(problem: LocalProblem, request: Request) -> Reply:
    """Evaluate TCT's model with this client's network, or in stage 1 the network."""
    if not TCTModel.is_in(request.params):
        return evaluate_job(problem, request)
    model = TCTModel.from_tensors(problem.model, request.params).to(problem.device)
    return evaluation(replace(problem, model=model), request)


@register_job("tct-features")
def tct_features_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the sums of this client's features and of their squares.

    Raises
    ------
    ClientError
        If this client cannot do TCT. Where possible, it is raised before features are
        computed.
    """
    mine = _features(problem, request)
    sums = feature_sums(mine.raw()["features"])
    upload = tct_upload.FeatureUpload.of(_about(mine), sums)
    return Reply({}, upload.counting(problem.num_examples).to_arrays())


@register_job("tct-spectrum")
def tct_spectrum_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the largest eigenvalue of this client's regression.

    The server sent the ``mean`` and ``std`` of features over all clients. If it sees
    only sums over clients, the eigenvalue is a count in a histogram.
    """
    mine = _features(problem, request)
    about, largest = _about(mine), mine.regression(*_statistics(mine, request)).largest
    if request.options.get("aggregate") == "sums":
        return Reply({}, tct_upload.EigenvalueCounts.of(about, largest).to_arrays())
    value = torch.tensor(largest, dtype=torch.float64)
    return Reply({}, tct_upload.EigenvalueUpload(about, value).to_arrays())


@register_job("tct-step")
def tct_step_job(problem: LocalProblem, request: Request) -> Reply:
    r"""Take ``local-steps`` corrected gradient steps on this client's regression.

    If they would diverge on its features, it takes shorter steps, and accordingly more
    of them. Their total length stays the same, and control variates depend only on this
    length.

    The upload is :math:`\Theta_i`. ``train_loss`` is half the mean squared error at the
    weights that the server sent. ``state-lost`` is 1 if the server has had a reply from
    this client, but the client has no control variate any more: then it starts from
    zero.

    Raises
    ------
    ClientError
        If its features are not the server's, or there are more ``local-steps`` than its
        ``max_steps`` or a larger control variate than its ``state_bytes``.
    ConfigurationError
        If the learning rate is too large for them, by more than ``max_steps`` times.
    """
    mine, sent = _features(problem, request), request.facts
    shape = mine.tangent.num_features, mine.tangent.num_classes
    weight, lr = request.fact("weight", shape), float(request.fact("lr"))
    steps = problem.limits.steps(request.options, "local-steps", _STEPS)
    state, lost = None, False
    control = control_i = torch.zeros_like(weight)
    if "control" in sent:
        control = request.fact("control", shape)
        state = ClientState.of(problem, request, _CONTROL, {_CONTROL: weight})
        kept, lost = state.load()
        control_i = kept[_CONTROL]
    h = None if state is None else control_i - control
    regression = mine.regression(*_statistics(mine, request))
    Z, spectrum = regression.features, regression.spectrum
    most = problem.limits.max_steps // (steps if spectrum is None else 1)
    times = _times_shorter(lr, regression.largest, most)
    rates: dict[str, Any] = {"lr": lr / times, "local_steps": steps * times}
    Y = regression.targets(weight.shape[1])
    residual = tct_residual(Z, Y, weight)
    if spectrum is None:
        moved = tct_steps(Z, Y, weight, h, **rates)
    else:
        moved = tct_update(Z, Y, weight, h, spectrum, residual=residual, **rates)
    if state is not None:
        new = tct_control(control_i, control, weight, moved, lr=lr, local_steps=steps)
        state.save({_CONTROL: new})
    loss = float(residual.square().sum()) / (2 * len(residual))
    # Those whose features are on the disk, also if the loader has others by now.
    count = len(residual) if problem.num_examples is None else problem.num_examples
    metrics = {NUM_EXAMPLES: count, "train_loss": loss, "state-lost": int(lost)}
    return Reply(metrics, tct_upload.WeightUpload(_about(mine), moved).to_arrays())


def _times_shorter(lr: float, largest: float, most: int) -> int:
    """Return the factor by which steps are shortened so that they do not diverge.

    An error is raised if that is more than `most`.
    """
    check_positive("lr", lr)
    if lr <= largest_safe_lr(largest):
        return 1
    if lr * largest > most:
        check_lr(lr, largest)  # raises
    return math.ceil(lr * largest)


def _about(mine: ClientFeatures) -> dict[str, Any]:
    tangent = mine.tangent
    return tct_upload.about_features(tangent.digest, tangent.head, tangent.num_classes)


def _features(problem: LocalProblem, request: Request) -> ClientFeatures:
    """Return this client's features, after a comparison with the server's digest."""
    run, sent = request.count("run"), request.facts.get("digest")
    mine = ClientFeatures(problem, request.client, run, request.options)
    tangent = mine.tangent
    if sent is not None and not torch.equal(sent.cpu(), bytes_of(tangent.digest)):
        raise ClientError(
            f"this client has {tangent.num_features} features for seed {tangent.seed} "
            f"and head '{tangent.head}', but the server's digest is of other features: "
            "build the same model on every client"
        )
    return mine


def _statistics(mine: ClientFeatures, request: Request) -> tuple[Tensor, Tensor]:
    """Return the mean and deviation of features over all clients."""
    shape = (mine.tangent.num_features,)
    return request.fact("mean", shape), request.fact("std", shape)
