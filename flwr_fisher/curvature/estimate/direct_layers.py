"""Parameters whose gradients by example cost next to nothing.

A norm's weight and bias, an embedding's rows, and what all examples share have so few
entries an example that their gradients are taken one by one, from the layer's input and
its output's gradient.
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
    """A layer, and the model's names of its trained parameters by its own.

    Parameters
    ----------
    layer : nn.Module
        In eval mode.
    names : dict[str, str]
        Of its own ``weight`` and ``bias``.
    """

    layer: nn.Module
    names: dict[str, str]

    @staticmethod
    def of(layer: nn.Module, names: dict[str, str]) -> "DirectLayer | None":
        """Return a layer as one of these, or None if it is no such layer."""
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
        """Return the parameters' gradients, given that of the output."""
        return self.reduced(self.prepared(inputs), output, lambda gradient: gradient)

    @abstractmethod
    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether these are the shapes of one plain call."""

    @abstractmethod
    def entries(self, inputs: Tensor) -> int:
        """Return how many entries an example's output has, for such inputs."""

    @abstractmethod
    def prepared(self, inputs: Tensor) -> Any:
        """Return what :meth:`reduced` needs of the layer's input."""

    @abstractmethod
    def reduced(
        self, prepared: Any, output: Tensor, function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return each parameter's sum of a function of the examples' gradients.

        Parameters
        ----------
        prepared : Any
            What :meth:`prepared` returned of ``[n, ...]``.
        output : Tensor
            The gradient of the layer's output, ``[n, ...]``.
        function : Callable[[Tensor], Tensor]
            Of each entry, 0 at 0.
        """


class AffineNorm(DirectLayer):
    """A norm's weight and bias; it normalises by running or an example's statistics."""

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether the features are where the norm has them."""
        shape = self.parameters()[0].shape
        trailing = isinstance(self.layer, nn.LayerNorm | nn.RMSNorm)
        own = inputs[-len(shape) :] if trailing else inputs[1:2]
        return inputs == output and own == shape

    def entries(self, inputs: Tensor) -> int:
        """Return an example's inputs, of which each is normalised."""
        return inputs[:1].numel()

    def prepared(self, inputs: Tensor) -> Tensor:
        """Return what is multiplied with the weight."""
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
        """Return the sums, each of a tensor like the parameter."""
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
    """An embedding's rows; an example has a gradient for those that it looks up."""

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether each input has a row."""
        return output == torch.Size([*inputs, self.parameters()[0].shape[1]])

    def entries(self, inputs: Tensor) -> int:
        """Return an example's inputs, of which each has a row, times its length."""
        return inputs[:1].numel() * self.parameters()[0].shape[1]

    def prepared(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of every pair of example and row, and each input's pair."""
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
        """Return the sum, of a tensor like the weight."""
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
    """A bias that is added to a linear layer's outputs, of examples or of tokens."""

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether there is an output for each entry of the bias."""
        shape = self.parameters()[0].shape
        return inputs[:-1] == output[:-1] and output[-1:] == shape

    def entries(self, inputs: Tensor) -> int:
        """Return an example's outputs."""
        return inputs[:1, ..., 0].numel() * self.parameters()[0].numel()

    def prepared(self, inputs: Tensor) -> None:
        """Return nothing: the gradient of the output is all that it takes."""

    def reduced(
        self, prepared: None, output: Tensor, function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return the sum, of a tensor like the bias."""
        rows = self.widened(output).reshape(len(output), -1, output.shape[-1]).sum(1)
        return [function(rows).sum(0)]


class SquaredGradients:
    """The exact diagonal of a layer, summed over examples."""

    def __init__(self, layer: DirectLayer) -> None:
        self.layer = layer
        names = layer.names.values()
        self.sums = Sums(dict(zip(names, layer.parameters(), strict=True)))

    def add(self, prepared: Any, output: Tensor) -> None:
        """Add the squares of the gradients of some examples."""
        self.sums.add(self.layer.reduced(prepared, output, torch.square))


@dataclass(frozen=True)
class SharedParameter(DirectLayer):
    """One parameter, and the shape of an example's copy of it.

    Parameters
    ----------
    layer : nn.Module
        Whose own parameter it is.
    names : dict[str, str]
        Its one name there, and in the model.
    shape : torch.Size
        The parameter's, but for axes of length 1.
    """

    shape: torch.Size

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        (name,) = self.names.values()
        return name

    def in_model(self, model: nn.Module) -> "SharedParameter":
        """Return the same of another model of the same names."""
        layer = model.get_submodule(self.name.rpartition(".")[0])
        return SharedParameter(layer, self.names, self.shape)

    def copies(self, count: int) -> Tensor:
        """Return one an example, ``[count, *shape]``, in no memory of their own."""
        (parameter,) = self.parameters()
        one = parameter.detach().reshape(self.shape)
        return one.expand(count, *self.shape).requires_grad_()

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether there is a copy an example."""
        return inputs == output == torch.Size([inputs[0], *self.shape])

    def entries(self, inputs: Tensor) -> int:
        """Return the parameter's size."""
        return self.shape.numel()

    def prepared(self, inputs: Tensor) -> None:
        """Return nothing: the gradient of a copy is all that it takes."""

    def reduced(
        self, prepared: None, output: Tensor, function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return the sum, of a tensor like the parameter."""
        (parameter,) = self.parameters()
        return [function(self.widened(output)).sum(0).reshape(parameter.shape)]
