"""The exact gradient of a mean loss, summed over all examples of a loader."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.curvature.batches import Batch, batches_on
from flwr_fisher.curvature.models import (
    check_examples_are_independent,
    device_of,
    evaluating,
)
from flwr_fisher.curvature.sums import Sums, widened
from flwr_fisher.errors import (
    ConfigurationError,
    DataError,
    StructureError,
    check_range,
)
from flwr_fisher.params import Params, trainable_names

Loss = Callable[[Tensor, Tensor], Tensor]
# Of one batch: its mean loss, then one derivative of that, or several, each with a
# tensor for each parameter, or None where it is zero.
Derivatives = tuple[Tensor, *tuple[Sequence[Tensor | None], ...]]


def gradient(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    loss_fn: Loss = F.cross_entropy,
    device: torch.device | str | None = None,
    max_batch_size: int | None = None,
) -> tuple[dict[str, Tensor], float]:
    r"""Compute the gradient of the mean loss over all examples of a loader.

    .. math:: g = \nabla_\theta \frac1n \sum_j \ell(f_\theta(x_j), y_j)

    The model is evaluated in eval mode and left as it was, its ``.grad`` too: without
    dropout, and with batch norm's running statistics, which do not change. So the
    result is deterministic, and, as the loss is then a sum over examples, does not
    depend on how they are batched.

    Parameters
    ----------
    model : nn.Module
        Any differentiable one.
    loader : Iterable
        Batches ``(inputs, labels)`` of tensors, of any sizes.
    loss_fn : Callable[[Tensor, Tensor], Tensor], default ``F.cross_entropy``
        The *mean* loss of a batch's examples, a scalar, from outputs and labels.
    device : torch.device | str | None
        Where the model is; by default where its first trainable parameter is.
    max_batch_size : int, optional
        A larger batch is taken in parts of at most so many examples.

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
        If the model has no trainable parameter or is on another device,
        `max_batch_size` is below 1, or `loss_fn` returns no scalar.
    DataError
        If the loader yields no examples, something else than batches, or no labels.
    StructureError
        If an example's loss depends on the others of its batch (a batch norm without
        running statistics), or the loss on no trainable parameter.

    Examples
    --------
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(model.weight, 2.0)
    >>> batches = [(torch.tensor([[1.0]]), torch.zeros(1, 1))]
    >>> gradient(model, batches, loss_fn=F.mse_loss)
    ({'weight': tensor([[4.]])}, 4.0)
    """
    parameters = checked_parameters(model, device, max_batch_size)
    leaves = list(parameters.values())

    def derivatives(x: Tensor, y: Tensor) -> Derivatives:
        loss = checked_loss(loss_fn, model(x), y)
        return loss, torch.autograd.grad(loss, leaves, allow_unused=True)

    (mean,), loss = mean_derivatives(
        model, parameters, loader, derivatives, max_batch_size
    )
    return mean, loss


def checked_parameters(
    model: nn.Module, device: torch.device | str | None, max_batch_size: int | None
) -> dict[str, nn.Parameter]:
    """Return the trainable parameters, once the arguments are checked.

    Parameters
    ----------
    model, device, max_batch_size
        As for :func:`gradient`.

    Raises
    ------
    ConfigurationError, StructureError
        As for :func:`gradient`, but for what only a batch shows.
    """
    device_of(model, device)
    if max_batch_size is not None:
        check_range("max_batch_size", max_batch_size, 1)
    check_examples_are_independent(model, "the mean loss is no sum over examples")
    return {name: model.get_parameter(name) for name in trainable_names(model)}


def checked_loss(loss_fn: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """Return a batch's loss as a scalar that can be differentiated.

    Parameters
    ----------
    loss_fn : Callable[[Tensor, Tensor], Tensor]
        As for :func:`gradient`.
    outputs, y : Tensor
        The model's outputs and the batch's labels.

    Raises
    ------
    ConfigurationError
        If it is no scalar.
    StructureError
        If it depends on no trainable parameter.
    """
    loss = loss_fn(outputs, y)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss)
        raise ConfigurationError(
            f"loss_fn must return the mean loss of a batch, a scalar tensor; got {got}"
        )
    if not loss.requires_grad:
        raise StructureError(
            "the loss depends on no trainable parameter, so it has no gradient"
        )
    return loss.reshape(())


def mean_derivatives(
    model: nn.Module,
    parameters: Params,
    loader: Iterable[Any],
    derivatives: Callable[[Tensor, Tensor], Derivatives],
    max_batch_size: int | None,
) -> tuple[list[dict[str, Tensor]], float]:
    """Return the means of a loss's derivatives, and of the loss, over all examples.

    Parameters
    ----------
    model : nn.Module
        Put in eval mode meanwhile.
    parameters : Mapping[str, Tensor]
        From :func:`checked_parameters`.
    loader, max_batch_size
        As for :func:`gradient`.
    derivatives : Callable[[Tensor, Tensor], Derivatives]
        Takes the inputs and labels of a batch, or of a part of one.
    """
    device = next(iter(parameters.values())).device
    sums: list[Sums] = []
    count, losses = 0, list[Tensor]()
    with evaluating(model):
        for x, y in _parts(batches_on(loader, device), max_batch_size):
            loss, *means = derivatives(x, y)
            sums = sums or [Sums(parameters) for _ in means]
            for each, mean in zip(sums, means, strict=True):
                each.add(mean, len(x))
            losses.append(widened(loss) * len(x))
            count += len(x)
    if not count:
        raise DataError("the loader has no examples, so there is no gradient to take")
    return [each.mean(count) for each in sums], float(torch.stack(losses).sum()) / count


def _parts(
    batches: Iterable[Batch], size: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches, the larger ones in parts of at most `size` examples."""
    for inputs, labels in batches:
        if not isinstance(labels, Tensor) or len(labels) != len(inputs):
            raise DataError(
                "a loss needs a label for each example: batches must be (inputs, "
                "labels), tensors of one length"
            )
        most = size or len(inputs)
        parts = torch.split(inputs, most), torch.split(labels, most)
        yield from zip(*parts, strict=True)
