"""The upload of a plain ``ClientApp``: parameters and the requested curvature."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from torch import nn

from flwr_fisher.client.jobs.train import (
    TrainingJob,
    amount,
    requested_training,
    try_upload,
)
from flwr_fisher.client.limits import ClientLimits
from flwr_fisher.client.messages import with_digest_of_frozen
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Request, partition_of
from flwr_fisher.client.training import Loader
from flwr_fisher.client.trial import log_once, upload_summary
from flwr_fisher.curvature import Likelihood
from flwr_fisher.curvature.batch import BatchFn, OutputFn
from flwr_fisher.curvature.batches import count_of
from flwr_fisher.curvature.kept_model import copied
from flwr_fisher.curvature.models import place_of
from flwr_fisher.devices import CPU, has_float64
from flwr_fisher.params import Params, trainable_names
from flwr_fisher.randomness import seeded
from flwr_fisher.wire import NUM_EXAMPLES, arrays_bytes, fedavg_bytes
from flwr_fisher.wire.answer import of_products


def fisher_arrays(
    message: Message,
    context: Context,
    model: nn.Module,
    trainloader: Loader,
    *,
    likelihood: str | Likelihood = "categorical",
    num_examples: int | None = None,
    max_examples: int | None = None,
    batch_fn: BatchFn | None = None,
    output_fn: OutputFn | None = None,
) -> ArrayRecord:
    """Return the arrays of a reply, in place of ``ArrayRecord(model.state_dict())``.

    Use it in a ``ClientApp`` with a train function of your own. Your function trains
    the model, and this function adds the curvature that the server's config requests.
    If the config requests none, as that of Flower's FedAvg, it adds nothing. The rest
    of the reply is your own: one ``MetricRecord``, with ``num-examples``. With this
    library's ``ClientApp``, or with Flower's and ``app.query()(identify)``, the app
    works with ``FedFisherOneShot`` and ``FedFish``. Strategies that request more than
    training, such as ``FAGH`` or ``TCT``, need a :class:`FisherClient`. With
    :func:`check_fisher`, most of what would fail here fails before the training.

    Parameters that are frozen, and that the server does not send, must be the same on
    every client. The upload has a digest of it, and the server skips clients whose
    digest differs from that of most, and logs their names. With
    ``identify(message, context, model)`` it does so before they train.

    Parameters
    ----------
    message, context : Message, Context
        The arguments of the train function.
    model : nn.Module
        The model, trained from the arrays of the message.
    trainloader : Iterable
        The data that it was trained on; as for :class:`FisherClient`.
    likelihood : "categorical" | "bernoulli" | "gaussian" | Likelihood
        What the model's outputs mean to the Fisher.
    num_examples : int, optional
        The reply's ``num-examples``. Default: how many examples the loader yields in an
        epoch; a stream is read to count them.
    max_examples : int, optional
        The largest number of examples for the Fisher, whatever the server requests.
    batch_fn : Callable, optional
        Makes ``(inputs, labels)`` of a batch of any other form.
    output_fn : Callable, optional
        Returns the one tensor of outputs from what the model returns.

    Raises
    ------
    ClientError
        If the arrays of the message do not fit the model, or the server requests
        something else than training.
    FlwrFisherError
        Any error of :func:`~flwr_fisher.curvature.fisher`, or of packing.

    Examples
    --------
    ::

        @app.train()
        def train(message: Message, context: Context) -> Message:
            model = Net()
            model.load_state_dict(message.content["arrays"].to_torch_state_dict())
            train_for_an_epoch(model, trainloader)
            arrays = fisher_arrays(message, context, model, trainloader)
            metrics = MetricRecord({"num-examples": len(trainloader.dataset)})
            content = RecordDict({"arrays": arrays, "metrics": metrics})
            return Message(content, reply_to=message)
    """
    problem = _problem(
        model, trainloader, max_examples, likelihood, batch_fn, output_fn
    )
    request, job = _read(message, context, problem)
    if num_examples is None and job.structure is not None:
        with seeded(0):  # a stream is read, which may draw random numbers
            num_examples = problem.count_examples(partition_of(context))
    num_examples = num_examples or 1  # Flower's own strategies do not need it
    problem.train_fn = _OwnTraining(num_examples)
    frozen = _frozen_since(problem.model, request.params)
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with seeded(request.seed):
            _, curvature = job.train(problem, request.config)
        arrays = job.packed(problem, request, curvature, num_examples)
        if curvature is None:  # the request may come from a strategy of Flower
            return arrays
        size, plain = arrays_bytes(arrays), fedavg_bytes(request.params)
        words = f"upload {amount(size, plain)}"
        log_once(upload_summary(model, curvature, job.structure, words))
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    return with_digest_of_frozen(arrays, model, request.params)


def check_fisher(
    message: Message,
    context: Context,
    model: nn.Module,
    trainloader: Loader,
    *,
    likelihood: str | Likelihood = "categorical",
    num_examples: int | None = None,
    max_examples: int | None = None,
    batch_fn: BatchFn | None = None,
    output_fn: OutputFn | None = None,
) -> None:
    """Load a message's arrays; raise errors of :func:`fisher_arrays` before training.

    Use it in place of ``model.load_state_dict(...)``. The message must have all trained
    parameters, and nothing that the model lacks. The function then computes the Fisher
    of a few examples with a copy of the model, and packs it; it does not iterate the
    loader. A :class:`FisherClient` does all this by itself.

    Parameters
    ----------
    message, context, model, trainloader, likelihood, num_examples, max_examples, \
    batch_fn, output_fn
        As for :func:`fisher_arrays`; the model is not trained yet.

    Raises
    ------
    FlwrFisherError
        What :func:`fisher_arrays` would raise, as far as a few examples show it.

    Examples
    --------
    ::

        model = Net()
        check_fisher(message, context, model, trainloader)
        train_for_hours(model, trainloader)
        arrays = fisher_arrays(message, context, model, trainloader)
    """
    problem = _problem(
        model, trainloader, max_examples, likelihood, batch_fn, output_fn
    )
    request, job = _read(message, context, problem)
    if job.structure is not None and count_of(trainloader) is not None:
        problem.count_examples(partition_of(context))
    replace(problem, model=model).load(request.params)
    try_upload(problem.load(request.params), request, job)


def _frozen_since(model: nn.Module, sent: Params) -> list[nn.Parameter]:
    """Return the parameters of layers that were trained, and frozen afterwards."""
    frozen: dict[str, list[nn.Parameter]] = {}
    changed = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name in sent:
            layer = name.rpartition(".")[0]
            frozen.setdefault(layer, []).append(parameter)
            if not torch.equal(parameter.detach(), sent[name].to(parameter)):
                changed.add(layer)
    return [parameter for layer in changed for parameter in frozen[layer]]


@dataclass(frozen=True)
class _OwnTraining:
    """The training loop of an app that has trained already, on a number of examples."""

    num_examples: int | None = None

    def __call__(self, *arguments: Any) -> dict[str, float]:
        return {} if self.num_examples is None else {NUM_EXAMPLES: self.num_examples}

    def __repr__(self) -> str:
        return "your own training, before fisher_arrays"


def _problem(
    model: nn.Module,
    trainloader: Loader,
    max_examples: int | None,
    likelihood: str | Likelihood,
    batch_fn: BatchFn | None,
    output_fn: OutputFn | None,
) -> LocalProblem:
    device = place_of(model) or CPU
    if not has_float64(device):  # for the Fisher; the model stays where it is
        model, device = copied(model).to(CPU), CPU
    return LocalProblem(
        model,
        trainloader,
        train_fn=_OwnTraining(),
        likelihood=likelihood,
        device=device,
        limits=ClientLimits(max_examples=max_examples),
        batch_fn=batch_fn,
        output_fn=output_fn,
    )


def _read(
    message: Message, context: Context, problem: LocalProblem
) -> tuple[Request, TrainingJob]:
    """Read the request and its job; the app itself trains."""
    request = Request.of(message, context, problem.device)
    job = requested_training(request.options)
    problem.check_layout(request.params)
    if request.from_library:
        problem.check_dtypes(request.params)
        log_once(of_products(trainable_names(problem.model)).splitlines())
    return request, job.of(problem, request)
