"""The default loops of local training and evaluation."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flwr_fisher.client.outbox import TrainingCheckpoint
from flwr_fisher.curvature.data import MappedLoader, batches_of, is_correct
from flwr_fisher.curvature.losses import Loss, checked_loss, cross_entropy, loss_of
from flwr_fisher.curvature.models import evaluating
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    DataError,
    check_positive,
)
from flwr_fisher.log_lines import Progress, logger, watching
from flwr_fisher.merge.batch_norms import norms_by_prefix
from flwr_fisher.options import Options, option
from flwr_fisher.params import NORM_STATISTICS, all_finite, trainable

PRETRAINED = "pretrained"  # in a request's options, and in a loop's config
Loader = Iterable[Any]  # batches
_DIVERGED = 10.0  # times its first batch's loss, a training has not learnt
TrainFn = Callable[
    [nn.Module, Any, torch.device, Mapping[str, Any]], Mapping[str, float]
]
EvaluateFn = TrainFn  # with other data


class LocalSGD(Options):
    r"""Local epochs of SGD: the training loop of FedAvg and FedFisher.

    From the server's config it takes ``lr``, which replaces its own, and FedProx's
    ``proximal-mu``, which adds :math:`\frac\mu2\|\theta-\theta_0\|^2` to the loss;
    :math:`\theta_0` is the model before the training. A strategy with
    ``pretrained=True`` adds ``pretrained``. A job may pass ``on_gradients(epoch,
    step)``, both counted from 1, which is called when a batch's gradients are in place.

    Raises
    ------
    ConfigurationError
        If a number is out of range, here or in the server's config; if there is label
        smoothing with another loss; or if there are options of SGD with another
        optimiser.

    Examples
    --------
    >>> adam = partial(torch.optim.Adam, lr=0.1)
    >>> train = LocalSGD(epochs=2, optimizer=adam)
    >>> model = nn.Linear(1, 2)
    >>> batch = torch.ones(4, 1), torch.ones(4, dtype=torch.int64)
    >>> sorted(train(model, [batch], torch.device("cpu"), {}))
    ['train_loss']
    """

    epochs: int = option(1, "Passes over the loader.", low=1)
    lr: float | None = option(
        None,
        "As in ``torch.optim.SGD``. Default: 0.01, or 0.001 for a pre-trained model, "
        "whose features a higher one spoils.",
        low=0,
    )
    momentum: float = option(0.9, "As in ``torch.optim.SGD``.", low=0, high=1)
    weight_decay: float = option(0.0, "As in ``torch.optim.SGD``.", low=0)
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = option(
        None,
        "Makes another optimiser, which has its own learning rate: "
        "``partial(torch.optim.AdamW, lr=1e-3)``.",
    )
    scheduler: Callable[[Optimizer], LRScheduler] | None = option(
        None,
        "Makes a schedule, which takes a step after each epoch: "
        "``partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=30)``.",
    )
    autocast: torch.dtype | None = option(
        None, "``torch.bfloat16``: train under ``torch.autocast`` in this dtype."
    )
    label_smoothing: float = option(
        0.0,
        "As for :func:`cross_entropy`. A model whose predictions are quite certain has "
        "a Fisher near zero; label smoothing prevents this.",
        low=0,
        high=1,
    )
    loss_fn: Loss = option(
        cross_entropy, "The mean loss of a batch from outputs and labels."
    )
    on_epoch: Callable[[int, float], None] | None = option(
        None, "Called after each epoch with its number (from 1) and mean loss."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_functions(self, ("optimizer", "scheduler", "loss_fn", "on_epoch"))
        if self.autocast not in (None, torch.bfloat16):
            raise ConfigurationError(
                f"autocast must be torch.bfloat16 or None, got {self.autocast!r}"
            )
        sgd, default = (
            (each.lr, each.momentum, each.weight_decay) for each in (self, LocalSGD)
        )
        if self.optimizer is not None and sgd != default:
            raise ConfigurationError(
                "lr, momentum and weight_decay are for the default SGD: give your "
                "optimizer its own, by partial(torch.optim.AdamW, lr=...)"
            )
        if self.label_smoothing and self.loss_fn is not cross_entropy:
            raise ConfigurationError(
                "label_smoothing is for the default loss: smooth labels in your loss_fn"
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
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ConfigurationError(
                "the model has no trainable parameter: set requires_grad on some"
            )
        optimizer = self._optimizer(trained, config)
        schedule = None if self.scheduler is None else self.scheduler(optimizer)
        loss_fn = self.loss_fn
        if self.label_smoothing:
            loss_fn = partial(cross_entropy, label_smoothing=self.label_smoothing)
        mu = _not_negative(config, "proximal-mu", 0.0)
        start = [p.detach().clone() for p in trained] if mu else []
        mixed = self.autocast is not None
        checkpoint = checkpoint or TrainingCheckpoint()
        states: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "schedule": schedule,
            "gradients": on_gradients,
        }
        states = {k: v for k, v in states.items() if hasattr(v, "load_state_dict")}
        saved = checkpoint.load() or {"epoch": 0, "step": 0, "mean": 0.0}
        for name in states.keys() & saved.keys():
            states[name].load_state_dict(saved[name])
        first, step, mean = saved["epoch"] + 1, saved["step"], saved["mean"]
        progress = Progress("training")
        if saved["epoch"]:
            progress.tell(f"which was cut off, goes on after epoch {saved['epoch']}")
        # A client's own loop passes on the loader that it got.
        if batch_fn := getattr(loader, "batch_fn", None):
            loader = MappedLoader(loader, batch_fn)
        model.train()
        began: Tensor | None = None
        for epoch in range(first, self.epochs + 1):
            total, count = torch.zeros((), dtype=torch.float32, device=device), 0
            for batch in batches_of(loader, model, device, labelled=True, report=False):
                if not (labels := batch.num_labels):
                    continue  # their mean loss would be 0 / 0
                optimizer.zero_grad()
                with torch.autocast(device.type, self.autocast, enabled=mixed):
                    loss = loss_of(loss_fn, batch.inputs(model), batch.labels)
                    loss = checked_loss(loss)
                loss.backward()  # type: ignore[no-untyped-call]
                step += 1
                began = loss.detach() if began is None else began
                if on_gradients is not None:
                    on_gradients(epoch, step)
                if mu:  # the gradient of FedProx's proximal term (Li et al. 2020)
                    for p, before in zip(trained, start, strict=True):
                        if p.grad is not None:
                            p.grad.add_(p.detach() - before, alpha=mu)
                optimizer.step()
                total += loss.detach().float() * labels  # half precision ends at 65504
                count += labels
                if progress.due:  # reading a loss makes a GPU wait
                    loss_so_far = f"loss {float(total) / count:.3g}"
                    progress.tell(f"epoch {epoch} of {self.epochs}, {loss_so_far}")
            if not count:
                raise DataError(
                    "the training loader has no examples, or none with a label other "
                    "than -100; what is read only once is empty now: pass a DataLoader"
                )
            mean = float(total) / count
            if not math.isfinite(mean):
                check_trained(model)
            if schedule is not None:
                schedule.step()
            parts = {name: part.state_dict() for name, part in states.items()}
            checkpoint.save({**parts, "epoch": epoch, "step": step, "mean": mean})
            if self.on_epoch is not None:
                self.on_epoch(epoch, mean)
        if began is not None and mean - began > (_DIVERGED - 1) * abs(began):
            text = "The training's loss rose from %.3g to %.3g: lower its learning rate"
            logger.warning(text, began, mean)
        return {"train_loss": mean}

    def settings(self) -> dict[str, Any]:
        """Return the options on which a training depends: all but `on_epoch`."""
        return {k: v for k, v in vars(self).items() if k != "on_epoch"}

    def _optimizer(
        self, trained: list[nn.Parameter], config: Mapping[str, Any]
    ) -> Optimizer:
        """Return the optimiser of a training, with the config's learning rate."""
        rate = self.rate(config)
        if self.optimizer is None:
            return torch.optim.SGD(
                trained, rate, self.momentum, weight_decay=self.weight_decay
            )
        optimizer = self.optimizer(trained)
        for group in optimizer.param_groups if "lr" in config else ():
            group["lr"] = rate
        return optimizer

    def rate(self, config: Mapping[str, Any]) -> float:
        """Return SGD's learning rate: the config's, this loop's, or the default."""
        default = 0.001 if config.get(PRETRAINED) is True else 0.01
        return _not_negative(config, "lr", default if self.lr is None else self.lr)


