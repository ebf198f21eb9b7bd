"""The accumulators of each structure, and the curvatures made from their sums."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.estimate.accumulators import (
    BlockAccumulator,
    EigenAccumulator,
    KroneckerAccumulator,
    LayerAccumulator,
    ReducedKroneckerAccumulator,
    diagonal_of,
)
from flwr_fisher.curvature.estimate.direct_layers import DirectLayer, SquaredGradients
from flwr_fisher.curvature.estimate.engine import Engine
from flwr_fisher.curvature.estimate.forms import Forms
from flwr_fisher.curvature.estimate.jacobians import (
    DenseJacobian,
    DiagonalJacobian,
    JacobianAccumulator,
)
from flwr_fisher.curvature.estimate.layers import KroneckerLayer
from flwr_fisher.curvature.estimate.options import LARGEST_FACTOR
from flwr_fisher.curvature.estimate.positions import Positions
from flwr_fisher.curvature.estimate.tied_layers import TiedSquares
from flwr_fisher.curvature.models import check_examples_are_independent
from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.curvature.operators.kronecker import Kronecker
from flwr_fisher.curvature.operators.plain import BlockDiagonal, Diagonal
from flwr_fisher.errors import StructureError
from flwr_fisher.params import all_finite, trainable

_SHARINGS = {"expand": KroneckerAccumulator, "reduce": ReducedKroneckerAccumulator}
_LARGEST = 2**31  # bytes of a dense matrix, or of all of a model's dense blocks
_SHARE = 1.1  # of a training step's memory, by estimate, that may be taken
_LEAST = 2**26  # bytes that may be taken even if a step takes less
_FEWEST = 8  # examples at once, unless the caller bounds the memory


class Accumulation:
    """The accumulators of some structures, and the engine that fills them.

    The first batch decides how each layer is computed, and how many examples at once.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    inputs : Inputs
        The first batch.
    structures : Sequence[str]
        Some of :data:`STRUCTURES`.
    max_batch_bytes : int | None
        How much memory an engine may take in addition to the forward pass. By default
        all of it together takes about as much as a training step on the first batch.
    positions : Positions
        Which of a layer's positions count.
    weight_sharing : str
        One of :data:`WEIGHT_SHARINGS`: what K-FAC does with several positions.
    kfac : Curvature | None
        The K-FAC of the same model; ``ekfac`` takes its eigenbasis.

    Raises
    ------
    StructureError
        If a dense matrix would be too large, or an example's outputs are not its own.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        structures: Sequence[str],
        max_batch_bytes: int | None,
        positions: Positions,
        weight_sharing: str = "expand",
        kfac: Curvature | None = None,
    ) -> None:
        check_examples_are_independent(model, "an example has no Fisher of its own")
        self.structures, self.names = structures, list(trainable(model))
        by_layer = [s for s in structures if s != "dense"]
        forms = Forms.of(model, inputs, by_layer=bool(by_layer))
        if "block" in structures:
            _check_size([layer.matrices().numel() for layer in forms.layers.values()])
        blocks = kfac.blocks() if kfac is not None else []
        bases = {k.weight: k for k in blocks if isinstance(k, Kronecker)}
        kinds: dict[str, Callable[[KroneckerLayer], LayerAccumulator]] = {
            "kfac": _SHARINGS[weight_sharing],
            "ekfac": lambda layer: EigenAccumulator(layer, bases[layer.weight]),
            "diagonal": diagonal_of,
            "block": BlockAccumulator,
        }
        self.accumulators = {
            name: {s: kinds[_form(s, layer)](layer) for s in by_layer}
            for name, layer in forms.layers.items()
        }
        self.direct = {n: SquaredGradients(each) for n, each in forms.direct.items()}
        for names, pair in forms.tied.items():
            self.direct |= zip(names, TiedSquares(pair).parts(), strict=True)
        self.jacobians: dict[str, JacobianAccumulator] = {}
        if forms.others:
            self.jacobians["others"] = DiagonalJacobian(model, forms.others)
        parameters = list(trainable(model).values())
        if "dense" in structures:
            _check_size([sum(p.numel() for p in parameters)])
            self.jacobians["dense"] = DenseJacobian(model, self.names)
        sums = {name: list(each.values()) for name, each in self.accumulators.items()}
        sizes = [
            _bytes(layer, forms.inputs[name], sums[name], positions)
            for name, layer in forms.layers.items()
        ]
        sizes += [
            _bytes_of_direct(forms.inputs[name], squares.layer)
            for name, squares in self.direct.items()
        ]
        if max_batch_bytes is None:
            held = sum(each.nbytes for of_layer in sums.values() for each in of_layer)
            gradients = sum(p.nbytes for p in parameters)
            chunk = _chunk(sizes, held, len(inputs), gradients)
        else:
            chunk = max(1, max_batch_bytes // max(_beyond(sizes), 1))
        jacobians = list(self.jacobians.values())
        self.engine = Engine(
            model, sums, self.direct, jacobians, positions, chunk, forms.spread
        )

    def results(self) -> dict[str, Curvature]:
        """Return each structure's mean over all examples; call it once."""
        self.engine.finish()
        self.engine.check_finite()
        results = {name: self._result(name) for name in self.structures}
        for curvature in results.values():
            if (name := _not_finite(curvature)) is not None:
                raise self.engine.not_finite(name)
        return results

    def _result(self, structure: str) -> Curvature:
        count = self.engine.count
        if structure == "dense":
            return self.jacobians["dense"].mean(count)
        entries = self._others(count)
        parts: list[Curvature] = []
        for each in self.accumulators.values():
            part = each[structure].mean(count)
            if isinstance(part, Diagonal):
                entries |= part.diagonal()
            else:
                parts.append(part)
        if entries:
            ordered = {name: entries[name] for name in self.names if name in entries}
            parts.append(Diagonal(ordered))
        return parts[0] if structure == "diagonal" else BlockDiagonal(parts)

    def _others(self, count: int) -> dict[str, Tensor]:
        """Return the diagonal of all parameters outside of Kronecker layers."""
        entries: dict[str, Tensor] = {}
        for squares in self.direct.values():
            entries |= squares.sums.mean(count)
        if "others" in self.jacobians:
            entries |= self.jacobians["others"].mean(count).diagonal()
        return entries


def _not_finite(curvature: Curvature) -> str | None:
    """Return the first parameter with a curvature that is not finite, if any."""
    names: list[str] = []
    finite: list[Tensor] = []  # read in the end, at once
    for block in curvature.blocks():
        if block.kind == "Diagonal":
            named = {name: [value] for name, value in block.diagonal().items()}
        else:
            named = {next(iter(block.shapes)): block.tensors()}
        for name, tensors in named.items():
            names += [name] * len(tensors)
            finite += [all_finite(tensor) for tensor in tensors]
    flags = torch.stack(finite).tolist() if finite else []
    return next((n for n, fine in zip(names, flags, strict=True) if not fine), None)


def _check_size(sizes: list[int]) -> None:
    needed = 4 * sum(size**2 for size in sizes)
    if needed > _LARGEST:
        raise StructureError(
            f"dense matrices over up to {max(sizes)} parameters need "
            f"{needed / 1e9:.1f} GB in all: use structure='kfac', 'ekfac' or "
            "'diagonal'"
        )


def _form(structure: str, layer: KroneckerLayer) -> str:
    """Return a layer's structure: a diagonal if its factors would be too large."""
    large = max(layer.matrices().shape[1:]) > LARGEST_FACTOR
    return "diagonal" if large and structure in ("kfac", "ekfac") else structure


def _beyond(sizes: list["_Bytes"]) -> int:
    """Return the bytes that an example takes beyond its forward pass."""
    return sum(each.kept for each in sizes) + max(
        (each.passing for each in sizes), default=0
    )


def _chunk(sizes: list["_Bytes"], held: int, examples: int, gradients: int) -> int:
    """Return how many examples take about as much memory as a training step.

    Beside them the sums are held; a step holds all of a batch's examples and the
    gradients.
    """
    forward, beyond = sum(each.forward for each in sizes), _beyond(sizes)
    step = max(_SHARE * (examples * forward + gradients), _LEAST)
    return max(_FEWEST, int((step - held) / max(forward + beyond, 1)))


class _Bytes(NamedTuple):
    """The bytes that an example takes at one layer.

    A step keeps each layer's input and output, and as much again in what lies between
    layers: `forward`. Here come its gradient and the columns that are paired with it,
    which are `kept` until all layers have theirs; `passing` are columns that are looked
    at layer by layer and, for some structures, the gradient of the weight.
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
