r"""The layers whose per-example gradients follow from one call of the layer.

The type of a layer decides its form. Each form computes an example's gradient from the
layer's input :math:`a` and the gradient :math:`g` of its output:

- A :class:`KroneckerLayer` computes, at each of T output positions (T = 1 for a plain
  linear layer), an output column :math:`W a_t` from an input column :math:`a_t`. With a
  batch's columns as ``[n, groups, size, T]`` an example's gradient is
  :math:`\sum_t g_t a_t^\top`, and K-FAC's factors are second moments of the columns.
- A :class:`DirectLayer`, a norm or an embedding, has so few gradient entries that each
  example's gradient is computed as it is.

A type is no proof. :mod:`flwr_fisher.curvature.estimate.forms` checks each layer on a
batch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import grad

from flwr_fisher.curvature.operators.kronecker import from_matrices
from flwr_fisher.params import Sums, curvature_dtype
from flwr_fisher.randomness import random_stream

_FEW = 8  # channels of a group up to which a convolution is faster than columns
# With so few positions, and more offsets in the kernel, it is faster offset by offset.
_FEW_POSITIONS, _MANY_OFFSETS = 64, 9
_GRADIENT_OF_WEIGHT: list[Callable[..., Tensor]] = [
    grad.conv1d_weight,
    grad.conv2d_weight,
    grad.conv3d_weight,
]
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FEATURE_NORMS = (nn.LayerNorm, nn.RMSNorm)  # over the last dimensions

Grid = tuple[slice, ...]  # along each axis of positions


class Positions:
    """Draws positions of a layer, each with the same probability.

    They lie on a grid with a random origin, so that no two are next to each other: the
    inputs of a convolution's neighbouring positions are nearly the same.

    Parameters
    ----------
    most : int, optional
        About how many positions of an example count in the inputs' factor; by default
        all. In the gradients' factor it is twice as many, because gradients vary more
        from one position to the next.
    seed : int
        The seed of the origins.
    """

    def __init__(self, most: int | None, seed: int) -> None:
        self.most, self._draw = most, random_stream(seed, "positions")

    def of_inputs(self, sizes: Sequence[int]) -> tuple[Grid, int]:
        """Return a grid of positions, and how many positions each point stands for.

        `sizes` are the numbers of positions along each axis.
        """
        return self._grid(sizes, self.most)

    def of_gradients(self, sizes: Sequence[int]) -> tuple[Grid, int]:
        """Return the same for the gradients of the outputs."""
        return self._grid(sizes, None if self.most is None else 2 * self.most)

    def most_of_gradients(self, sizes: Sequence[int]) -> int:
        """Return how many positions the grid of gradients has, at most."""
        every = math.prod(sizes)
        return every if self.most is None else min(every, 2 * self.most)

    def _grid(self, sizes: Sequence[int], most: int | None) -> tuple[Grid, int]:
        if most is None:
            return (slice(None),) * len(sizes), 1
        steps = grid_steps(sizes, most)
        origins = [int(self._draw.integers(step)) for step in steps]
        slices = (slice(o, None, step) for o, step in zip(origins, steps, strict=True))
        return tuple(slices), math.prod(steps)


def grid_steps(sizes: Sequence[int], most: int) -> list[int]:
    """Return the smallest steps that leave at most `most` points, about square."""
    steps = [1] * len(sizes)

    def points(axis: int) -> int:
        return -(-sizes[axis] // steps[axis])

    while math.prod(map(points, range(len(sizes)))) > most:
        steps[max(range(len(sizes)), key=points)] += 1
    return steps


@dataclass(frozen=True)
class Layer(ABC):
    """A layer with a form, and its trained parameters' names in the model.

    Parameters
    ----------
    layer : nn.Module
        In eval mode.
    weight, bias : str | None
        The names in the model; None where it has no such trained parameter.
    """

    layer: nn.Module
    weight: str | None
    bias: str | None

    @property
    def names(self) -> list[str]:
        """The trained parameters' names in the model, weight first."""
        return [name for name in (self.weight, self.bias) if name is not None]

    def parameters(self) -> list[Tensor]:
        """Return the trained parameters, in the order of `names`."""
        named = (("weight", self.weight), ("bias", self.bias))
        return [getattr(self.layer, k) for k, name in named if name is not None]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of columns and of sums: the parameters', but at least float32."""
        return torch.promote_types(self.parameters()[0].dtype, torch.float32)

    @abstractmethod
    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether these shapes are those of a call of the layer."""

    @abstractmethod
    def gradients(self, inputs: Tensor, output: Tensor) -> list[Tensor]:
        """Return the parameters' gradients for a given gradient of the output."""


