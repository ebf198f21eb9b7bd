"""Recording the calls of layers during one forward pass: inputs and outputs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.backends import cudnn
from torch.func import functional_call

from flwr_fisher.curvature.estimate.attention import layer_by_layer
from flwr_fisher.curvature.estimate.direct_layers import DirectLayer
from flwr_fisher.curvature.estimate.shared import SharedParameter
from flwr_fisher.curvature.estimate.tappable import PackedProjection, TappableLayer
from flwr_fisher.errors import StructureError


@dataclass(frozen=True)
class Tap:
    """One call of one layer: its input, and where its output sits in the graph."""

    inputs: Tensor
    # An edge, not the tensor: it stays right when a later ReLU works in place. There is
    # none without gradients.
    output: GradientEdge | None

    def edge(self) -> GradientEdge:
        """Return where the layer's output sits in the graph."""
        assert self.output is not None
        return self.output


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, gradients on; leave it exactly as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.enable_grad(), recurrent_backwards(model):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def recurrent_backwards(model: nn.Module) -> Iterator[None]:
    """Keep recurrent layers from cuDNN, which takes them back in train mode alone."""
    before = cudnn.enabled
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = before


def tapped_forward(
    model: nn.Module,
    inputs: Tensor,
    layers: Mapping[str, TappableLayer | DirectLayer],
) -> tuple[Tensor, dict[str, list[Tap]]]:
    """Run the model once; return its output and every call of the given layers.

    Parameters
    ----------
    model : nn.Module
        The model.
    inputs : Tensor
        A batch.
    layers : Mapping[str, TappableLayer | DirectLayer]
        The layers to record, from :func:`tappable_layers` and :func:`direct_layers`.
    """
    taps: dict[str, list[Tap]] = {name: [] for name in layers}

    def record(name: str, inputs: Tensor, output: Tensor) -> None:
        if name in taps:
            edge = get_gradient_edge(output) if output.requires_grad else None
            taps[name].append(Tap(inputs.detach(), edge))

    def hear(name: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # Without an input by position there is nothing to record.
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            record(name, args[0], output)

    copies: dict[str, Tensor] = {}
    handles = []
    for name, layer in layers.items():
        if isinstance(layer, SharedParameter):
            copies[layer.name] = copy = layer.copies(len(inputs))
            taps[name].append(Tap(copy, get_gradient_edge(copy)))
        elif not isinstance(layer, PackedProjection):  # which tell by themselves
            hook = layer.layer.register_forward_hook(partial(hear, name))
            handles.append(hook)
    try:
        with layer_by_layer(model, record):
            return functional_call(model, copies, (inputs,)), taps
    finally:
        for handle in handles:
            handle.remove()


def single_calls(taps: Mapping[str, list[Tap]], num_examples: int) -> dict[str, Tap]:
    """Return each layer's only call in a batch.

    Raises
    ------
    StructureError
        Naming a layer that was called several times, or not with a row an example.
    """
    for name, calls in taps.items():
        if len(calls) != 1:
            raise StructureError(
                f"layer '{name}' was called {len(calls)} times in one batch and "
                "once in the first; its calls must not depend on the data"
            )
        if (rows := calls[0].inputs.shape[0]) != num_examples:
            raise StructureError(
                f"layer '{name}' was called with {rows} rows for a batch of "
                f"{num_examples}, and with one row an example in the first batch"
            )
    return {name: calls[0] for name, calls in taps.items()}
