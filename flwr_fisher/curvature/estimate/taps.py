"""Recording the calls of layers during one forward pass: inputs and outputs."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flwr_fisher.curvature.estimate.direct_layers import DirectLayer
from flwr_fisher.curvature.estimate.layers import (
    KRONECKER_LAYERS,
    KroneckerLayer,
    fits,
    input_columns,
    output_columns,
    positions,
)
from flwr_fisher.curvature.estimate.positions import Grid
from flwr_fisher.curvature.operators.matrices import from_matrices, to_matrices
from flwr_fisher.errors import StructureError


@dataclass(frozen=True)
class TappableLayer:
    """A layer with a Kronecker form, and the names of its trained parameters."""

    layer: KroneckerLayer
    weight: str
    bias: str | None

    @classmethod
    def within(cls, name: str, layer: KroneckerLayer, *, bias: bool) -> "TappableLayer":
        """Return a model's layer by its name, with or without a trained bias."""
        prefix = f"{name}." if name else ""
        return cls(layer, f"{prefix}weight", f"{prefix}bias" if bias else None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of columns and of sums of their products: at least float32."""
        return torch.promote_types(self.layer.weight.dtype, torch.float32)

    def input_columns(self, inputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the layer's input as columns, with ones for a trained bias."""
        bias = self.bias is not None
        return input_columns(self.layer, inputs.to(self.dtype), bias=bias, grid=grid)

    def output_columns(self, outputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the layer's output, or its gradient, as columns."""
        return output_columns(self.layer, outputs.to(self.dtype), grid=grid)

    def positions(self, inputs: torch.Size) -> list[int]:
        """Return how many positions there are along each axis, for such inputs."""
        return positions(self.layer, inputs)

    def parameters(self) -> list[Tensor]:
        """Return the trained parameters, weight first."""
        bias = self.layer.bias if self.bias is not None else None
        return [self.layer.weight] if bias is None else [self.layer.weight, bias]

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether these are the shapes of one plain call."""
        return fits(self.layer, inputs, output)

    def gradients(self, inputs: Tensor, output: Tensor) -> list[Tensor]:
        """Return the parameters' gradients, given that of the output."""
        g, a = self.output_columns(output), self.input_columns(inputs)
        product = torch.einsum("ngot,ngit->goi", g, a)
        return list(self.as_params(product).values())

    def matrices(self) -> Tensor:
        """Return the weight as ``[groups, out / groups, in (+ 1)]``, the bias last."""
        layer, groups = self.layer, getattr(self.layer, "groups", 1)
        bias = layer.bias if self.bias is not None else None
        return to_matrices(layer.weight, bias, groups).detach()

    def as_params(self, matrices: Tensor) -> dict[str, Tensor]:
        """Cut what :meth:`matrices` returns back into weight and bias."""
        shape = self.layer.weight.shape
        return from_matrices(matrices, self.weight, shape, self.bias)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the weight and the bias."""
        return {k: v.shape for k, v in self.as_params(self.matrices()).items()}


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
        with torch.enable_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def tappable_layers(model: nn.Module) -> dict[str, TappableLayer]:
    """Return the layers whose weight is a trained parameter used in one place only."""
    layers = {}
    for name, (module, trained) in _sole_owners(model).items():
        if isinstance(module, KRONECKER_LAYERS) and "weight" in trained:
            layers[name] = TappableLayer.within(name, module, bias="bias" in trained)
    return layers


def direct_layers(model: nn.Module) -> dict[str, DirectLayer]:
    """Return norms and embeddings whose parameters are used in one place only."""
    layers = {}
    for name, (module, trained) in _sole_owners(model).items():
        layer = DirectLayer.of(module, trained)
        if layer is not None:
            layers[name] = layer
    return layers


def _sole_owners(model: nn.Module) -> dict[str, tuple[nn.Module, dict[str, str]]]:
    """Return modules with nothing but a weight and a bias that are no other module's.

    Beside each are the names of those that are trained: the module's and the model's.
    """
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    found = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if any(owners[id(parameter)] > 1 for parameter in own.values()):
            continue
        prefix = f"{name}." if name else ""
        trained = {k: f"{prefix}{k}" for k, p in own.items() if p.requires_grad}
        if trained and trained.keys() <= {"weight", "bias"}:
            found[name] = (module, trained)
    return found


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

    def record(name: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # Without an input by position there is nothing to record.
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            edge = get_gradient_edge(output) if output.requires_grad else None
            taps[name].append(Tap(args[0].detach(), edge))

    handles = [
        layer.layer.register_forward_hook(partial(record, name))
        for name, layer in layers.items()
    ]
    try:
        return model(inputs), taps
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