@contextmanager
def keeping_what_is_known(model: nn.Module, head: str) -> Iterator[None]:
    """Freeze a model's last layer, and its norms' statistics, in a ``with`` block.

    Parameters
    ----------
    model : nn.Module
        A pre-trained model, which is trained in the block.
    head : str
        Its last layer, the same on all clients: their features then stay comparable.

    Raises
    ------
    ClientError
        If they have changed all the same, in another network. It names a tensor.
    """
    layer, norms = model.get_submodule(head), norms_by_prefix(model)
    frozen = [name for name, p in layer.named_parameters() if p.requires_grad]
    statistics = {f"{norm}{name}" for norm in norms for name in NORM_STATISTICS}
    known = {
        name: value.clone()
        for name, value in model.state_dict().items()
        if name in statistics or name.startswith(f"{head}.")
    }
    with ExitStack() as hooks:
        for norm in norms.values():
            in_eval = norm.register_forward_pre_hook(
                lambda norm, _: setattr(norm, "training", False)
            )
            hooks.enter_context(in_eval)
        try:
            layer.requires_grad_(False)
            yield
        finally:
            for name in frozen:  # a loop may have replaced them
                layer.get_parameter(name).requires_grad_(True)
    trained = model.state_dict()
    for name, value in known.items():
        if not torch.equal(trained[name].to(value), value):
            raise ClientError(
                f"the training has changed '{name}', which pretrained=True keeps: "
                "train the model that the client was made with, or a deep copy of it"
            )


