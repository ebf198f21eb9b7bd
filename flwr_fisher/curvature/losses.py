"""The loss of a batch: the default ones, and checks of a scalar and of a mean."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flwr_fisher.curvature.data import are_probabilities, count_labels
from flwr_fisher.errors import (
    ConfigurationError,
    DataError,
    FlwrFisherError,
    StructureError,
)

Loss = Callable[[Tensor, Any], Tensor]
_MEAN = 1e-5  # relative and absolute: above rounding in float32


def cross_entropy(
    outputs: Tensor, labels: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy over the labels of examples or positions.

    Classes are the last dimension of the outputs, as for the Fisher's "categorical"
    likelihood. For outputs ``[n, C]`` this is ``F.cross_entropy``, which expects the
    classes as the second dimension. Outputs ``[n, C, T]`` can be trained as in
    ``F.cross_entropy`` if labels ``[n, T]`` fit no other order. They have no accuracy,
    and the Fisher refuses them. A label of -100 does not count.

    Parameters
    ----------
    outputs : Tensor
        Logits ``[n, C]``, or ``[n, T, C]`` for tokens.
    labels : Tensor
        Class indices ``[n]`` or ``[n, T]``, or probabilities of classes in the outputs'
        shape.
    label_smoothing : float, default 0
        As in ``F.cross_entropy``: the share of a label that is spread equally over all
        classes.

    Raises
    ------
    StructureError
        If the outputs have no classes, or one, whose loss is 0.
    DataError
        If labels in the outputs' shape are no probabilities.

    Examples
    --------
    >>> import torch
    >>> cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
    tensor(1.3863)
    """
    are_soft = labels.is_floating_point() and labels.shape == outputs.shape
    if labels.dim() > 1 and labels.shape == outputs.shape[:-1]:
        outputs, labels = outputs.flatten(0, -2), labels.flatten()
    elif are_soft and outputs.dim() > 2 and are_probabilities(labels):
        outputs, labels = outputs.flatten(0, -2), labels.flatten(0, -2)
    if outputs.dim() < 2 or outputs.shape[1] < 2:
        raise StructureError(
            f"outputs of shape {tuple(outputs.shape)} are no logits of two classes or "
            f"more, which the cross-entropy of classes needs: {_OTHER_LOSS}"
        )
    if are_soft and not are_probabilities(labels.movedim(1, -1)):
        raise DataError(
            f"labels have the outputs' shape, {tuple(outputs.shape)}, and are not "
            f"probabilities of classes: {_OTHER_LOSS}"
        )
    return F.cross_entropy(outputs, labels, label_smoothing=label_smoothing)


_OTHER_LOSS = (
    "pass another loss_fn, such as F.mse_loss with likelihood='gaussian' for numbers, "
    "or F.binary_cross_entropy_with_logits with 'bernoulli' for sigmoids"
)


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean squared error, without broadcasting."""
    check_same_shape(outputs, labels)
    return F.mse_loss(outputs, labels)


def sigmoid_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean binary cross-entropy of logits and labels from 0 to 1."""
    check_same_shape(outputs, labels)
    return F.binary_cross_entropy_with_logits(outputs, labels.to(outputs.dtype))


def check_same_shape(outputs: Tensor, labels: Tensor) -> None:
    """Raise :class:`DataError` unless there is a label for each output."""
    if outputs.shape != labels.shape:
        raise DataError(
            f"labels of shape {tuple(labels.shape)} do not fit outputs of shape "
            f"{tuple(outputs.shape)}: give a number for each output, or pass a loss_fn"
        )


# The loss of a likelihood, if neither the client nor its loop names one.
LOSSES: dict[str, Loss] = {
    "categorical": cross_entropy,
    "bernoulli": sigmoid_cross_entropy,
    "gaussian": squared_error,
}


def checked_loss(loss: object, *, differentiable: bool = True) -> Tensor:
    """Return a batch's loss after a check: a scalar with a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss)
        raise ConfigurationError(
            f"loss_fn must return a scalar tensor, a batch's mean loss, not {got}"
        )
    if differentiable and not loss.requires_grad:
        raise StructureError(
            "the loss depends on no trainable parameter: set requires_grad on what is "
            "to be trained, and compute the loss from the model's outputs"
        )
    return loss.reshape(())


def loss_of(loss_fn: Loss, outputs: Tensor, labels: Any) -> Tensor:
    """Return a batch's loss; where it fails, :class:`DataError` names the shapes."""
    try:
        return loss_fn(outputs, labels)
    except (FlwrFisherError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = str(error).strip().partition("\n")[0].rstrip(".")
        raise DataError(
            f"loss_fn fails on outputs {_form(outputs)} and labels {_form(labels)}, "
            f"{type(error).__name__}: {what}. Change loss_fn, or the labels, for "
            "example by FisherClient(batch_fn=...)"
        ) from error


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"that are a {type(value).__name__}"
    return f"of shape {tuple(value.shape)} and dtype {value.dtype}"


def check_is_mean(loss_fn: Loss, outputs: Tensor, labels: Tensor) -> None:
    """Check that a batch's loss is the mean over its labels.

    If it is, the loss of all data does not depend on how they are batched. The check
    compares the loss with those of two parts of the batch.

    Raises
    ------
    ConfigurationError
        If the loss is no scalar.
    StructureError
        If it is another function of the batch, such as a sum or a weighted mean.
    """
    whole = checked_loss(loss_of(loss_fn, outputs, labels), differentiable=False)
    cut = max(1, len(outputs) // 3)
    terms, counts = [], []
    for rows in (slice(cut), slice(cut, None)):
        if count := count_labels(labels[rows]):
            terms.append(count * loss_fn(outputs[rows], labels[rows]))
            counts.append(count)
    if len(terms) < 2 or not whole.isfinite():
        return  # a single label shows nothing
    mean = (terms[0] + terms[1]).reshape(()) / sum(counts)
    tolerance = max(_MEAN, 8 * torch.finfo(whole.dtype).eps)
    if not torch.isclose(mean, whole, tolerance, _MEAN):
        raise StructureError(
            f"the loss of a batch is {float(whole):.6g}, but the mean of its parts' "
            f"losses is {float(mean):.6g}: loss_fn must be a mean over labels (-100 is "
            "no label). With class weights, divide by the number of labels: "
            "F.cross_entropy(outputs, labels, weight=w, reduction='sum') / len(labels)"
        )
