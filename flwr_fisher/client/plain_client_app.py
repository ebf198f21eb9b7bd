"""The upload of a plain ``ClientApp``, and the dry run of any client."""

from typing import Any

from flwr.app import ArrayRecord, Context, Message
from torch import nn

from flwr_fisher.client.fisher_client import FisherClient
from flwr_fisher.client.jobs.train import dry_run, requested_training, warn_if_unchanged
from flwr_fisher.client.messages import not_sent, told_to
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import ClientLimits, Request
from flwr_fisher.client.training import Loader
from flwr_fisher.curvature import Likelihood
from flwr_fisher.curvature.data import BatchFn
from flwr_fisher.curvature.models import place_of
from flwr_fisher.devices import CPU
from flwr_fisher.params import shared_state
from flwr_fisher.randomness import seeded
from flwr_fisher.wire.options import with_not_sent


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
        epoch; it is read once more to count them.
    max_examples : int, optional
        The largest number of examples for the Fisher, whatever the server requests.
    batch_fn : Callable, optional
        Makes ``(inputs, labels)`` of a batch of any other form.

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
    options = likelihood, num_examples, max_examples, batch_fn
    problem, request = _read(message, context, model, trainloader, *options)
    job = requested_training(request.options).of(problem, request)
    with seeded(request.seed):
        count = 1 if job.structure is None else problem.count_examples(request.client)
        _, curvature = job.train(problem, request)
    warn_if_unchanged(problem, request.params)
    arrays = job.packed(problem, request, curvature, count)
    if not (tells := request.options.get("tell")) and not job.structure:
        return arrays
    return with_not_sent(arrays, told_to(tells, not_sent(problem, request.params)))


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
) -> None:
    """Load a message's arrays; raise errors of :func:`fisher_arrays` before training.

    Use it in place of ``model.load_state_dict(...)``. The message must have all trained
    parameters, and nothing that the model lacks. The function then computes the Fisher
    of the loader's first batch, and packs it.

    Parameters
    ----------
    message, context, model, trainloader, likelihood, num_examples, max_examples, \
    batch_fn
        As for :func:`fisher_arrays`; the model is not trained yet.

    Raises
    ------
    FlwrFisherError
        What :func:`fisher_arrays` would raise, as far as a batch shows it.

    Examples
    --------
    ::

        model = Net()
        check_fisher(message, context, model, trainloader)
        train_for_hours(model, trainloader)
        arrays = fisher_arrays(message, context, model, trainloader)
    """
    options = likelihood, num_examples, max_examples, batch_fn
    problem, request = _read(message, context, model, trainloader, *options)
    with seeded(request.seed):
        dry_run(problem.load(request.params), request)


def check_client(client: FisherClient, **options: Any) -> None:
    """Do all that a round of training would do, on one batch and without training.

    It computes the Fisher of the loader's first batch and packs it; the log has what
    an upload is made of, and its size. Use it in a test, or before a long run.

    Parameters
    ----------
    client : FisherClient
        The client.
    **options
        What a server would request, ``structure="kfac"`` by default: see
        :class:`~flwr_fisher.curvature.FisherOptions`.

    Raises
    ------
    FlwrFisherError
        What a round would raise, as far as a batch shows it.

    Examples
    --------
    >>> import torch
    >>> batch = torch.ones(4, 2), torch.tensor([0, 1, 2, 3])
    >>> client = FisherClient(nn.Linear(2, 3), [batch], device="cpu")
    >>> check_client(client)
    Traceback (most recent call last):
    flwr_fisher.errors.DataError: label 3 is outside [0, 3): ...
    """
    named = {name.replace("_", "-"): value for name, value in options.items()}
    model = client.problem.model.to(client.problem.device)
    params = {name: value.clone() for name, value in shared_state(model).items()}
    with seeded(0):
        dry_run(client.problem, Request(params, options={"structure": "kfac", **named}))


def _read(
    message: Message,
    context: Context,
    model: nn.Module,
    trainloader: Loader,
    likelihood: str | Likelihood,
    num_examples: int | None,
    max_examples: int | None,
    batch_fn: BatchFn | None,
) -> tuple[LocalProblem, Request]:
    """Return the problem of an app that trains by itself, and the request."""
    problem = LocalProblem(
        model,
        trainloader,
        train_fn=lambda *_: {},  # the app has trained already
        likelihood=likelihood,
        device=place_of(model) or CPU,
        limits=ClientLimits(max_examples=max_examples),
        batch_fn=batch_fn,
        num_examples=num_examples,
    )
    request = Request.of(message, context, problem.device)
    problem.check_layout(request.params)
    if request.from_library:
        problem.check_dtypes(request.params)
    return problem, request