def local_sgd(train_fn: TrainFn, why: str) -> LocalSGD:
    """Return the loop, after a check that it is :class:`LocalSGD`.

    Raises
    ------
    ClientError
        For any other loop. It says why the loop must be this one.
    """
    if not isinstance(train_fn, LocalSGD):
        raise ClientError(
            f"{why}, so it needs train_fn=LocalSGD(...), not {train_fn!r}"
        )
    return train_fn


def _not_negative(config: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number of the server's config."""
    value = config.get(name, default)
    check_positive(f"the server's config: {name}", value, or_zero=True)
    return float(value)


def check_functions(owner: object, names: Iterable[str]) -> None:
    """Raise :class:`ConfigurationError` for an attribute that cannot be called."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not callable(value):
            raise ConfigurationError(f"{name} must be a function, got {value!r:.80}")


def check_trained(model: nn.Module) -> None:
    """Raise :class:`ClientError` if a training has left NaN or infinity in a model."""
    for name, parameter in trainable(model).items():
        if not all_finite(parameter.detach()):
            raise ClientError(
                f"the training has left NaN or infinity in {name!r}: look for them in "
                "the data, inputs and labels, or lower the learning rate"
            )


def score(
    model: nn.Module,
    loader: Loader,
    device: torch.device,
    loss_fn: Loss,
    *,
    classes: bool = True,
    as_it_is: bool = False,
) -> tuple[float, float, int]:
    """Return mean loss, accuracy and number of examples, without changing the model.

    The accuracy is a mean over labels; an example may have several, one for each
    position. If the outputs have no classes, or `classes` is False, it is NaN. With
    `as_it_is`, the model stays in its current mode.
    """
    loss, correct, labelled, count = 0.0, 0.0, 0, 0
    mode = nullcontext() if as_it_is else evaluating(model)
    with mode, torch.no_grad(), watching("scoring"):
        for batch in batches_of(loader, model, device, labelled=True):
            count += len(batch)
            if not (labels := batch.num_labels):
                continue
            output, y = batch.inputs(model), batch.labels
            loss += float(loss_of(loss_fn, output, y)) * labels
            found = is_correct(output, y) if classes else None
            correct += math.nan if found is None else float(found.sum())
            labelled += labels
    if not labelled:
        raise DataError("the data to evaluate on have no examples with a label")
    return loss / labelled, correct / labelled, count
