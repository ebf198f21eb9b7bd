"""Which layers' gradients their inputs and output gradients explain, by trying."""

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_fisher.curvature.layers import fits
from flwr_fisher.curvature.taps import (
    Tap,
    TappableLayer,
    tappable_layers,
    tapped_forward,
)
from flwr_fisher.errors import StructureError

__all__ = ["explained_layers"]

# Relative; a wrong formula is off by far more than rounding.
_GRADIENT_TOLERANCE = 1e-3


def explained_layers(
    model: nn.Module, inputs: Tensor
) -> tuple[dict[str, TappableLayer], dict[str, Tap]]:
    """Return the layers to tap, with a call of each, from a few inputs.

    Raises
    ------
    StructureError
        If an example's output depends on the other examples of its batch.
    """
    _check_examples_are_independent(model)
    layers = tappable_layers(model)
    outputs, taps = tapped_forward(model, inputs, layers)
    found = {
        name: layer
        for name, layer in layers.items()
        if len(taps[name]) == 1 and _explains(layer, taps[name][0], outputs)
    }
    return found, {name: taps[name][0] for name in found}


def _check_examples_are_independent(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise StructureError(
                f"layer '{name}' normalises by the batch's own statistics, so an "
                "example has no Fisher of its own: use track_running_stats=True, or "
                "group norm"
            )


def _explains(layer: TappableLayer, tap: Tap, outputs: Tensor) -> bool:
    """Return whether inputs and output gradients reproduce the layer's gradient.

    They do not if the weight is also used outside the layer's own call, or if a
    subclass computes something else; nor do they give one example's gradient where the
    layer's rows are not the batch's examples (a model that folds time into the batch,
    or puts time first). Then per-example gradients take over.
    """
    if tap.output is None:
        return False
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(outputs.shape, generator=generator).to(outputs)
    some = (len(outputs) + 1) // 2
    probe[some:] = 0  # so the other rows' gradients are exactly zero
    # With a frozen bias, `bias` is a parameter that needs no gradient.
    parameters = [layer.layer.weight]
    if layer.bias is not None and layer.layer.bias is not None:
        parameters.append(layer.layer.bias)
    edges = [tap.output, *(get_gradient_edge(p) for p in parameters)]
    output, *gradients = torch.autograd.grad(
        outputs, edges, probe, retain_graph=True, allow_unused=True
    )
    if output is None or any(gradient is None for gradient in gradients):
        return False
    if len(output) != len(outputs) or output[some:].any():
        return False
    if not fits(layer.layer, tap.inputs.shape, output.shape):
        return False
    g, a = layer.output_columns(output), layer.input_columns(tap.inputs)
    seen = torch.einsum("ngot,ngit->goi", g, a)
    columns = [gradient.reshape(*seen.shape[:2], -1) for gradient in gradients]
    error = torch.linalg.vector_norm(seen - torch.cat(columns, dim=-1))
    return bool(error <= _GRADIENT_TOLERANCE * torch.linalg.vector_norm(seen))
