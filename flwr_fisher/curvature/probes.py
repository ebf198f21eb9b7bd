"""The exact gradient of a mean loss, and its Hessian's product with a vector.

Nothing here approximates: the sums are over all examples of a loader, in as many parts
as memory asks for. What a probe costs is in :func:`gradient_and_hvp`.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from flwr_fisher.curvature.fisher import batches_on, device_of
from flwr_fisher.curvature.taps import evaluating
from flwr_fisher.errors import (
    ConfigurationError,
    DataError,
    StructureError,
    UnknownNameError,
    check_range,
)
from flwr_fisher.params import Params, trainable_names

__all__ = ["gradient", "gradient_and_hvp", "hvp"]

Loss = Callable[[Tensor, Tensor], Tensor]
Gradients = Sequence[Tensor | None]
Vectors = Mapping[str, Tensor]


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
    found = _mean(model, loader, None, loss_fn, device, max_batch_size)
    return found.gradient, found.loss


def gradient_and_hvp(
    model: nn.Module,
    loader: Iterable[Any],
    probe: Params | int | str = "first",
    *,
    loss_fn: Loss = F.cross_entropy,
    device: torch.device | str | None = None,
    max_batch_size: int | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    r"""Compute the gradient of the mean loss and its Hessian's product with a probe.

    :math:`Hu = \frac{d}{d\epsilon} \nabla L(\theta + \epsilon u)` at
    :math:`\epsilon = 0`, exact, in one pass over the loader. With the first coordinate
    for :math:`u` it is the Hessian's first row, what a client of FAGH reports (Sen, Qin
    & Mohan, "FAGH: Accelerating Federated Learning with Approximated Global Hessian",
    Algorithm 1, line 6). The Hessian itself is never formed.

    Parameters
    ----------
    model, loader, loss_fn, device, max_batch_size
        As in :func:`gradient`, and evaluated like there. The model and the loss must be
        twice differentiable; a ReLU's Hessian is that of its linear pieces.
    probe : Mapping[str, Tensor] | int | str, default "first"
        :math:`u`: a vector with the names and shapes of the trainable parameters; or
        the number of a coordinate, in the order of
        :func:`~flwr_fisher.params.flatten`; or ``first``, coordinate 0.

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
        As for :func:`gradient`; also if the probe does not fit the trainable
        parameters, or torch has no second derivative of something in the model.
    UnknownNameError
        If the probe is another string than ``first``.

    Notes
    -----
    The gradient is differentiated again by a second backward pass, or, where the model
    has convolutions, whose double backward is dear, by forward-mode differentiation of
    the gradient's own computation. Both are exact. Forward mode hands over to the
    second backward pass, for good, where it is not implemented or would not see what
    autograd sees: parts under ``torch.no_grad``, which are constants here, and
    parameters that the loss reaches other than through the module.

    Attention is computed by its plain formula, the only one that torch differentiates
    twice.

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
    found = _mean(model, loader, probe, loss_fn, device, max_batch_size)
    return found.gradient, found.hvp, found.loss


def hvp(
    model: nn.Module,
    loader: Iterable[Any],
    vector: Params | int | str,
    *,
    loss_fn: Loss = F.cross_entropy,
    device: torch.device | str | None = None,
    max_batch_size: int | None = None,
) -> dict[str, Tensor]:
    """Return the product of the mean loss's Hessian with a vector.

    For iterations that have their gradient, as those of
    :func:`~flwr_fisher.merge.giant_direction`; the loader is read once a product.
    Parameters and errors are those of :func:`gradient_and_hvp`.

    Examples
    --------
    >>> model = nn.Linear(2, 1, bias=False)
    >>> batches = [(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 1))]
    >>> vector = {"weight": torch.tensor([[1.0, 1.0]])}
    >>> hvp(model, batches, vector, loss_fn=F.mse_loss)
    {'weight': tensor([[ 8., 24.]])}
    """
    return _mean(model, loader, vector, loss_fn, device, max_batch_size).hvp


class _Found(NamedTuple):
    gradient: dict[str, Tensor]
    hvp: dict[str, Tensor]
    loss: float


