"""Layers with cheap per-example gradients: norms, embeddings and added biases.

Their parameters have so few entries for each example that each example's gradient is
computed, from the layer's input and its output's gradient. Parameters that all examples
share (such as a class token) are here, too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.curvature.estimate.layers import is_transposed
from flwr_fisher.curvature.sums import Sums

_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (*_BATCH, *_INSTANCE, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class DirectLayer(ABC):
    """A layer with the names of its trained parameters, in the model and in the layer.

    Parameters
    ----------
    layer : nn.Module
        In eval mode.
    names : dict[str, str]
        The names in the model, by the layer's own ``weight`` and ``bias``.
    """

    layer: nn.Module
    names: dict[str, str]

    @staticmethod
    def of(layer: nn.Module, names: dict[str, str]) -> "DirectLayer | None":
        """Return a module as such a layer, or None if it is of no such kind."""
        if isinstance(layer, nn.Embedding):
            return EmbeddingRows(layer, names)
        if is_transposed(layer) and "bias" in names:
            return AddedBias(layer, {"bias": names["bias"]})
        return AffineNorm(layer, names) if isinstance(layer, _NORMS) else None

    def parameters(self) -> list[Tensor]:
        """Return the trained parameters, in the order of `names`."""
        return [self.layer.get_parameter(own) for own in self.names]

    def widened(self, tensor: Tensor) -> Tensor:
        """Return a tensor in at least float32, and in the parameters' dtype."""
        dtype = self.parameters()[0].dtype
        return tensor.to(torch.promote_types(dtype, torch.float32))

    def gradients(self, inputs: Tensor, output: Tensor) -> list[Tensor]:
        """Return the parameters' gradients for a given gradient of the output."""
        return self.reduced(self.prepared(inputs), output, lambda gradient: gradient)

    @abstractmethod
    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether these shapes are those of one plain call of the layer."""

    @abstractmethod
    def entries(self, inputs: Tensor) -> int:
        """Return how many entries an example's gradient takes, for such inputs."""

    @abstractmethod
    def prepared(self, inputs: Tensor) -> Any:
        """Return what :meth:`reduced` needs from the layer's input."""

    @abstractmethod
    def reduced(
        self, prepared: Any, output: Tensor, function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Apply a function to the examples' gradients; return its sum by parameter.

        Parameters
        ----------
        prepared : Any
            What :meth:`prepared` returned for an input ``[n, ...]``.
        output : Tensor
            The gradient of the layer's output, ``[n, ...]``.
        function : Callable[[Tensor], Tensor]
            A function of each entry, 0 at 0.
        """


class AffineNorm(DirectLayer):
    """The weight and bias of a norm that does not mix examples."""

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether the features are in the dimension that the norm expects."""
        shape = self.parameters()[0].shape
        trailing = isinstance(self.layer, nn.LayerNorm | nn.RMSNorm)
        own = inputs[-len(shape) :] if trailing else inputs[1:2]
        return inputs == output and own == shape

    def entries(self, inputs: Tensor) -> int:
        """Return an example's inputs, of which each is normalised."""
        return inputs[:1].numel()

    def prepared(self, inputs: Tensor) -> Tensor:
        """Return the normalised input, which the norm multiplies by the weight."""
        layer, x = self.layer, self.widened(inputs)
        if isinstance(layer, nn.LayerNorm):
            return F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        if isinstance(layer, nn.RMSNorm):
            return F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
        if isinstance(layer, nn.GroupNorm):
            return F.group_norm(x, layer.num_groups, eps=layer.eps)
        assert isinstance(layer, _BATCH + _INSTANCE)
        mean, variance = layer.running_mean, layer.running_var
        mean = None if mean is None else mean.to(x.dtype)
        variance = None if variance is None else variance.to(x.dtype)
        if isinstance(layer, _BATCH):
            return F.batch_norm(x, mean, variance, eps=layer.eps)
        own = not layer.track_running_stats
        return F.instance_norm(x, mean, variance, use_input_stats=own, eps=layer.eps)

    def reduced(
        self, prepared: Tensor, output: Tensor, function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return the sums, each in its parameter's shape."""
        gradient = self.widened(output)
        of = {"weight": lambda: gradient * prepared, "bias": lambda: gradient}
        return [function(self._rows(of[own]())).sum(0) for own in self.names]

    def _rows(self, products: Tensor) -> Tensor:
        """Return each example's sums over positions, ``[n, *shape]``."""
        n = len(products)
        if isinstance(self.layer, nn.LayerNorm | nn.RMSNorm):
            return products.reshape(n, -1, *self.layer.normalized_shape).sum(1)
        return products.reshape(n, products.shape[1], -1).sum(2)


class EmbeddingRows(DirectLayer):
    """An embedding; an example has gradients only for the rows that it looks up."""

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether the output has one row for each index."""
        return output == torch.Size([*inputs, self.parameters()[0].shape[1]])

    def entries(self, inputs: Tensor) -> int:
        """Return an example's number of indices times a row's length."""
        return inputs[:1].numel() * self.parameters()[0].shape[1]

    def prepared(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return each pair of example and row, and the pair of every index."""
        assert isinstance(self.layer, nn.Embedding)
        examples = torch.arange(len(inputs), device=inputs.device)
        number = self.layer.num_embeddings
        keys = inputs.reshape(len(inputs), -1) + number * examples.unsqueeze(1)
        pairs, each = torch.unique(keys, return_inverse=True)
        return pairs % number, each.flatten()

    def reduced(
        self,
        prepared: tuple[Tensor, Tensor],
        output: Tensor,
        function: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """Return the sum, in the weight's shape."""
        layer, (rows, each) = self.layer, prepared
        assert isinstance(layer, nn.Embedding)
        gradient = self.widened(output).reshape(-1, layer.embedding_dim)
        of_pairs = gradient.new_zeros(len(rows), layer.embedding_dim)
        of_pairs.index_add_(0, each, gradient)
        if layer.padding_idx is not None:  # which is not trained
            of_pairs[rows == layer.padding_idx] = 0
        total = gradient.new_zeros(layer.num_embeddings, layer.embedding_dim)
        return [total.index_add_(0, rows, function(of_pairs))]


class AddedBias(DirectLayer):
    """A bias that a linear layer adds to its outputs, for examples or for tokens."""

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether the output has one feature for each entry of the bias."""
        shape = self.parameters()[0].shape
        return inputs[:-1] == output[:-1] and output[-1:] == shape

    def entries(self, inputs: Tensor) -> int:
        """Return the number of an example's outputs."""
        return inputs[:1, ..., 0].numel() * self.parameters()[0].numel()

    def prepared(self, inputs: Tensor) -> None:
        """Return nothing: the output's gradient is enough."""

    def reduced(
        self, prepared: None, output: Tensor, function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return the sum, in the bias's shape."""
        rows = self.widened(output).reshape(len(output), -1, output.shape[-1]).sum(1)
        return [function(rows).sum(0)]


class SquaredGradients:
    """The sum over examples of a layer's squared gradients: its exact diagonal."""

    def __init__(self, layer: DirectLayer) -> None:
        self.layer = layer
        names = layer.names.values()
        self.sums = Sums(dict(zip(names, layer.parameters(), strict=True)))

    def add(self, prepared: Any, output: Tensor) -> None:
        """Add the squares of the gradients of some examples."""
        self.sums.add(self.layer.reduced(prepared, output, torch.square))


@dataclass(frozen=True)
class SharedParameter(DirectLayer):
    """A parameter that all examples share, and the shape of one example's copy.

    Parameters
    ----------
    layer : nn.Module
        The module that has the parameter.
    names : dict[str, str]
        The parameter's one name in the module, with its name in the model.
    shape : torch.Size
        The parameter's shape, except for axes of length 1.
    """

    shape: torch.Size

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        (name,) = self.names.values()
        return name

    def in_model(self, model: nn.Module) -> "SharedParameter":
        """Return the same for another model with the same names."""
        layer = model.get_submodule(self.name.rpartition(".")[0])
        return SharedParameter(layer, self.names, self.shape)

    def copies(self, count: int) -> Tensor:
        """Return a copy for each example, ``[count, *shape]``, as a view."""
        (parameter,) = self.parameters()
        one = parameter.detach().reshape(self.shape)
        return one.expand(count, *self.shape).requires_grad_()

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether there is a copy for each example."""
        return inputs == output == torch.Size([inputs[0], *self.shape])

    def entries(self, inputs: Tensor) -> int:
        """Return the parameter's size."""
        return self.shape.numel()

    def prepared(self, inputs: Tensor) -> None:
        """Return nothing: the copies' gradient is enough."""

    def reduced(
        self, prepared: None, output: Tensor, function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return the sum, in the parameter's shape."""
        (parameter,) = self.parameters()
        return [function(self.widened(output)).sum(0).reshape(parameter.shape)]
