"""The default loops of local training and evaluation.

Long: the documentation of all of LocalSGD's options, and its loop.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import (
    Parameter,
    isasyncgenfunction,
    iscoroutinefunction,
    isgeneratorfunction,
    signature,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import BatchSampler

from flwr_fisher.client.training_checkpoint import KeptTraining, TrainingCheckpoint
from flwr_fisher.curvature.batch import Batch, Inputs, num_correct
from flwr_fisher.curvature.batches import batches_of, count_of, unwrapped
from flwr_fisher.curvature.kept_model import copied
from flwr_fisher.curvature.losses import (
    Loss,
    check_mean_over_labels,
    checked_loss,
    cross_entropy,
    loss_of,
)
from flwr_fisher.curvature.models import evaluating, refusing_batches_of_one
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    DataError,
    StructureError,
    check_positive,
    check_range,
    check_whole,
    plain_fields,
)
from flwr_fisher.log_lines import Progress, logger, watching
from flwr_fisher.params import first_not_finite, trainable

Loader = Iterable[Any]  # batches of any form, or `Pairs`
TrainFn = Callable[
    [nn.Module, Any, torch.device, Mapping[str, Any]], Mapping[str, float]
]
EvaluateFn = TrainFn  # with other data
_OF_SGD = ("lr", "momentum", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    r"""Local epochs of SGD: the training loop of FedAvg and FedFisher.

    From the server's config it takes ``lr``, which replaces its own, and FedProx's
    ``proximal-mu``, which adds :math:`\frac\mu2\|\theta-\theta_0\|^2` to the loss;
    :math:`\theta_0` is the model before the training.

    Parameters
    ----------
    epochs : int, default 1
        Passes over the loader.
    lr, momentum, weight_decay : float, default 0.01, 0.9 and 0
        As in ``torch.optim.SGD``.
    optimizer : Callable[[list[nn.Parameter]], Optimizer], optional
        Makes another optimiser, which has its own learning rate:
        ``partial(torch.optim.AdamW, lr=1e-3)``.
    scheduler : Callable[[Optimizer], LRScheduler], optional
        Makes a schedule, which takes a step after each epoch:
        ``partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=30)``.
    autocast : torch.bfloat16 | torch.float16, optional
        Train under ``torch.autocast`` in this dtype. With float16 the losses are
        scaled.
    label_smoothing : float, default 0
        As for :func:`cross_entropy`, in [0, 1]. A model whose predictions are quite
        certain has a Fisher near zero; label smoothing prevents this.
    swa_epochs : int, default 1
        Stochastic weight averaging (Izmailov et al. 2018), at the same learning rate:
        the result is the mean of the parameters after each of the last `swa_epochs`
        epochs. Normalisation statistics are then measured on the loader with the mean
        parameters.
    loss_fn : Callable, default :func:`cross_entropy`
        The mean loss of a batch from outputs and labels.
    on_epoch : Callable[[int, float], None], optional
        Called after each epoch with its number (from 1) and mean loss.

    Raises
    ------
    ConfigurationError
        If a number is out of range, here or in the server's config; if there is label
        smoothing with another loss; if there are options of SGD with another optimiser;
        or if that has none of the model's parameters.

    Examples
    --------
    >>> adam = partial(torch.optim.Adam, lr=0.1)
    >>> train = LocalSGD(epochs=2, optimizer=adam)
    >>> model = nn.Linear(1, 2)
    >>> batch = torch.ones(4, 1), torch.ones(4, dtype=torch.int64)
    >>> sorted(train(model, [batch], torch.device("cpu"), {}))
    ['train_loss']
    """

    epochs: int = 1
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    autocast: torch.dtype | None = None
    label_smoothing: float = 0.0
    swa_epochs: int = 1
    loss_fn: Loss = cross_entropy
    on_epoch: Callable[[int, float], None] | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        check_whole("epochs", self.epochs, 1)
        check_range("lr", self.lr, 0)
        check_range("momentum", self.momentum, 0, 1)
        check_range("weight_decay", self.weight_decay, 0)
        check_whole("swa_epochs", self.swa_epochs)
        check_range("swa_epochs", self.swa_epochs, 1, self.epochs)
        check_range("label_smoothing", self.label_smoothing, 0, 1)
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise ConfigurationError(
                "autocast must be torch.bfloat16 or torch.float16, got "
                f"{self.autocast!r}"
            )
        own = [
            name for name in _OF_SGD if getattr(self, name) != getattr(LocalSGD, name)
        ]
        check_functions(self, ("optimizer", "scheduler", "loss_fn", "on_epoch"))
        if self.optimizer is not None and own:
            raise ConfigurationError(
                "lr, momentum and weight_decay are for the default SGD: give your "
                "optimizer its own, by partial(torch.optim.AdamW, lr=...)"
            )
        if self.label_smoothing and self.loss_fn is not cross_entropy:
            raise ConfigurationError(
                "label_smoothing is for the default loss: smooth the labels in your "
                "loss_fn"
            )

    def __call__(
        self,
        model: nn.Module,
        loader: Loader,
        device: torch.device,
        config: Mapping[str, Any],
        *,
        on_gradients: Callable[[int, int], object] | None = None,
        checkpoint: TrainingCheckpoint | None = None,
    ) -> dict[str, float]:
        """Train the model in place; return ``train_loss``, the last epoch's mean.

        `on_gradients` is called with the numbers of the epoch and of the step in all
        epochs, from 1, when a batch's gradients are in place; it may change them. What
        it remembers must be in its ``state_dict``: a training that `checkpoint` has
        goes on after its last finished epoch.
        """
        steps = _Steps(self, model, device, config, on_gradients)
        schedule = None if self.scheduler is None else self.scheduler(steps.optimizer)
        average = AveragedModel(copied(model)) if self.swa_epochs > 1 else None
        model.train()
        parts = {
            "model": model,
            "optimizer": steps.optimizer,
            "scaler": steps.scaler,
            "schedule": schedule,
            "average": average,
            "gradients": on_gradients,
        }
        kept = KeptTraining(checkpoint or TrainingCheckpoint(), parts, loader)
        progress, pace = Progress("training"), ""
        begin, steps.taken, mean = kept.load()
        for epoch in range(begin + 1, self.epochs + 1):
            for total, count in steps.epoch(loader, epoch):
                if progress.due:  # reading a loss makes a GPU wait
                    loss_so_far = f"loss {float(total) / count:.3g}{pace}"
                    progress.tell(f"epoch {epoch} of {self.epochs}, {loss_so_far}")
            mean = float(total) / count
            if not math.isfinite(mean):
                check_trained(model)
            if schedule is not None:
                _step_schedule(schedule, mean)
            if average is not None and epoch > self.epochs - self.swa_epochs:
                average.update_parameters(model)
            kept.save(epoch, steps.taken, mean)
            pace = f", {progress.seconds / (epoch - begin):.2g} s an epoch"
            if self.on_epoch is not None:
                self.on_epoch(epoch, mean)
        if average is not None:
            model.load_state_dict(average.module.state_dict())
            every = batches_of(loader, model, device)
            update_bn((batch.inputs for batch in every), _OfInputs(model))
        return {"train_loss": mean}

    def settings(self) -> dict[str, Any]:
        """Return the options on which a training depends: all but `on_epoch`."""
        return {k: v for k, v in vars(self).items() if k != "on_epoch"}

    def _optimizer(
        self, trained: list[nn.Parameter], config: Mapping[str, Any]
    ) -> Optimizer:
        """Return the optimiser of a training, with the config's learning rate."""
        own: dict[str, Any] = {name: getattr(self, name) for name in _OF_SGD}
        make: Callable[..., Optimizer] = self.optimizer or partial(
            torch.optim.SGD, **own
        )
        optimizer = make(trained)
        own_parameters = {id(p) for g in optimizer.param_groups for p in g["params"]}
        if own_parameters.isdisjoint(map(id, trained)):
            raise ConfigurationError(
                f"{type(optimizer).__name__} has none of the model's parameters, so "
                "nothing would be trained: make it of those with which optimizer=... "
                "is called, by partial(torch.optim.AdamW, lr=...) for example"
            )
        if "lr" in config:
            own_rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
            if len(own_rates) > 1:
                raise ConfigurationError(
                    f"the server's config has an lr, but the optimizer's groups have "
                    f"different ones, {own_rates}, which one number cannot replace: "
                    "leave lr out of train_config, or read it in a train_fn of your own"
                )
            for group in optimizer.param_groups:
                group["lr"] = _not_negative(config, "lr", self.lr)
        return optimizer


