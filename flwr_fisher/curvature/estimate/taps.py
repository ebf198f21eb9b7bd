"""A record of the layers' calls in one forward pass.

A tap holds what a layer was given, and the place in autograd's graph where its output
is. With both, one backward pass that stops at these places is enough for every layer's
per-example gradients: gradients of weights are never formed for a whole batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.estimate.layers import KroneckerLayer, Layer
from flwr_fisher.errors import StructureError


@dataclass(frozen=True)
class Tap:
    """One call of one layer: its input, and the shape and graph edge of its output."""

    inputs: Tensor
    shape: torch.Size
    # An edge, not the tensor: it stays right when a later ReLU works in place. There is
    # none without gradients.
    output: GradientEdge | None

    def edge(self) -> GradientEdge:
        """Return the graph edge of the layer's output."""
        assert self.output is not None
        return self.output


def tapped_forward(
    model: nn.Module,
    inputs: Inputs,
    layers: Mapping[str, KroneckerLayer] | Mapping[str, Layer],
) -> tuple[Tensor, dict[str, list[Tap]]]:
    """Run the model once; return its outputs and every call of the given layers.

    Parameters
    ----------
    model : nn.Module
        The model.
    inputs : Inputs
        A batch.
    layers : Mapping[str, Layer]
        The layers to record, by names of any kind.
    """
    taps: dict[str, list[Tap]] = {name: [] for name in layers}

    def on_call(name: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # A call by keyword, or with another output than a tensor, is not one that a
        # layer's form describes. Without a tap the layer has no form.
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            edge = get_gradient_edge(output) if output.requires_grad else None
            taps[name].append(Tap(args[0].detach(), output.shape, edge))

    # These hooks are the last ones, so they see what the user's hooks return.
    handles = [
        layer.layer.register_forward_hook(partial(on_call, name))
        for name, layer in layers.items()
    ]
    try:
        return inputs(model), taps
    finally:
        for handle in handles:
            handle.remove()


def tapped_once(
    model: nn.Module,
    inputs: Inputs,
    layers: Mapping[str, KroneckerLayer] | Mapping[str, Layer],
) -> tuple[Tensor, dict[str, Tap]]:
    """Run the model; return its outputs, and the one call of each layer.

    Raises
    ------
    StructureError
        If a layer was called several times, or not with one row for each example, as it
        was in the first batch.
    """
    outputs, taps = tapped_forward(model, inputs, layers)
    for name, calls in taps.items():
        rows = [len(call.inputs) for call in calls]
        if rows != [len(inputs)]:
            raise StructureError(
                f"layer '{name}' was called once in the first batch, with a row for "
                f"each example, and in another with {rows} rows for {len(inputs)} "
                "examples, as in a mixture of experts: shuffle the loader, so that the "
                "first batch shows it"
            )
    return outputs, {name: calls[0] for name, calls in taps.items()}
