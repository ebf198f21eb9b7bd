"""Second derivatives of a batch's loss, by two modes of automatic differentiation."""

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.gradients import Derivatives
from flwr_fisher.curvature.losses import Loss, MeanLoss
from flwr_fisher.curvature.model_checks import nodes_of
from flwr_fisher.curvature.models import outputs_with
from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params


class DoubleDerivatives:
    """Computes a batch's loss, its gradient, and its Hessian's product with a vector.

    Parameters
    ----------
    model : nn.Module
        The model, in the mode in which it is evaluated.
    parameters : Mapping[str, Tensor]
        The parameters with respect to which the loss is differentiated.
    loss_fn : Callable[[Tensor, Tensor], Tensor]
        The mean loss of a batch, from outputs and labels.
    vectors : Mapping[str, Tensor]
        The vector, by the names of parameters; it is zero for names that are missing.
    """

    def __init__(
        self, model: nn.Module, parameters: Params, loss_fn: Loss, vectors: Params
    ) -> None:
        self.model, self.loss_fn = model, MeanLoss(loss_fn)
        self.parameters, self.vectors = parameters, vectors
        self.leaves = list(parameters.values())
        # Reverse mode is cheaper for convolutions alone: forward mode multiplies an
        # input without a tangent, such as the first layer's, by zeros.
        self.forward_mode = any(isinstance(m, _ConvNd) for m in model.modules())
        self.owns: bool | None = None  # whether there is a user's autograd function

    def __call__(self, x: Inputs, y: Any) -> Derivatives:
        """Return the loss, the gradient and the product, from inputs and labels.

        Raises
        ------
        StructureError
            If torch has no second derivative of something in the model or the loss.
        """
        if self.forward_mode:
            try:
                if derivatives := self._forward_over_reverse(x, y):
                    return derivatives
            except RuntimeError as error:
                if not _is_refusal(error):
                    raise
            self.forward_mode = False
        try:
            return self._double_backward(x, y)
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            raise StructureError(
                "torch cannot differentiate this model or loss twice, so it has no "
                f"Hessian product: {str(error).splitlines()[0]}"
            ) from error

    def _double_backward(self, x: Inputs, y: Any) -> Derivatives:
        with _Watch():
            outputs = x(self.model)
        loss = self.loss_fn(outputs, y)
        if self.owns is not False:
            self.owns = _check_own_functions(loss)
        gradients = torch.autograd.grad(
            loss, self.leaves, create_graph=True, allow_unused=True
        )
        pairs = [
            (gradient, self.vectors[name])
            for name, gradient in zip(self.parameters, gradients, strict=True)
            if name in self.vectors and gradient is not None and gradient.requires_grad
        ]
        if not pairs:
            return loss, gradients, [None] * len(self.leaves)
        products = torch.autograd.grad(
            [gradient for gradient, _ in pairs],
            self.leaves,
            [vector for _, vector in pairs],
            allow_unused=True,
        )
        return loss, gradients, products

    def _forward_over_reverse(self, x: Inputs, y: Any) -> Derivatives | None:
        """Return the same in forward mode; None where forward mode would be wrong."""
        _load_forward_mode()
        copies = {k: p.detach().requires_grad_() for k, p in self.parameters.items()}
        with forward_ad.dual_level():
            duals = {k: _dual(copies[k], vector) for k, vector in self.vectors.items()}
            with _Watch() as watch:
                outputs = outputs_with(self.model, copies | duals, x)
            if watch.misleads:
                return None
            value, tangent = _value_and_tangent(outputs)
            if tangent is None:
                tangent = torch.zeros_like(value)
            # Only the outputs' small part of the graph is differentiated twice by
            # reverse mode: there is little to save in it, and it takes any loss.
            loss, gradient, change = self._at_outputs(value.detach(), tangent, y)
            if gradient is None:
                return None
            pulled_back = torch.autograd.grad(
                outputs,
                [*copies.values(), *self.leaves],
                _dual(gradient, change),
                allow_unused=True,
            )
            ours, others = pulled_back[: len(copies)], pulled_back[len(copies) :]
            if any(other is not None for other in others):
                return None
            pairs = [(None, None) if d is None else _value_and_tangent(d) for d in ours]
            return loss, [value for value, _ in pairs], [t for _, t in pairs]

    def _at_outputs(
        self, outputs: Tensor, tangent: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the loss, its gradient with respect to the outputs, and its tangent.

        There is no gradient where the loss reaches the parameters past the outputs.
        """
        outputs.requires_grad_()
        loss = self.loss_fn(outputs, y)
        gradient, *others = torch.autograd.grad(
            loss, [outputs, *self.leaves], create_graph=True, allow_unused=True
        )
        if gradient is None or any(other is not None for other in others):
            return loss, None, tangent
        change = None
        if gradient.requires_grad:
            (change,) = torch.autograd.grad(
                gradient, outputs, tangent, allow_unused=True
            )
        if change is None:
            change = torch.zeros_like(gradient)
        return loss, gradient.detach(), change


def _check_own_functions(loss: Tensor) -> bool:
    """Return whether a graph has autograd functions that are written in Python.

    The pass through it raises :class:`StructureError` where one's ``backward`` cannot
    be differentiated: torch would leave its derivative out.
    """
    own: list[Any] = [n for n in nodes_of(loss) if isinstance(n, BackwardCFunction)]
    for node in own:
        node.register_hook(partial(_check_twice, node.name()))
    return bool(own)


def _check_twice(
    name: str, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]
) -> None:
    """Raise where gradients of inputs do not depend on those of outputs."""
    if not any(g.requires_grad for g in outputs if g is not None):
        return
    for gradient in inputs:
        if gradient is None:
            continue
        made = gradient.grad_fn
        once = made is not None and made.name().endswith("Error")
        if once or not gradient.requires_grad:
            raise StructureError(
                "torch cannot differentiate this model or loss twice, so it has no "
                f"Hessian product: the backward of {name.removesuffix('Backward')} is "
                "once_differentiable, or does not compute with torch: write it in "
                "differentiable operations"
            )


# Like all of torch.linalg, their Hessian products are wrong.
_LINEAR_ALGEBRA = "det", "logdet", "slogdet", "cholesky_inverse", "triangular_solve"


class _Watch(TorchFunctionMode):
    """Watches a forward pass for operations whose tangents torch computes wrongly.

    It notices operations under ``no_grad``, which does not stop forward mode, and
    linear algebra, some of which saves a factor without its tangent. It computes weight
    norm by its plain formula: the second derivative of torch 2.15's own operator is
    wrong (``gradgradcheck`` fails).
    """

    misleads = False  # whether forward mode is wrong for an operation

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_algebra = name.startswith("linalg_") or name in _LINEAR_ALGEBRA
        if is_algebra or not torch.is_grad_enabled():
            self.misleads = True
        if func is torch._weight_norm:
            func = _weight_norm
        return func(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    kept = range(v.dim()) if dim == -1 else [i for i in range(v.dim()) if i != dim]
    norm: Tensor = torch.linalg.vector_norm(v, dim=list(kept), keepdim=True)
    return g * v / norm


@cache
def _load_forward_mode() -> None:
    """Let torch register its formulas, once, without a warning about itself."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", FutureWarning)
        _dual(torch.zeros(1), torch.zeros(1))


def _dual(value: Tensor, tangent: Tensor) -> Tensor:
    dual: Tensor = forward_ad.make_dual(value, tangent)  # type: ignore[no-untyped-call]
    return dual


def _value_and_tangent(dual: Tensor) -> tuple[Tensor, Tensor | None]:
    value, tangent = forward_ad.unpack_dual(dual)  # type: ignore[no-untyped-call]
    return value, tangent


_SAID = (
    *("not implemented", "not been implemented", "does not support", "forward AD"),
    *("jvp", "vmap", "functorch", "torch.func", "torch.utils.checkpoint"),
    # Under vmap: reading a wrapped tensor's memory; the steps of a GRU or an LSTM.
    *("Cannot access", "the broadcast shape"),
)


def _is_refusal(error: RuntimeError) -> bool:
    """Return whether an error says that torch does not support a transformation.

    Examples
    --------
    >>> _is_refusal(RuntimeError("vmap: we don't support .item()"))
    True
    >>> _is_refusal(RuntimeError("CUDA out of memory"))
    False
    """
    return isinstance(error, NotImplementedError) or any(s in str(error) for s in _SAID)
