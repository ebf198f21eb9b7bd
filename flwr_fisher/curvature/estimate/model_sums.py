"""A model's sums over examples, and how many examples fit beside them in memory."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.data import Inputs
from flwr_fisher.curvature.estimate.accumulators import LayerAccumulator, diagonal_of
from flwr_fisher.curvature.estimate.forms import Forms
from flwr_fisher.curvature.estimate.jacobians import DiagonalJacobian
from flwr_fisher.curvature.estimate.layers import Positions, SquaredGradients
from flwr_fisher.curvature.estimate.options import LARGEST_FACTOR
from flwr_fisher.curvature.operators.base import BlockDiagonal, Curvature, Diagonal
from flwr_fisher.curvature.structures import STRUCTURES
from flwr_fisher.params import trainable, trainable_names


@dataclass(frozen=True)
class ModelSums:
    """The sums from which a structure's curvature is made.

    Parameters
    ----------
    names : list[str]
        The trained parameters' names, in the model's order.
    accumulators : dict[str, LayerAccumulator]
        Of each layer with a Kronecker form.
    direct : SquaredGradients
        Of all norms and embeddings.
    others : DiagonalJacobian | None
        Of the diagonal of all other parameters, if there are any.
    """

    names: list[str]
    accumulators: dict[str, LayerAccumulator]
    direct: SquaredGradients
    others: DiagonalJacobian | None

    def mean(self, count: int) -> Curvature:
        """Return the mean over so many examples; the sums are used up."""
        entries = self.direct.mean(count) if self.direct.layers else {}
        if self.others is not None:
            entries |= self.others.mean(count).diagonal()
        parts: list[Curvature] = []
        if totals := self.totals():
            torch._foreach_div_(totals, count)
        for each in self.accumulators.values():
            part = each.result()
            if isinstance(part, Diagonal):
                entries |= part.diagonal()
            else:
                parts.append(part)
        if entries:
            ordered = {name: entries[name] for name in self.names if name in entries}
            parts.append(Diagonal(ordered))
        only_diagonal = len(parts) == 1 and isinstance(parts[0], Diagonal)
        return parts[0] if only_diagonal else BlockDiagonal(parts)

    def totals(self) -> list[Tensor]:
        """Return the sums of all accumulators."""
        return [total for each in self.accumulators.values() for total in each.totals]


def make_sums(
    model: nn.Module,
    inputs: Inputs,
    structure: str,
    weight_sharing: str = "expand",
    max_bytes: int | None = None,
) -> tuple[Forms, ModelSums]:
    """Return the form of each parameter, and empty sums for them.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    inputs : Inputs
        The first batch, which decides how each layer is computed.
    structure : str
        One of :data:`STRUCTURES`. A layer that is too large for its matrices has its
        diagonal.
    weight_sharing : str
        ``"expand"`` or ``"reduce"``: what K-FAC does with several positions.
    max_bytes : int, optional
        As for :meth:`Forms.of`.

    Raises
    ------
    StructureError
        If an example's outputs are not its own.
    """
    forms = Forms.of(model, inputs, max_bytes)
    chosen = STRUCTURES[structure]
    accumulators = {
        name: diagonal_of(layer)
        if max(layer.shape[1:]) > LARGEST_FACTOR
        else chosen.accumulator(layer, weight_sharing)
        for name, layer in forms.layers.items()
    }
    direct = SquaredGradients(forms.direct)
    others = DiagonalJacobian(model, forms.others) if forms.others else None
    return forms, ModelSums(trainable_names(model), accumulators, direct, others)


_SHARE = 1.1  # of a training step's memory, by estimate, that may be taken
_LEAST = 2**26  # bytes that may be taken even if a step takes less
# The same on devices other than the CPU, in addition to the sums. There each part of a
# batch costs the kernel launches of a pass, however few examples the part has.
_LEAST_ELSEWHERE = 2**30
_FEWEST = 8  # examples at once, unless the caller bounds the memory


class Room(NamedTuple):
    """How much memory examples may take, and what one takes.

    Parameters
    ----------
    total : int
        The bytes that all examples may take.
    each : int
        The bytes that one takes in a forward and a backward pass.
    held : int
        What one takes for each backward pass whose gradients are added later.
    fewest : int
        Examples at once, even if they take more.
    """

    total: int
    each: int
    held: int
    fewest: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        forms: Forms,
        sums: ModelSums,
        positions: Positions,
        batch_size: int,
        max_batch_bytes: int | None,
    ) -> "Room":
        """Return how many examples, and how many passes of them, fit in memory.

        By default they take about as much memory as a training step, which holds all of
        a batch's examples and the gradients, or 64 MiB if that is more. The examples
        and the sums together take no more than that. On a device other than the CPU the
        examples may take at least 1 GiB, and the sums take their memory in addition.

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
        sizes = [
            _bytes(forms.inputs[name], accumulator, positions)
            for name, accumulator in sums.accumulators.items()
        ]
        for name, layer in sums.direct.layers.items():
            entries = layer.entries(forms.inputs[name])
            size = entries * layer.parameters()[0].element_size()
            wide = entries * layer.dtype.itemsize
            sizes.append(_Bytes(4 * size, 2 * wide, wide, 0))
        passing = max((each.passing for each in sizes), default=0)
        beyond = sum(each.kept for each in sizes) + passing
        later = sum(each.held for each in sizes)
        if max_batch_bytes is not None:
            return cls(max_batch_bytes, beyond, later, 1)
        held = sum(total.nbytes for total in sums.totals())
        parameters = [*trainable(model).values()]
        on_cpu = all(p.device.type == "cpu" for p in parameters)
        gradients = sum(p.nbytes for p in parameters)
        forward = sum(each.forward for each in sizes)
        step = max(_SHARE * (batch_size * forward + gradients), _LEAST)
        total = step - held if on_cpu else max(step - held, _LEAST_ELSEWHERE)
        return cls(int(total), forward + beyond, later, _FEWEST)

    @property
    def examples(self) -> int:
        """The largest number of examples to run at once."""
        return max(self.fewest, self.total // max(self.each, 1))

    def passes(self, examples: int) -> int:
        """Return of how many passes so many examples' gradients may be held."""
        left = self.total - examples * self.each
        return max(1, left // max(examples * self.held, 1))


class _Bytes(NamedTuple):
    """The bytes that an example takes at one layer, by how long they are held.

    - `forward`: a training step's. It keeps each layer's input and output, and as much
      again in what lies between layers.
    - `kept`: held until the backward pass ends. These are the output's gradient, and
      the input's columns that are paired with it.
    - `passing`: held for one layer at a time: columns that are needed without
      gradients.
    - `held`: the gradient's columns, of the positions that count, until those of
      several passes are added.
    """

    forward: int
    kept: int
    passing: int
    held: int


def _bytes(inputs: Tensor, sums: LayerAccumulator, positions: Positions) -> _Bytes:
    """Return an example's bytes at a layer with a Kronecker form."""
    layer, paired = sums.layer, sums.takes_inputs
    sizes = layer.positions(inputs.shape)
    grid, _ = positions.of_inputs(sizes)
    columns = 0
    if paired or sums.observes:
        columns = layer.num_column_entries(inputs.shape, None if paired else grid)
    channels = len(layer.kernel)
    outputs = channels * math.prod(sizes)
    held = outputs if paired else channels * positions.most_of_gradients(sizes)
    kept, passing = outputs + paired * columns, (not paired) * columns
    return _Bytes(
        2 * (inputs[:1].numel() + outputs) * layer.kernel.element_size(),
        kept * layer.dtype.itemsize,
        passing * layer.dtype.itemsize,
        held * layer.dtype.itemsize,
    )
