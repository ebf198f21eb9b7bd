r"""A model's last linear layer in closed form, from sums over all clients' data.

Each client runs the model over its data once. For every row z of the last linear
layer's inputs and its target y it adds up :math:`zz^\top`, :math:`zy^\top` and
:math:`y^\top y`. These sums are added over clients. From them the server solves for the
layer: ridge regression (AFL; He et al., CVPR 2025), or linear discriminant analysis
with a shared covariance (as FedCGS and GH-OFL). The split does not matter. A step of
logistic regression (Böhning 1992) may follow, from the clients' slopes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import log, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.curvature.data import IGNORED, Batch, batches_of
from flwr_fisher.curvature.losses import Loss, loss_of
from flwr_fisher.curvature.models import check_rows, evaluating, place_of
from flwr_fisher.errors import DataError, StructureError, check_range
from flwr_fisher.params import widened
from flwr_fisher.tangent.head import check_called_once, find_head, linear_layer

# Ridges that `chosen_ridge` compares, in multiples of the mean eigenvalue. Half decades
# are fine enough: the error is flat around its minimum.
_RIDGES = [10 ** (k / 2) for k in range(-12, 5)]
_UNSEEN = 0.5  # examples of a class that has none, for its prior probability
_ROUNDING = torch.finfo(torch.float64).eps
_RELAXED = 1.9  # times the step to a bound's minimum
_WORST = 100.0  # times the loss of zeros: what is worse is never taken
_LINEAR = 5e-3  # relative: larger than rounding, also TF32's
_FOLD = 1e-8  # the ridge of the feature that stands for a bias, as a share


@dataclass(frozen=True)
class HeadSums:
    r"""The sums over data from which a linear layer is solved.

    If they are added up over clients, the result is the sums of the pooled data.

    Parameters
    ----------
    gram : Tensor
        :math:`\sum z z^\top`, ``[f + 1, f + 1]`` in float64. Every z ends in a 1, also
        if the layer has no bias: so the sum has the features' means.
    cross : Tensor
        :math:`\sum z y^\top`, ``[f + 1, C]`` in float64. For classes, its last row is
        their counts.
    square : float
        :math:`\sum y^\top y`.
    count : float
        The number of examples. A sequence is one example, with a row for each of its
        positions.
    """

    gram: Tensor
    cross: Tensor
    square: float
    count: float

    @staticmethod
    def total(
        every: Sequence["HeadSums"], factors: Sequence[float] | None = None
    ) -> "HeadSums":
        """Return the sums over several clients, each times its factor."""
        pairs = [*zip(every, factors or [1.0] * len(every), strict=True)]
        return HeadSums(
            torch.stack([each.gram * factor for each, factor in pairs]).sum(0),
            torch.stack([each.cross * factor for each, factor in pairs]).sum(0),
            sum(each.square * factor for each, factor in pairs),
            sum(each.count * factor for each, factor in pairs),
        )


# --- on a client


def output_layer(model: nn.Module, loader: Iterable[Any]) -> str:
    """Return the name of the linear layer that computes the model's outputs.

    A log-softmax may follow it, or a choice of one position of a sequence.

    Parameters
    ----------
    model : nn.Module
        In eval mode, and left as it was.
    loader : Iterable
        Its first batch is read.

    Raises
    ------
    StructureError
        If the outputs are those of no ``nn.Linear``, or the layer is frozen, called
        several times, or shares its weight.
    DataError
        If there are no examples.
    """
    calls: list[tuple[str, Tensor]] = []

    def record(name: str, layer: nn.Linear, *called: Any) -> Tensor:
        _, told = _told_apart(layer, *called)
        if isinstance(told, Tensor):  # what follows may change it in place
            calls.append((name, told.clone()))
        return told

    batch = next(batches_of(loader, model, place_of(model), report=False), None)
    if batch is None:
        raise DataError("the loader has no examples")
    with ExitStack() as hooks:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                hook = partial(record, name)
                hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
        outputs = batch.inputs(model)
    for name, own in reversed(calls):
        if _rows(own, own, outputs) is not None:
            check_called_once(name, sum(each == name for each, _ in calls))
            find_head(model, name)  # which refuses a shared weight
            if not all(p.requires_grad for p in linear_layer(model, name).parameters()):
                raise StructureError(f"the last layer '{name}' has frozen parameters")
            return name
    raise StructureError(
        "the model's outputs are not those of an nn.Linear, so its head has no closed "
        "form"
    )


def head_rows(
    model: nn.Module, loader: Iterable[Any], head: str, *, classes: bool = True
) -> Iterator[tuple[Tensor, Tensor, Batch]]:
    """Yield for each batch the layer's inputs and its labels, row by row.

    Parameters
    ----------
    model, loader, head, classes
        As for :func:`head_sums`.

    Yields
    ------
    z : Tensor
        The layer's inputs ``[rows, f]``, without those whose label is -100.
    y : Tensor
        Their classes ``[rows]``, or numbers ``[rows, C]``.
    batch : Batch
        The batch.
    """
    layer = linear_layer(model, head)
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(layer: nn.Linear, args: Any, kwargs: Any, own: Tensor) -> Tensor:
        z, told = _told_apart(layer, args, kwargs, own)
        calls.append((z, own, told.clone()))  # what follows may change it in place
        return told

    hook = layer.register_forward_hook(record, with_kwargs=True)
    with hook, evaluating(model), torch.no_grad():
        batches = batches_of(loader, model, layer.weight.device, labelled=True)
        for number, batch in enumerate(batches):
            calls.clear()
            outputs = batch.inputs(model)
            check_called_once(head, len(calls))
            ((z, own, told),) = calls
            if not number:
                check_rows(model, batch.inputs, outputs)
                _check_is_linear(head, layer, z, own)
            chosen = _rows(z, told, outputs)
            z = (z if chosen is None else chosen).flatten(0, -2)
            labels = batch.tensor_labels()
            labels = labels if classes else labels.to(torch.float32)
            yield *_labelled(z, labels, layer.out_features), batch


def head_sums(
    model: nn.Module,
    loader: Iterable[Any],
    head: str,
    *,
    classes: bool = True,
    targets: Callable[[Tensor], Tensor] | None = None,
) -> HeadSums:
    """Return a client's sums at a linear layer of a model.

    Parameters
    ----------
    model : nn.Module
        Used in eval mode, and left as it was.
    loader : Iterable
        Batches ``(inputs, labels)``; labels are classes, or the targets of a
        regression: for each example as many numbers as the layer has outputs. A class
        of -100 is no label.
    head : str
        The linear layer, called once, whose inputs are the features.
    classes : bool, default True
        Whether whole numbers are classes; otherwise they are numbers as others.
    targets : Callable[[Tensor], Tensor], optional
        Turns numbers into the targets, such as 0 and 1 into -1 and 1.

    Raises
    ------
    DataError
        If there are no examples, or labels do not fit the layer.
    StructureError
        If the layer is not called once, or its outputs are not linear in its inputs.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False))
    >>> batch = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([0, 1])
    >>> head_sums(model, [batch], "0").cross
    tensor([[1., 0.],
            [2., 1.],
            [1., 1.]], dtype=torch.float64)
    """
    layer = linear_layer(model, head)
    f, outputs = layer.in_features + 1, layer.out_features
    gram = torch.zeros(f, f, dtype=torch.float64, device=layer.weight.device)
    cross, square = gram.new_zeros(f, outputs), gram.new_zeros(())
    count = 0
    for z, y, batch in head_rows(model, loader, head, classes=classes):
        x = F.pad(z.double(), (0, 1), value=1.0)
        if y.is_floating_point():
            y = (y if targets is None else targets(y)).double()
        else:
            y = F.one_hot(y, outputs).double()
        gram, cross = gram + x.mT @ x, cross + x.mT @ y
        square = square + y.square().sum()
        count += len(batch)
    if not count:
        raise DataError("the loader has no examples")
    if not gram[-1, -1] > 0:
        raise DataError("the loader has no examples with a label other than -100")
    return HeadSums(gram.cpu(), cross.cpu(), float(square), count)


def head_losses(
    model: nn.Module,
    loader: Iterable[Any],
    head: str,
    solved: Sequence[Tensor],
    scales: Sequence[float],
    loss_fn: Loss,
    *,
    classes: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the losses of a model with its own head and with others, and slopes.

    Losses are sums over rows for each example: the mean loss, if an example is a row.
    They end at 100 times the loss of a head whose outputs are all zero, so that the
    others keep their digits where all are rounded together.

    Parameters
    ----------
    model, loader, head, classes
        As for :func:`head_sums`.
    solved : Sequence[Tensor]
        The weight, and the bias if there is one, of another layer.
    scales : Sequence[float]
        By which the other layer is multiplied: each is one candidate.
    loss_fn : Callable[[Tensor, Tensor], Tensor]
        The mean loss of a batch from outputs and labels.

    Returns
    -------
    losses : Tensor
        ``[1 + len(scales)]`` in float64: of the model's own layer, then of each scale.
    slopes : Tensor
        ``[1 + len(scales), C, f]`` in float64: each loss, differentiated by the weight.
        With a bias, ``f + 1``: the bias is the last column.
    """
    layer, count = linear_layer(model, head), 0
    shape = 1 + len(scales), layer.out_features, layer.in_features + len(solved) - 1
    slopes = layer.weight.new_zeros(shape, dtype=torch.float64)
    losses, quiet = slopes.new_zeros(len(slopes)), slopes.new_zeros(())
    for z, y, batch in head_rows(model, loader, head, classes=classes):
        count += len(batch)
        if not len(z):
            continue
        z, here = z.to(torch.promote_types(z.dtype, torch.float32)), layer.weight.device
        x = F.pad(z, (0, len(solved) - 1), value=1.0)
        own = [p.to(z) for p in (layer.weight, layer.bias) if p is not None]
        other = F.linear(z, *(part.to(here, z.dtype) for part in solved))
        zeros = z.new_zeros(len(z), layer.out_features)
        quiet += len(z) * loss_of(loss_fn, zeros, y).double()
        # One candidate at a time: outputs may be as many as a vocabulary has words.
        for i, scale in enumerate([0.0, *scales]):
            outputs = scale * other if i else F.linear(z, *own)
            with torch.enable_grad():
                loss = loss_of(loss_fn, outputs.requires_grad_(), y)
                (slope,) = torch.autograd.grad(loss, outputs)
            losses[i] += len(z) * loss.detach().double()
            slopes[i] += len(z) * (slope.mT @ x).double()
    if not count:
        raise DataError("the loader has no examples")
    return losses.clamp(max=_WORST * quiet).cpu() / count, slopes.cpu() / count


