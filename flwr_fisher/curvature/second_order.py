"""The exact product of a mean loss's Hessian with a vector."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flwr_fisher.curvature.gradients import Derivatives, mean_derivatives
from flwr_fisher.curvature.losses import Loss
from flwr_fisher.curvature.models import device_of
from flwr_fisher.errors import StructureError, check_known
from flwr_fisher.params import Params, check_same_layout, trainable
from flwr_fisher.randomness import random_stream


def gradient_and_hvp(
    model: nn.Module,
    loader: Iterable[Any],
    probe: Params | str = "first",
    *,
    loss_fn: Loss = F.cross_entropy,
    train_mode: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    r"""Compute the gradient of the mean loss and its Hessian's product with a probe.

    :math:`Hu = \frac{d}{d\epsilon} \nabla L(\theta + \epsilon u)` at
    :math:`\epsilon = 0`, exact, in one pass over the loader. If :math:`u` is the first
    coordinate, the result is the Hessian's first row, which a client of FAGH reports
    (Sen, Qin & Mohan, "FAGH: Accelerating Federated Learning with Approximated Global
    Hessian", Algorithm 1, line 6). The Hessian itself is never formed.

    Parameters
    ----------
    model, loader, loss_fn, train_mode
        As for :func:`gradient`, and evaluated in the same way; in train mode, the
        gradient and the product have the same dropout. The model and the loss
        must be twice differentiable; a ReLU's Hessian is that of its linear pieces.
    probe : Mapping[str, Tensor] | "first", default "first"
        :math:`u`: a vector with the names and shapes of the trainable parameters; or
        ``first``, the unit vector of the first coordinate, in the order of
        :func:`~flwr_fisher.params.flatten`.

    Returns
    -------
    gradient, hvp : dict[str, Tensor]
        :math:`g` and :math:`Hu`, over the trainable parameters, in their dtypes.
    loss : float
        The mean loss.

    Raises
    ------
    ConfigurationError, DataError
        As for :func:`gradient`.
    StructureError
        As for :func:`gradient`; also if torch has no second derivative of something in
        the model.
    ParamsError
        If the probe is a vector that does not fit the trainable parameters.
    UnknownNameError
        If the probe is another string than ``first``.

    Notes
    -----
    A second backward pass differentiates the first one (Pearlmutter 1994). Attention is
    computed by its plain formula, the only one that torch differentiates twice.

    Examples
    --------
    Half the squared error of a linear map has the inputs' second moment for a Hessian:

    >>> model = nn.Linear(2, 1, bias=False)
    >>> batches = [(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 1))]
    >>> half = lambda outputs, labels: (outputs - labels).square().mean() / 2
    >>> _, row, _ = gradient_and_hvp(model, batches, "first", loss_fn=half)
    >>> row
    {'weight': tensor([[1., 3.]])}
    """
    device_of(model)
    parameters = trainable(model)
    leaves, vectors = list(parameters.values()), _vectors(parameters, probe)
    grad = partial(torch.autograd.grad, inputs=leaves, allow_unused=True)

    def derivatives(loss: Tensor) -> Derivatives:
        gradients = grad(loss, create_graph=True)
        # Only these depend on the parameters: those of linear ones are constants.
        pairs = [
            (gradient, vectors[name])
            for name, gradient in zip(parameters, gradients, strict=True)
            if name in vectors and gradient is not None and gradient.requires_grad
        ]
        if not pairs:
            return gradients, [None] * len(leaves)
        slopes, directions = zip(*pairs, strict=True)
        return gradients, grad(slopes, grad_outputs=directions)

    # The fused kernels of attention can only be differentiated once.
    with sdpa_kernel(SDPBackend.MATH):
        try:
            (mean, product), loss = mean_derivatives(
                model, loader, derivatives, loss_fn, train_mode
            )
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            raise StructureError(
                "torch cannot differentiate this model or loss twice, so it has no "
                f"Hessian product: {str(error).splitlines()[0]}"
            ) from error
    return mean, product, loss


def hvp(
    model: nn.Module, loader: Iterable[Any], vector: Params | str, **options: Any
) -> dict[str, Tensor]:
    """Return the product of the mean loss's Hessian with a vector.

    It is for iterations that already have the gradient, such as conjugate gradients.
    Each product reads the loader once. The other options, such as `loss_fn` and
    `train_mode`, and the errors are those of :func:`gradient_and_hvp`.

    Examples
    --------
    >>> model = nn.Linear(2, 1, bias=False)
    >>> batches = [(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 1))]
    >>> vector = {"weight": torch.tensor([[1.0, 1.0]])}
    >>> hvp(model, batches, vector, loss_fn=F.mse_loss)
    {'weight': tensor([[ 8., 24.]])}
    """
    return gradient_and_hvp(model, loader, vector, **options)[1]


def _vectors(parameters: Params, probe: Params | str) -> dict[str, Tensor]:
    """Return the probe's vector, without the parameters where it is zero."""
    if isinstance(probe, Mapping):
        check_same_layout(parameters, probe, "the probe")
        return {name: probe[name].detach().to(p) for name, p in parameters.items()}
    check_known("probe", probe, ["first"])
    name, p = next(iter(parameters.items()))
    unit = torch.zeros_like(p, memory_format=torch.contiguous_format).detach()
    unit.view(-1)[0] = 1
    return {name: unit}


def random_probe(like: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return a Gaussian vector of length 1 that depends on names, shapes and `seed`.

    NumPy draws it on the CPU, each name from a stream of its own. So it does not depend
    on the device, the order of the names or the version of torch. Server and clients
    can draw it from `seed`, and need not send it.

    Returns
    -------
    dict[str, Tensor]
        The vector, in the order and dtypes and on the devices of `like`.

    Examples
    --------
    >>> like = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    >>> probe = random_probe(like, seed=0)
    >>> round(float(sum(v.square().sum() for v in probe.values())), 5)
    1.0
    """
    drawn = {
        name: random_stream(seed, name).standard_normal(tensor.shape)
        for name, tensor in like.items()
    }
    length = sum(float(np.square(drawn[name]).sum()) for name in sorted(drawn)) ** 0.5
    return {
        name: torch.from_numpy(np.asarray(values / length)).to(like[name])
        for name, values in drawn.items()
    }
