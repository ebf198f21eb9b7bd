"""Per-example gradients of a network with one output, at chosen coordinates.

One backward pass of the sum of a batch's outputs reaches every layer's output. For a
linear or convolution layer, an example's gradient is a product of the layer's input and
its output's gradient, and only the chosen entries are computed. All other parameters
use ``torch.func``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.data import Inputs, concatenated
from flwr_fisher.curvature.estimate.forms import Forms, tapped_once
from flwr_fisher.curvature.estimate.jacobians import Jacobians
from flwr_fisher.curvature.estimate.layers import KroneckerLayer
from flwr_fisher.errors import StructureError

_FEW = 16  # examples that show the outputs' shape
_AT_ONCE = 2**24  # entries of activations, 64 MiB in float32
# Entries of a layer's products at once. On a CPU they stay in its cache.
_PRODUCTS = {"cpu": 2**19}
_GATHER = 32  # the cost of gathering an entry, in multiplications of a matrix product


@dataclass(frozen=True)
class Chosen:
    """The entries of a parameter that are features, and their columns.

    Parameters
    ----------
    entries : Tensor
        Indices into the flattened parameter, int64 ``[k]``, ascending.
    at : slice
        The k columns of the features.
    """

    entries: Tensor
    at: slice


class FeatureEngine:
    """Computes features; the first batch decides the method for each layer.

    Parameters
    ----------
    network : nn.Module
        The network, in eval mode. It returns one number for each example.
    chosen : Mapping[str, Chosen]
        The parameters with at least one chosen entry.
    inputs : Inputs
        The first batch, not empty.

    Raises
    ------
    StructureError
        If an example does not have exactly one output, or if its output depends on
        other examples.
    """

    def __init__(
        self, network: nn.Module, chosen: Mapping[str, Chosen], inputs: Inputs
    ) -> None:
        self.network, self.chosen = network, chosen
        if len(inputs) == 1:  # a second example may change its output
            inputs = concatenated([inputs, inputs.mapped(torch.zeros_like)])
        few = inputs[:_FEW]
        with torch.no_grad():
            _check_shape(few(network), len(few))
        forms = Forms.of(network, inputs, 4 * _AT_ONCE)
        self.layers = {
            name: layer
            for name, layer in forms.layers.items()
            if layer.weight in chosen or layer.bias in chosen
        }
        self.weights = {
            layer.weight: _Weight(layer, chosen[layer.weight].entries)
            for layer in self.layers.values()
            if layer.weight in chosen
        }
        taken = {p for x in self.layers.values() for p in (x.weight, x.bias)}
        self.rest = [name for name in chosen if name not in taken]
        self.jacobians = Jacobians(network, self.rest)
        entries = sum(_entries(x, forms.inputs[n]) for n, x in forms.layers.items())
        entries = max(entries, sum(t[0].numel() for t in inputs.tensors), 1)
        self.chunk = max(1, _AT_ONCE // entries)

    def write(self, inputs: Inputs, out: Tensor) -> None:
        """Write the examples' features into a tensor ``[n, p]``."""
        parts = inputs.split(self.chunk), torch.split(out, self.chunk)
        for x, rows in zip(*parts, strict=True):
            if self.layers:
                self._write_layers(x, rows)
            if self.rest:
                self._write_rest(x, rows)

    def _write_layers(self, x: Inputs, out: Tensor) -> None:
        outputs, calls = tapped_once(self.network, x, self.layers)
        _check_shape(outputs, len(x))
        edges = [tap.edge() for tap in calls.values()]
        gradients = torch.autograd.grad(outputs.sum(), edges)
        for (name, tap), gradient in zip(calls.items(), gradients, strict=True):
            layer = self.layers[name]
            g = layer.output_columns(gradient).flatten(1, 2)
            bias = self.chosen.get(layer.bias or "")
            if bias is not None:
                out[:, bias.at] = g.sum(2).index_select(1, bias.entries)
            if layer.weight in self.weights:
                at = self.chosen[layer.weight].at
                self.weights[layer.weight].write(tap.inputs, g, out[:, at])

    def _write_rest(self, x: Inputs, out: Tensor) -> None:
        start = 0
        for rows in self.jacobians.gradients(x, out.new_ones(1, len(x), 1)):
            for name, row in rows.items():
                chosen = self.chosen[name]
                entries = row.flatten(1).index_select(1, chosen.entries)
                out[start : start + len(row), chosen.at] = entries
            start += len(row)


class _Weight:
    """Chosen entries of a weight's gradients ``sum_t g_t a_t^T``."""

    def __init__(self, layer: KroneckerLayer, entries: Tensor) -> None:
        weight, self.groups = layer.kernel, layer.groups
        self.layer, self.entries = replace(layer, bias=None), entries
        size = weight[0].numel()
        self.row = entries // size
        group = self.row // (len(weight) // self.groups)
        self.column = entries % size + group * size

    def write(self, inputs: Tensor, g: Tensor, out: Tensor) -> None:
        """Write the entries of gradients ``[n, out, T]``, a few examples at a time."""
        weight, positions = self.layer.kernel, g.shape[2]
        gather = positions == 1 or _GATHER * len(self.entries) < weight.numel()
        each = len(self.entries) * positions if gather else weight.numel()
        each += weight[0].numel() * self.groups * positions  # the columns
        size = max(1, _PRODUCTS.get(g.device.type, _AT_ONCE) // each)
        write = self._gather if gather else self._product
        pairs = zip(torch.split(inputs, size), torch.split(g, size), strict=True)
        for (a, b), o in zip(pairs, torch.split(out, size), strict=True):
            write(self.layer.input_columns(a), b, o)

    def _gather(self, columns: Tensor, g: Tensor, out: Tensor) -> None:
        columns = columns.flatten(1, 2)
        if g.shape[2] == 1:  # two dimensions are quicker than three
            g, columns = g[..., 0], columns[..., 0]
        g, columns = g.index_select(1, self.row), columns.index_select(1, self.column)
        if g.dim() == 2:
            torch.mul(g, columns, out=out)
        else:
            out.copy_(torch.linalg.vecdot(g, columns))

    def _product(self, columns: Tensor, g: Tensor, out: Tensor) -> None:
        product = g.reshape(len(g), self.groups, -1, g.shape[2]) @ columns.mT
        out.copy_(product.flatten(1).index_select(1, self.entries))


def _entries(layer: KroneckerLayer, inputs: Tensor) -> int:
    """Return about how many entries an example takes in a layer, both ways."""
    columns = layer.input_columns(inputs[:1])
    return 2 * (inputs[:1].numel() + len(layer.kernel) * columns.shape[3])


def _check_shape(outputs: Tensor, examples: int) -> None:
    if outputs.dim() < 1 or len(outputs) != examples or outputs.numel() != examples:
        raise StructureError(
            f"the replaced head returns {tuple(outputs.shape)} for {examples} examples,"
            " but features need one output for each: pool positions before the head"
        )
