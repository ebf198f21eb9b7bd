"""Analytic learning: a linear head on a frozen backbone, in closed form."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.curvature.data import batches_of
from flwr_fisher.curvature.models import evaluating
from flwr_fisher.errors import DataError, check_range
from flwr_fisher.tangent.head import check_called_once, linear_layer


@dataclass(frozen=True)
class HeadSums:
    r"""The sums over data from which a linear regression on features is solved.

    If they are added up over clients, the result is the sums of the pooled data.

    Parameters
    ----------
    gram : Tensor
        :math:`\sum x x^\top`, ``[f, f]`` in float64; with a bias every x ends in a 1.
    cross : Tensor
        :math:`\sum x y^\top`, ``[f, C]`` in float64.
    count : float
        The number of examples. A sequence is one example, with a row for each of its
        positions.
    """

    gram: Tensor
    cross: Tensor
    count: float

    @staticmethod
    def total(every: Sequence["HeadSums"]) -> "HeadSums":
        """Return the sums over several clients."""
        return HeadSums(
            torch.stack([each.gram for each in every]).sum(0),
            torch.stack([each.cross for each in every]).sum(0),
            sum(each.count for each in every),
        )


def head_sums(model: nn.Module, loader: Iterable[Any], head: str) -> HeadSums:
    """Return a client's sums at a model's last linear layer.

    Parameters
    ----------
    model : nn.Module
        Used in eval mode, and left as it was.
    loader : Iterable
        Batches ``(inputs, labels)``; labels are classes, or the targets of a
        regression: for each example as many numbers as the head has outputs.
    head : str
        The linear layer, called once, whose inputs are the features.

    Raises
    ------
    DataError
        If there are no examples, or labels do not fit the head.
    StructureError
        If the head is not called once.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False))
    >>> batch = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([0, 1])
    >>> head_sums(model, [batch], "0").cross
    tensor([[1., 0.],
            [2., 1.]], dtype=torch.float64)
    """
    layer = linear_layer(model, head)
    inputs_of: list[Tensor] = []
    handle = layer.register_forward_pre_hook(
        lambda _, args, kwargs: inputs_of.append(args[0] if args else kwargs["input"]),
        with_kwargs=True,
    )
    gram: Tensor | float = 0.0
    cross: Tensor | float = 0.0
    count = 0
    try:
        with evaluating(model), torch.no_grad():
            for batch in batches_of(loader, model, layer.weight.device, labelled=True):
                inputs_of.clear()
                batch.inputs(model)
                x = _features(inputs_of, layer, head)
                y = _targets(batch.labels, len(x), layer.out_features)
                gram, cross = gram + x.mT @ x, cross + x.mT @ y.to(x)
                count += len(batch)
    finally:
        handle.remove()
    if not count:
        raise DataError("the loader has no examples")
    assert isinstance(gram, Tensor)
    assert isinstance(cross, Tensor)
    return HeadSums(gram.cpu(), cross.cpu(), count)


def closed_form_head(sums: HeadSums, *, bias: bool, ridge: float) -> tuple[Tensor, ...]:
    r"""Return the head that ridge regression gives on all clients' features.

    .. math:: W = \Big(\sum x x^\top + \lambda I\Big)^{-1} \sum x y^\top

    Analytic federated learning (AFL; He et al., CVPR 2025) computes it from the
    clients' solutions. From sums it takes one solution of a linear system, however the
    data are split.

    Parameters
    ----------
    sums : HeadSums
        The sums over all clients.
    bias : bool
        Whether every x ends in a 1. The weight of this 1, the bias, is not regularised.
    ridge : float
        :math:`\lambda` as a share of the mean diagonal entry of :math:`\sum x x^\top`
        over the features, at least 0. If features are linearly dependent, only a
        positive one gives a solution that rounding does not spoil.

    Returns
    -------
    tuple[Tensor, ...]
        The weight ``[C, f]``, and the bias ``[C]`` if there is one; in float64. If
        there are several solutions, it is the shortest.

    Raises
    ------
    ConfigurationError
        If `ridge` is negative.
    """
    check_range("ridge", ridge, 0)
    penalty = torch.ones(len(sums.gram), dtype=sums.gram.dtype)
    if bias:
        penalty[-1] = 0
    penalty *= ridge * float((sums.gram.diagonal() * penalty).sum() / penalty.sum())
    inverse = torch.linalg.pinv(sums.gram + torch.diag(penalty), hermitian=True)
    solution = (inverse @ sums.cross).mT.contiguous()
    return (solution[:, :-1], solution[:, -1]) if bias else (solution,)


def _features(inputs_of: Sequence[Tensor], layer: nn.Linear, head: str) -> Tensor:
    """Return the head's inputs as rows, with a last column of ones for the bias."""
    check_called_once(head, len(inputs_of))
    x = inputs_of[0].flatten(0, -2).double()
    return x if layer.bias is None else F.pad(x, (0, 1), value=1.0)


def _targets(labels: Any, rows: int, outputs: int) -> Tensor:
    """Return the regression's targets, ``[rows, C]``: one-hot classes, or numbers."""
    if not isinstance(labels, Tensor):
        raise DataError(
            f"labels must be a tensor, and they are a {type(labels).__name__}"
        )
    if labels.is_floating_point():
        if labels.numel() != rows * outputs:
            raise DataError(
                f"labels of shape {tuple(labels.shape)} do not fit {rows} rows of "
                f"{outputs} outputs"
            )
        return labels.reshape(rows, outputs)
    if labels.numel() != rows or not 0 <= labels.min() <= labels.max() < outputs:
        raise DataError(
            f"labels of shape {tuple(labels.shape)} from {int(labels.min())} to "
            f"{int(labels.max())} do not fit {rows} rows and {outputs} classes"
        )
    return F.one_hot(labels.flatten().long(), outputs)
