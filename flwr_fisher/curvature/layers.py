r"""Linear and convolution layers as matrix products over positions.

Both compute, at each of T output positions (T = 1 for a plain linear layer), an output
column :math:`W a_t` from an input column :math:`a_t`. With a batch's columns as
``[n, groups, size, T]`` an example's gradient is :math:`\sum_t g_t a_t^\top`, and
K-FAC's factors are second moments of the columns.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "KRONECKER_LAYERS",
    "KroneckerLayer",
    "fits",
    "input_columns",
    "output_columns",
]

KroneckerLayer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
KRONECKER_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def input_columns(layer: KroneckerLayer, inputs: Tensor, *, bias: bool) -> Tensor:
    """Return what the layer multiplies its weight with.

    Parameters
    ----------
    layer : nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
        The layer.
    inputs : Tensor
        Its input: ``[n, ..., in]``, or ``[n, in, *spatial]`` for a convolution.
    bias : bool
        Whether to append a row of ones.

    Returns
    -------
    Tensor
        ``[n, groups, in / groups * kernel (+ 1), T]``.
    """
    if isinstance(layer, nn.Linear):
        columns = inputs.reshape(inputs.shape[0], -1, inputs.shape[-1]).mT.unsqueeze(1)
    else:
        columns = _patches(layer, inputs)
    if not bias:
        return columns
    ones = columns.new_ones(*columns.shape[:2], 1, columns.shape[3])
    return torch.cat([columns, ones], dim=2)


def output_columns(layer: KroneckerLayer, outputs: Tensor) -> Tensor:
    """Return an output, or its gradient, as ``[n, groups, out / groups, T]``."""
    if isinstance(layer, nn.Linear):
        flat = outputs.reshape(outputs.shape[0], -1, outputs.shape[-1])
        return flat.mT.unsqueeze(1)
    n, groups = outputs.shape[0], layer.groups
    return outputs.reshape(n, groups, outputs.shape[1] // groups, -1)


def fits(layer: KroneckerLayer, inputs: torch.Size, outputs: torch.Size) -> bool:
    """Return whether these are the shapes of one plain call of the layer."""
    if isinstance(layer, nn.Linear):
        rows, columns = layer.weight.shape
        plain = len(inputs) > 1 and inputs[-1] == columns
        return plain and outputs == torch.Size([*inputs[:-1], rows])
    spatial = len(layer.kernel_size)
    if len(inputs) != 2 + spatial or inputs[1] != layer.in_channels:
        return False
    padding = _padding(layer)[::-1]
    sizes = []
    for axis in range(spatial):
        size = inputs[2 + axis] + padding[2 * axis] + padding[2 * axis + 1]
        reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
        sizes.append((size - reach) // layer.stride[axis] + 1)
    return outputs == torch.Size([inputs[0], layer.out_channels, *sizes])


def _patches(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor) -> Tensor:
    """Unfold a convolution's input for any stride, padding, dilation and groups."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    if any(padding := _padding(layer)):
        inputs = F.pad(inputs, padding, mode=mode)
    n, groups = inputs.shape[0], layer.groups
    if isinstance(layer, nn.Conv2d):
        size, dilation, stride = layer.kernel_size, layer.dilation, layer.stride
        columns = F.unfold(inputs, size, dilation=dilation, stride=stride)
        return columns.reshape(n, groups, -1, columns.shape[2])
    spatial = inputs.dim() - 2
    for axis in range(spatial):
        step = layer.dilation[axis]
        reach = step * (layer.kernel_size[axis] - 1) + 1
        inputs = inputs.unfold(2 + axis, reach, layer.stride[axis])[..., ::step]
    kernel_axes = range(2 + spatial, 2 + 2 * spatial)
    columns = inputs.permute(0, 1, *kernel_axes, *range(2, 2 + spatial))
    positions = columns.shape[2 + spatial :].numel()
    return columns.reshape(n, groups, -1, positions)


def _padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """Return the padding in ``F.pad``'s order: last axis first, before and after."""
    amounts: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            amounts += [total // 2, total - total // 2]
        elif layer.padding == "valid":
            amounts += [0, 0]
        else:
            amounts += [cast(Sequence[int], layer.padding)[axis]] * 2
    return amounts
