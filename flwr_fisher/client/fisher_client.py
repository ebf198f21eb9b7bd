"""``FisherClient``, the adapter from Flower's messages to a client's jobs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp as FlowerApp
from torch import nn

from flwr_fisher.client import messages
from flwr_fisher.client.disk import DEFAULT_STATE_DIR, STATE_BYTES
from flwr_fisher.client.jobs import Job, get_job
from flwr_fisher.client.messages import ClientApp, Mod
from flwr_fisher.client.outbox import Outbox, TrainingCheckpoint
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import ClientLimits, Reply, Request
from flwr_fisher.client.training import EvaluateFn, Loader, LocalSGD, TrainFn
from flwr_fisher.curvature import Likelihood
from flwr_fisher.curvature.data import BatchFn
from flwr_fisher.curvature.losses import Loss
from flwr_fisher.curvature.models import place_of
from flwr_fisher.devices import CPU, default_device, has_float64, usable_device
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.log_lines import log_once, watching
from flwr_fisher.randomness import seeded
from flwr_fisher.wire import NUM_EXAMPLES
from flwr_fisher.wire.options import ANY_JOB, CLASSES, LIKELIHOOD, with_not_sent


class FisherClient:
    """A client that trains a model, and uploads its Fisher if the server requests it.

    In the server's ``ConfigRecord``, keys that begin with ``fisher.`` are for this
    class, and all others are for `train_fn`. ``fisher.job`` is the requested job, by
    default the training; a job's file in ``client/jobs/`` has its options.
    ``fisher.structure`` and the other options of :func:`flwr_fisher.curvature.fisher`
    say which Fisher information the client adds, and ``fisher.codec`` says how it packs
    the reply. Without a structure the reply is an ordinary one, as Flower's FedAvg and
    FedProx expect it. ``fisher.check`` names a job that the client does first,
    only to see whether it raises an error. All random numbers depend only on
    ``fisher.seed``, ``server-round`` and the node's ``partition-id``.

    Parameters
    ----------
    model : nn.Module
        Maps a batch to logits. Its trainable parameters are merged; frozen ones stay.
    trainloader : Iterable
        Batches ``(inputs, labels)``, or mappings such as ``{"img": ..., "label":
        ...}``. The weight of this client is the number of examples that its training
        reads in an epoch.
    valloader : Iterable, optional
        Held-out batches for :meth:`evaluate`.
    train_fn : Callable, optional
        Trains in place: ``train_fn(model, trainloader, device, config)`` returns
        metrics. Default ``LocalSGD()``: one epoch. If it has a keyword ``checkpoint``,
        it receives a :class:`TrainingCheckpoint`, with which it can continue after a
        crash. If it returns a metric ``num-examples``, this is the client's weight, in
        place of the number of its examples.
    evaluate_fn : Callable, optional
        Scores in place of the built-in loop: ``evaluate_fn(model, valloader, device,
        config)`` returns metrics, ``num-examples`` among them.
    loss_fn : Callable, optional
        The mean loss of a batch. :meth:`evaluate` reports it, and FAGH differentiates
        it. Default: the `train_fn`'s own ``loss_fn``. If it has none, :meth:`evaluate`
        uses the loss of the likelihood, such as :func:`cross_entropy`.
    likelihood : "categorical" | "bernoulli" | "gaussian" | Likelihood
        What the model's outputs mean to the Fisher, by default ``categorical``, or a
        :class:`~flwr_fisher.curvature.Likelihood` of your own; the loss must be its
        negative logarithm.
    device : torch.device | str, optional
        The device to which the model is moved, and where it is trained. Default: if you
        pass a loop of your own, `train_fn` or `evaluate_fn`, the device where the model
        is. Otherwise the accelerator that PyTorch finds (CUDA, XPU, …), or the CPU.
    state_dir : Path | str, default "~/.cache/flwr-fisher/state"
        Where this client keeps what it needs from one round to the next (control
        variates, TCT's features), and, for a server with checkpoints, its last upload
        and the last epoch of a training under way.
    limits : ClientLimits, optional
        How much work the server may request at once.
    state_bytes : int, default 4 GiB
        How much space each of these kinds may take in `state_dir`: control variates and
        other states of methods; TCT's features; uploads and unfinished trainings, which
        a crash would lose. All runs of this client count, and of each kind it keeps at
        most 1000 runs. A client does not learn that a run has ended, so it first
        deletes what was not used for the longest time.
    batch_fn : Callable, optional
        Makes ``(inputs, labels)`` from a batch of any other form; the inputs are a
        tensor, a tuple or a mapping of tensors. This library calls it for every batch
        that it reads, also in a ``LocalSGD`` within your own `train_fn`. Your own
        `train_fn` receives the loader's batches as they are.
    num_examples : int, optional
        The number of this client's examples, if its loop does not read `trainloader`.

    Examples
    --------
    On a machine with data of its own::

        client = FisherClient(model, trainloader, train_fn=LocalSGD(epochs=30))
        app = client.as_client_app()

    With virtual clients, whose data depend on the node, see :func:`make_client_app`.
    """

    def __init__(
        self,
        model: nn.Module,
        trainloader: Loader,
        valloader: Loader | None = None,
        *,
        train_fn: TrainFn | None = None,
        evaluate_fn: EvaluateFn | None = None,
        loss_fn: Loss | None = None,
        likelihood: str | Likelihood = "categorical",
        device: torch.device | str | None = None,
        state_dir: Path | str | None = None,
        limits: ClientLimits | None = None,
        state_bytes: int = STATE_BYTES,
        batch_fn: BatchFn | None = None,
        num_examples: int | None = None,
    ) -> None:
        self.problem = LocalProblem(
            model,
            trainloader,
            valloader,
            train_fn=LocalSGD() if train_fn is None else train_fn,
            evaluate_fn=evaluate_fn,
            loss_fn=loss_fn,
            likelihood=likelihood,
            device=_chosen_device(device, model, train_fn, evaluate_fn),
            state_dir=Path(DEFAULT_STATE_DIR if state_dir is None else state_dir),
            limits=ClientLimits.of("limits", limits),
            state_bytes=state_bytes,
            batch_fn=batch_fn,
            num_examples=num_examples,
        )

    def fit(self, message: Message, context: Context) -> Message:
        """Run the job that the config names, by default the training.

        The reply has one ``ArrayRecord``, the payload's, and one ``MetricRecord`` with
        ``num-examples`` and what the job (for training, `train_fn`) returned.

        Raises
        ------
        DataError
            If this client has no training examples.
        ClientError
            If the arrays do not fit the model, this client does not know the job, or
            the server requests more than the client's `limits` or `state_bytes` allow.
        """
        request, problem = self._read(message, context), self.problem
        # TCT names a job to check first, before hours of training.
        names = [request.options.get("check"), request.options.get("job", "train")]
        jobs = [get_job(str(name)) for name in names if name is not None]
        problem.load(request.params)
        if request.from_library:
            problem.check_dtypes(request.params)
        told, tells = "", request.options.get("tell")
        if tells or "run" in request.options:
            told = messages.not_sent(problem, request.params)
        with watching(messages.name_of(context), unit=None):
            if (run := request.options.get("run")) is None:
                reply = _reply(problem, request, jobs)
            else:
                disk = problem.disk("uploads", request.client, str(run))
                settings = {**problem.settings(), "frozen": told}
                outbox = Outbox.of(disk, request, settings)
                until = message.metadata.created_at + message.metadata.ttl
                with outbox.locked(until - time.time()):
                    kept = outbox.reply()
                    checkpoint = TrainingCheckpoint(disk, note=outbox.digest)
                    problem = replace(problem, checkpoint=checkpoint)
                    reply = kept or _reply(problem, request, jobs)
                    if kept is None:
                        outbox.keep(reply)
        if reply.arrays is not None and tells:
            told = messages.told_to(tells, told)
            reply = replace(reply, arrays=with_not_sent(reply.arrays, told))
        return _message(message, reply)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Evaluate the server's arrays on `valloader`: ``loss`` and ``accuracy``.

        Without a `valloader` the reply says that no example was scored, if
        the server understands such a reply.

        Raises
        ------
        ClientError
            If there is no such data, the arrays do not fit the model, or the server
            requests more than the client's `limits` allow.
        """
        request = self._read(message, context)
        job = get_job(str(request.options.get("job", "evaluate")), "evaluate")
        with seeded(request.seed), watching(messages.name_of(context), unit=None):
            reply = job(self.problem, request)
        return _message(message, Reply(reply.metrics))

    def as_client_app(self, mods: list[Mod] | None = None) -> ClientApp:
        """Return a ``ClientApp`` that uses this client on every node."""
        return make_client_app(lambda context: self, mods)

    def _read(self, message: Message, context: Context) -> Request:
        self.problem.model.to(self.problem.device)
        return Request.of(message, context, self.problem.device)


def _reply(problem: LocalProblem, request: Request, jobs: Sequence[Job]) -> Reply:
    """Run the jobs; return the last one's reply, with the number of examples."""
    for job in jobs:
        with seeded(request.seed):
            reply = job(problem, request)
    if NUM_EXAMPLES in reply.metrics:
        return reply
    count = problem.count_examples(request.client)
    return replace(reply, metrics={NUM_EXAMPLES: count, **reply.metrics})


ClientFn = Callable[[Context], FisherClient]


def make_client_app(client_fn: ClientFn, mods: list[Mod] | None = None) -> ClientApp:
    """Return a ``ClientApp`` that builds its client from the node's context.

    After an exception the client sends an error reply, and logs the traceback once.

    Parameters
    ----------
    client_fn : Callable[[Context], FisherClient]
        Called for every message; ``context.node_config["partition-id"]`` is the number
        of the node's part of the data.
    mods : list[Mod], optional
        Flower's client mods, for training only. Clients that take part in secure sums
        need a :class:`~flwr_fisher.secure.SecureSumsMod`.

    Examples
    --------
    ::

        def client_fn(context: Context) -> FisherClient:
            partition = context.node_config["partition-id"]
            return FisherClient(Net(), load_train(partition), load_val(partition))

        app = make_client_app(client_fn)
    """
    app = ClientApp()

    # Flower's, because a FisherClient does every job.
    @FlowerApp.train(app, mods=[messages.errors_as_replies, *(mods or [])])
    def train(message: Message, context: Context) -> Message:
        return _client_of(client_fn, context).fit(message, context)

    @app.evaluate(mods=[messages.errors_as_replies])
    def evaluate(message: Message, context: Context) -> Message:
        return _client_of(client_fn, context).evaluate(message, context)

    # A strategy knows a node by its partition, because node ids are random. It asks
    # each node once, before training, which parameters it trains.
    @app.query(mods=[messages.errors_as_replies])
    def query(message: Message, context: Context) -> Message:
        asks = messages.asks_for_parameters(message)
        problem = _client_of(client_fn, context).problem if asks else None
        answer = messages.identify(message, context, problem.model if problem else None)
        record = answer.content.config_records["config"]
        record[ANY_JOB] = True
        if problem is not None:
            record[LIKELIHOOD] = [problem.likelihood_name]
            if names := problem.class_names:
                record[CLASSES] = [", ".join(names)]
        return answer

    return app


def _client_of(client_fn: ClientFn, context: Context) -> FisherClient:
    client = client_fn(context)
    if not isinstance(client, FisherClient):
        raise ConfigurationError(
            f"client_fn must return FisherClient(model, trainloader), got "
            f"{client!r:.80}; for a NumPyClient see flwr_fisher.legacy"
        )
    return client


def _chosen_device(
    device: torch.device | str | None,
    model: nn.Module,
    train_fn: TrainFn | None,
    evaluate_fn: EvaluateFn | None,
) -> torch.device:
    """Return the given device, or the default one for this client.

    ``LocalSGD`` moves batches to the model's device, so the model goes to the
    accelerator. The user's own loop may not move batches, so its model stays where it
    was, and the log says so.
    """
    if device is not None:
        return usable_device(device, "train on the CPU, FisherClient(device='cpu')")
    accelerator = default_device()
    library_loops = isinstance(train_fn, LocalSGD | None) and evaluate_fn is None
    if library_loops or not isinstance(model, nn.Module):
        return accelerator
    here = place_of(model)
    if here is None or not has_float64(here):
        return CPU
    if here.type != accelerator.type:
        log_once(
            f"the model stays on {here}, for your own loop; for {accelerator}, pass "
            f"FisherClient(device='{accelerator}'), and move batches to the `device` "
            "that the loop is called with"
        )
    return here


def _message(message: Message, reply: Reply) -> Message:
    content = RecordDict({"metrics": MetricRecord({**reply.metrics})})
    if reply.arrays is not None:
        content["arrays"] = reply.arrays
    return Message(content, reply_to=message)
