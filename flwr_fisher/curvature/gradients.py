"""The exact gradient of a mean loss, summed over all examples of a loader."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.curvature.data import IGNORED, batches_of
from flwr_fisher.curvature.losses import Loss, check_is_mean, checked_loss, loss_of
from flwr_fisher.curvature.models import (
    check_outputs,
    check_rows,
    device_of,
    evaluating,
    training,
)
from flwr_fisher.errors import DataError
from flwr_fisher.params import Sums, trainable, widened

# One or more derivatives of a loss. Each has one tensor for each parameter, or None if
# it is zero.
Derivatives = tuple[Sequence[Tensor | None], ...]


def gradient(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    loss_fn: Loss = F.cross_entropy,
    train_mode: bool = False,
) -> tuple[dict[str, Tensor], float]:
    r"""Compute the gradient of the mean loss over all labels of a loader.

    .. math:: g = \nabla_\theta \frac1n \sum_j \ell(f_\theta(x_j), y_j)

    By default the model is evaluated in eval mode: without dropout, and with batch
    norm's running statistics. So the result is deterministic. Because the loss is then
    a sum over examples, the result does not depend on how they are batched. In any mode
    the model's parameters, buffers, modes and ``.grad`` are left as they were.

    Parameters
    ----------
    model : nn.Module
        Any differentiable model.
    loader : Iterable
        Batches ``(inputs, labels)`` of tensors, of any sizes.
    loss_fn : Callable[[Tensor, Tensor], Tensor], default ``F.cross_entropy``
        The *mean* loss of a batch's labels, a scalar, from outputs and labels; an
        integer label of -100 does not count. The first batch shows whether it is one:
        other reductions would depend on how examples are batched.
    train_mode : bool, default False
        Evaluate the model in train mode, as a training does: with dropout, whose masks
        are drawn from torch's generator, and each batch normalised by its own
        statistics. The result is then the mean, weighted by labels, of the batches'
        gradients, and depends on how examples are batched. Frozen batch norms (with
        parameters, none of them trained) stay in eval mode.

    Returns
    -------
    gradient : dict[str, Tensor]
        Over the trainable parameters, in their dtypes; summed in float32, or float64
        for a float64 model.
    loss : float
        The mean loss.

    Raises
    ------
    ConfigurationError
        If the model has no trainable parameter, or `loss_fn` returns no scalar.
    DataError
        If the loader yields no examples, something else than batches, or no labels.
    StructureError
        If `loss_fn` is not a mean over labels, the model returns one number, the loss
        depends on no trainable parameter, or, in eval mode, an example's loss depends
        on the other examples of its batch (by a batch norm without running statistics,
        or by ``x.mean(0)``).

    Examples
    --------
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(model.weight, 2.0)
    >>> batches = [(torch.tensor([[1.0]]), torch.zeros(1, 1))]
    >>> gradient(model, batches, loss_fn=F.mse_loss)
    ({'weight': tensor([[4.]])}, 4.0)
    """
    leaves = list(trainable(model).values())

    def derivatives(loss: Tensor) -> Derivatives:
        return (torch.autograd.grad(loss, leaves, allow_unused=True),)

    (mean,), loss = mean_derivatives(model, loader, derivatives, loss_fn, train_mode)
    return mean, loss


def mean_derivatives(
    model: nn.Module,
    loader: Iterable[Any],
    derivatives: Callable[[Tensor], Derivatives],
    loss_fn: Loss,
    train_mode: bool,
) -> tuple[list[dict[str, Tensor]], float]:
    """Return the means over all examples of a loss's derivatives and of the loss.

    Parameters
    ----------
    model, loader, loss_fn, train_mode
        As for :func:`gradient`.
    derivatives : Callable[[Tensor], Derivatives]
        Called with the mean loss of a batch, with its graph.
    """
    device, parameters = device_of(model), trainable(model)
    sums: list[Sums] = []
    count, losses, is_mean = 0, list[Tensor](), False
    mode = training(model) if train_mode else nullcontext()
    with evaluating(model), mode:
        for batch in batches_of(loader, model, device, labelled=True):
            if not (labels := batch.num_labels):
                continue
            outputs = batch.inputs(model)
            if not count and not train_mode:
                check_outputs(outputs, len(batch))
                check_rows(model, batch.inputs, outputs)
            if not is_mean and isinstance(given := batch.labels, Tensor):
                if len(outputs) == len(batch):
                    check_is_mean(loss_fn, outputs.detach(), given)
                # One class has one weight, and -100 is no class.
                is_mean = len(torch.unique(given[given != IGNORED])) > 1
            loss = checked_loss(loss_of(loss_fn, outputs, batch.labels))
            means = derivatives(loss)
            sums = sums or [Sums(parameters) for _ in means]
            for each, mean in zip(sums, means, strict=True):
                each.add(mean, labels)
            losses.append(widened(loss) * labels)
            count += labels
    if not count:
        raise DataError(
            "the loader has no examples with a label, so it has no gradient"
        )
    found = [
        {k: v.to(parameters[k].dtype) for k, v in each.mean(count).items()}
        for each in sums
    ]
    return found, float(torch.stack(losses).sum()) / count