def _mean(
    model: nn.Module,
    loader: Iterable[Any],
    probe: Params | int | str | None,
    loss_fn: Loss,
    device: torch.device | str | None,
    max_batch_size: int | None,
) -> _Found:
    place = device_of(model, device)
    if max_batch_size is not None:
        check_range("max_batch_size", max_batch_size, 1)
    _check_examples_are_independent(model)
    parameters = {n: model.get_parameter(n) for n in trainable_names(model)}
    passes = _Passes(model, parameters, loss_fn)
    vectors = None if probe is None else _vectors(parameters, probe)
    gradients, products = _Sums(parameters), _Sums(parameters)
    loss = torch.zeros((), device=place)
    count = 0
    with ExitStack() as context:
        context.enter_context(evaluating(model))
        if vectors is not None:
            # The fused kernels of attention can only be differentiated once.
            context.enter_context(sdpa_kernel(SDPBackend.MATH))
        for x, y in _parts(batches_on(loader, place), max_batch_size):
            if vectors is None:
                value, slopes = passes.first_order(x, y)
            else:
                value, slopes, bends = passes.second_order(x, y, vectors)
                products.add(bends, len(x))
            gradients.add(slopes, len(x))
            loss += value.detach() * len(x)
            count += len(x)
    if not count:
        raise DataError("the loader has no examples, so there is no gradient to take")
    return _Found(
        gradients.mean(count),
        {} if vectors is None else products.mean(count),
        float(loss) / count,
    )


class _Passes:
    """A batch's loss with its first and second derivatives."""

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], loss_fn: Loss
    ) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.parameters = parameters
        self.leaves = list(parameters.values())
        # Cheaper for convolutions alone: forward mode multiplies an input that has no
        # tangent, as the first layer's, by zeros.
        self.forward_mode = any(isinstance(m, _ConvNd) for m in model.modules())

    def first_order(self, x: Tensor, y: Tensor) -> tuple[Tensor, Gradients]:
        loss = self._loss(self.model(x), y)
        return loss, torch.autograd.grad(loss, self.leaves, allow_unused=True)

    def second_order(
        self, x: Tensor, y: Tensor, vectors: Vectors
    ) -> tuple[Tensor, Gradients, Gradients]:
        if self.forward_mode:
            try:
                found = self._forward_over_reverse(x, y, vectors)
            except RuntimeError:  # NotImplementedError is one
                found = None
            if found is not None:
                return found
            self.forward_mode = False
        try:
            return self._double_backward(x, y, vectors)
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            raise StructureError(
                "torch cannot differentiate this model or loss twice, so there is no "
                f"Hessian to probe: {str(error).splitlines()[0]}"
            ) from error

    def _double_backward(
        self, x: Tensor, y: Tensor, vectors: Vectors
    ) -> tuple[Tensor, Gradients, Gradients]:
        with _Watch():
            outputs = self.model(x)
        loss = self._loss(outputs, y)
        slopes = torch.autograd.grad(
            loss, self.leaves, create_graph=True, allow_unused=True
        )
        bent = [
            (slope, vectors[name])
            for name, slope in zip(self.parameters, slopes, strict=True)
            if name in vectors and slope is not None and slope.requires_grad
        ]
        bends: Gradients = [None] * len(self.leaves)
        if bent:
            bends = torch.autograd.grad(
                [slope for slope, _ in bent],
                self.leaves,
                [vector for _, vector in bent],
                allow_unused=True,
            )
        return loss, slopes, bends

    def _forward_over_reverse(
        self, x: Tensor, y: Tensor, vectors: Vectors
    ) -> tuple[Tensor, Gradients, Gradients] | None:
        """Return None where a tangent would not be the derivative of the gradient."""
        _load_forward_mode()
        leaves = {k: p.detach().requires_grad_() for k, p in self.parameters.items()}
        ours = list(leaves.values())
        with forward_ad.dual_level():
            duals = leaves | {
                k: _dual(leaves[k], vector) for k, vector in vectors.items()
            }
            with _Watch() as watch:
                outputs = functional_call(self.model, duals, (x,))
            if watch.was_off or not isinstance(outputs, Tensor):
                return None
            value, tangent = _parted(outputs)
            if tangent is None:
                tangent = torch.zeros_like(value)
            # Only the outputs' small part of the graph is differentiated twice by
            # reverse mode: there is little to save in it, and it takes any loss.
            loss, slope, bend = self._at_outputs(value.detach(), tangent, y)
            if slope is None:
                return None
            found = torch.autograd.grad(
                outputs,
                [*ours, *self.leaves],
                _dual(slope, bend),
                allow_unused=True,
            )
            if any(other is not None for other in found[len(ours) :]):
                return None
            pairs = [
                (None, None) if entry is None else _parted(entry)
                for entry in found[: len(ours)]
            ]
            return loss, [slope for slope, _ in pairs], [bend for _, bend in pairs]

    def _at_outputs(
        self, outputs: Tensor, tangent: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the loss, its gradient by the outputs, and that one's derivative.

        There is no gradient where the loss reaches the parameters past the outputs.
        """
        outputs.requires_grad_()
        loss = self._loss(outputs, y)
        slope, *others = torch.autograd.grad(
            loss, [outputs, *self.leaves], create_graph=True, allow_unused=True
        )
        bend = None
        if slope is None or any(other is not None for other in others):
            return loss, None, tangent
        if slope.requires_grad:
            (bend,) = torch.autograd.grad(slope, outputs, tangent, allow_unused=True)
        return loss, slope.detach(), torch.zeros_like(slope) if bend is None else bend

    def _loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        loss = self.loss_fn(outputs, y)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss)
            raise ConfigurationError(
                "loss_fn must return the mean loss of a batch, a scalar tensor; got "
                f"{found}"
            )
        if not loss.requires_grad:
            raise StructureError(
                "the loss depends on no trainable parameter, so it has no gradient"
            )
        return loss.reshape(())


class _Watch(TorchFunctionMode):
    """Watches a forward pass for what torch would get wrong in silence.

    It notices operations under ``no_grad``, which does not stop forward mode, and
    computes weight norm by its plain formula: the second derivative of torch 2.15's
    own operator is wrong (``gradgradcheck`` fails).
    """

    was_off = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not torch.is_grad_enabled():
            self.was_off = True
        if func is torch._weight_norm:
            return _weight_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    kept = range(v.dim()) if dim == -1 else [i for i in range(v.dim()) if i != dim]
    norm: Tensor = torch.linalg.vector_norm(v, dim=list(kept), keepdim=True)
    return g * v / norm


class _Sums:
    """Sums of batches' means, weighted by size, in at least float32."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.totals = {
            name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            for name, p in parameters.items()
        }

    def add(self, means: Gradients, count: int) -> None:
        for total, mean in zip(self.totals.values(), means, strict=True):
            if mean is not None:
                total.add_(mean.detach(), alpha=count)

    def mean(self, count: int) -> dict[str, Tensor]:
        return {
            name: total.div_(count).to(self.parameters[name].dtype)
            for name, total in self.totals.items()
        }


