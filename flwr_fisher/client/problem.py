"""``LocalProblem``: a client's model, data, loss, training loop, device and disk.

A job uses it to compute what a request says.

Long: the documentation of all of a client's arguments, and their checks.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from flwr_fisher.client.disk import DEFAULT_STATE_DIR, STATE_BYTES, ClientDisk
from flwr_fisher.client.limits import ClientLimits
from flwr_fisher.client.loops import (
    WRAPPERS,
    check_is_not_another,
    check_loop,
    checked_metrics,
    left_as_known,
    name_of,
    takes,
)
from flwr_fisher.client.training import (
    EvaluateFn,
    Loader,
    LocalSGD,
    TrainFn,
    check_functions,
    check_trained,
)
from flwr_fisher.client.training_checkpoint import TrainingCheckpoint
from flwr_fisher.curvature import Likelihood
from flwr_fisher.curvature.batch import Batch, BatchFn, OutputFn
from flwr_fisher.curvature.batches import (
    Pairs,
    at_most,
    batches_of,
    check_can_be_read_again,
    checking_first_batch,
    count_of,
    default_reading,
    length_of,
)
from flwr_fisher.curvature.estimate.likelihood import likelihood_of
from flwr_fisher.curvature.kept_model import with_own_train
from flwr_fisher.curvature.losses import LOSSES, Loss, cross_entropy
from flwr_fisher.curvature.models import place_of
from flwr_fisher.devices import CPU, defaults_kept, has_float64
from flwr_fisher.errors import ClientError, ConfigurationError, DataError, check_whole
from flwr_fisher.log_lines import watching
from flwr_fisher.params import Params, select, trainable, trainable_names
from flwr_fisher.wire.answer import client_name, some
from flwr_fisher.wire.options import NUM_EXAMPLES

_OF_TCT = "tct/"  # the prefix of its keys
_FUNCTIONS = "train_fn", "evaluate_fn", "loss_fn", "batch_fn", "output_fn"
_LOOPS = "train_fn", "evaluate_fn"
_MOST = 10**7  # examples to count in a stream


@dataclass
class LocalProblem:
    """All of a client's own parts: model, data, loss and training loop.

    Parameters
    ----------
    model, trainloader, valloader, train_fn, loss_fn, likelihood, limits, \
    state_bytes, batch_fn, output_fn, evaluate_fn
        As for :class:`~flwr_fisher.client.FisherClient`. When a job runs, `model` holds
        the server's parameters.
    device : torch.device
        Where the model is.
    state_dir : Path
        The folder for what is kept from one round to the next.
    checkpoint : TrainingCheckpoint
        Where an unfinished training is kept, for loops with a keyword of this name.
        Each call of :meth:`train` has its own.

    Attributes
    ----------
    on_first_batch : list[Callable[[Batch], object]]
        Checks that could not be made before the training. The next loop makes them
        once, before its first step, on the first batch that it reads through this
        library (``curvature.batches.checking_first_batch``). A loop that reads in
        another way makes none.

    Raises
    ------
    UnknownNameError
        If the likelihood is not known.
    ConfigurationError
        If an argument is of another kind, or a function takes other arguments, or a
        number of bytes is out of range.
    ParamsError
        If a layer is still lazy, or two parameters are in the same memory.
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
    output_fn: OutputFn | None = None
    evaluate_fn: EvaluateFn | None = None
    on_first_batch: list[Callable[[Batch], object]] = field(
        default_factory=list, init=False
    )

    def __post_init__(self) -> None:
        likelihood_of(self.likelihood)
        if not isinstance(self.model, nn.Module):
            raise ConfigurationError(
                f"model must be an nn.Module object, such as Net(), got "
                f"{self.model!r:.80}"
            )
        trainable(self.model)  # which refuses lazy layers
        check_functions(self, _FUNCTIONS)
        for name in _LOOPS:
            check_loop(name, getattr(self, name))
        if self.trainloader is None:
            raise ConfigurationError("trainloader is None: pass a DataLoader")
        _check_yields_batches("trainloader", self.trainloader)
        if self.valloader is not None:
            _check_yields_batches("valloader", self.valloader)
        check_whole("state_bytes", self.state_bytes, 1)

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

    @property
    def train_batches(self) -> Pairs:
        """The training data with `batch_fn` and `output_fn`: what a job reads.

        ``trainloader`` is the client's loader without these two.
        """
        return self.pairs_of(self.trainloader)

    @property
    def val_batches(self) -> Pairs | None:
        """The held-out data, or None."""
        return None if self.valloader is None else self.pairs_of(self.valloader)

    def pairs_of(self, loader: Loader) -> Pairs:
        """Return a loader with this client's `batch_fn` and `output_fn`."""
        return Pairs(loader, self.batch_fn, self.output_fn)

    @property
    def has_classes(self) -> bool:
        """Whether outputs are logits of classes, and labels are class indices."""
        return likelihood_of(self.likelihood).labels_are_classes

    @property
    def loss(self) -> Loss:
        """The mean loss of a batch, for evaluation."""
        if self.loss_fn is None and self._given_loss is cross_entropy:
            return LOSSES.get(str(self.likelihood), cross_entropy)
        return self._given_loss

    @property
    def _given_loss(self) -> Loss:
        """The client's loss, or its loop's, or the default one."""
        return self.loss_fn or self.trained_with or cross_entropy

    @property
    def trained_with(self) -> Loss | None:
        """The attribute ``loss_fn`` of the client's loop, or None."""
        return getattr(self.train_fn, "loss_fn", None)

    @property
    def differentiable_loss(self) -> Loss:
        """The loss for jobs that differentiate it.

        Raises
        ------
        ClientError
            If it is the default loss, and the outputs are not logits of classes.
        """
        if not self.has_classes and self._given_loss is cross_entropy:
            raise ClientError(
                f"this client has likelihood={self.likelihood!r} but no loss_fn, and "
                "the loss's scale sets the step: pass the loss to differentiate, "
                "FisherClient(loss_fn=...)"
            )
        return self._given_loss

    def train(self, config: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Run the training loop on the model; return its metrics.

        Parameters
        ----------
        config : Mapping[str, Any]
            The request's.
        **options
            Keywords that only some loops take, such as ``LocalSGD``'s `on_gradients`.

        Raises
        ------
        ClientError
            If the loop lacks one of the keywords, if it would train with the
            cross-entropy of classes although the likelihood has no classes, if it
            leaves NaN in the model, or if it trains and returns another model.
        """
        loop: Any = self.train_fn
        if getattr(loop, "loss_fn", None) is cross_entropy and not self.has_classes:
            raise ClientError(
                f"this client has likelihood={self.likelihood!r}, but "
                f"{type(loop).__name__} trains with the cross-entropy of classes: "
                "pass it the loss, LocalSGD(loss_fn=...)"
            )
        for keyword in options:
            if not takes(loop, keyword, or_any=True):
                raise ClientError(
                    f"train_fn {name_of(loop)} has no keyword {keyword!r}, but this "
                    "method's job passes it: train with LocalSGD(...), or add the "
                    "keyword (call `on_gradients` where LocalSGD.__call__ calls it)"
                )
        if takes(loop, "checkpoint", or_any=False):
            options["checkpoint"] = self.checkpoint
        self.checkpoint = self.checkpoint.next()
        returned = self.run(loop, self.trainloader, config, **options)
        check_trained(self.model)
        check_is_not_another(returned, self.model)
        return checked_metrics(returned, "train_fn")

    def evaluate(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Run the client's own evaluation; return its metrics.

        Raises
        ------
        ClientError
            If it returns no ``num-examples``.
        """
        assert self.evaluate_fn is not None
        returned = self.run(self.evaluate_fn, self.valloader, config)
        metrics = checked_metrics(returned, "evaluate_fn")
        if NUM_EXAMPLES not in metrics:
            raise ClientError(
                "evaluate_fn returned no 'num-examples', and the server needs it to "
                f"weight the metrics: add it to {sorted(metrics)}"
            )
        return metrics

    def run(
        self,
        loop: Any,
        loader: Loader | None,
        config: Mapping[str, Any],
        **options: Any,
    ) -> Any:
        """Call a user's loop; within it, `batch_fn` reads the loaders by default.

        What the loop changes on the model beside its values is undone
        (``left_as_known``).

        Raises
        ------
        ClientError
            If the model has other parameters than before.
        """
        with (
            default_reading(self.batch_fn, self.output_fn),
            checking_first_batch(self.on_first_batch),
            defaults_kept(),
            left_as_known(self.model, loop),
        ):
            try:
                returned = loop(self.model, loader, self.device, config, **options)
            finally:
                self._follow()
        return returned

    def _follow(self) -> None:
        """Continue on the device where a loop has left the model, if it has float64."""
        here = place_of(self.model)
        if here is None or here == self.device:
            return
        if has_float64(here):
            self.device = here
        else:
            self.model.to(self.device)

    def trainable(self) -> dict[str, Tensor]:
        """Return the model's trainable parameters by name, without copies."""
        return dict[str, Tensor](trainable(self.model))

    def state_like(self, like: Params) -> dict[str, Tensor]:
        """Return the model's parameters and buffers with the names and order of `like`.

        They are on the device of those of `like`, even if a loop has moved the model.
        """
        state = select(self.model.state_dict(), like)
        return {name: value.to(like[name].device) for name, value in state.items()}

    def count_examples(self, partition: int) -> int:
        """Return the number of training examples of an epoch.

        The loader's sampler and ``drop_last`` decide which examples of a data set
        count.

        Raises
        ------
        DataError
            If there are none, or the loader is a generator or another iterator of
            Python's own.
        """
        n = count_of(self.trainloader)
        if n is None:
            n = self._read_to_count()
        if n == 0:
            raise DataError(
                f"{client_name(partition)} has no training examples: leave this client "
                "out, or distribute the data in another way"
            )
        return n

    @property
    def may_count_late(self) -> bool:
        """Whether examples may be counted after training if the loop did not.

        Some loaders must be read to count their examples, and a user's own loop may
        take any number of examples from an endless stream.
        """
        own = not isinstance(self.train_fn, LocalSGD)
        return own and count_of(self.trainloader) is None

    def batches_trained_on(self, metrics: Mapping[str, Any]) -> Iterable[Any]:
        """Return the training data; of a stream, as many as the user's loop used.

        It may have no end.

        Parameters
        ----------
        metrics : Mapping[str, Any]
            The loop's metrics. If the stream has no end, they must have
            ``num-examples``.

        Raises
        ------
        DataError
            As raised by :meth:`count_examples`.
        """
        batches = self.train_batches
        if isinstance(self.train_fn, LocalSGD) or length_of(batches) is not None:
            return batches
        most = metrics.get(NUM_EXAMPLES) or count_of(batches) or self._read_to_count()
        return at_most(batches, self.model, math.ceil(most), seed=0)

    def _read_to_count(self) -> int:
        """Read the training loader to its end, and return the number of its examples.

        Raises
        ------
        DataError
            If it is an iterator of Python's own, or does not end.
        """
        self.check_can_be_read_again()
        count = 0
        with watching("counting"):
            for batch in batches_of(self.train_batches, self.model, CPU):
                count += len(batch)
                if count > _MOST:
                    raise DataError(
                        "the trainloader has no length, and did not end after "
                        f"{count} examples: return 'num-examples' from your own "
                        "train_fn, or pass num_examples=... to fisher_arrays, or a "
                        "loader that ends"
                    )
        return count

    def check_can_be_read_again(self) -> None:
        """Raise :class:`DataError` for an iterator of Python's or PyTorch's own."""
        check_can_be_read_again(
            self.trainloader,
            "a client reads the trainloader several times, to count, to train and for "
            "the curvature",
        )

    def load(self, params: Params) -> "LocalProblem":
        """Load the server's parameters into the model; return the problem.

        Raises
        ------
        ClientError
            If they are not this model's.
        """
        self.check_layout(params)
        modes = {module: module.training for module in self.model.modules()}
        may_be_merged = bool(with_own_train(modes))  # low-rank factors into weights
        if may_be_merged:
            self.model.train()
        self.model.load_state_dict(dict(params), strict=False)
        for parameter in self.model.parameters():
            parameter.grad = None  # a loop may have left those of former values
        if may_be_merged:
            self.model.train(modes[self.model])
            for module, mode in modes.items():
                module.training = mode
        return self

    def check_dtypes(self, params: Params) -> None:
        """Raise :class:`ClientError` for parameters in another precision.

        Other strategies of Flower take any precision. This library's expect the
        precision that they sent.
        """
        own = self.model.state_dict()
        for name, tensor in params.items():
            if own[name].dtype != tensor.dtype:
                raise ClientError(
                    f"the server sent {name!r:.80} in {tensor.dtype}, but the client's "
                    f"model has {own[name].dtype}: start from arrays of the model's "
                    "dtypes (Flower's strategies return means of integers in float64, "
                    "FedAdam all arrays), or convert the model, for example by "
                    "model.float(). To train in half precision, use "
                    "LocalSGD(autocast=torch.bfloat16)"
                )

    def check_layout(self, params: Params) -> None:
        """Raise :class:`ClientError` for parameters that do not fit this model."""
        own = self.model.state_dict()
        for name, tensor in params.items():
            if name not in own or own[name].shape != tensor.shape:
                has, way_out = _unlike(self.model, own, name)
                raise ClientError(
                    f"the server sent {name!r:.80} of shape {tuple(tensor.shape)}, but "
                    f"the client's model has {has}: {way_out}"
                )
        if missing := [n for n in trainable_names(self.model) if n not in params]:
            raise ClientError(
                f"the server did not send the trainable parameters {some(missing)}: "
                "start from shared_state(model), or freeze them on the client"
            )
        twice = _second_names(self.model)
        if second := [name for name in params if name in twice]:
            raise ClientError(
                f"the server sent {some(second)}, the second names of tied parameters, "
                "and these would undo the merge of the first: start from "
                "shared_state(model), and load what arrives with strict=False"
            )


def _check_yields_batches(name: str, loader: Loader) -> None:
    """Raise :class:`ConfigurationError` for what is no loader, or has no batches."""
    can_be_read = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not can_be_read or isinstance(loader, (type, str)):
        raise ConfigurationError(
            f"{name} must yield batches, but it is {loader!r:.80}: pass a DataLoader, "
            "or a list of batches; of a function that makes one, what it returns"
        )
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise ConfigurationError(
            f"{name} is a {type(loader).__name__}, which yields examples, but a client "
            f"needs batches: pass DataLoader({name}, batch_size=32), for example"
        )


def _unlike(model: nn.Module, own: Params, name: str) -> tuple[object, str]:
    """Return what a model has in place of a tensor that was sent, and the way out."""
    has: object = tuple(own[name].shape) if name in own else "no such entry"
    way_out = (
        "build the same model on both sides. If another app ran on this SuperLink "
        "before, stop the SuperLink: a client may have imported that app's module of "
        "the same name"
    )
    for wrapper in WRAPPERS:
        if f"{wrapper}{name}" in own:
            has = f"it as {wrapper + name!r}"
            way_out = f"give the client the model that is in {wrapper[:-1]}"
    if name.isdigit() and name not in own:
        way_out = (
            "an ArrayRecord of a list numbers its arrays; start from "
            "shared_state(model)"
        )
    if name.startswith(_OF_TCT):
        way_out = (
            "it is a TCT model's, and this request is for the network alone, without "
            f"the keys that begin with {_OF_TCT!r}"
        )
    if hasattr(model, "peft_config") and name not in own:
        way_out = (
            "PEFT's get_peft_model_state_dict leaves the adapter's name out of its "
            "keys; start from shared_state(model)"
        )
    return has, way_out


def _second_names(model: nn.Module) -> set[str]:
    """Return the second names of tied trained parameters."""
    every = dict(nn.Module.named_parameters(model, remove_duplicate=False))
    return {name for name, p in every.items() if p.requires_grad} - set(
        trainable_names(model)
    )
