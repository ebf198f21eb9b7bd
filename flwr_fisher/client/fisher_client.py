"""A client that trains, and then computes the statistics that the server asks for."""

import copy
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from flwr_fisher.client.evaluation import check_evaluation, evaluate, local_scores
from flwr_fisher.client.feature_cache import CACHE_BYTES
from flwr_fisher.client.randomness import derive_seed, seeded
from flwr_fisher.client.state import DEFAULT_STATE_DIR, partition_of
from flwr_fisher.client.tangent import check_tangent
from flwr_fisher.client.tasks import TASKS
from flwr_fisher.client.training import (
    Loader,
    LocalSGD,
    Loss,
    TrainFn,
    cross_entropy,
)
from flwr_fisher.client.uploads import Asked
from flwr_fisher.curvature import LIKELIHOODS, Curvature, TCTModel
from flwr_fisher.errors import (
    ClientError,
    DataError,
    ParamsError,
    check_known,
    check_range,
)
from flwr_fisher.params import select, trainable_names
from flwr_fisher.wire import arrays_to_tensors, server_vectors
from flwr_fisher.wire.tangent import TCT

__all__ = ["ClientFn", "FisherClient", "make_client_app"]

logger = logging.getLogger("flwr")


class FisherClient:
    """Trains a model and, where the server asks for it, adds its Fisher information.

    It obeys the server's ``ConfigRecord``: ``structure``, ``expectation`` and
    ``tolerance`` say which curvature (:func:`flwr_fisher.curvature.fisher`), ``codec``
    and what begins with it how the reply is packed, ``aggregate`` whether the server
    wants parts or summands (``sums``, of a diagonal), and for FedFish
    ``fisher-source``, ``fisher-reduction`` and ``upload``; without
    ``structure`` the reply is an ordinary one, so that Flower's FedAvg and FedProx work
    with this client too. ``report-local`` asks for ``local-loss`` and
    ``local-accuracy``: the trained model on its own training data, which
    :mod:`flwr_fisher.measures` compares with the server's.
    Whatever is random depends on ``seed``, ``server-round`` and the node's
    ``partition-id`` alone.

    Parameters
    ----------
    model : nn.Module
        Maps a batch to logits. Its trainable parameters are merged; frozen ones stay.
    trainloader : Iterable
        Batches ``(inputs, labels)``; the weight of this client is the number of
        examples in ``trainloader.dataset``.
    valloader : Iterable, optional
        Held-out batches for :meth:`evaluate`.
    train_fn : Callable, optional
        Trains in place: ``train_fn(model, trainloader, device, config)`` returns
        metrics. Default ``LocalSGD()``: one epoch.
    loss_fn : Callable, optional
        The mean loss of a batch, for :meth:`evaluate`, and what FAGH, GIANT, DONE and
        FedGA differentiate. Default: the `train_fn`'s own ``loss_fn``, which
        ``LocalSGD`` has, or else :func:`cross_entropy`.
    likelihood : "categorical" | "bernoulli" | "gaussian", default "categorical"
        What the model's outputs mean to the Fisher; the loss is to be its negative
        logarithm.
    device : torch.device | str, optional
        Default: CUDA where there is any, else the CPU.
    state_dir : Path | str, optional
        Where this client keeps what it needs from one round to the next (control
        variates, TCT's features). Default: ``~/.cache/flwr-fisher/state``.
    cache_bytes : int, default 4 GiB
        How much of that its features may take, of all runs; those that were not used
        for longest go first.

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
        loss_fn: Loss | None = None,
        likelihood: str = "categorical",
        device: torch.device | str | None = None,
        state_dir: Path | str | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        check_known("likelihood", likelihood, LIKELIHOODS)
        check_range("cache_bytes", cache_bytes, 1)
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(default if device is None else device)
        self.model = model
        self.trainloader, self.valloader = trainloader, valloader
        self.train_fn: TrainFn = LocalSGD() if train_fn is None else train_fn
        trained_with: Loss = getattr(self.train_fn, "loss_fn", cross_entropy)
        self.loss_fn: Loss = trained_with if loss_fn is None else loss_fn
        self.likelihood = likelihood
        self.state_dir = Path(DEFAULT_STATE_DIR if state_dir is None else state_dir)
        self.cache_bytes = cache_bytes

    def fit(self, message: Message, context: Context) -> Message:
        """Train from the arrays that arrived, then compute what the config asks for.

        The reply has one ``ArrayRecord``, the trained arrays under the keys that they
        arrived with and the curvature's under ``curvature/``, and one ``MetricRecord``
        with ``num-examples`` and what `train_fn` returned.

        Raises
        ------
        DataError
            If this client has no training examples.
        ClientError
            If the arrays do not fit the model, or there is no such upload.
        """
        config, partition = _config(message), partition_of(context)
        num_examples = _count(self.trainloader, partition)
        start, sent = self._load(_arrays(message))
        if config.get("tct-stage") == 1:  # what could fail in the second
            check_tangent(self, config, num_examples)
        if (task := str(config.get("task", "train"))) != "train":
            check_known("task", task, TASKS)
            with seeded(_seed(config, partition)):
                upload, returned = TASKS[task](self, sent, config, context)
            metrics = _checked_metrics(returned)
            record = MetricRecord({"num-examples": num_examples, **metrics})
            return _reply(message, record, upload.only(start).to_arrays())
        asked = Asked.of(config, start, self.train_fn)
        with seeded(_seed(config, partition)):
            returned, curvature = asked.train(
                self.train_fn, self.model, self.trainloader, self.device, config
            )
            metrics = _checked_metrics(returned)
            if asked.structure is not None:
                curvature = self._curvature(asked, curvature)
        params = select(self.model.state_dict(), start)
        arrays = asked.arrays(start, params, curvature, num_examples)
        if config.get("report-local"):
            metrics |= local_scores(self, partition)
        logger.info("Partition %s: trained on %s examples", partition, num_examples)
        record = MetricRecord({"num-examples": num_examples, **metrics})
        return _reply(message, record, arrays)

    def _curvature(self, asked: Asked, found: Curvature | None) -> Curvature:
        """Return the curvature that is asked for, unless training found it."""
        if found is None:
            seed = int(torch.randint(2**62, ()))
            found = asked.curvature(self.model, self.trainloader, self.likelihood, seed)
        return asked.reduced(found, self.trainloader)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Score the arrays that arrived on `valloader`: ``loss`` and ``accuracy``.

        The config may ask for the training data instead (``evaluate-on`` = "train"), or
        for a model fine-tuned on a part of it, scored on the rest
        (``personalise-fraction``, ``personalise-epochs``): see
        :mod:`flwr_fisher.measures`.

        Raises
        ------
        ClientError
            If there is no such data, or the arrays do not fit the model.
        """
        config, partition = _config(message), partition_of(context)
        check_evaluation(self, config)
        scored = self._scored(_arrays(message), config)
        with seeded(_seed(config, partition)):
            found = evaluate(scored, config, partition)
        return _reply(message, MetricRecord({**found}))

    def _scored(self, arrays: ArrayRecord, config: Mapping[str, Any]) -> "FisherClient":
        """Return a client whose model is what arrived: its own, or TCT's around it."""
        if f"{TCT}weight" not in arrays:
            self._load(arrays)
            return self
        if "personalise-fraction" in config:
            raise ClientError(
                "a TCT model has no parameters to personalise: its features are fixed"
            )
        other = copy.copy(self)
        try:
            model = TCTModel.from_tensors(self.model, arrays_to_tensors(arrays))
        except ParamsError as error:
            raise ClientError(
                f"the server's TCT model is not of this client's network: {error}"
            ) from error
        other.model = model.to(self.device)
        return other

    def as_client_app(self, mods: list[Mod] | None = None) -> ClientApp:
        """Return a ``ClientApp`` with this client behind it, on every node."""
        return make_client_app(lambda context: self, mods)

    def _load(
        self, arrays: ArrayRecord
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Put the arrays into the model; return them, and what else was sent.

        Both are where the model is.
        """
        self.model.to(self.device)
        tensors, sent = server_vectors(
            {k: v.to(self.device) for k, v in arrays_to_tensors(arrays).items()}
        )
        own = self.model.state_dict()
        for name, tensor in tensors.items():
            if name not in own or own[name].shape != tensor.shape:
                has = tuple(own[name].shape) if name in own else "no such entry"
                raise ClientError(
                    f"the server sent '{name}' of shape {tuple(tensor.shape)}, but the "
                    f"client's model has {has}: build the same model on both sides"
                )
        if missing := [n for n in trainable_names(self.model) if n not in tensors]:
            raise ClientError(
                f"the server did not send the trainable parameters {missing}: start "
                "from shared_state(model), or freeze them on the client"
            )
        if second := [name for name in tensors if name in _second_names(self.model)]:
            raise ClientError(
                f"the server sent {second}, second names of tied parameters, which "
                "would undo the merge of the first: start from shared_state(model)"
            )
        self.model.load_state_dict(tensors, strict=False)
        return tensors, sent


ClientFn = Callable[[Context], FisherClient]


def make_client_app(client_fn: ClientFn, mods: list[Mod] | None = None) -> ClientApp:
    """Return a ``ClientApp`` that builds its client from the node's context.

    Parameters
    ----------
    client_fn : Callable[[Context], FisherClient]
        Called for every message; ``context.node_config["partition-id"]`` says which
        part of the data is the node's.
    mods : list[Mod], optional
        Flower's client mods, for training only.

    Examples
    --------
    ::

        def client_fn(context: Context) -> FisherClient:
            partition = context.node_config["partition-id"]
            return FisherClient(Net(), load_train(partition), load_val(partition))

        app = make_client_app(client_fn)
    """
    app = ClientApp()

    @app.train(mods=[_addressed, *(mods or [])])
    def train(message: Message, context: Context) -> Message:
        return client_fn(context).fit(message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return client_fn(context).evaluate(message, context)

    # Which partition a node holds lets a strategy repeat a run: node ids are random.
    @app.query()
    def query(message: Message, context: Context) -> Message:
        told = {k: v for k, v in context.node_config.items() if k == "partition-id"}
        return _reply(message, MetricRecord({k: int(v) for k, v in told.items()}))

    return app


def _addressed(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Make a mod's error an answer to the request.

    Flower's own privacy mods answer the reply that they refuse, and the server would
    wait for the request's answer until its timeout.
    """
    reply = call_next(message, context)
    if reply.has_error() and reply.metadata.dst_node_id != message.metadata.src_node_id:
        return Message(reply.error, reply_to=message)
    return reply


def _second_names(model: nn.Module) -> set[str]:
    """Return the names under which a trained parameter is found once more."""
    every = dict(model.named_parameters(remove_duplicate=False))
    return {name for name, p in every.items() if p.requires_grad} - set(
        trainable_names(model)
    )


def _checked_metrics(returned: object) -> dict[str, float]:
    """Return what `train_fn` returned as numbers; a tensor of one entry is one."""
    if not isinstance(returned, Mapping):
        raise ClientError(
            f"train_fn must return a dict of metrics, {{}} for none; got {returned!r}"
        )
    metrics = {}
    for key, value in returned.items():
        number = value.item() if isinstance(value, torch.Tensor) else value
        if not isinstance(key, str) or not isinstance(number, int | float):
            raise ClientError(
                f"train_fn returned {key!r}: {value!r}; metrics are numbers by name"
            )
        metrics[key] = number
    return metrics


def _arrays(message: Message) -> ArrayRecord:
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ClientError(
            f"expected one ArrayRecord from the server, got {len(records)}"
        )
    return records[0]


def _config(message: Message) -> dict[str, Any]:
    records = message.content.config_records.values()
    return {key: value for record in records for key, value in record.items()}


def _seed(config: Mapping[str, Any], partition: int) -> int:
    server_round = int(config.get("server-round", 0))
    return derive_seed(int(config.get("seed", 0)), server_round, partition)


def _count(loader: Loader, partition: int) -> int:
    dataset = getattr(loader, "dataset", None)
    n = len(dataset) if dataset is not None else sum(len(y) for _, y in loader)
    if n == 0:
        raise DataError(
            f"partition {partition} has no training examples: leave this client out, "
            "or share the data out in another way"
        )
    return n


def _reply(
    message: Message, metrics: MetricRecord, arrays: ArrayRecord | None = None
) -> Message:
    content = RecordDict({"metrics": metrics})
    if arrays is not None:
        content["arrays"] = arrays
    return Message(content, reply_to=message)
