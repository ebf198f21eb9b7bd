"""The exact gradient of a mean loss, summed over all examples of a loader."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.curvature.batch import Batch, Inputs
from flwr_fisher.curvature.batches import batches_of
from flwr_fisher.curvature.losses import Loss, MeanLoss
from flwr_fisher.curvature.model_checks import (
    check_examples_are_independent,
    check_examples_do_not_mix,
    check_is_not_reentrant,
    refusing_one_batch_size,
)
from flwr_fisher.curvature.models import (
    device_of,
    evaluating,
    into_train_mode,
    refusing_batches_of_one,
)
from flwr_fisher.curvature.sums import Sums, widened
from flwr_fisher.errors import DataError, StructureError, check_whole
from flwr_fisher.params import Params, trainable

# A batch's mean loss, then one or more derivatives of it. Each has one tensor for each
# parameter, or None if it is zero.
Derivatives = tuple[Tensor, *tuple[Sequence[Tensor | None], ...]]

_FEW = 3  # examples that show whether examples are independent


def gradient(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    loss_fn: Loss = F.cross_entropy,
    device: torch.device | str | None = None,
    max_batch_size: int | None = None,
    train_mode: bool = False,
) -> tuple[dict[str, Tensor], float]:
    r"""Compute the gradient of the mean loss over all labels of a loader.

    .. math:: g = \nabla_\theta \frac1n \sum_j \ell(f_\theta(x_j), y_j)

    By default the model is evaluated in eval mode: without dropout, and with batch
    norm's running statistics. So the result is deterministic. Because the loss is then
    a sum over examples, the result does not depend on how they are batched. In any mode
    the model is left as it was, also its ``.grad`` and the statistics, and so are the
    generators of random numbers.

    Parameters
    ----------
    model : nn.Module
        Any differentiable model.
    loader : Iterable
        Batches ``(inputs, labels)`` of tensors, of any sizes.
    loss_fn : Callable[[Tensor, Tensor], Tensor], default ``F.cross_entropy``
        The *mean* loss of a batch's labels, a scalar, from outputs and labels; an
        integer label of -100 does not count. Other reductions, such as weights of
        classes, are refused, because their means would depend on how examples are
        batched.
    device : torch.device | str | None
        The model's device; by default that of its first trainable parameter.
    max_batch_size : int, optional
        A larger batch is computed in parts of at most this many examples.
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
        If the model has no trainable parameter or is on another device,
        `max_batch_size` is below 1, or `loss_fn` returns no scalar.
    DataError
        If the loader yields no examples, something else than batches, or no labels; in
        train mode also if a batch norm gets a batch of one example.
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
    parameters = checked_parameters(model, device, max_batch_size, train_mode)
    leaves, mean_loss = list(parameters.values()), MeanLoss(loss_fn)

    def derivatives(x: Inputs, y: Any) -> Derivatives:
        loss = mean_loss(x(model), y)
        return loss, torch.autograd.grad(loss, leaves, allow_unused=True)

    (mean,), loss = mean_derivatives(
        model, parameters, loader, derivatives, max_batch_size, train_mode
    )
    mean_loss.check()
    return mean, loss


def checked_parameters(
    model: nn.Module,
    device: torch.device | str | None,
    max_batch_size: int | None,
    train_mode: bool,
) -> dict[str, nn.Parameter]:
    """Check the arguments, and return the trainable parameters."""
    device_of(model, device)
    if max_batch_size is not None:
        check_whole("max_batch_size", max_batch_size, 1)
    if not train_mode:
        check_examples_are_independent(model, "the mean loss is no sum over examples")
    return trainable(model)


def mean_derivatives(
    model: nn.Module,
    parameters: Params,
    loader: Iterable[Any],
    derivatives: Callable[[Inputs, Any], Derivatives],
    max_batch_size: int | None,
    train_mode: bool,
) -> tuple[list[dict[str, Tensor]], float]:
    """Return the means over all examples of a loss's derivatives and of the loss.

    Parameters
    ----------
    model : nn.Module
        The model; meanwhile it is in eval mode, or in train mode.
    parameters : Mapping[str, Tensor]
        From :func:`checked_parameters`.
    loader, max_batch_size, train_mode
        As for :func:`gradient`.
    derivatives : Callable[[Inputs, Any], Derivatives]
        Called with the inputs and labels of a batch, or of a part of a batch.
    """
    device = next(iter(parameters.values())).device
    sums: list[Sums] = []
    count, losses = 0, list[Tensor]()
    with evaluating(model), refusing_batches_of_one("a batch of the loader has"):
        if train_mode:
            into_train_mode(model)
        batches = batches_of(loader, model, device, labelled=True)
        for batch in _parts(batches, max_batch_size):
            if not (labels := batch.num_labels):
                continue
            if not count:
                _check_first(model, batch.inputs, may_mix=train_mode)
            loss, *means = derivatives(batch.inputs, batch.labels)
            sums = sums or [Sums(parameters) for _ in means]
            for each, mean in zip(sums, means, strict=True):
                each.add(mean, labels)
            losses.append(widened(loss) * labels)
            count += labels
    if not count:
        raise DataError(
            "the loader has no examples with a label, so it has no gradient"
        )
    return [each.mean(count) for each in sums], float(torch.stack(losses).sum()) / count


def _check_first(model: nn.Module, inputs: Inputs, *, may_mix: bool) -> None:
    """Raise an error if a few examples have no rows, or mix where they must not."""
    few = inputs[:_FEW]
    with refusing_one_batch_size(model, inputs, few):
        outputs = few(model)
    if not outputs.dim():
        raise StructureError(
            f"the model returns one number for {len(few)} examples: return outputs "
            "with a row for each, and compute the loss by loss_fn"
        )
    check_is_not_reentrant(outputs)
    # A loss may take other rows, such as tokens.
    if not may_mix and len(outputs) == len(few):
        check_examples_do_not_mix(model, few, outputs)


def _parts(batches: Iterable[Batch], size: int | None) -> Iterator[Batch]:
    """Yield the batches, the larger ones in parts of at most `size` examples."""
    for batch in batches:
        labels = batch.labels
        if not isinstance(labels, Tensor) or len(labels) != len(batch):
            raise DataError(
                "a loss needs a label for each example: batches must be (inputs, "
                "labels), two tensors of one length"
            )
        most = size or len(batch)
        for start in range(0, len(batch), most):
            yield batch[start : start + most]
