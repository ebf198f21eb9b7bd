"""Which layers' gradients follow from their inputs and output gradients, by trial."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from flwr_fisher.curvature.estimate.direct_layers import DirectLayer
from flwr_fisher.curvature.estimate.tappable import TappableLayer
from flwr_fisher.curvature.estimate.taps import Tap, tapped_forward

# Relative; a wrong formula is off by far more than rounding.
_GRADIENT_TOLERANCE = 1e-3

FEW = 8  # examples of the first batch on which layers are tried


def explained(
    model: nn.Module,
    inputs: Tensor,
    layers: Mapping[str, TappableLayer | DirectLayer],
) -> dict[str, Tap]:
    """Return the call of each layer whose gradients follow from its input and output.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    inputs : Tensor
        A few examples.
    layers : Mapping[str, TappableLayer | DirectLayer]
        The layers to try.
    """
    outputs, taps = tapped_forward(model, inputs, layers)
    calls = {n: each[0] for n, each in taps.items() if len(each) == 1}
    calls = {name: call for name, call in calls.items() if call.output is not None}
    if not calls:
        return {}
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(outputs.shape, generator=generator).to(outputs)
    direction[_half(outputs) :] = 0  # so these rows' gradients are exactly zero
    edges = [call.edge() for call in calls.values()]
    trained = {name: layers[name].parameters() for name in calls}
    edges += [get_gradient_edge(p) for own in trained.values() for p in own]
    gradients = iter(torch.autograd.grad(outputs, edges, direction, allow_unused=True))
    at_outputs = {name: next(gradients) for name in calls}
    found = {}
    for name, call in calls.items():
        own = [next(gradients) for _ in trained[name]]
        if _explains(layers[name], call, at_outputs[name], own, outputs):
            found[name] = call
    return found


def _explains(
    layer: TappableLayer | DirectLayer,
    call: Tap,
    output: Tensor | None,
    gradients: Sequence[Tensor | None],
    outputs: Tensor,
) -> bool:
    """Return whether inputs and output gradients reproduce the layer's gradients.

    They do not if the weight is also used outside the layer's own call, or if a
    subclass computes something else; nor do they give one example's gradient where the
    layer's rows are not the batch's examples (a model that folds time into the batch,
    or puts time first). Then per-example gradients take over.
    """
    known = [g for g in gradients if g is not None and not g.is_sparse]
    if output is None or len(known) < len(gradients):
        return False
    own = len(output) == len(outputs) and not output[_half(outputs) :].any()
    if not (own and layer.fits(call.inputs.shape, output.shape)):
        return False
    found = _flat(layer.gradients(call.inputs, output))
    # The model's own gradients may be in half precision.
    tolerance = max(_GRADIENT_TOLERANCE, 4 * torch.finfo(output.dtype).eps)
    error = torch.linalg.vector_norm(found - _flat(known))
    return bool(error <= tolerance * torch.linalg.vector_norm(found))


def _half(outputs: Tensor) -> int:
    return (len(outputs) + 1) // 2


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
