"""A client that trains, and then computes the statistics that the server asks for."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from flwr_fisher.client.randomness import derive_seed, seeded
from flwr_fisher.client.training import Loader, LocalSGD, Loss, TrainFn, score
from flwr_fisher.curvature import (
    EXPECTATIONS,
    LIKELIHOODS,
    STRUCTURES,
    TOLERANCE,
    fisher,
)
from flwr_fisher.errors import ClientError, DataError, check_known
from flwr_fisher.params import select, trainable_names
from flwr_fisher.wire import FisherUpload, arrays_to_tensors, tensors_to_arrays

__all__ = ["ClientFn", "FisherClient", "make_client_app"]

logger = logging.getLogger("flwr")


class FisherClient:
    """Trains a model and, where the server asks for it, adds its Fisher information.

    It obeys the server's ``ConfigRecord``: ``structure``, ``expectation`` and
    ``tolerance`` say which curvature (:func:`flwr_fisher.curvature.fisher`); without
    ``structure`` the reply is an ordinary one, so that Flower's FedAvg and FedProx work
    with this client too.
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
    loss_fn : Callable, default ``F.cross_entropy``
        For :meth:`evaluate`.
    likelihood : "categorical" | "bernoulli" | "gaussian", default "categorical"
        What the model's outputs mean to the Fisher; the loss is to be its negative
        logarithm.
    device : torch.device | str, optional
        Default: CUDA where there is any, else the CPU.

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
        loss_fn: Loss = F.cross_entropy,
        likelihood: str = "categorical",
        device: torch.device | str | None = None,
    ) -> None:
        check_known("likelihood", likelihood, LIKELIHOODS)
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(default if device is None else device)
        self.model = model
        self.trainloader, self.valloader = trainloader, valloader
        self.train_fn: TrainFn = LocalSGD() if train_fn is None else train_fn
        self.loss_fn, self.likelihood = loss_fn, likelihood

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
            If the arrays do not fit the model.
        """
        config = _config(message)
        check_known("structure", config.get("structure", "kfac"), STRUCTURES)
        check_known("expectation", config.get("expectation", "exact"), EXPECTATIONS)
        partition = _partition(context)
        num_examples = _count(self.trainloader, partition)
        names = self._load(_arrays(message))
        with seeded(_seed(config, partition)):
            returned = self.train_fn(self.model, self.trainloader, self.device, config)
            metrics = _checked_metrics(returned)
            arrays = self._upload(names, config)
        logger.info("Partition %s: trained on %s examples", partition, num_examples)
        record = MetricRecord({"num-examples": num_examples, **metrics})
        return _reply(message, record, arrays)

    def _upload(self, names: list[str], config: Mapping[str, Any]) -> ArrayRecord:
        params = select(self.model.state_dict(), names)
        if "structure" not in config:
            return tensors_to_arrays(params)
        curvature = fisher(
            self.model,
            self.trainloader,
            structure=str(config["structure"]),
            expectation=str(config.get("expectation", "exact")),
            tolerance=float(config.get("tolerance", TOLERANCE)),
            likelihood=self.likelihood,
            seed=int(torch.randint(2**62, ())),
        )
        return FisherUpload(params, curvature).to_arrays()

    def evaluate(self, message: Message, context: Context) -> Message:
        """Score the arrays that arrived on `valloader`: ``loss`` and ``accuracy``."""
        if self.valloader is None:
            raise ClientError(
                "this client has no valloader to evaluate on: pass one to FisherClient,"
                " or fraction_evaluate=0.0 to the strategy"
            )
        self._load(_arrays(message))
        with seeded(_seed(_config(message), _partition(context))):
            loss, accuracy, n = score(
                self.model, self.valloader, self.device, self.loss_fn
            )
        record = MetricRecord({"num-examples": n, "loss": loss, "accuracy": accuracy})
        return _reply(message, record)

    def as_client_app(self, mods: list[Mod] | None = None) -> ClientApp:
        """Return a ``ClientApp`` with this client behind it, on every node."""
        return make_client_app(lambda context: self, mods)

    def _load(self, arrays: ArrayRecord) -> list[str]:
        """Put the arrays into the model; return their names."""
        self.model.to(self.device)
        tensors = arrays_to_tensors(arrays)
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
        return list(tensors)


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


def _partition(context: Context) -> int:
    return int(context.node_config.get("partition-id", context.node_id))


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
