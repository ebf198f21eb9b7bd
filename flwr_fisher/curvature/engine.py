"""The engine behind :func:`flwr_fisher.curvature.fisher`.

One forward pass a batch; then one backward pass for each column of the likelihood's
factor, which goes only as far as the layers' outputs: gradients of weights are never
formed for a whole batch, and K-FAC's input factors are taken once a batch. Parameters
outside linear and convolution layers, and those of a layer that is not called exactly
once through its own ``forward``, one row an example, get their exact diagonal from
per-example Jacobians.
"""

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_fisher.curvature.base import Blocks, Curvature
from flwr_fisher.curvature.diagonal import Diagonal
from flwr_fisher.curvature.jacobians import (
    DenseJacobian,
    DiagonalJacobian,
    JacobianMoments,
)
from flwr_fisher.curvature.layers import fits, input_columns, output_columns
from flwr_fisher.curvature.likelihood import categorical_factors
from flwr_fisher.curvature.moments import (
    DiagonalMoments,
    KroneckerMoments,
    LayerMoments,
)
from flwr_fisher.curvature.taps import (
    Tap,
    TappableLayer,
    tappable_layers,
    tapped_forward,
)
from flwr_fisher.errors import DataError, StructureError
from flwr_fisher.params import trainable_names

__all__ = ["Engine"]

# Relative; a wrong formula is off by far more than rounding.
_GRADIENT_TOLERANCE = 1e-3


class Engine:
    """Sums a model's true Fisher over batches; the model is in eval mode already."""

    def __init__(self, model: nn.Module, structure: str) -> None:
        _check_examples_are_independent(model)
        self.model, self.structure = model, structure
        self.count = 0
        self.layers = {} if structure == "dense" else tappable_layers(model)
        self.moments: dict[str, LayerMoments] = {}
        self.rest: JacobianMoments | None = None

    def add(self, inputs: Tensor) -> None:
        """Take one batch of inputs ``[n, ...]``, on the model's device."""
        logits, taps = tapped_forward(self.model, inputs, self.layers)
        factors = categorical_factors(logits)
        if self.count == 0:
            self._settle(logits, taps)
        self.count += inputs.shape[0]
        if self.moments:
            self._add_layers(logits, taps, factors)
        if self.rest is not None:
            self.rest.add(inputs, factors)

    def _add_layers(
        self, logits: Tensor, taps: dict[str, list[Tap]], factors: Tensor
    ) -> None:
        for name, moments in self.moments.items():
            if len(taps[name]) != 1:
                raise StructureError(
                    f"layer '{name}' was called {len(taps[name])} times in one batch "
                    "and once in the first; its calls must not depend on the data"
                )
            if (rows := taps[name][0].inputs.shape[0]) != len(logits):
                raise StructureError(
                    f"layer '{name}' was called with {rows} rows for a batch of "
                    f"{len(logits)}, and with one row an example in the first batch"
                )
            moments.add_inputs(_input_columns(moments.layer, taps[name][0]))
        edges = [taps[name][0].output for name in self.moments]
        for k, factor in enumerate(factors, start=1):
            keep = k < len(factors)
            gradients = torch.autograd.grad(logits, edges, factor, retain_graph=keep)
            for moments, gradient in zip(self.moments.values(), gradients, strict=True):
                columns = output_columns(moments.layer.layer, gradient)
                moments.add_gradients(columns)

    def _settle(self, logits: Tensor, taps: dict[str, list[Tap]]) -> None:
        """Decide from the first batch which layers the taps explain."""
        self.layers = {
            name: layer
            for name, layer in self.layers.items()
            if len(taps[name]) == 1 and _explains(layer, taps[name][0], logits)
        }
        kind = KroneckerMoments if self.structure == "kfac" else DiagonalMoments
        self.moments = {name: kind(layer) for name, layer in self.layers.items()}
        taken = {p for x in self.layers.values() for p in (x.weight, x.bias)}
        rest = [name for name in trainable_names(self.model) if name not in taken]
        jacobian = DenseJacobian if self.structure == "dense" else DiagonalJacobian
        self.rest = jacobian(self.model, rest) if rest else None

    def mean(self) -> Curvature:
        """Return the mean over all examples taken."""
        if self.count == 0:
            raise DataError("the loader has no examples, so there is no Fisher to take")
        parts: list[Curvature] = [m.mean(self.count) for m in self.moments.values()]
        if self.rest is not None:
            parts.append(self.rest.mean(self.count))
        if self.structure == "dense":
            return parts[0]
        if self.structure == "kfac":
            return Blocks(parts)
        entries = {name: d for part in parts for name, d in part.diagonal().items()}
        return Diagonal({name: entries[name] for name in trainable_names(self.model)})


def _check_examples_are_independent(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise StructureError(
                f"layer '{name}' normalises by the batch's own statistics, so an "
                "example has no Fisher of its own: use track_running_stats=True, or "
                "group norm"
            )


def _input_columns(layer: TappableLayer, tap: Tap) -> Tensor:
    return input_columns(layer.layer, tap.inputs, bias=layer.bias is not None)


def _explains(layer: TappableLayer, tap: Tap, logits: Tensor) -> bool:
    """Return whether inputs and output gradients reproduce the layer's gradient.

    They do not if the weight is also used outside the layer's own call, or if a
    subclass computes something else; nor do they give one example's gradient where the
    layer's rows are not the batch's examples (a model that folds time into the batch,
    or puts time first). Then per-example Jacobians take over.
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(logits.shape, generator=generator).to(logits)
    some = (len(logits) + 1) // 2
    probe[some:] = 0  # so the other rows' gradients are exactly zero
    # With a frozen bias, `bias` is a parameter that needs no gradient.
    parameters = [layer.layer.weight]
    if layer.bias is not None and layer.layer.bias is not None:
        parameters.append(layer.layer.bias)
    edges = [tap.output, *(get_gradient_edge(p) for p in parameters)]
    output, *gradients = torch.autograd.grad(
        logits, edges, probe, retain_graph=True, allow_unused=True
    )
    if output is None or any(gradient is None for gradient in gradients):
        return False
    if len(output) != len(logits) or output[some:].any():
        return False
    if not fits(layer.layer, tap.inputs.shape, output.shape):
        return False
    g = output_columns(layer.layer, output)
    seen = torch.einsum("ngot,ngit->goi", g, _input_columns(layer, tap))
    columns = [gradient.reshape(*seen.shape[:2], -1) for gradient in gradients]
    error = torch.linalg.vector_norm(seen - torch.cat(columns, dim=-1))
    return bool(error <= _GRADIENT_TOLERANCE * torch.linalg.vector_norm(seen))
