"""FedFish's Fisher: squared gradients of mini-batches, cheap and empirical."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.estimate.likelihood import Likelihood, check_labels
from flwr_fisher.curvature.operators.diagonal import Diagonal
from flwr_fisher.curvature.sums import Sums, widened
from flwr_fisher.errors import DataError
from flwr_fisher.params import trainable_names


def squared_batch_gradients(
    model: nn.Module, batches: Iterable[tuple[Tensor, Any]], likelihood: Likelihood
) -> Diagonal:
    r"""Return :math:`\frac1B \sum_b (\nabla \bar\ell_b)^2`, elementwise.

    :math:`\bar\ell_b` is a batch's mean negative log-likelihood of the given labels
    (FedFish, Algorithm 2, which takes the sum over batches): as ``F.cross_entropy``'s,
    over the labels other than -100, of which an example has one a position.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    batches : Iterable[tuple[Tensor, Any]]
        Inputs and labels on the model's device.
    likelihood : Likelihood
        What the model's outputs mean.

    Raises
    ------
    DataError
        If there is no batch, or one without labels.
    """
    parameters = {name: model.get_parameter(name) for name in trainable_names(model)}
    leaves, sums, count = list(parameters.values()), Sums(parameters), 0
    for inputs, labels in batches:
        given = check_labels(labels)
        outputs = model(inputs)
        score = likelihood.score(widened(outputs), given)
        mean = (score / likelihood.num_labels(given)).to(outputs.dtype)
        sums.add_squares(torch.autograd.grad(outputs, leaves, mean, allow_unused=True))
        count += 1
    if not count:
        raise DataError("the loader has no examples, so there is no Fisher to take")
    return Diagonal(sums.mean(count))
