"""``LocalProblem``: a client's model, data, loss, training loop, device and disk.

A job uses it to compute what a request says. The job owns it: what it does to the model
is not undone, because the client is built anew for the next message.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from flwr_fisher.client.disk import DEFAULT_STATE_DIR, STATE_BYTES, ClientDisk
from flwr_fisher.client.outbox import TrainingCheckpoint, attributes_of, settings_of
from flwr_fisher.client.request import ClientLimits
from flwr_fisher.client.training import (
    EvaluateFn,
    Loader,
    LocalSGD,
    TrainFn,
    check_functions,
    check_trained,
)
from flwr_fisher.curvature import Likelihood
from flwr_fisher.curvature.data import Batch, BatchFn, MappedLoader, read
from flwr_fisher.curvature.estimate.likelihood import likelihood_of
from flwr_fisher.curvature.losses import LOSSES, Loss, cross_entropy
from flwr_fisher.curvature.models import place_of
from flwr_fisher.devices import CPU, has_float64
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    DataError,
    check_whole,
    plain,
    quoted,
)
from flwr_fisher.log_lines import advance, logger, watching
from flwr_fisher.params import Params, load_state, select, state_of, trainable
from flwr_fisher.randomness import seeded
from flwr_fisher.wire.options import NUM_EXAMPLES, client_name


class CountedLoader:
    """A client's loader: it counts the examples of its longest reading.

    All else is the loader's own: its length, its attributes, its class.

    Parameters
    ----------
    loader : Iterable
        The loader, which is iterated and no more.
    batch_fn : Callable, optional
        As for :class:`~flwr_fisher.client.FisherClient`.

    Attributes
    ----------
    longest : int
        The number of examples of the longest reading so far; usually of an epoch.
    most : int | None
        A reading ends at this number of examples. A job's readings after its training
        end where those of the training did, even if the loader has no end.
    on_first_batch : Callable[[Any], object] | None
        Called once, with the next batch that is read.
    """

    def __init__(self, loader: Loader, batch_fn: BatchFn | None = None) -> None:
        self.loader, self.batch_fn = loader, batch_fn
        self.longest = 0
        self.most: int | None = None
        self.on_first_batch: Callable[[Any], object] | None = None

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for batch in self.loader:
            if self.on_first_batch is not None:
                check, self.on_first_batch = self.on_first_batch, None
                check(batch)
            count += _num_examples(self.batch_fn(batch) if self.batch_fn else batch)
            self.longest = max(self.longest, count)
            yield batch
            if self.most is not None and count >= self.most:
                return

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("loader"), name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The loader's class: a user's loop may look for a ``DataLoader``."""
        return type(self.loader)


def _num_examples(batch: Any) -> int:
    """Return the length of a batch's first tensor; 0 if there is none."""
    if isinstance(batch, Tensor):
        return len(batch)
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    lengths = map(_num_examples, parts if isinstance(parts, list | tuple) else ())
    return next(filter(None, lengths), 0)


