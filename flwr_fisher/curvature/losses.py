"""The loss of a batch: the default ones, and checks of a scalar and of a mean.

Long: each error says what is wrong with a loss, and what to pass in its place.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flwr_fisher.curvature.batch import (
    IGNORED,
    are_probabilities,
    check_from_0_to_1,
    count_labels,
    is_whole,
)
from flwr_fisher.errors import (
    ConfigurationError,
    DataError,
    FlwrFisherError,
    StructureError,
)

Loss = Callable[[Tensor, Any], Tensor]
_MEAN = 1e-5  # relative and absolute: above rounding in float32
_FEW = 64  # examples of the first batch, with which later ones are compared


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
    _check_shapes(outputs, labels)
    return F.mse_loss(outputs, labels)


def sigmoid_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean binary cross-entropy of logits and labels from 0 to 1."""
    _check_shapes(outputs, labels)
    labels = labels.to(outputs.dtype)
    check_from_0_to_1(labels)
    return F.binary_cross_entropy_with_logits(outputs, labels)


def _check_shapes(outputs: Tensor, labels: Tensor) -> None:
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
            "loss_fn must return a scalar tensor, the mean loss of a batch, but it "
            f"returned {got}"
        )
    if differentiable and not loss.requires_grad:
        raise StructureError(
            "the loss depends on no trainable parameter, so it has no gradient: set "
            "requires_grad on the parameters to train, and compute the loss from the "
            "model's outputs"
        )
    return loss.reshape(())


def loss_of(loss_fn: Loss, outputs: Tensor, labels: Any) -> Tensor:
    """Return a batch's loss; where it fails, :class:`DataError` names the shapes."""
    try:
        return loss_fn(outputs, labels)
    except (FlwrFisherError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _failed(outputs, labels, error) from error


def _failed(outputs: Tensor, labels: Any, error: Exception) -> DataError:
    what = str(error).strip().partition("\n")[0].rstrip(".")
    return DataError(
        f"loss_fn fails on outputs {_form(outputs)} and labels {_form(labels)}, "
        f"{type(error).__name__}: {what}. Change loss_fn, or the labels, for example "
        "by FisherClient(batch_fn=...)"
    )


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"that are a {type(value).__name__}"
    return f"of shape {tuple(value.shape)} and dtype {value.dtype}"


class MeanLoss:
    """A loss function, which must be a mean over labels.

    If it is, its mean over all data does not depend on how they are batched. The first
    batch shows it at once. Weights of classes, or an ``ignore_index`` of its own, may
    show beside a later batch only: :meth:`check` tells of all.
    """

    def __init__(self, loss_fn: Loss) -> None:
        self.loss_fn, self._checked = loss_fn, False
        self._first: tuple[Tensor, Tensor] | None = None  # examples and their labels
        self._pairs: list[Tensor] = []  # losses of two batches, and their mean

    def __call__(self, outputs: Tensor, labels: Any) -> Tensor:
        """Return the loss.

        Raises
        ------
        ConfigurationError
            If it is no scalar.
        StructureError
            If it is another function of the batch than the mean over its labels.
        """
        given = outputs.detach(), labels
        if not self._checked:
            self._checked = check_mean_over_labels(*given, self.loss_fn)
        try:
            loss = self.loss_fn(outputs, labels)
        except IndexError as error:  # a later batch has a label that is no class
            raise _failed(outputs, labels, error) from error
        if isinstance(labels, Tensor) and len(labels) == len(outputs):
            if self._first is None:
                known = labels.ne(IGNORED) if is_whole(labels) else labels.isfinite()
                rows = known.reshape(len(labels), -1).any(1)
                few = rows.nonzero().flatten()[:_FEW]
                self._first = given[0][few], labels[few]
            elif [x.shape[1:] for x in self._first] == [x.shape[1:] for x in given]:
                self._pairs.append(self._beside_first(*given, loss.detach()))
        return checked_loss(loss)

    def _beside_first(self, outputs: Tensor, labels: Tensor, loss: Tensor) -> Tensor:
        """Return the loss of a batch and the first examples, and the mean of both's."""
        assert self._first is not None
        before, own = self._first
        both = torch.cat([before, outputs]), torch.cat([own, labels])
        # As tensors, so that an accelerator is not waited for.
        k, n = (x.ne(IGNORED).sum() if is_whole(x) else len(x) for x in (own, labels))
        mean = (k * self.loss_fn(before, own) + n * loss) / (n + k)
        return torch.stack([x.reshape(()) for x in (self.loss_fn(*both), mean)])

    def check(self) -> None:
        """Raise :class:`StructureError` if a batch's loss was no mean over labels."""
        if not self._pairs:
            return
        whole, mean = torch.stack(self._pairs).cpu().unbind(1)
        close = torch.isclose(mean, whole, _tolerance(whole), _MEAN)
        for index in (~close & whole.isfinite()).nonzero():
            raise _no_mean(whole[index], mean[index], _OF_CLASSES)


def check_mean_over_labels(outputs: Tensor, labels: Any, loss_fn: Loss) -> bool:
    """Check that a loss is the mean over a batch's labels; return if that was possible.

    The check computes it on two parts of the batch; with a single label no check is
    possible.

    Raises
    ------
    ConfigurationError
        If it is no scalar.
    StructureError
        If it is another function of the batch.
    """
    n = len(outputs)
    whole = checked_loss(loss_of(loss_fn, outputs, labels), differentiable=False)
    if not isinstance(labels, Tensor) or len(labels) != n or not whole.isfinite():
        return False
    tried = False
    for cut in sorted({1, n // 2, n - 1} - {0, n}):
        parts = slice(cut), slice(cut, None)
        numbers = [count_labels(labels[rows]) for rows in parts]
        if not all(numbers):
            continue
        losses = [loss_fn(outputs[rows], labels[rows]) for rows in parts]
        terms = [k * loss for k, loss in zip(numbers, losses, strict=True)]
        mean, tried = (terms[0] + terms[1]) / sum(numbers), True
        if not torch.isclose(mean.reshape(()), whole, _tolerance(whole), _MEAN):
            break
    else:
        return tried
    way_out = _OF_CLASSES
    of_numbers = labels.is_floating_point() or outputs.shape[-1:] == (1,)
    if of_numbers and labels.shape != outputs.shape:
        way_out = (
            f"The labels, {list(labels.shape)}, may be broadcast against the outputs, "
            f"{list(outputs.shape)}: give both the same shape"
        )
    raise _no_mean(whole, mean, way_out)


_OF_CLASSES = (
    "With class weights, divide by the number of labels: "
    "F.cross_entropy(outputs, labels, weight=w, reduction='sum') / len(labels). In "
    "place of another ignore_index, set such labels to -100"
)


def _tolerance(loss: Tensor) -> float:
    return max(_MEAN, 8 * torch.finfo(loss.dtype).eps)


def _no_mean(whole: Tensor, mean: Tensor, way_out: str) -> StructureError:
    return StructureError(
        f"the loss of a batch is {float(whole):.6g}, but the mean of its parts' losses "
        f"is {float(mean):.6g}: loss_fn must be a mean over labels (-100 is no "
        f"label). {way_out}"
    )