class _Steps:
    """The steps of one training: a model with its loss, optimiser and precision.

    Attributes
    ----------
    taken : int
        How many steps have been taken.
    """

    def __init__(
        self,
        loop: LocalSGD,
        model: nn.Module,
        device: torch.device,
        config: Mapping[str, Any],
        on_gradients: Callable[[int, int], object] | None,
    ) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ConfigurationError(
                "the model has no trainable parameter: set requires_grad on some"
            )
        half = loop.autocast is torch.float16
        if half and on_gradients is not None:
            raise ConfigurationError(
                "this method reads every gradient, and with autocast=torch.float16 "
                "some gradients are infinite: use autocast=torch.bfloat16"
            )
        self.model, self.device, self.on_gradients = model, device, on_gradients
        self.optimizer, self.taken = loop._optimizer(trained, config), 0
        self.needs_closure = _needs_closure(self.optimizer)
        if self.needs_closure and (half or on_gradients is not None):
            raise ConfigurationError(
                f"{type(self.optimizer).__name__} computes gradients several times a "
                "step, and neither autocast=torch.float16 nor a method that reads "
                "every gradient supports that: use another optimizer"
            )
        self.scaler = torch.amp.GradScaler(device.type, enabled=half)
        dtype, mixes = loop.autocast, loop.autocast is not None
        self.mixed = partial(torch.autocast, device.type, dtype, enabled=mixes)
        self.loss_fn = loop.loss_fn
        _check_has_no_parameters(self.loss_fn, model)
        if loop.label_smoothing:
            self.loss_fn = partial(cross_entropy, label_smoothing=loop.label_smoothing)
        self.proximal = _Proximal(trained, _not_negative(config, "proximal-mu", 0.0))

    def epoch(self, loader: Loader, epoch: int) -> Iterator[tuple[Tensor, int]]:
        """Take an epoch's steps; yield after each the sum of losses, over labels."""
        total, count = torch.zeros((), device=self.device), 0
        model, device = self.model, self.device
        every = batches_of(
            loader, model, device, labelled=True, report=False, keep=False
        )
        for batch in every:
            if not (labels := batch.num_labels):
                continue  # their mean loss would be 0 / 0
            if not self.taken:
                _check_last_batch(loader, model, batch.inputs)
            self.taken += 1
            with refusing_batches_of_one("a batch of the trainloader is of"):
                loss = self._take(partial(self._gradients, batch, epoch))
            total += loss.float() * labels  # half precision ends at 65504
            count += labels
            yield total, count
        if not count:
            raise DataError(
                "the training loader has no examples, or none with a label other "
                "than -100. A client reads its loader several times: if it can "
                "be read only once, it is empty now, so pass a DataLoader"
            )

    def _take(self, closure: Callable[[], Tensor]) -> Tensor:
        """Take a step; return the loss before it."""
        if self.needs_closure:
            return torch.as_tensor(self.optimizer.step(closure))  # type: ignore[arg-type]
        loss = closure()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _gradients(self, batch: Batch, epoch: int) -> Tensor:
        """Compute a batch's gradients; return its loss."""
        self.optimizer.zero_grad()
        with self.mixed():
            loss = loss_of(self.loss_fn, batch.inputs(self.model), batch.labels)
            loss = checked_loss(loss)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        if self.on_gradients is not None:
            self.on_gradients(epoch, self.taken)
        self.proximal.add_gradient()
        return loss.detach()


