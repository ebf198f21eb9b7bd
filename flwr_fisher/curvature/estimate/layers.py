r"""Layers with a Kronecker form, seen as matrix products over positions.

Each computes, at each of T output positions (T = 1 for a plain linear layer), an output
column :math:`W a_t` from an input column :math:`a_t`. With a batch's columns as
``[n, groups, size, T]`` an example's gradient is :math:`\sum_t g_t a_t^\top`, and
K-FAC's factors are second moments of the columns.

Long: all kinds of such layers, side by side.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import grad

from flwr_fisher.curvature.estimate.positions import Grid
from flwr_fisher.curvature.operators.layer import from_matrices, to_matrices

_FEW = 8  # channels of a group up to which a convolution is faster than columns
_FEW_POSITIONS, _FEW_OFFSETS = 64, 9  # so few positions, or so many offsets: slow
_OF_WEIGHT: list[Callable[..., Tensor]] = [
    grad.conv1d_weight,
    grad.conv2d_weight,
    grad.conv3d_weight,
]


@dataclass(frozen=True)
class KroneckerLayer(ABC):
    """A layer with a Kronecker form, and its trained parameters' names in the model."""

    layer: nn.Module
    weight: str
    bias: str | None  # None if it has no trained bias
    own: ClassVar[tuple[str, str]] = ("weight", "bias")
    """The layer's own names of them."""

    @staticmethod
    def of(name: str, layer: nn.Module, *, bias: bool) -> "KroneckerLayer | None":
        """Return the layer of this name, or None if it has no Kronecker form.

        `bias` says whether it has a bias that is trained.
        """
        kind: type[KroneckerLayer]
        if isinstance(layer, nn.Linear):
            kind = LinearLayer
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            kind = ConvolutionLayer
        elif is_packed(layer):
            kind = PackedProjection
        elif is_transposed(layer):
            # Here the bias cannot be the last column of the weight's matrix.
            kind, bias = TransposedLinear, False
        else:
            return None
        weight, of_bias = (f"{name}.{own}" if name else own for own in kind.own)
        return kind(layer, weight, of_bias if bias else None)

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

    @abstractmethod
    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether these shapes are those of one plain call of the layer."""

    @property
    def groups(self) -> int:
        """The number of groups of outputs; each group has its own factors."""
        return 1

    def parameters(self) -> list[Tensor]:
        """Return the trained parameters, weight first."""
        names = zip(self.own, (self.weight, self.bias), strict=True)
        return [getattr(self.layer, own) for own, name in names if name is not None]

    @property
    def kernel(self) -> Tensor:
        """The weight."""
        return self.parameters()[0].detach()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of columns and of sums of their products: at least float32."""
        return torch.promote_types(self.kernel.dtype, torch.float32)

    def gradients(self, inputs: Tensor, output: Tensor) -> list[Tensor]:
        """Return the parameters' gradients for a given gradient of the output."""
        g, a = self.output_columns(output), self.input_columns(inputs)
        product = torch.einsum("ngot,ngit->goi", g, a)
        return list(self.as_params(product).values())

    def matrices(self) -> Tensor:
        """Return the weight as ``[groups, out / groups, in (+ 1)]``, the bias last."""
        weight, *bias = self.parameters()
        return to_matrices(weight, bias[0] if bias else None, self.groups).detach()

    def as_params(self, matrices: Tensor) -> dict[str, Tensor]:
        """Return the weight and bias of such matrices: the inverse of `matrices`."""
        return from_matrices(matrices, self.weight, self.kernel.shape, self.bias)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the weight and the bias."""
        return {k: v.shape for k, v in self.as_params(self.matrices()).items()}


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
        plain = len(inputs) > 1 and inputs[-1] == columns
        return plain and output == torch.Size([*inputs[:-1], rows])


class TransposedLinear(LinearLayer):
    """A linear layer whose weight is ``[in, out]``, as transformers' ``Conv1D`` is."""

    def matrices(self) -> Tensor:
        """Return the weight as ``[1, out, in]``."""
        return self.kernel.mT.unsqueeze(0)

    def as_params(self, matrices: Tensor) -> dict[str, Tensor]:
        """Return the weight of such matrices: the inverse of `matrices`."""
        return {self.weight: matrices.squeeze(0).mT}

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether features are last, and each row of inputs has outputs."""
        columns, rows = self.kernel.shape
        plain = len(inputs) > 1 and inputs[-1] == columns
        return plain and output == torch.Size([*inputs[:-1], rows])


class PackedProjection(LinearLayer):
    """The packed projection to queries, keys and values of self-attention."""

    own = ("in_proj_weight", "in_proj_bias")

    @property
    def groups(self) -> int:
        """Three groups: queries, keys and values."""
        return 3

    def input_columns(self, inputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the tokens as columns, the same for all three."""
        return super().input_columns(inputs, grid).expand(-1, 3, -1, -1)

    def output_columns(self, outputs: Tensor, grid: Grid | None = None) -> Tensor:
        """Return queries, keys and values as columns."""
        columns = super().output_columns(outputs, grid)  # [n, 1, 3 E, T]
        return columns.view(len(columns), 3, -1, columns.shape[-1])


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
        small = positions <= _FEW_POSITIONS and offsets > _FEW_OFFSETS
        of = self._by_offset if depthwise and small else self._by_convolution
        shape = len(inputs), self.groups, len(self.kernel) // self.groups, -1
        rows = of(inputs, output).reshape(shape)
        if self.bias is None:
            return rows
        ones = self.output_columns(output).sum(3, keepdim=True)
        return torch.cat([rows, ones], 3)

    def _by_convolution(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Compute the gradients by one convolution that has all examples' groups."""
        n = len(inputs)
        return _OF_WEIGHT[inputs.dim() - 3](
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
        found = []
        for offset in product(*map(range, self.layer.kernel_size)):
            starts = [
                (o * d, s, size) for o, (d, s, size) in zip(offset, steps, strict=True)
            ]
            seen = x[*(slice(o, o + s * (size - 1) + 1, s) for o, s, size in starts)]
            found.append((g * seen).flatten(0, -2).sum(0))
        return torch.stack(found, 1)

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
            every = inputs.unfold(2 + axis, self._reach(axis), layer.stride[axis])
            inputs = every[..., :: layer.dilation[axis]]
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


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with weight ``[in, out]``."""
    own = dict(module.named_parameters(recurse=False))
    sizes = getattr(module, "nx", None), getattr(module, "nf", None)
    named = type(module).__name__ == "Conv1D" and "weight" in own
    return named and own["weight"].shape == torch.Size(
        [size for size in sizes if isinstance(size, int)]
    )


def prepares_inputs(module: nn.Module) -> bool:
    """Return whether a convolution's class overrides ``forward``.

    It pads its inputs, for instance, as TensorFlow's "same" does.
    """
    plain = (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
    return (
        isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        and type(module).forward not in plain
        and "forward" not in vars(module)
    )


class ByLayer(partial[Any]):
    """A ``forward`` that computes an attention from its layers."""


def is_packed(module: nn.Module) -> bool:
    """Return whether a module is self-attention with a packed projection."""
    own = vars(module).get("forward")
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and (isinstance(own, ByLayer) or (own is None and _is_plain(module.out_proj)))
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
    )


def _is_plain(layer: nn.Linear) -> bool:
    """Return whether an attention's last layer computes no more than its weight says.

    The attention itself takes its weight, and never calls it.
    """
    hooks = (layer._forward_hooks, layer._forward_pre_hooks)
    own = type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)
    return own and not any(hooks)
