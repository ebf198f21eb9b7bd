"""How many examples are run at once: as memory allows, by an estimate."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from flwr_fisher.curvature.estimate.accumulators import LayerAccumulator
from flwr_fisher.curvature.estimate.forms import Forms
from flwr_fisher.curvature.estimate.layers import (
    DirectLayer,
    KroneckerLayer,
    Positions,
)
from flwr_fisher.curvature.estimate.model_sums import ModelSums
from flwr_fisher.params import trainable

_SHARE = 1.1  # of a training step's memory, by estimate, that may be taken
_LEAST = 2**26  # bytes that may be taken even if a step takes less
# The same on other devices, beside the sums: there each part of a batch costs the
# launches of a pass, however few its examples are.
_LEAST_ELSEWHERE = 2**30
_FEWEST = 8  # examples at once, unless the caller bounds the memory


def examples_at_once(
    model: nn.Module,
    forms: Forms,
    sums: ModelSums,
    positions: Positions,
    batch_size: int,
    max_batch_bytes: int | None,
) -> int:
    """Return the largest number of examples to run at once.

    By default they take about as much memory as a training step, which holds all of a
    batch's examples and the gradients, or 64 MiB if that is more. Beside the examples
    the sums are held. On a device other than the CPU the examples have 1 GiB at
    least, and the sums are held beside these.

    Parameters
    ----------
    model : nn.Module
        The model.
    forms, sums
        From :func:`~flwr_fisher.curvature.estimate.model_sums.make_sums`.
    positions : Positions
        Which of a layer's positions count.
    batch_size : int
        The number of examples in a batch.
    max_batch_bytes : int | None
        How much memory may be taken in addition to the forward pass.
    """
    layers = {name: [*each.values()] for name, each in sums.accumulators.items()}
    sizes = [
        _bytes(forms.layers[name], forms.inputs[name], accumulators, positions)
        for name, accumulators in layers.items()
    ]
    sizes += [
        _bytes_of_direct(forms.inputs[name], squares.layer)
        for name, squares in sums.direct.items()
    ]
    passing = max((each.passing for each in sizes), default=0)
    beyond = sum(each.kept for each in sizes) + passing
    if max_batch_bytes is not None:
        return max(1, max_batch_bytes // max(beyond, 1))
    held = sum(each.nbytes for of_layer in layers.values() for each in of_layer)
    parameters = [*trainable(model).values()]
    on_cpu = all(p.device.type == "cpu" for p in parameters)
    gradients = sum(p.nbytes for p in parameters)
    forward = sum(each.forward for each in sizes)
    step = max(_SHARE * (batch_size * forward + gradients), _LEAST)
    room = step - held if on_cpu else max(step - held, _LEAST_ELSEWHERE)
    return max(_FEWEST, int(room / max(forward + beyond, 1)))


class _Bytes(NamedTuple):
    """The bytes that an example takes at one layer, by how long they are held.

    - `forward`: a training step's. It keeps each layer's input and output, and as much
      again in what lies between layers.
    - `kept`: held until the backward pass ends. These are the output's gradient, and
      the input's columns that are paired with it.
    - `passing`: held for one layer at a time. These are columns that are needed without
      gradients and, for some structures, the gradient of the weight.
    """

    forward: int
    kept: int
    passing: int


def _bytes(
    layer: KroneckerLayer,
    inputs: Tensor,
    accumulators: Sequence[LayerAccumulator],
    positions: Positions,
) -> _Bytes:
    """Return an example's bytes at a layer with a Kronecker form."""
    sizes, weight = layer.positions(inputs.shape), layer.matrices()
    paired = any(a.takes_inputs for a in accumulators)
    grid, _ = positions.of_inputs(sizes)
    columns = 0
    if paired or any(a.observes for a in accumulators):
        columns = layer.input_columns(inputs[:1], None if paired else grid).numel()
    outputs = weight.shape[0] * weight.shape[1] * math.prod(sizes)
    whole = math.prod(sizes) > 1 and any(a.forms_gradients for a in accumulators)
    kept, passing = outputs + paired * columns, (not paired) * columns
    return _Bytes(
        2 * (inputs[:1].numel() + outputs) * weight.element_size(),
        kept * layer.dtype.itemsize,
        (passing + whole * weight.numel()) * layer.dtype.itemsize,
    )


def _bytes_of_direct(inputs: Tensor, layer: DirectLayer) -> _Bytes:
    """Return an example's bytes at a norm or an embedding."""
    entries = layer.entries(inputs)
    size = layer.parameters()[0].element_size()
    wide = entries * layer.widened(inputs[:0]).element_size()
    return _Bytes(4 * entries * size, 2 * wide, wide)