def _check_has_no_parameters(loss_fn: Loss, model: nn.Module) -> None:
    """Raise :class:`ConfigurationError` for a loss that should be trained, too."""
    own = loss_fn.named_parameters() if isinstance(loss_fn, nn.Module) else ()
    known = set(map(id, model.parameters()))
    if names := [name for name, p in own if p.requires_grad and id(p) not in known]:
        raise ConfigurationError(
            f"the loss has parameters of its own, {names}, which nobody would train or "
            "send: make them parameters of the model, or freeze them by "
            "loss.requires_grad_(False)"
        )


def _check_last_batch(loader: Loader, model: nn.Module, inputs: Inputs) -> None:
    """Raise :class:`DataError` if batch norm cannot train on a last batch of one."""
    batches: Any = getattr(unwrapped(loader), "batch_sampler", None)
    if type(batches) is not BatchSampler or batches.drop_last:
        return
    if (count_of(loader) or 0) % batches.batch_size != 1:
        return
    with evaluating(model), torch.no_grad():
        model.train()
        with refusing_batches_of_one("the trainloader's last batch is of"):
            inputs[:1](model)


def local_sgd(train_fn: TrainFn, why: str) -> LocalSGD:
    """Return the loop, after a check that it is :class:`LocalSGD`.

    Raises
    ------
    ClientError
        For any other loop. It says why the loop must be this one.
    """
    if not isinstance(train_fn, LocalSGD):
        raise ClientError(
            f"{why}, so it needs train_fn=LocalSGD(...) of a FisherClient, not "
            f"{train_fn!r}"
        )
    return train_fn


