r"""Linear and convolution layers as matrix products over positions.

Both compute, at each of T output positions (T = 1 for a plain linear layer), an output
column :math:`W a_t` from an input column :math:`a_t`. With a batch's columns as
``[n, groups, size, T]`` an example's gradient is :math:`\sum_t g_t a_t^\top`, and
K-FAC's factors are second moments of the columns.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.randomness import random_stream

Grid = tuple[slice, ...]  # along each axis of positions


class Positions:
    """Draws positions, each of a layer's with the same chance.

    They lie on a grid with a random origin, so that none are next to each other: a
    convolution's neighbours see nearly the same.

    Parameters
    ----------
    most : int, optional
        About how many of an example's count in the inputs' factor; by default all. In
        the gradients', which vary more from one position to the next, twice as many.
    seed : int
        Of the origins.
    """

    def __init__(self, most: int | None, seed: int) -> None:
        self.most, self._draw = most, random_stream(seed, "positions")

    def of_inputs(self, sizes: Sequence[int]) -> tuple[Grid, int]:
        """Return a grid, and how many positions each of its points stands for.

        Parameters
        ----------
        sizes : Sequence[int]
            How many positions there are along each axis.
        """
        return self._grid(sizes, self.most)

    def of_gradients(self, sizes: Sequence[int]) -> tuple[Grid, int]:
        """Return the same of the outputs' gradients."""
        return self._grid(sizes, None if self.most is None else 2 * self.most)

    def _grid(self, sizes: Sequence[int], most: int | None) -> tuple[Grid, int]:
        if most is None:
            return (slice(None),) * len(sizes), 1
        steps = _steps(sizes, most)
        origins = [int(self._draw.integers(step)) for step in steps]
        slices = (slice(o, None, step) for o, step in zip(origins, steps, strict=True))
        return tuple(slices), math.prod(steps)


def _steps(sizes: Sequence[int], most: int) -> list[int]:
    """Return the smallest steps that leave at most so many, about square."""
    steps = [1] * len(sizes)

    def left(axis: int) -> int:
        return -(-sizes[axis] // steps[axis])

    while math.prod(map(left, range(len(sizes)))) > most:
        widest = max(range(len(sizes)), key=left)
        steps[widest] += 1
    return steps


KroneckerLayer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
KRONECKER_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def input_columns(
    layer: KroneckerLayer, inputs: Tensor, *, bias: bool, grid: Grid | None = None
) -> Tensor:
    """Return what the layer multiplies its weight with.

    Parameters
    ----------
    layer : nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
        The layer.
    inputs : Tensor
        Its input: ``[n, ..., in]``, or ``[n, in, *spatial]`` for a convolution.
    bias : bool
        Whether to append a row of ones.
    grid : tuple[slice, ...], optional
        Which positions to take, along each axis of :func:`positions`.

    Returns
    -------
    Tensor
        ``[n, groups, in / groups * kernel (+ 1), T]``, with all examples' positions
        side by side in memory, as their second moment wants them.
    """
    if isinstance(layer, nn.Linear):
        tokens = inputs.reshape(inputs.shape[0], -1, inputs.shape[-1])
        if grid is not None:
            tokens = tokens[:, *grid]
        return token_columns(tokens, bias=bias)
    windows = _windows(layer, inputs, grid)
    groups, rows = layer.groups, layer.weight[0].numel()
    n = inputs.shape[0]
    positions = windows.numel() // (groups * rows * n)
    columns = windows.new_empty(groups, rows + bias, n, positions)
    columns[:, :rows].view(windows.shape).copy_(windows)
    if bias:
        columns[:, rows] = 1
    return columns.permute(2, 0, 1, 3)


def output_columns(
    layer: KroneckerLayer, outputs: Tensor, *, grid: Grid | None = None
) -> Tensor:
    """Return an output, or its gradient, as ``[n, groups, out / groups, T]``."""
    if isinstance(layer, nn.Linear):
        tokens = outputs.reshape(outputs.shape[0], -1, outputs.shape[-1])
        if grid is not None:
            tokens = tokens[:, *grid]
        return token_columns(tokens)
    if grid is not None:
        outputs = outputs[:, :, *grid]
    n, groups = outputs.shape[0], layer.groups
    return outputs.reshape(n, groups, outputs.shape[1] // groups, -1)


def token_columns(tokens: Tensor, *, bias: bool = False) -> Tensor:
    """Return ``[n, T, size]`` as columns ``[n, 1, size (+ 1), T]``, features in a row.

    So all examples' columns are side by side in memory, and need no copy for it.
    """
    if bias:
        tokens = torch.cat([tokens, torch.ones_like(tokens[..., :1])], -1)
    return tokens.contiguous().mT.unsqueeze(1)


def fits(layer: KroneckerLayer, inputs: torch.Size, outputs: torch.Size) -> bool:
    """Return whether these are the shapes of one plain call of the layer."""
    if isinstance(layer, nn.Linear):
        rows, columns = layer.weight.shape
        plain = len(inputs) > 1 and inputs[-1] == columns
        return plain and outputs == torch.Size([*inputs[:-1], rows])
    if len(inputs) != 2 + len(layer.kernel_size) or inputs[1] != layer.in_channels:
        return False
    sizes = positions(layer, inputs)
    return outputs == torch.Size([inputs[0], layer.out_channels, *sizes])


def positions(layer: KroneckerLayer, inputs: torch.Size) -> list[int]:
    """Return how many output positions there are along each axis, for such inputs.

    A linear layer has one axis, whatever lies between examples and features.
    """
    if isinstance(layer, nn.Linear):
        return [inputs[1:-1].numel()]
    padding, sizes = _padding(layer)[::-1], []
    for axis in range(len(layer.kernel_size)):
        size = inputs[2 + axis] + padding[2 * axis] + padding[2 * axis + 1]
        reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
        sizes.append((size - reach) // layer.stride[axis] + 1)
    return sizes


def _windows(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor, grid: Grid | None
) -> Tensor:
    """Return a view of a convolution's padded input, for any stride and dilation.

    ``[groups, in / groups, *kernel, n, *positions]``: copying it is several times
    faster than ``F.unfold``, and it is in the order that second moments want.
    """
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    if any(padding := _padding(layer)):
        inputs = F.pad(inputs, padding, mode=mode)
    spatial = inputs.dim() - 2
    for axis in range(spatial):
        step = layer.dilation[axis]
        reach = step * (layer.kernel_size[axis] - 1) + 1
        inputs = inputs.unfold(2 + axis, reach, layer.stride[axis])[..., ::step]
    if grid is not None:
        inputs = inputs[:, :, *grid]
    channels = inputs.shape[1] // layer.groups
    shape = (len(inputs), layer.groups, channels, *inputs.shape[2:])
    steps = inputs.stride()
    grouped = inputs.as_strided(shape, (steps[0], channels * steps[1], *steps[1:]))
    kernel = range(3 + spatial, 3 + 2 * spatial)
    return grouped.permute(1, 2, *kernel, 0, *range(3, 3 + spatial))


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
