"""Which layers' gradients follow from their inputs and output gradients, by trial."""

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from flwr_fisher.curvature.estimate.layers import fits
from flwr_fisher.curvature.estimate.taps import (
    Tap,
    TappableLayer,
    tappable_layers,
    tapped_forward,
)

# Relative; a wrong formula is off by far more than rounding.
_GRADIENT_TOLERANCE = 1e-3

FEW = 16  # examples of the first batch on which layers are tried


def explained_layers(
    model: nn.Module, inputs: Tensor
) -> tuple[dict[str, TappableLayer], dict[str, Tap]]:
    """Return the layers whose gradients follow from one call's input and output.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    inputs : Tensor
        A few examples.

    Returns
    -------
    layers : dict[str, TappableLayer]
        Those layers by name.
    taps : dict[str, Tap]
        The call of each.
    """
    layers = tappable_layers(model)
    outputs, taps = tapped_forward(model, inputs, layers)
    explained = {
        name: layer
        for name, layer in layers.items()
        if len(taps[name]) == 1 and _explains(layer, taps[name][0], outputs)
    }
    return explained, {name: taps[name][0] for name in explained}


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
    direction = torch.randn(outputs.shape, generator=generator).to(outputs)
    half = (len(outputs) + 1) // 2
    direction[half:] = 0  # so the other rows' gradients are exactly zero
    # With a frozen bias, `bias` is a parameter that needs no gradient.
    parameters = [layer.layer.weight]
    if layer.bias is not None and layer.layer.bias is not None:
        parameters.append(layer.layer.bias)
    edges = [tap.output, *(get_gradient_edge(p) for p in parameters)]
    output, *gradients = torch.autograd.grad(
        outputs, edges, direction, retain_graph=True, allow_unused=True
    )
    if output is None or any(gradient is None for gradient in gradients):
        return False
    own = len(output) == len(outputs) and not output[half:].any()
    if not (own and fits(layer.layer, tap.inputs.shape, output.shape)):
        return False
    g, a = layer.output_columns(output), layer.input_columns(tap.inputs)
    product = torch.einsum("ngot,ngit->goi", g, a)
    columns = [gradient.reshape(*product.shape[:2], -1) for gradient in gradients]
    # The model's own gradients may be in half precision.
    tolerance = max(_GRADIENT_TOLERANCE, 4 * torch.finfo(output.dtype).eps)
    error = torch.linalg.vector_norm(product - torch.cat(columns, dim=-1))
    return bool(error <= tolerance * torch.linalg.vector_norm(product))