def _not_negative(config: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number of the server's config."""
    value = config.get(name, default)
    check_positive(f"the server's config: {name}", value, or_zero=True)
    return float(value)


_RUN_LATER = iscoroutinefunction, isasyncgenfunction, isgeneratorfunction


def check_functions(owner: object, names: Iterable[str]) -> None:
    """Raise :class:`ConfigurationError` for an attribute that cannot be called.

    A call of a generator function, or of an async one, runs nothing of it.
    """
    for name in names:
        value = getattr(owner, name)
        if not callable(value) and value is not getattr(type(owner), name, None):
            makes = {"optimizer": "an optimizer", "scheduler": "a schedule"}.get(name)
            what = f"a function that makes {makes}" if makes else "a function"
            raise ConfigurationError(f"{name} must be {what}, got {value!r:.80}")
        if isinstance(value, type) and issubclass(value, nn.Module):
            raise ConfigurationError(
                f"{name} is a class: pass an object of it, {value.__name__}()"
            )
        if any(is_one(value) for is_one in _RUN_LATER):
            raise ConfigurationError(
                f"{name} is async or has a yield, so a call of it does nothing: pass "
                "an ordinary function, which calls asyncio.run(...) or list(...) of it"
            )


def check_trained(model: nn.Module) -> None:
    """Raise :class:`ClientError` if a training has left NaN or infinity in a model."""
    named = ((name, p.detach()) for name, p in trainable(model).items())
    if (name := first_not_finite(named)) is not None:
        raise ClientError(
            f"the training has left NaN or infinity in {name!r}: look for them in the "
            "data, inputs and labels, or lower the learning rate"
        )


class _OfInputs(nn.Module):
    """A model with an :class:`Inputs` as its only argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs) -> Tensor:
        return inputs(self.model)


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimiser needs a closure, as L-BFGS does."""
    parameter = signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is Parameter.empty


def _step_schedule(schedule: LRScheduler, loss: float) -> None:
    """Take a schedule's step after an epoch; some schedules need its loss."""
    if isinstance(schedule, ReduceLROnPlateau):
        schedule.step(loss)
    else:
        schedule.step()


class _Proximal:
    """The gradient of FedProx's proximal term (Li et al. 2020)."""

    def __init__(self, parameters: list[nn.Parameter], mu: float) -> None:
        self.mu, self.parameters = mu, parameters if mu else []
        self.start = [p.detach().clone() for p in self.parameters]

    def add_gradient(self) -> None:
        for p, start in zip(self.parameters, self.start, strict=True):
            if p.grad is not None:
                if p.grad.is_sparse:  # the term is zero
                    p.grad = p.grad.to_dense()
                p.grad.add_(p.detach() - start, alpha=self.mu)


def score(
    model: nn.Module,
    loader: Loader,
    device: torch.device,
    loss_fn: Loss,
    *,
    classes: bool = True,
) -> tuple[float, float, int]:
    """Return mean loss, accuracy and number of examples, without changing the model.

    The accuracy is a mean over labels; an example may have several, one for each
    position. If the outputs have no classes, or `classes` is False, it is NaN.
    """
    with evaluating(model), watching("scoring", count_of(loader)):
        batches = batches_of(loader, model, device, labelled=True)
        return score_batches(model, batches, loss_fn, check=True, classes=classes)


@torch.no_grad()
def score_batches(
    model: nn.Module,
    batches: Iterable[Batch],
    loss_fn: Loss,
    *,
    classes: bool,
    check: bool = False,
) -> tuple[float, float, int]:
    """Return the scores of :func:`score`, with the model in its current mode.

    With `check`, the log has a warning if the loss is not a mean over labels.
    """
    loss, correct, labelled, count = 0.0, 0.0, 0, 0
    for batch in batches:
        count += len(batch)
        if not (labels := batch.num_labels):
            continue
        output, y = batch.inputs(model), batch.labels
        if check and not labelled:
            _warn_unless_mean(output, y, loss_fn)
        loss += float(loss_of(loss_fn, output, y)) * labels
        correct += num_correct(output, y) if classes else math.nan
        labelled += labels
    if not labelled:
        raise DataError("the data to evaluate on have no examples with a label")
    return loss / labelled, correct / labelled, count


def _warn_unless_mean(outputs: Tensor, labels: Any, loss_fn: Loss) -> None:
    try:
        check_mean_over_labels(outputs, labels, loss_fn)
    except StructureError as error:
        logger.warning("The loss depends on the batches of the data: %s", error)
