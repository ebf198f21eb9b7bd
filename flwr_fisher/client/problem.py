"""What a client works on: a model, data, a loss, a training loop, a device, a disk."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.client.checkpoint import TrainingCheckpoint
from flwr_fisher.client.feature_cache import CACHE_BYTES
from flwr_fisher.client.limits import MAX_EPOCHS, MAX_STEPS
from flwr_fisher.client.store import DEFAULT_STATE_DIR, STATE_BYTES
from flwr_fisher.client.training import (
    Loader,
    LocalSGD,
    Loss,
    TrainFn,
    cross_entropy,
)
from flwr_fisher.curvature import Likelihood
from flwr_fisher.curvature.estimate.likelihood import likelihood_of
from flwr_fisher.errors import ClientError, DataError, check_range, check_whole
from flwr_fisher.params import Params, select, trainable_names


@dataclass
class LocalProblem:
    """Everything of a client's own; what a server asks of it is a ``Request``.

    Parameters
    ----------
    model : nn.Module
        Maps a batch to outputs; a job finds the server's parameters in it.
    trainloader : Iterable
        Batches ``(inputs, labels)``.
    valloader : Iterable, optional
        Held-out batches.
    train_fn : Callable
        Trains in place.
    loss_fn : Callable, optional
        The mean loss of a batch. Default: the `train_fn`'s own ``loss_fn``, or else
        :func:`~flwr_fisher.client.cross_entropy`.
    likelihood : str | Likelihood
        What the outputs mean to the Fisher.
    device : torch.device
        Where the model is.
    state_dir : Path
        What is kept from one round to the next.
    cache_bytes : int
        How much of that features may take.
    max_examples : int, optional
        How many examples a Fisher may take, whatever the server asks for.
    max_steps, max_epochs : int
        How many steps and epochs the server may ask for.
    state_bytes : int
        How much control variates may take on disk, of all runs; and uploads that the
        server may not have yet.
    checkpoint : TrainingCheckpoint
        Where a training under way is kept, for loops that have a keyword of this name.

    Raises
    ------
    UnknownNameError
        If the likelihood is not known.
    ConfigurationError
        If a number of bytes, examples, steps or epochs is out of range.
    """

    model: nn.Module
    trainloader: Loader
    valloader: Loader | None = None
    train_fn: TrainFn = field(default_factory=LocalSGD)
    loss_fn: Loss | None = None
    likelihood: str | Likelihood = "categorical"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    state_dir: Path = DEFAULT_STATE_DIR
    cache_bytes: int = CACHE_BYTES
    max_examples: int | None = None
    max_steps: int = MAX_STEPS
    max_epochs: int = MAX_EPOCHS
    state_bytes: int = STATE_BYTES
    checkpoint: TrainingCheckpoint = field(default_factory=TrainingCheckpoint)

    def __post_init__(self) -> None:
        likelihood_of(self.likelihood)
        check_range("cache_bytes", self.cache_bytes, 1)
        for name in ("max_examples", "max_steps", "max_epochs", "state_bytes"):
            if (value := getattr(self, name)) is not None or name != "max_examples":
                check_whole(name, value, 1)

    @property
    def has_classes(self) -> bool:
        """Whether outputs are logits of classes, and labels say which."""
        return likelihood_of(self.likelihood).labels_are_classes

    @property
    def loss(self) -> Loss:
        """The mean loss of a batch."""
        if self.loss_fn is not None:
            return self.loss_fn
        trained_with: Loss = getattr(self.train_fn, "loss_fn", cross_entropy)
        return trained_with

    @property
    def differentiable_loss(self) -> Loss:
        """The loss, for jobs that differentiate it.

        Raises
        ------
        ClientError
            If it is the default, and outputs are no logits of classes.
        """
        if not self.has_classes and self.loss is cross_entropy:
            raise ClientError(
                f"likelihood={self.likelihood!r} and no loss_fn, whose default is of "
                "classes: pass the loss to differentiate, FisherClient(loss_fn=...)"
            )
        return self.loss

    def train(self, config: Mapping[str, Any], **options: Any) -> dict[str, float]:
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
            If the loop returns anything else than numbers by name.
        """
        loop: Any = self.train_fn
        if _takes(loop, "checkpoint"):
            options["checkpoint"] = self.checkpoint
        returned = loop(self.model, self.trainloader, self.device, config, **options)
        return _checked_metrics(returned)

    def trained(self) -> dict[str, Tensor]:
        """Return the trained parameters by name; they are the model's own."""
        model = self.model
        return {name: model.get_parameter(name) for name in trainable_names(model)}

    def state_like(self, names: Params) -> dict[str, Tensor]:
        """Return the model's parameters and buffers of these names, in their order."""
        return select(self.model.state_dict(), names)

    def count_examples(self, partition: int) -> int:
        """Return how many training examples there are.

        Raises
        ------
        DataError
            If there are none.
        """
        dataset = getattr(self.trainloader, "dataset", None)
        if dataset is not None:
            n = len(dataset)
        else:
            n = sum(len(y) for _, y in self.trainloader)
        if n == 0:
            raise DataError(
                f"partition {partition} has no training examples: leave this client "
                "out, or share the data out in another way"
            )
        return n

    def load(self, params: Params) -> None:
        """Put the server's parameters into the model.

        Raises
        ------
        ClientError
            If they are not this model's.
        """
        own = self.model.state_dict()
        for name, tensor in params.items():
            if name not in own or own[name].shape != tensor.shape:
                has = tuple(own[name].shape) if name in own else "no such entry"
                raise ClientError(
                    f"the server sent {name!r:.80} of shape {tuple(tensor.shape)}, but "
                    f"the client's model has {has}: build the same model on both sides"
                )
        if missing := [n for n in trainable_names(self.model) if n not in params]:
            raise ClientError(
                f"the server did not send the trainable parameters {missing}: start "
                "from shared_state(model), or freeze them on the client"
            )
        if second := [name for name in params if name in _second_names(self.model)]:
            raise ClientError(
                f"the server sent {second}, second names of tied parameters, which "
                "would undo the merge of the first: start from shared_state(model)"
            )
        self.model.load_state_dict(dict(params), strict=False)


def _takes(function: Callable[..., object], keyword: str) -> bool:
    """Return whether a function has a keyword of that name."""
    try:
        return keyword in signature(function).parameters
    except ValueError:  # of what is built in, nothing is known
        return False


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