class KroneckerLayer(Layer):
    """A layer with a Kronecker form."""

    weight: str

    @abstractmethod
    def input_columns(self, inputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the columns that the layer multiplies by its weight.

        Parameters
        ----------
        inputs : Tensor
            Its input: ``[n, ..., in]``, or ``[n, in, *spatial]`` for a convolution.
        grid : tuple[slice, ...], optional
            The positions to take, along each axis of :meth:`positions`.

        Returns
        -------
        Tensor
            ``[n, groups, in / groups * kernel (+ 1), T]``, ending with ones for a
            trained bias, either with all examples' positions next to each other in
            memory, which suits their second moment, or a view.
        """

    @abstractmethod
    def output_columns(self, outputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return an output, or its gradient, as ``[n, groups, out / groups, T]``."""

    @abstractmethod
    def positions(self, inputs: torch.Size) -> list[int]:
        """Return how many output positions there are along each axis, for such inputs.

        A linear layer has one axis, whatever axes are between examples and features.
        """

    @property
    def groups(self) -> int:
        """The number of groups of outputs; each group has its own factors."""
        return 1

    @property
    def kernel(self) -> Tensor:
        """The weight."""
        return self.parameters()[0].detach()

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of :meth:`matrices`."""
        kernel, groups = self.kernel, self.groups
        inputs = kernel[0].numel() + (self.bias is not None)
        return groups, len(kernel) // groups, inputs

    def num_column_entries(self, inputs: torch.Size, grid: Grid | None = None) -> int:
        """Return the entries of one example's input columns, for such inputs."""
        groups, _, size = self.shape
        sizes = self.positions(inputs)
        cuts = grid or (slice(None),) * len(sizes)
        points = [len(range(n)[cut]) for n, cut in zip(sizes, cuts, strict=True)]
        return groups * size * math.prod(points)

    def gradients(self, inputs: Tensor, output: Tensor) -> list[Tensor]:
        """Return the parameters' gradients for a given gradient of the output."""
        g, a = self.output_columns(output), self.input_columns(inputs)
        return list(self.as_params(torch.einsum("ngot,ngit->goi", g, a)).values())

    def as_params(self, matrices: Tensor) -> dict[str, Tensor]:
        """Return the weight and bias of such matrices: the inverse of `matrices`."""
        return from_matrices(matrices, self.weight, self.kernel.shape, self.bias)


class LinearLayer(KroneckerLayer):
    """A linear layer, applied to examples or to their tokens."""

    def input_columns(self, inputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the tokens as columns."""
        return self._columns(inputs, grid, bias=self.bias is not None)

    def output_columns(self, outputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the outputs as columns."""
        return self._columns(outputs, grid, bias=False)

    def _columns(self, values: Tensor, grid: Grid | None, *, bias: bool) -> Tensor:
        """Return ``[n, ..., size]`` as ``[n, 1, size (+ 1), T]``, features in a row.

        So all examples' columns are side by side in memory, and need no copy for it.
        """
        tokens = values.reshape(len(values), -1, values.shape[-1]).to(self.dtype)
        if grid is not None:
            tokens = tokens[:, *grid]
        if bias:
            tokens = torch.cat([tokens, torch.ones_like(tokens[..., :1])], -1)
        return tokens.contiguous().mT.unsqueeze(1)

    def positions(self, inputs: torch.Size) -> list[int]:
        """Return how many tokens there are."""
        return [inputs[1:-1].numel()]

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether features are last, and each row of inputs has outputs."""
        rows, columns = self.kernel.shape
        features_last = len(inputs) > 1 and inputs[-1] == columns
        return features_last and output == torch.Size([*inputs[:-1], rows])


class ConvolutionLayer(KroneckerLayer):
    """A convolution; its input columns are the patches."""

    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d

    @property
    def groups(self) -> int:
        """The convolution's groups."""
        return self.layer.groups

    @property
    def is_grouped(self) -> bool:
        """Whether the convolution has several groups, each with few inputs."""
        return self.groups > 1 and self.kernel.shape[1] <= _FEW

    def input_columns(self, inputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the patches as columns."""
        windows = self._windows(inputs.to(self.dtype), grid)
        bias, rows = self.bias is not None, self.kernel[0].numel()
        n = inputs.shape[0]
        if not bias and rows == self.kernel.shape[1]:  # of one input each
            return windows.reshape(self.groups, rows, n, -1).permute(2, 0, 1, 3)
        positions = windows.numel() // (self.groups * rows * n)
        columns = windows.new_empty(self.groups, rows + bias, n, positions)
        columns[:, :rows].view(windows.shape).copy_(windows)
        if bias:
            columns[:, rows] = 1
        return columns.permute(2, 0, 1, 3)

    def gradient_rows(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Return each example's gradient ``[n, groups, out / groups, in (+ 1)]``.

        `output` is the gradient of the layer's output. This does not compute the
        columns, which take several times the memory of the input.
        """
        inputs, output = self._padded(inputs.to(self.dtype)), output.to(self.dtype)
        positions, offsets = output[0, 0].numel(), self.kernel[0, 0].numel()
        depthwise = len(self.kernel) == self.groups == inputs.shape[1]
        small = positions <= _FEW_POSITIONS and offsets > _MANY_OFFSETS
        compute = self._by_offset if depthwise and small else self._by_convolution
        shape = len(inputs), self.groups, len(self.kernel) // self.groups, -1
        rows = compute(inputs, output).reshape(shape)
        if self.bias is None:
            return rows
        return torch.cat([rows, self.output_columns(output).sum(3, keepdim=True)], 3)

    def _by_convolution(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Compute the gradients by one convolution that has all examples' groups."""
        n = len(inputs)
        return _GRADIENT_OF_WEIGHT[inputs.dim() - 3](
            inputs.reshape(1, -1, *inputs.shape[2:]),
            (n * len(self.kernel), *self.kernel.shape[1:]),
            output.reshape(1, -1, *output.shape[2:]),
            stride=self.layer.stride,
            dilation=self.layer.dilation,
            groups=n * self.groups,
        )

    def _by_offset(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Compute them for one channel a group, by each entry of the kernel in turn.

        All examples' channels are next to each other in memory, so that small images
        make long products.
        """
        x, g = (y.flatten(0, 1).movedim(0, -1).contiguous() for y in (inputs, output))
        steps = list(zip(self.layer.dilation, self.layer.stride, g.shape, strict=False))
        entries = []
        for offset in product(*map(range, self.layer.kernel_size)):
            starts = [
                (o * d, s, size) for o, (d, s, size) in zip(offset, steps, strict=True)
            ]
            seen = x[*(slice(o, o + s * (size - 1) + 1, s) for o, s, size in starts)]
            entries.append((g * seen).flatten(0, -2).sum(0))
        return torch.stack(entries, 1)

    def output_columns(self, outputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the outputs as columns, group by group."""
        outputs = outputs.to(self.dtype)
        if grid is not None:
            outputs = outputs[:, :, *grid]
        n, groups = outputs.shape[0], self.groups
        return outputs.reshape(n, groups, outputs.shape[1] // groups, -1)

    def positions(self, inputs: torch.Size) -> list[int]:
        """Return how many positions there are along each axis."""
        layer, padding = self.layer, self._padding()[::-1]
        sizes = []
        for axis in range(len(layer.kernel_size)):
            size = inputs[2 + axis] + padding[2 * axis] + padding[2 * axis + 1]
            sizes.append((size - self._reach(axis)) // layer.stride[axis] + 1)
        return sizes

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether channels are second, and each position has an output."""
        layer, axes = self.layer, len(self.layer.kernel_size)
        if len(inputs) != 2 + axes or inputs[1] != layer.in_channels:
            return False
        sizes = self.positions(inputs)
        return output == torch.Size([inputs[0], layer.out_channels, *sizes])

    def _reach(self, axis: int) -> int:
        """Return how many inputs a patch spans along an axis."""
        return self.layer.dilation[axis] * (self.layer.kernel_size[axis] - 1) + 1

    def _windows(self, inputs: Tensor, grid: Grid | None) -> Tensor:
        """Return a view of the padded input's patches, for any stride and dilation.

        ``[groups, in / groups, *kernel, n, *positions]``: copying it is several times
        faster than ``F.unfold``, and it is in the order that second moments want.
        """
        layer, spatial = self.layer, inputs.dim() - 2
        inputs = self._padded(inputs)
        for axis in range(spatial):
            windows = inputs.unfold(2 + axis, self._reach(axis), layer.stride[axis])
            inputs = windows[..., :: layer.dilation[axis]]
        if grid is not None:
            inputs = inputs[:, :, *grid]
        channels = inputs.shape[1] // layer.groups
        shape = (len(inputs), layer.groups, channels, *inputs.shape[2:])
        steps = inputs.stride()
        grouped = inputs.as_strided(shape, (steps[0], channels * steps[1], *steps[1:]))
        kernel = range(3 + spatial, 3 + 2 * spatial)
        return grouped.permute(1, 2, *kernel, 0, *range(3, 3 + spatial))

    def _padded(self, inputs: Tensor) -> Tensor:
        if not any(padding := self._padding()):
            return inputs
        mode = self.layer.padding_mode
        return F.pad(inputs, padding, mode="constant" if mode == "zeros" else mode)

    def _padding(self) -> list[int]:
        """Return the padding in ``F.pad``'s order: last axis first, both ends."""
        layer, amounts = self.layer, list[int]()
        for axis in reversed(range(len(layer.kernel_size))):
            if layer.padding == "same":
                total = self._reach(axis) - 1
                amounts += [total // 2, total - total // 2]
            elif layer.padding == "valid":
                amounts += [0, 0]
            else:
                amounts += [cast(Sequence[int], layer.padding)[axis]] * 2
        return amounts


class DirectLayer(Layer):
    """A layer with cheap per-example gradients."""

    def entries(self, inputs: Tensor) -> int:
        """Return how many entries an example's gradient takes, for such inputs.

        A norm has one for each of the example's inputs, and a repeated row its own.
        """
        return inputs[:1].numel()

    @abstractmethod
    def prepared(self, inputs: Tensor) -> Any:
        """Return what per-example gradients need from the layer's input."""


class AffineNorm(DirectLayer):
    """The weight and bias of a batch, group, layer or RMS norm in eval mode."""

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether the features are in the dimension that the norm expects."""
        shape = self.parameters()[0].shape
        trailing = isinstance(self.layer, _FEATURE_NORMS)
        features = inputs[-len(shape) :] if trailing else inputs[1:2]
        return inputs == output and features == shape

    def prepared(self, inputs: Tensor) -> Tensor:
        """Return the normalised input, which the norm multiplies by the weight."""
        layer, x = self.layer, inputs.to(self.dtype)
        if isinstance(layer, nn.LayerNorm):
            return F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        if isinstance(layer, nn.RMSNorm):
            return F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
        if isinstance(layer, nn.GroupNorm):
            return F.group_norm(x, layer.num_groups, eps=layer.eps)
        assert isinstance(layer, _BATCH_NORMS)
        statistics = (layer.running_mean, layer.running_var)
        mean, variance = (None if s is None else s.to(x.dtype) for s in statistics)
        return F.batch_norm(x, mean, variance, eps=layer.eps)

    def gradients(self, inputs: Tensor, output: Tensor) -> list[Tensor]:
        """Return the parameters' gradients for a given gradient of the output."""
        return [rows.sum(0) for rows in self.rows(self.prepared(inputs), output)]

    def rows(self, prepared: Tensor, output: Tensor) -> list[Tensor]:
        """Return each example's gradient of each parameter, ``[n, *shape]``."""
        gradient = output.to(self.dtype)
        rows = []
        if self.weight is not None:
            rows.append(self._rows(gradient * prepared))
        if self.bias is not None:
            rows.append(self._rows(gradient))
        return rows

    def _rows(self, products: Tensor) -> Tensor:
        """Return each example's sums over positions, ``[n, *shape]``."""
        n = len(products)
        if isinstance(self.layer, _FEATURE_NORMS):
            return products.reshape(n, -1, *self.layer.normalized_shape).sum(1)
        return products.reshape(n, products.shape[1], -1).sum(2)


class RepeatedRow(DirectLayer):
    """A module's own parameter ``[1, ...]``, the same for all examples of a batch.

    Class tokens and embeddings of positions are such. The forward pass gets one row for
    each example in its place, whose gradients are the examples'.
    """

    weight: str

    def parameters(self) -> list[Tensor]:
        """Return the parameter."""
        return [getattr(self.layer, self.weight.rpartition(".")[2])]

    def repeated(self, n: int) -> Tensor:
        """Return one row for each of n examples, as a view."""
        parameter = self.parameters()[0]
        return parameter.expand(n, *parameter.shape[1:])

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether there is a row for each example."""
        return inputs == output

    def prepared(self, inputs: Tensor) -> None:
        """Return nothing: the rows' gradients are the examples'."""

    def gradients(self, inputs: Tensor, output: Tensor) -> list[Tensor]:
        """Return the parameter's gradient for given gradients of the rows."""
        return [output.to(self.dtype).sum(0, keepdim=True)]

    def rows(self, prepared: None, output: Tensor) -> list[Tensor]:
        """Return each example's gradient."""
        return [output.to(self.dtype)]


class EmbeddingRows(DirectLayer):
    """An embedding; an example has gradients only for the rows that it looks up."""

    layer: nn.Embedding

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether the output has one row for each index."""
        return output == torch.Size([*inputs, self.layer.embedding_dim])

    def entries(self, inputs: Tensor) -> int:
        """Return an example's number of indices times a row's length."""
        return super().entries(inputs) * self.layer.embedding_dim

    def prepared(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return each pair of example and row, and the pair of every index."""
        examples = torch.arange(len(inputs), device=inputs.device)
        number = self.layer.num_embeddings
        keys = inputs.reshape(len(inputs), -1) + number * examples.unsqueeze(1)
        pairs, pair_of_index = torch.unique(keys, return_inverse=True)
        return pairs % number, pair_of_index.flatten()

    def gradients(self, inputs: Tensor, output: Tensor) -> list[Tensor]:
        """Return the weight's gradient for a given gradient of the output."""
        return [self._summed(self.prepared(inputs), output, 1)]

    def squares(self, prepared: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        """Return the sum over examples of their squared gradients."""
        return self._summed(prepared, output, 2)

    def _summed(
        self, prepared: tuple[Tensor, Tensor], output: Tensor, power: int
    ) -> Tensor:
        """Return the sum of a power of the examples' gradients."""
        layer, (rows, pair_of_index) = self.layer, prepared
        gradient = output.to(self.dtype).reshape(-1, layer.embedding_dim)
        of_pairs = gradient.new_zeros(len(rows), layer.embedding_dim)
        of_pairs.index_add_(0, pair_of_index, gradient)
        if layer.padding_idx is not None:  # which is not trained
            of_pairs[rows == layer.padding_idx] = 0
        total = gradient.new_zeros(layer.num_embeddings, layer.embedding_dim)
        return total.index_add_(0, rows, of_pairs.pow(power))


class SquaredGradients:
    """The sums over examples of squared gradients, of layers that give these."""

    def __init__(self, layers: Mapping[str, DirectLayer]) -> None:
        self.layers = layers
        each = layers.items()
        self.dense = {k: v for k, v in each if isinstance(v, AffineNorm | RepeatedRow)}
        self.embeddings = {k: v for k, v in each if isinstance(v, EmbeddingRows)}
        self._of_dense = {
            name: parameter
            for layer in self.dense.values()
            for name, parameter in zip(layer.names, layer.parameters(), strict=True)
        }
        # The sums of all layers with a dense gradient are one row, so that a pass adds
        # to them at once.
        self._row: Tensor | None = None
        if self._of_dense:
            dtypes = [layer.dtype for layer in self.dense.values()]
            like = next(iter(self._of_dense.values()))
            size = sum(p.numel() for p in self._of_dense.values())
            self._row = like.new_zeros(size, dtype=reduce(torch.promote_types, dtypes))
        self._sums = Sums(
            {name: x.layer.weight for x in self.embeddings.values() for name in x.names}
        )

    def add(self, prepared: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> None:
        """Add the squares of some examples' gradients, from those of layers' outputs.

        A layer without an entry in `outputs` has none.
        """
        self._sums.add(
            layer.squares(prepared[name], outputs[name]) if name in outputs else None
            for name, layer in self.embeddings.items()
        )
        rows = list[Tensor]()
        for name, layer in self.dense.items():
            if name in outputs:
                rows += layer.rows(prepared[name], outputs[name])
            else:
                rows += [torch.zeros_like(p)[None] for p in layer.parameters()]
        if self._row is not None:
            most = max(map(len, rows))
            flat = [x.flatten(1).expand(most, -1) for x in rows]
            self._row += torch.cat(flat, 1).square_().sum(0)

    def mean(self, count: int) -> dict[str, Tensor]:
        """Return the mean over so many examples of each parameter."""
        found = self._sums.mean(count)
        if self._row is None:
            return found
        sizes = [p.numel() for p in self._of_dense.values()]
        parts = torch.split(self._row / count, sizes)
        for (name, p), part in zip(self._of_dense.items(), parts, strict=True):
            found[name] = part.view(p.shape).to(curvature_dtype(p))
        return found


def layer_of(module: nn.Module, weight: str | None, bias: str | None) -> Layer | None:
    """Return the form of a module by its type; None if its type has none.

    Parameters
    ----------
    module : nn.Module
        The module.
    weight, bias : str | None
        The names in the model of its trained weight and bias; None where it has none.
    """
    if isinstance(module, nn.Linear) and weight is not None:
        return LinearLayer(module, weight, bias)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and weight is not None:
        return ConvolutionLayer(module, weight, bias)
    if isinstance(module, nn.Embedding):
        return EmbeddingRows(module, weight, bias)
    if isinstance(module, _BATCH_NORMS) and module.running_mean is None:
        return None  # it normalises by its batch
    if isinstance(module, (*_BATCH_NORMS, *_FEATURE_NORMS, nn.GroupNorm)):
        return AffineNorm(module, weight, bias)
    return None
