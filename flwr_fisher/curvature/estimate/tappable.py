"""Which layers' gradients follow from their inputs and output gradients, and how."""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.estimate.direct_layers import DirectLayer
from flwr_fisher.curvature.estimate.layers import (
    KRONECKER_LAYERS,
    Grid,
    KroneckerLayer,
    fits,
    input_columns,
    output_columns,
    positions,
    token_columns,
)
from flwr_fisher.curvature.operators.layer import from_matrices, to_matrices


@dataclass(frozen=True)
class TappableLayer(ABC):
    """A layer with a Kronecker form, and the names of its trained parameters."""

    layer: nn.Module
    weight: str
    bias: str | None

    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """Return the trained parameters, weight first."""

    @property
    @abstractmethod
    def groups(self) -> int:
        """How many parts of the outputs have factors of their own."""

    @abstractmethod
    def input_columns(self, inputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the layer's input as columns, with ones for a trained bias."""

    @abstractmethod
    def output_columns(self, outputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the layer's output, or its gradient, as columns."""

    @abstractmethod
    def positions(self, inputs: torch.Size) -> list[int]:
        """Return how many positions there are along each axis, for such inputs."""

    @abstractmethod
    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether these are the shapes of one plain call."""

    @property
    def kernel(self) -> Tensor:
        """The weight."""
        return self.parameters()[0].detach()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of columns and of sums of their products: at least float32."""
        return torch.promote_types(self.kernel.dtype, torch.float32)

    def gradients(self, inputs: Tensor, output: Tensor) -> list[Tensor]:
        """Return the parameters' gradients, given that of the output."""
        g, a = self.output_columns(output), self.input_columns(inputs)
        product = torch.einsum("ngot,ngit->goi", g, a)
        return list(self.as_params(product).values())

    def matrices(self) -> Tensor:
        """Return the weight as ``[groups, out / groups, in (+ 1)]``, the bias last."""
        weight, *bias = self.parameters()
        return to_matrices(weight, bias[0] if bias else None, self.groups).detach()

    def as_params(self, matrices: Tensor) -> dict[str, Tensor]:
        """Cut what :meth:`matrices` returns back into weight and bias."""
        return from_matrices(matrices, self.weight, self.kernel.shape, self.bias)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the weight and the bias."""
        return {k: v.shape for k, v in self.as_params(self.matrices()).items()}


@dataclass(frozen=True)
class PlainLayer(TappableLayer):
    """A linear or a convolution layer."""

    layer: KroneckerLayer

    @classmethod
    def within(cls, name: str, layer: KroneckerLayer, *, bias: bool) -> "PlainLayer":
        """Return a model's layer by its name, with or without a trained bias."""
        prefix = f"{name}." if name else ""
        return cls(layer, f"{prefix}weight", f"{prefix}bias" if bias else None)

    @property
    def groups(self) -> int:
        """A convolution's groups."""
        return int(getattr(self.layer, "groups", 1))

    def parameters(self) -> list[Tensor]:
        """Return the trained parameters, weight first."""
        bias = self.layer.bias if self.bias is not None else None
        return [self.layer.weight] if bias is None else [self.layer.weight, bias]

    def input_columns(self, inputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the layer's input as columns."""
        bias = self.bias is not None
        return input_columns(self.layer, inputs.to(self.dtype), bias=bias, grid=grid)

    def output_columns(self, outputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the layer's output as columns."""
        return output_columns(self.layer, outputs.to(self.dtype), grid=grid)

    def positions(self, inputs: torch.Size) -> list[int]:
        """Return how many positions there are along each axis."""
        return positions(self.layer, inputs)

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether these are the shapes of one plain call."""
        return fits(self.layer, inputs, output)


@dataclass(frozen=True)
class PackedProjection(TappableLayer):
    """The queries', keys' and values' projection of self-attention, packed in one."""

    layer: nn.MultiheadAttention

    @property
    def groups(self) -> int:
        """Queries, keys and values."""
        return 3

    def parameters(self) -> list[Tensor]:
        """Return the trained parameters, weight first."""
        bias = [] if self.bias is None else [self.layer.in_proj_bias]
        return [self.layer.in_proj_weight, *bias]

    def input_columns(self, inputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the tokens as columns, the same for all three."""
        tokens = inputs if grid is None else inputs[:, *grid]
        columns = token_columns(tokens.to(self.dtype), bias=self.bias is not None)
        return columns.expand(-1, 3, -1, -1)

    def output_columns(self, outputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return queries, keys and values as columns."""
        tokens = outputs if grid is None else outputs[:, *grid]
        columns = token_columns(tokens.to(self.dtype))  # [n, 1, 3 E, T]
        return columns.view(len(columns), 3, -1, columns.shape[-1])

    def positions(self, inputs: torch.Size) -> list[int]:
        """Return how many tokens there are."""
        return [inputs[1]]

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether these are examples' tokens, and three outputs for each."""
        return len(inputs) == 3 and output == torch.Size([*inputs[:2], 3 * inputs[2]])


def is_packed(module: nn.Module) -> bool:
    """Return whether a module is attention with one parameter for its projections."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
    )


def kronecker_layers(model: nn.Module) -> dict[str, TappableLayer]:
    """Return the layers that may have a Kronecker form, by their modules' names."""
    return {**tappable_layers(model), **packed_projections(model)}


def tappable_layers(model: nn.Module) -> dict[str, PlainLayer]:
    """Return linear and convolution layers whose weight is trained and theirs alone."""
    layers = {}
    for name, (module, trained) in _sole_owners(model).items():
        plain = "weight" in trained and trained <= {"weight", "bias"}
        if plain and isinstance(module, KRONECKER_LAYERS):
            layers[name] = PlainLayer.within(name, module, bias="bias" in trained)
    return layers


def packed_projections(model: nn.Module) -> dict[str, PackedProjection]:
    """Return attention's packed projections that are trained, by its modules' names."""
    layers = {}
    for name, (module, trained) in _sole_owners(model).items():
        if is_packed(module) and "in_proj_weight" in trained:
            assert isinstance(module, nn.MultiheadAttention)
            bias = f"{name}.in_proj_bias" if "in_proj_bias" in trained else None
            layers[name] = PackedProjection(module, f"{name}.in_proj_weight", bias)
    return layers


def direct_layers(model: nn.Module) -> dict[str, DirectLayer]:
    """Return norms and embeddings whose parameters are used in one place only."""
    layers = {}
    for name, (module, trained) in _sole_owners(model).items():
        prefix = f"{name}." if name else ""
        names = {own: f"{prefix}{own}" for own in sorted(trained, reverse=True)}
        layer = DirectLayer.of(module, names) if names else None
        if layer is not None:
            layers[name] = layer
    return layers


def _sole_owners(model: nn.Module) -> dict[str, tuple[nn.Module, set[str]]]:
    """Return modules whose own parameters are no other's, and which are trained."""
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    found = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if all(owners[id(parameter)] == 1 for parameter in own.values()):
            found[name] = (module, {k for k, p in own.items() if p.requires_grad})
    return found