def _check_is_linear(name: str, layer: nn.Linear, z: Tensor, own: Tensor) -> None:
    """Raise unless a layer's outputs are its weight times its inputs, plus its bias.

    A subclass may scale them or normalise its weight, and a hook may change them.
    """
    linear = widened(F.linear(z.to(layer.weight.dtype), layer.weight, layer.bias))
    most = max(_LINEAR, 4 * torch.finfo(own.dtype).eps)
    if (widened(own) - linear).norm() > most * linear.norm():
        raise StructureError(
            f"the outputs of the last layer '{name}' are not its weight times its "
            "inputs plus its bias: a method of its class, or a hook, changes them"
        )


def _told_apart(
    layer: nn.Linear, args: Any, kwargs: Any, output: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a layer's inputs, and outputs that differ wherever the inputs differ.

    The outputs of a layer of zeros would not show which of them the model returns. A
    subclass may return something else than rows of outputs, which stays as it is.
    """
    z, shape = (*args, *kwargs.values())[0], (layer.out_features, layer.in_features)
    is_linear = isinstance(output, Tensor) and z.shape[-1] == shape[1]
    if not is_linear or output.shape != (*z.shape[:-1], shape[0]):
        return z, output
    probe = torch.arange(prod(shape), device=output.device).cos().view(shape)
    return z, output + F.linear(z.to(output.dtype), probe.to(output.dtype) / shape[1])


def _rows(z: Tensor, own: Tensor, outputs: Tensor) -> Tensor | None:
    """Return the inputs of which the model returns the layer's outputs.

    Parameters
    ----------
    z, own : Tensor
        The layer's inputs and outputs.
    outputs : Tensor
        The model's.

    Returns
    -------
    Tensor or None
        The inputs of all positions, or those of the one position of each example that
        the model returns. None if the model returns something else.
    """
    if own.shape == outputs.shape:
        same = torch.equal(own, outputs)
        return z if same or torch.equal(own.log_softmax(-1), outputs) else None
    if own.dim() == 3 and own[:, 0].shape == outputs.shape:
        matches = (own == outputs.unsqueeze(1)).all(-1)
        if matches.any(1).all():
            return z[torch.arange(len(z), device=z.device), matches.int().argmax(1)]
    return None


def _labelled(z: Tensor, labels: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Return rows with classes ``[rows]``, or numbers ``[rows, C]``, that fit them."""
    rows = len(z)
    if labels.is_floating_point():
        if labels.numel() != rows * outputs:
            raise DataError(
                f"labels of shape {tuple(labels.shape)} do not fit {rows} rows of "
                f"{outputs} outputs"
            )
        return z, labels.reshape(rows, outputs)
    classes: Tensor = labels.flatten().long()
    known = classes != IGNORED
    wrong = known & ((classes < 0) | (classes >= outputs))
    spoiled, whole = torch.stack([wrong.any(), known.all()]).tolist()  # one wait
    if len(classes) != rows or spoiled:
        raise DataError(
            f"labels of shape {tuple(labels.shape)} from {int(classes.min())} to "
            f"{int(classes.max())} do not fit {rows} rows and {outputs} classes"
        )
    return (z, classes) if whole else (z[known], classes[known])


# --- on the server


def chosen_ridge(sums: HeadSums, *, bias: bool) -> float:
    r"""Return the ridge of least generalised cross-validation error, from sums alone.

    .. math:: \frac{n \cdot \mathrm{RSS}}{(n - \mathrm{df})^2}, \qquad
              \mathrm{RSS} = \sum y^\top y
              - \sum_{ij} (V^\top C)_{ij}^2 (2 s_i - e_i s_i^2), \qquad
              \mathrm{df} = \sum_i e_i s_i

    (Golub, Heath & Wahba 1979), where :math:`G = V \operatorname{diag}(e) V^\top` is
    the Gram matrix, C the cross moments and :math:`s = 1 / (e + \lambda)`. With a bias,
    both are centred, and df is greater by 1. It estimates the error on new examples, so
    that no data are held back.

    Parameters
    ----------
    sums : HeadSums
        The sums over all clients.
    bias : bool
        Whether the layer has a bias.

    Returns
    -------
    float
        As for :func:`closed_form_head`.
    """
    gram, cross, square, rows = _moments(sums, centred=bias)
    eigenvalues, vectors = torch.linalg.eigh(gram)
    kept = eigenvalues > len(gram) * _ROUNDING * eigenvalues[-1]
    unit, scale = float(eigenvalues.sum()) / len(gram), _mean_square(sums)
    if not kept.any() or not scale:
        return _RIDGES[-1]
    e = eigenvalues[kept]
    # RSS and n - df as sums of positive terms: where there are as many features as
    # rows, both are small differences of large numbers.
    fitted = (vectors.mT[kept] @ cross).square().sum(1) / e
    outside = square - float(fitted.sum())
    outside = outside if outside > _ROUNDING**0.5 * square else 0.0
    errors = {}
    for share in _RIDGES:
        left = share * unit / (e + share * unit)
        freedom = max(rows - bias - len(e), 0.0) + float(left.sum())
        residual = outside + float((fitted * left.square()).sum())
        errors[share] = rows * residual / freedom**2
    return min(errors, key=errors.__getitem__) * unit / scale


def ridge_of(share: float, sums: HeadSums, *, bias: bool) -> float:
    """Return the ridge that is a share of the features' mean variance.

    Parameters
    ----------
    share : float
        The share; without a bias, of their mean square.
    sums, bias
        As for :func:`chosen_ridge`.

    Returns
    -------
    float
        As for :func:`closed_form_head`; 0 if all features are 0.
    """
    gram, *_ = _moments(sums, centred=bias)
    scale = _mean_square(sums)
    return share * float(gram.diagonal().mean()) / scale if scale else 0.0


def closed_form_head(
    sums: HeadSums, *, bias: bool, ridge: float | None = None
) -> tuple[Tensor, ...]:
    r"""Return the layer that ridge regression gives on all clients' features.

    .. math:: W = \Big(\sum z z^\top + \lambda I\Big)^{-1} \sum z y^\top

    Analytic federated learning (AFL; He et al., CVPR 2025) computes it from the
    clients' solutions. From sums it takes one solution of a linear system, however the
    data are split.

    Parameters
    ----------
    sums : HeadSums
        The sums over all clients.
    bias : bool
        Whether the layer has a bias, which is not regularised.
    ridge : float, optional
        :math:`\lambda` as a share of the mean diagonal entry of :math:`\sum z z^\top`
        over the features, at least 0. If features are linearly dependent, only a
        positive one gives a solution that rounding does not spoil. Default:
        :func:`chosen_ridge`.

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
    gram, cross, _, rows = _moments(sums, centred=bias)
    system = gram + _penalty(sums, bias=bias, ridge=ridge)
    weight = (torch.linalg.pinv(system, hermitian=True) @ cross).mT.contiguous()
    if not bias:
        return (weight,)
    return weight, sums.cross[-1] / rows - weight @ (sums.gram[:-1, -1] / rows)


def lda_head(
    sums: HeadSums, *, bias: bool, ridge: float | None = None
) -> tuple[Tensor, ...]:
    r"""Return the layer of a linear discriminant analysis on all clients' features.

    With class means :math:`\mu_c`, the mean of all m, shares :math:`\pi_c` and the
    covariance S within classes, which all classes share:

    .. math:: w_c = (S + \lambda I / n)^{-1} (\mu_c - m), \qquad
              b_c = -\tfrac12 w_c^\top (\mu_c + m) + \log \pi_c

    (FedCGS and GH-OFL solve for such a head on published features.) Its outputs are
    the logits of Gaussian classes. Features of networks are none, so these logits are
    too sure: scale them by what the clients' losses say.

    Parameters
    ----------
    sums : HeadSums
        The sums over all clients; targets are classes, or their probabilities.
    bias : bool
        Whether the layer has a bias. Without one, the fixed part of the logits becomes
        a part of the weight: the combination of features that is nearest to 1 carries
        it.
    ridge : float, optional
        :math:`\lambda`, as for :func:`closed_form_head`; by default
        :func:`chosen_ridge`.

    Returns
    -------
    tuple[Tensor, ...]
        The weight ``[C, f]``, and the bias ``[C]`` if there is one; in float64. A class
        without examples has the mean of the other classes' logits, less a constant, so
        that it is never the most likely one.

    Raises
    ------
    ConfigurationError
        If `ridge` is negative.
    """
    counts, rows = sums.cross[-1], float(sums.gram[-1, -1])
    seen = counts > 0
    mean = sums.gram[:-1, -1] / rows
    means = sums.cross[:-1, seen] / counts[seen]
    within = sums.gram[:-1, :-1] - (means * counts[seen]) @ means.mT
    system = within + _penalty(sums, bias=bias, ridge=ridge)
    solved = rows * torch.linalg.pinv(system, hermitian=True)
    solved = (solved @ (means - mean.unsqueeze(1))).mT
    fixed = -0.5 * (solved * (means.mT + mean)).sum(1) + (counts[seen] / rows).log()
    weight, offset = sums.cross[:-1].mT.clone(), counts.clone()
    weight[seen], offset[seen] = solved, fixed
    weight[~seen] = solved.mean(0)
    offset[~seen] = fixed.mean() + log(_UNSEEN / rows)
    if bias:
        return weight, offset
    gram = sums.gram[:-1, :-1]
    gram = gram + _FOLD * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
    one = torch.linalg.pinv(gram, hermitian=True) @ sums.gram[:-1, -1]
    return (weight + torch.outer(offset - fixed.mean(), one),)


def majorizer(sums: HeadSums, *, bias: bool, bound: float, ridge: float) -> Tensor:
    r"""Return the matrix of steps that cannot raise a head's convex loss.

    The step is minus the slope of the loss (``head_losses``) times

    .. math:: \frac{1.9}{b}\, \Big(\tfrac1n \big(\sum z z^\top + \lambda I\big)
              \Big)^{-1}

    where n is the number of examples, and :math:`\tfrac bn \sum z z^\top` bounds the
    Hessian from above everywhere (Böhning 1992). Slopes must be those of the same data.
    A factor of 1 goes to the bound's minimum, at 2 the bound is as high as here.

    Parameters
    ----------
    sums, bias, ridge
        As for :func:`closed_form_head`. With a bias, z ends in a 1, which has no ridge.
    bound : float
        b: 1/2 for a softmax, 1/(4 C) for the mean over C sigmoids.

    Returns
    -------
    Tensor
        ``[f, f]`` in float64, or ``[f + 1, f + 1]`` with a bias.
    """
    size = len(sums.gram) - (not bias)
    moments = sums.gram[:size, :size].clone()
    penalty = _penalty(sums, bias=bias, ridge=ridge)
    moments[: len(penalty), : len(penalty)] += penalty
    inverse: Tensor = torch.linalg.pinv(moments, hermitian=True)
    return _RELAXED / bound * sums.count * inverse


def _moments(sums: HeadSums, *, centred: bool) -> tuple[Tensor, Tensor, float, float]:
    """Return the Gram matrix, cross moments and squares, and the number of rows."""
    gram, cross, square = sums.gram[:-1, :-1], sums.cross[:-1], sums.square
    rows, total, targets = float(sums.gram[-1, -1]), sums.gram[:-1, -1], sums.cross[-1]
    if centred:
        gram = gram - torch.outer(total, total) / rows
        cross = cross - torch.outer(total, targets) / rows
        square = square - float(targets.square().sum()) / rows
    return gram, cross, square, rows


def _penalty(sums: HeadSums, *, bias: bool, ridge: float | None) -> Tensor:
    if ridge is None:
        ridge = chosen_ridge(sums, bias=bias)
    check_range("ridge", ridge, 0)
    penalty: Tensor = torch.eye(len(sums.gram) - 1, dtype=sums.gram.dtype)
    return penalty.mul_(ridge * _mean_square(sums))


def _mean_square(sums: HeadSums) -> float:
    """Return the mean diagonal entry of the Gram matrix, over the features."""
    return float(sums.gram.diagonal()[:-1].mean())