@cache
def _load_forward_mode() -> None:
    """Let torch register its formulas, once, without a warning about itself."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", FutureWarning)
        _dual(torch.zeros(1), torch.zeros(1))


def _dual(value: Tensor, tangent: Tensor) -> Tensor:
    dual: Tensor = forward_ad.make_dual(value, tangent)  # type: ignore[no-untyped-call]
    return dual


def _parted(dual: Tensor) -> tuple[Tensor, Tensor | None]:
    value, tangent = forward_ad.unpack_dual(dual)  # type: ignore[no-untyped-call]
    return value, tangent


def _vectors(
    parameters: Mapping[str, nn.Parameter], probe: Params | int | str
) -> dict[str, Tensor]:
    """Return the probe by name, without parameters where it is known to be zero."""
    if isinstance(probe, Mapping):
        if odd := sorted(probe.keys() ^ parameters.keys()):
            raise StructureError(
                f"the probe must have the trainable parameters' names; {odd} are in "
                "one of the two only"
            )
        for name, p in parameters.items():
            if probe[name].shape != p.shape:
                raise StructureError(
                    f"the probe's '{name}' has shape {tuple(probe[name].shape)}, the "
                    f"parameter {tuple(p.shape)}"
                )
        return {k: probe[k].detach().to(p) for k, p in parameters.items()}
    if isinstance(probe, str) and probe != "first":
        raise UnknownNameError("probe", probe, ["first"])
    place = 0 if isinstance(probe, str) else probe
    start = 0
    for name, p in parameters.items():
        if start <= place < start + p.numel():
            unit = torch.zeros_like(p, memory_format=torch.contiguous_format).detach()
            unit.view(-1)[place - start] = 1
            return {name: unit}
        start += p.numel()
    raise StructureError(
        f"the probe is coordinate {place}, but there are {start} trainable parameters"
    )


def _parts(
    batches: Iterable[tuple[Tensor, Any]], size: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    for inputs, labels in batches:
        if not isinstance(labels, Tensor) or len(labels) != len(inputs):
            raise DataError(
                "a loss needs a label for each example: batches must be (inputs, "
                "labels), tensors of one length"
            )
        if size is None or len(inputs) <= size:
            yield inputs, labels
        else:
            parts = torch.split(inputs, size), torch.split(labels, size)
            yield from zip(*parts, strict=True)


def _check_examples_are_independent(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise StructureError(
                f"layer '{name}' normalises by the batch's own statistics, so the mean "
                "loss is no sum over examples: use track_running_stats=True, or group "
                "norm"
            )
