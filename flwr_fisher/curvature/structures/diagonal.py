"""The exact diagonal as a structure."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flwr_fisher.curvature.estimate.accumulators import LayerAccumulator, diagonal_of
from flwr_fisher.curvature.estimate.layers import KroneckerLayer
from flwr_fisher.curvature.operators.base import Curvature, Diagonal
from flwr_fisher.curvature.structures.base import Form, Parts, Structure, register


@register
class DiagonalStructure(Structure):
    """The diagonal: exact, and as large as the model."""

    name = "diagonal"
    block = Diagonal
    tensors = {"": Form.VECTOR}  # noqa: RUF012

    def accumulator(
        self, layer: KroneckerLayer, weight_sharing: str
    ) -> LayerAccumulator:
        """Return the empty sums of squared gradients."""
        return diagonal_of(layer)

    def parts(self, block: Curvature) -> dict[str, Tensor]:
        """Return the entries of the block's only parameter."""
        assert isinstance(block, Diagonal)
        (entries,) = block.entries.values()
        return {"": entries}

    def block_of(
        self, name: str, shape: torch.Size, parts: Parts, bias: str | None
    ) -> Diagonal:
        """Return the diagonal of one parameter."""
        entries = parts[""]
        assert isinstance(entries, Tensor)
        return Diagonal({name: entries})

    def trace(self, traces: Mapping[str, Sequence[float]]) -> float:
        """Return the sum of the entries."""
        return sum(traces[""])