@dataclass
class LocalProblem:
    """All of a client's own parts: model, data, loss and training loop.

    Parameters
    ----------
    model, trainloader, valloader, train_fn, loss_fn, likelihood, limits, \
    state_bytes, batch_fn, evaluate_fn, num_examples
        As for :class:`~flwr_fisher.client.FisherClient`. When a job runs, `model` holds
        the server's parameters.
    device : torch.device
        Where the model is.
    state_dir : Path
        The folder for what is kept from one round to the next.
    checkpoint : TrainingCheckpoint
        Where an unfinished training is kept, for loops with a keyword of this name.
        Each call of :meth:`train` has its own.

    Raises
    ------
    UnknownNameError
        If the likelihood is not known.
    ConfigurationError
        If an argument is of another kind, or a function takes other arguments, or a
        number is out of range.
    ParamsError
        If a layer is still lazy, or a hook changes what ``state_dict`` has.
    """

    model: nn.Module
    trainloader: Loader
    valloader: Loader | None = None
    train_fn: TrainFn = field(default_factory=LocalSGD)
    loss_fn: Loss | None = None
    likelihood: str | Likelihood = "categorical"
    device: torch.device = CPU
    state_dir: Path = DEFAULT_STATE_DIR
    limits: ClientLimits = field(default_factory=ClientLimits)
    state_bytes: int = STATE_BYTES
    checkpoint: TrainingCheckpoint = field(default_factory=TrainingCheckpoint)
    batch_fn: BatchFn | None = None
    evaluate_fn: EvaluateFn | None = None
    num_examples: int | None = None

    def __post_init__(self) -> None:
        likelihood_of(self.likelihood)
        if not isinstance(self.model, nn.Module):
            raise ConfigurationError(
                f"model must be an nn.Module, such as Net(), got {self.model!r:.80}"
            )
        state_of(self.model)  # which refuses lazy layers, and hooks
        check_functions(self, ("train_fn", "evaluate_fn", "loss_fn", "batch_fn"))
        for name in ("train_fn", "evaluate_fn"):
            _check_loop(name, getattr(self, name))
        for name in ("trainloader", "valloader"):
            _check_loader(name, getattr(self, name))
        check_whole("state_bytes", self.state_bytes, 1)
        if self.num_examples is not None:
            check_whole("num_examples", self.num_examples, 1)
        self.trainloader = self.counted

    def disk(self, namespace: str, client: int, key: str) -> ClientDisk:
        """Return the client's disk entry for one purpose and key.

        Parameters
        ----------
        namespace : str
            The kind of entry; each kind may take ``state_bytes``.
        client : int
            The request's.
        key : str
            The run, or whatever the entry belongs to, as hexadecimal digits.
        """
        return ClientDisk(self.state_dir, namespace, client, key, self.state_bytes)

    def settings(self) -> dict[str, Any]:
        """Return what a reply depends on besides the request and the data."""
        functions = self.train_fn, self.loss_fn, self.likelihood, self.batch_fn
        numbers = self.limits.max_examples, self.num_examples
        # A layer's settings, such as a dropout's rate, change what it computes.
        of_model = list(self.trainable()), attributes_of(self.model)
        return {"functions": settings_of([*functions, *numbers, *of_model])}

    @property
    def likelihood_name(self) -> str:
        """The likelihood's name; of a user's own, the name of its class."""
        own = self.likelihood
        return own if isinstance(own, str) else type(own).__name__

    @property
    def class_names(self) -> list[str]:
        """The names of the data set's classes, in the order of their numbers.

        Empty in a regression, if there are none, or if a ``target_transform`` numbers
        classes anew.
        """
        data = getattr(self.trainloader, "dataset", None)
        while isinstance(data, Subset):
            data = data.dataset
        features = getattr(data, "features", None)  # of Hugging Face's
        tables = features.values() if isinstance(features, Mapping) else ()
        columns = [getattr(each, "feature", each) for each in tables]  # or their lists
        labels = [n for each in columns if (n := getattr(each, "names", None))]
        names = labels[0] if len(labels) == 1 else getattr(data, "classes", None)
        renumbered = getattr(data, "target_transform", None) is not None
        if renumbered or not isinstance(names, list) or self.likelihood == "gaussian":
            return []
        return [*map(str, names)]

    @property
    def counted(self) -> CountedLoader:
        """The training loader, with the number of examples that were read."""
        if type(self.trainloader) is not CountedLoader:
            self.trainloader = CountedLoader(self.trainloader, self.batch_fn)
        return self.trainloader

    @property
    def train_batches(self) -> Loader:
        """The training data, read by `batch_fn`: what a job reads.

        An endless loader is read for `num_examples`, if they are given.
        """
        if self.counted.most is None:
            self.counted.most = self._bound(None)
        return self.mapped(self.counted)

    @property
    def val_batches(self) -> Loader | None:
        """The held-out data, or None."""
        return None if self.valloader is None else self.mapped(self.valloader)

    def mapped(self, loader: Loader) -> Loader:
        """Return batches of the client's, read by `batch_fn` if there is one."""
        return MappedLoader(loader, self.batch_fn) if self.batch_fn else loader

    def read(self, batch: Any) -> Batch:
        """Return one of the loader's batches in the form that the model takes."""
        (pair,) = self.mapped([batch])
        return read(pair, self.model)

    @property
    def has_classes(self) -> bool:
        """Whether outputs are logits of classes, and labels are class indices."""
        return likelihood_of(self.likelihood).labels_are_classes

    @property
    def loss(self) -> Loss:
        """The mean loss of a batch, for evaluation: the client's, or its loop's.

        If neither has one, it is that of the likelihood.
        """
        loss = self.loss_fn or getattr(self.train_fn, "loss_fn", None) or cross_entropy
        if self.loss_fn is None and loss is cross_entropy:
            return LOSSES.get(str(self.likelihood), cross_entropy)
        return loss

    @property
    def differentiable_loss(self) -> Loss:
        """The loss for jobs that differentiate it.

        Raises
        ------
        ClientError
            If it is the default loss, and the outputs are not logits of classes.
        """
        loss = self.loss_fn or getattr(self.train_fn, "loss_fn", None)
        if not self.has_classes and loss in (None, cross_entropy):
            raise ClientError(
                f"this client has likelihood={self.likelihood!r} but no loss_fn, and "
                "the loss's scale sets the step: FisherClient(loss_fn=...)"
            )
        return loss or cross_entropy

    def train(
        self,
        config: Mapping[str, Any],
        *,
        on_first_batch: Callable[[Any], object] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Run the training loop on the model; return its metrics.

        Parameters
        ----------
        config : Mapping[str, Any]
            The request's.
        on_first_batch : Callable[[Any], object], optional
            Called with the first batch that the loop reads, before it gets it.
        **options
            Keywords that only some loops take, such as ``LocalSGD``'s `on_gradients`.

        Raises
        ------
        ClientError
            If the loop lacks one of the keywords, if it would train with the
            cross-entropy of classes although the likelihood has no classes, or if it
            leaves NaN in the model.
        """
        loop: Any = self.train_fn
        if getattr(loop, "loss_fn", None) is cross_entropy and not self.has_classes:
            raise ClientError(
                f"this client has likelihood={self.likelihood!r}, but "
                f"{_name(loop)} trains with the cross-entropy of classes: pass it the "
                "loss, LocalSGD(loss_fn=...)"
            )
        for keyword in options:
            if not _takes(loop, keyword):
                raise ClientError(
                    f"train_fn {_name(loop)} has no keyword {keyword!r}, but this "
                    "method's job passes it: train with LocalSGD(...), or add it"
                )
        if _takes(loop, "checkpoint"):
            options["checkpoint"] = self.checkpoint
        self.checkpoint = self.checkpoint.next()
        loader = self.counted
        loader.on_first_batch, loader.most = on_first_batch, None
        returned = loop(self.model, loader, self.device, config, **options)
        metrics = checked_metrics(returned, "train_fn")
        if NUM_EXAMPLES in metrics:
            self.weight(metrics, 0)  # which refuses what is no weight
        most = loader.longest and max(loader.longest, self.num_examples or 0)
        loader.most = most or self._bound(metrics.get(NUM_EXAMPLES))
        here = place_of(self.model) or self.device
        if has_float64(here):  # a loop may move the model
            self.device = here
        self.model.to(self.device)
        check_trained(self.model)
        return metrics

    def _bound(self, weight: Any) -> int | None:
        """Return after how many examples to stop reading; None for no limit.

        There is one for a loader that has no length, and that the loop did not read.
        """
        try:
            len(self.counted)
        except TypeError:
            weight = self.num_examples or weight
            is_number = isinstance(weight, int | float) and 0 < weight < math.inf
            return math.ceil(weight) if is_number else None
        return None

    def evaluate(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Run the client's own evaluation; return its metrics.

        Raises
        ------
        ClientError
            If it returns no ``num-examples``.
        """
        assert self.evaluate_fn is not None
        returned = self.evaluate_fn(self.model, self.valloader, self.device, config)
        metrics = checked_metrics(returned, "evaluate_fn")
        if NUM_EXAMPLES not in metrics:
            raise ClientError(
                "evaluate_fn returned no 'num-examples', which weights the metrics: "
                f"add it to {sorted(metrics)}"
            )
        return metrics

    def trainable(self) -> dict[str, Tensor]:
        """Return the model's trainable parameters by name, without copies."""
        return dict[str, Tensor](trainable(self.model))

    def state_like(self, like: Params) -> dict[str, Tensor]:
        """Return the model's parameters and buffers with the names and order of `like`.

        They are on the device of those of `like`, even if a loop has moved the model.
        """
        state = select(state_of(self.model), like)
        return {n: v.detach().to(like[n].device) for n, v in state.items()}

    def count_examples(self, client: int) -> int:
        """Return the number of the client's examples: what it has read of them.

        What no job has read yet is read once.

        Raises
        ------
        DataError
            If there are none.
        """
        loader = self.counted
        if self.num_examples is None and not loader.longest:
            # What is drawn afterwards does not depend on this reading.
            with seeded(0), watching("counting num_examples", unit="batches"):
                for _ in loader:
                    advance()
        if not (count := self.num_examples or loader.longest):
            raise DataError(
                f"{client_name(client)} has no training examples: leave it out, or, if "
                "its batches have no tensors, pass num_examples=..."
            )
        return int(count)

    def weight(self, metrics: Mapping[str, Any], client: int) -> float:
        """Return the client's weight: its loop's, or its number of examples.

        Raises
        ------
        ClientError
            If the loop's number is not positive.
        """
        weight = metrics.get(NUM_EXAMPLES)
        if weight is None:
            return self.count_examples(client)
        if isinstance(weight, int | float) and 0 < weight < float("inf"):
            return weight
        raise ClientError(
            f"train_fn returned {NUM_EXAMPLES!r}: {weight!r:.80}, but a client's "
            "weight must be a positive number"
        )

    def load(self, params: Params) -> "LocalProblem":
        """Load the server's parameters into the model; return the problem.

        Raises
        ------
        ClientError
            If they are not this model's.
        """
        self.check_layout(params)
        load_state(self.model, params)
        self.model.zero_grad()  # a loop may have left gradients at former values
        return self

    def check_dtypes(self, params: Params) -> None:
        """Raise :class:`ClientError` for parameters in another precision.

        Other strategies of Flower take any precision. This library's expect the
        precision that they sent.
        """
        model = state_of(self.model)
        for name, tensor in params.items():
            if model[name].dtype != tensor.dtype:
                raise ClientError(
                    f"the server sent {name!r:.80} in {tensor.dtype}, but the client's "
                    f"model has {model[name].dtype}: start from arrays of the model's "
                    "dtypes; to train in half precision, LocalSGD(autocast=...)"
                )

    def check_layout(self, params: Params) -> None:
        """Raise :class:`ClientError` for parameters that do not fit this model."""
        model = state_of(self.model)
        for name, tensor in params.items():
            if name not in model or model[name].shape != tensor.shape:
                has = tuple(model[name].shape) if name in model else "no such entry"
                raise ClientError(
                    f"the server sent {name!r:.80} of shape {tuple(tensor.shape)}, but "
                    f"the client's model has {has}: start from shared_state(model) of "
                    "the same model (if another app ran here before, restart Flower)"
                )
        names = self.trainable()
        if missing := [name for name in names if name not in params]:
            raise ClientError(
                f"the server did not send the trainable parameters {quoted(missing)}: "
                "start from shared_state(model), or freeze them on the client"
            )
        every = self.model.named_parameters(remove_duplicate=False)
        second = {name for name, p in every if p.requires_grad} - set(names)
        if tied := sorted(second & params.keys()):
            raise ClientError(
                f"the server sent {quoted(tied)}, the second names of tied parameters, "
                "which would undo the merge of the first: start from shared_state("
                "model), and load what arrives with strict=False"
            )


def checked_metrics(returned: object, loop: str) -> dict[str, Any]:
    """Return metrics that Flower's records can hold: numbers and lists of numbers.

    Numbers and arrays with one axis from NumPy and torch are converted, and None counts
    as no metrics. Anything else is left out with a warning, so that the training is not
    lost.

    Examples
    --------
    >>> checked_metrics({"loss": torch.tensor(0.5), "late": True}, "train_fn")
    {'loss': 0.5, 'late': 1}
    """
    entries = returned if isinstance(returned, Mapping) else {}
    if returned is not None and entries is not returned:
        logger.warning("%s returned %.80r, no dict of metrics", loop, returned)
    metrics = {}
    for name, value in entries.items():
        numbers = value if name == NUM_EXAMPLES else _as_numbers(plain(value))
        if numbers is None:
            logger.warning("Ignoring %s's %.40r: %.80r is no number", loop, name, value)
        else:
            metrics[str(name)] = plain(numbers)
    return metrics


def _as_numbers(value: Any) -> Any:
    """Return a number, or a list of numbers of one kind; None for anything else."""
    if isinstance(value, list):
        if not all(isinstance(each, int | float) for each in value):
            return None
        whole = all(isinstance(each, int) for each in value)
        return [int(each) if whole else float(each) for each in value]
    if isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    return value if isinstance(value, float) else None


def _check_loop(name: str, loop: Any) -> None:
    """Raise :class:`ConfigurationError` for a loop that takes other arguments.

    Many a Flower app has a ``train(net, trainloader, epochs, device)``.
    """
    try:
        call = signature(loop)
    except (TypeError, ValueError):
        return  # None, and built-in functions, have no signature
    places = [p for p in call.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    names = [parameter.name for parameter in places]
    try:
        call.replace(parameters=places).bind(*range(4))
        fits = "device" not in names or names[2] == "device"
    except TypeError:
        fits = False
    if not fits:
        raise ConfigurationError(
            f"{name} is called with (model, loader, device, config), but {_name(loop)} "
            f"takes {call}: pass lambda model, loader, device, config: "
            f"{_name(loop)}(...), with the arguments in your order"
        )


def _check_loader(name: str, loader: Any) -> None:
    """Raise :class:`ConfigurationError` for what yields no batches."""
    iterates = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if loader is None and name == "valloader":
        return
    if not iterates or isinstance(loader, (type, str, Mapping, Tensor)):
        raise ConfigurationError(
            f"{name} must yield batches, but it is {loader!r:.80}: pass a DataLoader, "
            "or a list of batches"
        )


def _name(function: object) -> str:
    """Return a function's name, or that of an object's class."""
    return str(getattr(function, "__name__", type(function).__name__))


def _takes(function: Callable[..., object], keyword: str) -> bool:
    """Return whether a function has this keyword, or takes any."""
    try:
        parameters = signature(function).parameters
    except ValueError:  # built-in functions have no signature
        return False
    kinds = {parameter.kind for parameter in parameters.values()}
    return keyword in parameters or Parameter.VAR_KEYWORD in kinds
