"""The default losses of training and evaluation."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from flwr_fisher.curvature.batch import check_from_0_to_1
from flwr_fisher.errors import DataError

Loss = Callable[[Tensor, Tensor], Tensor]


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
        Class indices ``[n]`` or ``[n, T]``.
    label_smoothing : float, default 0
        As in ``F.cross_entropy``: the share of a label that is spread equally over all
        classes.

    Examples
    --------
    >>> import torch
    >>> cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
    tensor(1.3863)
    """
    if labels.dim() > 1 and labels.shape == outputs.shape[:-1]:
        outputs, labels = outputs.flatten(0, -2), labels.flatten()
    return F.cross_entropy(outputs, labels, label_smoothing=label_smoothing)


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean squared error, without broadcasting.

    Raises
    ------
    DataError
        If their shapes differ.
    """
    if outputs.shape != labels.shape:
        raise _shapes_differ(outputs, labels)
    return F.mse_loss(outputs, labels)


def sigmoid_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean binary cross-entropy of logits and labels from 0 to 1.

    Raises
    ------
    DataError
        If their shapes differ, or a label is out of range.
    """
    if outputs.shape != labels.shape:
        raise _shapes_differ(outputs, labels)
    labels = labels.to(outputs.dtype)
    check_from_0_to_1(labels)
    return F.binary_cross_entropy_with_logits(outputs, labels)


def _shapes_differ(outputs: Tensor, labels: Tensor) -> DataError:
    return DataError(
        f"labels of shape {tuple(labels.shape)} do not fit outputs of shape "
        f"{tuple(outputs.shape)}: give a number for each output, or pass a loss_fn"
    )


# The loss of a likelihood, if neither the client nor its loop names one.
LOSSES: dict[str, Loss] = {
    "categorical": cross_entropy,
    "bernoulli": sigmoid_cross_entropy,
    "gaussian": squared_error,
}
